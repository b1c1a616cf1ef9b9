"""
Where an item of a checkpoint lies among the files of torch's layout.

Instances travel in `WriteResult.storage_data` and stand in `Metadata.storage_data`, pickled under torch's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

DEFAULT_SUFFIX = ".distcp"
_metadata_fn = ".metadata"
CURRENT_DCP_VERSION = "1.0.0"


class SerializationFormat(Enum):
    """What a data file is."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


@dataclass
class _StorageInfo:
    """The place of one item: a file, and a range of it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None
    """The extensions it was written through, the first to undo first."""

    # What torch does not know is kept beside its fields: it is pickled with them, and torch carries it along unseen.

    @property
    def data_start(self) -> int | None:
        """Where in the file the bytes of a tensor begin, row-major and as its metadata say; None if not known."""
        return vars(self).get("shardkeep_data_start")

    def keep_data_start(self, start: int) -> None:
        """Say where in the file the tensor's bytes begin."""
        vars(self)["shardkeep_data_start"] = start

    def keep_sums(self, sums: tuple[int, int, str]) -> None:
        """Give the coordinator what is to be known of the whole file."""
        vars(self)["shardkeep_sums"] = sums

    def take_sums(self) -> tuple[int, int, str] | None:
        """Take what a rank said of the whole file."""
        sums: tuple[int, int, str] | None = vars(self).pop("shardkeep_sums", None)
        return sums

    def __getstate__(self) -> dict[str, Any]:
        # Nothing where there is nothing to say, as before there were extensions.
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass
class _StoragePrefix:
    """What the names of a rank's files begin with."""

    prefix: str
