"""
Steps that all ranks of a group make together. A failure of one rank is raised on all of them.

Objects are pickled and exchanged through the group's key-value store, which needs no backend and no device memory. No
rank waits for another longer than a deadline, and if ranks are in different steps, the error says so.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from traceback import StackSummary
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardkeep import errors
from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.options import Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
R = TypeVar("R")
Decide = Callable[[list[Any]], Sequence[Any]]


class _DistWrapper:
    """The ranks of a process group, or only this process; a step that fails on a rank is an error on all of them."""

    def __init__(self, group: ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> None:
        self._meeting: Rendezvous | None = None
        self.group = group
        self.use_dist = use_dist
        self.coordinator_rank = coordinator_rank
        if not use_dist:
            self._world = World(0, 1)
            self.global_coordinator_rank = self.rank = 0
            self.is_coordinator = True
            return
        import torch.distributed as dist  # noqa: PLC0415 - initialised by the caller

        self.rank = dist.get_rank(group)
        self.global_coordinator_rank = (
            coordinator_rank if group is None else dist.get_global_rank(group, coordinator_rank)
        )
        self.is_coordinator = self.rank == coordinator_rank
        world = current_world(group, timeout_s=Options().timeout_s).with_prefix(f"checkpoint/{coordinator_rank}")
        # Renumbered, so that the coordinator is rank 0.
        self._world = replace(world, rank=(world.rank - coordinator_rank) % world.size)

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self._world.size

    def patient(self, alone_s: float) -> _DistWrapper:
        """Return the same ranks, with so many seconds more to wait for the coordinator's own work."""
        ranks = copy(self)
        ranks._world = replace(self._world, alone_s=alone_s)
        if ranks._meeting is not None:
            ranks._meeting.alone_s = alone_s
        return ranks

    @contextmanager
    def call(self, doing: str = "save") -> Iterator[_DistWrapper]:
        """Make the steps inside, of one save or load, one call of all ranks; inside such a call, it goes on."""
        if self._world.solo or self._meeting is not None:
            yield self
            return
        # Its title does not name the place: each rank may save to one of its own.
        with rendezvous(self._world, f"checkpoint {doing}") as meeting:
            ranks = copy(self)
            ranks._meeting = meeting
            yield ranks

    def broadcast_object(self, object: T | None) -> T:  # noqa: A002 - torch's name
        mine = object if self.is_coordinator else None
        return cast(
            "T", self._exchange("broadcast", lambda: mine, lambda all_: [all_[self.coordinator_rank]] * len(all_))
        )

    def gather_object(self, object: T) -> list[T] | None:  # noqa: A002 - torch's name
        """Return the objects of all ranks on the coordinator, None on the others."""

        def only_to_coordinator(all_: list[Any]) -> list[Any]:
            return [all_ if rank == self.coordinator_rank else None for rank in range(len(all_))]

        return cast("list[T] | None", self._exchange("gather", lambda: object, only_to_coordinator))

    def all_gather_object(self, object: T) -> list[T]:  # noqa: A002 - torch's name
        return cast("list[T]", self._exchange("all_gather", lambda: object, lambda all_: [all_] * len(all_)))

    def scatter_object(self, object_list: list[T] | None) -> T:
        """Return this rank's item of the coordinator's list."""

        def deal(everything: list[Any]) -> list[Any]:
            dealt = everything[self.coordinator_rank]
            if dealt is None or len(dealt) != len(everything):
                raise errors.BrokenProtocol(
                    f"the coordinator has no list of {len(everything)} objects, one for each rank"
                )
            return list(dealt)

        mine = object_list if self.is_coordinator else None
        return cast("T", self._exchange("scatter", lambda: mine, deal))

    def reduce_scatter(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]) -> R:
        """Run `map_fun` on all ranks and `reduce_fun` on all results at the coordinator; return this rank's item."""

        def deal(results: list[T]) -> list[R]:
            dealt = reduce_fun(results)
            if len(dealt) != len(results):
                raise errors.BrokenProtocol(f"step {step!r} made {len(dealt)} results for {len(results)} ranks")
            return dealt

        return cast("R", self._step(step, map_fun, deal))

    agree = reduce_scatter  # a step of the engine's

    def all_reduce(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], R]) -> R:
        """Run `map_fun` on all ranks and `reduce_fun` on all results at the coordinator; return what it returned."""
        return cast("R", self._step(step, map_fun, lambda results: [reduce_fun(results)] * len(results)))

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """Run `map_fun` on all ranks; return all results."""
        return cast("list[T]", self._step(step, map_fun, lambda results: [results] * len(results)))

    def broadcast(self, step: str, map_fun: Callable[[], T]) -> T:
        """Run `map_fun` on the coordinator; return its result on all ranks."""
        work = map_fun if self.is_coordinator else lambda: None
        return cast("T", self._step(step, work, lambda results: [results[self.coordinator_rank]] * len(results)))

    def barrier(self) -> None:
        self._exchange("barrier", lambda: None, lambda everything: everything)

    def _step(self, step: str, work: Callable[[], Any], decide: Decide) -> Any:
        def judge(results: list[Any]) -> Sequence[Any]:
            failures = errors._get_failure_dict(results)
            if not failures:
                try:
                    return decide(results)
                except BaseException as error:  # noqa: BLE001 - raised on all ranks
                    failures = {self.coordinator_rank: errors._wrap_exception(error)}
            if not self._world.solo:
                failures = {rank: errors.picklable_failure(failure) for rank, failure in failures.items()}
            return [errors.CheckpointException(step, failures)] * len(results)

        cause: BaseException | None = None

        def attempt() -> Any:
            nonlocal cause
            try:
                return work()
            except BaseException as error:  # noqa: BLE001 - raised on all ranks
                cause, failure = error, errors._wrap_exception(error)
                return failure if self._world.solo else errors.picklable_failure(failure)

        try:
            answer = self._exchange(step, attempt, judge)
        except errors.CheckpointError as error:  # ranks that do not answer, have died, or are in another step
            named = error.ranks if isinstance(error, errors.RanksSilent) else list(error.by_rank)
            away = [(rank + self.coordinator_rank) % self._world.size for rank in named] or [self.rank]
            raise errors.CheckpointException(step, dict.fromkeys(away, (error, StackSummary()))) from (cause or error)
        if isinstance(answer, errors.CheckpointException):
            if self._meeting is not None:
                self._meeting.raises_on_all(answer)
            raise answer from cause
        return answer

    def _exchange(self, step: str, work: Callable[[], Any], decide: Decide) -> Any:
        """Send an object to the coordinator, and return its answer for this rank; a rank at work has begun the step."""
        if self._world.solo:
            return decide([work()])[0]

        def send() -> bytes:
            return pickle.dumps(work())

        def reply(letters: list[bytes]) -> list[bytes]:
            size = len(letters)
            answers = decide([pickle.loads(letters[(rank - self.coordinator_rank) % size]) for rank in range(size)])
            # An answer that several ranks get is pickled and stored once.
            written: dict[int, bytes] = {}
            for answer in answers:
                if id(answer) not in written:
                    written[id(answer)] = pickle.dumps(answer)
            return [written[id(answers[(place + self.coordinator_rank) % size])] for place in range(size)]

        own = nullcontext(self._meeting) if self._meeting else rendezvous(self._world, f"checkpoint step {step}")
        with own as meeting:
            return pickle.loads(meeting.agree(step, send, reply))


def in_step(ranks: _DistWrapper, prepare: Callable[[], T]) -> Callable[[], T]:
    """Do what comes before a step; where that fails and there are other ranks, the failure is raised in the step."""
    try:
        prepared = prepare()
    except Exception as error:
        if ranks.get_world_size() == 1:
            raise
        failure = error  # `error` is deleted at the end of the except clause

        def fail() -> T:
            raise failure

        return fail
    return lambda: prepared


def _all_gather_keys(local_dict: dict[str, Any], group: ProcessGroup | None = None) -> set[str]:
    ranks = _DistWrapper(group, use_dist=True, coordinator_rank=0)
    return {key for keys in ranks.all_gather_object(list(local_dict)) for key in keys}


def _assert_same_keys(state_dict: dict[str, Any], process_group: ProcessGroup | None = None) -> None:
    """Make sure that the dicts of all ranks have the same keys; all ranks must call this."""
    missing = _all_gather_keys(state_dict, process_group) - set(state_dict)
    if missing:
        raise errors.BrokenProtocol(
            f"other ranks have keys that this one lacks: {', '.join(sorted(map(str, missing)))}",
            hint="all ranks must pass the same keys",
        )
