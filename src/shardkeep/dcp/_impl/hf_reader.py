"""
The storage readers for Hugging Face models and their shards: only headers and the requested ranges are read.

The steps are torch's, so that subclasses can override them. Memory is a strip for each thread. Quantized tensors are
dequantized while they are read, bit for bit as by torch's reader; requests may begin inside a block, and quantized
tensors may be stored in shards.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import queue
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.futures import Future

from shardkeep.dcp._impl.file_reader import FileSystemReader, completed, target_of
from shardkeep.engine.fill import ChunkRequest, fill_items
from shardkeep.engine.safetensors_source import CatalogChunk, CatalogEntry, read_catalog, read_weight_map
from shardkeep.engine.torch_source import ItemFiles
from shardkeep.engine.workers import run_workers
from shardkeep.errors import BadValue, BrokenProtocol, MalformedFile, UnsupportedLeaf
from shardkeep.format.boxes import Box, flat_range_to_boxes, intersect, parse_index, relative, slices, whole
from shardkeep.format.data_file import MAX_HEADER_NBYTES
from shardkeep.format.dtypes import DTYPES, DType, to_torch
from shardkeep.layouts import safetensors
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.safetensors import HeaderTensor, SafetensorsFile, read_header
from shardkeep.layouts.safetensors_publish import list_model
from shardkeep.layouts.torch import ItemLocation
from shardkeep.options import Options
from shardkeep.storage.base import ReadableStore, preferred_requests, with_any_names
from shardkeep.storage.file_systems import by_store, store_of

# -- names of torch's that describe the files --------------------------------------------------------------------------

DTYPE_MAP: dict[str, torch.dtype] = {
    row.safetensors: getattr(torch, row.name)
    for row in DTYPES
    if row.safetensors is not None and hasattr(torch, row.name)
}
"""All dtypes that safetensors and the installed torch have; torch's own table lacks bool, fp8 and unsigned ones."""


@dataclass
class _HFStorageInfo:
    relative_path: str
    """As in torch, the whole path of the file."""
    shape: torch.Size
    dtype: torch.dtype


def _get_safetensors_file_metadata(file_bytes: io.IOBase) -> tuple[Any, int]:
    """Read the header from the beginning of a stream; return it and the bytes that it and its length take."""
    read = file_bytes.read
    length = read(safetensors.NUM_BYTES_FOR_HEADER_LEN)
    if len(length) != safetensors.NUM_BYTES_FOR_HEADER_LEN:
        raise MalformedFile(f"a safetensors file of {len(length)} bytes: not even the length of a header")
    nbytes: int = struct.unpack("<Q", length)[0]
    if nbytes > MAX_HEADER_NBYTES:
        raise MalformedFile(f"a header of {nbytes} bytes, more than the {MAX_HEADER_NBYTES} that safetensors allows")
    return json.loads(read(nbytes)), nbytes + safetensors.NUM_BYTES_FOR_HEADER_LEN


def _get_dtype(dtype_str: str) -> torch.dtype:
    """Return the torch dtype for one of safetensors; the default dtype if torch has none."""
    return DTYPE_MAP.get(dtype_str, torch.get_default_dtype())


def _get_dcp_custom_metadata(metadata: Any) -> Any | None:
    """Return the offsets of each tensor in its whole tensor, which a header of shards has; else None."""
    said = metadata.get(safetensors.DEFAULT_EXTRA_METADATA_KEY, {})
    return json.loads(said[safetensors.CUSTOM_METADATA_KEY]) if safetensors.CUSTOM_METADATA_KEY in said else None


def no_tensor(key: str, hint: str = "leave it out of this save, or save it with FileSystemWriter") -> UnsupportedLeaf:
    return UnsupportedLeaf(f"{key!r} is no tensor, and Hugging Face files hold nothing else", hint=hint, key=key)


