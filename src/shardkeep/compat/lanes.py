"""
Lanes: where saves go on after the call that began them has returned.

Saves of one group of ranks run one after the other on one thread, in the order of the calls, which is the same on all
ranks. They meet under keys of their own in the group's store, so that whatever the training thread does meanwhile,
collectives and other saves included, is never mixed up with them. A failure that nobody asks for is logged, and raised
by the next asynchronous save of the rank, which is made all the same: other ranks may not know of the failure yet.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from shardkeep.compat.in_use import Turn, stand_in_line
from shardkeep.protocol.gatherings import _DistWrapper
from shardkeep.run.exit_code import exit_code, give_up_at_exit, tell_at_exit
from shardkeep.run.handles import wait_for_ends
from shardkeep.run.in_flight import earlier_error, let_go

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardkeep.compat.saver_handle import SaverProcess
    from shardkeep.errors import EarlierSaveFailed

log = logging.getLogger("shardkeep")
T = TypeVar("T")


class SaveFuture(Future[T]):
    """The result of a save; remembers whether anybody has asked for it. A save that was begun cannot be cancelled."""

    def __init__(self, what: str, failed: list[SaveFuture[Any]]) -> None:
        super().__init__()
        self.what = what
        self._failed = failed
        """Those that nobody has asked for."""
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        """Return what was saved, or raise what went wrong."""
        try:
            return super().result(timeout)
        finally:
            self._note()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what went wrong."""
        error = super().exception(timeout)
        self._note()
        return error

    def _note(self) -> None:
        if self.done():
            with contextlib.suppress(ValueError):  # not among them, or no more
                self._failed.remove(self)


class Lane:
    """The saves of one group of ranks, one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardkeep-save")
        # Before the standard library shuts its executors: a save that is under way at exit still needs threads.
        threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]  # there is no public way
        self._process_id = os.getpid()
        self._number: int | None = None
        self._order = threading.Lock()
        self._begun: list[SaveFuture[Any]] = []
        self._failed: list[SaveFuture[Any]] = []
        self.saver: SaverProcess | None = None
        """The process that writes, once there is one; used by this lane's thread alone."""
        self.starting = threading.Lock()
        """Held by whoever starts that process."""

    def submit(self, work: Callable[[], T], what: str, *uses: object) -> SaveFuture[T]:
        """Run a save after those before it, of this lane and of those that use the same objects."""
        exit_code().watch()
        future: SaveFuture[T] = SaveFuture(what, self._failed)
        with self._order:  # the same in all lines
            turn = stand_in_line(*uses, what=what, thread=lambda: self._number)
            try:
                self._thread.submit(self._carry_out, [work], turn, future)
                self._begun = [*(each for each in self._begun if not each.done()), future]
            except BaseException:  # no more at this time of the interpreter's life
                turn.give_up()
                raise
        return future

    def take_unasked(self) -> EarlierSaveFailed | None:
        """Return the failure of an earlier save that nobody has asked for, once."""
        failed = [each for each in self._failed if each.done()]
        if not failed:
            return None
        return earlier_error(
            failed[0].what,
            [each.exception() for each in failed],
            hint="ask each future for its result before the next save; this save has been begun, and goes on",
        )

    def _at_exit(self) -> None:
        if os.getpid() != self._process_id:  # a fork, in which those saves never end
            return
        try:
            self._wait_for_all()
            if (earlier := self.take_unasked()) is not None:
                tell_at_exit(earlier)
        except KeyboardInterrupt:
            if places := self._still_under_way():  # the second one: nothing is waited for
                give_up_at_exit(places)
                raise
            self._at_exit()  # perhaps something is still to be told

    def _wait_for_all(self) -> None:
        """
        Wait for all saves, which cannot be cancelled: at a first Ctrl-C say so, and go on.

        Not for their thread: one whose `join` was interrupted is taken for ended by Python, though it is not.
        """
        try:
            wait_for_ends(self._begun)
        except KeyboardInterrupt:
            log.warning(
                "interrupted at exit: waiting for saves to %s; interrupt again to leave them incomplete",
                ", ".join(self._still_under_way()),
            )
            wait_for_ends(self._begun)
        self._thread.shutdown()

    def _still_under_way(self) -> list[str]:
        self._begun = [each for each in self._begun if not each.done()]
        return [each.what for each in self._begun]

    def _carry_out(self, box: list[Callable[[], T]], turn: Turn, future: SaveFuture[T]) -> None:
        self._number = threading.get_ident()
        try:
            with turn.taken():
                # Taken out of its box: nothing here may hold the state when the future is done.
                result = box.pop()()
        except BaseException as error:  # read by whoever asks, or raised by the next save
            log.error("an asynchronous save, to %s, failed", future.what, exc_info=error)  # noqa: TRY400 - it has one
            let_go(error)
            self._failed.append(future)
            future.set_exception(error)
        else:
            future.set_result(result)


@functools.cache  # saves outlive the calls that began them; a forked process has none of its parent's threads
def _lanes_of(process_id: int) -> dict[str, Lane]:
    del process_id
    return {}


def lane_of(group: ProcessGroup | None, *, no_dist: bool) -> Lane:
    """Return the lane of a group of ranks, or of this process alone."""
    lanes = _lanes_of(os.getpid())
    name = "alone" if is_alone(no_dist) else f"group {_name_of(group)}"
    return lanes[name] if name in lanes else lanes.setdefault(name, Lane())


def ranks_in_lane(group: ProcessGroup | None, *, no_dist: bool) -> _DistWrapper:
    """Return the ranks that save together, who meet apart from everything else that they do."""
    ranks = _DistWrapper(group, not is_alone(no_dist), coordinator_rank=0)
    world = ranks._world
    if world.store is not None:
        from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - loaded, as there is a store

        ranks._world = replace(world, store=PrefixStore("asynchronous", world.store))
    return ranks


def fail_together(ranks: _DistWrapper, error: BaseException, *, use_collectives: bool) -> NoReturn:
    """Raise what kept this rank from beginning, on all ranks: the others are in their first step."""
    if ranks.get_world_size() > 1:

        def fail() -> NoReturn:
            raise error

        ranks.reduce_scatter("plan" if use_collectives else "write", fail, lambda results: results)
    raise error


def is_alone(no_dist: bool) -> bool:
    """Say whether a save is this process's own."""
    dist = sys.modules.get("torch.distributed")
    return no_dist or dist is None or not dist.is_available() or not dist.is_initialized()


def _name_of(group: ProcessGroup | None) -> str:
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - loaded, as there is a group

    return str(c10d._get_process_group_name(c10d._get_default_group() if group is None else group))
