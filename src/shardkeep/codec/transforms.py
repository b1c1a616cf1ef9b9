"""The extensions of a storage writer, and of a storage reader, as their attribute `transforms`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from shardkeep.codec.chain import transformed_input, transformed_output
from shardkeep.codec.registry import ExtensionRegistry

if TYPE_CHECKING:
    from shardkeep.codec.extensions import StreamTransformExtension


class _StorageWriterTransforms:
    """What a storage writer does to each value's stream. A subclass may choose by the item that is written."""

    def __init__(self, extensions: Sequence[StreamTransformExtension] | None = None) -> None:
        self.extensions: Sequence[StreamTransformExtension] = () if extensions is None else extensions

    def transform_save_stream(self, write_item: Any, raw_stream: IO[bytes]) -> tuple[IO[bytes], list[str]]:  # noqa: ARG002 - for subclasses
        """Return the stream to write an item to, and the descriptors to store; see `transformed_output`."""
        return transformed_output(self.extensions, raw_stream)


class _StorageReaderTransforms:
    """How a storage reader finds what was done to each value's stream, and undoes it."""

    def __init__(self, extension_registry: ExtensionRegistry | None = None) -> None:
        self.extension_registry = ExtensionRegistry() if extension_registry is None else extension_registry

    def transform_load_stream(
        self,
        read_item: Any,  # noqa: ARG002 - for subclasses
        transform_descriptors: Sequence[str],
        raw_stream: IO[bytes],
    ) -> IO[bytes]:
        """Return the stream to read an item from; see `transformed_input`."""
        return transformed_input(self.extension_registry, transform_descriptors, raw_stream)
