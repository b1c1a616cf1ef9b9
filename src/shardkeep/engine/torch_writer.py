"""
Writing files of torch's layout: items end to end, objects first, each tensor an archive as `torch.save` writes it.

If the size of every item is known beforehand, a file is laid out and goes through the write pipeline, straight from the
tensors' memory. Otherwise (stream extensions, stores that only take a stream) items are written one after the other. Both
ways compute the digests of the file's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
import xxhash

from shardkeep.engine.tensors import host_address, scattered_memory, windows_of
from shardkeep.engine.workers import WINDOW_NBYTES, Scattered
from shardkeep.engine.writer import FileJob
from shardkeep.errors import StateError
from shardkeep.format.boxes import Ints
from shardkeep.format.data_file import block_nbytes_for
from shardkeep.format.dtypes import known_to_torch, of_torch
from shardkeep.format.torch_zip import frame_tensor
from shardkeep.state.leaves import wait_tensor
from shardkeep.storage.buffers import address_of

_ALIGNMENT = 64
_LARGE_NBYTES = 1 << 20
_LARGE_ALIGNMENT = 4096
"""Large tensors are read and written with direct I/O, in whole pages."""

Data = torch.Tensor | memoryview
Wrap = Callable[[IO[bytes]], tuple[IO[bytes], list[str]]]
"""Wraps a stream in one that transforms what is written; returns it and the descriptors of the extensions."""


class WrittenItem(NamedTuple):
    """Where an item lies in its file."""

    offset: int
    nbytes: int
    data_start: int | None
    """Where the bytes of a dense row-major tensor begin; None for everything else."""
    descriptors: list[str]


def plain_tensor(key: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor whose memory can be written as it is; None for one that only torch can write."""
    tensor = wait_tensor(tensor.detach())
    if tensor.device.type == "meta":
        raise StateError(
            f"{key!r} is on the meta device: it has no values to save", hint="materialize it first", key=key
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    return tensor.resolve_conj().resolve_neg() if tensor.dtype in known_to_torch() else None


def lay_out(name: str, items: Sequence[Data], *, framed: bool = True) -> tuple[FileJob, list[WrittenItem]]:
    """
    Lay items out in a new file: the location of each, and the memory that each byte of the file comes from.

    Tensors are `framed` as archives of `torch.save`, or plain bytes.
    """
    sources: list[Data] = []
    address: list[int] = []
    sizes: list[int] = []
    scattered: dict[int, Scattered] = {}
    placed: list[WrittenItem] = []
    at = 0
    for item in items:
        nbytes, begin, tail = item.nbytes, None, None
        end = at + nbytes
        if isinstance(item, torch.Tensor):
            begin, where = at, host_address(item)
            if framed:
                head, tail = _frame(item, at)
                sources.append(head.bytes)
                address.append(head.address)
                sizes.append(len(head.bytes))
                begin = at + len(head.bytes)
                end = begin + nbytes + len(tail.bytes)
            if nbytes and not where:
                scattered[len(sources)] = scattered_memory(item, item.dtype)
        else:
            where = address_of(item)
        if nbytes:
            sources.append(item)
            address.append(where)
            sizes.append(nbytes)
        if tail is not None:
            sources.append(tail.bytes)
            address.append(tail.address)
            sizes.append(len(tail.bytes))
        placed.append(WrittenItem(at, end - at, begin, []))
        at = end
    ends = np.cumsum(np.array(sizes, np.int64))
    job = FileJob(
        name=name,
        header=bytearray(),
        data_nbytes=at,
        block_nbytes=block_nbytes_for(at),
        start=ends - sizes,
        address=np.array(address, np.int64),
        scattered=scattered,
        owners=[None if row in scattered else each for row, each in enumerate(sources)],
    )
    return job, placed


class _Bytes(NamedTuple):
    """Bytes, and where they are in memory as long as they are kept."""

    bytes: memoryview
    address: int


def _frame(tensor: torch.Tensor, at: int) -> tuple[_Bytes, _Bytes]:
    alignment = _LARGE_ALIGNMENT if tensor.nbytes >= _LARGE_NBYTES else _ALIGNMENT
    return _frame_at(tensor.dtype, tuple(tensor.shape), at % alignment, alignment)


@lru_cache(maxsize=4096)
def _frame_at(dtype: torch.dtype, shape: Ints, at: int, alignment: int) -> tuple[_Bytes, _Bytes]:
    made = [memoryview(each) for each in frame_tensor(of_torch(dtype), shape, at=at, alignment=alignment)]
    head, tail = [_Bytes(each, address_of(each)) for each in made]
    return head, tail


class HashingStream:
    """A file that is written from beginning to end and hashed at the same time."""

    block_nbytes = 256 << 10
    """Bytes of the file per digest: its size is not known when its first block is hashed."""

    def __init__(self, raw: IO[bytes], at: int = 0) -> None:
        self._raw = raw
        self._hash = xxhash.xxh3_128()
        self._room = self.block_nbytes
        self._digests: list[bytes] = []
        self.nbytes = at

    def write(self, data: Any) -> int:
        """Write all of it."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            # Some streams write less than they are given.
            done = self._raw.write(view[at:])
            at += len(view) - at if done is None else done
        self.nbytes += len(view)
        at = 0
        while at < len(view):
            part = view[at : at + self._room]
            self._hash.update(part)
            self._room -= len(part)
            at += len(part)
            if not self._room:
                self._end_block()
        return len(view)

    def _end_block(self) -> None:
        self._digests.append(self._hash.digest())
        self._hash.reset()
        self._room = self.block_nbytes

    def flush(self) -> None:
        """Flush the stream below."""
        self._raw.flush()

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.nbytes

    def digests(self) -> bytes:
        """Finish the last block; return the digests of all blocks."""
        if self._room < self.block_nbytes:
            self._end_block()
        return b"".join(self._digests)


def write_stream(out: HashingStream, items: Iterable[Data], wrap: Wrap, *, framed: bool = True) -> list[WrittenItem]:
    """Write items one after the other, each taken from the iterable when it is written."""
    placed = []
    for item in items:
        offset = out.nbytes
        stream, descriptors = wrap(out)  # type: ignore[arg-type]  # it writes as a file does
        start = None
        if isinstance(item, torch.Tensor):
            head, tail = [each.bytes for each in _frame(item, offset)] if framed else (b"", b"")
            stream.write(head)
            start = out.nbytes
            for part in windows_of(item, WINDOW_NBYTES):
                stream.write(part)
            stream.write(tail)
        else:
            stream.write(item)
        if descriptors or stream is not cast("Any", out):
            stream.close()
        placed.append(WrittenItem(offset, out.nbytes - offset, None if descriptors else start, descriptors))
    return placed
