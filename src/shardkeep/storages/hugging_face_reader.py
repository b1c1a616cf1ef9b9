"""
The storage reader for Hugging Face models and for shards of them: only headers and wanted ranges are read.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.futures import Future

from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.dtypes import DType, Ints, to_torch
from shardkeep.format.region import Box
from shardkeep.layout.safetensors_files import SafetensorsFile, read_header
from shardkeep.layout.safetensors_folder import look
from shardkeep.layout.torch_metadata import Place
from shardkeep.options import Options
from shardkeep.protocol.foreign import in_words_of_caller
from shardkeep.protocol.lazy_dicts import LazyItems
from shardkeep.protocol.load_planner import DefaultLoadPlanner
from shardkeep.protocol.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    is_torchs,
)
from shardkeep.protocol.planners import LoadPlanner
from shardkeep.protocol.plans import LoadItemType, LoadPlan, ReadItem
from shardkeep.protocol.problems import BrokenProtocol, NoSuchValue
from shardkeep.run.item_files import Files, batches
from shardkeep.run.read import Reads
from shardkeep.run.safetensors_catalog import Chunk, Stored, read_catalog
from shardkeep.run.torch_fetch import Wanted, fill
from shardkeep.run.workers import run_workers
from shardkeep.state.devices import settle
from shardkeep.storages.choosing import by_store, is_local, store_of
from shardkeep.storages.file_reader import FileSystemReader
from shardkeep.storages.hugging_face_names import _HFStorageInfo
from shardkeep.storages.safetensors_handle import SafeFile
from shardkeep.store.paths import PathStore
from shardkeep.store.protocol import Store, requests_of

_LARGEST_NBYTES = 8
"""Of an element, in whatever a planner makes for it."""
_HOOKS = ("_process_read_request", "_read_files_from_queue")
"""Methods that a subclass may override; then whole requests go through them, as in torch."""


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
        self._catalog: Mapping[str, Stored] = {}
        self._chunks: dict[str, dict[Ints, tuple[DType, Chunk]]] = {}
        self._headers: dict[str, SafetensorsFile] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous load; the next one is from `checkpoint_id`, if given."""
        super().reset(checkpoint_id)
        self.fs, self.path = by_store(self.fs, self.path)
        self._catalog, self._chunks, self._headers = {}, {}, {}

    # -- what there is -------------------------------------------------------------------------------------------------

    def read_metadata(self) -> Metadata:
        """
        Describe what the directory holds. An index file, where there is one, says which files count.

        Raises:
            MalformedFile: the files are not one whole checkpoint.

        """
        place = place_of(self)
        self._chunks = {}
        self._catalog = read_catalog(look(place), threads=self._threads())
        metadata = Metadata(
            LazyItems.of(_Entries(self._catalog)),
            storage_data=LazyItems.of(_Places(self._catalog)),
            storage_meta=StorageMeta(load_id=self.load_id),
        )
        return in_words_of_caller(metadata)

    def stored_chunk(self, index: MetadataIndex) -> tuple[DType, Chunk]:
        """
        Find a chunk that an item names.

        Raises:
            NoSuchValue: there is none.

        """
        at: Ints = tuple(index.offset or ())
        found = self._chunks.get(index.fqn)
        if found is None and index.fqn in self._catalog:
            stored = self._catalog[index.fqn]
            found = self._chunks[index.fqn] = {chunk.box.offsets: (stored.dtype, chunk) for chunk in stored.chunks}
        chunk = (found or {}).get(at)
        info = self.storage_data.get(index)
        if chunk is not None and (info is None or info.relative_path == chunk[1].path):
            return chunk
        # Metadata that another reader read, or that were changed: the file says the rest.
        if info is None:
            raise NoSuchValue(f"the checkpoint has no chunk of {index.fqn!r} at {at}", key=index.fqn)
        header = self._header(info.relative_path)
        if index.fqn not in header.tensors:
            raise NoSuchValue(f"{info.relative_path} has no tensor {index.fqn!r}", key=index.fqn)
        part = header.tensors[index.fqn]
        return part.dtype, Chunk(header.path, part.start, Box(at, part.shape))

    def _header(self, path: str) -> SafetensorsFile:
        if path not in self._headers:
            self._headers[path] = read_header(path, self._opens())
        return self._headers[path]

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner asks for, straight into its tensors where they allow it."""
        place_of(self)
        for req in plan.items:
            if req.type == LoadItemType.BYTE_IO:
                raise UnsupportedLeaf(
                    f"{req.dest_index.fqn!r} is no tensor, and Hugging Face files hold nothing else",
                    hint="leave it out of this load",
                    key=req.dest_index.fqn,
                )
        self._read(plan.items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        if self._extends(HuggingFaceStorageReader, _HOOKS):
            self._read_one_by_one(items, planner)
        else:
            self.read_plain(items, planner)

    def _extends(self, own: type, names: Sequence[str]) -> bool:
        """Say whether the class of this reader overrides one of these methods."""
        return any(getattr(type(self), name) is not getattr(own, name) for name in names)

    def _opens(self) -> Reads:
        """Return what opens files as the catalog calls them: by their paths, or by their names in a store."""
        return PathStore(direct=Options().direct_io) if is_local(self.fs) else place_of(self)

    def open_files(self) -> Files:
        """Return the files to read from, which have no digests."""
        return Files(self._opens(), {})

    def read_plain(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Read items as they are stored, cast to the dtype of what they fill."""
        files, options = self.open_files(), Options()
        for batch in in_batches(items, planner):
            wanted, targets, filled = [], [], []
            for req in batch:
                dtype, chunk = self.stored_chunk(req.storage_index)
                targets.append(target_of(req, planner))
                # What a tensor of another class does with its memory, only its own `copy_` knows.
                plain = type(targets[-1]) is torch.Tensor
                filled.append(
                    targets[-1] if plain else torch.empty(tuple(req.lengths), dtype=to_torch(dtype), device="cpu")
                )
                nbytes = chunk.box.volume * dtype.itemsize
                place = Place(chunk.path, chunk.start, nbytes, chunk.start, ())
                box = Box(tuple(req.storage_offsets), tuple(req.lengths))
                wanted.append(Wanted(place, req.storage_index.fqn, chunk.box.sizes, dtype, box, filled[-1]))
            settle(filled)
            fill(files, wanted, threads=self._threads(), budget_nbytes=options.host_budget_bytes)
            settle(filled)
            # The bytes went past autograd, which must not take what it saved from these tensors for still valid.
            torch.autograd.graph.increment_version(filled)
            for req, target, made in zip(batch, targets, filled, strict=True):
                if made is not target:
                    target.copy_(made)
                planner.commit_tensor(req, target)

    # -- for readers that extend this one ------------------------------------------------------------------------------

    def _read_one_by_one(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Hand the requests of each file to `_read_files_from_queue`, and so to `_process_read_request`."""
        per_file: dict[str, list[ReadItem]] = {}
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

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        """Read one item from an open file."""
        index = tuple(slice(at, at + n) for at, n in zip(req.storage_offsets, req.lengths, strict=True))
        tensor = f.get_slice(req.storage_index.fqn)[index]
        target = target_of(req, planner)
        target.copy_(tensor)
        planner.commit_tensor(req, target)

    def _read_files_from_queue(
        self, file_queue: queue.Queue[Any], result_queue: queue.Queue[Any], planner: LoadPlanner
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
        return max(self.thread_count, requests_of(store_of(self.fs, self.path), Options().io_threads))


class _Entries:
    """Makes what the metadata say of each tensor."""

    def __init__(self, catalog: Mapping[str, Stored]) -> None:
        self._catalog = catalog

    def count(self) -> None:
        return None

    def has(self, key: Any) -> bool:
        return key in self._catalog

    def one(self, key: str) -> TensorStorageMetadata:
        stored = self._catalog[key]
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=to_torch(stored.dtype)),
            size=torch.Size(stored.shape),
            chunks=[ChunkStorageMetadata(torch.Size(c.box.offsets), torch.Size(c.box.sizes)) for c in stored.chunks],
        )

    def every(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        return ((key, self.one(key)) for key in self._catalog)


class _Places:
    """Makes where each chunk lies."""

    def __init__(self, catalog: Mapping[str, Stored]) -> None:
        self._catalog = catalog
        self._found: dict[str, dict[Ints, _HFStorageInfo]] = {}

    def count(self) -> None:
        return None

    def has(self, key: Any) -> bool:
        return self._find(key) is not None

    def one(self, key: MetadataIndex) -> _HFStorageInfo:
        found = self._find(key)
        if found is None:
            raise KeyError(key)
        return found

    def every(self) -> Iterator[tuple[MetadataIndex, _HFStorageInfo]]:
        for key, stored in self._catalog.items():
            for chunk in stored.chunks:
                yield MetadataIndex(key, chunk.box.offsets), _place_of(stored, chunk)

    def _find(self, key: Any) -> _HFStorageInfo | None:
        known = isinstance(key, MetadataIndex) or is_torchs(key, "MetadataIndex")
        if not known or key.offset is None or key.fqn not in self._catalog:
            return None
        if key.fqn not in self._found:
            stored = self._catalog[key.fqn]
            self._found[key.fqn] = {chunk.box.offsets: _place_of(stored, chunk) for chunk in stored.chunks}
        return self._found[key.fqn].get(tuple(key.offset))


def _place_of(stored: Stored, chunk: Chunk) -> _HFStorageInfo:
    return _HFStorageInfo(chunk.path, torch.Size(chunk.box.sizes), to_torch(stored.dtype))


def place_of(storage: Any) -> Store:
    """
    Return the store that a storage reads from or writes to.

    Raises:
        BrokenProtocol: somebody gave it a file system of their own, which is none.

    """
    store = store_of(storage.fs, storage.path)
    if store is None:
        raise BrokenProtocol(
            f"{type(storage).__name__}.fs is a {type(storage.fs).__qualname__}, which would not be asked: "
            "safetensors files are read and written as files of this machine, or as blobs of a store",
            hint="give the URL of the place, or use FsspecWriter and FsspecReader",
        )
    return store


def target_of(req: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    """
    Ask the planner for the tensor that a request fills.

    Raises:
        BrokenProtocol: (an AssertionError) it is not of the size of the box that fills it.

    """
    target = planner.resolve_tensor(req).detach()
    if tuple(target.shape) != tuple(req.lengths):
        raise BrokenProtocol(
            f"req {req.storage_index} mismatch sizes {target.size()} vs {torch.Size(req.lengths)}",
            key=req.dest_index.fqn,
        )
    return target


def in_batches(items: Sequence[ReadItem], planner: LoadPlanner) -> Iterable[Sequence[ReadItem]]:
    """Divide requests into lists of bounded size, for planners that make each tensor when it is asked for."""
    if getattr(type(planner), "resolve_tensor", None) is DefaultLoadPlanner.resolve_tensor:
        return [items]
    return batches(items, lambda req: torch.Size(req.lengths).numel() * _LARGEST_NBYTES)
