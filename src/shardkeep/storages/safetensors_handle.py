"""
A safetensors file as the safetensors library hands it out: keys, whole tensors, slices. For readers that users extend.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardkeep.errors import MalformedFile
from shardkeep.format.dtypes import DType, to_torch
from shardkeep.format.region import Box, whole
from shardkeep.layout.safetensors_files import Part, SafetensorsFile
from shardkeep.options import Options
from shardkeep.run.item_files import Files, Item
from shardkeep.run.read import Reads
from shardkeep.run.safetensors_catalog import Chunk
from shardkeep.run.torch_read import ChunkRead, read_chunks
from shardkeep.run.workers import WINDOW_NBYTES


class SafeFile:
    """An open file; what `safetensors.safe_open` returns has these methods."""

    def __init__(self, file: SafetensorsFile, opens: Reads) -> None:
        self._file = file
        self._opens = opens

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._file.tensors)

    def metadata(self) -> dict[str, str] | None:
        """Return what the header says besides."""
        return self._file.metadata or None

    def get_slice(self, name: str) -> SafeSlice:
        """Return a tensor to take slices of."""
        if name not in self._file.tensors:
            raise MalformedFile(f"{self._file.path}: there is no tensor {name!r}", file=self._file.path, key=name)
        return SafeSlice(self._opens, self._file.path, name, self._file.tensors[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        found = self.get_slice(name)
        return found.read(whole(found.part.shape))


class SafeSlice:
    """A stored tensor of which only what is asked for is read."""

    def __init__(self, opens: Reads, path: str, key: str, part: Part) -> None:
        self._opens = opens
        self.path = path
        self.key = key
        self.part = part

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self.part.shape)

    def get_dtype(self) -> str:
        """Return the dtype, as safetensors spells it."""
        return str(self.part.dtype.safetensors)

    def __getitem__(self, index: Any) -> torch.Tensor:
        given = index if isinstance(index, tuple) else (index,)
        if Ellipsis in given:
            at = given.index(Ellipsis)
            given = (*given[:at], *([slice(None)] * (len(self.part.shape) - len(given) + 1)), *given[at + 1 :])
        ranges = [
            range(full)[each] if isinstance(each, slice) else range(full)[each : each + 1 or None]
            for each, full in zip(given, self.part.shape, strict=False)
        ]
        ranges += [range(full) for full in self.part.shape[len(ranges) :]]
        if any(each.step != 1 for each in ranges):
            raise MalformedFile("only slices of step 1 can be read", file=self.path)
        found = self.read(Box(tuple(each.start for each in ranges), tuple(map(len, ranges))))
        single = [axis for axis, each in enumerate(given) if not isinstance(each, slice)]
        for axis in reversed(single):
            found = found.squeeze(axis)
        return found

    def read(self, box: Box) -> torch.Tensor:
        """Read a box."""
        options, part = Options(), self.part
        found = torch.empty(box.sizes, dtype=to_torch(part.dtype), device="cpu")
        files = Files(self._opens, {})
        read = chunk_read(files, self.key, part.dtype, Chunk(self.path, part.start, whole(part.shape)), box, found)
        threads = max(1, min(options.io_threads, found.nbytes // WINDOW_NBYTES))
        read_chunks(files, [read], threads=threads, budget_nbytes=options.host_budget_bytes)
        return found


def chunk_read(files: Files, key: str, dtype: DType, chunk: Chunk, box: Box, into: torch.Tensor) -> ChunkRead:
    """Say how to fill a tensor with a box of a chunk."""
    shape = chunk.box.sizes
    item = Item(files.number(chunk.path), chunk.start, math.prod(shape) * dtype.itemsize, key)
    return ChunkRead(item, chunk.start, shape, dtype, box, into)
