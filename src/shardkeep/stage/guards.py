"""
Which tensors the steps of optimizers guard: their memory changes in a step, and at no other time, so that it may be
copied late if the step waits.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardkeep.stage.aliases import extent
from shardkeep.state.toolkit.recognise import is_dtensor


def unguarded(tensors: Sequence[torch.Tensor], rows: list[int], optimizers: Iterable[Optimizer]) -> list[int]:
    """
    Return those of which a byte may change at another time than in the step of one of these optimizers.

    All of the rows lie in host memory, or none does.
    """
    guards = list(_guards(optimizers, on_host=any(tensors[row].is_cpu for row in rows[:1])))
    whole = {_place(guard) for guard in guards if guard.is_contiguous()}
    rest = [row for row in rows if not (tensors[row].is_contiguous() and _place(tensors[row]) in whole)]
    if rest:  # they may still be parts of what is guarded, which costs more to find out
        covered = _Covered(guards)
        rest = [row for row in rest if tensors[row].numel() and tensors[row] not in covered]
    return rest


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.get_device(), tensor.data_ptr(), tensor.nbytes


class _Covered:
    """Memory that tensors take: runs of addresses, which touch each other nowhere."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._runs: dict[int, list[tuple[int, int]]] = {}
        spans = [(tensor.get_device(), *_span(tensor)) for tensor in tensors if tensor.numel() and _is_dense(tensor)]
        for device, begin, end in sorted(spans):
            runs = self._runs.setdefault(device, [])
            if runs and begin <= runs[-1][1]:
                runs[-1] = runs[-1][0], max(runs[-1][1], end)
            else:
                runs.append((begin, end))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        begin, end = _span(tensor)
        runs = self._runs.get(tensor.get_device(), [])
        at = bisect_right(runs, (begin, sys.maxsize)) - 1
        return at >= 0 and end <= runs[at][1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which all bytes of a tensor lie."""
    begin, end = extent(tensor)
    return tensor.data_ptr(), tensor.data_ptr() + end - begin


def _is_dense(tensor: torch.Tensor) -> bool:
    begin, end = extent(tensor)
    return end - begin == tensor.nbytes


def _guards(optimizers: Iterable[Optimizer], *, on_host: bool) -> Iterator[torch.Tensor]:
    """Give the tensors, in host memory or elsewhere, whose memory changes in the step of one of these alone."""
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
        for value in (*parameters, *kept):
            tensor: Any = value._local_tensor if is_dtensor(value) else value
            if isinstance(tensor, torch.Tensor) and tensor.is_cpu == on_host and _has_memory(tensor):
                yield tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is one piece of memory: others guard nothing that could be found by its address."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:  # a tensor made of others
        return False
