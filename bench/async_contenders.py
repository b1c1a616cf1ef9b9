"""The contenders of the asynchronous benchmarks behind one interface: begin a save, poll, finish, close."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

PATIENCE_S = 60
"""After which a save counts as hung."""


class Staged(NamedTuple):
    """How long it took, from the call, until the state might be changed; and how long copies went on."""

    until_s: float
    copying_s: float


@dataclass(frozen=True)
class Flight:
    """A save that is under way."""

    done: Callable[[], bool]
    finish: Callable[[], Staged]
    """Wait until it is durable, raise what it raised, return how the state was copied."""


@dataclass(frozen=True)
class Contender:
    begin: Callable[[Mapping[str, Any], str], Flight]
    close: Callable[[], None]
    """Give back threads and memory, so that the next save is a first one again."""


def ours(staging: str) -> Contender:
    import shardkeep as sk

    def begin(state: Mapping[str, Any], where: str) -> Flight:
        handle = sk.async_save(state, where, staging=staging)

        def finish() -> Staged:
            report = handle.result(PATIENCE_S)
            return Staged(report.staged_s, sum(span.seconds for span in report.phases if span.name == "stage"))

        return Flight(handle.done, finish)

    return Contender(begin, sk.finish_saves)


def no_save(steps: int) -> Contender:
    """A contender that saves nothing for a number of training steps."""

    def begin(*_: Any) -> Flight:
        more = iter(range(steps - 2))
        return Flight(lambda: next(more, None) is None, lambda: Staged(0.0, 0.0))

    return Contender(begin, lambda: None)


def torch_thread() -> Contender:
    """torch's default: a copy to pageable memory in the call, then a thread that writes."""
    import torch.distributed.checkpoint as dcp

    def begin(state: Mapping[str, Any], where: str) -> Flight:
        began = time.perf_counter()
        future = dcp.async_save(dict(state), checkpoint_id=where)
        staged_s = time.perf_counter() - began  # it returns when the copy is made

        def finish() -> Staged:
            future.result(PATIENCE_S)
            return Staged(staged_s, staged_s)

        return Flight(future.done, finish)

    return Contender(begin, lambda: None)


def torch_pinned() -> Contender:
    """torch's stager that returns at once and copies to pinned memory in a thread; one for all saves."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager

    stagers: list[DefaultStager] = []

    def begin(state: Mapping[str, Any], where: str) -> Flight:
        if not stagers:
            stagers.append(DefaultStager())
        staged: Future[float] = Future()
        began = time.perf_counter()
        answer = dcp.async_save(dict(state), checkpoint_id=where, async_stager=stagers[0])
        answer.staging_completion.add_done_callback(lambda _: staged.set_result(time.perf_counter() - began))

        def finish() -> Staged:
            answer.upload_completion.result(PATIENCE_S)
            return Staged(staged.result(PATIENCE_S), staged.result(PATIENCE_S))

        return Flight(answer.upload_completion.done, finish)

    def close() -> None:
        while stagers:
            stagers.pop().close()

    return Contender(begin, close)


TORCH, TORCH_PINNED = "torch DCP async_save", "torch DCP, pinned stager"
NO_SAVE = "no save"
OVERLAP, DEVICE, HOST = "shardkeep overlap", "shardkeep device", "shardkeep host"
OURS = {OVERLAP: "overlap", DEVICE: "device", HOST: "host"}


def contenders(device: torch.device) -> dict[str, Contender]:
    """Make all of them, ours first: its very first save is then the first of this process."""
    made = {name: ours(staging) for name, staging in OURS.items()}
    made[TORCH] = torch_thread()
    if device.type != "cpu":
        made[TORCH_PINNED] = torch_pinned()
    return made
