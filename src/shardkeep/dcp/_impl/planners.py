"""
The default planners, and reading stored objects without running code.

Stored objects may consist of plain values of the standard library, numpy and torch, and of classes that torch considers
safe. Any other class is refused by name, unless the user declares it safe (`torch.serialization.add_safe_globals`) or allows
all classes (`SHARDKEEP_ALLOW_PICKLE=1`).
"""

from __future__ import annotations

import io
import logging
import math
import pickle
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import cache
from typing import IO, Any, NamedTuple

import torch
from torch import _utils as rebuilding

from shardkeep.dcp._impl import plans
from shardkeep.errors import BrokenProtocol, InvalidShards, MalformedFile, PickleRefused
from shardkeep.format.dtypes import known_to_torch
from shardkeep.format.pickles import Call, Names, NameTable, ReaderClass, end_of_pickle, plain_names, read_checked
from shardkeep.format.torch_zip import is_archive
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.torch import safe_globals
from shardkeep.options import Options
from shardkeep.plan.save_plan import SMALL_NBYTES
from shardkeep.state import flatten


def load_object(stream: IO[bytes], *, key: str) -> Any:
    """Read an object from the bytes that `torch.save` wrote for it; the errors are those of `load_safely`."""
    data = stream.read()
    return load_safely(lambda: io.BytesIO(data), f"{key!r}", {"key": key}, archive=is_archive(data))


def load_safely(opened: Callable[[], Any], name: str, about: dict[str, str], *, archive: bool, **how: Any) -> Any:
    """Return what `torch.save` wrote; `PickleRefused` for other classes, `MalformedFile` for anything else."""
    try:
        if Options().allow_pickle:
            return torch.load(opened(), weights_only=False, **how)
        if archive:  # torch's older format is several pickles in a row, which only its own reader separates
            with suppress(PickleRefused):
                return _load_plain(opened, **how)
        return torch.load(opened(), weights_only=True, **how)
    except pickle.UnpicklingError as exc:
        said = next((line.strip() for line in str(exc).splitlines() if "nsupported" in line or "GLOBAL" in line), None)
        if said is None:
            raise MalformedFile(f"{name}: not what torch.save writes: {exc}", **about) from exc
        raise PickleRefused(
            f"{name} is stored as a pickle that is not known to be safe: {said}",
            hint="if you trust it: torch.serialization.add_safe_globals([that class]) before the load,"
            " or SHARDKEEP_ALLOW_PICKLE=1 in the environment for any",
            **about,
        ) from exc
    except Exception as exc:  # torch, and the constructors that a forged pickle may call, raise anything
        raise MalformedFile(f"{name}: not what torch.save writes: {exc!r}", **about) from exc


def _load_plain(opened: Callable[[], Any], **how: Any) -> Any:
    """Load values that are plain, tensors, or of classes that the user declared safe; `PickleRefused` for others."""
    given: NameTable | None = None

    def read(kind: ReaderClass) -> Any:
        class Reader(kind):  # type: ignore[misc,valid-type]  # mypy knows no base that is an argument
            """The unpickler that torch uses to read an archive."""

            def __init__(self, file: IO[bytes], **how: Any) -> None:
                nonlocal given
                raw = file.read()
                end = end_of_pickle(raw, "a stored object")
                given = NameTable(_plain(), end, safe_globals)
                super().__init__(io.BytesIO(raw[:end]), given=given, **how)

        class Module:
            Unpickler = Reader
            load = staticmethod(lambda file, **how: Reader(file, **how).load())
            UnpicklingError = pickle.UnpicklingError

        return torch.load(opened(), weights_only=False, pickle_module=Module, **how)

    try:
        made = read_checked(read)
    except RuntimeError as exc:
        if "pickle_module" not in str(exc):
            raise
        # The user has configured torch to use only its own unpickler.
        raise PickleRefused("torch reads pickles itself") from exc
    if given is not None and (name := given.left_behind()) is not None:
        raise PickleRefused(f"the pickle has {name} itself as a value")
    return made


class _Bytes(NamedTuple):
    """Stands for an untyped storage, of which torch's reader only uses the dtype."""

    dtype: torch.dtype


