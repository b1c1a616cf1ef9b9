"""
The process that saves for `AsyncCheckpointerType.PROCESS` where a writer or a planner is the user's.

The process never communicates with other ranks: plans and results return to the training process as bytes, which exchanges
them between the ranks. A save is pickled, and its tensors reach the process in a memory file, which is freed when the last
process that has it ends or lets go of it. Each storage is let go when it is in the file, so that memory holds the state once.
"""

from __future__ import annotations

import gc
import io
import mmap
import os
import pickle
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import IO, Any, Final, NamedTuple

import torch
import torch.multiprocessing

from shardkeep.dcp._impl.driver import _Save, _storage_setup
from shardkeep.engine.process import rpc
from shardkeep.errors import BrokenProtocol, CheckpointError, _wrap_exception, picklable_failure
from shardkeep.options import Options
from shardkeep.storage.buffers import view_memory

_ALIGNMENT: Final = 64
_MOST_WRITTEN: Final = 1 << 30


class _Pickler(ForkingPickler):
    """Leaves out the storages of tensors in host memory; everything else is pickled as torch does."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        """By their address: the offset of each in the memory file, and itself."""
        self.nbytes = 0

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        if not isinstance(obj, torch.UntypedStorage) or obj.device.type != "cpu" or obj.nbytes() == 0:
            return None
        if obj._cdata not in self.storages:
            self.storages[obj._cdata] = self.nbytes, obj
            self.nbytes += -(-obj.nbytes() // _ALIGNMENT) * _ALIGNMENT
        return self.storages[obj._cdata][0], obj.nbytes()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, memory: str) -> None:
        super().__init__(io.BytesIO(data))
        with open(memory, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def persistent_load(self, pid: Any) -> torch.UntypedStorage:
        offset, nbytes = pid
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


class PickledState(NamedTuple):
    """A pickle, and the open file with the memory of its tensors."""

    data: bytes
    memory: IO[bytes]
    path: str
    """Where another process finds the file as long as it is open."""
    nbytes: int


def pickle_with_tensors(box: list[Any]) -> PickledState:
    """Pickle the object in a box; its tensors go to a memory file, or to a temporary one on systems that have none."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(box.pop())
    storages, nbytes = pickler.storages, pickler.nbytes
    # The pickler ends here, and with it all references to tensors but those in `storages`. Its `clear_memo` must not be called:
    # torch releases the interpreter's lock to free a tensor, and another thread's garbage collection would see half a memo.
    del pickler
    if hasattr(os, "memfd_create"):
        memory: IO[bytes] = os.fdopen(os.memfd_create("shardkeep-state", os.MFD_CLOEXEC), "r+b")
        path = f"/proc/{os.getpid()}/fd/{memory.fileno()}"
    else:
        memory = tempfile.NamedTemporaryFile()  # noqa: SIM115 - the caller closes it
        path = memory.name
    try:
        os.ftruncate(memory.fileno(), max(nbytes, 1))
        while storages:
            _, (offset, storage) = storages.popitem()
            view, at = view_memory(storage.data_ptr(), storage.nbytes()), 0
            while at < len(view):
                at += os.pwrite(memory.fileno(), view[at : at + _MOST_WRITTEN], offset + at)
            del storage
    except BaseException:
        memory.close()
        raise
    return PickledState(stream.getvalue(), memory, path, nbytes)


# -- in the process that saves -----------------------------------------------------------------------------------------


RankAndSize = tuple[int, int]
"""The rank and world size that planners and writers see."""


@dataclass(frozen=True)
class StagedSave:
    """The arguments of a save; with the attributes that `_Save` reads from its ranks."""

    state: Any
    rank: int
    is_coordinator: bool
    checkpoint_id: Any
    storage_writer: Any
    planner: Any
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
            try:
                result = _StepResult(server.run(step, given))
            except BaseException as error:  # noqa: BLE001 - raised in the training process
                result = _StepResult(error=picklable_failure(_wrap_exception(error))[0], trace=traceback.format_exc())
            rpc.send(pipe, pickle.dumps(result))
    except (EOFError, OSError):  # the training process is gone
        return


class _SaveServer:
    _save: Any = None

    def run(self, step: str, given: tuple[Any, ...]) -> Any:
        """Run a step of `_Save`; plans and results, alone or in a list, come and go as bytes."""
        if step in ("begin", "forget"):
            self._save = None
            gc.collect()
            return self._begin(*given) if step == "begin" else None
        made = getattr(self._save, step)(
            *(list(map(pickle.loads, each)) if isinstance(each, list) else pickle.loads(each) for each in given)
        )
        return [pickle.dumps(plan) for plan in made] if step == "decide" else pickle.dumps(made)

    def _begin(self, data: bytes, memory: str) -> None:
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
            self._in_step("start", lambda _pipe, _ready: None, hint=_KIND.if_not_started)
            self._ready = True

    def ask(self, step: str, *given: Any, more_s: float = 0.0) -> Any:
        """Run a step in the process, with `more_s` more seconds; return its result, or raise its error or SaverDied."""
        message = pickle.dumps((step, given))
        reply = self._in_step(step, lambda pipe, ready: rpc.send(pipe, message, ready), more_s=more_s)
        result: _StepResult = pickle.loads(reply)
        if result.error is not None:
            raise result.error from FromSaver(result.trace)
        return result.value

    def _in_step(
        self, step: str, send: Callable[[socket.socket, Any], None], *, more_s: float = 0, hint: str = ""
    ) -> bytes:
        try:
            return self.call(send, rpc.WaitPolicy(Options().timeout_s), more_s=more_s)
        except SaverDied as error:
            raise SaverDied(f"{error.message} in step {step!r}", hint=hint or error.hint) from error


class RemoteSave:
    """The steps of a save, as those of `_Save`, in the other process. Plans and results are bytes."""

    finishing = True
    """Only the process knows whether a coordinator that failed has committed."""

    def __init__(self, saver: SaverProcess, request: StagedSave) -> None:
        self._saver = saver
        self._request = [request]
        self._more_s = 0.0

    def plan(self) -> Any:
        try:
            pickled = pickle_with_tensors(self._request)
        except Exception as error:
            hint = "the state, the storage writer and the planner are pickled; or use AsyncCheckpointerType.THREAD"
            raise BrokenProtocol(f"a save cannot be sent to the process that saves: {error}", hint=hint) from error
        self._more_s = pickled.nbytes / rpc.SLOWEST_BYTES_PER_S
        with pickled.memory:
            self._saver.ask("begin", pickled.data, pickled.path)
        return self._saver.ask("plan")

    def decide(self, plans: list[bytes]) -> Any:
        return self._saver.ask("decide", plans)

    def alone_s(self) -> Any:
        return pickle.loads(self._saver.ask("alone_s"))

    def write(self, plan: bytes) -> Any:
        return self._saver.ask("write", plan, more_s=self._more_s)

    def supersede_common(self) -> None:
        self._saver.ask("supersede_common")

    def finish(self, results: list[bytes], alone_s: float) -> Any:
        return self._saver.ask("finish", results, more_s=self._more_s + alone_s)

    def discard(self) -> None:
        """Remove what was written of a failed save, if the process is alive."""
        with suppress(SaverDied):
            self._saver.ask("discard")

    def forget(self) -> None:
        """Release the state in the process, if it is alive."""
        with suppress(SaverDied):
            self._saver.ask("forget")
