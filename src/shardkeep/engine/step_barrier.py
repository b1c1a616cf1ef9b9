"""
Optimizers whose steps wait until what they are about to change has been copied.

A hook is put before the steps of an optimizer once, and stays; while no save needs its memory it does nothing. The
wait is the accelerator's: the host waits only until all copies are queued.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from shardkeep.engine.tensors import extent
from shardkeep.state.leaves import is_dtensor

Events = dict[torch.device, torch.Event]


class StepBarrier:
    """Holds the steps of optimizers back until the copies of one save are queued, and then what they queue."""

    def __init__(self) -> None:
        self._queued: Future[Events] = Future()

    def open(self, after: Events) -> None:
        """Let steps through, whose work comes after these events."""
        if not self._queued.done():
            self._queued.set_result(after)

    def is_passed(self) -> bool:
        """Say whether nothing is left to wait for."""
        return self._queued.done() and all(event.query() for event in self._queued.result().values())

    def wait(self) -> None:
        """Come after the copies, on the current streams."""
        for device, event in self._queued.result().items():
            torch.accelerator.current_stream(device).wait_event(event)


class StepBarriers:
    """The optimizers of a process that have a hook, and the gates before their next step."""

    def __init__(self) -> None:
        self._gates: WeakKeyDictionary[Optimizer, list[StepBarrier]] = WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._lock = threading.Lock()
        self._process_id = os.getpid()

    def put(self, gate: StepBarrier, optimizers: Iterable[Optimizer]) -> None:
        """Put a gate before the next step of each optimizer."""
        with self._lock:
            for optimizer in optimizers:
                if optimizer not in self._gates:
                    self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
                # Those of an optimizer that never steps must not pile up.
                standing = [each for each in self._gates.get(optimizer, ()) if not each.is_passed()]
                self._gates[optimizer] = [*standing, gate]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if os.getpid() != self._process_id:  # a fork, whose memory is its own: nothing of it is saved
            return
        with self._lock:
            gates = list(self._gates.get(optimizer, ()))
        for gate in gates:
            gate.wait()
            with self._lock:  # not before: a wait that is interrupted is still to be made
                self._gates[optimizer].remove(gate)

    def remove(self) -> None:
        """Take all hooks away; called between steps."""
        with self._lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._gates.clear()


@functools.cache  # a forked process has optimizers of its own, and no save of its parent's
def _barriers_of(process_id: int) -> StepBarriers:
    del process_id
    return StepBarriers()


def step_barriers() -> StepBarriers:
    """Return the gates of this process."""
    return _barriers_of(os.getpid())


# Which tensors the steps of optimizers guard: their memory changes in a step, and at no other time, so that it may be
# copied late if the step waits.


def rows_outside_optimizers(
    tensors: Sequence[torch.Tensor], rows: list[int], optimizers: Iterable[Optimizer]
) -> list[int]:
    """
    Return those of which a byte may change at another time than in the step of one of these optimizers.

    All of the rows lie in host memory, or none does.
    """
    guards = list(_optimizer_tensors(optimizers, on_host=any(tensors[row].is_cpu for row in rows[:1])))
    whole = {_memory_key(guard) for guard in guards if guard.is_contiguous()}
    rest = [row for row in rows if not (tensors[row].is_contiguous() and _memory_key(tensors[row]) in whole)]
    if rest:  # they may still be parts of what is guarded, which costs more to find out
        covered = _AddressRanges(guards)
        rest = [row for row in rest if tensors[row].numel() and tensors[row] not in covered]
    return rest


def _memory_key(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.get_device(), tensor.data_ptr(), tensor.nbytes


class _AddressRanges:
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


def _optimizer_tensors(optimizers: Iterable[Optimizer], *, on_host: bool) -> Iterator[torch.Tensor]:
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
