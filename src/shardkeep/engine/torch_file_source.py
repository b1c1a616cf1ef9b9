"""
Files of `torch.save` as a `Source`: the pickle becomes an index, and tensors are read by ranges of the file.

The pickle is read without running anything that it names (`format.pickles`). What only a class of the user's can
rebuild is a value that needs `allow_pickle`, and hides nothing else. Tensors that are the same view of one storage are
tied. Nothing here imports torch, unless the caller allows pickles and the file has some.
"""

from __future__ import annotations

import io
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import numpy as np

from shardkeep import errors
from shardkeep.engine.reader import FoundCheckpoint, Source, list_keys, saved_at
from shardkeep.engine.safetensors_source import not_in_file, read_weight_map, single_file
from shardkeep.engine.torch_source import Item, ItemFiles, PickledCall, bad_archives, view_of
from shardkeep.format.boxes import IntArray, concat_ranges, whole
from shardkeep.format.data_file import checksum_text, digest
from shardkeep.format.index import build_index, strings_of
from shardkeep.format.pickles import Opaque
from shardkeep.format.record import Blob, Record, Totals
from shardkeep.format.torch_zip import ArchivedState, ArchivedTensor, data_start, read_state
from shardkeep.format.values import Container, Node, Part, encode_tree, encode_value, is_part, join
from shardkeep.options import Options
from shardkeep.plan.load_plan import chunk_rows
from shardkeep.storage.base import ReadableStore, Store, exists, local_path, preferred_requests, with_any_names
from shardkeep.storage.file_systems import BlobInput
from shardkeep.storage.resolve import open_store

FORMAT = "torch.save"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_MODEL_NAME, _INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
ZIP = b"PK\3\4"
_OLD = b"l\xfc\x9cF\xf9 j\xa8P\x19"
"""The number with which files of torch before version 1.6 begin, in a pickle."""
_READ_AHEAD_NBYTES = 1 << 20
_KINDS: dict[type, str] = {
    **dict.fromkeys((dict, defaultdict, Counter), "dict"),
    OrderedDict: "odict",
    list: "list",
    tuple: "tuple",
}
_MAPPINGS = ("dict", "odict")


