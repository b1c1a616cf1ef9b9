"""A whole state as columns: the same as its leaves say one by one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardkeep.format.values import Container, join, leaf_keys
from shardkeep.state.describe import Description, describe, file_groups
from shardkeep.state.leaves import ShardedBox, describe_leaf, describe_ordinary


class Special(nn.Parameter):
    """A framework's own parameter class."""


COPIED = ("reversed", "conjugate", "negative")
"""These have no plain view: each description copies them to other memory."""


def _many_ways() -> dict[str, Any]:
    """Tensors that see a few runs of memory in many ways, and some that are alone."""
    one, array = torch.arange(24.0), np.arange(24.0)
    number = torch.randn(6, dtype=torch.complex64)
    return {
        "one": one,
        "again": one,
        "parameter": nn.Parameter(one),
        "special": Special(one),
        "rows": one.view(4, 6),
        "columns": one.view(4, 6).t(),
        "head": one[:8],
        "tail": one[8:],
        "bits": one.view(torch.int32),
        "array": array,
        "array_again": array,
        "array_as_tensor": torch.from_numpy(array),
        "reversed": array[::-1],
        "box": ShardedBox(one, offsets=(0,), shape=(24,)),
        "number": number,
        "conjugate": number.conj(),
        "negative": number.conj().imag,
        "expanded": torch.ones(1, 3).expand(2, 3),
        "no_step": torch.ones(3).as_strided((1, 1), (0, 0)),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "wants_gradient": torch.ones(3, requires_grad=True),
    }


def _ordinary_only() -> dict[str, Any]:
    tied = torch.ones(4, 3)
    return {"tied": tied, "again": tied, "scalar": torch.tensor(1), "parameter": nn.Parameter(torch.ones(2))}


@pytest.mark.parametrize(
    "state", [_many_ways(), _ordinary_only(), {}, {"value": 3}], ids=["all", "plain", "no", "value"]
)
def test_columns_say_what_leaves_say(state: dict[str, Any]) -> None:
    found = describe(state, rank=0)

    leaves = [describe_leaf(key, state[key]) for key in found.keys]
    aliases = [leaf.alias for leaf in leaves]
    assert found.keys == [key for key in state if key != "value"]
    assert found.ndim.tolist() == [len(leaf.shape) for leaf in leaves]
    assert _rows(found) == [
        (at, piece.offsets, tuple(piece.tensor.shape), piece.tensor.dtype, piece.tensor.stride())
        for at, leaf in enumerate(leaves)
        for piece in leaf.pieces
    ]
    owners = [found.keys[at] for at in found.row_tensor.tolist()]
    assert [piece.data_ptr() for key, piece in zip(owners, found.pieces, strict=True) if key not in COPIED] == [
        piece.tensor.data_ptr()
        for key, leaf in zip(found.keys, leaves, strict=True)
        for piece in leaf.pieces
        if key not in COPIED
    ]
    assert found.alias.tolist() == [at if alias is None else aliases.index(alias) for at, alias in enumerate(aliases)]
    assert found.origin.tolist() == [isinstance(state[key], np.ndarray) for key in found.keys]
    assert not any(piece.requires_grad for piece in found.pieces)
    for at, leaf in enumerate(leaves):
        assert tuple(found.shape[at, : found.ndim[at]].tolist()) == leaf.shape


def _rows(found: Description) -> list[Any]:
    rows = []
    for row, (at, piece) in enumerate(zip(found.row_tensor.tolist(), found.pieces, strict=True)):
        box = found.boxes.box(row, int(found.ndim[at]))
        rows.append((at, box.offsets, box.sizes, piece.dtype, piece.stride()))
    return rows


@pytest.mark.parametrize("key", ["columns", "array", "conjugate", "negative", "tail", "empty", "special", "box"])
def test_nothing_special_is_ordinary(key: str) -> None:
    """What the short way knows nothing of is left to the closer look."""
    assert describe_ordinary(_many_ways()[key]) is None


STATES: dict[str, dict[Any, Any]] = {
    "usual": {"model": {"a": 1, "b": [2, {"c": 3}]}, "optim": {"state": {0: {"m": 4}}}, "step": 5},
    "dots in names of containers": {"a": {"b.x": 1, "c": 2}, "a.b": {"y": 3}, "z": 4},
    "dots in names of leaves": {"a": {"x": 1}, "a.y": 2},
    "names that are equal as text": {1: {"x": 1}, "1": 2, "": {"e": 3}},
    "no containers": {"a": 1, "b": 2},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_groups_are_the_containers_at_the_top(state: dict[Any, Any]) -> None:
    found = describe(_with_tensors(state), rank=0)
    expected: dict[str, str] = {}
    assert isinstance(found.tree, Container)
    for part, node in found.tree.children:
        name = join(None, "dict", part)
        for key in leaf_keys(node):
            expected[f"{name}.{key}" if node is not None else name] = name if node is not None else "state"
    assert dict(zip(found.keys, file_groups(found.tree, found.keys), strict=True)) == expected


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tensors(child) for key, child in value.items()}
    return list(map(_with_tensors, value)) if isinstance(value, list) else torch.tensor(value)
