"""
Messages to another process of this machine, in which tensors travel as handles to the memory they lie in.

torch's own way hands each handle to a thread that keeps it open until the other process asks for it: what is never
asked for, because the message could not be sent or the process died, stays in shared memory for good. Here handles go
through the pipe itself, where the kernel closes them if nobody takes them.

    message = bytes: the sizes of the storages; their handles, some at a time; bytes: the pickled object
"""

from __future__ import annotations

import array
import gc
import io
import multiprocessing.connection
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.multiprocessing

from shardkeep.dcp._impl.calls import _storage_setup
from shardkeep.dcp._impl.driver import _Save
from shardkeep.dcp._impl.planners import DefaultSavePlanner
from shardkeep.errors import BrokenProtocol, CheckpointError, _wrap_exception, picklable_failure

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


_untyped: Final[Any] = torch.multiprocessing
_AT_ONCE: Final = 200
"""Handles in one piece; Linux takes up to 253."""


class NoHandles(CheckpointError, OSError):
    """A message arrived, and the memory that its tensors lie in could not be opened."""


class TensorMessage:
    """An object, pickled, and the storages of its tensors."""

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        pickler = _Packing(file)
        pickler.dump(value)
        self._data = file.getbuffer()
        self._storages = pickler.storages

    def send(self, pipe: Connection) -> None:
        """Send it; the storages must stay where they are until the other process has answered."""
        handles, sizes = [], []
        for storage in self._storages:
            handle, size = storage._share_fd_cpu_()  # the storage's own
            handles.append(handle)
            sizes.append(size)
        pipe.send_bytes(pickle.dumps(sizes))
        if handles:
            with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as through:
                for start in range(0, len(handles), _AT_ONCE):
                    some = array.array("i", handles[start : start + _AT_ONCE])
                    through.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, some)])
        pipe.send_bytes(self._data)


def receive_message(pipe: Connection) -> Callable[[], Any]:
    """
    Wait for a message, and return what unpickles it: whatever that raises, the pipe is ready for the next message.

    Raises:
        EOFError, OSError: the pipe has ended.

    """
    sizes: list[int] = pickle.loads(pipe.recv_bytes())
    storages: list[Any] = []
    problems: list[Exception] = []
    if sizes:
        with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as through:
            for start in range(0, len(sizes), _AT_ONCE):
                try:
                    storages += _opened(through, sizes[start : start + _AT_ONCE])
                except (NoHandles, RuntimeError) as error:
                    problems.append(error)  # raised once the whole message is here
    data = pipe.recv_bytes()

    def unpack() -> Any:
        if problems:
            raise problems[0]
        return _Unpacking(io.BytesIO(data), storages).load()

    return unpack


