"""
The storage reader for Hugging Face models and their shards: only headers and the requested ranges are read.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.futures import Future

from shardkeep.dcp._impl.file_reader import FileSystemReader, batches_for, fill_targets, target_of
from shardkeep.dcp._impl.hf_files import _HFStorageInfo
from shardkeep.engine.fill import ChunkRequest, fill_items
from shardkeep.engine.reader import ReadableStore
from shardkeep.engine.safetensors_source import CatalogChunk, CatalogEntry, read_catalog
from shardkeep.engine.torch_source import ItemFiles
from shardkeep.engine.workers import WINDOW_NBYTES, run_workers
from shardkeep.errors import BrokenProtocol, MalformedFile, NoSuchValue, UnsupportedLeaf
from shardkeep.format.boxes import Box, whole
from shardkeep.format.dtypes import DType, Ints, to_torch
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.safetensors import HeaderTensor, SafetensorsFile, read_header
from shardkeep.layouts.safetensors_publish import list_model
from shardkeep.layouts.torch import ItemLocation
from shardkeep.options import Options
from shardkeep.storage.base import Store, preferred_requests
from shardkeep.storage.file_systems import by_store, is_local, store_of
from shardkeep.storage.local import PathStore

# -- an open file ------------------------------------------------------------------------------------------------------


class SafeFile:
    """An open file with the methods of `safetensors.safe_open`, for subclasses of the reader."""

    def __init__(self, file: SafetensorsFile, opens: ReadableStore) -> None:
        self._file = file
        self._opens = opens

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._file.tensors)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the header."""
        return self._file.metadata or None

    def get_slice(self, name: str) -> SafeSlice:
        """Return a tensor whose slices can be read."""
        if name not in self._file.tensors:
            raise MalformedFile(f"{self._file.path}: there is no tensor {name!r}", file=self._file.path, key=name)
        return SafeSlice(self._opens, self._file.path, name, self._file.tensors[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        return self.get_slice(name)[...]


class SafeSlice:
    """A stored tensor of which only the requested part is read."""

    def __init__(self, opens: ReadableStore, path: str, key: str, part: HeaderTensor) -> None:
        self._opens, self._path, self._key, self._part = opens, path, key, part

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._part.shape)

    def get_dtype(self) -> str:
        """Return the dtype by its name in safetensors."""
        return str(self._part.dtype.safetensors)

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self._part
        given = index if isinstance(index, tuple) else (index,)
        at = given.index(Ellipsis) if Ellipsis in given else len(given)
        rest = [slice(None)] * (len(part.shape) - len(given) + (Ellipsis in given))
        given = (*given[:at], *rest, *given[at + 1 :])
        ranges = [
            range(full)[each] if isinstance(each, slice) else range(full)[each : each + 1 or None]
            for each, full in zip(given, part.shape, strict=True)
        ]
        if any(each.step != 1 for each in ranges):
            raise MalformedFile("only slices of step 1 can be read", file=self._path)
        box = Box(tuple(each.start for each in ranges), tuple(map(len, ranges)))
        found = torch.empty(box.sizes, dtype=to_torch(part.dtype), device="cpu")
        chunk = CatalogChunk(self._path, part.start, whole(part.shape))
        read = chunk_request(self._key, part.dtype, chunk, box, found)
        threads = max(1, min(Options().io_threads, found.nbytes // WINDOW_NBYTES))
        fill_items(ItemFiles(self._opens, {}), [read], Options(io_threads=threads))
        return found[tuple(slice(None) if isinstance(each, slice) else 0 for each in given)]


def chunk_request(key: str, dtype: DType, chunk: CatalogChunk, box: Box, into: torch.Tensor) -> ChunkRequest:
    """Return the request that fills a tensor with a box of a chunk."""
    nbytes = chunk.box.volume * dtype.itemsize
    location = ItemLocation(chunk.path, chunk.start, nbytes, chunk.start, ())
    return ChunkRequest(location, key, chunk.box.sizes, dtype, box, into)


_LARGEST_NBYTES = 8
"""The largest element that a planner's tensors have."""
_HOOKS = ("_process_read_request", "_read_files_from_queue")
"""Torch's methods that a subclass may override; requests then go through them, as in torch."""


class HuggingFaceStorageReader(FileSystemReader):
    """Reads a Hugging Face model, or the shards of one, into a state."""

    def __init__(self, path: str, thread_count: int = 1) -> None:
        """
        Point to a directory.

        Args:
            path: holds the model: a directory, or the URL of a place.
            thread_count: how many threads to read with, at least.

        """
        super().__init__(path=path)
        self.fs, self.path = by_store(self.fs, self.path)
        self.thread_count = thread_count
        self._catalog: Mapping[str, CatalogEntry] = {}
        self._chunks = _Chunks({})
        self._headers: dict[str, SafetensorsFile] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous load; the next one is from `checkpoint_id`, if given."""
        super().reset(checkpoint_id)
        self.fs, self.path = by_store(self.fs, self.path)
        self._catalog, self._chunks, self._headers = {}, _Chunks({}), {}

    # -- metadata ------------------------------------------------------------------------------------------------------

    def read_metadata(self) -> protocol.Metadata:
        """Describe the tensors of the directory; an index file, if there is one, says which files count."""
        place = storage_place(self)
        self._catalog = catalog = read_catalog(list_model(place), threads=self._threads())
        self._chunks = chunks = _Chunks(catalog)
        metadata = protocol.Metadata(
            cast("dict[str, Any]", _OnAccess(chunks.entry, lambda: iter(catalog), catalog)),
            storage_data=_OnAccess(chunks.location, chunks.indices, catalog),
            storage_meta=protocol.StorageMeta(load_id=self.load_id),
        )
        return protocol.to_classes_of_caller(metadata)

    def stored_chunk(self, index: protocol.MetadataIndex) -> tuple[DType, CatalogChunk]:
        """Return the chunk that an index names, and its dtype; `NoSuchValue` if it does not exist."""
        at: Ints = tuple(index.offset or ())
        chunk = self._chunks.at(index.fqn, at)
        info = self.storage_data.get(index)
        if chunk is not None and (info is None or info.relative_path == chunk[1].path):
            return chunk
        # The metadata were read by another reader, or changed: look into the file.
        if info is None:
            raise NoSuchValue(f"the checkpoint has no chunk of {index.fqn!r} at {at}", key=index.fqn)
        if info.relative_path not in self._headers:
            self._headers[info.relative_path] = read_header(info.relative_path, self._opens())
        header = self._headers[info.relative_path]
        if index.fqn not in header.tensors:
            raise NoSuchValue(f"{info.relative_path} has no tensor {index.fqn!r}", key=index.fqn)
        part = header.tensors[index.fqn]
        return part.dtype, CatalogChunk(header.path, part.start, Box(at, part.shape))

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_data(self, plan: protocol.LoadPlan, planner: protocol.LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, in place where possible."""
        storage_place(self)
        for req in plan.items:
            if req.type == protocol.LoadItemType.BYTE_IO:
                raise UnsupportedLeaf(
                    f"{req.dest_index.fqn!r} is no tensor, and Hugging Face files hold nothing else",
                    hint="leave it out of this load",
                    key=req.dest_index.fqn,
                )
        self._read(plan.items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, items: list[protocol.ReadItem], planner: protocol.LoadPlanner) -> None:
        if self._extends(HuggingFaceStorageReader, _HOOKS):
            self._read_one_by_one(items, planner)
        else:
            self.read_plain(items, planner)

    def _extends(self, own: type, names: Sequence[str]) -> bool:
        """Say whether the class of this reader overrides one of these methods of `own`."""
        return any(getattr(type(self), name) is not getattr(own, name) for name in names)

    def _opens(self) -> ReadableStore:
        """Return what opens the files of the catalog: by their paths, or by their names in a store."""
        return PathStore(direct=Options().direct_io) if is_local(self.fs) else storage_place(self)

    def read_plain(self, items: Sequence[protocol.ReadItem], planner: protocol.LoadPlanner) -> None:
        """Read items that are not quantized; they are converted to the dtype of their targets."""
        for batch in batches_for(planner, items, most_nbytes):
            fill_targets(batch, planner, partial(self._fill, batch))

    def _fill(self, batch: Sequence[protocol.ReadItem], targets: Sequence[torch.Tensor]) -> None:
        wanted, filled = [], []
        for req, target in zip(batch, targets, strict=True):
            dtype, chunk = self.stored_chunk(req.storage_index)
            box = Box(tuple(req.storage_offsets), tuple(req.lengths))
            # A tensor subclass may use its memory in its own way: fill it through its `copy_`.
            plain = type(target) is torch.Tensor
            filled.append(target if plain else torch.empty(box.sizes, dtype=to_torch(dtype), device="cpu"))
            wanted.append(chunk_request(req.storage_index.fqn, dtype, chunk, box, filled[-1]))
        files = ItemFiles(self._opens(), {})  # without digests
        fill_items(files, wanted, Options(io_threads=self._threads()))
        for target, made in zip(targets, filled, strict=True):
            if made is not target:
                target.copy_(made)

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def _read_one_by_one(self, items: Sequence[protocol.ReadItem], planner: protocol.LoadPlanner) -> None:
        """Hand the requests of each file to `_read_files_from_queue`, and so to `_process_read_request`."""
        per_file: dict[str, list[protocol.ReadItem]] = {}
        for req in items:
            info = self.storage_data.get(req.storage_index)
            path = self.stored_chunk(req.storage_index)[1].path if info is None else info.relative_path
            per_file.setdefault(path, []).append(req)
        waiting: queue.Queue[Any] = queue.Queue()
        done: queue.Queue[Any] = queue.Queue()
        for task in per_file.items():
            waiting.put(task)

        def work(_: int, __: memoryview) -> bool:
            self._read_files_from_queue(waiting, done, planner)
            return True

        threads = max(1, min(self.thread_count, len(per_file)))
        run_workers(range(threads), work, threads=threads, buffer_nbytes=0)
        if done.qsize() != len(per_file):
            raise BrokenProtocol(
                f"Not all files were processed: {done.qsize()} out of {len(per_file)}",
                hint="_read_files_from_queue must put a value into its second queue for each file",
            )

    def _process_read_request(self, f: Any, req: protocol.ReadItem, planner: protocol.LoadPlanner) -> None:
        """Read one item from an open file."""
        index = tuple(slice(at, at + n) for at, n in zip(req.storage_offsets, req.lengths, strict=True))
        tensor = f.get_slice(req.storage_index.fqn)[index]
        target = target_of(req, planner)
        target.copy_(tensor)
        planner.commit_tensor(req, target)

    def _read_files_from_queue(
        self, file_queue: queue.Queue[Any], result_queue: queue.Queue[Any], planner: protocol.LoadPlanner
    ) -> None:
        """Read files, each with its requests, until the queue is empty; put True into the other one for each."""
        while True:
            try:
                path, requests = file_queue.get_nowait()
            except queue.Empty:
                return
            opens = self._opens()
            handle = SafeFile(read_header(path, opens), opens)
            for req in requests:
                self._process_read_request(handle, req, planner)
            result_queue.put(True)

    def _threads(self) -> int:
        return max(self.thread_count, preferred_requests(store_of(self.fs, self.path), Options().io_threads))


class _Chunks:
    """The chunks of a catalog, by key and offsets; a file is opened when one of its tensors is first looked up."""

    def __init__(self, catalog: Mapping[str, CatalogEntry]) -> None:
        self.catalog = catalog
        self._found: dict[str, dict[Ints, tuple[DType, CatalogChunk]]] = {}

    def at(self, key: str, offsets: Ints) -> tuple[DType, CatalogChunk] | None:
        """Return the chunk that begins there, and its dtype."""
        if key not in self._found:
            stored = self.catalog.get(key)
            chunks = {} if stored is None else {chunk.box.offsets: (stored.dtype, chunk) for chunk in stored.chunks}
            self._found[key] = chunks
        return self._found[key].get(offsets)

    def entry(self, key: str) -> protocol.TensorStorageMetadata:
        """Return the metadata of a tensor."""
        stored = self.catalog[key]
        chunks = [
            protocol.ChunkStorageMetadata(torch.Size(c.box.offsets), torch.Size(c.box.sizes)) for c in stored.chunks
        ]
        return protocol.TensorStorageMetadata(
            protocol.TensorProperties(dtype=to_torch(stored.dtype)), torch.Size(stored.shape), chunks
        )

    def location(self, index: Any) -> _HFStorageInfo:
        """Return the location of a chunk, by its index: one of shardkeep's or of torch's."""
        known = isinstance(index, protocol.MetadataIndex) or protocol.is_torchs(index, "MetadataIndex")
        found = self.at(index.fqn, tuple(index.offset)) if known and index.offset is not None else None
        if found is None:
            raise KeyError(index)
        return _HFStorageInfo(found[1].path, torch.Size(found[1].box.sizes), to_torch(found[0]))

    def indices(self) -> Iterator[protocol.MetadataIndex]:
        """Return the index of every chunk."""
        return (
            protocol.MetadataIndex(key, chunk.box.offsets)
            for key, entry in self.catalog.items()
            for chunk in entry.chunks
        )


class _OnAccess(MutableMapping[Any, Any]):
    """
    A mapping whose values are made on access, and whose keys are listed only when all of them are needed.

    It may be changed, like the dicts in torch's metadata: then all values are made.
    """

    def __init__(
        self, make: Callable[[Any], Any], keys: Callable[[], Iterator[Any]], catalog: Mapping[str, CatalogEntry]
    ) -> None:
        self._make, self._keys, self._catalog = make, keys, catalog
        self._made: dict[Any, Any] | None = None

    def _all(self) -> dict[Any, Any]:
        if self._made is None:
            self._made = {key: self._make(key) for key in self._keys()}
        return self._made

    def __getitem__(self, key: Any) -> Any:
        return self._make(key) if self._made is None else self._made[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._all()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._all()[key]

    def __iter__(self) -> Iterator[Any]:
        return self._keys() if self._made is None else iter(self._made)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._catalog if self._made is None else self._made)


def storage_place(storage: Any) -> Store:
    """Return the store that a storage reads from or writes to; a file system of the user's own is refused."""
    store = store_of(storage.fs, storage.path)
    if store is None:
        raise BrokenProtocol(
            f"{type(storage).__name__}.fs is a {type(storage.fs).__qualname__}, which would not be used: "
            "safetensors files are read and written on the local file system or in a store",
            hint="give the URL of the place, or use FsspecWriter and FsspecReader",
        )
    return store


def most_nbytes(req: protocol.ReadItem) -> int:
    """Return the most bytes that the target of a request takes."""
    return torch.Size(req.lengths).numel() * _LARGEST_NBYTES