@dataclass(frozen=True, kw_only=True)
class TorchFileSource(Source):
    files: ItemFiles
    tensors: Sequence[ArchivedTensor]
    """How each chunk lies in its storage; one for each chunk of the index, all of which are whole tensors."""
    heads: IntArray
    """Where the header of that storage begins in the file."""
    starts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Where the bytes of storages begin, by file and header, as far as they were looked up."""

    aligned: ClassVar[bool] = False
    repeated_nbytes: ClassVar[int] = 64 << 20

    def locate(self, tensors: IntArray) -> None:
        """Find out where the storages of these tensors begin: a header of unknown length stands before each."""
        chunks = concat_ranges(*chunk_rows(self.index, tensors))
        rows = chunks[self.index.chunks.start[chunks] < 0].tolist()
        unknown = {at: self.tensors[row].storage for row in rows if (at := self.position(row)) not in self.starts}
        for number in sorted({number for number, _ in unknown}):
            self._look_up(number, {at: name for at, name in unknown.items() if at[0] == number})
        for row in rows:
            chunk, entry = self.strided(row), self.record.files[int(self.index.chunks.file[row])]
            if chunk.start + chunk.span > entry.nbytes:
                why = f"{chunk.storage} reaches past the end of the file"
                raise errors.WrongSize.of(entry.name, why, hint="the file was cut short")
            if chunk.is_row_major:
                self.index.chunks.start[row] = chunk.start

    def _look_up(self, number: int, storages: Mapping[tuple[int, int], str]) -> None:
        entry = self.record.files[number]
        threads = min(len(storages), preferred_requests(self.store, 1))
        with closing(self.store.open(entry.name)) as reader, ThreadPoolExecutor(threads) as pool:
            view = view_of(reader, Item(number, 0, entry.nbytes, entry.name))
            found = (pool.map if threads > 1 else map)(
                lambda at: data_start(view, at[1], storages[at], where=entry.name), storages
            )
            self.starts.update(zip(storages, found, strict=True))

    def strided(self, chunk: int) -> ArchivedTensor:
        found = self.tensors[chunk]
        return found._replace(start=self.starts[self.position(chunk)] + found.start)

    def check(self, tensors: IntArray) -> None:
        self.locate(tensors)
        super().check(tensors)

    def keys_at(self, file: int, at: int, end: int) -> str:
        with suppress(errors.DamagedCheckpoint):
            self.locate(np.arange(len(self.index.keys)))
        found = []
        for row, tensor in enumerate(self.tensors):
            start = self.starts.get(self.position(row), 0) + tensor.start
            if self.position(row)[0] == file and start < end and start + tensor.span > at:
                found.append(int(np.searchsorted(self.index.chunk_ends, row, "right")))
        return list_keys(self.index.keys.raw(row).decode() for row in found) or "no tensor"

    def damage_by_form(self, file: int, uncompared: set[int]) -> Iterator[errors.CheckpointError]:
        """Compare the entries of a file with the CRC-32 checksums in its directory."""
        entry = self.record.files[file]
        return bad_archives(self.files, [(Item(file, 0, entry.nbytes, entry.name), ())], self.keys_at, uncompared)

    def position(self, chunk: int) -> tuple[int, int]:
        return int(self.index.chunks.file[chunk]), int(self.heads[chunk])


def find_torch_file(store: Store) -> FoundCheckpoint | None:
    """Find the file of `torch.save` that a place is; None if it is none."""
    found = single_file(store, SUFFIXES)
    if found is None:
        return None
    place, name = found
    with closing(place.open(name)) as reader:
        head = view_of(reader, Item(0, 0, reader.nbytes, name))(0, 32)
    if _OLD in head:
        again = f"torch.save(torch.load({name!r}, map_location='cpu'), 'new.pt')"
        raise errors.UnsupportedVersion(
            f"{store.url}: a file of torch.save from before version 1.6, which can only be read as a whole",
            hint=f"save it again: {again}",
            file=name,
        )
    if head.startswith(ZIP):
        return open_torch_files(place, [name], {}, name)
    if name.endswith(SUFFIXES) and head[8:9] != b"{":  # as safetensors files have it
        raise errors.MalformedFile(f"{store.url}: neither a file of torch.save nor of safetensors", file=name)
    return None


def find_torch_model(store: Store) -> FoundCheckpoint | None:
    """Find a Hugging Face model that `torch.save` wrote; None if there is none."""
    place = with_any_names(store)
    for name in (_INDEX_NAME, _MODEL_NAME):
        if exists(place, name):
            homes = read_weight_map(name, place) if name == _INDEX_NAME else {}
            return open_torch_files(place, sorted(set(homes.values())) or [name], homes, name)
    return None


def open_torch_files(place: ReadableStore, names: list[str], homes: Mapping[str, str], name: str) -> FoundCheckpoint:
    """Open files as one checkpoint; `homes` has the file of each key, if there are several, and `name` stands for all."""
    files, states = ItemFiles(place, {}), []
    for each in names:
        nbytes = files.entries[files.number(each)].nbytes
        with closing(place.open(each)) as reader:
            states.append(read_state(view_of(reader, Item(0, 0, nbytes, each)), nbytes, where=each))
    tree, leaves = _leaves(states, names, homes)
    keys = sorted([key for key, leaf in leaves.items() if type(leaf.value) is ArchivedTensor], key=str.encode)
    value_keys = sorted(leaves.keys() - {*keys}, key=str.encode)
    first: dict[Any, int] = {}
    alias = [first.setdefault((leaves[key].file, leaves[key].value), row) for row, key in enumerate(keys)]
    stored = {row: leaves[key] for row, key in enumerate(keys) if alias[row] == row and leaves[key].value.nbytes}
    together = checksum_text(digest(b"".join(state.digest for state in states)))
    record = Record(
        format=FORMAT,
        save_id=together[-20:],
        saved_at=saved_at(place, names),
        writer="torch",
        world_size=1,
        totals=Totals(
            tensors=len(keys),
            chunks=len(stored),
            values=len(value_keys),
            tensor_bytes=sum(leaf.value.nbytes for leaf in stored.values()),
        ),
        index=Blob(name=name, nbytes=0, checksum=together),
        files=files.entries,
    )

    def open_files(options: Options) -> Source:
        loaded: dict[int, Any] = {}
        index = build_index(
            keys=keys,
            dtypes=[leaves[key].value.dtype for key in keys],
            shapes=[leaves[key].value.shape for key in keys],
            chunks=[
                [(whole(stored[row].value.shape), stored[row].file, -1)] if row in stored else []
                for row in range(len(keys))
            ],
            alias=alias,
            value_keys=value_keys,
            value_data=strings_of(_encoded(key, leaves[key], files, loaded, options) for key in value_keys),
            make_tree=lambda: encode_tree(tree),
            where=name,
        )
        own = [leaf.value for leaf in stored.values()]
        heads = [states[leaf.file].entries[leaf.value.storage][0] for leaf in stored.values()]
        return TorchFileSource(
            store=place, record=record, index=index, files=files, tensors=own, heads=np.array(heads, np.int64)
        )

    return FoundCheckpoint(record, open_files)


class _Leaf(NamedTuple):
    file: int
    path: tuple[Part, ...]
    """The keys that lead to it."""
    value: Any


def _leaves(
    states: Sequence[ArchivedState], names: Sequence[str], homes: Mapping[str, str]
) -> tuple[Container, dict[str, _Leaf]]:
    """Return the nesting and the leaves of files, whose dicts are one."""
    kind, children, leaves = "", list[tuple[Part, Node]](), dict[str, _Leaf]()
    for number, (state, name) in enumerate(zip(states, names, strict=True)):
        kind = _KINDS.get(type(state.value), "")
        if kind not in _MAPPINGS or not all(map(_is_key, state.value)):
            found = state.unknown[0] if type(state.value) is Opaque and state.unknown else type(state.value).__name__
            raise errors.UnsupportedLeaf(
                f"{name} holds a {'Tensor' if found == 'ArchivedTensor' else found}, and not a dict of names",
                hint="load it with torch.load, and save a dict: torch.save(model.state_dict(), ...)",
            )
        if absent := [key for key, home in homes.items() if home == name and key not in state.value]:
            raise not_in_file(name, _INDEX_NAME, absent[0])
        for part, child in state.value.items():
            if homes.get(part, name) == name:
                children.append((part, _take(child, join(None, kind, part), number, (part,), leaves)))
    return Container(kind, tuple(children)), leaves


def _is_key(part: Any) -> bool:
    return is_part(part) and (type(part) is not str or part.isascii() or part == part.encode(errors="replace").decode())


def _is_structure(value: Any) -> bool:
    """Return whether a value is, or holds, a tensor or a dict: such lists and tuples are opened."""
    if type(value) in (list, tuple):
        return any(map(_is_structure, value))
    return type(value) is ArchivedTensor or _KINDS.get(type(value)) in _MAPPINGS


def _take(value: Any, name: str, file: int, path: tuple[Part, ...], leaves: dict[str, _Leaf]) -> Node:
    """Collect the leaves below a value, and return its skeleton, by the rules of `state.flatten`."""
    kind = _KINDS.get(type(value), "")
    if not kind or (not all(map(_is_key, value)) if kind in _MAPPINGS else not _is_structure(value)):
        if name in leaves:
            raise errors.KeyCollision(f"two leaves have the flat name {name!r}", hint="rename one of these keys")
        leaves[name] = _Leaf(file, path, value)
        return None
    items = value.items() if kind in _MAPPINGS else enumerate(value)
    children = [(part, _take(child, join(name, kind, part), file, (*path, part), leaves)) for part, child in items]
    return Container(kind, tuple(children))


def _encoded(key: str, leaf: _Leaf, files: ItemFiles, loaded: dict[int, Any], options: Options) -> bytes:
    """Encode a plain value; any other becomes a pickle that loads it or, if the caller allows that, a pickle of it."""
    try:
        return encode_value(leaf.value, key=key)
    except errors.UnsupportedLeaf:
        name = files.entries[leaf.file].name
        value: Any = PickledCall(load_value, (getattr(files.store, "url", ""), name, leaf.path))
        if options.allow_pickle:
            try:
                loaded[leaf.file] = loaded.get(leaf.file) or _load(files.store, name)
            except Exception as exc:  # a pickle runs code, and code may raise anything
                hint = "all but such values can be read without allow_pickle"
                raise errors.UnsupportedLeaf(f"{key!r}: torch cannot load {name}: {exc!r}", hint=hint, key=key) from exc
            value = reduce(lambda value, part: value[part], leaf.path, loaded[leaf.file])
        return encode_value(value, key=key, allow_pickle=True)


def load_value(url: str, name: str, path: tuple[Part, ...]) -> Any:
    """Load a file with torch, and return one value of it; called only where the caller allows pickles."""
    return reduce(lambda value, part: value[part], path, _load(with_any_names(open_store(url, direct=False)), name))


def _load(store: ReadableStore, name: str) -> Any:
    import torch  # noqa: PLC0415 - only such values need it

    if (path := local_path(store)) is not None:
        return torch.load(os.path.join(path, name), map_location="cpu", mmap=True, weights_only=False)
    with closing(store.open(name)) as reader:
        stream = io.BufferedReader(BlobInput(reader), _READ_AHEAD_NBYTES)
        return torch.load(stream, map_location="cpu", weights_only=False)
