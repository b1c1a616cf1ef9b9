"""What tests of Checkpointers share."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.manage.schedule import Clock

QUICK = Clock(sleep=lambda _: None, interval_s=0.0)
"""Waits for nothing, and talks at every step."""
OPTIONS = sk.Options(io_threads=2, host_budget_bytes=16 << 20, timeout_s=20.0)


def state_at(step: int, world: World | None = None) -> dict[str, Any]:
    """Make a state in which every number tells its step."""
    return {"w": torch.arange(64.0) + 1000 * step, "step": step}


def empty_state() -> dict[str, Any]:
    return {"w": torch.zeros(64), "step": 0}


def checkpointer(root: Any, **more: Any) -> sk.Checkpointer:
    return sk.Checkpointer(root, **{"seams": QUICK, "options": OPTIONS, **more})


def train(ckpt: sk.Checkpointer, steps: range, **more: Any) -> list[int]:
    """Go through steps, and return those that were saved."""
    return [step for step in steps if ckpt.step(step, state_at(step), **more) is not None]


def damage(place: Path) -> None:
    """Flip a bit in the data of a checkpoint."""
    [file] = place.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def tear(place: Path) -> None:
    """Leave a checkpoint as a writer leaves it that dies before the commit."""
    os.unlink(place / "shardkeep.json")


def until(what: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something to happen."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.01)
