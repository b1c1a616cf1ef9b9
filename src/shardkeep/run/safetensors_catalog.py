"""
Which tensors a set of safetensors files holds, and in which chunks; taken only if they are one checkpoint.

In come headers, out goes a table of tensors. Files of different saves, shards that overlap or leave a hole, shards of
one tensor that differ in dtype are errors that name the files: torch reads such a set as if it were whole.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkeep.errors import MalformedFile
from shardkeep.format.columns import Boxes, matrix_of
from shardkeep.format.dtypes import DType, Ints
from shardkeep.format.region import Box
from shardkeep.layout.safetensors_files import Part, SafetensorsFile, read_header
from shardkeep.layout.safetensors_folder import Folder
from shardkeep.layout.safetensors_names import CUSTOM_METADATA_KEY, FILE_COUNT_KEY, SAVE_ID_KEY, SAVED_OFFSETS_KEY
from shardkeep.plan.tiling import explain, tiled
from shardkeep.run.workers import run_workers
from shardkeep.store.paths import PathStore
from shardkeep.store.protocol import Gets, Opens

logger = logging.getLogger("shardkeep")

_MOST_NAMED = 4
_SHARD_PREFIX = "shard-"
_MOST_INDEX_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, in one piece in one file."""

    path: str
    start: int
    """Where its bytes begin in the file."""
    box: Box


@dataclass(frozen=True)
class Stored:
    """A tensor and its chunks, which tile it."""

    dtype: DType
    shape: Ints
    chunks: list[Chunk]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


Catalog = dict[str, Stored]


# -- of a directory ----------------------------------------------------------------------------------------------------


def read_catalog(folder: Folder, *, threads: int) -> Mapping[str, Stored]:
    """
    Find out what a directory holds. Its index file, where there is one, says which files count, and which of them has a
    tensor: a file is then opened when one of its tensors is asked for.

    Raises:
        MalformedFile: the files are not one whole checkpoint.

    """
    if not folder.files and folder.index is None:
        raise MalformedFile(f"{folder.path}: there are no safetensors files", file=folder.path)
    if folder.index is None:
        return catalog_of(read_headers(folder.files.values(), threads=threads, opens=folder.opens))
    weight_map = read_weight_map(folder.index, folder.opens)
    homes = {name: None for name in weight_map.values() if name in folder.files}
    if weight_map and not homes:
        raise MalformedFile(
            f"{folder.index}: none of the files that it names is there: {_some(sorted(set(weight_map.values())))}",
            hint="was the model downloaded as a whole?",
            file=folder.index,
        )
    if others := sorted(folder.files.keys() - homes.keys()):
        logger.warning("%s: the index file does not name %s, so they are not read", folder.path, _some(others))
    _warn_of_gone(folder, {key: name for key, name in weight_map.items() if name not in homes})
    return _IndexedCatalog(folder, weight_map, threads)


def _warn_of_gone(folder: Folder, gone: Mapping[str, str]) -> None:
    """Tell of tensors that the index file names: of a model that was downloaded in part, the rest can be loaded."""
    if gone:
        logger.warning(
            "%s: names %d tensors that are not there, which cannot be loaded: %s",
            folder.index,
            len(gone),
            _some([f"{key!r} in {name}" for key, name in gone.items()]),
        )


