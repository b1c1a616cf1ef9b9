"""
What a checkpoint holds, as plain values: tensors in chunks, objects as bytes, and where each lies.

Fields, defaults, comparison and hashing are those of torch's classes of the same names. A `MetadataIndex` is also
equal to torch's own, with the same hash, so that either finds what is stored under the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from shardkeep.protocol.problems import BrokenProtocol


def is_torchs(obj: object, name: str) -> bool:
    """Say whether an object's class is the one that torch's distributed checkpoint has under this name."""
    kind = type(obj)
    return kind.__name__ == name and kind.__module__.startswith("torch.distributed.checkpoint.")


@dataclass
class ChunkStorageMetadata:
    """A box of a tensor that is stored in one piece."""

    offsets: torch.Size
    sizes: torch.Size


class _MEM_FORMAT_ENCODING(Enum):  # noqa: N801 - torch's name
    """A memory format in a form that can be pickled."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}


@dataclass
class TensorProperties:
    """What a tensor is, besides its size; only the dtype still counts."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False

    def __getstate__(self) -> tuple[Any, ...]:
        for name, memory_format in _FORMATS.items():
            if memory_format == self.memory_format:
                encoded = _MEM_FORMAT_ENCODING[name]
                return self.dtype, self.layout, self.requires_grad, encoded, self.pin_memory
        raise BrokenProtocol(f"{self.memory_format} is no memory format that a checkpoint can hold")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, encoded, self.pin_memory = state
        # By name: the member may be that of torch's own enum.
        name = getattr(encoded, "name", None)
        if name not in _FORMATS:
            raise BrokenProtocol(f"{encoded!r} stands for no memory format")
        self.memory_format = _FORMATS[name]

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Describe a tensor."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.is_pinned(),
        )


@dataclass
class TensorStorageMetadata:
    """A stored tensor and the chunks it is stored in."""

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    """A stored object that is no tensor."""


STORAGE_TYPES = TensorStorageMetadata | BytesStorageMetadata
STATE_DICT_TYPE = dict[str, Any]


def is_tensor_entry(entry: Any) -> bool:
    """Say whether an entry of `Metadata.state_dict_metadata`, ours or torch's, describes a tensor."""
    return isinstance(entry, TensorStorageMetadata) or is_torchs(entry, "TensorStorageMetadata")


@dataclass
class StorageMeta:
    """What a storage says about itself and the call it is used in."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class Metadata:
    """All that is known of a checkpoint without reading its data."""

    state_dict_metadata: dict[str, STORAGE_TYPES]
    """What is stored, by flat name."""
    planner_data: Any = None
    """Left by the save planner for the load planner; the default ones keep the path of each flat name."""
    storage_data: Any = None
    """Left by the storage writer for the reader: where each piece lies."""
    storage_meta: StorageMeta | None = None
    version: str | None = None


@dataclass(frozen=True, init=False, eq=False)
class MetadataIndex:
    """Names an object of a checkpoint, or the chunk of a tensor that begins at an offset."""

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)
    """Where in the list of chunks to look first; no part of what the index means."""

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "index", index)
        if offset is not None:
            object.__setattr__(self, "offset", offset if type(offset) is torch.Size else torch.Size(offset))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MetadataIndex) and not is_torchs(other, "MetadataIndex"):
            return NotImplemented
        return (self.fqn, self.offset) == (other.fqn, other.offset)  # type: ignore[attr-defined]  # torch's has both

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))
