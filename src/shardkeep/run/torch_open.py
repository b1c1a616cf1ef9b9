"""
A checkpoint of torch's layout, opened: what is in it, in the terms of the native index, so that everything that looks at
a checkpoint or loads from one does not ask who wrote it.

Tensors and names come from `.metadata`, or from the columns beside it. Objects are read when they are asked for; those
that are plain data become plain values, others are kept as the bytes they are, which only `allow_pickle` opens. No torch
is needed for any of this.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from shardkeep.codec.chain import transformed_input
from shardkeep.codec.codec_stream import CodecStream
from shardkeep.codec.codecs import WRAPPED
from shardkeep.codec.registry import ExtensionRegistry
from shardkeep.errors import CheckpointError, MalformedFile, UnsupportedLeaf
from shardkeep.format.columns import Boxes, IntArray, concat_ranges
from shardkeep.format.index import Index, Strings, decode_index, encode_index
from shardkeep.format.record import IndexEntry, Record
from shardkeep.format.sealed import unsealed
from shardkeep.format.torch_archive import read_object
from shardkeep.format.values import encode_value
from shardkeep.layout.torch_files import MAX_METADATA_NBYTES, METADATA_NAME, Sums, writer_rank
from shardkeep.layout.torch_metadata import Place
from shardkeep.options import Options
from shardkeep.plan.loads import chunk_rows
from shardkeep.plan.tiling import tiled
from shardkeep.run.item_files import Files, Item, bad_archives, check_inside, keys_in
from shardkeep.run.key_choice import keys_for
from shardkeep.run.read import Headers, KeyAt, Reads, Source
from shardkeep.run.torch_contents import Contents, read_contents
from shardkeep.run.torch_values import StoredObjects
from shardkeep.store.local import LocalStore
from shardkeep.store.protocol import BlobInfo

if TYPE_CHECKING:
    import torch

FORMAT = "torch.distributed.checkpoint"


@dataclass(frozen=True, kw_only=True)
class TorchSource(Source):
    """An opened checkpoint of torch's layout. Of the index, a chunk's start is the row of its place."""

    files: Files
    places: Sequence[Place]
    objects: Mapping[str, Place]

    @property
    def is_secret(self) -> bool:
        """Whether anything in it is encrypted."""
        return any(map(_is_secret, self._descriptors))

    def check_keys(self) -> None:
        """
        Insist that what is encrypted can be read with the keys that there are; reads nothing.

        Raises:
            KeyMissing: there is no key.
            WrongKey: it is encrypted with another one.

        """
        if isinstance(self.files, CodedFiles):
            for descriptors in filter(_is_secret, self._descriptors):
                self.files.undo(None, descriptors, io.BytesIO())

    def check(self, tensors: IntArray) -> None:
        """Insist that the chunks of these tensors tile them, and that their files are there."""
        first, counts = chunk_rows(self.index, tensors)
        chunks = self.index.chunks.take(concat_ranges(first, counts))
        boxes = Boxes(np.asarray(chunks.offsets, np.int64), np.asarray(chunks.sizes, np.int64))
        owner = np.repeat(np.arange(len(tensors)), counts)
        good = tiled(np.asarray(self.index.tensors.shape[tensors], np.int64), owner, boxes)
        if not good.all():
            key = self.index.keys.raw(int(tensors[np.flatnonzero(~good)[0]])).decode()
            raise MalformedFile(f"the stored chunks of {key!r} overlap or leave a hole", key=key)
        places = [self.places[number] for number in chunks.start.tolist()]
        check_inside(self.files, (self.item(row, p) for row, p in zip(tensors[owner].tolist(), places, strict=True)))

    def places_of(self, rows: slice) -> list[Place]:
        """Return where these chunks lie."""
        return [self.places[number] for number in self.index.chunks.start[rows].tolist()]

    def item(self, row: int, place: Place) -> Item:
        """Return a chunk of a tensor as an item to read."""
        key = self.index.keys.raw(row).decode()
        return Item(self.files.number(place.file), place.offset, place.nbytes, key)

    def items(self) -> list[Item]:
        """Return all chunks and objects."""
        tensors = [(row, self.index.chunk_rows(row)) for row in range(len(self.index.keys))]
        chunks = [self.item(row, place) for row, rows in tensors for place in self.places_of(rows)]
        objects = [
            Item(self.files.number(place.file), place.offset, place.nbytes, key) for key, place in self.objects.items()
        ]
        return [*chunks, *objects]

    def check_index(self, tensors: IntArray) -> None:
        """Check these tensors, and `.metadata` whole, of which columns may have been read instead."""
        self.check(tensors)
        unsealed(self.store.get(METADATA_NAME, limit=MAX_METADATA_NBYTES), METADATA_NAME)

    def to_verify(self) -> tuple[Headers, KeyAt]:
        """Return the digests that were read when the files were looked at, and what names tensors and objects."""
        return self.files.headers, lambda file, at, end: keys_in(self.items(), file, at, end)

    def undigested(self, file: int) -> Iterator[CheckpointError] | None:
        """Check what lies in a file that nobody took digests of; what was transformed cannot be."""
        if self.record.files[file].block_nbytes:
            return None
        return bad_archives(self.files, self._plain_items.get(file, []))

    def place_of(self, chunk: int) -> tuple[str, int]:
        """Return the file of a chunk, and where in it the chunk begins."""
        [place] = self.places_of(slice(chunk, chunk + 1))
        return place.file, place.offset

    def fill(
        self,
        tensor: IntArray,
        boxes: Boxes,
        into: Sequence[torch.Tensor],
        *,
        threads: int,
        budget_nbytes: int,
        first_file: float = 0.0,  # noqa: ARG002 - a file is read by as many threads as there are
    ) -> int:
        """Fill tensors, and return the bytes read; see `Source.fill`."""
        from shardkeep.run.torch_boxes import fill_boxes  # noqa: PLC0415 - only reading a tensor needs torch

        return fill_boxes(self, tensor, boxes, into, threads=threads, budget_nbytes=budget_nbytes)

    @cached_property
    def _descriptors(self) -> set[tuple[str, ...]]:
        """What items went through, each only once."""
        return {place.descriptors for place in (*self.places, *self.objects.values())}

    @cached_property
    def _plain_items(self) -> dict[int, list[Item]]:
        """All items that were not transformed, by file."""
        plain = {(p.file, p.offset) for p in (*self.places, *self.objects.values()) if not p.descriptors}
        found: dict[int, list[Item]] = {}
        for item in self.items():
            if (self.files.entries[item.file].name, item.offset) in plain:
                found.setdefault(item.file, []).append(item)
        return found


class CodedFiles(Files):
    """Data files, and what undoes the extensions that items in them went through."""

    def __init__(self, store: Reads, sums: Mapping[str, Sums], options: Options) -> None:
        super().__init__(store, sums)
        self._registry = ExtensionRegistry()
        self._registry.register(CodecStream.reading_with(keys_for(options)))

    def undo(self, _: Any, descriptors: Sequence[str], stream: IO[bytes]) -> IO[bytes]:
        """Return the stream of an item as it was before its extensions."""
        return transformed_input(self._registry, descriptors, stream)

    def value(self, key: str, place: Place, raw: bytes) -> bytes:
        """Make a value of the stored bytes of an object."""
        if place.descriptors:
            raw = self.undo(None, place.descriptors, io.BytesIO(raw)).read(-1)
        try:
            return encode_value(read_object(raw, where=f"{place.file} ({key!r})"), key=key)
        except (CheckpointError, UnsupportedLeaf):
            return encode_value(Archive(raw), key=key, allow_pickle=True)


def _is_secret(descriptors: Sequence[str]) -> bool:
    """Say whether one of these extensions encrypts; of one that is not known here nobody can tell."""
    for descriptor in descriptors:
        name, _, version = descriptor.partition("/")
        if name != CodecStream.registry_name():
            continue
        try:
            recorded = json.loads(version.partition(":")[2])
        except (ValueError, RecursionError):
            continue  # which is said where it is read
        if isinstance(recorded, list) and any(isinstance(each, dict) and WRAPPED in each for each in recorded):
            return True
    return False


def find_torch(store: Reads) -> FoundTorch:
    """Find a checkpoint of torch's layout; `BlobNotFound` where there is none."""
    store = _as_foreign(store)
    contents = read_contents(store)
    writers = [rank for rank in map(writer_rank, contents.files) if rank is not None]
    record = Record(
        format=FORMAT,
        save_id=contents.save_id or contents.checksum[-20:],
        saved_at=_when(store),
        writer="shardkeep" if contents.sums else "torch",
        world_size=max(writers, default=0) + 1,
        totals=contents.totals,
        index=IndexEntry(name=METADATA_NAME, nbytes=contents.nbytes, checksum=contents.checksum),
        files=[],
    )
    return FoundTorch(store, record, contents)


