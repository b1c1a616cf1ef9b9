"""Shared reads of `dcp.load`: the items of a default planner's load plan as requests that ranks can share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch

from shardkeep.dcp._impl.planners import DefaultLoadPlanner
from shardkeep.engine.shared_reads import Cut, Cuts, SharedRequest, in_disjoint_memory, is_plain
from shardkeep.format.boxes import Box, Boxes, Ints, matrix_of, tiled
from shardkeep.layouts.torch_values import (
    LoadItemType,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    is_tensor_entry,
)
from shardkeep.storage.file_systems import keeps

_ASKED = ("create_global_plan", "finish_plan", "lookup_tensor", "transform_tensor", "resolve_tensor", "commit_tensor")
"""Methods that must be the default planner's own, so that other ranks can fill its tensors in place."""

_FAR = 1 << 62
"""No file is that large; if metadata say so, reading reports what is wrong."""


def fills_in_place(planner: object) -> TypeGuard[DefaultLoadPlanner]:
    """Return whether a planner fills the state as the default one does."""
    return isinstance(planner, DefaultLoadPlanner) and keeps(planner, DefaultLoadPlanner, _ASKED)


def shared_requests_of_plan(plan: LoadPlan, planner: DefaultLoadPlanner, metadata: Metadata) -> list[SharedRequest]:
    """Return the items of a plan as requests."""
    targets, filled_alone = _targets(plan.items, planner)
    places: Any = metadata.storage_data or {}
    save = getattr(metadata.storage_meta, "save_id", None)
    wants = []
    for item, target, alone in zip(plan.items, targets, filled_alone, strict=True):
        entry: Any = metadata.state_dict_metadata.get(item.storage_index.fqn)
        place = places.get(item.storage_index)
        file, start = str(getattr(place, "relative_path", "")), getattr(place, "offset", 0)
        known = is_tensor_entry(entry) and place is not None and type(start) is int and 0 <= start < _FAR
        fits = known and tuple(target.shape) == tuple(item.lengths)
        # Each rank may load from its own place. Without an id, files with the same name may belong to different checkpoints.
        told_apart = bool(save) or os.path.isabs(file)
        can_share = alone and fits and told_apart and is_plain(target, entry.properties.dtype)
        key, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        what = (
            str(save),
            file,
            start,
            key,
            offset,
            tuple(item.storage_offsets),
            tuple(item.lengths),
            str(target.dtype),
        )
        wants.append(SharedRequest(repr(what).encode(), target, file, start if known else 0, can_share))
    return wants


def remaining_plan(plan: LoadPlan, cuts: Cuts) -> LoadPlan:
    """Return the plan of a rank that reads only parts of its shared items."""
    rows = [row for row in range(len(plan.items)) if row not in cuts or cuts[row]]
    return replace(plan, items=[_cut(plan.items[row], cuts.get(row)) for row in rows])


def _cut(item: ReadItem, cut: Cut | None) -> ReadItem:
    if cut is None or not item.lengths:
        return item

    def moved(offsets: torch.Size) -> torch.Size:
        return torch.Size([at + cut.begin * (axis == cut.axis) for axis, at in enumerate(offsets)])

    lengths = [cut.end - cut.begin if axis == cut.axis else n for axis, n in enumerate(item.lengths)]
    return replace(
        item,
        dest_offsets=moved(item.dest_offsets),
        storage_offsets=moved(item.storage_offsets),
        lengths=torch.Size(lengths),
    )


def _targets(items: Sequence[ReadItem], planner: DefaultLoadPlanner) -> tuple[list[torch.Tensor], list[bool]]:
    """Return the tensors that items fill, and whether each is filled by one item alone."""
    wholes: dict[MetadataIndex, torch.Tensor] = {}
    parts: dict[MetadataIndex, list[int]] = {}
    found = [torch.empty(0)] * len(items)
    filled_alone = [False] * len(items)
    for row, item in enumerate(items):
        if item.type == LoadItemType.BYTE_IO:
            continue
        try:
            whole = wholes.get(item.dest_index)
            if whole is None:
                whole = wholes[item.dest_index] = planner.lookup_tensor(item.dest_index).detach()
            found[row] = planner.transform_tensor(item, whole)
        except Exception:  # noqa: BLE001, S112 - reading it says so
            continue
        parts.setdefault(item.dest_index, []).append(row)
    alone = dict(zip(wholes, in_disjoint_memory(list(wholes.values())), strict=True))
    for index, rows in parts.items():
        filled_once = len(rows) == 1 or _tile(tuple(wholes[index].shape), [items[row] for row in rows])
        for row in rows:
            filled_alone[row] = alone[index] and filled_once
    return found, filled_alone


def _tile(shape: Ints, items: Sequence[ReadItem]) -> bool:
    """Return whether items fill each element of a tensor exactly once."""
    filled = [Box(tuple(item.dest_offsets), tuple(item.lengths)) for item in items if 0 not in item.lengths]
    if any(o + n > full for box in filled for o, n, full in zip(box.offsets, box.sizes, shape, strict=True)):
        return False
    boxes = Boxes.of(filled)
    return bool(tiled(matrix_of([shape], len(shape), 1), np.zeros(len(boxes), np.int64), boxes)[0])
