"""
Stream extensions of torch's storage writers and readers: they transform the bytes of each value on the way to a file.

An extension leaves a descriptor, "name[@local-domain][/version]", from which a reader makes it again. Of several, the
first is nearest to the file, so data passes through the last one first; descriptors are stored in that order.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import IO, Any, cast

from typing_extensions import Buffer

from shardkeep.codecs.compression import MODULES, zstd_module
from shardkeep.errors import MalformedFile, UnknownExtension


class Extension(ABC):
    """Something that changes what is written, and that readers find by its descriptor."""

    @staticmethod
    @abstractmethod
    def registry_name() -> str:
        """Return the part of the descriptor before the version, by which readers find the class."""

    @staticmethod
    @abstractmethod
    def from_descriptor(version: str) -> Extension:
        """Make the extension that wrote a descriptor with this version; "" means none."""

    @abstractmethod
    def get_descriptor(self) -> str:
        """Return what is stored with the data: "name[@local-domain][/version]"."""


class StreamTransformExtension(Extension):
    """An extension that transforms a stream of bytes. Large tensors come in pieces, of which it should hold one at a time."""

    @abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that transforms what is written to it, and writes the result to `output`."""

    @abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        """Return a stream that reads from `input`, and returns what was written to the stream of `transform_to`."""


def transformed_output(extensions: Sequence[StreamTransformExtension], raw: IO[bytes]) -> tuple[IO[bytes], list[str]]:
    """Return a stream that writes through all extensions, and the descriptors to store. Closing it leaves `raw` open."""
    streams: list[Any] = [OutputStream(raw)]
    for extension in extensions:
        streams.append(extension.transform_to(streams[-1]))
    return cast("IO[bytes]", _Output(streams)), [extension.get_descriptor() for extension in reversed(extensions)]


def transformed_input(registry: Any, descriptors: Sequence[str], raw: IO[bytes]) -> IO[bytes]:
    """Return a stream that undoes the extensions of these descriptors, made by `registry`; `raw` if there are none."""
    stream = raw
    for extension in reversed(registry.from_descriptor_list(descriptors)):
        # As in torch, an extension that does not transform streams is skipped. Torch's own classes count.
        if hasattr(extension, "transform_from"):
            stream = extension.transform_from(stream)
    return stream


class OutputStream(io.RawIOBase):
    """Writes to another stream, which stays open when this one is closed."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def writable(self) -> bool:
        return True

    writeable = writable  # torch's spelling

    def write(self, b: Buffer, /) -> int:
        return self._raw.write(b)

    def tell(self) -> int:
        return self._raw.tell()

    def flush(self) -> None:
        self._raw.flush()


class _Output(io.RawIOBase):
    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams

    def writable(self) -> bool:
        return True

    def write(self, b: Buffer, /) -> int:
        self._streams[-1].write(b)  # its count is ignored: some extensions count what they wrote, some return nothing
        return memoryview(b).nbytes

    def close(self) -> None:
        """Close every stream: not all extensions close the stream that they write to."""
        if not self.closed:
            for stream in reversed(self._streams):
                stream.close()
            super().close()


class ZStandard(StreamTransformExtension):
    """Compresses what is written, as one zstd frame; reads any number of frames. Needs a module of zstd."""

    def __init__(self) -> None:
        super().__init__()
        self._module()

    @staticmethod
    def is_available() -> bool:
        return zstd_module() is not None

    @staticmethod
    def registry_name() -> str:
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> ZStandard:
        if version.partition(".")[0] != "1":
            raise UnknownExtension(f"Unknown extension {version=} of {ZStandard.registry_name()}; known is 1")
        return ZStandard()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        stream = self._module().ZstdFile(output, "w")  # at the default level, as torch's
        stream.write(b"")  # begins a frame, even if nothing follows
        return cast("IO[bytes]", stream)

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        return cast("IO[bytes]", _ZstdReader(self._module(), input))

    @staticmethod
    def _module() -> Any:
        # Not an attribute: the extension is pickled with its storage writer for other processes.
        module = zstd_module()
        if module is None:
            raise UnknownExtension(
                f"ZStandard cannot be used: there is no module named {' or '.join(map(repr, MODULES))}",
                hint="pip install backports.zstd (Python 3.14 has compression.zstd)",
            )
        return module


class _ZstdReader(io.BufferedIOBase):
    def __init__(self, module: Any, source: IO[bytes]) -> None:
        self._error = module.ZstdError
        self._file = module.ZstdFile(source)

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return bytes(self._file.read(size))
        except EOFError as exc:
            raise MalformedFile(
                "a zstd stream ends inside a frame",
                hint="the file was cut short: use another checkpoint, or another copy of this one",
            ) from exc
        except self._error as exc:
            raise MalformedFile(f"a zstd stream is damaged, or is not zstd: {exc}") from exc


class ExtensionRegistry:
    """The extensions that a reader knows: those of shardkeep, and those that were registered."""

    def __init__(self) -> None:
        self.extensions: dict[str, type[Extension]] = {ZStandard.registry_name(): ZStandard}

    def register(self, cls: type[Extension]) -> None:
        self.extensions[cls.registry_name()] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]:
        """Make the extensions that left these descriptors, in their order; raises a ValueError for unknown ones."""
        found = []
        for descriptor in descriptors:
            name, _, version = descriptor.partition("/")
            if name not in self.extensions:
                raise UnknownExtension(
                    f"Unknown extension {name=}; known are {sorted(self.extensions)}",
                    hint="pass the reader a registry (_extension_registry) on which the extension's class is registered",
                    descriptor=descriptor,
                )
            found.append(self.extensions[name].from_descriptor(version))
        return found


class _StorageWriterTransforms:
    def __init__(self, extensions: Sequence[StreamTransformExtension] | None = None) -> None:
        self.extensions: Sequence[StreamTransformExtension] = () if extensions is None else extensions

    def transform_save_stream(self, write_item: Any, raw_stream: IO[bytes]) -> tuple[IO[bytes], list[str]]:  # noqa: ARG002 - for subclasses
        """See `transformed_output`."""
        return transformed_output(self.extensions, raw_stream)


class _StorageReaderTransforms:
    def __init__(self, extension_registry: ExtensionRegistry | None = None) -> None:
        self.extension_registry = ExtensionRegistry() if extension_registry is None else extension_registry

    def transform_load_stream(
        self,
        read_item: Any,  # noqa: ARG002 - for subclasses
        transform_descriptors: Sequence[str],
        raw_stream: IO[bytes],
    ) -> IO[bytes]:
        """See `transformed_input`."""
        return transformed_input(self.extension_registry, transform_descriptors, raw_stream)
