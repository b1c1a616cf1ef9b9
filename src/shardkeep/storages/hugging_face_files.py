"""
Which file of a Hugging Face checkpoint each item of a save goes to.

In come the plans of all ranks, out go names of files and what each holds. Names are torch's. Where torch's would make
ranks overwrite each other, or a second shard of a tensor replace the first, there are more files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardkeep.errors import InvalidShards
from shardkeep.protocol.plans import SavePlan, WriteItem
from shardkeep.storages.consolidate import BadMapping, check_mapping
from shardkeep.storages.hugging_face_names import _gen_file_name
from shardkeep.storages.safetensors_writes import FileToWrite

logger = logging.getLogger("shardkeep")


@dataclass(frozen=True)
class Numbers:
    """What the names of a rank's files are made of."""

    mapping: Mapping[str, int] | None
    """The number of each tensor's file; None where all go to file 1."""
    last: int
    """The largest number."""
    shard: int | None = None
    """Of this rank; None where files are not cut by rank."""
    ranks: int = 0
    """A rank's further shards of one tensor are in shards of numbers that are larger by this, each time."""
    instead: Mapping[int, int] = field(default_factory=dict)
    """Other numbers for this rank's files, where other ranks have tensors for the same ones."""


def split(mapping: Mapping[str, int] | None, items: Sequence[WriteItem]) -> dict[int, list[WriteItem]]:
    """
    Return the items of each file.

    Raises:
        BadMapping: (a KeyError) the mapping has no file for a tensor.

    """
    if mapping is None:
        return {1: list(items)}
    found: dict[int, list[WriteItem]] = {}
    for item in items:
        key = item.index.fqn
        if key not in mapping:
            raise BadMapping(
                f"fqn_to_index_mapping has no file for {key!r}", hint="give every tensor of the state one", key=key
            )
        found.setdefault(mapping[key], []).append(item)
    return found


Split = Callable[[Any, list[WriteItem]], dict[int, list[WriteItem]]]
"""Gives the items of each file, as `split` does; a writer that extends ours may have another."""


def files_of(items: Sequence[WriteItem], numbers: Numbers, by: Split = split) -> list[FileToWrite]:
    """Return the files that a rank writes."""
    files = []
    for number, group in by(numbers.mapping, list(items)).items():
        layers = _layers(group)
        if len(layers) > 1 and not numbers.ranks:
            raise InvalidShards(
                f"{layers[-1][0].index.fqn!r} has {len(layers)} shards on one rank, and a file holds only one",
                hint="save with save_distributed=True",
                key=layers[-1][0].index.fqn,
            )
        for depth, layer in enumerate(layers):
            shard = None if numbers.shard is None else numbers.shard + depth * numbers.ranks
            name = _gen_file_name(numbers.instead.get(number, number), numbers.last, shard)
            files.append(FileToWrite(name, layer))
    return files


def _layers(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide items so that no tensor is twice in one layer."""
    seen: Counter[str] = Counter()
    layers: list[list[WriteItem]] = []
    for item in items:
        depth = seen[item.index.fqn]
        seen[item.index.fqn] += 1
        if depth == len(layers):
            layers.append([])
        layers[depth].append(item)
    return layers


def number_shards(plans: Sequence[SavePlan], mapping: Mapping[str, int] | None) -> list[Numbers]:
    """Number the files of a save in which every rank writes its own: rank 0 has shard 1."""
    last = _last(mapping)
    return [Numbers(mapping, last, place, len(plans)) for place in range(1, len(plans) + 1)]


def number_whole(plans: Sequence[SavePlan], mapping: Mapping[str, int] | None, by: Split = split) -> list[Numbers]:
    """
    Number the files of a save of whole tensors, of which mostly rank 0 has all.

    Where several ranks have tensors for one file, each writes a file of its own.

    Raises:
        InvalidShards: an item is only a part of its tensor.

    """
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is not None and tuple(data.chunk.sizes) != tuple(data.size):
                raise InvalidShards(
                    f"{item.index.fqn!r} is spread over ranks: of {list(data.size)}, this rank has {list(data.chunk.sizes)}",
                    hint="save with save_distributed=True, or gather the state on rank 0 first",
                    key=item.index.fqn,
                )
    last = _last(mapping)
    wanted = [_numbers_of(plan, mapping, by) for plan in plans]
    if max(Counter(number for numbers in wanted for number in numbers).values(), default=1) <= 1:
        return [Numbers(mapping, last) for _ in plans]
    pairs = sorted((number, rank) for rank, numbers in enumerate(wanted) for number in numbers)
    logger.warning("several ranks have tensors for one file: there will be up to %d files instead", len(pairs))
    new = {pair: place for place, pair in enumerate(pairs, start=1)}
    return [
        Numbers(mapping, len(pairs), instead={number: new[number, rank] for number in numbers})
        for rank, numbers in enumerate(wanted)
    ]


def _numbers_of(plan: SavePlan, mapping: Mapping[str, int] | None, by: Split) -> list[int]:
    """Return the files that a rank may write to: all, where it only sent word that its plan has not changed."""
    if not plan.usable:
        return sorted(set(mapping.values())) if mapping is not None else [1]
    return sorted(by(mapping, plan.items)) if plan.items else []


def check_complete(plans: Sequence[SavePlan], mapping: Mapping[str, int]) -> None:
    """
    Make sure that a mapping names no tensor that nobody saves, before anything is written for it.

    Raises:
        BadMapping: it does.

    """
    saved = {item.index.fqn for plan in plans for item in plan.items}
    if missing := sorted(mapping.keys() - saved):
        raise BadMapping(
            f"fqn_to_index_mapping names {len(missing)} tensors that the state does not have: {missing[:4]}",
            hint="leave them out of the mapping",
            key=missing[0],
        )


def _last(mapping: Mapping[str, int] | None) -> int:
    if mapping is None:
        return 1
    check_mapping(mapping)
    return max(mapping.values())