def _as_foreign(store: Reads) -> Reads:
    """Let files be called, and be links to, what their writer liked."""
    return store.of_foreign_files() if isinstance(store, LocalStore) else store


def _when(store: Reads) -> str:
    infos: Iterable[BlobInfo] = getattr(store, "list", tuple)()
    seconds = next((info.modified_s for info in infos if info.name == METADATA_NAME), 0.0)
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def open_torch(store: Reads, record: Record, options: Options) -> TorchSource:
    """Open the checkpoint that a record, which may be from another rank, is of."""
    store = _as_foreign(store)
    return FoundTorch(store, record, read_contents(store)).open(options)


@dataclass(frozen=True)
class FoundTorch:
    """A checkpoint of torch's layout whose metadata were read."""

    store: Reads
    record: Record
    contents: Contents

    def open(self, options: Options, _: Headers | None = None) -> TorchSource:
        """
        Look at its files.

        Raises:
            CheckpointError: it is another checkpoint than the record is of.

        """
        contents = self.contents
        if contents.checksum != self.record.index.checksum:
            raise CheckpointError(
                f"{METADATA_NAME}: the checkpoint was replaced by another save meanwhile", hint="open or load it again"
            )
        files = CodedFiles(self.store, contents.sums, options)
        for name in contents.files:  # in this order: they are numbered as in the contents
            files.number(name)
        said = {name: getattr(self.record, name) for name in self.record.__struct_fields__ if name != "files"}
        whole = Record(**said, files=files.entries)
        index = _index(contents, StoredObjects(contents.objects, files, options, files.value))
        return TorchSource(
            self.store, whole, index, files.headers, files=files, places=contents.places, objects=contents.objects
        )


