"""
Writes the golden checkpoints of the present format version. Run it once for each version, and never again.

    python -m tests.golden.make
"""

from pathlib import Path

import numpy as np
import torch

import shardkeep as sk
from shardkeep.codecs.keys import KeyRing
from shardkeep.format.record import VERSION
from shardkeep.testing.thread_ranks import run_thread_ranks

HERE = Path(__file__).parent
KEYS = KeyRing([bytes(range(32))])
"""No secret: it opens what lies beside it for everybody to read."""
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


def write(where, **how):
    """Save it from two ranks."""
    options = sk.Options(keys=KEYS)
    run_thread_ranks(
        2,
        lambda world: sk.save(
            rank_state(world.rank), where, step=7, meta={"golden": True}, group=world, options=options, **how
        ),
    )
    print(f"wrote {where}")


if __name__ == "__main__":
    if VERSION != 2:
        raise SystemExit("say here what the new version can hold")
    write(HERE / "v2-coded", codecs=CODECS)
    write(InOrder(HERE / "v2-apart"))
