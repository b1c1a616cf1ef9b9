"""
Writes the golden checkpoints that do not exist yet. What exists is never written again.

    python -m tests.golden.make
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import shardkeep as sk
from shardkeep.codecs.keys import KeyRing
from shardkeep.format.boxes import segment_starts
from shardkeep.format.index import PART_ROWS, parts_of
from shardkeep.format.record import VERSION
from shardkeep.layouts import native
from shardkeep.testing.thread_ranks import run_thread_ranks

HERE = Path(__file__).parent
KEYS = KeyRing([bytes(range(32))])
"""No secret: anyone may read the checkpoints that it opens."""
CODECS = {"model": ["float", "zstd", "aes"], "optim": ["lz4"], "array": ["zstd:3"]}


class InOrder(sk.LocalStore):
    """A directory that says of itself what object stores do."""

    sequential = True


def full_state():
    """What is in it, as a whole; made of numbers alone, so that it can be made again by any version of torch."""
    matrix = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    return {
        "model": {
            "weight": matrix,
            "half": matrix.to(torch.bfloat16),
            "float8": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
            "wide": torch.complex(matrix.double(), -matrix.double()),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "tied": matrix,
        },
        "optim": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "values": {"lr": 1e-3, "name": "é", "betas": (0.9, 0.999), "seen": {1, 2}, "dtype": torch.int8, "none": None},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    }


def rank_state(rank):
    """Rows of the matrix on each of two ranks, everything else on both."""
    state = full_state()
    matrix = state["model"]["weight"]
    rows = slice(0, 4) if rank == 0 else slice(4, 7)
    local = matrix[rows].clone()
    box = sk.ShardedBox(local, offsets=(rows.start, 0), shape=(7, 5))
    state["model"]["weight"] = state["model"]["tied"] = box
    state["rng"] = sk.PerRank(rank * 10)
    return state


def write(where, *, more=dict, **how):
    """Save it from two ranks, with what `more` returns on both."""
    options = sk.Options(keys=KEYS)
    run_thread_ranks(
        2,
        lambda world: sk.save(
            {**rank_state(world.rank), **more()},
            where,
            step=7,
            meta={"golden": True},
            group=world,
            options=options,
            **how,
        ),
    )
    print(f"wrote {where}")


def table():
    """Return a tensor with so many rows that chunks of one row each take two parts of an index."""
    return {"table": torch.arange(2.0 * (PART_ROWS + 500)).reshape(-1, 2)}


def write_parts(where):
    """Save it with the table, then commit an index with a chunk for each row of the table, in parts although it is small."""
    write(where, more=table)
    opened = sk.open(where)
    index, record = opened.index, opened.record
    row = index.tensor_rows["table"]
    rows, at = index.shape(row)[0], int(segment_starts(index.chunk_ends)[row])
    counts = np.ones(len(index.chunks), np.int64)
    counts[at] = rows
    chunks = index.chunks.take(np.repeat(np.arange(len(counts)), counts))
    of_table, number = slice(at, at + rows), np.arange(rows)
    chunks = replace(chunks, **{name: np.array(column, np.int64) for name, column in vars(chunks).items()})
    chunks.offsets[of_table, 0], chunks.sizes[of_table, 0] = number, 1
    chunks.start[of_table] += 8 * number
    ends = np.array(index.chunk_ends, np.int64)
    ends[row:] += rows - 1
    with mock.patch.object(native, "parts_of", partial(parts_of, least_nbytes=0)):
        native.publish(
            sk.LocalStore(where), replace(index, chunk_ends=ends, chunks=chunks), save_id=native.new_save_id(),
            files=record.files, tensor_bytes=record.totals.tensor_bytes, world_size=2, step=7, meta=record.meta,
            over=sk.LocalStore(where).version("shardkeep.json"),
        )  # fmt: skip
    (where / record.index.name).unlink()


if __name__ == "__main__":
    if VERSION != 2:
        raise SystemExit("say here what the new version can hold")
    writers = {
        "v1-parts": write_parts,
        "v2-coded": partial(write, codecs=CODECS),
        "v2-apart": lambda where: write(InOrder(where)),
    }
    for name, writer in writers.items():
        if not (HERE / name).exists():
            writer(HERE / name)
