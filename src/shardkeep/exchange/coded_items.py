"""
Items of torch's layout that go through codecs, streamed from an opened checkpoint: how large they become is known only
when they are written.

Each item is a stream of its own (`CodecStream`), with its descriptor beside its place. Whoever reads an item decodes all
of it, so that tensors are cut into chunks of some megabytes. What was written is read back, decoded and compared.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import IO, NamedTuple, cast

import xxhash

from shardkeep.codec.chain import transformed_output
from shardkeep.codec.codec_stream import CodecStream
from shardkeep.errors import ChecksumMismatch
from shardkeep.exchange.streams import Gathering, Progress, StoredPart
from shardkeep.format.region import Box
from shardkeep.format.torch_archive import frame_tensor
from shardkeep.layout.torch_files import SUMS_SUFFIX, Sums, encode_sums
from shardkeep.options import Options
from shardkeep.run.item_files import Files, Item, read_raw
from shardkeep.run.read import Source
from shardkeep.run.torch_write import Stream
from shardkeep.run.workers import run_workers, window_for
from shardkeep.store.protocol import BlobWriter, Store, create_upto

_MOST_CHUNK_NBYTES, _LEAST_CHUNK_NBYTES = 64 << 20, 1 << 20
_ALIGNMENT = 64
_PIECE_NBYTES = 1 << 20
_ROOM_NBYTES = 64 << 10
"""Stores want to know beforehand how large a blob may become: so much for each item, besides twice its size."""

Data = bytes | StoredPart
"""An object as `torch.save` writes it, or a tensor."""


class CodedItem(NamedTuple):
    """Where an item lies in its file, and what it is before it is coded."""

    offset: int
    nbytes: int
    key: str
    digest: bytes


class CodedFile(NamedTuple):
    """A file that was written."""

    name: str
    items: list[CodedItem]
    sums: Sums

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.sums.nbytes


def chunk_nbytes(options: Options) -> int:
    """Return how large a chunk of a tensor may be: whoever reads it holds it, coded and as it was."""
    return min(_MOST_CHUNK_NBYTES, max(_LEAST_CHUNK_NBYTES, options.host_budget_bytes // 8))


def cut(box: Box, itemsize: int, most_nbytes: int) -> Iterator[Box]:
    """Cut a box into boxes of at most so many bytes, in row-major order; elements stay whole."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), None)
    if axis is None or box.volume * itemsize <= most_nbytes:
        yield box
        return
    size = box.sizes[axis]
    rows = max(1, most_nbytes // (box.volume // size * itemsize))
    for at in range(0, size, rows):
        offsets = (*box.offsets[:axis], box.offsets[axis] + at, *box.offsets[axis + 1 :])
        sizes = (*box.sizes[:axis], min(rows, size - at), *box.sizes[axis + 1 :])
        yield from cut(Box(offsets, sizes), itemsize, most_nbytes)


def write_coded(
    store: Store,
    files: Sequence[tuple[str, Sequence[tuple[str, Data]]]],
    source: Source,
    extension: CodecStream,
    options: Options,
    progress: Progress | None,
    made: list[str],
) -> list[CodedFile]:
    """
    Write files, and their digests beside them; if that fails, those that are made by then are for the caller to remove.

    Args:
        store: where they go.
        files: their names, and the keys and contents of their items.
        source: what tensors are read from.
        extension: what items go through.
        options: threads and memory.
        progress: is told of plain bytes.
        made: the names of files are added to it when there are such.

    """
    most = max(1, min(options.io_threads, len(files)))
    threads, window = window_for(most, options.host_budget_bytes // 2, coded=True)
    gathering = Gathering(source, threads=1, budget_nbytes=window)
    counted = _Counted(progress, sum(_nbytes(data) for _, items in files for _, data in items))
    written: dict[str, CodedFile] = {}

    def work(file: tuple[str, Sequence[tuple[str, Data]]], buffer: memoryview) -> bool:
        name, items = file
        room = sum(_ROOM_NBYTES + 2 * _nbytes(data) for _, data in items)
        writer = create_upto(store, name, room)
        try:
            stream = Stream(cast("IO[bytes]", _Output(writer)))
            placed = [_write(stream, key, data, gathering, extension, buffer, counted) for key, data in items]
            writer.finish(stream.nbytes)
        except BaseException:
            writer.abandon()
            raise
        made.append(name)
        sums, encoded = encode_sums(stream.nbytes, stream.block_nbytes, stream.digests())
        store.put(f"{name}{SUMS_SUFFIX}", encoded, replace=True)
        written[name] = CodedFile(name, placed, sums)
        return True

    run_workers(files, work, threads=threads, buffer_nbytes=window)
    return [written[name] for name, _ in files]


def check_coded(store: Store, files: Sequence[CodedFile], extension: CodecStream, options: Options) -> None:
    """
    Read all items back, decode them, and compare them with what they were.

    Raises:
        DamagedCheckpoint: they are not what was written, or do not decode to what was meant.

    """
    opened = Files(store, {file.name: file.sums for file in files})
    for file in files:
        for item in file.items:
            where = Item(opened.number(file.name), item.offset, item.nbytes, item.key)
            budget = options.host_budget_bytes // 2
            [raw] = read_raw(opened, [where], threads=options.io_threads, budget_nbytes=budget)
            found = xxhash.xxh3_128()
            with closing(extension.transform_from(io.BytesIO(raw))) as plain:
                while piece := plain.read(_PIECE_NBYTES):
                    found.update(piece)
            if found.digest() != item.digest:
                raise ChecksumMismatch(
                    f"{file.name}: {item.key!r} at offset {item.offset} does not decode to what was coded",
                    hint="nothing was committed; one of the codecs, or this machine's memory, is at fault",
                    key=item.key,
                    file=file.name,
                    offset=item.offset,
                )


class _Output:
    """A new blob as a stream that is written from its beginning on."""

    def __init__(self, writer: BlobWriter) -> None:
        self._writer = writer
        self._at = 0

    def write(self, data: memoryview) -> int:
        """Write all of it."""
        self._writer.write_at(self._at, data)
        self._at += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


class _Counted:
    """Tells how much is done, from any thread."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total)


def _nbytes(data: Data) -> int:
    return len(data) if isinstance(data, bytes) else data.nbytes


def _write(
    stream: Stream,
    key: str,
    data: Data,
    gathering: Gathering,
    extension: CodecStream,
    buffer: memoryview,
    counted: _Counted,
) -> CodedItem:
    offset, plain = stream.nbytes, xxhash.xxh3_128()
    out, _ = transformed_output([extension], cast("IO[bytes]", stream))
    with out:
        for piece in _pieces(data, gathering, buffer, counted):
            plain.update(piece)
            out.write(piece)
    return CodedItem(offset, stream.nbytes - offset, key, plain.digest())


def _pieces(data: Data, gathering: Gathering, buffer: memoryview, counted: _Counted) -> Iterator[bytes | memoryview]:
    """Give the bytes of an item; each piece is to be used before the next is asked for."""
    if isinstance(data, bytes):
        yield data
        counted.add(len(data))
        return
    frame = frame_tensor(data.dtype, data.box.sizes, at=0, alignment=_ALIGNMENT)
    yield frame.head
    step = len(buffer) // data.dtype.itemsize * data.dtype.itemsize
    for at in range(0, data.nbytes, step):
        piece = buffer[: min(step, data.nbytes - at)]
        gathering.fill([(data, at, at + len(piece), piece)])
        yield piece
        counted.add(len(piece))
    yield frame.tail
