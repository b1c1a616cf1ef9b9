"""
The storage readers for Hugging Face models and their shards: only headers and the requested ranges are read.

Quantized tensors are dequantized while they are read. There are two forms: 8-bit weights with one scale for each square
block, and 4-bit values (MXFP4) with one exponent for each group. Numbers are bit for bit those of torch's reader. A
request is cut into strips, which several threads read and dequantize, so memory is a few strips and the scales.
Requests may begin inside a block, and quantized tensors may be stored in shards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.futures import Future

from shardkeep.dcp._impl.file_reader import FileSystemReader, batches_for, fill_targets, target_of
from shardkeep.dcp._impl.hf_files import _HFStorageInfo
from shardkeep.engine.fill import ChunkRequest, fill_items
from shardkeep.engine.safetensors_source import CatalogChunk, CatalogEntry, read_catalog, read_weight_map
from shardkeep.engine.torch_source import ItemFiles
from shardkeep.engine.workers import WINDOW_NBYTES, run_workers
from shardkeep.errors import BadValue, BrokenProtocol, MalformedFile, UnsupportedLeaf
from shardkeep.format.boxes import Box, intersect, parse_index, relative, slices, whole
from shardkeep.format.dtypes import DType, Ints, to_torch
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.safetensors import HeaderTensor, SafetensorsFile, read_header
from shardkeep.layouts.safetensors_publish import list_model
from shardkeep.layouts.torch import ItemLocation
from shardkeep.options import Options
from shardkeep.storage.base import ReadableStore, Store, preferred_requests
from shardkeep.storage.file_systems import by_store, is_local, keeps, store_of
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
        picks = parse_index(self._key, part.shape, index)
        if any(pick.step != 1 for pick in picks):
            raise MalformedFile("only slices of step 1 can be read", file=self._path)
        box = Box(tuple(pick.start for pick in picks), tuple(pick.count for pick in picks))
        found = torch.empty(box.sizes, dtype=to_torch(part.dtype), device="cpu")
        chunk = CatalogChunk(self._path, part.start, whole(part.shape))
        read = chunk_request(self._key, part.dtype, chunk, box, found)
        threads = max(1, min(Options().io_threads, found.nbytes // WINDOW_NBYTES))
        fill_items(ItemFiles(self._opens, {}), [read], Options(io_threads=threads))
        return found[tuple(0 if pick.drop else slice(None) for pick in picks)]


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
            cast("dict[str, Any]", _OnAccess(chunks.entry, lambda: iter(catalog))),
            storage_data=_OnAccess(chunks.location, chunks.indices),
            storage_meta=protocol.StorageMeta(load_id=self.load_id),
        )
        return protocol.to_classes_of_caller(metadata)

    def stored_chunk(self, index: protocol.MetadataIndex) -> tuple[DType, CatalogChunk]:
        """Return the chunk that an index names, and its dtype; `BadValue` if it does not exist."""
        at: Ints = tuple(index.offset or ())
        chunk = self._chunks.at(index.fqn, at)
        info = self.storage_data.get(index)
        if chunk is not None and (info is None or info.relative_path == chunk[1].path):
            return chunk
        # The metadata were read by another reader, or changed: look into the file.
        if info is None:
            raise BadValue(f"the checkpoint has no chunk of {index.fqn!r} at {at}", key=index.fqn)
        if info.relative_path not in self._headers:
            self._headers[info.relative_path] = read_header(info.relative_path, self._opens())
        header = self._headers[info.relative_path]
        if index.fqn not in header.tensors:
            raise BadValue(f"{info.relative_path} has no tensor {index.fqn!r}", key=index.fqn)
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
        if keeps(self, HuggingFaceStorageReader, _HOOKS):
            self.read_plain(items, planner)
        else:
            self._read_one_by_one(items, planner)

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
    """A mapping whose values are made on access, and its keys when all are needed; once it is changed, all are made."""

    def __init__(self, make: Callable[[Any], Any], keys: Callable[[], Iterator[Any]]) -> None:
        self._make, self._keys = make, keys
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
        return any(True for _ in self)


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


# -- quantized models --------------------------------------------------------------------------------------------------

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen codes of a 4-bit float (E2M1)."""
_EXPONENT_BIAS = 127
_SCALE_SUFFIX, _WEIGHT_SUFFIX = ".weight_scale_inv", ".weight"
_SCALES_SUFFIX, _BLOCKS_SUFFIX = "_scales", "_blocks"
_STRIP_ELEMENTS = 512 << 10
"""A thread holds this many numbers in a few dtypes: some MiB."""
_MOST_SCALES = 4
"""Tensors whose scales are kept for the next strips."""
_QUANTIZED_HOOKS = (
    "_process_read_request",
    "_read_files_from_queue",
    "_read_quantized_tensor_with_block_alignment",
    "_get_slice_to_block_mapping",
    "_dequantize_tensor",
    "_dequantize_tensor_mxfp4",
)
"""Torch's methods that a subclass may override; whole requests then go through them, as in torch."""


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """
    Reads quantized tensors as plain numbers, and all others as they are.

    Quantized tensors are weights with `NAME.weight_scale_inv` beside `NAME.weight` (one scale for each block of
    `block_size` rows and columns), and `NAME_blocks` with `NAME_scales` (MXFP4).
    """

    def __init__(
        self, path: str, thread_count: int = 1, target_dtype: torch.dtype = torch.float32, block_size: int = 128
    ) -> None:
        """
        Point to a directory.

        Args:
            path: holds the model.
            thread_count: how many threads to read with, at least.
            target_dtype: the dtype that numbers are made in, before they are copied to what they fill.
            block_size: rows and columns of a block that has one scale.

        """
        super().__init__(path=path, thread_count=thread_count)
        self.target_dtype: torch.dtype = target_dtype
        self.block_size: int = block_size
        self._weight_scale_mapping: dict[str, str] = {}
        self._weight_map: dict[str, str] = {}
        self._tensor_full_shapes: dict[str, torch.Size] = {}
        self._scales: dict[str, torch.Tensor] = {}
        self._scales_lock = threading.Lock()

    # -- metadata ------------------------------------------------------------------------------------------------------

    def read_metadata(self) -> protocol.Metadata:
        """Describe the tensors of the directory: quantized ones with the size and dtype they are read as."""
        metadata = super().read_metadata()
        # Made on access until here; below they are changed.
        metadata.state_dict_metadata = dict(metadata.state_dict_metadata)
        metadata.storage_data = dict(metadata.storage_data)
        self._scales = {}
        self._load_quantization_metadata()
        for key, entry in metadata.state_dict_metadata.items():
            stored = self._catalog[key]
            self._tensor_full_shapes[key] = torch.Size(stored.shape)
            if not self._is_tensor_quantized(key):
                continue
            entry.properties.dtype = self.target_dtype  # type: ignore[union-attr]  # all are tensors
            if key.endswith(_BLOCKS_SUFFIX):
                self._tensor_full_shapes[key + "_quantized"] = torch.Size(stored.shape)
                self._tensor_full_shapes[key] = self._describe_expanded(key, stored, metadata)
        return metadata

    def _describe_expanded(self, key: str, stored: CatalogEntry, metadata: protocol.Metadata) -> torch.Size:
        """Give the metadata of packed groups the sizes of the values in them; torch leaves the chunks as they are."""
        if len(stored.shape) < 2:
            raise MalformedFile(f"{key!r} has shape {list(stored.shape)}, and not one of groups of bytes", key=key)
        *lead, groups, width = stored.shape
        entry: Any = metadata.state_dict_metadata[key]
        values = 2 * width
        entry.size = torch.Size([*lead, groups * values])
        entry.chunks = []
        for chunk in stored.chunks:
            if chunk.box.sizes[-1] != stored.shape[-1]:
                raise MalformedFile(f"{chunk.path}: {key!r} is cut inside its groups", file=chunk.path, key=key)
            *at, group, _ = chunk.box.offsets
            *sizes, groups, _ = chunk.box.sizes
            offsets = torch.Size([*at, group * values])
            entry.chunks.append(protocol.ChunkStorageMetadata(offsets, torch.Size([*sizes, groups * values])))
            metadata.storage_data[protocol.MetadataIndex(key, offsets)] = _HFStorageInfo(
                chunk.path, torch.Size(chunk.box.sizes), to_torch(stored.dtype)
            )
        size: torch.Size = entry.size
        return size

    def _load_quantization_metadata(self) -> None:
        """Find the quantized tensors by the names in the index file or, without one, in the files."""
        folder = list_model(storage_place(self))
        if folder.index is not None:
            homes = read_weight_map(folder.index, folder.opens)
        else:
            homes = {key: os.path.basename(stored.chunks[0].path) for key, stored in self._catalog.items()}
        self._build_weight_scale_mapping(homes)

    def _build_weight_scale_mapping(self, weight_map: dict[str, str]) -> None:
        """Keep the file of each tensor, and pair quantized tensors with their scales."""
        self._weight_map = weight_map
        self._weight_scale_mapping = {}
        for scale, weight in ((_SCALE_SUFFIX, _WEIGHT_SUFFIX), (_SCALES_SUFFIX, _BLOCKS_SUFFIX)):
            for name in weight_map:
                partner = name.removesuffix(scale) + weight
                if name.endswith(scale) and partner in weight_map:
                    self._weight_scale_mapping[partner] = name

    def _is_tensor_quantized(self, tensor_fqn: str) -> bool:
        if tensor_fqn.endswith((_SCALE_SUFFIX, _SCALES_SUFFIX)):
            return False
        return tensor_fqn in self._weight_scale_mapping

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(self, items: list[protocol.ReadItem], planner: protocol.LoadPlanner) -> None:
        if not keeps(self, QuantizedHuggingFaceStorageReader, _QUANTIZED_HOOKS):
            self._read_one_by_one(items, planner)
            return
        quantized = [req for req in items if self._is_tensor_quantized(req.storage_index.fqn)]
        for key in dict.fromkeys(req.storage_index.fqn for req in quantized):
            self._check(key)  # before anything is filled
        chosen = set(map(id, quantized))
        self.read_plain([req for req in items if id(req) not in chosen], planner)

        for batch in batches_for(planner, quantized, most_nbytes):
            fill_targets(batch, planner, partial(self._fill_dequantized, batch))

    def _fill_dequantized(self, batch: Sequence[protocol.ReadItem], targets: Sequence[torch.Tensor]) -> None:
        cut = (
            (req, target, strip)
            for req, target in zip(batch, targets, strict=True)
            for strip in strips(tuple(req.lengths), _STRIP_ELEMENTS)
        )

        def work(task: tuple[protocol.ReadItem, torch.Tensor, Box], _: memoryview) -> bool:
            req, target, strip = task
            offsets = torch.Size(a + b for a, b in zip(req.storage_offsets, strip.offsets, strict=True))
            part = dataclasses.replace(req, storage_offsets=offsets, lengths=torch.Size(strip.sizes))
            target[slices(strip)].copy_(self._read_quantized_tensor_with_block_alignment(part, None))
            return True

        run_workers(cut, work, threads=self._threads(), buffer_nbytes=0)

    def _check(self, key: str) -> None:
        """Make sure that there are scales for all of a quantized tensor."""
        if key not in self._catalog:  # the metadata were read by another reader
            self.read_metadata()
        scale_key = self._weight_scale_mapping[key]
        for name in (key, scale_key):
            if name not in self._catalog:
                raise MalformedFile(f"{self.path}: there is no tensor {name!r}, which {key!r} needs", key=name)
        shape, scales = self._catalog[key].shape, self._catalog[scale_key].shape
        packed = key.endswith(_BLOCKS_SUFFIX)
        if not packed and len(shape) != 2:
            raise MalformedFile(
                f"{key!r} has scales for blocks of a matrix, and {len(shape)} axes: Unsupported quantization types",
                key=key,
            )
        needed = shape[:-1] if packed else tuple(-(-n // self.block_size) for n in shape)
        if len(scales) != len(needed) or any(a < b for a, b in zip(scales, needed, strict=True)):
            raise MalformedFile(
                f"{scale_key!r} has shape {list(scales)}, and {key!r} needs {list(needed)}",
                hint="" if packed else f"is block_size={self.block_size} what the model was quantized with?",
                key=scale_key,
            )

    def _read_box(self, key: str, box: Box) -> torch.Tensor:
        """Read a box as it is stored, from all files that hold parts of it."""
        stored = self._catalog[key]
        found = torch.empty(box.sizes, dtype=to_torch(stored.dtype), device="cpu")
        requests = [
            chunk_request(key, stored.dtype, chunk, relative(common, chunk.box), found[slices(relative(common, box))])
            for chunk in stored.chunks
            if (common := intersect(chunk.box, box)) is not None
        ]
        fill_items(ItemFiles(self._opens(), {}), requests, Options(io_threads=1))
        return found

    def _read_scales(self, key: str) -> torch.Tensor:
        """Read all scales of a quantized tensor; those of the last few tensors are kept."""
        name = self._weight_scale_mapping[key]
        with self._scales_lock:
            if name not in self._scales:
                if len(self._scales) >= _MOST_SCALES:
                    del self._scales[next(iter(self._scales))]
                self._scales[name] = self._read_box(name, whole(self._catalog[name].shape))
            return self._scales[name]

    # -- torch's steps -------------------------------------------------------------------------------------------------

    def _process_read_request(self, f: Any, req: protocol.ReadItem, planner: protocol.LoadPlanner) -> None:
        """Read one request; `f` is its open file, which may not hold all that a quantized tensor needs."""
        if not self._is_tensor_quantized(req.storage_index.fqn):
            super()._process_read_request(f, req, planner)
            return
        target = target_of(req, planner)
        target.copy_(self._read_quantized_tensor_with_block_alignment(req, f))
        planner.commit_tensor(req, target)

    def _read_quantized_tensor_with_block_alignment(self, req: protocol.ReadItem, safetensor_file: Any) -> torch.Tensor:
        """Return the numbers of a request; other files than its own may be read for them."""
        key = req.storage_index.fqn
        self._check(key)
        # Where the request begins in the whole tensor, of which the stored chunk may be a shard.
        chunk = tuple(req.storage_index.offset or ())
        if len(chunk) != len(req.storage_offsets):
            chunk = (0,) * len(req.storage_offsets)  # torch's index of packed groups has one axis more
        begin = torch.Size(a + b for a, b in zip(chunk, req.storage_offsets, strict=True))
        req = dataclasses.replace(req, storage_offsets=begin)
        box = Box(tuple(req.storage_offsets), tuple(req.lengths))
        scales = self._read_scales(key)
        shape = self._catalog[key].shape
        if not key.endswith(_BLOCKS_SUFFIX):
            mapping = self._get_slice_to_block_mapping(req)
            return self._dequantize_tensor(self._read_box(key, box), scales, torch.Size(shape), mapping)
        values = 2 * shape[-1]
        first, last = box.offsets[-1] // values, -(-(box.offsets[-1] + box.sizes[-1]) // values)
        groups = Box((*box.offsets[:-1], first, 0), (*box.sizes[:-1], last - first, shape[-1]))
        inside = box.offsets[-1] - first * values
        return self._dequantize_tensor_mxfp4(self._read_box(key, groups), scales, req, first, inside)

    def _get_slice_to_block_mapping(
        self, req: protocol.ReadItem
    ) -> tuple[tuple[int, int], tuple[int, int], slice, slice]:
        """Return the blocks that a request touches, from the first to after the last, and its rows and columns."""
        starts, counts = tuple(req.storage_offsets), tuple(req.lengths)
        rows, columns = (
            (at // self.block_size, -(-(at + n) // self.block_size)) for at, n in zip(starts, counts, strict=True)
        )
        row_slice, column_slice = slices(Box(starts, counts))
        return rows, columns, row_slice, column_slice

    def _dequantize_tensor(
        self,
        weight: torch.Tensor,
        scale_inv: torch.Tensor,
        full_tensor_shape: torch.Size,
        slice_info: tuple[tuple[int, int], tuple[int, int], slice, slice],
    ) -> torch.Tensor:
        """Multiply a part of a matrix by the scales of its blocks, in float32, given all scales."""
        rows, columns = (
            torch.arange(part.start, part.start + n, device=weight.device) // self.block_size
            for part, n in zip(slice_info[2:], weight.shape, strict=True)
        )
        found = weight.to(torch.float32, copy=True)
        found *= scale_inv.to(torch.float32)[rows][:, columns]
        return found.to(self.target_dtype)

    def _dequantize_tensor_mxfp4(
        self,
        blocks: torch.Tensor,
        scales: torch.Tensor,
        req: protocol.ReadItem,
        group_start: int,
        offset_in_first_group: int,
    ) -> torch.Tensor:
        """Return the values of a request, given whole groups of them and all scales."""
        lead = tuple(slice(at, at + n) for at, n in zip(req.storage_offsets[:-1], req.lengths[:-1], strict=True))
        index = (*lead, slice(group_start, group_start + blocks.shape[-2]))
        values = expand_groups(blocks, scales[index], self.target_dtype)
        return values[..., offset_in_first_group : offset_in_first_group + req.lengths[-1]]


def expand_groups(blocks: torch.Tensor, scales: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Return the numbers of groups of 4-bit values, two to a byte, low half first; scales are exponents with a bias of 127."""
    table = torch.tensor(FP4_VALUES, dtype=to, device=blocks.device)
    found = torch.empty(*blocks.shape, 2, dtype=to, device=blocks.device)
    found[..., 0] = table[(blocks & 0x0F).to(torch.int64)]
    found[..., 1] = table[(blocks >> 4).to(torch.int64)]
    found = found.flatten(-2)
    torch.ldexp(found, (scales.to(torch.int32) - _EXPONENT_BIAS).unsqueeze(-1), out=found)
    return found.flatten(-2)


def strips(sizes: Ints, most: int) -> Iterator[Box]:
    """Cut a box of these sizes into boxes of at most `most` elements, in row-major order."""
    if not math.prod(sizes):
        return
    steps: list[int] = []
    for size in reversed(sizes):
        steps.insert(0, max(1, min(size, most // math.prod(steps))))
    for start in itertools.product(*(range(0, size, step) for size, step in zip(sizes, steps, strict=True))):
        yield Box(start, tuple(min(step, size - at) for at, size, step in zip(start, sizes, steps, strict=True)))
