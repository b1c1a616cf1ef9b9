"""
A safetensors file as the safetensors library hands it out: keys, whole tensors, slices. For readers that users extend.
"""

from __future__ import annotations

from typing import Any

import torch

from shardkeep.errors import MalformedFile
from shardkeep.format.dtypes import to_torch
from shardkeep.format.region import Box, whole
from shardkeep.storages.safetensors_files import OpenFiles, Part, SafetensorsFile
from shardkeep.storages.safetensors_reads import Want, read_box
from shardkeep.store.aligned import aligned_buffer

_BUFFER_NBYTES = 1 << 20


class SafeFile:
    """An open file; what `safetensors.safe_open` returns has these methods."""

    def __init__(self, file: SafetensorsFile, files: OpenFiles) -> None:
        self._file = file
        self._files = files

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
        return SafeSlice(self._file.path, self._file.tensors[name], self._files)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        found = self.get_slice(name)
        return found.read(whole(found.part.shape))


class SafeSlice:
    """A stored tensor of which only what is asked for is read."""

    def __init__(self, path: str, part: Part, files: OpenFiles) -> None:
        self.path = path
        self.part = part
        self._files = files

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
        found = torch.empty(box.sizes, dtype=to_torch(self.part.dtype))
        want = Want(self.path, self.part.start, self.part.dtype, self.part.shape, box, found)
        read_box(want, self._files, aligned_buffer(_BUFFER_NBYTES))
        return found
