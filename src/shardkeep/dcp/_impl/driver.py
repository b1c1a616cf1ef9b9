"""
Writers and planners hold the state of the save that they are used for: two saves at once would mix their data.

So each save of this process takes a place in line for its writer and its planner when it is called, and begins when
the saves before it that use one of them have ended. Places are taken for both at once, so that no two saves wait for
each other; and saves have deadlines, so that nobody waits for ever.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import deprecated

from shardkeep.dcp._impl.calls import (
    _api_bc_check,
    _profile,
    _stateful_to_state_dict,
    _storage_setup,
    is_stateful,
    log_fields_of,
    logged,
    takes,
    without_ranks,
)
from shardkeep.dcp._impl.dist import _DistWrapper, in_step
from shardkeep.dcp._impl.file_reader import FileSystemReader
from shardkeep.dcp._impl.file_writer import _FileSystemWriter
from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader
from shardkeep.dcp._impl.interop import to_classes_of, to_ours, translator
from shardkeep.dcp._impl.planners import DefaultLoadPlanner, DefaultSavePlanner, _EmptyStateDictLoadPlanner
from shardkeep.dcp._impl.shared_items import (
    fills_in_place,
    keeps,
    remaining_plan,
    shared_requests_of_plan,
)
from shardkeep.engine.shared_reads import Channel, Exchange, Sharing, all_agree, new_tag, open_channel
from shardkeep.errors import BrokenProtocol, CheckpointException, NoMetadata, RanksDisagree
from shardkeep.layouts.torch_values import (
    STATE_DICT_TYPE,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    WriteResult,
)
from shardkeep.options import Options
from shardkeep.plan.sharing import plan_sharing as decide_shares

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


log = logging.getLogger("shardkeep")


class Reservation:
    """The place of one save in the lines for its objects; taken on the thread that saves, or given up."""

    def __init__(
        self, lines: ReservationQueues, objects: list[Any], what: str, thread: Callable[[], int | None]
    ) -> None:
        self.what = what
        self.thread = thread
        """Tells which thread saves, if it has been started."""
        self._lines = lines
        self._objects = objects  # held, so that no other object gets their ids
        lines.join(self, objects)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the saves before this one, and hold the objects meanwhile."""
        try:
            self._lines.wait(self, self._objects)
            yield
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Leave the lines; those behind go on."""
        self._lines.leave(self, self._objects)
        self._objects = []


class ReservationQueues:
    """Who uses what, and who is next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[int, list[Reservation]] = {}

    def join(self, turn: Reservation, objects: list[Any]) -> None:
        """Stand at the end of each object's line."""
        with self._changed:
            for each in objects:
                self._lines.setdefault(id(each), []).append(turn)

    def wait(self, turn: Reservation, objects: list[Any]) -> None:
        """Wait until a turn is the first everywhere."""
        with self._changed:
            told = False
            while (found := self._before(turn, objects)) is not None:
                if not told:
                    told = True
                    used, other = found
                    log.warning(
                        "a save to %s waits for the one to %s, which uses the same %s",
                        turn.what,
                        other.what,
                        type(used).__qualname__,
                    )
                self._changed.wait()

    def leave(self, turn: Reservation, objects: list[Any]) -> None:
        """Stand in no line any more."""
        with self._changed:
            for each in objects:
                line = self._lines[id(each)]
                line.remove(turn)
                if not line:
                    del self._lines[id(each)]
            self._changed.notify_all()

    def _before(self, turn: Reservation, objects: list[Any]) -> tuple[Any, Reservation] | None:
        """
        Return an object that is in use, and by whom.

        A save does not wait for one of its own thread: that is around it, or comes after it.
        """
        for each in objects:
            first = self._lines[id(each)][0]
            if first is not turn and first.thread() != threading.get_ident():
                return each, first
        return None


@functools.cache  # saves outlive the calls that began them; a forked process has none of its parent's
def _queues_of(process_id: int) -> ReservationQueues:
    del process_id
    return ReservationQueues()


