"""
The storage reader for Hugging Face models and for shards of them: only headers and wanted ranges are read.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import torch
from torch.futures import Future

from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.dtypes import DType, Ints, to_torch
from shardkeep.format.region import Box
from shardkeep.options import Options
from shardkeep.protocol.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.protocol.planners import LoadPlanner
from shardkeep.protocol.plans import LoadItemType, LoadPlan, ReadItem
from shardkeep.protocol.problems import BrokenProtocol, NoSuchValue
from shardkeep.run.workers import run_workers
from shardkeep.storages.file_reader import FileSystemReader
from shardkeep.storages.hugging_face_names import _HFStorageInfo
from shardkeep.storages.safetensors_catalog import Catalog, Chunk, read_catalog
from shardkeep.storages.safetensors_files import OpenFiles, SafetensorsFile, read_header
from shardkeep.storages.safetensors_handle import SafeFile
from shardkeep.storages.safetensors_publish import look
from shardkeep.storages.safetensors_reads import Want, read_boxes

_BATCH_ELEMENTS = 1 << 28
"""Tensors are asked of the planner, read and handed back in batches of this size: it may make each for the purpose."""


class HuggingFaceStorageReader(FileSystemReader):
    """Reads a Hugging Face model, or the shards of one, into a state."""

    def __init__(self, path: str, thread_count: int = 1) -> None:
        """
        Point to a directory.

        Args:
            path: holds the model.
            thread_count: how many threads to read with, at least.

        """
        super().__init__(path=path)
        self.thread_count = thread_count
        self._catalog: Catalog = {}
        self._chunks: dict[tuple[str, Ints], tuple[DType, Chunk]] = {}
        self._headers: dict[str, SafetensorsFile] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous load; the next one is from `checkpoint_id`, if given."""
        super().reset(checkpoint_id)
        self._catalog, self._chunks, self._headers = {}, {}, {}

    # -- what there is -------------------------------------------------------------------------------------------------

    def read_metadata(self) -> Metadata:
        """
        Describe what the directory holds. An index file, where there is one, says which files count.

        Raises:
            MalformedFile: the files are not one whole checkpoint.

        """
        self._catalog = read_catalog(look(self.path), threads=self._threads())
        self._chunks = {
            (key, chunk.box.offsets): (stored.dtype, chunk)
            for key, stored in self._catalog.items()
            for chunk in stored.chunks
        }
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, _HFStorageInfo] = {}
        for key, stored in self._catalog.items():
            dtype = to_torch(stored.dtype)
            chunks = [(torch.Size(c.box.offsets), torch.Size(c.box.sizes), c.path) for c in stored.chunks]
            entries[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype),
                size=torch.Size(stored.shape),
                chunks=[ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in chunks],
            )
            for offsets, sizes, path in chunks:
                places[MetadataIndex(key, offsets)] = _HFStorageInfo(path, sizes, dtype)
        return Metadata(entries, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))

    def stored_chunk(self, index: MetadataIndex) -> tuple[DType, Chunk]:
        """
        Find a chunk that an item names.

        Raises:
            NoSuchValue: there is none.

        """
        at: Ints = tuple(index.offset or ())
        found = self._chunks.get((index.fqn, at))
        if found is not None:
            return found
        # Metadata that another reader read: the file says the rest.
        info = (self.storage_data or {}).get(index)
        if info is None:
            raise NoSuchValue(f"the checkpoint has no chunk of {index.fqn!r} at {at}", key=index.fqn)
        header = self._header(info.relative_path)
        if index.fqn not in header.tensors:
            raise NoSuchValue(f"{info.relative_path} has no tensor {index.fqn!r}", key=index.fqn)
        part = header.tensors[index.fqn]
        return part.dtype, Chunk(header.path, part.start, Box(at, part.shape))

    def _header(self, path: str) -> SafetensorsFile:
        if path not in self._headers:
            self._headers[path] = read_header(path)
        return self._headers[path]

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner asks for, straight into its tensors where they allow it."""
        for req in plan.items:
            if req.type == LoadItemType.BYTE_IO:
                raise UnsupportedLeaf(
                    f"{req.dest_index.fqn!r} is no tensor, and Hugging Face files hold nothing else",
                    hint="leave it out of this load",
                    key=req.dest_index.fqn,
                )
        with closing(OpenFiles(direct=Options().direct_io)) as files:
            self._read(plan.items, planner, files)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, items: list[ReadItem], planner: LoadPlanner, files: OpenFiles) -> None:
        if type(self)._process_read_request is not HuggingFaceStorageReader._process_read_request:
            self._read_one_by_one(items, planner, files)
        else:
            self.read_plain(items, planner, files)

    def read_plain(self, items: Iterable[ReadItem], planner: LoadPlanner, files: OpenFiles) -> None:
        """Read items as they are stored, cast to the dtype of what they fill."""
        options = Options()
        for batch in batches(items):
            wants, filled = [], []
            for req in batch:
                dtype, chunk = self.stored_chunk(req.storage_index)
                target = planner.resolve_tensor(req).detach()
                check_size(req, target)
                direct = type(target) is torch.Tensor and not target.is_conj() and not target.is_neg()
                into = target if direct else torch.empty(tuple(req.lengths), dtype=to_torch(dtype))
                box = Box(tuple(req.storage_offsets), tuple(req.lengths))
                wants.append(Want(chunk.path, chunk.start, dtype, chunk.box.sizes, box, into))
                filled.append((req, target, into))
            read_boxes(wants, files, threads=self._threads(), budget_nbytes=options.host_budget_bytes)
            for req, target, into in filled:
                if into is not target:
                    target.copy_(into)
                planner.commit_tensor(req, target)

    # -- for readers that extend this one ------------------------------------------------------------------------------

    def _read_one_by_one(self, items: list[ReadItem], planner: LoadPlanner, files: OpenFiles) -> None:
        """Hand each request, with its open file, to `_process_read_request`."""
        per_file: dict[str, list[ReadItem]] = {}
        for req in items:
            per_file.setdefault(self.stored_chunk(req.storage_index)[1].path, []).append(req)

        def work(task: tuple[str, list[ReadItem]], _: memoryview) -> bool:
            handle = SafeFile(read_header(task[0]), files)
            for req in task[1]:
                self._process_read_request(handle, req, planner)
            return True

        threads = max(1, min(self.thread_count, len(per_file)))
        run_workers(per_file.items(), work, threads=threads, buffer_nbytes=0)

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        """Read one item from an open file."""
        index = tuple(slice(at, at + n) for at, n in zip(req.storage_offsets, req.lengths, strict=True))
        tensor = f.get_slice(req.storage_index.fqn)[index]
        target = planner.resolve_tensor(req).detach()
        check_size(req, target)
        target.copy_(tensor)
        planner.commit_tensor(req, target)

    def _read_files_from_queue(
        self, file_queue: queue.Queue[Any], result_queue: queue.Queue[Any], planner: LoadPlanner
    ) -> None:
        """Read files, each with its requests, until the queue is empty; put True into the other one for each."""
        with closing(OpenFiles(direct=Options().direct_io)) as files:
            while True:
                try:
                    path, requests = file_queue.get_nowait()
                except queue.Empty:
                    return
                handle = SafeFile(read_header(path), files)
                for req in requests:
                    self._process_read_request(handle, req, planner)
                result_queue.put(True)

    def _threads(self) -> int:
        return max(self.thread_count, Options().io_threads)


def check_size(req: ReadItem, target: torch.Tensor) -> None:
    """
    Make sure that a tensor is of the size of the box that fills it.

    Raises:
        BrokenProtocol: (an AssertionError) it is not.

    """
    if tuple(target.shape) != tuple(req.lengths):
        raise BrokenProtocol(
            f"req {req.storage_index} mismatch sizes {target.size()} vs {torch.Size(req.lengths)}",
            key=req.dest_index.fqn,
        )


def batches(items: Iterable[ReadItem]) -> Iterator[list[ReadItem]]:
    """Divide requests into lists of a bounded number of elements."""
    batch: list[ReadItem] = []
    total = 0
    for item in items:
        batch.append(item)
        total += torch.Size(item.lengths).numel()
        if total >= _BATCH_ELEMENTS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
