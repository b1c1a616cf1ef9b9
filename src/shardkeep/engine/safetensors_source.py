"""
Safetensors files, of any program, as a `Source`, and which tensors a set of them holds. Nothing here imports torch.

Files of different saves, shards that overlap or leave a hole, and shards of one tensor with different dtypes are errors
that name the files; torch reads such a set as if it were complete.

Hugging Face's index file says which files count. Without one, `model.safetensors` alone if it exists, as in
transformers (other files beside it are adapters and the like), else all of them. There are no digests, so what is read
is checked only against the headers: sizes, ranges, and whether all shards are there.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from operator import add
from typing import ClassVar

import msgspec
import numpy as np

from shardkeep import errors
from shardkeep.display import format_count, some_of
from shardkeep.engine.reader import FoundCheckpoint, Source, saved_at
from shardkeep.format.boxes import Box, Boxes, explain_tiling, matrix_of, tiled, whole
from shardkeep.format.data_file import checksum_text, digest
from shardkeep.format.dtypes import DType, Ints
from shardkeep.format.index import Index, build_index, strings_of
from shardkeep.format.record import RECORD_NAME, Blob, FileEntry, Record, Totals
from shardkeep.format.values import Container, encode_tree
from shardkeep.layouts import native
from shardkeep.layouts import safetensors as layout
from shardkeep.layouts.safetensors_publish import ModelDirectory, list_model
from shardkeep.layouts.torch import METADATA_NAME, is_data
from shardkeep.options import Options
from shardkeep.storage.base import ReadableStore, Store, exists, is_single_file, local_path, parent_of
from shardkeep.storage.local import LocalStore
from shardkeep.storage.resolve import open_store

logger = logging.getLogger("shardkeep")

_INCOMPLETE = "was the model downloaded as a whole?"
_MOST_INDEX_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CatalogChunk:
    path: str
    start: int
    """Where its bytes begin in the file."""
    box: Box


@dataclass(frozen=True)
class CatalogEntry:
    """A tensor and its chunks, which tile it."""

    dtype: DType
    shape: Ints
    chunks: list[CatalogChunk]


TensorCatalog = dict[str, CatalogEntry]


def read_catalog(folder: ModelDirectory, *, threads: int) -> TensorCatalog:
    if not folder.files and folder.index is None:
        raise errors.MalformedFile.of(folder.path, "there are no safetensors files")
    if folder.index is None:
        return catalog_of(read_headers(folder.files.values(), threads=threads, opens=folder.opens))
    weight_map = read_weight_map(folder.index, folder.opens)
    homes = {name: None for name in weight_map.values() if name in folder.files}
    if weight_map and not homes:
        why = f"none of the files that it names is there: {some_of(sorted(set(weight_map.values())))}"
        raise errors.MalformedFile.of(folder.index, why, hint=_INCOMPLETE)
    if others := sorted(folder.files.keys() - homes.keys()):
        logger.warning("%s: the index file does not name %s, so they are not read", folder.path, some_of(others))
    files = read_headers([folder.files[name] for name in homes], threads=threads, opens=folder.opens)
    held = {name: file.tensors for name, file in zip(homes, files, strict=True)}
    # Of a partly downloaded model, the rest can be loaded.
    gone = {key: name for key, name in weight_map.items() if key not in held.get(name, ())}
    if gone:
        logger.warning(
            "%s: names %s that cannot be loaded, because files are missing or do not have them: %s",
            folder.index,
            format_count(len(gone), "tensor"),
            some_of([f"{key!r} in {name}" for key, name in gone.items()]),
        )
    return catalog_of(files, homes={key: folder.files[name] for key, name in weight_map.items() if key not in gone})


class _ModelIndex(msgspec.Struct):
    weight_map: dict[str, str]


class _SavedOffsets(msgspec.Struct):
    saved_offsets: list[int]


def read_weight_map(path: str, gets: ReadableStore) -> dict[str, str]:
    raw = gets.get(path, limit=_MOST_INDEX_NBYTES)
    try:
        return msgspec.json.decode(raw, type=_ModelIndex).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        why = f"no JSON, or no weight_map that gives each tensor a file: {error}"
        raise errors.MalformedFile.of(path, why) from error


def not_in_file(file: str, index: str, key: str) -> errors.MalformedFile:
    """Return the error of a file that lacks a tensor which it has according to the model's index."""
    hint = "the index file is of other files: were both downloaded as a whole?"
    return errors.MalformedFile.of(file, f"{index} says that it holds {key!r}, and it does not", hint=hint, key=key)


