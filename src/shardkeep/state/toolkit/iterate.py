"""
One walk over a state dict, with one function for each kind of tensor in it.

A tree of dicts, lists and tuples comes in; out comes a new tree of the same nesting, in which every ShardedTensor,
DTensor and tensor is what its function made of it, moved to the CPU or copied into a companion where that was asked
for. The tree that came in is never changed.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shardkeep.errors import StateError
from shardkeep.state.toolkit.companions import CompanionMismatch, check_keys, check_leaf, check_length, copy_leaf
from shardkeep.state.toolkit.recognise import Path, awaited, is_dtensor, is_sharded_tensor, spell

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CompanionMismatch", "LeafFunc", "UnexpectedValue", "check_companion", "check_types", "iterate_state_dict"]

LeafFunc = Callable[[Any, "ProcessGroup | None", "torch.device | None", Any], Any]
"""Gets a tensor, the process group, the device and the companion (or None) and returns what replaces the tensor."""

_NO_COMPANION: Final = object()  # not None: a tree of companions may hold None where a tensor should be
_PLAIN_VALUES: Final = (int, float, str, bytes, io.BytesIO, type(None))


class UnexpectedValue(StateError, ValueError):
    """A value that is neither a tensor nor of a plain type, where only those were asked for."""


def iterate_state_dict(
    iter_object: Any,
    sharded_tensor_func: LeafFunc,
    dtensor_func: LeafFunc,
    tensor_func: LeafFunc,
    *,
    pg: ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    companion_obj: Any = None,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
    non_blocking: bool = True,
) -> Any:
    """
    Build a tree in which each tensor is what the function of its kind returned for it.

    Tensors that an asynchronous collective still writes are waited for before their function sees them. Dicts come
    out as plain dicts, tuples as tuples, named tuples as what they were.

    Args:
        iter_object: the tree, or one value of it.
        sharded_tensor_func: called for each ShardedTensor.
        dtensor_func: called for each DTensor.
        tensor_func: called for each other tensor.
        pg: handed to the functions; also the group `ranks_only` counts in.
        device: handed to the functions.
        cpu_offload: move results to the CPU, unless there is a companion for them.
        companion_obj: a tree of the same nesting, into whose tensors the results are copied. Unlike torch's, it must
            fit: a None, another dtype or size in it is an error, never a cast, a broadcast or a value left as it is.
        ranks_only: ranks that get the result; the others, which call the functions all the same, get an empty dict
            (None in place of anything else). Empty for all ranks.
        type_check: refuse values other than tensors, int, float, str, bytes, BytesIO and None; else copy them deeply.
        non_blocking: queue copies into companions on the accelerator's current stream and return. The values are
            there once that stream has been synchronised.

    Raises:
        CompanionMismatch: the companion does not fit; names the path. Keys and lengths are looked at before anything
            is copied.
        UnexpectedValue: a value of another type, and `type_check` is on.

    """
    companion = _NO_COMPANION if companion_obj is None else companion_obj
    if companion is not _NO_COMPANION:
        _check(iter_object, companion, (), leaves=False)
    walk = _Walk(
        funcs=(sharded_tensor_func, dtensor_func, tensor_func),
        pg=pg,
        device=device,
        cpu_offload=cpu_offload,
        type_check=type_check,
        non_blocking=non_blocking,
        wanted=not ranks_only or _rank_in(pg) in ranks_only,
    )
    return walk.visit(iter_object, companion, ())


def check_companion(tree: Any, companion: Any) -> None:
    """
    Raise `CompanionMismatch`, naming the path, unless each tensor of `tree` can be copied as it is into `companion`.

    Nothing is copied.
    """
    _check(tree, companion, (), leaves=True)


def check_types(tree: Any, path: Path = ()) -> None:
    """Raise `UnexpectedValue`, naming the path, for a value that `iterate_state_dict` refuses."""
    if isinstance(tree, torch.Tensor):
        return
    if isinstance(tree, dict):
        for key, value in tree.items():
            check_types(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            check_types(value, (*path, index))
    elif not isinstance(tree, _PLAIN_VALUES):
        raise UnexpectedValue(
            f"{spell(path)!r} is a {type(tree).__qualname__}, expected a tensor, int, float, str, bytes or None",
            hint="take it out of the state dict, or pass type_check=False to have it copied",
            key=spell(path),
        )


def _identity_func(obj: Any, pg: ProcessGroup | None, device: torch.device | None, companion_obj: Any) -> Any:
    """Return the tensor as it is."""
    del pg, device, companion_obj
    return obj


@dataclass(frozen=True)
class _Walk:
    """What stays the same from the root of a tree to its leaves."""

    funcs: tuple[LeafFunc, LeafFunc, LeafFunc]
    pg: ProcessGroup | None
    device: torch.device | None
    cpu_offload: bool
    type_check: bool
    non_blocking: bool
    wanted: bool
    """False on a rank that takes part and gets nothing."""

    def visit(self, value: Any, companion: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._visit_tensor(value, companion, path)
        if isinstance(value, dict):
            items = {key: self.visit(item, _child(companion, key), (*path, key)) for key, item in value.items()}
            return items if self.wanted else {}
        if isinstance(value, (list, tuple)):
            return self._visit_sequence(value, companion, path)
        if isinstance(value, _PLAIN_VALUES):
            return value if self.wanted else None
        if self.type_check:
            check_types(value, path)
        return copy.deepcopy(value) if self.wanted else None

    def _visit_sequence(self, value: list[Any] | tuple[Any, ...], companion: Any, path: Path) -> Any:
        items = [self.visit(item, _child(companion, index), (*path, index)) for index, item in enumerate(value)]
        if not self.wanted:
            return None
        if isinstance(value, list):
            return items
        rebuild = getattr(value, "_make", tuple)  # of a named tuple
        return rebuild(items)

    def _visit_tensor(self, value: torch.Tensor, companion: Any, path: Path) -> Any:
        paired = companion is not _NO_COMPANION
        if paired and companion is None:  # the functions could not tell it from no companion
            check_leaf(value, companion, path)
        func = self.funcs[0 if is_sharded_tensor(value) else 1 if is_dtensor(value) else 2]
        made = func(awaited(value), self.pg, self.device, companion if paired else None)
        if not self.wanted:
            return {} if isinstance(made, dict) else None
        if not isinstance(made, torch.Tensor):
            return made
        if paired:
            check_leaf(made, companion, path)
            copy_leaf(made, companion, non_blocking=self.non_blocking)
            return companion
        return made.to(torch.device("cpu")) if self.cpu_offload else made


def _check(value: Any, companion: Any, path: Path, *, leaves: bool) -> None:
    if isinstance(value, dict):
        check_keys(value, companion, path)
        for key, item in value.items():
            _check(item, companion[key], (*path, key), leaves=leaves)
    elif isinstance(value, (list, tuple)):
        check_length(value, companion, path)
        for index, item in enumerate(value):
            _check(item, companion[index], (*path, index), leaves=leaves)
    elif leaves:
        check_leaf(value, companion, path)


def _child(companion: Any, key: Any) -> Any:
    return _NO_COMPANION if companion is _NO_COMPANION else companion[key]


def _rank_in(pg: ProcessGroup | None) -> int:
    import torch.distributed as dist  # noqa: PLC0415 - takes a second, and most calls never ask

    if pg is None and not (dist.is_available() and dist.is_initialized()):
        return 0
    return dist.get_rank(pg)
