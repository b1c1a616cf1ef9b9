"""
The process that saves for `AsyncCheckpointerType.PROCESS`: what it runs, and how the training process talks to it.

The process never communicates with other ranks. Plans and results return to the training process as bytes, which exchanges
them between the ranks. Tensors reach it in shared memory:

    message = bytes: the sizes of the storages; their file descriptors, some at a time; bytes: the pickled object

torch's own pickling hands each descriptor to a thread that keeps it open until the other process fetches it. If the other
process never does, because the message could not be sent or it died, the shared memory is lost. Here descriptors travel
through the socket itself, and the kernel closes those that are never received.
"""

from __future__ import annotations

import array
import contextlib
import gc
import io
import os
import pickle
import select
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
import torch.multiprocessing

from shardkeep.dcp._impl.driver import _Save, _storage_setup
from shardkeep.dcp._impl.planners import DefaultSavePlanner
from shardkeep.engine.process.rpc import (
    SLOWEST_BYTES_PER_S,
    ChildKind,
    ChildProcess,
    MultiprocessingProcess,
    Ready,
    WaitPolicy,
    no_wait,
    receive,
    send,
)
from shardkeep.engine.stagers import open_tensor, tensors_in
from shardkeep.errors import BrokenProtocol, CheckpointError, _wrap_exception, picklable_failure
from shardkeep.options import Options

_untyped: Final[Any] = torch.multiprocessing
_MOST_DESCRIPTORS: Final = 200
"""File descriptors in one message of the socket; Linux allows 253."""


# -- messages ----------------------------------------------------------------------------------------------------------


class NoHandles(CheckpointError, OSError):
    """A message arrived, but the shared memory of its tensors could not be opened."""


class TensorMessage:
    """A pickled object, and the storages of its tensors."""

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(value)
        self._data = file.getbuffer()
        self._storages = pickler.storages

    def send(self, pipe: socket.socket, ready: Ready = no_wait) -> None:
        """Send the message. The storages must not be freed before the other process has answered."""
        descriptors, sizes = [], []
        for storage in self._storages:
            descriptor, size = storage._share_fd_cpu_()
            descriptors.append(descriptor)
            sizes.append(size)
        send(pipe, pickle.dumps(sizes), ready)
        for start in range(0, len(descriptors), _MOST_DESCRIPTORS):
            some = array.array("i", descriptors[start : start + _MOST_DESCRIPTORS])
            sent = 0
            while not sent:
                ready(select.POLLOUT)
                with contextlib.suppress(BlockingIOError):
                    sent = pipe.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)], socket.MSG_NOSIGNAL)
        send(pipe, self._data, ready)


def receive_message(pipe: socket.socket) -> Callable[[], Any]:
    """
    Wait for a message, and return a function that unpickles it.

    Whatever that function raises, the whole message has been read and the socket is ready for the next one.

    Raises:
        EOFError, OSError: the socket was closed.

    """
    sizes: list[int] = pickle.loads(receive(pipe))
    storages: list[Any] = []
    failures: list[Exception] = []
    for start in range(0, len(sizes), _MOST_DESCRIPTORS):
        try:
            storages += _receive_storages(pipe, sizes[start : start + _MOST_DESCRIPTORS])
        except (NoHandles, RuntimeError) as error:
            failures.append(error)  # raised when the whole message has been read
    data = receive(pipe)

    def unpickle() -> Any:
        if failures:
            raise failures[0]
        return _Unpickler(io.BytesIO(data), storages).load()

    return unpickle


