"""
What runs in the process that saves: it takes orders from the process that trains, one step of a save at a time.

It never talks to other ranks. Plans and results go back to the training process as bytes, which carries them between
the ranks; states come in shared memory. It ends when the training process does.
"""

from __future__ import annotations

import gc
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkeep.compat.calls import _storage_setup
from shardkeep.compat.parcels import receive
from shardkeep.compat.save_driver import _Save
from shardkeep.protocol.failures import _wrap_exception, portable
from shardkeep.protocol.save_planner import DefaultSavePlanner

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Place:
    """A rank among others, as a planner or a writer may ask for it."""

    rank: int
    size: int


@dataclass(frozen=True)
class Order:
    """What begins a save."""

    state: Any
    checkpoint_id: Any
    storage_writer: Any
    planner: Any
    rank: int
    is_coordinator: bool
    use_collectives: bool


@dataclass(frozen=True)
class Answer:
    """How a step ended."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def serve(pipe: Connection, world: Place | None) -> None:
    """Carry out what is asked for through the pipe, until it is closed."""
    # Ctrl-C reaches all processes of a terminal; the one that trains decides what becomes of a save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    served = _Served()
    try:
        if world is not None:
            _take_place(world)
        gc.freeze()  # modules stay: to go through all of torch takes a fifth of a second, before and after every save
        _answer(pipe, Answer())
        while True:
            _answer(pipe, _tried(receive(pipe), served))
    except (EOFError, OSError):  # the training process is gone
        return


def _answer(pipe: Connection, answer: Answer) -> None:
    pipe.send_bytes(pickle.dumps(answer))


def _tried(unpack: Callable[[], Any], served: _Served) -> Answer:
    """Carry out a step. Whatever it raises is an answer, a connection that broke in it too."""
    try:
        step, argument = unpack()
        return Answer(getattr(served, step)(argument))
    except BaseException as error:  # noqa: BLE001 - raised in the training process
        trace = traceback.format_exc()
        return Answer(error=portable(_wrap_exception(error))[0], trace=trace)


class _Served:
    """The save that is under way."""

    def __init__(self) -> None:
        self._save: Any = None
        self._state: Any = None
        self._writer: Any = None

    def begin(self, order: Order) -> None:
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


def _take_place(world: Place) -> None:
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