def reserve(*objects: Any, what: str, thread: Callable[[], int | None] | None = None) -> Reservation:
    """
    Take a place for a save.

    Args:
        objects: what it uses; None is nothing.
        what: where it goes, for messages.
        thread: tells which thread will save; by default this one.

    """
    distinct = {id(each): each for each in objects if each is not None}
    here = threading.get_ident()
    return Reservation(_queues_of(os.getpid()), list(distinct.values()), what, thread or (lambda: here))


def destination_of(checkpoint_id: str | os.PathLike[str] | None, storage_writer: object) -> str:
    """Say where a save goes, for messages."""
    place = checkpoint_id if checkpoint_id is not None else getattr(storage_writer, "checkpoint_id", None)
    return f"{os.fspath(place)!r}" if isinstance(place, (str, os.PathLike)) else type(storage_writer).__qualname__


# A save, step by step: any planner, any storage writer.
#
#     all ranks       storage_meta, set_up_planner, set_up_storage_writer, create_local_plan, prepare_local_plan
#     coordinator     create_global_plan, prepare_global_plan
#     all ranks       finish_plan, write_data
#     coordinator     finish
#
# Nothing here looks at the state or at the data. A planner or a writer may be torch's: what passes between it and one
# of
# ours is translated on the way.


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
        turn = reserve(storage_writer, planner, what=destination_of(checkpoint_id, storage_writer))
        with turn.taken(), _profile():
            writer = _storage_setup(storage_writer, checkpoint_id)
            ranks = _DistWrapper(process_group, not no_dist, coordinator_rank=0)
            state = in_step(ranks, lambda: _logged_states(state_dict))
            return _run_save(ranks, state, writer, planner, use_collectives)

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
    turn = reserve(storage_writer, planner, what=destination_of(None, storage_writer))
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
    return _run_save(ranks, lambda: state_dict, storage_writer, planner, use_collectives)


def _run_save(
    ranks: _DistWrapper,
    state: Callable[[], STATE_DICT_TYPE],
    storage_writer: StorageWriter,
    planner: SavePlanner | None,
    use_collectives: bool,
) -> Metadata:
    call = _Save(ranks, DefaultSavePlanner() if planner is None else planner, storage_writer, use_collectives)
    place = log_fields_of(storage_writer, ranks.group)
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
        finished: Metadata = to_ours(metadata)
        return finished


# A load, step by step: any planner, any storage reader.
#
#     all ranks       read_metadata, set_up_planner, set_up_storage_reader, create_local_plan, prepare_local_plan
#     coordinator     create_global_plan, prepare_global_plan
#     all ranks       finish_plan, read_data
#
# Where `Options.share_reads` is set, ranks that want the same of a checkpoint each read a part of it, and exchange
# what
# they have read in a step of its own.
#
# All steps are made by all ranks together, also where each rank has metadata of its own. A planner or a reader may be
# torch's: what passes between it and one of ours is translated on the way.

logger = logging.getLogger("shardkeep")

_READER_METHODS = ("prepare_local_plan", "prepare_global_plan", "read_data")
_NOT_THERE = (FileNotFoundError, KeyError)
"""What readers raise where there is nothing: those of files, and those that keep checkpoints in a dict."""
_HF_METHODS = ("read_plain", "stored_chunk", "_process_read_request", "_read_files_from_queue")


@_api_bc_check
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """
    Fill a state that is spread over ranks, each of which reads its own part.

    Tensors are filled in place and other values replaced. Top-level values with `state_dict` and `load_state_dict` are
    asked for their state, and given it once it is filled. All ranks must pass the same keys.

    Args:
        state_dict: This rank's part of the state.
        checkpoint_id: Where to load from, in the terms of the storage.
        storage_reader: Reads the data.
        planner: Decides what is read; by default every value of the state.
        process_group: The ranks that load; all of them by default.
        no_dist: Load on this process alone.

    Raises:
        CheckpointException: a rank failed; on all ranks, with what each one raised.

    """
    no_dist = without_ranks(no_dist, "loads")

    def call() -> None:
        with _profile():
            reader = _storage_setup(storage_reader, checkpoint_id, reader=True)
            # Sorted, as objects that communicate when asked for their state must be asked in one order on all ranks.
            keys = sorted(state_dict)
            ranks = _DistWrapper(process_group, not no_dist, coordinator_rank=0)
            state = in_step(ranks, lambda: _stateful_to_state_dict({key: state_dict[key] for key in keys}))
            _run_load(ranks, state, reader, planner)
            filled = state()
            for key in keys:
                if is_stateful(state_dict[key]):
                    state_dict[key].load_state_dict(filled[key])
                else:
                    state_dict[key] = filled[key]

    said = {"checkpoint_id": checkpoint_id, "storage_reader": storage_reader, "planner": planner}
    logged(call, "load", log_exceptions=True, process_group=process_group, **said)()