class SafeFile:
    """An open file with the methods of `safetensors.safe_open`, for subclasses of the reader."""

    def __init__(self, file: SafetensorsFile, opens: ReadableStore) -> None:
        self._file = file
        self._opens = opens

    def keys(self) -> list[str]:
        return list(self._file.tensors)

    def metadata(self) -> dict[str, str] | None:
        return self._file.metadata or None

    def get_slice(self, name: str) -> SafeSlice:
        if name not in self._file.tensors:
            raise MalformedFile.of(self._file.path, f"there is no tensor {name!r}", key=name)
        return SafeSlice(self._opens, self._file.path, name, self._file.tensors[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[...]


class SafeSlice:
    """A stored tensor of which only the requested part is read."""

    def __init__(self, opens: ReadableStore, path: str, key: str, part: HeaderTensor) -> None:
        self._opens, self._path, self._key, self._part = opens, path, key, part

    def get_shape(self) -> list[int]:
        return list(self._part.shape)

    def get_dtype(self) -> str:
        return str(self._part.dtype.safetensors)

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self._part
        picks = parse_index(self._key, part.shape, index)
        if any(pick.step != 1 for pick in picks):
            raise MalformedFile("only slices of step 1 can be read", file=self._path)
        box = Box(tuple(pick.start for pick in picks), tuple(pick.count for pick in picks))
        chunk = CatalogChunk(self._path, part.start, whole(part.shape))
        found = read_box(self._opens, self._key, part.dtype, [chunk], box)
        return found[tuple(0 if pick.drop else slice(None) for pick in picks)]


def read_box(opens: ReadableStore, key: str, dtype: DType, chunks: Sequence[CatalogChunk], box: Box) -> torch.Tensor:
    """Read a box of a tensor as it is stored, from all chunks that hold parts of it."""
    found = torch.empty(box.sizes, dtype=to_torch(dtype), device="cpu")
    requests = []
    for chunk in chunks:
        if (common := intersect(chunk.box, box)) is not None:
            location = ItemLocation(chunk.path, chunk.start, chunk.box.volume * dtype.itemsize, chunk.start, ())
            into = found[slices(relative(common, box))]
            requests.append(ChunkRequest(location, key, chunk.box.sizes, dtype, relative(common, chunk.box), into))
    fill_items(ItemFiles(opens, {}), requests, Options(io_threads=1))
    return found


_STRIP_ELEMENTS = 2 << 20
"""Elements of a strip, which is held in a few dtypes: some tens of MiB."""
_MOST_REQUESTS = 32
"""Of one file that a thread reads before it takes others."""


class HuggingFaceStorageReader(FileSystemReader):
    """Reads a Hugging Face model, or the shards of one, into a state."""

    _foreign = False

    def __init__(self, path: str, thread_count: int = 1) -> None:
        """Point to a directory, or the URL of a place, to read with at least so many threads."""
        super().__init__(path=path)
        self.fs, self.path = by_store(self.fs, self.path)
        self.thread_count = thread_count
        self._catalog: Mapping[str, CatalogEntry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self.fs, self.path = by_store(self.fs, self.path)
        self._catalog = {}

    def read_metadata(self) -> protocol.Metadata:
        """Describe the tensors of the directory; an index file, if there is one, says which files count."""
        self._catalog = read_catalog(list_model(self.open_store()), threads=self._threads())
        entries: dict[str, Any] = {}
        places: dict[protocol.MetadataIndex, _HFStorageInfo] = {}
        for key, stored in self._catalog.items():
            boxes, dtype = [chunk.box for chunk in stored.chunks], to_torch(stored.dtype)
            chunks = [protocol.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            properties = protocol.TensorProperties(dtype=dtype)
            entries[key] = protocol.TensorStorageMetadata(properties, torch.Size(stored.shape), chunks)
            for chunk in stored.chunks:
                index = protocol.MetadataIndex(key, chunk.box.offsets)
                places[index] = self._storage_info(chunk, dtype)
        meta = protocol.StorageMeta(load_id=self.load_id)
        return protocol.to_classes_of_caller(protocol.Metadata(entries, storage_data=places, storage_meta=meta))

    def _storage_info(self, chunk: CatalogChunk, dtype: torch.dtype) -> _HFStorageInfo:
        path = os.fspath(self.fs.concat_path(self.path, chunk.path))
        return _HFStorageInfo(path, torch.Size(chunk.box.sizes), dtype)

    def read_data(self, plan: protocol.LoadPlan, planner: protocol.LoadPlanner) -> Future[None]:
        self.open_store()
        per_file: dict[str, list[protocol.ReadItem]] = {}
        for req in plan.items:
            key, info = req.dest_index.fqn, self.storage_data.get(req.storage_index)
            if req.type == protocol.LoadItemType.BYTE_IO:
                raise no_tensor(key, "leave it out of this load")
            if info is None:
                raise BadValue(f"the checkpoint has no chunk {req.storage_index}", key=key)
            per_file.setdefault(info.relative_path, []).append(req)
        waiting: queue.Queue[Any] = queue.Queue()
        done: queue.Queue[Any] = queue.Queue()
        for path, requests in per_file.items():
            for at in range(0, len(requests), _MOST_REQUESTS):
                waiting.put((path, requests[at : at + _MOST_REQUESTS]))
        count = waiting.qsize()

        def work(_: int, __: memoryview) -> bool:
            self._read_files_from_queue(waiting, done, planner)
            return True

        threads = max(1, min(self._threads(), count))
        run_workers(range(threads), work, threads=threads, buffer_nbytes=0)
        if done.qsize() != count:
            raise BrokenProtocol(
                f"Not all files were processed: {done.qsize()} out of {count}",
                hint="_read_files_from_queue must put a value into its second queue for each file",
            )
        return completed(None)

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
            handle = SafeFile(read_header(os.path.basename(path), opens), opens)
            for req in requests:
                self._process_read_request(handle, req, planner)
            result_queue.put(True)

    def _process_read_request(self, f: Any, req: protocol.ReadItem, planner: protocol.LoadPlanner) -> None:
        """Read one request from its open file; what it reads is converted to the dtype of the target."""
        target = target_of(req, planner)
        sizes, volume = tuple(req.lengths), math.prod(req.lengths)
        for start in range(0, volume, _STRIP_ELEMENTS):
            for strip in flat_range_to_boxes(sizes, start, min(start + _STRIP_ELEMENTS, volume)):
                offsets = torch.Size(a + b for a, b in zip(req.storage_offsets, strip.offsets, strict=True))
                part = dataclasses.replace(req, storage_offsets=offsets, lengths=torch.Size(strip.sizes))
                target[slices(strip)].copy_(self._read_strip(f, part))
        planner.commit_tensor(req, target)

    def _read_strip(self, f: Any, req: protocol.ReadItem) -> torch.Tensor:
        index = slices(Box(tuple(req.storage_offsets), tuple(req.lengths)))
        found: torch.Tensor = f.get_slice(req.storage_index.fqn)[index]
        return found

    def _opens(self) -> ReadableStore:
        return with_any_names(self.open_store())

    def _threads(self) -> int:
        return max(self.thread_count, preferred_requests(store_of(self.fs, self.path), Options().io_threads))


# -- quantized models --------------------------------------------------------------------------------------------------

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen codes of a 4-bit float (E2M1)."""
_EXPONENT_BIAS = 127
_SCALE_SUFFIX, _WEIGHT_SUFFIX = ".weight_scale_inv", ".weight"
_SCALES_SUFFIX, _BLOCKS_SUFFIX = "_scales", "_blocks"


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """
    Reads quantized tensors as plain numbers, and all others as they are.

    Quantized tensors are weights with `NAME.weight_scale_inv` beside `NAME.weight` (one scale for each block of
    `block_size` rows and columns), and `NAME_blocks` with `NAME_scales` (MXFP4).
    """

    def __init__(
        self, path: str, thread_count: int = 1, target_dtype: torch.dtype = torch.float32, block_size: int = 128
    ) -> None:
        """Point to a model; numbers are made in `target_dtype`, before they are copied to what they fill."""
        super().__init__(path=path, thread_count=thread_count)
        self.target_dtype: torch.dtype = target_dtype
        self.block_size: int = block_size
        self._weight_scale_mapping: dict[str, str] = {}
        self._weight_map: dict[str, str] = {}
        self._tensor_full_shapes: dict[str, torch.Size] = {}
        self._scales = "", torch.empty(0)
        """The name and the values of the scales that were read last, for the next strip."""

    def read_metadata(self) -> protocol.Metadata:
        """Describe the tensors of the directory: quantized ones with the size and dtype they are read as."""
        metadata = super().read_metadata()
        self._scales = "", torch.empty(0)
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
                raise MalformedFile.of(chunk.path, f"{key!r} is cut inside its groups", key=key)
            *at, group, _ = chunk.box.offsets
            *sizes, groups, _ = chunk.box.sizes
            offsets = torch.Size([*at, group * values])
            entry.chunks.append(protocol.ChunkStorageMetadata(offsets, torch.Size([*sizes, groups * values])))
            index = protocol.MetadataIndex(key, offsets)
            metadata.storage_data[index] = self._storage_info(chunk, to_torch(stored.dtype))
        size: torch.Size = entry.size
        return size

    def _load_quantization_metadata(self) -> None:
        """Find the quantized tensors by the names in the index file or, without one, in the files."""
        folder = list_model(self.open_store())
        files = {key: stored.chunks[0].path for key, stored in self._catalog.items()}
        self._build_weight_scale_mapping(read_weight_map(folder.index, folder.opens) if folder.index else files)

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

    def read_data(self, plan: protocol.LoadPlan, planner: protocol.LoadPlanner) -> Future[None]:
        for key in {req.storage_index.fqn: None for req in plan.items}:
            if self._is_tensor_quantized(key):
                self._check(key)
        return super().read_data(plan, planner)

    def _check(self, key: str) -> None:
        scale_key = self._weight_scale_mapping[key]
        for name in (key, scale_key):
            if name not in self._catalog:
                raise MalformedFile(f"{self.path}: there is no tensor {name!r}, which {key!r} needs", key=name)
        shape, scales = self._catalog[key].shape, self._catalog[scale_key].shape
        packed = key.endswith(_BLOCKS_SUFFIX)
        if not packed and len(shape) != 2:
            why = f"{key!r} has scales for blocks of a matrix, and {len(shape)} axes: Unsupported quantization types"
            raise MalformedFile(why, key=key)
        needed = shape[:-1] if packed else tuple(-(-n // self.block_size) for n in shape)
        if len(scales) != len(needed) or any(a < b for a, b in zip(scales, needed, strict=True)):
            raise MalformedFile(
                f"{scale_key!r} has shape {list(scales)}, and {key!r} needs {list(needed)}",
                hint="" if packed else f"is block_size={self.block_size} what the model was quantized with?",
                key=scale_key,
            )

    def _read_box(self, key: str, box: Box) -> torch.Tensor:
        stored = self._catalog[key]
        return read_box(self._opens(), key, stored.dtype, stored.chunks, box)

    def _read_scales(self, key: str) -> torch.Tensor:
        name, last = self._weight_scale_mapping[key], self._scales
        if last[0] != name:
            last = self._scales = name, self._read_box(name, whole(self._catalog[name].shape))
        return last[1]

    # -- torch's steps -------------------------------------------------------------------------------------------------

    def _read_strip(self, f: Any, req: protocol.ReadItem) -> torch.Tensor:
        if self._is_tensor_quantized(req.storage_index.fqn):
            return self._read_quantized_tensor_with_block_alignment(req, f)
        return super()._read_strip(f, req)

    def _read_quantized_tensor_with_block_alignment(self, req: protocol.ReadItem, safetensor_file: Any) -> torch.Tensor:
        """Return the numbers of a request; other files than its own may be read for them."""
        key = req.storage_index.fqn
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
