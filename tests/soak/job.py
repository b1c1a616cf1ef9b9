"""What the ranks of a soak do: restore, train a while, save each step, and log which saves were acknowledged."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep.manage.schedule import Clock
from tests.manage.scene import checkpointer
from tests.soak.contents import KEY, bits, keys, kinds_of, loss, part
from tests.soak.places import glance
from tests.soak.rough import JumpyClock, Luck, RoughRoot, wrong_clock

KEEP_LAST = 3
KEEP_EVERY = 200
KEEP_BEST = 2
LEASE_S = 4.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one job is to do."""

    job: int
    seed: str
    root: str
    logs: str
    steps: int
    asynchronous: bool = True
    writer: Literal["thread", "process"] = "thread"
    max_in_flight: int = 1
    timeout_s: float = 15.0
    takeover: bool = False
    rate: float = 0.0
    """Of operations of the disk that fail."""
    dies_at: tuple[int, int] | None = None
    """Which rank kills itself, and in which operation of its disk."""
    jumps: bool = False
    """Whether its clocks do."""
    keep_hours: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """How a root in a bucket is opened: by way of a network that may fail."""
    direct: dict[str, Any] = field(default_factory=dict)
    """How to look at it without that."""
    codecs: Any = None
    bulk: bool = False
    """Whether a tensor is so large that it is uploaded in parts."""

    @property
    def rough(self) -> bool:
        """Whether its disk is to fail."""
        return self.rate > 0 or self.dies_at is not None


class Log:
    """What a rank writes down: lines of JSON, which outlive the process, and those that matter the machine."""

    def __init__(self, plan: Plan, rank: int) -> None:
        path = Path(plan.logs) / f"job-{plan.job:05d}-rank-{rank}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __call__(self, what: str, *, sure: bool = False, **more: Any) -> None:
        """Write a line; `sure` waits until it is durable."""
        os.write(self._fd, json.dumps({"what": what, "at_s": time.monotonic(), **more}).encode() + b"\n")
        if sure:
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Inexact(Exception):
    """What was restored is not what was saved."""


