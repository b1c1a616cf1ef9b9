"""
The plans and metadata of the default planners, as functions of a flat state dict.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import torch

from shardkeep.errors import StateMismatch
from shardkeep.protocol.chunks import boxes_overlap, clashes, within
from shardkeep.protocol.items import _create_default_metadata_only_plan, _create_write_items, reads_of
from shardkeep.protocol.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    is_tensor_entry,
)
from shardkeep.protocol.plans import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from shardkeep.protocol.problems import BrokenProtocol, MissingKeys
from shardkeep.state.toolkit.recognise import is_dtensor

logger = logging.getLogger("shardkeep")

_MOST_NAMED = 20
"""Keys that a message names before it only counts them."""


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool) -> SavePlan:  # noqa: ARG001
    """Return the plan to write everything this rank has; what others have too is left to the global plan."""
    items: list[WriteItem] = []
    for fqn, value in state_dict.items():
        if _has_part(value):
            items += _create_write_items(fqn, value)
    return SavePlan(items)


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """
    Return the plans of all ranks, and the metadata of what they write.

    Args:
        all_plans: What each rank writes; each item is in one plan only.
        rewrite_index_hints: Put into each index the place of its chunk in the metadata.

    Raises:
        BrokenProtocol: (an AssertionError) two items that are no shards have one name.

    """
    entries: dict[str, STORAGE_TYPES] = {}
    plans = []
    for plan in all_plans:
        items = []
        for item in plan.items:
            fqn, data = item.index.fqn, item.tensor_data
            if fqn in entries and (item.type != WriteItemType.SHARD or not is_tensor_entry(entries[fqn])):
                raise BrokenProtocol(f"{fqn!r} is planned to be written twice", hint="dedupe the plans first", key=fqn)
            if item.type == WriteItemType.BYTE_IO:
                entries[fqn] = BytesStorageMetadata()
                items.append(item)
                continue
            if data is None or data.chunk is None:
                raise BrokenProtocol(f"the item for {fqn!r} does not say which box of the tensor it writes", key=fqn)
            entry = entries.setdefault(fqn, TensorStorageMetadata(data.properties, data.size, []))
            chunks = entry.chunks  # type: ignore[union-attr]  # no bytes: checked above
            if rewrite_index_hints:
                items.append(_hinted(item, len(chunks)))
            else:
                items.append(item)
            chunks.append(data.chunk)
        plans.append(dataclasses.replace(plan, items=items))
    return plans, Metadata(entries)


def _hinted(item: WriteItem, hint: int) -> WriteItem:
    index = item.index
    if type(item) is not WriteItem or type(index) is not MetadataIndex:  # torch's, or a user's own
        return dataclasses.replace(item, index=dataclasses.replace(index, index=hint))
    # Said directly, which takes a third of the time: there is one item for each shard of each rank.
    index = MetadataIndex(index.fqn, index.offset, hint)
    return WriteItem(index, item.type, item.bytes_io_data, item.tensor_data)


def create_default_local_load_plan(state_dict: dict[str, Any], metadata: Metadata, strict: bool = True) -> LoadPlan:
    """
    Return what to read to fill this rank's part of a flat state dict.

    What is converted to another dtype, and what the checkpoint does not cover, is logged with its names.

    Args:
        state_dict: What to fill.
        metadata: What the checkpoint holds, in our classes or torch's.
        strict: Raise where the checkpoint lacks a key; otherwise leave its value alone.

    Raises:
        MissingKeys: (a RuntimeError) names every key that is missing.
        StateMismatch: (a ValueError) names every tensor of another size.

    """
    entries = metadata.state_dict_metadata
    if strict and (missing := [fqn for fqn in state_dict if fqn not in entries]):
        raise MissingKeys(
            f"Missing key in checkpoint state_dict: {', '.join(missing)}.",
            hint="load with DefaultLoadPlanner(allow_partial_load=True) to leave these as they are",
            missing=missing,
        )
    wanted = {fqn: value for fqn, value in state_dict.items() if fqn in entries}
    _check_sizes(wanted, entries)
    items: list[ReadItem] = []
    thin: list[str] = []
    for fqn, value in wanted.items():
        if _has_part(value):
            reads, complete = reads_of(fqn, entries[fqn], value)
            items += reads
            if not complete:
                thin.append(fqn)
    if thin:
        logger.warning("the checkpoint does not hold all of these tensors; the rest stays as it is: %s", named(thin))
    _warn_of_casts(wanted, entries)
    return LoadPlan(items)


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """Return the plans as they are: each rank reads what it needs."""
    return all_plans


def _create_default_local_metadata(state_dict: STATE_DICT_TYPE) -> Metadata:
    """Return the metadata that a save of this state by the default planner would have, as far as this rank knows."""
    _, metadata = create_default_global_save_plan([_create_default_metadata_only_plan(state_dict)])
    return metadata


def _validate_global_plan(global_plan: list[SavePlan], metadata: Metadata) -> list[str]:
    """Return what is wrong with a global plan, one line for each fault; nothing if it can be carried out."""
    faults: list[str] = []
    for key, entry in metadata.state_dict_metadata.items():
        if not is_tensor_entry(entry):
            continue
        size, chunks = entry.size, entry.chunks  # type: ignore[union-attr]  # checked above
        outside = [chunk for chunk in chunks if not within(size, chunk)]
        faults += [f"key:{key} has out of bounds chunk {_box(chunk)} of {tuple(size)}" for chunk in outside]
        if outside:
            continue
        faults += [f"key:{key} has overlapping chunks {_box(a)} and {_box(b)}" for a, b in clashes(chunks)]
        covered, volume = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(size)
        # A single plan may be one rank's own part of a state that others save elsewhere.
        if len(global_plan) > 1 and covered != volume:
            faults.append(f"key:{key} invalid fill: its chunks hold {covered} elements of {volume}")
    for fault in faults:
        logger.warning(fault)
    return faults


def _check_box_overlap(box0: ChunkStorageMetadata, box1: ChunkStorageMetadata) -> bool:
    """Say whether two boxes of a tensor have an element in common."""
    return boxes_overlap(box0, box1)


def named(keys: list[str]) -> str:
    """Write keys for a message, the first ones only where there are many."""
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return ", ".join(keys[:_MOST_NAMED]) + more


def _has_part(value: Any) -> bool:
    # A DTensor may live on a mesh that this rank is no part of.
    return not is_dtensor(value) or value.device_mesh.get_coordinate() is not None


def _check_sizes(wanted: dict[str, Any], entries: dict[str, Any]) -> None:
    wrong = [
        f"Size mismatch between saved {entries[fqn].size} and current: {value.size()} for {fqn}"
        for fqn, value in wanted.items()
        if isinstance(value, torch.Tensor) and is_tensor_entry(entries[fqn]) and entries[fqn].size != value.size()
    ]
    if wrong:
        raise StateMismatch("; ".join(wrong), hint="build the state with the saved sizes", mismatched=wrong)


def _warn_of_casts(wanted: dict[str, Any], entries: dict[str, Any]) -> None:
    casts = [
        f"{fqn} ({entries[fqn].properties.dtype} to {value.dtype})"
        for fqn, value in wanted.items()
        if isinstance(value, torch.Tensor)
        and is_tensor_entry(entries[fqn])
        and entries[fqn].properties.dtype != value.dtype
    ]
    if casts:
        logger.warning("tensors are converted to the state's dtype as they are loaded: %s", named(casts))


def _box(chunk: Any) -> str:
    return f"{tuple(chunk.sizes)} at {tuple(chunk.offsets)}"
