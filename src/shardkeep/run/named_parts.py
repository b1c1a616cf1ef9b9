"""
Parts of a state, named by the beginnings of flat names: "model" is all of it, "model.layers.0" what is below that.

A `*` stands for anything, dots too: "optimizer.state.*.exp_avg". Where several names fit a leaf, the closest counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shardkeep.format.tree import Node, join, leaf_keys


def closest(names: Sequence[str], tree: Node) -> tuple[dict[str, int | None], list[int]]:
    """
    Say which of the names fits each leaf of a state best, and which of them fit nothing.

    The more parts a name has, the closer it is; then the fewer with a `*`; then the one that comes first.
    """
    order = sorted(range(len(names)), key=lambda number: _closeness(names[number]), reverse=True)
    patterns = [(number, _pattern(names[number]).match) for number in order]
    by_leaf = {leaf: next((number for number, fits in patterns if fits(leaf)), None) for leaf in leaf_keys(tree)}
    # One that always gives way to closer names is no mistake, nor one of something that is not there yet.
    idle = set(order).difference(number for number in by_leaf.values() if number is not None)
    empty = list(_empty(tree, None)) if idle else []
    unfit = [
        number
        for number, fits in patterns
        if number in idle and not any(map(fits, by_leaf)) and not _is_to_come(names[number], empty)
    ]
    return by_leaf, sorted(unfit)


def _is_to_come(name: str, empty: list[str]) -> bool:
    """
    Say whether a name is that of something empty, or is below it: an optimizer's state before its first step.

    Below it by its parts without a `*` alone: that stands for anything, and a slip behind it would pass unnoticed.
    """
    fits, certain = _pattern(name).match, name.partition("*")[0]
    return any(fits(each) or certain.startswith(f"{each}.") for each in empty)


def _closeness(name: str) -> tuple[int, int]:
    parts = name.split(".")
    return len(parts), sum("*" not in part for part in parts)


def _pattern(name: str) -> re.Pattern[str]:
    # All lines: there is nothing that a key may not hold.
    return re.compile(".*".join(map(re.escape, name.split("*"))) + r"(?:\.|\Z)", re.DOTALL)


def _empty(node: Node, name: str | None) -> Iterator[str]:
    """Give the flat names of containers that have nothing in them."""
    if node is None:
        return
    if not node.children and name is not None:
        yield name
    for part, child in node.children:
        yield from _empty(child, join(name, node.kind, part))
