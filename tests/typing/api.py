"""User code, checked by mypy --strict and never run: the public API must be usable with types."""

import re
from pathlib import Path

import torch

import shardkeep as sk


def train(model: torch.nn.Module, where: Path) -> int:
    state = {"model": model.state_dict(), "step": 3, "rng": sk.PerRank(torch.get_rng_state())}
    saved: sk.SaveReport = sk.save(state, where, step=3, meta={"note": "x"}, overwrite=True)
    loaded: sk.LoadReport = sk.load(
        state,
        str(where),
        strict=False,
        include=["model", "step"],
        exclude="rng",
        rename={re.compile(r"^module\."): ""},
        cast="model.*",
        options=sk.Options(io_threads=4, host_budget_bytes=1 << 28, staging_bytes="4GiB", timeout_s=60.0),
    )
    checkpoint: sk.Checkpoint = sk.open(where)
    part: torch.Tensor = checkpoint["model.weight"][3:7, ::2]
    try:
        checkpoint.verify()
    except sk.DamagedCheckpoint as error:
        print(error.details, error.by_rank)
    boxed = sk.ShardedBox(part, offsets=(0, 0), shape=(8, 8))
    return saved.bytes_total + loaded.bytes_read + len(boxed.pieces)
