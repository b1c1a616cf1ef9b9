"""
Loads with another sharding, and of one row of a large tensor: `python bench/run.py --only reshard`.

Four ranks save the rows of a state in torch's layout, and two ranks load its columns. shardkeep and torch take turns, each on
its own files, and shardkeep also on torch's. One row is read from a checkpoint of one tensor, and the bytes that the process
reads are counted.
"""

from __future__ import annotations

import math
import shutil
import time
import warnings
from typing import Any

import torch
from tests.support.rank_pool import RankPool
from torch import distributed as dist

import pagecache

SAVERS, LOADERS = 4, 2
ROW_NBYTES = 8 << 10


def _module(kind: str) -> Any:
    if kind == "torch":
        import torch.distributed.checkpoint as dcp
    else:
        from shardkeep import dcp
    return dcp


def _state(tensors: int, rows: int, axis: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = [rows, rows]
    shape[axis] //= dist.get_world_size()
    local = [torch.empty(shape) for _ in range(tensors)]
    return {f"w{i}": DTensor.from_local(each, mesh, [Shard(axis)], run_check=False) for i, each in enumerate(local)}


def save_rows(kind: str, where: str, tensors: int, rows: int) -> float:
    """Save on every rank; return the seconds it took."""
    state = _state(tensors, rows, 0)
    first = dist.get_rank() * (rows // dist.get_world_size())
    for number, tensor in enumerate(state.values()):
        local = tensor.to_local()
        values = torch.arange(local.numel(), dtype=torch.float32).reshape(local.shape)
        local.copy_(values + (first * rows + number))
    return _timed(lambda dcp: dcp.save(state, checkpoint_id=where), kind)


def load_columns(kind: str, where: str, tensors: int, rows: int) -> float:
    """Load on every rank, check every number, and return the seconds it took."""
    state = _state(tensors, rows, 1)
    for tensor in state.values():
        tensor.to_local().fill_(-1)
    seconds = _timed(lambda dcp: dcp.load(state, checkpoint_id=where), kind)
    columns = rows // dist.get_world_size()
    at = torch.arange(columns) + dist.get_rank() * columns
    # As they were made: each of the savers counted its own rows from 0, in single precision.
    block = rows // SAVERS
    inside = torch.arange(block, dtype=torch.float32)[:, None] * rows + at
    for number, tensor in enumerate(state.values()):
        for saver in range(SAVERS):
            expected = inside + (saver * block * rows + number)
            if not torch.equal(tensor.to_local()[saver * block : (saver + 1) * block], expected):
                raise AssertionError(f"{kind}: tensor {number} is not what rank {saver} saved")
    return seconds


def _timed(call: Any, kind: str) -> float:
    dcp = _module(kind)
    torch.set_num_threads(1)
    dist.barrier()
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(dcp)
    dist.barrier()
    return time.perf_counter() - began


def measure(directory: str, gb: float, rounds: int) -> dict[str, Any]:
    """Let both take turns; return every sample, and what a row took."""
    tensors = 4
    rows = max(64, 1 << round(math.log2((gb * 1e9 / 4 / tensors) ** 0.5)))
    samples: list[dict[str, Any]] = []
    with RankPool(SAVERS) as pool:
        for number in range(rounds):
            for kind in ("torch", "shardkeep") if number % 2 else ("shardkeep", "torch"):
                where = f"{directory}/rows-{kind}-{number}"
                saved = max(pool.run(SAVERS, save_rows, kind, where, tensors, rows, timeout_s=600))
                loaded = max(pool.run(LOADERS, load_columns, kind, where, tensors, rows, timeout_s=600))
                sample = {"round": number, "kind": kind, "save": saved, "load": loaded}
                if kind == "torch":
                    sample["load by shardkeep"] = max(
                        pool.run(LOADERS, load_columns, "shardkeep", where, tensors, rows, timeout_s=600)
                    )
                samples.append(sample)
                shutil.rmtree(where)
    return {"nbytes": tensors * rows * rows * 4, "samples": samples, "row": measure_row(directory, gb)}


def measure_row(directory: str, gb: float) -> dict[str, float]:
    """Read one row of a tensor of about `gb`, and count the bytes that were read for it."""
    import shardkeep as sk
    from shardkeep import dcp

    where = f"{directory}/one-tensor"
    width = ROW_NBYTES // 4
    count = max(16, int(gb * 1e9) // ROW_NBYTES)
    state = {"w": torch.arange(count, dtype=torch.float32)[:, None].expand(count, width).contiguous()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=where, no_dist=True)
    del state
    before = pagecache.io_counter("rchar")
    began = time.perf_counter()
    row = sk.open(where)["w"][count // 2]
    seconds = time.perf_counter() - began
    read = pagecache.io_counter("rchar") - before
    if not torch.equal(row, torch.full((width,), float(count // 2))):
        raise AssertionError("the row is not what was saved")
    shutil.rmtree(where)
    return {"wanted": ROW_NBYTES, "of": count * ROW_NBYTES, "read": read, "seconds": seconds}
