"""
Look into a checkpoint from one process: no process group, no model, and no more bytes read than asked for.

    python examples/look_inside.py [PATH]
"""
# ruff: noqa: INP001, T201 - a script to read and run

import sys
import tempfile

import torch

import shardkeep as sk


def example() -> str:
    where = tempfile.mkdtemp() + "/step-10"
    weights = {"embed": torch.randn(1000, 64), "head": torch.randn(1000, 64, dtype=torch.bfloat16)}
    sk.save({"model": weights, "step": 10, "schedule": {"lr": 3e-4, "warmup": 100}}, where, step=10)
    return where


where = sys.argv[1] if len(sys.argv) > 1 else example()
ck = sk.open(where)
print(f"{where}: step {ck.record.step}, saved by {ck.record.world_size} rank(s)")
for key in ck.keys():  # noqa: SIM118 - the keys are the point
    print(f"  {key}: {ck[key]}")

first = next(key for key in ck.keys() if isinstance(ck[key], sk.StoredTensor))  # noqa: SIM118
print(f"{first}[3:5, ::16] =", ck[first][3:5, ::16])
print(ck.verify())
