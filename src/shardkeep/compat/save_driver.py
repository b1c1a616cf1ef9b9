"""
A save, step by step: any planner, any storage writer.

    all ranks       storage_meta, set_up_planner, set_up_storage_writer, create_local_plan, prepare_local_plan
    coordinator     create_global_plan, prepare_global_plan
    all ranks       finish_plan, write_data
    coordinator     finish

Nothing here looks at the state or at the data. A planner or a writer may be torch's: what passes between it and one of
ours is translated on the way.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import deprecated

from shardkeep.compat.call_log import logged, of_storage
from shardkeep.compat.calls import (
    _api_bc_check,
    _profile,
    _stateful_to_state_dict,
    _storage_setup,
    takes,
    without_ranks,
)
from shardkeep.compat.in_use import place_of, stand_in_line
from shardkeep.protocol.failures import CheckpointException
from shardkeep.protocol.foreign import ours, translator
from shardkeep.protocol.gatherings import _DistWrapper, in_step
from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata
from shardkeep.protocol.planners import SavePlanner
from shardkeep.protocol.plans import SavePlan
from shardkeep.protocol.problems import BrokenProtocol
from shardkeep.protocol.save_planner import DefaultSavePlanner
from shardkeep.protocol.storage import StorageWriter, WriteResult
from shardkeep.storages.file_writer import _FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@_api_bc_check
def save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """
    Save a state that is spread over ranks, each of which writes its own part.

    Top-level values with `state_dict` and `load_state_dict` are saved as what their `state_dict` returns.

    Args:
        state_dict: This rank's part of the state.
        checkpoint_id: Where to save, in the terms of the storage.
        storage_writer: Writes the data.
        planner: Decides what is written; by default everything, replicated values once.
        process_group: The ranks that save; all of them by default.
        no_dist: Save on this process alone.
        use_collectives: False to have each rank write a checkpoint of its own, with its own metadata.

    Returns:
        What was saved; on every rank.

    Raises:
        CheckpointException: a rank failed; on all ranks, with what each one raised.

    """
    no_dist = without_ranks(no_dist, "saves")

    def call() -> Metadata:
        turn = stand_in_line(storage_writer, planner, what=place_of(checkpoint_id, storage_writer))
        with turn.taken(), _profile():
            writer = _storage_setup(storage_writer, checkpoint_id)
            ranks = _DistWrapper(process_group, not no_dist, coordinator_rank=0)
            state = in_step(ranks, lambda: _logged_states(state_dict))
            return _run(ranks, state, writer, planner, use_collectives)

    said = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer, "planner": planner}
    return logged(call, "save", log_exceptions=True, process_group=process_group, **said)()


def _logged_states(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """Ask each value for its state, one by one, so that the log says which of them takes long."""
    name = _stateful_to_state_dict.__name__

    def ask(key: str, value: Any) -> Any:
        return logged(_stateful_to_state_dict, f"{name}.{key}", log_exceptions=True)({key: value})[key]

    def ask_all() -> STATE_DICT_TYPE:
        return {key: ask(key, value) for key, value in state_dict.items()}

    return logged(ask_all, name, log_exceptions=True)()


@deprecated("`save_state_dict` is deprecated: use `save`", category=FutureWarning)
def save_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Save a state as it is, without asking its values for theirs; `save` is what to use."""
    turn = stand_in_line(storage_writer, planner, what=place_of(None, storage_writer))
    with turn.taken(), _profile():
        storage_writer.reset()
        return _save_state_dict(state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner)


def _save_state_dict(
    state_dict: STATE_DICT_TYPE,
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    use_collectives: bool = True,
) -> Metadata:
    ranks = _DistWrapper(process_group, not no_dist, coordinator_rank)
    return _run(ranks, lambda: state_dict, storage_writer, planner, use_collectives)