def read_headers(paths: Iterable[str], *, threads: int, opens: ReadableStore) -> list[layout.SafetensorsFile]:
    """Read the headers of files, several at a time; in the order of `paths`."""
    wanted = list(dict.fromkeys(paths))
    with ThreadPoolExecutor(max(1, min(threads, len(wanted))), thread_name_prefix="shardkeep-headers") as pool:
        return list(pool.map(lambda path: layout.read_header(path, opens), wanted))


def catalog_of(files: Sequence[layout.SafetensorsFile], *, homes: Mapping[str, str] | None = None) -> TensorCatalog:
    """Return the tensors of files. `homes` has the file of each tensor that several files hold completely."""
    _check_one_save(files)
    found: dict[str, tuple[DType, list[CatalogChunk]]] = {}
    for file in files:
        offsets = saved_offsets(file)
        for key, part in file.tensors.items():
            if homes and offsets is None and homes.get(key, file.path) != file.path:
                continue
            box = whole(part.shape) if offsets is None else Box(_offset_of(file, key, part, offsets), part.shape)
            dtype, chunks = found.setdefault(key, (part.dtype, []))
            if dtype is not part.dtype or (len(chunks) and len(chunks[0].box.sizes) != len(part.shape)):
                there = f"{dtype.name} of {len(chunks[0].box.sizes)} axes in {chunks[0].path}"
                why = f"{key!r} is {part.dtype.name} of {len(part.shape)} axes here, and {there}"
                raise errors.MalformedFile.of(file.path, why, key=key)
            chunks.append(CatalogChunk(file.path, part.start, box))
    catalog = {}
    for key, (dtype, chunks) in found.items():
        ends = [map(add, chunk.box.offsets, chunk.box.sizes) for chunk in chunks]
        shape = tuple(map(max, zip(*ends, strict=True)))
        # Ranks without a part of a tensor may have stored an empty chunk.
        filled = [chunk for chunk in chunks if all(chunk.box.sizes)]
        catalog[key] = CatalogEntry(dtype, shape, filled or [replace(chunks[0], box=whole(shape))])
    _check_tiled(catalog)
    return catalog


def saved_offsets(file: layout.SafetensorsFile) -> dict[str, _SavedOffsets] | None:
    """Return the offsets of a file's chunks in their tensors; None for a file with whole tensors."""
    text = file.metadata.get(layout.CUSTOM_METADATA_KEY)
    try:
        return msgspec.json.decode(text, type=dict[str, _SavedOffsets]) if text else None
    except (msgspec.MsgspecError, RecursionError) as error:
        why = f"{layout.CUSTOM_METADATA_KEY} is no JSON with saved_offsets: {error}"
        raise errors.MalformedFile.of(file.path, why) from error


def _offset_of(
    file: layout.SafetensorsFile, key: str, part: layout.HeaderTensor, said: Mapping[str, _SavedOffsets]
) -> Ints:
    offsets = said[key].saved_offsets if key in said else None
    if offsets is None or len(offsets) != len(part.shape) or not all(0 <= n < 1 << 62 for n in offsets):
        why = f"tensor {key!r} of shape {list(part.shape)} has saved_offsets {offsets}"
        raise errors.MalformedFile.of(file.path, why, key=key)
    return tuple(offsets)


def _check_one_save(files: Iterable[layout.SafetensorsFile]) -> None:
    """Check that the files which were written as a checkpoint are of the same save and complete."""
    saves: dict[str | None, list[layout.SafetensorsFile]] = {}
    for file in files:
        if layout.CUSTOM_METADATA_KEY in file.metadata:
            saves.setdefault(file.metadata.get(layout.SAVE_ID_KEY), []).append(file)
    if len(saves) > 1:
        sets = " and ".join(
            f"{some_of([file.name for file in each])} of {'an unnamed save' if save is None else f'save {save}'}"
            for save, each in saves.items()
        )
        first, why = next(iter(saves.values()))[0], f"files of different saves in one directory: {sets}"
        raise errors.MalformedFile.of(first.path, why, hint="delete those of the older save")
    for save, each in saves.items():
        expected = each[0].metadata.get(layout.FILE_COUNT_KEY)
        if save is not None and expected is not None and expected != str(len(each)):
            why = f"of {expected} files of save {save}, {len(each)} are here: {some_of([file.name for file in each])}"
            hint = "files are missing: was the checkpoint copied as a whole?"
            raise errors.MalformedFile.of(each[0].path, why, hint=hint)