class Archive:
    """An object as `torch.save` wrote it; unpickled, it is that object."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return load_archive, (self._data,)


def load_archive(data: bytes) -> Any:
    """Rebuild what `torch.save` wrote; reached only where the caller allows pickles."""
    import torch  # noqa: PLC0415 - only such objects need it

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _index(contents: Contents, values: Strings) -> Index:
    # Written and read again, which checks that all fits.
    encoded = encode_index(
        keys=contents.keys,
        tensors=contents.tensors,
        chunk_ends=contents.chunk_ends,
        chunks=contents.chunks,
        values=[(key, b"") for key in sorted(contents.objects, key=str.encode)],
        tree=b"",
    )
    return _TorchIndex(decode_index(encoded, where=METADATA_NAME), values, contents)


class _TorchIndex(Index):
    """An index whose values and tree are made when they are asked for."""

    def __init__(self, index: Index, values: Strings, contents: Contents) -> None:
        made = {field.name: getattr(index, field.name) for field in fields(Index) if field.name != "tree"}
        super().__init__(**{**made, "value_data": values}, tree=b"")
        vars(self).pop("tree")  # which the property below then makes
        vars(self)["contents"] = contents

    @cached_property
    def tree(self) -> bytes:
        """The skeleton of the nested state."""
        return vars(self)["contents"].tree  # type: ignore[no-any-return]  # put there above
