"""States to save, and how to compare them bit for bit."""

import enum
import os
import random
from collections import OrderedDict
from datetime import datetime, timezone

import numpy as np
import torch

import shardkeep as sk
from shardkeep.format import dtypes


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Trap:
    """Unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def random_tensor(shape, dtype, seed=0):
    gen = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=gen).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), generator=gen, dtype=torch.uint8)
    if raw.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    return raw.view(dtype).reshape(shape) if size > 1 else raw.squeeze(-1).view(dtype)


def bits(value):
    if isinstance(value, torch.nn.Parameter):
        value = value.detach()
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), raw_view(value).contiguous().cpu().numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, sk.PerRank):
        return ("per rank", bits(value.value))
    if isinstance(value, dict):
        return (type(value).__name__, [(key, bits(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [bits(item) for item in value])
    return (type(value).__name__, repr(value))


def raw_view(tensor):
    """The same bits as numbers that torch can copy: it has no copy of int7 and the like."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[plain.element_size()]
    )


def all_dtypes():
    return [dtypes.to_torch(row) for row in dtypes.DTYPES if hasattr(torch, row.name)]


def rich_state():
    """One of every kind of leaf."""
    base = torch.randn(6, 8)
    tied = torch.randn(5, 3)
    return {
        "model": OrderedDict(
            plain=torch.randn(7, 5),
            transposed=torch.randn(4, 9).t(),
            strided=torch.randn(10, 10)[::2, 1::3],
            view=base[2:5, 3:],
            base=base,
            expanded=torch.randn(1, 4).expand(3, 4),
            scalar=torch.tensor(2.5, dtype=torch.float64),
            empty=torch.empty(0, 3),
            grad=torch.randn(3, requires_grad=True),
            param=torch.nn.Parameter(torch.randn(2, 2)),
            conj=torch.randn(3, dtype=torch.complex64).conj(),
            tied_a=tied,
            tied_b=tied,
        ),
        "dtypes": {str(dtype): random_tensor((3, 4), dtype, seed=i) for i, dtype in enumerate(all_dtypes())},
        "optim": {"state": {0: {"step": torch.tensor(3.0), "m": torch.randn(4)}, 1: {}}, "groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]},
        "values": {
            "none": None, "true": True, "int": -3, "big": 2**100, "float": float("-inf"), "text": "héllo\n", "bytes": b"\0\xff",
            "set": {1, 2, 3}, "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "when": datetime(2026, 11, 15, tzinfo=timezone.utc),
            "enum": Colour.BLUE, "scalar": np.float32(1.5), "python_rng": random.getstate(), "nested": [1, (2, [3, {4}])],
            "empty_list": [], "empty_dict": {},
        },
        "array": np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        "text_array": np.array(["a", "bc"]),
        "rng": sk.PerRank({"torch": torch.get_rng_state(), "numpy": np.random.RandomState(3).get_state()}),
    }  # fmt: skip


def blank_like(value):
    """The same state with every leaf overwritten, to load into."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 0:
            return torch.empty_like(value)
        blank = torch.empty(value.shape, dtype=value.dtype)
        raw_view(blank).fill_(1)
        return blank
    if isinstance(value, np.ndarray):
        return np.zeros_like(value) if value.dtype.kind != "U" else None
    if isinstance(value, sk.PerRank):
        return sk.PerRank(blank_like(value.value))
    if isinstance(value, dict):
        return type(value)((key, blank_like(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)) and any(isinstance(item, (torch.Tensor, dict, np.ndarray)) for item in value):
        return type(value)(blank_like(item) for item in value)
    return None