class _IndexedCatalog(Mapping[str, Stored]):
    """What an index file speaks of; whatever it does not answer is answered by opening all files."""

    def __init__(self, folder: Folder, weight_map: dict[str, str], threads: int) -> None:
        self._folder = folder
        self._weight_map = weight_map
        self._threads = threads
        self._files: dict[str, SafetensorsFile] = {}
        self._offsets: dict[str, dict[str, Any] | None] = {}
        self._found: dict[str, Stored] = {}
        self._opened: Catalog | None = None

    def __getitem__(self, key: str) -> Stored:
        if self._opened is not None:
            return self._opened[key]
        if key not in self._found:
            stored = self._alone(key)
            if stored is None:
                return self._whole()[key]
            self._found[key] = stored
        return self._found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())

    def _alone(self, key: str) -> Stored | None:
        """Return a tensor that the index gives to one file, and that is whole there; None where that is not certain."""
        name = self._weight_map.get(key) if isinstance(key, str) else None
        if name is None or name not in self._folder.files:
            return None
        if name not in self._files:
            self._files[name] = read_header(self._folder.files[name], self._folder.opens)
            self._offsets[name] = saved_offsets(self._files[name])
        file, offsets = self._files[name], self._offsets[name]
        part = file.tensors.get(key)
        # Writers cut tensors only into files that are named as shards, of which there is no index.
        if part is None or name.startswith(_SHARD_PREFIX) or not self._of_one_save():
            return None
        if offsets is not None and any(_offset_of(file, key, part, offsets)):
            return None
        return Stored(part.dtype, part.shape, [Chunk(file.path, part.start, Box((0,) * len(part.shape), part.shape))])

    def _of_one_save(self) -> bool:
        return len({file.metadata.get(SAVE_ID_KEY) for file in self._files.values()}) == 1

    def _whole(self) -> Catalog:
        if self._opened is None:
            self._opened = self._open_all()
        return self._opened

    def _open_all(self) -> Catalog:
        folder, weight_map = self._folder, self._weight_map
        homes = {name: None for name in weight_map.values() if name in folder.files}
        files = read_headers([folder.files[name] for name in homes], threads=self._threads, opens=folder.opens)
        held = {name: file.tensors for name, file in zip(homes, files, strict=True)}
        gone = {key: name for key, name in weight_map.items() if key not in held.get(name, ())}
        _warn_of_gone(folder, {key: name for key, name in gone.items() if name in held})  # the index is older than it
        return catalog_of(files, homes={key: folder.files[name] for key, name in weight_map.items() if key not in gone})


def read_weight_map(path: str, gets: Gets | None = None) -> dict[str, str]:
    """Return what an index file says: the file of each tensor."""
    raw = (gets or PathStore(direct=False)).get(path, limit=_MOST_INDEX_NBYTES)
    try:
        index = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{path}: no JSON: {error}", file=path) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(home, str) for home in weight_map.values()):
        raise MalformedFile(f"{path}: there is no weight_map that gives each tensor a file", file=path)
    return weight_map


# -- of files ----------------------------------------------------------------------------------------------------------


def read_headers(paths: Iterable[str], *, threads: int, opens: Opens | None = None) -> list[SafetensorsFile]:
    """Read the headers of files, and nothing else of them, several at a time; in the order of `paths`."""
    wanted = list(dict.fromkeys(paths))
    found: dict[str, SafetensorsFile] = {}

    def work(path: str, _: memoryview) -> bool:
        found[path] = read_header(path, opens)
        return True

    run_workers(wanted, work, threads=max(1, min(threads, len(wanted))), buffer_nbytes=0)
    return [found[path] for path in wanted]


def catalog_of(files: Sequence[SafetensorsFile], *, homes: Mapping[str, str] | None = None) -> Catalog:
    """
    Put the tensors of files together. `homes` says where a tensor is, for those that several files have whole.

    Raises:
        MalformedFile: the files are not one whole checkpoint.

    """
    check_one_save(files)
    found: dict[str, tuple[DType, list[Chunk]]] = {}
    for file in files:
        offsets = saved_offsets(file)
        for key, part in file.tensors.items():
            if homes and offsets is None and homes.get(key, file.path) != file.path:
                continue
            at = (0,) * len(part.shape) if offsets is None else _offset_of(file, key, part, offsets)
            chunk = Chunk(file.path, part.start, Box(at, part.shape))
            dtype, chunks = found.setdefault(key, (part.dtype, []))
            if dtype is not part.dtype or (len(chunks) and len(chunks[0].box.sizes) != len(part.shape)):
                raise MalformedFile(
                    f"{key!r} is {part.dtype.name} of {len(part.shape)} axes in {file.path}, and {dtype.name} of "
                    f"{len(chunks[0].box.sizes)} axes in {chunks[0].path}",
                    file=file.path, key=key,
                )  # fmt: skip
            chunks.append(chunk)
    catalog = {key: _stored(dtype, chunks) for key, (dtype, chunks) in found.items()}
    _check_tiled(catalog)
    return catalog