def _run(
    ranks: _DistWrapper,
    state: Callable[[], STATE_DICT_TYPE],
    storage_writer: StorageWriter,
    planner: SavePlanner | None,
    use_collectives: bool,
) -> Metadata:
    call = _Save(ranks, DefaultSavePlanner() if planner is None else planner, storage_writer, use_collectives)
    place = of_storage(storage_writer, ranks.group)
    local_step = logged(lambda: call.plan(state()), "local_step", **place)
    global_step = logged(call.decide, "global_step", **place)
    write_data = logged(call.write, "write_data", **place)
    finish_checkpoint = logged(call.finish, "finish_checkpoint", **place)
    if not use_collectives:
        # One step for all of it: ranks need nothing of each other, but each must learn when another one fails.
        mine: list[Metadata] = []

        def alone() -> None:
            [plan] = global_step([local_step()])
            mine.append(finish_checkpoint([write_data(plan)]))

        ranks.all_gather("write", alone)
        if ranks.is_coordinator and isinstance(storage_writer, _FileSystemWriter):
            storage_writer._supersede_common()
        return mine[0]

    def decide(plans: list[SavePlan]) -> list[tuple[SavePlan, float]]:
        decided = global_step(plans)
        alone_s = call.alone_s()
        return [(plan, alone_s) for plan in decided]

    plan, alone_s = ranks.reduce_scatter("plan", local_step, decide)
    try:
        return ranks.patient(alone_s).all_reduce("write", lambda: write_data(plan), finish_checkpoint)
    except CheckpointException as failed:
        # The coordinator ends a save only where no rank failed. Where it failed itself, only it knows if that was before.
        unfinished = ranks.coordinator_rank not in failed.failures or (ranks.is_coordinator and not call.finishing)
        if unfinished and isinstance(storage_writer, _FileSystemWriter):
            storage_writer._discard_written()
        raise


class _Save:
    """The steps of one save."""

    def __init__(
        self, ranks: _DistWrapper, planner: SavePlanner, storage_writer: StorageWriter, use_collectives: bool
    ) -> None:
        self._ranks = ranks
        self._planner = planner
        self._writer = storage_writer
        self._use_collectives = use_collectives
        self._to_writer = translator(planner, storage_writer)
        self._to_planner = translator(storage_writer, planner)
        self._metadata: Any = None
        self.finishing = False
        """Whether the coordinator has begun to make the checkpoint complete."""

    def plan(self, state_dict: STATE_DICT_TYPE) -> SavePlan:
        """Return this rank's plan."""
        leads = self._ranks.is_coordinator
        storage_meta = self._to_planner(self._writer.storage_meta())
        if "storage_meta" in inspect.signature(self._planner.set_up_planner).parameters:
            self._planner.set_up_planner(state_dict=state_dict, storage_meta=storage_meta, is_coordinator=leads)
        else:
            warnings.warn(
                f"{type(self._planner).__qualname__}.set_up_planner should take storage_meta as its second argument",
                stacklevel=2,
            )
            self._planner.set_up_planner(state_dict, leads)  # type: ignore[arg-type]  # as planners once were
        if takes(self._writer.set_up_storage_writer, "rank", "use_collectives"):
            self._writer.set_up_storage_writer(leads, rank=self._ranks.rank, use_collectives=self._use_collectives)
        else:
            self._writer.set_up_storage_writer(leads)
        plan = self._to_writer(self._planner.create_local_plan())
        return self._writer.prepare_local_plan(plan)

    def decide(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plan of each rank, and keep the metadata."""
        decided, self._metadata = self._planner.create_global_plan(self._to_planner(plans))
        return self._writer.prepare_global_plan(self._to_writer(list(decided)))

    def alone_s(self) -> float:
        """Return how long the coordinator may be at work when the other ranks are done."""
        if not isinstance(self._writer, _FileSystemWriter) or self._metadata is None:
            return 0.0
        return self._writer._alone_s(self._metadata)

    def write(self, plan: SavePlan) -> list[WriteResult]:
        """Carry out this rank's plan."""
        final = self._to_writer(self._planner.finish_plan(self._to_planner(plan)))
        if not plan.usable and plan.storage_data is not None:
            # A plan that the planner kept of an earlier save; what the writer decided for this one came with the word.
            final = replace(final, storage_data=plan.storage_data)
        writes = self._writer.write_data(final, self._planner)
        writes.wait()
        return writes.value()

    def finish(self, results: list[list[WriteResult]]) -> Metadata:
        """Make the checkpoint complete, and return what is in it."""
        self.finishing = True
        if self._metadata is None:
            raise BrokenProtocol("create_global_plan gave no metadata", hint="return the plans and the metadata")
        # In the writer's classes, index by index: it may pickle them.
        metadata = self._to_writer(self._metadata)
        self._writer.finish(metadata=metadata, results=self._to_writer(results))
        finished: Metadata = ours(metadata)
        return finished
