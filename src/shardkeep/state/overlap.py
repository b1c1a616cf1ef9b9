"""Memory that several elements share: inside one tensor, and between tensors that are to be filled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

_MOST_COMPARED = 10_000
_MOST_WORK = 1_000


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Say whether elements of a tensor may share memory: an axis steps no further than the smaller ones reach."""
    reach = 0
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if step <= reach:
                return True
            reach += step * (n - 1)
    return False


def overlapping(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """
    Give the pairs of tensors that have an element in common, by position.

    Where that would take long to find out, as for thousands of columns of one matrix, it is left open.
    """
    devices: dict[torch.device, int] = {}
    spans: list[tuple[int, int, int, int]] = []
    for at, tensor in enumerate(tensors):
        if start := tensor.data_ptr():
            spans.append((devices.setdefault(tensor.device, len(devices)), start, start + _extent(tensor), at))
    spans.sort()
    tries = _MOST_COMPARED
    near: list[tuple[int, int, int, int]] = []
    for span in spans:
        near = [other for other in near if other[0] == span[0] and other[2] > span[1]]
        for *_, other in near:
            if tries == 0:
                return
            tries -= 1
            if _share(tensors[other], tensors[span[3]]):
                yield other, span[3]
        near.append(span)


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to behind the last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.itemsize


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        ours, theirs = np.asarray(_Addresses(a)), np.asarray(_Addresses(b))
        return np.shares_memory(ours, theirs, _MOST_WORK)  # type: ignore[arg-type]  # the stubs know -1 and 0 alone
    except np.exceptions.TooHardError:
        return False


class _Addresses:
    """The addresses of a tensor on any device, as an array that is never read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * tensor.itemsize for step in tensor.stride()),
            "typestr": f"|V{tensor.itemsize}",
        }