@cache
def _plain() -> Names:
    torchs: list[Any] = [
        *(torch.device, torch.serialization._get_layout),
        *(getattr(rebuilding, f"_rebuild_{what}") for what in ("tensor_v2", "tensor_v3", "parameter")),
    ]
    return {
        **plain_names(),
        **{(each.__module__, each.__qualname__): Call(each) for each in torchs},
        ("torch", "Size"): Call(_size),
        **{("torch", dtype.name): known for known, dtype in known_to_torch().items()},
        ("torch.storage", "UntypedStorage"): _Bytes(torch.uint8),
    }


def _size(numbers: Any = ()) -> torch.Size:
    if type(numbers) not in (tuple, list):  # the sizes of a tensor without memory may be any number
        raise MalformedFile("a size that is not made of numbers")
    return torch.Size(numbers)


# -- torch's helpers for plans that are used again; our planners make each plan anew -----------------------------------


def _compare_save_plans(plan: protocol.SavePlan, other_plan: protocol.SavePlan) -> bool:
    """Return whether two plans are equal, including index hints."""
    return plan == other_plan and all(
        mine.index.index == other.index.index for mine, other in zip(plan.items, other_plan.items, strict=True)
    )


def _contains_usable_plan(delta_plans: list[protocol.SavePlan]) -> bool:
    """Return whether any rank sent a plan, and not only a note that it has not changed."""
    return any(plan and plan.usable for plan in delta_plans)


def _merge_delta_local_plans(
    cached_plans: list[protocol.SavePlan], delta_plans: list[protocol.SavePlan]
) -> list[protocol.SavePlan]:
    """Return each rank's new plan, or its previous one if it sent none."""
    return [
        cached if delta and not delta.usable else delta
        for cached, delta in zip(cached_plans, delta_plans, strict=False)
    ]


logger = logging.getLogger("shardkeep")

_LONGEST_MESSAGE = 500


