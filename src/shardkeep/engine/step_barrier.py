"""
Optimizer steps that wait until a save has copied what they are about to change, and which memory that is.

A hook is registered before the steps of an optimizer once, and stays; it does nothing while no save needs the memory. The
accelerator waits for the copies; the host waits only until all copies are queued.

The parameters and the state of an optimizer change in its steps and at no other time. So they may be copied late, if the step
waits; anything else has to be copied in the call.
"""

from __future__ import annotations

import contextlib
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

from shardkeep.engine.tensors import span
from shardkeep.options import per_process
from shardkeep.state.leaves import is_dtensor

Events = dict[torch.device, torch.Event]


class StepBarrier:
    """Makes optimizer steps wait until the copies of one save are queued, and their work on the device until they are done."""

    def __init__(self) -> None:
        self._queued: Future[Events] = Future()

    def open(self, after: Events) -> None:
        """Let steps pass; their work comes after these events."""
        if not self._queued.done():
            self._queued.set_result(after)

    def is_passed(self) -> bool:
        """Return whether nothing is left to wait for."""
        return self._queued.done() and all(event.query() for event in self._queued.result().values())

    def wait(self) -> None:
        """Wait, and let the current streams wait for the copies."""
        for device, event in self._queued.result().items():
            torch.accelerator.current_stream(device).wait_event(event)


class StepBarriers:
    """The optimizers of a process that have a hook, and the barriers before their next step."""

    def __init__(self) -> None:
        self._barriers: WeakKeyDictionary[Optimizer, list[StepBarrier]] = WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._lock = threading.Lock()
        self._process_id = os.getpid()

    def put(self, barrier: StepBarrier, optimizers: Iterable[Optimizer]) -> None:
        """Put a barrier before the next step of each optimizer."""
        with self._lock:
            for optimizer in optimizers:
                if optimizer not in self._barriers:
                    self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
                # The barriers of an optimizer that never steps must not accumulate.
                standing = [each for each in self._barriers.get(optimizer, ()) if not each.is_passed()]
                self._barriers[optimizer] = [*standing, barrier]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if os.getpid() != self._process_id:  # a fork has memory of its own, of which nothing is saved
            return
        with self._lock:
            barriers = list(self._barriers.get(optimizer, ()))
        for barrier in barriers:
            barrier.wait()
            with self._lock:  # after the wait: one that was interrupted has to be repeated
                self._barriers[optimizer].remove(barrier)

    def remove(self) -> None:
        """Remove all hooks; called between steps."""
        with self._lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._barriers.clear()


step_barriers = per_process(StepBarriers)
"""Returns the barriers of this process."""


def rows_outside_optimizers(
    tensors: Sequence[torch.Tensor], rows: list[int], optimizers: Iterable[Optimizer]
) -> list[int]:
    """Return the rows, all or none in host memory, whose memory may also change outside the steps of these optimizers."""
    on_host = any(tensors[row].is_cpu for row in rows[:1])
    owned = [each for each in _optimizer_tensors(optimizers) if each.is_cpu == on_host]
    whole = {_memory_key(each) for each in owned if each.is_contiguous()}
    rest = [row for row in rows if not (tensors[row].is_contiguous() and _memory_key(tensors[row]) in whole)]
    if not rest:
        return rest
    # They may be parts of optimizer memory, which is slower to find out: by ranges of addresses that do not touch each other.
    ranges: dict[int, list[tuple[int, int]]] = {}
    spans = [(*span(each), each) for each in owned if each.numel()]
    for device, begin, end in sorted(
        (t.get_device(), begin, end) for begin, end, t in spans if end - begin == t.nbytes
    ):
        found = ranges.setdefault(device, [])
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))

    def is_covered(tensor: torch.Tensor) -> bool:
        begin, end = span(tensor)
        found = ranges.get(tensor.get_device(), [])
        at = bisect_right(found, (begin, sys.maxsize)) - 1
        return at >= 0 and end <= found[at][1]

    return [row for row in rest if tensors[row].numel() and not is_covered(tensors[row])]


def _memory_key(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.get_device(), tensor.data_ptr(), tensor.nbytes


def _optimizer_tensors(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield the parameters and state tensors of optimizers that are one piece of memory, found by its address."""
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
        for value in (*parameters, *kept):
            tensor: Any = value._local_tensor if is_dtensor(value) else value
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                with contextlib.suppress(RuntimeError):  # a tensor made of others
                    if tensor.data_ptr():
                        yield tensor