def _opened(through: socket.socket, sizes: list[int]) -> list[Any]:
    """Receive the handles of some storages, and map them."""
    handles = array.array("i")
    space = socket.CMSG_SPACE(len(sizes) * handles.itemsize)
    letter, extras, _, _ = through.recvmsg(1, space, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    if not letter:
        raise EOFError("the pipe has ended")
    for level, kind, data in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            handles.frombytes(data[: len(data) - len(data) % handles.itemsize])
    try:
        if len(handles) != len(sizes):
            raise NoHandles(
                f"{len(handles)} of {len(sizes)} pieces of shared memory could be opened",
                hint="allow more open files (ulimit -n)",
            )
        storage: Any = torch.UntypedStorage
        # The storage duplicates the handle.
        return [storage._new_shared_fd_cpu(handle, size) for handle, size in zip(handles, sizes, strict=True)]
    finally:
        for handle in handles:
            os.close(handle)


class _Packing(ForkingPickler):
    """Sets the storages of tensors in host memory aside; all else goes as torch has it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        if "file_descriptor" in _untyped.get_all_sharing_strategies():
            inherited: Any = self.dispatch_table
            self.dispatch_table = {**inherited, torch.UntypedStorage: self._set_aside}

    def _set_aside(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or storage.nbytes() == 0:
            return _untyped.reductions.reduce_storage(storage)
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            storage._share_fd_cpu_()  # moves one there that is not in shared memory, and fails here if there is no room
            self.storages.append(storage)
        return numbered_storage, (number,)


class _Unpacking(pickle.Unpickler):
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


# What runs in the process that saves: it takes orders from the process that trains, one step of a save at a time.
#
# It never talks to other ranks. Plans and results go back to the training process as bytes, which carries them
# between
# the ranks; states come in shared memory. It ends when the training process does.


@dataclass(frozen=True)
class RankInWorld:
    """A rank among others, as a planner or a writer may ask for it."""

    rank: int
    size: int


@dataclass(frozen=True)
class SaveRequest:
    """What begins a save."""

    state: Any
    checkpoint_id: Any
    storage_writer: Any
    planner: Any
    rank: int
    is_coordinator: bool
    use_collectives: bool


@dataclass(frozen=True)
class StepResult:
    """How a step ended."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def serve(pipe: Connection, world: RankInWorld | None) -> None:
    """Carry out what is asked for through the pipe, until it is closed."""
    # Ctrl-C reaches all processes of a terminal; the one that trains decides what becomes of a save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    served = _Served()
    try:
        if world is not None:
            _set_up_ranks(world)
        gc.freeze()  # modules stay: to go through all of torch takes a fifth of a second, before and after every save
        _answer(pipe, StepResult())
        while True:
            _answer(pipe, _tried(receive_message(pipe), served))
    except (EOFError, OSError):  # the training process is gone
        return


def _answer(pipe: Connection, answer: StepResult) -> None:
    pipe.send_bytes(pickle.dumps(answer))


def _tried(unpack: Callable[[], Any], served: _Served) -> StepResult:
    """Carry out a step. Whatever it raises is an answer, a connection that broke in it too."""
    try:
        step, argument = unpack()
        return StepResult(getattr(served, step)(argument))
    except BaseException as error:  # noqa: BLE001 - raised in the training process
        trace = traceback.format_exc()
        return StepResult(error=picklable_failure(_wrap_exception(error))[0], trace=trace)


class _Served:
    """The save that is under way."""

    def __init__(self) -> None:
        self._save: Any = None
        self._state: Any = None
        self._writer: Any = None

    def begin(self, order: SaveRequest) -> None:
        """Set up a save."""
        self.forget(None)
        writer = _storage_setup(order.storage_writer, order.checkpoint_id)
        planner = DefaultSavePlanner() if order.planner is None else order.planner
        # An order says of itself what a save asks of its ranks.
        self._save = _Save(order, planner, writer, order.use_collectives)  # type: ignore[arg-type]
        self._state = order.state
        self._writer = writer

    def plan(self, _: None) -> bytes:
        """Return this rank's plan."""
        return pickle.dumps(self._save.plan(self._state))

    def decide(self, plans: list[bytes]) -> list[bytes]:
        """Return the plan of each rank."""
        return [pickle.dumps(plan) for plan in self._save.decide([pickle.loads(plan) for plan in plans])]

    def write(self, plan: bytes) -> bytes:
        """Carry out a plan."""
        return pickle.dumps(self._save.write(pickle.loads(plan)))

    def finish(self, results: list[bytes]) -> bytes:
        """Complete the checkpoint, and return its metadata."""
        return pickle.dumps(self._save.finish([pickle.loads(result) for result in results]))

    def discard(self, _: None) -> None:
        """Remove what was written of a save that failed on another rank, if the writer can."""
        remove = getattr(self._writer, "_discard_written", None)
        if remove is not None:
            remove()

    def forget(self, _: None) -> None:
        """Let go of the state, whose memory the training process uses again."""
        self._save = self._state = self._writer = None
        gc.collect()


def _set_up_ranks(world: RankInWorld) -> None:
    """
    Let `torch.distributed` say which rank this is, as planners, writers and sharded tensors ask it.

    The group has no backend: a collective in here is an error, and not a wait for ranks that are not there.
    """
    import torch.distributed as dist  # noqa: PLC0415 - only where there are ranks
    from torch._C._distributed_c10d import HashStore  # noqa: PLC0415

    class RanksOnly(dist.ProcessGroup):
        """Knows who is there, and cannot talk to them."""

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return "shardkeep_ranks_only"

    def make(store: Any, rank: int, size: int, timeout: Any) -> RanksOnly:
        del store, timeout
        return RanksOnly(rank, size)  # type: ignore[call-arg]  # one of two ways, and the stub has the other

    dist.Backend.register_backend("shardkeep_ranks_only", make, devices=["cpu", "cuda"])
    dist.init_process_group("shardkeep_ranks_only", store=HashStore(), rank=world.rank, world_size=world.size)


# The training process's hold on the process that saves: started when needed, watched, replaced when it has died.

_HOW_TO_START: Final = (
    'start training under `if __name__ == "__main__":` and not in a daemonic process, or save with '
    "AsyncCheckpointerType.THREAD"
)


class SaverDied(CheckpointError, RuntimeError):
    """The process that saves ended before its work was done."""


class FromSaver(CheckpointError):
    """Where in the process that saves an exception was raised, as text."""


class SaverProcess:
    """A process that saves, spawned with a copy of nothing. Started on any thread, then used by one at a time."""

    def __init__(self, world: RankInWorld | None) -> None:
        """
        Start the process.

        Args:
            world: Which rank it is; None where there are no others.

        Raises:
            SaverDied: it could not be started.

        """
        # torch's, whose pipes carry tensors as handles to shared memory
        import torch.multiprocessing  # noqa: PLC0415 - most saves need none of this

        self.world = world
        self._ready = False
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, world), daemon=True, name="shardkeep-saver")
        try:
            self._process.start()
        except (AssertionError, RuntimeError, OSError) as error:
            raise SaverDied(
                f"the process that saves could not be started: {error}",
                hint=_HOW_TO_START,
            ) from error
        finally:
            theirs.close()  # so that the pipe ends with the process

    def wait_until_ready(self, timeout_s: float) -> None:
        """
        Wait until the process can work.

        Raises:
            SaverDied: it ended, or took too long.

        """
        if not self._ready:
            self._answer("start", timeout_s)
            self._ready = True

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._process.pid

    def alive(self) -> bool:
        """Say whether the process is there; may be asked by any thread."""
        return not multiprocessing.connection.wait([self._process.sentinel], 0)

    def ask(self, step: str, argument: Any = None) -> Any:
        """
        Have a step carried out, and return what it returned.

        Raises:
            SaverDied: the process ended; told as soon as it happens.
            BaseException: what the step raised there.

        """
        try:
            parcel = TensorMessage((step, argument))
        except Exception as error:
            raise BrokenProtocol(
                f"a save cannot be sent to the process that saves: {error}",
                hint="the state, the storage writer and the planner are pickled; or use AsyncCheckpointerType.THREAD",
            ) from error
        try:
            parcel.send(self._pipe)
        except OSError as error:
            raise self._died(step) from error
        return self._answer(step, None)

    def close(self) -> None:
        """End the process, at once if it does not end by itself."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(5)

    def _answer(self, step: str, timeout_s: float | None) -> Any:
        ready = multiprocessing.connection.wait([self._pipe, self._process.sentinel], timeout_s)
        if not ready:
            self._process.terminate()
            raise SaverDied(f"the process that saves did not answer within {timeout_s:g} s, in step {step!r}")
        try:
            if not self._pipe.poll():
                raise self._died(step)
            answer: StepResult = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died(step) from error
        if answer.error is not None:
            raise answer.error from FromSaver(answer.trace)
        return answer.value

    def _died(self, step: str) -> SaverDied:
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()  # half a message is no way to go on
            self._process.join(5)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        return SaverDied(
            f"the process that saves (pid {self.pid}) {how} in step {step!r}",
            hint=_HOW_TO_START if step == "start" else "the next save starts a new one; was there too little memory?",
        )


class RemoteSave:
    """The steps of a save that another process makes; what passes between them is bytes."""

    def __init__(self, saver: SaverProcess, order: SaveRequest) -> None:
        self._saver = saver
        self._order = order

    def plan(self) -> bytes:
        """Begin, and return this rank's plan."""
        self._saver.ask("begin", self._order)
        plan: bytes = self._saver.ask("plan")
        return plan

    def decide(self, plans: list[bytes]) -> list[bytes]:
        """Return the plan of each rank."""
        decided: list[bytes] = self._saver.ask("decide", plans)
        return decided

    def write(self, plan: bytes) -> bytes:
        """Carry out a plan."""
        written: bytes = self._saver.ask("write", plan)
        return written

    def finish(self, results: list[bytes]) -> bytes:
        """Complete the checkpoint, and return its metadata."""
        finished: bytes = self._saver.ask("finish", results)
        return finished

    def discard(self) -> None:
        """Have what was written of a failed save removed, if the process still lives."""
        if self._saver.alive():
            self._saver.ask("discard")

    def forget(self) -> None:
        """Let the process drop the state, if it still lives."""
        if self._saver.alive():
            self._saver.ask("forget")
