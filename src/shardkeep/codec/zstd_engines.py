"""
The modules that can compress with zstd, behind one face: whichever of them is installed.

`compression.zstd` (Python 3.14), `backports.zstd` and `pyzstd` have one interface: compressors and decompressors that
take and give pieces. `zstandard` has its own, and its decompressor gives all that a piece of input stands for at once;
it is fed small pieces here, as four bytes of zeros may stand for 128 KiB.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Protocol

_ALIKE = ("compression.zstd", "backports.zstd", "pyzstd")
MODULES = (*_ALIKE, "zstandard")
"""The modules that will do, the best first."""

_FEED = 2048
"""Most input that `zstandard` is given at a time: it becomes 64 MiB at the very most."""


class Compressor(Protocol):
    """Makes one frame."""

    def compress(self, data: memoryview) -> bytes:
        """Take data, and return what can be written already."""
        ...

    def end_block(self) -> bytes:
        """Return what a reader needs to have all data so far."""
        ...

    def end_frame(self) -> bytes:
        """Return the rest of the frame."""
        ...


class Decompressor(Protocol):
    """Reads one frame."""

    @property
    def eof(self) -> bool:
        """Say whether the frame is read to its end."""
        ...

    @property
    def needs_input(self) -> bool:
        """Say whether nothing can be given before more is taken."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Return what was taken and is behind the frame."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take a piece of the frame, possibly empty, and return at most so many bytes."""
        ...


class Engine:
    """One of the modules."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.error: type[Exception] = module.ZstdError

    def compressor(self) -> Compressor:
        """Return a compressor at the default level, as torch's is."""
        return _Compressor(self._module)

    def decompressor(self) -> Decompressor:
        """Return what reads the next frame."""
        frame: Decompressor = self._module.ZstdDecompressor()
        return frame


class ZstandardEngine(Engine):
    """The module `zstandard`."""

    def compressor(self) -> Compressor:
        """Return a compressor at the default level."""
        return _ZstandardCompressor(self._module)

    def decompressor(self) -> Decompressor:
        """Return what reads the next frame."""
        return _ZstandardDecompressor(self._module)


@cache
def find_engine(names: tuple[str, ...] = MODULES) -> Engine | None:
    """Return the first of the modules that is installed, or None."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return Engine(module) if name in _ALIKE else ZstandardEngine(module)
    return None


class _Compressor:
    def __init__(self, module: Any) -> None:
        self._inner = module.ZstdCompressor()

    def compress(self, data: memoryview) -> bytes:
        return bytes(self._inner.compress(data))

    def end_block(self) -> bytes:
        return bytes(self._inner.flush(self._inner.FLUSH_BLOCK))

    def end_frame(self) -> bytes:
        return bytes(self._inner.flush(self._inner.FLUSH_FRAME))


class _ZstandardCompressor:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._inner = module.ZstdCompressor().compressobj()

    def compress(self, data: memoryview) -> bytes:
        return bytes(self._inner.compress(data))

    def end_block(self) -> bytes:
        return bytes(self._inner.flush(self._module.COMPRESSOBJ_FLUSH_BLOCK))

    def end_frame(self) -> bytes:
        return bytes(self._inner.flush(self._module.COMPRESSOBJ_FLUSH_FINISH))


class _ZstandardDecompressor:
    def __init__(self, module: Any) -> None:
        self._inner = module.ZstdDecompressor().decompressobj()
        self._input = memoryview(b"")
        self._output = memoryview(b"")

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof) and not self._output

    @property
    def needs_input(self) -> bool:
        return not self._inner.eof and not self._output and not self._input

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + bytes(self._input)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if data:
            self._input = memoryview(bytes(self._input) + data)
        if not self._output and not self._inner.eof:
            piece, self._input = self._input[:_FEED], self._input[_FEED:]
            self._output = memoryview(self._inner.decompress(piece))
        given, self._output = self._output[:max_length], self._output[max_length:]
        return bytes(given)
