"""
One rank of the demo's training job: a small transformer with FSDP2 and AdamW that saves asynchronously.

The data of a step depends only on the step and the row, so any number of ranks sees the same global batch. Before each
save every rank records the digest of each full tensor, and after a restore it compares them bit for bit.
"""
# ruff: noqa: INP001 - beside a script to read and run

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from job import Job, is_checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import shardkeep as sk
from shardkeep.errors import CheckpointNotFound

CLOCK = 61


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = width // 32

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, 32).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        update: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + update


class Transformer(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.tokens = nn.Embedding(job.vocab, job.width)
        self.places = nn.Embedding(job.context, job.width)
        self.blocks = nn.ModuleList(Block(job.width) for _ in range(job.blocks))
        self.norm = nn.LayerNorm(job.width)
        self.head = nn.Linear(job.width, job.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(job: Job, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the same model on every rank, then keep only this rank's shards of it."""
    torch.manual_seed(0)
    model = Transformer(job)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def rows_of_step(job: Job, step: int, rank: int) -> Tensor:
    """Return this rank's rows of the global batch: counting in strides modulo a small number, seeded by step and row."""
    mine = range(rank * job.batch // job.ranks, (rank + 1) * job.batch // job.ranks)
    rows = []
    for row in mine:
        draw = torch.Generator().manual_seed(step * 1000 + row)
        first = torch.randint(CLOCK, (1,), generator=draw)
        stride = torch.randint(1, 4, (1,), generator=draw)
        rows.append((first + stride * torch.arange(job.context + 1)) % CLOCK)
    return torch.stack(rows)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> float:
    """Take one step and return the loss over the global batch."""
    logits = model(rows[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call] # torch leaves it unannotated
    optimizer.step()
    torch.rand(1)  # advances the generator of this rank, as dropout would
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return the state to save."""
    return {"model": model, "optim": optimizer, "rng": sk.RNG(), "step": step}


def contents(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return the same state without shardkeep, because the comparison must not rely on what it checks."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {names[parameter]: values for parameter, values in optimizer.state.items()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    optim = {"state": moments, "groups": repr(groups)}
    return {"model": model.state_dict(), "optim": optim, "step": step, "rng": torch.get_rng_state()}


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def digests(state: dict[str, Any]) -> dict[str, str]:
    """Hash every leaf, and sharded tensors as a whole. Every rank must call this."""
    found = {}
    for path, leaf in leaves(state):
        if isinstance(leaf, Tensor):
            full = leaf.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            content = xxhash.xxh3_128_hexdigest(full.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            found[path] = f"{full.dtype} {tuple(full.shape)} {content}"
        else:
            found[path] = repr(leaf)
    return found


def newest_checkpoint(root: str) -> tuple[str, list[str]]:
    """Find the newest committed checkpoint, and the newer directories that have none."""
    skipped: list[str] = []
    for path in sorted(Path(root).glob("step-*"), reverse=True):
        if is_checkpoint(path):
            return str(path), skipped
        skipped.append(path.name)
    raise CheckpointNotFound(f"{root}: no committed checkpoint")


class Reporter:
    """Appends events to a file that the demo reads; only rank 0 writes."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._silent = rank != 0

    def report(self, kind: str, **facts: Any) -> None:
        if not self._silent:
            with self._path.open("a") as file:
                file.write(json.dumps({"kind": kind, **facts}) + "\n")


def resume(job: Job, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, reporter: Reporter) -> int:
    """Load the newest committed checkpoint, compare it with the digests taken before it was saved."""
    path, skipped = newest_checkpoint(job.checkpoints)
    state = state_of(model, optimizer, step=0)
    report = sk.load(state, path)
    step = int(state["step"])
    found = digests(contents(model, optimizer, step))
    expected = json.loads(Path(job.digests, f"{step}-{rank}.json").read_text())
    differing = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (differing, report.bytes_read, report.seconds))
    reporter.report(
        "resumed",
        step=step,
        path=path,
        skipped=skipped,
        bytes=sum(part[1] for part in parts),
        seconds=max(part[2] for part in parts),
        compared=len(expected),
        differing=sorted({key for part in parts for key in part[0]}),
    )
    return step


class Saves:
    """The asynchronous saves of a job, at most one at a time."""

    def __init__(self, job: Job, rank: int, reporter: Reporter) -> None:
        self._job = job
        self._rank = rank
        self._reporter = reporter
        self._under_way: tuple[int, str, sk.SaveHandle[sk.SaveReport]] | None = None

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Record the digests of the state, then start to save it."""
        self.finish()
        path = f"{self._job.checkpoints}/step-{step:06d}"
        noted = Path(self._job.digests, f"{step}-{self._rank}.json")
        noted.write_text(json.dumps(digests(contents(model, optimizer, step))))
        self._reporter.report("saving", step=step, path=path)
        handle = sk.async_save(state_of(model, optimizer, step), path, step=step, meta={"by": "the demo"})
        self._under_way = step, path, handle

    def finish(self) -> None:
        """Wait for the last save and report it."""
        if self._under_way is not None:
            step, path, handle = self._under_way
            report = handle.result()
            facts = {"bytes": report.bytes_total, "seconds": report.seconds, "blocked": report.blocked_s}
            self._reporter.report("saved", step=step, path=path, **facts)
            self._under_way = None


def meet(job: Job, rank: int, meeting_point: socket.socket) -> None:
    """Create the process group over a socket that was opened before any rank started."""
    host, port = meeting_point.getsockname()
    first = rank == 0
    listen_fd = meeting_point.detach() if first else None
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not list it as exported
        host, port, job.ranks, is_master=first, master_listen_fd=listen_fd
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks)


def main(out: str, meeting_point_fd: int) -> None:
    """Run the job in `out/job.json`."""
    job_json = json.loads(Path(out, "job.json").read_text())
    job = Job(**(job_json | {"mesh": tuple(job_json["mesh"])}))
    rank = int(os.environ["RANK"])
    reporter = Reporter(Path(out, "events.jsonl"), rank)
    meet(job, rank, socket.socket(fileno=meeting_point_fd))
    names = ("shard",) if len(job.mesh) == 1 else ("replicate", "shard")
    model, optimizer = build(job, init_device_mesh("cpu", job.mesh, mesh_dim_names=names))
    torch.manual_seed(1000 + rank)
    begin = resume(job, rank, model, optimizer, reporter) if job.resume else 0
    saves = Saves(job, rank, reporter)
    for step in range(begin + 1, job.steps + 1):
        reporter.report("step", step=step, loss=train_step(model, optimizer, rows_of_step(job, step, rank)))
        if job.save_every and step % job.save_every == 0:
            saves.begin(model, optimizer, step)
    saves.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    # Torch's threads sometimes abort the process while Python shuts down; everything is written by now.
    os._exit(0)
