"""Small checkpoints in memory to be damaged, what they hold, and their bytes one by one."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

import shardkeep as sk
from shardkeep.format.record import RECORD_NAME, decode_record
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.thread_ranks import run_thread_ranks
from tests.engine.samples import bits

QUICK = sk.Options(io_threads=1, host_budget_bytes=2 << 20)
"""One thread and small windows: thousands of loads are made here."""

Blobs = dict[str, bytes]


@dataclass(frozen=True)
class Subject:
    """A checkpoint as plain bytes, with what it holds as comparable bits."""

    name: str
    blobs: Blobs
    loaded: object
    """What `load` must give, if it gives anything."""
    tree: object
    """What `to_dict` must give."""

    @property
    def record(self):
        return decode_record(self.blobs[RECORD_NAME], self.name)

    @property
    def index_name(self):
        return self.record.index.name

    def with_blob(self, name, data):
        changed = {**self.blobs, name: data}
        return store_of({key: value for key, value in changed.items() if value is not None})


def store_of(blobs):
    store = MemoryStore()
    for name, data in blobs.items():
        store.put(name, data)
    return store


def blobs_of(store):
    return {info.name: store.get(info.name, limit=info.nbytes) for info in store.list()}


def state(seed=0):
    """Three groups of files, one of them of two blocks; tied, empty, strided and 0-dim tensors; values."""
    gen = torch.Generator().manual_seed(seed)
    table = torch.randn(5, 3, generator=gen)
    return {
        "model": {
            "weight": torch.randn(4, 5, generator=gen),
            "half": torch.randn(7, generator=gen).bfloat16(),
            "tied_a": table,
            "tied_b": table,
            "empty": torch.empty(0, 3),
        },
        "optim": {
            "moment": torch.randn(140, 150, generator=gen),
            "strided": torch.randn(10, 9, generator=gen)[::2, 1::3],
            "array": np.arange(6, dtype=np.int16).reshape(2, 3) + seed,
        },
        "mask": torch.tensor([True, False, True]),
        "loss": torch.tensor(0.25 + seed, dtype=torch.float64),
        "step": 12 + seed,
        "name": f"run {seed}",
        "betas": (0.9, 0.95),
        "nothing": None,
    }


def poisoned():
    """The same shape of state, full of what is in no checkpoint; one destination strided, one on meta."""

    def poison(*shape, dtype=torch.float32):
        return torch.from_numpy(np.full(shape, -7.5, np.float32)).to(dtype)

    return {
        "model": {
            "weight": torch.empty(4, 5, device="meta"),
            "half": poison(7, dtype=torch.bfloat16),
            "tied_a": poison(5, 3),
            "tied_b": poison(5, 3),
            "empty": torch.empty(0, 3),
        },
        "optim": {
            "moment": poison(140, 150),
            "strided": poison(10, 6)[::2, ::2],
            "array": np.full((2, 3), -7, np.int16),
        },
        "mask": torch.tensor([False, True, False]),
        "loss": torch.tensor(-7.5, dtype=torch.float64),
        "step": -7,
        "name": "poison",
        "betas": ("poison",),
        "nothing": None,
    }


@cache
def one_rank(seed=0):
    store, saved = MemoryStore(), state(seed)
    sk.save(saved, store, step=12, meta={"note": "small"}, options=QUICK)
    return Subject("one rank", blobs_of(store), bits(saved), bits(saved))


@cache
def three_ranks():
    """Saved by three ranks, each with a third of two tensors and state of its own."""
    store, saved = MemoryStore(), state()

    def main(world):
        mine = {**saved, "optim": dict(saved["optim"]), "model": dict(saved["model"])}
        for group, key, cuts in (("optim", "moment", (0, 50, 100, 140)), ("model", "weight", (0, 2, 2, 4))):
            low, high = cuts[world.rank : world.rank + 2]
            full = saved[group][key]
            pieces = [(full[low:high], (low, 0))] if high > low else []
            mine[group][key] = sk.ShardedBox.of(pieces, shape=full.shape, dtype=full.dtype)
        mine["rng"] = sk.PerRank({"seed": 100 + world.rank, "bits": torch.full((3,), world.rank)})
        sk.save(mine, store, step=12, group=world, options=QUICK)

    run_thread_ranks(3, main)
    whole = {**saved, "rng": {rank: {"seed": 100 + rank, "bits": torch.full((3,), rank)} for rank in range(3)}}
    loaded = {**saved, "rng": sk.PerRank({"seed": 100, "bits": torch.full((3,), 0)})}
    return Subject("three ranks", blobs_of(store), bits(loaded), bits(whole))


def blank_for(subject):
    blank = poisoned()
    if subject.name == "three ranks":
        blank["rng"] = sk.PerRank({"seed": -7, "bits": torch.full((3,), -7)})
    return blank


SUBJECTS = [one_rank, three_ranks]


def flipped(data, at, bit):
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
