"""
A directory of safetensors files, or one such file, opened: in the terms of the native index, like any checkpoint.

Which files count is what the index file of Hugging Face says; without one, `model.safetensors` alone where it is there,
as transformers has it (others beside it are adapters and alike), else all of them. Nobody took digests of them, so what
is read is checked against the headers alone: sizes, ranges, whether all shards are there. No torch is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import numpy as np

from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    CheckpointNotFound,
    DamagedCheckpoint,
    MalformedFile,
    WrongSize,
)
from shardkeep.format.checksum import digest, text_of
from shardkeep.format.columns import IntArray, matrix_of
from shardkeep.format.index import Chunks, Index, Tensors, decode_index, encode_index
from shardkeep.format.record import RECORD_NAME, FileEntry, IndexEntry, Record, Totals
from shardkeep.format.tree import Container, encode_tree
from shardkeep.layout import native
from shardkeep.layout.safetensors_files import SafetensorsFile, read_header
from shardkeep.layout.safetensors_folder import Folder, look
from shardkeep.layout.safetensors_names import INDEX_NAME, SAVE_ID_KEY, SINGLE_NAME, SUFFIX
from shardkeep.layout.safetensors_state import STATE_KEY, KeptState, decode_state, to_bytes
from shardkeep.layout.torch_files import METADATA_NAME
from shardkeep.layout.torch_metadata import Place
from shardkeep.options import Options
from shardkeep.run.item_files import Files
from shardkeep.run.read import Headers, Reads
from shardkeep.run.safetensors_catalog import Stored, catalog_of, read_headers, read_weight_map
from shardkeep.run.torch_open import TorchSource
from shardkeep.store.local import LocalStore
from shardkeep.store.objects import ObjectStore
from shardkeep.store.place import open_store
from shardkeep.store.protocol import BlobInfo, Store

FORMAT = "safetensors"


@dataclass(frozen=True, kw_only=True)
class SafetensorsSource(TorchSource):
    """Opened safetensors files. As of torch's layout, chunks lie at places in files that others wrote."""

    seen: Mapping[str, SafetensorsFile]
    """Headers as they were when it was opened, by the file's name."""

    def check(self, tensors: IntArray) -> None:
        """Insist that the chunks of these tensors, or of those they are tied to, tile them, and that files have them."""
        super().check(np.unique(np.asarray(self.index.tensors.alias, np.int64)[tensors]))

    def check_index(self, tensors: IntArray) -> None:
        """Insist that what is said of these tensors makes sense."""
        self.check(tensors)

    def undigested(self, file: int) -> Iterator[CheckpointError]:
        """Compare the header of a file with what it was, and with the size of the file."""
        return self._damage(self.record.files[file].name)

    def nbytes_verified(self) -> int:
        """Return how much of the files can be checked: their headers."""
        return sum(seen.data_start for seen in self.seen.values())

    def _damage(self, name: str) -> Iterator[CheckpointError]:
        try:
            now = read_header(name, self.store)
        except (DamagedCheckpoint, BlobNotFound) as exc:
            yield exc
            return
        if now.digest != self.seen[name].digest:
            yield MalformedFile(f"{name}: the header is not the one that was opened", file=name)


@dataclass(frozen=True)
class FoundSafetensors:
    """Safetensors files whose headers were read."""

    store: Reads
    record: Record
    headers: Mapping[str, SafetensorsFile]
    catalog: Mapping[str, Stored]
    kept: KeptState | None

    def open(self, options: Options, _: Headers | None = None) -> SafetensorsSource:  # noqa: ARG002 - as of other layouts
        """Make the index."""
        files = Files(self.store, {})
        for entry in self.record.files:  # in this order: they are numbered as in the record
            files.number(entry.name)
        index, places = _index(self.catalog, self.kept, [entry.name for entry in self.record.files])
        return SafetensorsSource(
            self.store, self.record, index, files.headers, files=files, places=places, objects={}, seen=self.headers
        )


def find_safetensors(store: Store) -> FoundSafetensors | None:
    """
    Find safetensors files that are a checkpoint by themselves; None where there are none.

    Data files of a native save that was never committed are none.

    Raises:
        DamagedCheckpoint: the files are not one whole checkpoint.

    """
    folder = _folder(store)
    if folder is None:
        return None
    weight_map = read_weight_map(folder.index, folder.opens) if folder.index is not None else None
    homes = None if weight_map is None else {key: _path(folder, name) for key, name in weight_map.items()}
    paths = folder.files.values() if homes is None else homes.values()
    headers = read_headers(paths, threads=Options().io_threads, opens=folder.opens)
    catalog = catalog_of(headers, homes=homes)
    _check_homes(folder, homes, headers)
    kept = _kept_state(headers)
    record = _record(folder, headers, catalog, kept)
    return FoundSafetensors(folder.opens, record, _by_path(headers), catalog, kept)


