"""The states to measure: filled with random bytes, overwritten before a load, and compared bit for bit after it."""

from __future__ import annotations

import mmap

import numpy as np
import torch
import xxhash

State = dict[str, torch.Tensor]

LAYERS = 9
PAGE = 4096


def large(gb: float) -> State:
    """Weights in bf16 and two fp32 moments of each, as a transformer has them: 333 tensors of 2 KB to 64 MB at 1.5 GB."""
    hidden = max(64, round(1024 * (gb / 1.5) ** 0.5 / 64) * 64)
    shapes = {"embed.weight": (16 * hidden, hidden), "head.weight": (16 * hidden, hidden), "norm.weight": (hidden,)}
    for layer in range(LAYERS):
        for name, rows, cols in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes[f"layers.{layer}.{name}.weight"] = (rows * hidden, cols * hidden)
            shapes[f"layers.{layer}.{name}.bias"] = (rows * hidden,)
        for norm in ("norm1", "norm2"):
            shapes[f"layers.{layer}.{norm}.weight"] = (hidden,)
            shapes[f"layers.{layer}.{norm}.bias"] = (hidden,)
    state = {f"model.{name}": torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        state |= {f"optim.{name}.{moment}": torch.empty(shape) for name, shape in shapes.items()}
    return state


def small(count: int) -> State:
    """`count` tensors of 4 KB each."""
    return {f"model.block{i // 100}.part{i % 100}": torch.empty(1024) for i in range(count)}


def flat(nbytes: int, *, direct: bool) -> State:
    """
    One tensor of `nbytes`, for the raw limit.

    It lies where torch puts tensors, as what the others load does; for O_DIRECT it begins and ends with a page.
    """
    if not direct:
        return {"bytes": torch.empty(nbytes, dtype=torch.uint8)}
    pages = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)
    return {"bytes": torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]}


def nbytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).reshape(-1).numpy()


def fill(state: State, seed: int = 0) -> None:
    """Write random bytes everywhere, NaN patterns included: every page is then faulted in."""
    source = np.random.Generator(np.random.SFC64(seed))
    for tensor in state.values():
        out = raw_bytes(tensor)
        for start in range(0, out.size, 1 << 23):
            piece = out[start : start + (1 << 23)]
            piece[:] = np.frombuffer(source.bytes(piece.size), dtype=np.uint8)


def poison(state: State) -> None:
    for tensor in state.values():
        raw_bytes(tensor)[:] = 0xA5


def digests(state: State) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(raw_bytes(tensor)) for tensor in state.values()]
