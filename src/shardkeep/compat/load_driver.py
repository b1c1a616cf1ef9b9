"""
A load, step by step: any planner, any storage reader.

    all ranks       read_metadata, set_up_planner, set_up_storage_reader, create_local_plan, prepare_local_plan
    coordinator     create_global_plan, prepare_global_plan
    all ranks       finish_plan, read_data

Where `Options.share_reads` is set, ranks that want the same of a checkpoint each read a part of it, and exchange what
they have read in a step of its own.

All steps are made by all ranks together, also where each rank has metadata of its own. A planner or a reader may be
torch's: what passes between it and one of ours is translated on the way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import deprecated

from shardkeep.compat.call_log import logged, of_storage
from shardkeep.compat.calls import (
    _api_bc_check,
    _profile,
    _stateful_to_state_dict,
    _storage_setup,
    is_stateful,
    takes,
    without_ranks,
)
from shardkeep.errors import RanksDisagree
from shardkeep.options import Options
from shardkeep.plan.sharing import decide as decide_shares
from shardkeep.protocol.foreign import in_words_of, translator
from shardkeep.protocol.gatherings import _DistWrapper, in_step
from shardkeep.protocol.load_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from shardkeep.protocol.metadata import Metadata
from shardkeep.protocol.planners import LoadPlanner
from shardkeep.protocol.plans import LoadPlan
from shardkeep.protocol.problems import NoMetadata
from shardkeep.protocol.storage import StorageReader
from shardkeep.run.sharing_channel import Channel, all_agree, new_tag, open_channel
from shardkeep.run.sharing_items import fills_in_place, keeps, only, wants_of
from shardkeep.run.sharing_offers import Sharing
from shardkeep.storages.file_reader import FileSystemReader
from shardkeep.storages.hugging_face_reader import HuggingFaceStorageReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
            _run(ranks, state, reader, planner)
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
    _run(_DistWrapper(process_group, not no_dist, coordinator_rank), lambda: state_dict, storage_reader, planner)


def _run(
    ranks: _DistWrapper, state: Callable[[], dict[str, Any]], storage_reader: StorageReader, planner: LoadPlanner | None
) -> None:
    call = _Load(ranks, DefaultLoadPlanner() if planner is None else planner, storage_reader)
    place = of_storage(storage_reader, ranks.group)
    local_step = logged(lambda: call.plan(state()), "local_step", **place)
    global_step = logged(call.decide, "global_step", **place)
    read_data = logged(call.read, "read_data", **place)
    plan, orders = ranks.reduce_scatter("plan", local_step, global_step)
    ranks.all_gather("read", lambda: read_data(plan, orders))
    if orders is not None:  # on all ranks, none of which has failed to read
        ranks.all_gather("share", call.exchange)


class _Said(NamedTuple):
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

    def plan(self, state_dict: dict[str, Any]) -> _Said:
        """Return what this rank tells the coordinator."""
        leads = self._ranks.is_coordinator
        metadata, common = self._read_metadata()
        self._planner.set_up_planner(state_dict, in_words_of(self._planner, metadata), leads)
        if takes(self._reader.set_up_storage_reader, "rank", "use_collectives"):
            self._reader.set_up_storage_reader(metadata, leads, rank=self._ranks.rank, use_collectives=common)
        else:
            self._reader.set_up_storage_reader(metadata, leads)
        plan = self._reader.prepare_local_plan(self._to_reader(self._planner.create_local_plan()))
        cannot_share, offer = self._offer(plan, metadata, common=common)
        return _Said(common, plan, cannot_share, offer)

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
        wants = wants_of(plan, planner, metadata)
        self._sharing = Sharing(channel, wants, budget_nbytes=options.host_budget_bytes)
        return "", self._sharing.offer()

    def decide(self, said: list[_Said]) -> list[tuple[LoadPlan, bytes | None]]:
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
            final = only(final, *self._sharing.take(orders))
        reads = self._reader.read_data(final, self._planner)
        reads.wait()
        # A reader that fails in the background says so only in its future.
        reads.value()

    def exchange(self) -> None:
        """Send the others what this rank has read for them, and receive what they have read for it."""
        if self._sharing is not None:
            self._sharing.exchange()

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