def open_safetensors(store: Store, record: Record, options: Options) -> SafetensorsSource:
    """
    Open the files that a record, which may be from another rank, is of.

    Raises:
        CheckpointError: they are others than the record is of.

    """
    found = find_safetensors(store)
    if found is None or found.record.index.checksum != record.index.checksum:
        raise CheckpointError(
            f"{store.url}: the safetensors files were replaced by others meanwhile", hint="open or load it again"
        )
    return found.open(options)


def is_single_file(store: object) -> bool:
    """Say whether a place is a file, and so no directory that a checkpoint could be in."""
    return isinstance(store, LocalStore) and os.path.isfile(store.url)


def _single_blob(store: Store) -> tuple[Store, str] | None:
    """Return the store that a place is a blob of, and its name, if it is called like a safetensors file."""
    above, _, name = store.url.rpartition("/")
    if not name.endswith(SUFFIX) or "://" not in above:
        return None
    if isinstance(store, ObjectStore):  # with the options that it was opened with
        prefix = store.prefix.removesuffix(f"{name}/")
        found: Store = ObjectStore(store.bucket, prefix, above)
    else:
        found = open_store(above, direct=False)
    try:
        found.open(name).close()
    except BlobNotFound:
        return None
    return found, name


def _folder(store: Store) -> Folder | None:
    """Return which files count, and what opens them by name."""
    if isinstance(store, LocalStore):
        if is_single_file(store):
            where, name = os.path.split(os.path.abspath(store.url))
            if name in (RECORD_NAME, METADATA_NAME):
                raise CheckpointNotFound(
                    f"{store.url} is a file of a checkpoint, and not the checkpoint",
                    hint=f"give its directory: {where}",
                )
            there = LocalStore(where).of_foreign_files()
            return _found(Folder(where, {name: name}, None, there))
        try:
            local = look(store)
        except BlobNotFound:
            return None
        # By their names in the directory, which may still be temporary ones.
        files = {name: os.path.basename(path) for name, path in local.files.items()}
        index = None if local.index is None else os.path.basename(local.index)
        return _found(Folder(local.path, files, index, store.of_foreign_files()))
    seen = _found(look(store))
    if seen is None and (single := _single_blob(store)):
        above, name = single
        return Folder(above.url, {name: name}, None, above)
    return seen


def _found(folder: Folder) -> Folder | None:
    files = {name: path for name, path in folder.files.items() if native.save_id_of(name) is None}
    if not files and folder.index is None:
        return None
    if folder.index is None and SINGLE_NAME in files:
        files = {SINGLE_NAME: files[SINGLE_NAME]}
    return replace(folder, files=files)


def _path(folder: Folder, name: str) -> str:
    """Return the path of a file that the index file names; one that is not there is an error: what is opened is whole."""
    if name not in folder.files:
        raise WrongSize(
            f"{os.path.join(folder.path, name)}: the file is missing, and {folder.index} names it",
            hint="was the model downloaded as a whole?",
            file=name,
        )
    return folder.files[name]


def _check_homes(folder: Folder, homes: Mapping[str, str] | None, headers: list[SafetensorsFile]) -> None:
    """Insist that every tensor that the index file names is in the file it names."""
    by_path = _by_path(headers)
    for key, path in (homes or {}).items():
        if key not in by_path[path].tensors:
            raise MalformedFile(
                f"{folder.path}: {folder.index} says that {key!r} is in {path}, which does not have it",
                hint="the index file is of other files: were both downloaded as a whole?",
                file=path,
                key=key,
            )


