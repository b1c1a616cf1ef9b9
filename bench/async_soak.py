"""The repeating parts of `async_gpu.py`: are 50 checkpoints exact, and do 100 saves leave memory flat."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from typing import Any

import torch

import shardkeep as sk
from async_parts import poison, same_bits
from async_training import Training
from async_vitals import GAUGES, Vitals

GROUP = 10
"""Saves that are begun one after another before any is looked at."""
LEVEL_AFTER = 20
"""Saves after which nothing may grow any more."""
RSS_SLACK = 16 << 20
"""What resident memory may differ by between two readings: the interpreter's and malloc's own."""


@dataclass(frozen=True)
class Taken:
    handle: Any
    where: str
    clones: list[torch.Tensor]
    """The state at the call, copied on the device, in the order of `Training.tensors`."""


def exact(training: Training, staging: str, scratch: str, saves: int) -> dict[str, Any]:
    """
    Save again and again while the state changes, and compare each checkpoint bit for bit with the state at its call.

    overlap: gradients are there before the call; after it, at random, the optimizer steps at once, or a whole step
    (or two) follows, and no step waits. device and host: every tensor is multiplied in place as soon as the call returns.
    """
    dice = random.Random(f"{staging} {saves}")
    wrong: list[str] = []
    taken: list[Taken] = []
    for number in range(saves):
        where = f"{scratch}/exact-{number}"
        if staging == "overlap":
            training.backward()
        _pause(dice)
        clones = [tensor.clone() for _, _, tensor in training.tensors()]
        handle = sk.async_save(training.state, where, staging=staging, max_in_flight=dice.choice((1, 2)))
        taken.append(Taken(handle, where, clones))
        if staging == "overlap":
            _train_on(training, dice)
        else:
            for _, _, tensor in training.tensors():
                tensor.mul_(-1.01)
        if len(taken) == GROUP or number == saves - 1:
            wrong += _compare(training, taken)
            taken = []
    sk.finish_saves()
    print(f"    {staging}: {len(wrong)} of {saves} wrong{': ' + wrong[0] if wrong else ''}", flush=True)
    return {"saves": saves, "wrong": wrong}


def _pause(dice: random.Random) -> None:
    if dice.random() < 0.5:
        time.sleep(dice.random() * 0.02)


def _train_on(training: Training, dice: random.Random) -> None:
    _pause(dice)
    if dice.random() < 0.5:
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
    for _ in range(dice.randrange(3)):
        training.step()
    if dice.random() < 0.5:
        training.optimizer.zero_grad(set_to_none=True)


def _compare(training: Training, taken: list[Taken]) -> list[str]:
    names = [name for name, _, _ in training.tensors()]
    blank = {name: torch.empty_like(tensor) for name, tensor in zip(names, taken[0].clones, strict=True)}
    wrong = []
    for one in taken:
        for tensor in blank.values():
            poison(tensor)
        try:
            one.handle.result(120)
            sk.load(blank, one.where, include=["model", "optim.state"])
        except Exception as exc:  # noqa: BLE001 - a save that fails is a wrong one
            wrong.append(f"{one.where}: {type(exc).__name__}: {exc}"[:300])
        else:
            differ = [n for n, clone in zip(names, one.clones, strict=True) if not same_bits(blank[n], clone)]
            if differ:
                wrong.append(f"{one.where}: {len(differ)} tensors differ, {differ[0]} first")
        shutil.rmtree(one.where, ignore_errors=True)
    return wrong


def flat(training: Training, staging: str, scratch: str, saves: int, vitals: Vitals) -> dict[str, Any]:
    """Save `saves` times while training; read what the process holds after 20, after all and after `finish_saves`."""
    readings = {}
    level = min(LEVEL_AFTER, saves // 2)
    for number in range(1, saves + 1):
        where = f"{scratch}/flat"
        handle = sk.async_save(training.state, where, staging=staging)
        training.step()
        handle.result(120)
        del handle
        shutil.rmtree(where)
        if number in (level, saves):
            training.drain()
            readings["level" if number == level else "end"] = vitals.now()
    sk.finish_saves()
    readings["finished"] = vitals.now()
    grown = {gauge: readings["end"][gauge] - readings["level"][gauge] for gauge in GAUGES}
    is_flat = all(grown[gauge] <= (RSS_SLACK if gauge == "rss" else 0) for gauge in GAUGES)
    print(f"    {staging}: after {level} saves {readings['level']}, after {saves} {readings['end']}", flush=True)
    return {"after": (level, saves), "readings": readings, "grown": grown, "flat": is_flat}
