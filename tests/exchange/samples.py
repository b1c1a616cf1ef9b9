"""States to carry from one layout to another, and how to make each layout of them."""

import numpy as np
import torch
import torch.distributed.checkpoint as theirs
from safetensors.torch import save_file

import shardkeep as sk
from shardkeep.storage import local
from tests.engine.samples import bits, random_tensor
from tests.protocol.samples import quietly


def training_state():
    """A model with tied weights, an optimizer and plain values: all that a run has, in one process."""
    embedding = random_tensor((31, 8), torch.float32, 1)
    return {
        "model": {
            "embed.weight": embedding,
            "layers.0.weight": random_tensor((8, 24), torch.bfloat16, 2),
            "layers.0.bias": random_tensor((24,), torch.float16, 3),
            "layers.1.weight": random_tensor((24, 8), torch.float32, 4).t(),
            "mask": random_tensor((5,), torch.bool, 5),
            "ids": random_tensor((3, 2), torch.int64, 6),
            "scale": torch.tensor(1.5),
            "empty": torch.zeros(0, 4),
            "head.weight": embedding,
        },
        "optim": {"exp_avg": random_tensor((31, 8), torch.float32, 7), "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "step": 7,
        "name": "a run",
    }


def in_any_order(value):
    """Like `bits`, for states whose dicts a layout may give back in another order."""
    if isinstance(value, dict):
        return sorted(((repr(key), in_any_order(item)) for key, item in value.items()), key=lambda item: item[0])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [in_any_order(item) for item in value])
    return bits(value)


def write(state, where, layout):
    if layout == "native":
        sk.save(state, where, step=3, meta={"note": "x"})
    elif layout == "dcp":
        quietly(theirs.save, state, checkpoint_id=where, no_dist=True)
    else:
        where.mkdir()
        save_file({key: value.contiguous() for key, value in state.items()}, where / "model.safetensors")


def lose_bits(monkeypatch):
    """Let the disk flip a bit of everything large that is written to it."""
    real = local.write_at

    def lossy(fd, view, offset):
        spoiled = bytearray(view)
        spoiled[len(spoiled) // 2] ^= len(spoiled) > 1000
        return real(fd, memoryview(bytes(spoiled)), offset)

    monkeypatch.setattr(local, "write_at", lossy)


def files_in(where):
    return {str(path.relative_to(where)): path.read_bytes() for path in where.rglob("*") if path.is_file()}