def run_job(plan: Plan) -> str:
    """Be one rank of a job, and say how it ended."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    log = Log(plan, rank)
    log("rank", pid=os.getpid(), rank=rank, size=size)
    try:
        with _checkpointer(plan, rank, log) as ckpt:
            _train(plan, ckpt, rank, size, log)
    except Inexact:
        raise
    except (sk.CheckpointError, RuntimeError) as error:  # the latter from gloo, of a peer that is gone
        log("ended", error=type(error).__name__, text=str(error)[:600])
        return type(error).__name__
    finally:
        log.close()
    return "done"


@contextmanager
def _checkpointer(plan: Plan, rank: int, log: Log) -> Iterator[sk.Checkpointer]:
    clock = JumpyClock(f"{plan.seed} clock {rank}") if plan.jumps else None
    root: Any = plan.root
    luck: Luck | None = None
    if plan.rough:
        dies_at = plan.dies_at[1] if plan.dies_at and plan.dies_at[0] == rank else None
        luck = Luck(
            f"{plan.seed} disk {rank}", rate=plan.rate, dies_at=dies_at, on_fault=lambda kind: log("fault", kind=kind)
        )
        root = RoughRoot(plan.root, luck)
    elif root.startswith("s3://"):
        root = sk.open_place(root, **plan.options)
    more: dict[str, Any] = {"codecs": plan.codecs} if plan.codecs else {}
    plain = Clock(lease_s=LEASE_S, sleep=lambda s: time.sleep(min(s, 0.005)) if plan.rough else time.sleep(s))
    with (
        wrong_clock(clock),
        checkpointer(
            root,
            every_steps=1,
            keep_last=KEEP_LAST,
            keep_every=KEEP_EVERY,
            keep_best=("loss", KEEP_BEST),
            keep_hours=plan.keep_hours,
            asynchronous=plan.asynchronous,
            writer=plan.writer,
            max_in_flight=plan.max_in_flight,
            takeover=plan.takeover,
            on_error=lambda error: log("failed", error=type(error).__name__, text=str(error)[:600]),
            options=sk.Options(
                io_threads=2,
                host_budget_bytes=(32 if plan.bulk else 8) << 20,
                timeout_s=plan.timeout_s,
                keys=sk.KeyRing.from_text(KEY),
            ),
            clock=Clock(**{**vars(plain), "now": clock.now}) if clock else plain,
            **more,
        ) as ckpt,
    ):
        try:
            yield ckpt
        finally:
            # A lease that cannot be deleted is held until its process ends, and this one serves other jobs.
            if luck is not None:
                luck.rest()


def _train(plan: Plan, ckpt: sk.Checkpointer, rank: int, size: int, log: Log) -> None:
    state = _blank(rank, size, bulk=plan.bulk)
    restored = ckpt.restore_latest(state)
    if restored is not None:
        _insist_exact(state, restored, rank, size)
    log("restored", step=restored, job=state["job"] if restored is not None else None)
    open_saves: dict[int, sk.SaveHandle[sk.SaveReport]] = {}
    for step in range((restored or 0) + 1, (restored or 0) + 1 + plan.steps):
        if size > 1:
            dist.barrier()
        _fill(state, plan.job, step, rank, size)  # in place: what an asynchronous save has not copied would be lost
        log("step", step=step)
        saved = ckpt.step(step, state, metrics={"loss": loss(plan.job, step)}, meta={"job": plan.job})
        if isinstance(saved, sk.SaveHandle):
            open_saves[step] = saved
        elif saved is not None:
            _acknowledge(plan, step, saved, log)
        _acknowledge_ended(plan, open_saves, log)
    ckpt.wait()
    _acknowledge_ended(plan, open_saves, log)
    log("ended", error="")


def _acknowledge_ended(plan: Plan, open_saves: dict[int, sk.SaveHandle[sk.SaveReport]], log: Log) -> None:
    for step, handle in list(open_saves.items()):
        if handle.done():
            del open_saves[step]
            if handle.exception() is None:
                _acknowledge(plan, step, handle.result(), log)


def _acknowledge(plan: Plan, step: int, report: sk.SaveReport, log: Log) -> None:
    """Write down that a checkpoint is durable, for good, and what its record says of its age."""
    data = glance(plan.root, plan.direct, f"step-{step}", "shardkeep.json")
    record = json.loads(data) if data else {}  # a rival may have deleted it
    about = {"timeline": None, "began": None}
    if record.get("save_id") == report.save_id:
        meta = record["meta"]
        about = {"timeline": meta.get("timeline", 0), "began": meta.get("timeline_began_after")}
    log("ack", sure=True, step=step, job=plan.job, save_id=report.save_id, **about)


def _blank(rank: int, size: int, *, bulk: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"job": 0, "step": 0, "model": {}, "optim": {}}
    kinds = kinds_of(bulk=bulk)
    for key, first, second in keys(bulk=bulk):
        kind = kinds[key]
        where = part(kind, rank, size)
        local = torch.zeros([each.stop - each.start for each in where], dtype=getattr(torch, kind.dtype))
        offsets = [each.start for each in where]
        # A part of nothing is no piece.
        pieces = [(local, offsets)] if local.numel() else []
        state[first][second] = (
            local if kind.axis is None else sk.ShardedBox.of(pieces, shape=kind.shape, dtype=local.dtype)
        )
    return state


def _local(value: Any) -> torch.Tensor | None:
    if isinstance(value, sk.ShardedBox):
        return value.pieces[0][0] if value.pieces else None
    return value


def _mine(key: str, job: int, step: int, rank: int, size: int) -> torch.Tensor:
    found = bits(key, job, step)[part(kinds_of(bulk=True)[key], rank, size)]
    return torch.from_numpy(found.copy())


def _fill(state: dict[str, Any], job: int, step: int, rank: int, size: int) -> None:
    state.update(job=job, step=step)
    for key, first, second in keys(bulk="x" in state["model"]):
        if (local := _local(state[first][second])) is not None:
            wanted = _mine(key, job, step, rank, size)
            local.copy_(wanted.view(local.dtype).reshape(local.shape))


def _insist_exact(state: dict[str, Any], step: int, rank: int, size: int) -> None:
    if state["step"] != step:
        raise Inexact(f"step {step} was restored, with the values of {state['step']}")
    for key, first, second in keys(bulk="x" in state["model"]):
        if (local := _local(state[first][second])) is not None:
            wanted = _mine(key, state["job"], step, rank, size)
            if not torch.equal(local.contiguous().view(torch.uint8).reshape(wanted.shape), wanted):
                raise Inexact(f"rank {rank}: {key} of step {step} is not what job {state['job']} saved")