@deprecated("`load_state_dict` is deprecated: use `load`", category=FutureWarning)
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Fill a state as it is, without asking its values for theirs; `load` is what to use."""
    storage_reader.reset()
    with _profile():
        _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """
    Return what a checkpoint holds, whole and on the CPU: all of it, or what is under some keys.

    A key is a flat name or the first parts of one: "model" stands for "model.weight" and "model.bias".
    """
    no_dist = without_ranks(no_dist=False, verb="loads")
    reader = _storage_setup(storage_reader, checkpoint_id, reader=True)
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={keys} if isinstance(keys, str) else keys)
    _load_state_dict(state, reader, process_group, no_dist=no_dist, planner=planner)
    return state


def _load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    _run_load(_DistWrapper(process_group, not no_dist, coordinator_rank), lambda: state_dict, storage_reader, planner)


def _run_load(
    ranks: _DistWrapper, state: Callable[[], dict[str, Any]], storage_reader: StorageReader, planner: LoadPlanner | None
) -> None:
    call = _Load(ranks, DefaultLoadPlanner() if planner is None else planner, storage_reader)
    place = log_fields_of(storage_reader, ranks.group)
    local_step = logged(lambda: call.plan(state()), "local_step", **place)
    global_step = logged(call.decide, "global_step", **place)
    read_data = logged(call.read, "read_data", **place)
    plan, orders = ranks.reduce_scatter("plan", local_step, global_step)
    ranks.all_gather("read", lambda: read_data(plan, orders))
    if orders is not None:  # on all ranks, none of which has failed to read
        ranks.all_gather("share", call.exchange)


class _RankReport(NamedTuple):
    """What a rank tells the coordinator."""

    common: bool
    """The metadata are those of all ranks."""
    plan: LoadPlan
    cannot_share: str | None
    """Why it does not share its reads; empty where it does, None where nobody asked for it."""
    offer: bytes
    """What it offers to share."""


class _Load:
    """The steps of one load."""

    def __init__(self, ranks: _DistWrapper, planner: LoadPlanner, storage_reader: StorageReader) -> None:
        self._ranks = ranks
        self._planner = planner
        self._reader = storage_reader
        self._to_reader = translator(planner, storage_reader)
        self._to_planner = translator(storage_reader, planner)
        self._sharing: Sharing | None = None
        self._exchange: Exchange | None = None

    def plan(self, state_dict: dict[str, Any]) -> _RankReport:
        """Return what this rank tells the coordinator."""
        leads = self._ranks.is_coordinator
        metadata, common = self._read_metadata()
        self._planner.set_up_planner(state_dict, to_classes_of(self._planner, metadata), leads)
        if takes(self._reader.set_up_storage_reader, "rank", "use_collectives"):
            self._reader.set_up_storage_reader(metadata, leads, rank=self._ranks.rank, use_collectives=common)
        else:
            self._reader.set_up_storage_reader(metadata, leads)
        plan = self._reader.prepare_local_plan(self._to_reader(self._planner.create_local_plan()))
        cannot_share, offer = self._offer(plan, metadata, common=common)
        return _RankReport(common, plan, cannot_share, offer)

    def _offer(self, plan: LoadPlan, metadata: Metadata, *, common: bool) -> tuple[str | None, bytes]:
        """Return why this rank does not share its reads (None: nobody asked for it), or what it offers to share."""
        options, planner = Options(), self._planner
        if not options.share_reads:
            return None, b""
        size = self._ranks.get_world_size()
        channel = open_channel(self._ranks.group, size=size, timeout_s=options.timeout_s)
        if not isinstance(channel, Channel):
            return channel, b""
        if not _reads_items(self._reader):
            return f"the reader, a {type(self._reader).__qualname__}, may read in ways of its own", b""
        if not fills_in_place(planner) or type(plan) is not LoadPlan:
            return f"the planner, a {type(planner).__qualname__}, may read in ways of its own", b""
        if not common:
            return "the ranks have metadata of their own", b""
        wants = shared_requests_of_plan(plan, planner, metadata)
        self._sharing = Sharing(channel, wants, budget_nbytes=options.host_budget_bytes)
        return "", self._sharing.offer()

    def decide(self, said: list[_RankReport]) -> list[tuple[LoadPlan, bytes | None]]:
        """Return the plan of each rank, and its part in sharing the reads; None where they are not shared."""
        found = [rank for rank, each in enumerate(said) if each.common]
        if 0 < len(found) < len(said):
            raise RanksDisagree(
                f"only ranks {found} of {len(said)} found the checkpoint's metadata, the others only their own",
                hint="wait until all ranks see the same files, or delete those of the older of two checkpoints",
            )
        plans = self._planner.create_global_plan(self._to_planner([each.plan for each in said]))
        final = self._reader.prepare_global_plan(self._to_reader(list(plans)))
        orders: list[bytes] | None = None
        if all_agree([each.cannot_share for each in said]):
            orders = decide_shares([each.offer for each in said], first_tag=new_tag())
        return [(plan, orders[rank] if orders is not None else None) for rank, plan in enumerate(final)]

    def read(self, plan: LoadPlan, orders: bytes | None) -> None:
        """Carry out this rank's plan, as far as other ranks do not read it for this one."""
        final = self._to_reader(self._planner.finish_plan(self._to_planner(plan)))
        if orders is not None and self._sharing is not None:
            part = self._sharing.accept(orders)
            final, self._exchange = remaining_plan(final, part.rows, part.cuts), part.exchange
        reads = self._reader.read_data(final, self._planner)
        reads.wait()
        # A reader that fails in the background says so only in its future.
        reads.value()

    def exchange(self) -> None:
        """Send the others what this rank has read for them, and receive what they have read for it."""
        if self._exchange is not None:
            self._exchange.run()

    def _read_metadata(self) -> tuple[Metadata, bool]:
        """
        Return the checkpoint's metadata, or else those that this rank alone wrote; and which of them it is.

        Those of this rank count only where there are no others: beside metadata that cannot be read just now, they are
        what an older save left.
        """
        said = ["metadata is None"]
        try:
            if (metadata := self._reader.read_metadata()) is not None:
                return metadata, True
        except Exception as error:  # the storage is foreign code
            said.append(f"global metadata read failed: {error}")
            if not isinstance(error, _NOT_THERE):
                hint = "the checkpoint may be sound: try again, or see what is wrong with its metadata"
                raise NoMetadata("; ".join(said), hint=hint) from error
        if takes(self._reader.read_metadata, "rank"):
            try:
                if (metadata := self._reader.read_metadata(rank=self._ranks.rank)) is not None:
                    logger.warning("there are no metadata of the whole checkpoint; this rank's own are used")
                    return metadata, False
            except Exception as error:  # noqa: BLE001 - the storage is foreign code; told below
                said.append(f"rank local metadata read failed: {error}")
        raise NoMetadata("; ".join(said), hint="is there a complete checkpoint at this place?")


def _reads_items(reader: object) -> bool:
    """Say whether a reader reads any part of an item that it is asked for, straight into what the planner gives."""
    if isinstance(reader, HuggingFaceStorageReader):
        return keeps(reader, HuggingFaceStorageReader, ("_read", *_HF_METHODS, *_READER_METHODS))
    return isinstance(reader, FileSystemReader) and keeps(reader, FileSystemReader, _READER_METHODS)
