"""
Tensors that share memory: which of them truly have bytes in common, and which run of bytes they lie in.

Tensors of one storage come in; out come groups. Those of a group are copied as one run of bytes, so that they stay
views of each other; the others are copied alone, each with its own bytes and no more. Values are never looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from shardkeep.state.overlap import overlaps_itself

_SEARCH: Final = 10_000
"""How many steps to spend on finding out whether two scattered tensors have an element in common."""
_NEIGHBOURS: Final = 64
"""With more tensors than this around it, a tensor is taken to overlap them: to compare all would take too long."""
_ALIGNMENT: Final = 16
"""No element is larger: a run that begins at a multiple of it keeps every view of it aligned."""


@dataclass(frozen=True)
class Run:
    """Bytes of a storage, and the tensors that lie in them. Tensors of one geometry are given once."""

    tensors: list[torch.Tensor]
    start: int
    stop: int
    whole: bool
    """All of the bytes are copied; else the elements alone, of the one tensor there is."""

    @property
    def nbytes(self) -> int:
        """Bytes to be copied."""
        return self.stop - self.start if self.whole else self.tensors[0].nbytes


Form = tuple[Any, ...]
Geometry = tuple[Any, ...]


def form(tensor: torch.Tensor) -> Form:
    """Return how a tensor sees the memory it begins at."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def geometry(tensor: torch.Tensor) -> Geometry:
    """Return what two tensors have in common that are one and the same view of a storage."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), form(tensor)


def memory_keys(tensors: Sequence[torch.Tensor]) -> list[Hashable]:
    """
    Return a key for each tensor: equal for two that see the same memory in the same way, whatever storages these have.

    All of them have memory.
    """
    starts = [tensor.data_ptr() for tensor in tensors]
    # Nearly all are alone where they begin, and that is all that is asked of them.
    shared = {start for start, times in Counter(starts).items() if times > 1}
    return [
        (tensor.device, start, form(tensor)) if start in shared else start
        for tensor, start in zip(tensors, starts, strict=True)
    ]


def runs(tensors: Iterable[torch.Tensor]) -> Iterator[Run]:
    """Sort strided tensors with elements into the runs of bytes they are to be copied as."""
    by_storage: dict[int, dict[Geometry, torch.Tensor]] = {}
    for tensor in tensors:
        key = geometry(tensor)
        by_storage.setdefault(key[0], {}).setdefault(key, tensor)
    for views in by_storage.values():
        for group in _groups(list(views.values())):
            yield _run(group)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor's first byte is, and where the last one ends."""
    first = int(tensor.storage_offset())
    last = first + sum(step * (n - 1) for step, n in zip(tensor.stride(), tensor.shape, strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _run(group: list[torch.Tensor]) -> Run:
    bounds = [extent(tensor) for tensor in group]
    start, stop = min(low for low, _ in bounds), max(high for _, high in bounds)
    if len(group) > 1:
        return Run(group, start - start % _ALIGNMENT, stop, whole=True)
    [tensor] = group
    # Dense, or expanded from fewer elements than it shows: the bytes between its ends are its own.
    whole = not _resolved_by_copy(tensor) and (stop - start == tensor.nbytes or overlaps_itself(tensor))
    return Run(group, start, stop, whole)


def _groups(views: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Put tensors of one storage together where they overlap, directly or through others."""
    if len(views) == 1:
        return [views]
    bounds = [extent(view) for view in views]
    leader = list(range(len(views)))

    def lead(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    active: list[int] = []
    for index in sorted(range(len(views)), key=bounds.__getitem__):
        active = [other for other in active if bounds[other][1] > bounds[index][0]]
        for other in active:
            if lead(other) != lead(index) and (len(active) > _NEIGHBOURS or _overlap(views[other], views[index])):
                leader[lead(other)] = lead(index)
        active.append(index)
    groups: dict[int, list[torch.Tensor]] = {}
    for index, view in enumerate(views):
        groups.setdefault(lead(index), []).append(view)
    return list(groups.values())


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if _resolved_by_copy(a) or _resolved_by_copy(b):
        return False
    try:
        # The stub knows only the two limits that have a name.
        return np.shares_memory(_outline(a), _outline(b), max_work=_SEARCH)  # type: ignore[arg-type]
    except RuntimeError:  # numpy's TooHardError
        return True


def _resolved_by_copy(tensor: torch.Tensor) -> bool:
    """Say whether a tensor shows other values than its bytes: it cannot stay a view of them."""
    return tensor.is_conj() or tensor.is_neg()


class _Outline:
    """Tells numpy where the elements of a tensor lie. It never reads them: the address is made up."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (_PAGE + int(tensor.storage_offset()) * size, True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
        }


_PAGE: Final = 4096  # an array at address 0 has no memory


def _outline(tensor: torch.Tensor) -> Any:
    return np.asarray(_Outline(tensor))