def _check_tiled(catalog: TensorCatalog) -> None:
    cut = [
        key
        for key, each in catalog.items()
        if all(each.shape) and (len(each.chunks) > 1 or any(each.chunks[0].box.offsets))
    ]
    if not cut:
        return
    boxes = Boxes.of([chunk.box for key in cut for chunk in catalog[key].chunks])
    owner = np.repeat(np.arange(len(cut)), [len(catalog[key].chunks) for key in cut])
    right = tiled(matrix_of([catalog[key].shape for key in cut], boxes.axes, 1), owner, boxes)
    if np.all(right):
        return
    key = cut[int(np.argmin(right))]
    stored = catalog[key]
    names = list(dict.fromkeys(chunk.path for chunk in stored.chunks))
    raise errors.MalformedFile(
        f"{key!r} of shape {list(stored.shape)} is not whole: "
        f"{explain_tiling(stored.shape, [chunk.box for chunk in stored.chunks])}; it is in {some_of(names)}",
        hint="are there files of an older save in the directory, or are some missing?",
        key=key,
        file=names[0],
    )


FORMAT = "safetensors"


@dataclass(frozen=True, kw_only=True)
class SafetensorsSource(Source):
    seen: Mapping[str, layout.SafetensorsFile]
    """Headers as they were when the files were opened, by the file's name."""

    aligned: ClassVar[bool] = False

    def damage_by_form(self, file: int, uncompared: set[int]) -> Iterator[errors.CheckpointError] | None:
        """Compare the header of a file with what it was, and with the size of the file. The data have no checksums."""
        uncompared.add(file)
        name = self.record.files[file].name
        try:
            now = layout.read_header(name, self.store)
        except (errors.DamagedCheckpoint, errors.BlobNotFound) as exc:
            return iter([exc])
        if now.digest == self.seen[name].digest:
            return None
        return iter([errors.MalformedFile.of(name, "the header is not the one that was opened")])


def find_safetensors(store: Store) -> FoundCheckpoint | None:
    """Find safetensors files that are a checkpoint by themselves; those of an uncommitted native save are not."""
    folder = _folder(store)
    if folder is None:
        return None
    weight_map = {} if folder.index is None else read_weight_map(folder.index, folder.opens)
    if missing := sorted(set(weight_map.values()) - folder.files.keys()):
        why = f"the file is missing from {folder.path}, and {folder.index} names it"
        raise errors.WrongSize.of(missing[0], why, hint=_INCOMPLETE)
    homes = {key: folder.files[name] for key, name in weight_map.items()}
    paths = folder.files.values() if folder.index is None else homes.values()
    headers = read_headers(paths, threads=Options().io_threads, opens=folder.opens)
    catalog = catalog_of(headers, homes=homes)
    by_path = {file.path: file for file in headers}
    for key, path in homes.items():
        if key not in by_path[path].tensors:
            raise not_in_file(path, os.path.join(folder.path, folder.index or ""), key)
    said = [(file, file.metadata[layout.STATE_KEY]) for file in headers if layout.STATE_KEY in file.metadata]
    if len(said) > 1:
        why = f"it and {said[1][0].path} both say what the state is besides its tensors"
        raise errors.MalformedFile.of(said[0][0].path, why)
    kept = layout.decode_header_state(said[0][1], where=said[0][0].path) if said else None
    return _checkpoint(folder, headers, catalog, kept)


def open_shards(folder: ModelDirectory, headers: list[layout.SafetensorsFile]) -> Source:
    """Open files whose headers were read as one checkpoint: a flat dict of tensors."""
    return _checkpoint(folder, headers, catalog_of(headers), None).open(Options())


def single_file(store: Store, suffixes: tuple[str, ...]) -> tuple[Store, str] | None:
    """Return the file that a place is: its directory, and its name there. In a store its name must end with a suffix."""
    if local_path(store) is not None:
        if not is_single_file(store):
            return None
        where, name = os.path.split(os.path.abspath(store.url))
        if name in (RECORD_NAME, METADATA_NAME) or native.save_id_of(name) is not None or is_data(name):
            raise errors.CheckpointNotFound(
                f"{store.url} is a file of a checkpoint, and not the checkpoint",
                hint=f"give its directory: {where}",
            )
        return LocalStore(where, foreign=True), name
    above, _, name = store.url.rpartition("/")
    if not name.endswith(suffixes) or "://" not in above:
        return None
    # The store's own parent has the options that it was opened with.
    parent = parent_of(store)
    place = open_store(above, direct=False) if parent is None else parent[0]
    return (place, name) if exists(place, name) else None