@dataclass(eq=False, repr=False)
class DefaultSavePlanner(protocol.SavePlanner):
    """
    Saves every value of a state, nested or flat, and each replicated one only once. Extend it by `lookup_object` (where
    a value is found), `transform_object` (what is stored for it), or any method of `SavePlanner`.
    """

    flatten_state_dict: bool = True
    """Store the values inside nested dicts and lists one by one."""
    flatten_sharded_tensors: bool = True
    """Store ShardedTensors inside ShardedTensors by their offsets in the whole."""
    dedup_replicated_tensors: InitVar[bool | None] = None
    """Has no effect, and is logged."""
    dedup_save_to_lowest_rank: bool = False
    """A replicated value is written by the first rank that has it, and not by the one with least to write."""
    enable_plan_caching: InitVar[bool] = False
    """Has no effect: each save makes its own plan, so that it never describes an earlier state."""
    mappings: flatten.FLATTEN_MAPPING = field(default_factory=dict, init=False)
    _storage_meta: protocol.StorageMeta | None = field(default=None, init=False)

    def __post_init__(self, dedup_replicated_tensors: bool | None, enable_plan_caching: bool) -> None:
        if dedup_replicated_tensors is not None:
            logger.warning("DefaultSavePlanner: dedup_replicated_tensors has no effect any more; please leave it out")
        self._enable_plan_caching = enable_plan_caching

    def set_up_planner(
        self,
        state_dict: protocol.STATE_DICT_TYPE,
        storage_meta: protocol.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._storage_meta = storage_meta
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten.flatten_state_dict(state_dict)
        if self.flatten_sharded_tensors:
            state_dict = flatten.flatten_sharded_tensors(state_dict)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> protocol.SavePlan:
        plan = plans.create_default_local_save_plan(self.state_dict, self.is_coordinator)
        if self.flatten_state_dict:
            plan = replace(plan, planner_data=self.mappings)
        self.plan = plan
        return plan

    def create_global_plan(
        self, all_plans: list[protocol.SavePlan]
    ) -> tuple[list[protocol.SavePlan], protocol.Metadata]:
        """Return the plans without replicas, and the metadata; `InvalidShards` if shards do not tile their tensor."""
        self.global_plan, self.metadata = self._create_global_plan(all_plans)
        # Our driver translates for torch's storages, torch's driver does not. The class of `storage_meta` shows whose it is.
        in_its_words = protocol.translator(None, self._storage_meta)
        return in_its_words(self.global_plan), in_its_words(self.metadata)

    def _dedup_save_plans(self, all_plans: list[protocol.SavePlan]) -> list[protocol.SavePlan]:
        # Buffers are among the small ones, and are to come from one rank.
        return plans.dedupe(all_plans, small_nbytes=math.inf if self.dedup_save_to_lowest_rank else SMALL_NBYTES)

    def _create_global_plan(
        self, all_plans: list[protocol.SavePlan]
    ) -> tuple[list[protocol.SavePlan], protocol.Metadata]:
        global_plan, metadata = plans.create_default_global_save_plan(self._dedup_save_plans(all_plans))
        if self.flatten_state_dict:
            merged: flatten.FLATTEN_MAPPING = {}
            # The first rank that has a key determines its path.
            for plan in reversed(global_plan):
                merged.update(plan.planner_data or {})
            metadata = replace(metadata, planner_data=merged)
        if faults := plans._validate_global_plan(global_plan, metadata):
            summary = "; ".join(faults)
            if len(summary) > _LONGEST_MESSAGE:
                summary = f"{summary[:_LONGEST_MESSAGE]}... ({len(faults)} faults)"
            raise InvalidShards(f"Failed to validate global plan: {summary}")
        return global_plan, metadata

    def finish_plan(self, new_plan: protocol.SavePlan) -> protocol.SavePlan:
        self.plan = new_plan
        return self.plan

    def resolve_data(self, write_item: protocol.WriteItem) -> torch.Tensor | io.BytesIO:
        found = self.lookup_object(write_item.index)
        data: torch.Tensor | io.BytesIO = self.transform_object(write_item, found)
        return data

    def lookup_object(self, index: protocol.MetadataIndex) -> Any:
        return plans.find_state_dict_object(self.state_dict, index)

    def transform_object(self, write_item: protocol.WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name
        """Return what is stored for a value: a tensor as it is, anything else as `torch.save` writes it."""
        if write_item.type == protocol.WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(object, stream)
            return stream
        return object


FlatState = tuple[dict[str, Any], flatten.FLATTEN_MAPPING]
"""The values by flat name, and their paths."""


def flat_state(
    state: protocol.STATE_DICT_TYPE, planner: DefaultLoadPlanner, rules: Callable[..., Any] = flatten.flatten_state_dict
) -> FlatState:
    flat: dict[str, Any] = flatten.flatten_sharded_tensors(state) if planner.flatten_sharded_tensors else state
    return rules(flat) if planner.flatten_state_dict else (flat, {name: (name,) for name in flat})


def old_flat_state(
    state: protocol.STATE_DICT_TYPE, planner: DefaultLoadPlanner, flat: dict[str, Any], saved: AbstractSet[str]
) -> FlatState | None:
    """Flatten by the rules of torch 2.3 if that finds names of the checkpoint that today's rules, in `flat`, do not."""
    if not planner.flatten_state_dict or saved >= flat.keys():
        return None
    old = flat_state(state, planner, flatten.flatten_state_dict_v_2_3)
    return old if old[0].keys() & (saved - flat.keys()) else None


@dataclass(eq=False, repr=False)
class DefaultLoadPlanner(protocol.LoadPlanner):
    """
    Fills every value of a state, nested or flat, from the checkpoint. Extend it by `lookup_tensor` (where a tensor is
    found), `transform_tensor` (what is filled for it), or any method of `LoadPlanner`.
    """

    flatten_state_dict: bool = True
    """The checkpoint holds the values of nested dicts and lists one by one."""
    flatten_sharded_tensors: bool = True
    """It holds ShardedTensors inside ShardedTensors by their offsets in the whole."""
    allow_partial_load: bool = False
    """Leave values that the checkpoint lacks as they are, instead of raising."""
    original_state_dict: protocol.STATE_DICT_TYPE = field(default_factory=dict, init=False)
    mappings: flatten.FLATTEN_MAPPING = field(default_factory=dict, init=False)

    def set_up_planner(
        self,
        state_dict: protocol.STATE_DICT_TYPE,
        metadata: protocol.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Allocate tensors on the meta device, flatten the state as configured, and keep it."""
        plans._init_state_dict(state_dict)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat_state(state_dict, self)
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> protocol.LoadPlan:
        """Return what this rank needs; `BadState` if the checkpoint lacks keys, `StateMismatch` if sizes differ there."""
        if self.metadata is None:
            raise BrokenProtocol("a load needs the checkpoint's metadata", hint="pass them to set_up_planner")
        saved = self.metadata.state_dict_metadata
        if (old := old_flat_state(self.original_state_dict, self, self.state_dict, saved.keys())) is not None:
            self.state_dict, self.mappings = old
        return plans.create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)

    def create_global_plan(self, global_plan: list[protocol.LoadPlan]) -> list[protocol.LoadPlan]:
        return plans.create_default_global_load_plan(global_plan)

    def finish_plan(self, new_plan: protocol.LoadPlan) -> protocol.LoadPlan:
        return new_plan

    def load_bytes(self, read_item: protocol.ReadItem, value: io.BytesIO) -> None:
        """Put a stored object into the state; classes that are not known to be safe are refused."""
        fqn = read_item.dest_index.fqn
        loaded = load_object(value, key=fqn)
        if self.flatten_state_dict:
            flatten.set_element(
                self.original_state_dict, flatten.as_keyed(self.original_state_dict, self.mappings[fqn]), loaded
            )
        else:
            # If nested ShardedTensors were flattened, `state_dict` is not the caller's dict.
            self.state_dict[fqn] = self.original_state_dict[fqn] = loaded

    def resolve_tensor(self, read_item: protocol.ReadItem) -> torch.Tensor:
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def commit_tensor(self, read_item: protocol.ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the state's own memory was filled."""

    def lookup_tensor(self, index: protocol.MetadataIndex) -> torch.Tensor:
        """Return the tensor that is filled for an index: the local memory of a shard."""
        found: torch.Tensor = plans.find_state_dict_object(self.state_dict, index)
        return found

    def transform_tensor(self, read_item: protocol.ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return the box of a tensor that an item fills."""
        box = tensor
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            if box.size(axis) != length:
                box = box.narrow(axis, start, length)
        return box


class _EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Makes the state from the checkpoint, on the CPU: all of it, or `keys`, which are flat names or begin paths."""

    def __init__(self, keys: set[str] | None = None, *args: Any, **kwargs: Any) -> None:
        self.keys = keys
        super().__init__(*args, **kwargs)

    def _should_include_key(self, key: str, metadata: protocol.Metadata) -> bool:
        if self.keys is None or key in self.keys:
            return True
        path = (metadata.planner_data or {}).get(key) or key.split(".")
        parts = [str(part) for part in path]
        return any(".".join(parts[:length]) in self.keys for length in range(1, len(parts) + 1))

    def set_up_planner(
        self,
        state_dict: protocol.STATE_DICT_TYPE,
        metadata: protocol.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Fill the empty state with empty tensors and placeholders, and go on as with any state."""
        if state_dict:
            raise BrokenProtocol("the state must be empty: it is created from the checkpoint", hint="pass {}")
        if metadata is None:
            raise BrokenProtocol(
                "the state is created from the checkpoint's metadata", hint="pass them to set_up_planner"
            )
        flat: dict[str, Any] = {}
        for key in metadata.state_dict_metadata:
            if not self._should_include_key(key, metadata):
                continue
            flat[key] = entry = metadata.state_dict_metadata[key]
            if protocol.is_tensor_entry(entry):
                flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]  # a tensor's
            flatten.set_element(state_dict, plans.saved_path(metadata, key), flat[key])
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if self.flatten_state_dict:
            # The names are those of the checkpoint. Flattening again would renumber a list of which some items are left out.
            self.state_dict, self.mappings = flat, {key: plans.saved_path(metadata, key) for key in flat}