def _receive_storages(pipe: socket.socket, sizes: list[int]) -> list[Any]:
    """Receive the descriptors of some storages, and map them."""
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(len(sizes) * descriptors.itemsize)
    data, extras, _, _ = pipe.recvmsg(1, space, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    if not data:
        raise EOFError("the socket was closed")
    for level, kind, raw in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(raw[: len(raw) - len(raw) % descriptors.itemsize])
    try:
        if len(descriptors) != len(sizes):
            raise NoHandles(
                f"{len(descriptors)} of {len(sizes)} pieces of shared memory could be opened",
                hint="allow more open files (ulimit -n)",
            )
        storage: Any = torch.UntypedStorage
        # The storage duplicates the descriptor.
        return [storage._new_shared_fd_cpu(each, size) for each, size in zip(descriptors, sizes, strict=True)]
    finally:
        for each in descriptors:
            os.close(each)


class _Pickler(ForkingPickler):
    """Collects the storages of tensors in host memory; pickles everything else as torch does."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        if "file_descriptor" in _untyped.get_all_sharing_strategies():
            inherited: Any = self.dispatch_table
            self.dispatch_table = {**inherited, torch.UntypedStorage: self._collect}

    def _collect(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or storage.nbytes() == 0:
            return _untyped.reductions.reduce_storage(storage)
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            storage._share_fd_cpu_()  # moves it to shared memory if it is not there; fails here if there is no room
            self.storages.append(storage)
        return numbered_storage, (number,)


class _Unpickler(pickle.Unpickler):
    """Finds the storages that came with a message."""

    def __init__(self, file: io.BytesIO, storages: list[Any]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names."""
        if (module, name) == (__name__, numbered_storage.__name__):
            return self._storages.__getitem__
        return super().find_class(module, name)


def numbered_storage(number: int) -> torch.UntypedStorage:
    """Stand in pickles for the storage of that number in the message."""
    raise pickle.UnpicklingError(f"storage {number} came with a message, and is not here")


# -- in the process that saves -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankInWorld:
    """The rank and world size that planners and writers see."""

    rank: int
    size: int


@dataclass(frozen=True)
class StagedSave:
    """The arguments of a save."""

    state: Any
    checkpoint_id: Any
    storage_writer: Any
    planner: Any
    rank: int
    is_coordinator: bool
    use_collectives: bool


@dataclass(frozen=True)
class StepResult:
    """The result of a step, or the error it raised."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def serve(pipe: socket.socket, world: RankInWorld | None) -> None:
    """Run the steps that are requested through the socket, until it is closed."""
    # Ctrl-C reaches all processes of a terminal; the training process decides what happens to a save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.setblocking(True)  # the main module may have set a default timeout for sockets
    server = _SaveServer()
    try:
        if world is not None:
            _set_up_ranks(world)
        gc.freeze()  # modules are never freed: collecting all of torch takes 0.2 s, before and after every save
        send(pipe, pickle.dumps(StepResult()))
        while True:
            send(pipe, pickle.dumps(_run_step(receive_message(pipe), server)))
    except (EOFError, OSError):  # the training process is gone
        return


def _run_step(unpickle: Callable[[], Any], server: _SaveServer) -> StepResult:
    """Run a step. Whatever it raises is sent back, also an OSError of a connection of its own."""
    try:
        step, argument = unpickle()
        return StepResult(getattr(server, step)(argument))
    except BaseException as error:  # noqa: BLE001 - raised in the training process
        return StepResult(error=picklable_failure(_wrap_exception(error))[0], trace=traceback.format_exc())


class _SaveServer:
    """The steps of the save in progress."""

    def __init__(self) -> None:
        self._save: Any = None
        self._state: Any = None
        self._writer: Any = None

    def begin(self, request: StagedSave) -> None:
        """Set up a save."""
        self.forget(None)
        writer = _storage_setup(request.storage_writer, request.checkpoint_id)
        planner = DefaultSavePlanner() if request.planner is None else request.planner
        # A request has the attributes that `_Save` reads from its ranks.
        self._save = _Save(request, planner, writer, request.use_collectives)  # type: ignore[arg-type]
        self._state = request.state
        self._writer = writer

    def plan(self, _: None) -> bytes:
        """Return this rank's plan."""
        return pickle.dumps(self._save.plan(self._state))

    def decide(self, plans: list[bytes]) -> list[bytes]:
        """Return the plan of each rank."""
        return [pickle.dumps(plan) for plan in self._save.decide([pickle.loads(plan) for plan in plans])]

    def alone_s(self, _: None) -> float:
        """Return how many seconds the coordinator may still work when the other ranks are done."""
        return float(self._save.alone_s())

    def write(self, plan: bytes) -> bytes:
        """Write the items of a plan."""
        return pickle.dumps(self._save.write(pickle.loads(plan)))

    def finish(self, results: list[bytes]) -> bytes:
        """Commit the checkpoint, and return its metadata."""
        return pickle.dumps(self._save.finish([pickle.loads(result) for result in results]))

    def discard(self, _: None) -> None:
        """Remove what was written of a save that failed on another rank, if the writer can."""
        remove = getattr(self._writer, "_discard_written", None)
        if remove is not None:
            remove()

    def forget(self, _: None) -> None:
        """Release the state, because the training process reuses its memory."""
        self._save = self._state = self._writer = None
        gc.collect()


def _set_up_ranks(world: RankInWorld) -> None:
    """
    Initialize `torch.distributed` with this rank, because planners, writers and sharded tensors ask for it.

    The group has no backend, so a collective raises an error instead of waiting for ranks that are not there.
    """
    import torch.distributed as dist  # noqa: PLC0415 - only where there are ranks
    from torch._C._distributed_c10d import HashStore  # noqa: PLC0415

    class RanksOnly(dist.ProcessGroup):
        """Has a rank and a size, and cannot communicate."""

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return "shardkeep_ranks_only"

    def make(store: Any, rank: int, size: int, timeout: Any) -> RanksOnly:
        del store, timeout
        return RanksOnly(rank, size)  # type: ignore[call-arg]  # the stub has only the other overload

    dist.Backend.register_backend("shardkeep_ranks_only", make, devices=["cpu", "cuda"])
    dist.init_process_group("shardkeep_ranks_only", store=HashStore(), rank=world.rank, world_size=world.size)


# -- in the training process -------------------------------------------------------------------------------------------


class SaverDied(CheckpointError, RuntimeError):
    """The process that saves ended, or did not answer in time, before its work was done."""


class FromSaver(CheckpointError):
    """The traceback of an exception in the process that saves, as text."""


_KIND: Final = ChildKind(
    name="the process that saves",
    error=SaverDied,
    if_not_started='start training under `if __name__ == "__main__":` and not in a daemonic process, or save with '
    "AsyncCheckpointerType.THREAD",
    if_dead="the next save starts a new process; the kernel's log shows whether memory ran out",
    if_silent="the next save starts a new process; if the storage is only slow, set a larger SHARDKEEP_TIMEOUT_S",
)


class SaverProcess(ChildProcess):
    """The process that saves. It is started on any thread, then used by one thread at a time."""

    def __init__(self, world: RankInWorld | None) -> None:
        """
        Start the process.

        Args:
            world: its rank; None where there are no other ranks.

        Raises:
            SaverDied: it could not be started.

        """
        self.world = world
        self._ready = False

        def spawn(sockets: Sequence[socket.socket]) -> MultiprocessingProcess:
            process: Any = torch.multiprocessing.get_context("spawn").Process(
                target=serve, args=(sockets[1], world), daemon=True, name="shardkeep-saver"
            )
            process.start()
            return MultiprocessingProcess(process)

        super().__init__(spawn, pipes=1, kind=_KIND, started_errors=(AssertionError, RuntimeError, OSError))

    def wait_until_ready(self) -> None:
        """
        Wait until the process has imported what it needs.

        Raises:
            SaverDied: it ended, or took longer than `Options.timeout_s`.

        """
        if not self._ready:
            try:
                self.call(lambda _pipe, _ready: None, WaitPolicy(Options().timeout_s))
            except SaverDied as error:
                raise SaverDied(f"{error.message} in step 'start'", hint=_KIND.if_not_started) from error
            self._ready = True

    def ask(self, step: str, argument: Any = None, *, more_s: float = 0.0) -> Any:
        """
        Run a step in the process, and return its result.

        Args:
            step: the name of a method of the server.
            argument: its argument.
            more_s: how much longer than `Options.timeout_s` the step may take.

        Raises:
            SaverDied: the process ended, or did not answer in time.
            BaseException: what the step raised there.

        """
        try:
            message = TensorMessage((step, argument))
        except Exception as error:
            raise BrokenProtocol(
                f"a save cannot be sent to the process that saves: {error}",
                hint="the state, the storage writer and the planner are pickled; or use AsyncCheckpointerType.THREAD",
            ) from error
        try:
            result: StepResult = pickle.loads(self.call(message.send, WaitPolicy(Options().timeout_s), more_s=more_s))
        except SaverDied as error:
            raise SaverDied(f"{error.message} in step {step!r}", hint=error.hint) from error
        if result.error is not None:
            raise result.error from FromSaver(result.trace)
        return result.value


class RemoteSave:
    """The steps of a save that the other process runs. Plans and results are exchanged as bytes."""

    def __init__(self, saver: SaverProcess, request: StagedSave) -> None:
        self._saver = saver
        self._request = request
        parts: Any = (part for tensor in tensors_in(request.state) for part in open_tensor(tensor).parts)
        nbytes = sum(part.numel() * part.element_size() for part in parts)
        self._more_s = nbytes / SLOWEST_BYTES_PER_S

    def plan(self) -> bytes:
        """Send the state, and return this rank's plan."""
        self._saver.ask("begin", self._request)
        plan: bytes = self._saver.ask("plan")
        return plan

    def decide(self, plans: list[bytes]) -> list[bytes]:
        """Return the plan of each rank."""
        decided: list[bytes] = self._saver.ask("decide", plans)
        return decided

    def write(self, plan: bytes) -> bytes:
        """Write the items of a plan."""
        written: bytes = self._saver.ask("write", plan, more_s=self._more_s)
        return written

    def alone_s(self) -> float:
        """Return how many seconds the coordinator may still work when the other ranks are done; after `decide`."""
        seconds: float = self._saver.ask("alone_s")
        return seconds

    def finish(self, results: list[bytes], *, alone_s: float) -> bytes:
        """Commit the checkpoint, and return its metadata."""
        finished: bytes = self._saver.ask("finish", results, more_s=self._more_s + alone_s)
        return finished

    def discard(self) -> None:
        """Remove what was written of a failed save, if the process is alive."""
        if self._saver.alive():
            self._saver.ask("discard")

    def forget(self) -> None:
        """Release the state in the process, if it is alive."""
        if self._saver.alive():
            self._saver.ask("forget")
