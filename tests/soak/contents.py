"""What the checkpoints of a soak hold: every bit a function of job, step and key, so that anybody can tell what is right."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Bits = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Kind:
    """A tensor of the state."""

    shape: tuple[int, ...]
    dtype: str
    """As torch calls it."""
    nbytes: int
    """Of an element."""
    axis: int | None = None
    """Along which ranks have their parts; None: every rank has all of it."""
    lopsided: bool = False
    """Whether the last rank has nearly all of it, and so a file that is sent in parts."""
    smooth: bool = False
    """Whether its numbers are alike, as weights are: the top byte of each hardly varies."""


TENSORS = {
    "model.w": Kind((97, 1024), "float32", 4, axis=0),
    "model.b": Kind((4099,), "float64", 8),
    "optim.m": Kind((61, 257), "int64", 8, axis=1),
    "optim.v": Kind((33, 5), "bfloat16", 2),
    "optim.t": Kind((2, 3), "bool", 1, axis=0),
}


BULK = {"model.x": Kind((293, 16384), "bfloat16", 2, axis=0, lopsided=True, smooth=True)}
"""What there is besides where checkpoints go to an object store: compressed by a third, it is still more than one part."""
KEY = "5b" * 32
"""By which checkpoints are encrypted, where they are."""


def kinds_of(*, bulk: bool) -> dict[str, Kind]:
    """Say which tensors a checkpoint has."""
    return {**TENSORS, **BULK} if bulk else TENSORS


def bits(key: str, job: int, step: int) -> Bits:
    """Return the bytes of a tensor, with one more axis: those of an element. Floats are any pattern, NaNs among them."""
    kind = kinds_of(bulk=True)[key]
    seed = (job, step, zlib.crc32(key.encode()))
    count = int(np.prod(kind.shape)) * kind.nbytes
    found = np.frombuffer(np.random.default_rng(seed).bytes(count), np.uint8)
    if kind.dtype == "bool":
        found = found & 1
    found = found.reshape(*kind.shape, kind.nbytes)
    if kind.smooth:
        found = found.copy()
        found[..., -1] = (found[..., -1] & 0x81) | 0x3C
    return found


def part(kind: Kind, rank: int, size: int) -> tuple[slice, ...]:
    """Say which part of a tensor a rank has: an uneven one, sometimes none."""
    whole = [slice(0, n) for n in kind.shape]
    if kind.axis is not None:
        n = kind.shape[kind.axis]
        bounds = [*range(size), n] if kind.lopsided else [each * n // size for each in range(size + 1)]
        whole[kind.axis] = slice(bounds[rank], bounds[rank + 1])
    return tuple(whole)


def keys(*, bulk: bool) -> Iterator[tuple[str, str, str]]:
    """Name all tensors: key, and its two parts."""
    for key in kinds_of(bulk=bulk):
        first, second = key.split(".")
        yield key, first, second


def loss(job: int, step: int) -> float:
    """The metric of a step: no two are the same, and no order is in them."""
    found = zlib.crc32(f"{job}/{step}".encode()) / 2**32 + step * 1e-9
    return found if step % 4 else found * 1e-6  # some are spelt differently by different libraries