def _folder(store: Store) -> ModelDirectory | None:
    """Return the files of a place, and the store that opens them by name."""
    if (single := single_file(store, (layout.SUFFIX,))) is not None:
        place, name = single
        folder = ModelDirectory(place.url, {name: name}, None, place)
    else:
        try:
            folder = list_model(store)
        except errors.BlobNotFound:
            return None
    files = {name: path for name, path in folder.files.items() if native.save_id_of(name) is None}
    if not files and folder.index is None:
        return None
    if folder.index is None and layout.SINGLE_NAME in files:
        files = {layout.SINGLE_NAME: files[layout.SINGLE_NAME]}
    return replace(folder, files=files)


def _checkpoint(
    folder: ModelDirectory,
    headers: list[layout.SafetensorsFile],
    catalog: TensorCatalog,
    kept: layout.HeaderState | None,
) -> FoundCheckpoint:
    together = digest(b"".join(file.path.encode() + b"\0" + file.digest for file in headers))
    ids = {file.metadata.get(layout.SAVE_ID_KEY) for file in headers}
    save_id = ids.pop() if len(ids) == 1 else None
    name = folder.index or (headers[0].path if headers else layout.INDEX_NAME)
    nbytes = 0  # without an index file
    if folder.index is not None:
        with closing(folder.opens.open(name)) as reader:
            nbytes = reader.nbytes
    ties = kept.ties if kept else _dropped_names(headers, catalog)
    record = Record(
        format=FORMAT,
        save_id=save_id or checksum_text(together)[-20:],
        step=kept.step if kept else None,
        saved_at=saved_at(folder.opens, {file.path for file in headers}),
        writer="shardkeep" if kept else "unknown",
        world_size=1,
        meta=kept.meta if kept else {},
        totals=Totals(
            tensors=len(catalog) + len(ties),
            chunks=sum(len(stored.chunks) for stored in catalog.values() if all(stored.shape)),
            values=len(kept.values) if kept else 0,
            tensor_bytes=sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in catalog.values()),
        ),
        index=Blob(name=name, nbytes=nbytes, checksum=checksum_text(together)),
        files=[
            FileEntry(name=file.path, nbytes=file.nbytes, header_nbytes=0, block_nbytes=0, checksum="")
            for file in headers
        ],
    )

    def open_files(_: Options) -> Source:
        index = _index(catalog, kept, ties, [entry.name for entry in record.files])
        return SafetensorsSource(store=folder.opens, record=record, index=index, seen={f.path: f for f in headers})

    return FoundCheckpoint(record, open_files)


def _dropped_names(headers: Iterable[layout.SafetensorsFile], catalog: TensorCatalog) -> dict[str, str]:
    """Return the names that a writer left out because another name has the same tensor, as `safetensors.save_model` does."""
    said = {name: owner for file in headers for name, owner in layout.tie_metadata(file.metadata).items()}
    return {name: owner for name, owner in said.items() if owner in catalog and name not in catalog}


def _index(catalog: TensorCatalog, kept: layout.HeaderState | None, ties: Mapping[str, str], files: list[str]) -> Index:
    arrays = set(kept.numpy) if kept else set()
    where = files[0] if files else FORMAT
    if lost := sorted(owner for key, owner in ties.items() if owner not in catalog or key in catalog):
        raise errors.MalformedFile.of(where, f"tensors are tied to {lost[0]!r}, which is not there")
    try:
        keys = sorted([*catalog, *ties], key=str.encode)
    except UnicodeEncodeError as exc:
        raise errors.MalformedFile.of(where, f"a tensor's name is no text: {exc}") from exc
    row_of = {key: row for row, key in enumerate(keys)}
    stored = [catalog[ties.get(key, key)] for key in keys]
    number = {name: at for at, name in enumerate(files)}
    values = kept.values if kept else {}
    value_keys = sorted(values, key=str.encode)
    # Without a saved tree: a flat dict of all tensors, in the order of the files.
    flat = Container("dict", tuple((key, None) for key in (*catalog, *ties)))
    tree = kept.tree if kept else encode_tree(flat)
    return build_index(
        keys=keys,
        dtypes=[each.dtype for each in stored],
        shapes=[each.shape for each in stored],
        chunks=[
            []
            if key in ties or 0 in each.shape
            else [(chunk.box, number[chunk.path], chunk.start) for chunk in each.chunks]
            for key, each in zip(keys, stored, strict=True)
        ],
        alias=[row_of[ties.get(key, key)] for key in keys],
        origin=[key in arrays for key in keys],
        value_keys=value_keys,
        value_data=strings_of(values[key] for key in value_keys),
        make_tree=lambda: tree,
        where=where,
    )