def _stored(dtype: DType, chunks: list[Chunk]) -> Stored:
    shape = tuple(map(max, zip(*(_end(chunk.box) for chunk in chunks), strict=True)))
    # Ranks without a part of a tensor may have stored an empty one.
    filled = [chunk for chunk in chunks if all(chunk.box.sizes)]
    if not filled:
        filled = [Chunk(chunks[0].path, chunks[0].start, Box((0,) * len(shape), shape))]
    return Stored(dtype, shape, filled)


def _end(box: Box) -> Ints:
    return tuple(o + n for o, n in zip(box.offsets, box.sizes, strict=True))


def saved_offsets(file: SafetensorsFile) -> dict[str, Any] | None:
    """Return what a file says about where its tensors lie in their wholes; None for one that was not cut."""
    text = file.metadata.get(CUSTOM_METADATA_KEY)
    if not text:
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{file.path}: {CUSTOM_METADATA_KEY} is no JSON: {error}", file=file.path) from error
    if not isinstance(said, dict):
        raise MalformedFile(f"{file.path}: {CUSTOM_METADATA_KEY} is no JSON object", file=file.path)
    return said


def _offset_of(file: SafetensorsFile, key: str, part: Part, said: Mapping[str, Any]) -> Ints:
    entry = said.get(key)
    offsets = entry.get(SAVED_OFFSETS_KEY) if isinstance(entry, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != len(part.shape)
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in offsets)
    ):
        raise MalformedFile(
            f"{file.path}: tensor {key!r} of shape {list(part.shape)} has saved_offsets {offsets!r}",
            file=file.path, key=key,
        )  # fmt: skip
    return tuple(offsets)


def check_one_save(files: Iterable[SafetensorsFile]) -> None:
    """Make sure that the files which were written as a checkpoint are all of the same save, and all there."""
    saves: dict[str | None, list[SafetensorsFile]] = {}
    for file in files:
        if CUSTOM_METADATA_KEY in file.metadata:
            saves.setdefault(file.metadata.get(SAVE_ID_KEY), []).append(file)
    if len(saves) > 1:
        sets = " and ".join(
            f"{_some([file.name for file in each])} of {'an unnamed save' if save is None else f'save {save}'}"
            for save, each in saves.items()
        )
        raise MalformedFile(
            f"{next(iter(saves.values()))[0].path}: files of different saves in one directory: {sets}",
            hint="delete those of the older save",
        )
    for save, each in saves.items():
        expected = each[0].metadata.get(FILE_COUNT_KEY)
        if save is not None and expected is not None and expected != str(len(each)):
            raise MalformedFile(
                f"{each[0].path}: save {save} has {expected} files, and {len(each)} are here: "
                f"{_some([file.name for file in each])}",
                hint="files are missing: was the checkpoint copied as a whole?",
                file=each[0].path,
            )


def _check_tiled(catalog: Catalog) -> None:
    cut = [
        key
        for key, each in catalog.items()
        if all(each.shape) and (len(each.chunks) > 1 or any(each.chunks[0].box.offsets))
    ]
    if not cut:
        return
    axes = max(len(catalog[key].shape) for key in cut)
    chunks = [chunk.box for key in cut for chunk in catalog[key].chunks]
    owner = np.repeat(np.arange(len(cut)), [len(catalog[key].chunks) for key in cut])
    boxes = Boxes(matrix_of([b.offsets for b in chunks], axes, 0), matrix_of([b.sizes for b in chunks], axes, 1))
    right = tiled(matrix_of([catalog[key].shape for key in cut], axes, 1), owner, boxes)
    for key, fine in zip(cut, right.tolist(), strict=True):
        if fine:
            continue
        stored = catalog[key]
        names = list(dict.fromkeys(chunk.path for chunk in stored.chunks))
        raise MalformedFile(
            f"{key!r} of shape {list(stored.shape)} is not whole: "
            f"{explain(stored.shape, [chunk.box for chunk in stored.chunks])}; it is in {_some(names)}",
            hint="are there files of an older save in the directory, or are some missing?",
            key=key,
            file=names[0],
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown
