"""
Optimizers whose steps wait until what they are about to change has been copied.

A hook is put before the steps of an optimizer once, and stays; while no save needs its memory it does nothing. The
wait is the accelerator's: the host waits only until all copies are queued.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

Events = dict[torch.device, torch.Event]


class Gate:
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


class StepGates:
    """The optimizers of a process that have a hook, and the gates before their next step."""

    def __init__(self) -> None:
        self._gates: WeakKeyDictionary[Optimizer, list[Gate]] = WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._lock = threading.Lock()
        self._process_id = os.getpid()

    def put(self, gate: Gate, optimizers: Iterable[Optimizer]) -> None:
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
def _gates_of(process_id: int) -> StepGates:
    del process_id
    return StepGates()


def step_gates() -> StepGates:
    """Return the gates of this process."""
    return _gates_of(os.getpid())
