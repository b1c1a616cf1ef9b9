"""
The process that saves for `AsyncCheckpointerType.PROCESS` where a writer or a planner is the user's.

The process never communicates with other ranks: plans and results return to the training process as bytes, which exchanges
them between the ranks. A save is pickled, and its tensors reach the process in a memory file, which is freed when the last
process that has it ends or lets go of it. Each storage is let go when it is in the file, so that memory holds the state once.
"""

from __future__ import annotations

import errno
import gc
import io
import mmap
import os
import pickle
import select
import signal
import socket
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
import torch.multiprocessing

from shardkeep.dcp._impl.driver import _Save, _storage_setup
from shardkeep.engine.process import rpc
from shardkeep.errors import BrokenProtocol, CheckpointError, _wrap_exception, picklable_failure
from shardkeep.options import Options
from shardkeep.storage.buffers import view_memory

_untyped: Final[Any] = torch.multiprocessing
_ALIGNMENT: Final = 64
_MOST_WRITTEN: Final = 1 << 30
_MORE_FILES: Final = "allow more open files (ulimit -n)"


# -- objects with tensors ----------------------------------------------------------------------------------------------


class _Storages:
    """The storages of tensors in host memory that a pickle refers to; everything else is pickled as torch does."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        """By their address: the offset of each in the memory file, and itself."""
        self.nbytes = 0

    def dump(self, box: list[Any]) -> bytes:
        """Pickle the object in a box."""
        stream = io.BytesIO()
        pickler = ForkingPickler(stream)
        inherited: Any = pickler.dispatch_table
        pickler.dispatch_table = {**inherited, torch.UntypedStorage: self._collect}
        pickler.dump(box.pop())
        # The pickler ends here, and with it all references to tensors but those in `storages`. Its `clear_memo` must not be called:
        # torch releases the interpreter's lock to free a tensor, and another thread's garbage collection would see half a memo.
        return stream.getvalue()

    def _collect(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or storage.nbytes() == 0:
            return _untyped.reductions.reduce_storage(storage)
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = self.nbytes, storage
            self.nbytes += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        return storage_at, (self.storages[storage._cdata][0], storage.nbytes())


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, memory: int) -> None:
        super().__init__(io.BytesIO(data))
        self._memory = mmap.mmap(memory, 0) if os.fstat(memory).st_size else mmap.mmap(-1, 1)

    def find_class(self, module: str, name: str) -> Any:
        return self._storage if (module, name) == (__name__, storage_at.__name__) else super().find_class(module, name)

    def _storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


def storage_at(offset: int, nbytes: int) -> torch.UntypedStorage:
    """Stand in pickles for a storage in the memory file."""
    raise pickle.UnpicklingError(f"the {nbytes} bytes at {offset} are in a memory file, which is not here")


def pickle_with_tensors(box: list[Any]) -> tuple[bytes, int, int]:
    """Pickle the object in a box; return the pickle, the descriptor of a new file with its tensors, and how large that is."""
    found = _Storages()
    pickled = found.dump(box)
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("shardkeep-state", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    try:
        os.ftruncate(memory, found.nbytes)
        while found.storages:
            _, (offset, storage) = found.storages.popitem()
            view, at = view_memory(storage.data_ptr(), storage.nbytes()), 0
            while at < len(view):
                at += os.pwrite(memory, view[at : at + _MOST_WRITTEN], offset + at)
            del storage
    except BaseException:
        os.close(memory)
        raise
    return pickled, memory, found.nbytes


# -- in the process that saves -----------------------------------------------------------------------------------------


RankAndSize = tuple[int, int]
"""The rank and world size that planners and writers see."""


@dataclass(frozen=True)
class StagedSave:
    """The arguments of a save; with the attributes that `_Save` reads from its ranks."""

    state: Any
    checkpoint_id: Any
    storage_writer: Any
    planner: Any
    rank: int
    is_coordinator: bool
    use_collectives: bool


@dataclass(frozen=True)
class _StepResult:
    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def serve(pipe: socket.socket, world: RankAndSize | None) -> None:
    """Run the steps that are requested through the socket, until it is closed."""
    # Ctrl-C reaches all processes of a terminal; the training process decides what happens to a save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.setblocking(True)  # the main module may have set a default timeout for sockets
    server = _SaveServer()
    try:
        if world is not None:
            _set_up_ranks(world)
        gc.freeze()  # modules are never freed: collecting all of torch takes 0.2 s, before and after every save
        rpc.send(pipe, pickle.dumps(_StepResult()))
        while True:
            step, given = pickle.loads(rpc.receive(pipe))
            memory = socket.recv_fds(pipe, 1, 1)[1] if step == "begin" else []
            try:
                result = _StepResult(server.run(step, given, memory))
            except BaseException as error:  # noqa: BLE001 - raised in the training process
                result = _StepResult(error=picklable_failure(_wrap_exception(error))[0], trace=traceback.format_exc())
            for each in memory:
                os.close(each)  # it is mapped
            rpc.send(pipe, pickle.dumps(result))
    except (EOFError, OSError):  # the training process is gone
        return


class _SaveServer:
    """The steps of the save in progress."""

    _save: Any = None

    def run(self, step: str, given: tuple[Any, ...], memory: list[int]) -> Any:
        """Run a step of `_Save`; plans and results, alone or in a list, come and go as bytes."""
        if step in ("begin", "forget"):
            self._save = None
            gc.collect()
            return self._begin(*given, *memory) if step == "begin" else None
        made = getattr(self._save, step)(
            *(list(map(pickle.loads, each)) if isinstance(each, list) else pickle.loads(each) for each in given)
        )
        return [pickle.dumps(plan) for plan in made] if step == "decide" else pickle.dumps(made)

    def _begin(self, data: bytes, memory: int | None = None) -> None:
        if memory is None:
            raise BrokenProtocol("the process that saves could not open the state", hint=_MORE_FILES)
        request: StagedSave = _Unpickler(data, memory).load()
        writer = _storage_setup(request.storage_writer, request.checkpoint_id)
        self._save = _Save(request, lambda: request.state, writer, request.planner, request.use_collectives)


def _set_up_ranks(world: RankAndSize) -> None:
    """Give this process its rank, which planners and sharded tensors ask for; a collective is an error."""
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
    dist.init_process_group("shardkeep_ranks_only", store=HashStore(), rank=world[0], world_size=world[1])


# -- in the training process -------------------------------------------------------------------------------------------


class SaverDied(CheckpointError, RuntimeError):
    """The process that saves ended, or did not answer in time, before its work was done."""


class FromSaver(CheckpointError):
    """The traceback of an exception in the process that saves, as text."""


_KIND: Final = rpc.ChildKind(
    name="the process that saves",
    error=SaverDied,
    if_not_started='start training under `if __name__ == "__main__":` and not in a daemonic process, or save with '
    "AsyncCheckpointerType.THREAD",
    if_dead="the next save starts a new process; the kernel's log shows whether memory ran out",
    if_silent="the next save starts a new process; if the storage is only slow, set a larger SHARDKEEP_TIMEOUT_S",
)


class SaverProcess(rpc.ChildProcess):
    """The process that saves. It is started on any thread, then used by one thread at a time."""

    def __init__(self, world: RankAndSize | None) -> None:
        """Start the process with its rank, None where there are no other ranks; raises SaverDied if that fails."""
        self.world = world
        self._ready = False

        def spawn(sockets: Sequence[socket.socket]) -> rpc.MultiprocessingProcess:
            process: Any = torch.multiprocessing.get_context("spawn").Process(
                target=serve, args=(sockets[1], world), daemon=True, name="shardkeep-saver"
            )
            process.start()
            return rpc.MultiprocessingProcess(process)

        super().__init__(spawn, pipes=1, kind=_KIND, started_errors=(AssertionError, RuntimeError, OSError))

    def wait_until_ready(self) -> None:
        """Wait until the process has imported what it needs; raises SaverDied if it ended, or takes too long."""
        if not self._ready:
            try:
                self.call(lambda _pipe, _ready: None, rpc.WaitPolicy(Options().timeout_s))
            except SaverDied as error:
                raise SaverDied(f"{error.message} in step 'start'", hint=_KIND.if_not_started) from error
            self._ready = True

    def ask(self, step: str, *given: Any, memory: int | None = None, more_s: float = 0.0) -> Any:
        """Run a step in the process, with `more_s` more seconds; return its result, or raise its error or SaverDied."""
        message = pickle.dumps((step, given))

        def send_request(pipe: socket.socket, ready: rpc.Ready) -> None:
            rpc.send(pipe, message, ready)
            sent = memory is None
            while not sent:
                ready(select.POLLOUT)
                with suppress(BlockingIOError):
                    sent = socket.send_fds(pipe, [b"\0"], [memory], socket.MSG_NOSIGNAL) > 0  # type: ignore[list-item]

        try:
            reply = self.call(send_request, rpc.WaitPolicy(Options().timeout_s), more_s=more_s)
        except SaverDied as error:
            raise SaverDied(f"{error.message} in step {step!r}", hint=error.hint) from error
        result: _StepResult = pickle.loads(reply)
        if result.error is not None:
            raise result.error from FromSaver(result.trace)
        return result.value


class RemoteSave:
    """The steps of a save, as those of `_Save`, in the other process. Plans and results are bytes."""

    finishing = True
    """Only the process knows whether a coordinator that failed has committed."""

    def __init__(self, saver: SaverProcess, request: StagedSave) -> None:
        self._saver = saver
        self._request = [request]
        self._more_s = 0.0

    def plan(self) -> Any:
        """Send the state, and return this rank's plan."""
        try:
            data, memory, nbytes = pickle_with_tensors(self._request)
        except Exception as error:
            hint = "the state, the storage writer and the planner are pickled; or use AsyncCheckpointerType.THREAD"
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                hint = _MORE_FILES
            raise BrokenProtocol(f"a save cannot be sent to the process that saves: {error}", hint=hint) from error
        self._more_s = nbytes / rpc.SLOWEST_BYTES_PER_S
        try:
            self._saver.ask("begin", data, memory=memory)
        finally:
            os.close(memory)
        return self._saver.ask("plan")

    def decide(self, plans: list[bytes]) -> Any:
        """Return the plan of each rank."""
        return self._saver.ask("decide", plans)

    def alone_s(self) -> Any:
        """Return how many seconds the coordinator may still work when the other ranks are done."""
        return pickle.loads(self._saver.ask("alone_s"))

    def write(self, plan: bytes) -> Any:
        """Write the items of a plan."""
        return self._saver.ask("write", plan, more_s=self._more_s)

    def supersede_common(self) -> None:
        """Remove the metadata of all ranks together, where each rank has written its own."""
        self._saver.ask("supersede_common")

    def finish(self, results: list[bytes], alone_s: float) -> Any:
        """Commit the checkpoint, and return its metadata."""
        return self._saver.ask("finish", results, more_s=self._more_s + alone_s)

    def discard(self) -> None:
        """Remove what was written of a failed save, if the process is alive."""
        with suppress(SaverDied):
            self._saver.ask("discard")

    def forget(self) -> None:
        """Release the state in the process, if it is alive."""
        with suppress(SaverDied):
            self._saver.ask("forget")