def _by_path(headers: list[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    return {file.path: file for file in headers}


def _kept_state(headers: list[SafetensorsFile]) -> KeptState | None:
    said = [(file, file.metadata[STATE_KEY]) for file in headers if STATE_KEY in file.metadata]
    if len(said) > 1:
        raise MalformedFile(f"{said[0][0].path} and {said[1][0].path} both say what the state is besides its tensors")
    return decode_state(said[0][1], where=said[0][0].path) if said else None


def _record(
    folder: Folder, headers: list[SafetensorsFile], catalog: Mapping[str, Stored], kept: KeptState | None
) -> Record:
    together = digest(b"".join(file.path.encode() + b"\0" + file.digest for file in headers))
    ids = {file.metadata.get(SAVE_ID_KEY) for file in headers}
    save_id = ids.pop() if len(ids) == 1 else None
    name = folder.index or (headers[0].path if headers else INDEX_NAME)
    nbytes = 0  # without an index file, headers say what there is
    if folder.index is not None:
        with closing(folder.opens.open(name)) as reader:
            nbytes = reader.nbytes
    return Record(
        format=FORMAT,
        save_id=save_id or text_of(together)[-20:],
        step=kept.step if kept else None,
        saved_at=_when(folder, [file.path for file in headers]),
        writer="shardkeep" if kept else "unknown",
        world_size=1,
        meta=kept.meta if kept else {},
        totals=Totals(
            tensors=len(catalog) + (len(kept.ties) if kept else 0),
            chunks=sum(len(stored.chunks) for stored in catalog.values() if all(stored.shape)),
            values=len(kept.values) if kept else 0,
            tensor_bytes=sum(stored.nbytes for stored in catalog.values()),
        ),
        index=IndexEntry(name=name, nbytes=nbytes, checksum=text_of(together)),
        files=[
            FileEntry(name=file.path, nbytes=file.nbytes, header_nbytes=0, block_nbytes=0, checksum="")
            for file in headers
        ],
    )


def _when(folder: Folder, names: list[str]) -> str:
    """Return when the last of the files was written."""
    if isinstance(folder.opens, LocalStore):
        times = [os.stat(os.path.join(folder.path, name)).st_mtime for name in names]
    else:
        infos: Iterable[BlobInfo] = getattr(folder.opens, "list", tuple)()
        times = [info.modified_s for info in infos if info.name in set(names)]
    return datetime.fromtimestamp(max(times, default=0.0), timezone.utc).isoformat(timespec="milliseconds")


def _index(catalog: Mapping[str, Stored], kept: KeptState | None, files: list[str]) -> tuple[Index, list[Place]]:
    ties = dict(kept.ties) if kept else {}
    arrays = set(kept.numpy) if kept else set()
    where = files[0] if files else FORMAT
    if lost := sorted(owner for key, owner in ties.items() if owner not in catalog or key in catalog):
        raise MalformedFile(f"{where}: tensors are tied to {lost[0]!r}, which is not there", file=where)
    try:
        keys = sorted([*catalog, *ties], key=str.encode)
    except UnicodeEncodeError as exc:
        raise MalformedFile(f"{where}: a tensor's name is no text: {exc}", file=where) from exc
    row_of = {key: row for row, key in enumerate(keys)}
    stored = [catalog[ties.get(key, key)] for key in keys]
    axes = max((len(each.shape) for each in stored), default=0)
    number = {name: at for at, name in enumerate(files)}
    chunks = [[] if key in ties or 0 in each.shape else each.chunks for key, each in zip(keys, stored, strict=True)]
    flat = [(each.dtype.itemsize, chunk) for each, some in zip(stored, chunks, strict=True) for chunk in some]
    encoded = encode_index(
        keys=keys,
        tensors=Tensors(
            dtype=np.array([each.dtype.code for each in stored], np.uint8),
            ndim=np.array([len(each.shape) for each in stored], np.uint8),
            shape=matrix_of([each.shape for each in stored], axes, 1),
            origin=np.array([key in arrays for key in keys], np.uint8),
            alias=np.array([row_of[ties.get(key, key)] for key in keys], np.int64),
        ),
        chunk_ends=np.cumsum([len(some) for some in chunks], dtype=np.int64),
        chunks=Chunks(
            offsets=matrix_of([chunk.box.offsets for _, chunk in flat], axes, 0),
            sizes=matrix_of([chunk.box.sizes for _, chunk in flat], axes, 1),
            file=np.array([number[chunk.path] for _, chunk in flat], np.int64),
            start=np.arange(len(flat)),
        ),
        values=_values(kept, where),
        tree=to_bytes(kept.tree, where=where) if kept else _flat_tree(catalog),
    )
    places = [Place(chunk.path, chunk.start, chunk.box.volume * size, chunk.start, ()) for size, chunk in flat]
    return decode_index(encoded, where=where), places


def _values(kept: KeptState | None, where: str) -> list[tuple[str, bytes]]:
    if kept is None:
        return []
    return sorted(
        ((key, to_bytes(text, where=where)) for key, text in kept.values.items()), key=lambda entry: entry[0].encode()
    )


def _flat_tree(catalog: Mapping[str, Stored]) -> bytes:
    """Return the skeleton of a dict of all tensors, in the order of the files: names are as they are, dots and all."""
    return encode_tree(Container("dict", tuple((key, None) for key in catalog)))
