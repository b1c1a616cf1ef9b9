"""A checkpoint whose index is large: the tensors of a save, each stored in a chunk for each of its rows."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch

import shardkeep as sk
from shardkeep.format.boxes import segment_starts
from shardkeep.format.index import Chunks, parts_of
from shardkeep.layouts import native
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.wrapper import ReaderWrapper, StoreWrapper

TENSORS, ROWS = 100, 1000


def saved_state():
    """A hundred tables of a thousand rows, one of them tied to another and one without elements, and plain values."""
    weights = {f"layers.{n:03d}.weight": torch.arange(ROWS * 3.0).reshape(ROWS, 3) + n for n in range(TENSORS)}
    tied = {"tied": weights["layers.007.weight"], "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    return {"model": {**weights, **tied}, "step": 12, "name": "x"}


def cut_by_row(index):
    """Return an index of the same tensors, with a chunk for each row of each."""
    rows = np.asarray(index.tensors.shape[:, 0], np.int64) * (
        np.asarray(index.tensors.alias) == np.arange(len(index.keys))
    )
    owner = np.repeat(np.arange(len(rows)), rows)
    row = np.arange(len(owner)) - segment_starts(np.cumsum(rows))[owner]
    old = index.chunks.take(segment_starts(index.chunk_ends)[owner])
    offsets, sizes = np.zeros_like(old.offsets, np.int64), np.array(old.sizes, np.int64)
    offsets[:, 0], sizes[:, 0] = row, 1
    width = np.prod(sizes, axis=1) * 4
    chunks = Chunks(offsets, sizes, np.asarray(old.file, np.int64), np.asarray(old.start, np.int64) + row * width)
    return replace(index, chunk_ends=np.cumsum(rows), chunks=chunks)


def publish(store, index, record):
    native.publish(
        store,
        index,
        parts_of(index),
        save_id=native.new_save_id(),
        files=record.files,
        tensor_bytes=record.totals.tensor_bytes,
        world_size=1,
        step=record.step,
        meta={},
        over=store.version("shardkeep.json"),
    )


def write_many_chunks(store):
    sk.save(saved_state(), store, step=12)
    opened = sk.open(store)
    publish(store, cut_by_row(opened.index), opened.record)


@cache
def many_chunks():
    store = MemoryStore()
    write_many_chunks(store)
    return {info.name: store.get(info.name, limit=info.nbytes) for info in store.list()}


class CountingStore(StoreWrapper):
    """Counts what is asked of each kind of file: `calls`, and the bytes that were read."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls, self.nbytes = [], {}

    def call(self, verb, name, work):
        kind = name.rpartition(".")[2]
        self.calls.append(f"{verb} {kind}")
        found = work()
        if verb == "get":
            self.count(kind, len(found))
        return found

    def count(self, kind, nbytes):
        self.nbytes[kind] = self.nbytes.get(kind, 0) + nbytes

    def wrap_reader(self, reader, name):
        return CountingReader(reader, self, name.rpartition(".")[2])


class CountingReader(ReaderWrapper):
    def __init__(self, inner, store, kind):
        super().__init__(inner)
        self.store, self.kind = store, kind

    def read_into(self, offset, into, *, cached=False):
        self.store.calls.append(f"read {self.kind}")
        self.store.count(self.kind, len(into))
        self.inner.read_into(offset, into, cached=cached)
