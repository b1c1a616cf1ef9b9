"""
The storage reader for quantized Hugging Face models: what it fills gets plain numbers.

A request is read and dequantized strip by strip, on several threads, which hold a few strips each. Requests may begin
inside a block, and quantized tensors may be stored in shards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from shardkeep.dcp._impl.hf_files import _HFStorageInfo
from shardkeep.dcp._impl.hf_reader import (
    HuggingFaceStorageReader,
    chunk_request,
    in_batches,
    storage_place,
    target_tensor,
)
from shardkeep.engine.fill import ChunkRequest, fill_items
from shardkeep.engine.safetensors_source import CatalogEntry, read_weight_map
from shardkeep.engine.torch_source import ItemFiles
from shardkeep.engine.workers import run_workers
from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import Box, Ints, intersect, relative, slices, whole
from shardkeep.format.dtypes import to_torch
from shardkeep.layouts.safetensors_publish import list_model
from shardkeep.layouts.torch_values import ChunkStorageMetadata, LoadPlanner, Metadata, MetadataIndex, ReadItem
from shardkeep.options import Options

# From quantized numbers to plain ones, any part of a tensor at a time, bit for bit as torch's reader makes them.
#
# Two forms: 8-bit weights with one scale for each square block, and 4-bit values (MXFP4) with one exponent for each
# group.

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen codes of a 4-bit float (E2M1) stand for."""
_EXPONENT_BIAS = 127


def block_ranges(box: Box, block_size: int) -> Box:
    """Return the box of scales that a box of weights needs."""
    first = tuple(start // block_size for start in box.offsets)
    last = tuple(-(-(start + n) // block_size) for start, n in zip(box.offsets, box.sizes, strict=True))
    return Box(first, tuple(b - a for a, b in zip(first, last, strict=True)))


def scale_blocks(
    weight: torch.Tensor, scales: torch.Tensor, box: Box, block_size: int, to: torch.dtype
) -> torch.Tensor:
    """
    Multiply a part of a matrix by the scales of its blocks, in float32.

    Args:
        weight: the part.
        scales: of the blocks that `block_ranges` says.
        box: where the part lies in its matrix; it may begin and end inside blocks.
        block_size: rows and columns of a block.
        to: the dtype of the result.

    """
    rows, columns = (
        torch.arange(start, start + n, device=weight.device) // block_size - start // block_size
        for start, n in zip(box.offsets, box.sizes, strict=True)
    )
    found = weight.to(torch.float32, copy=True)
    found *= scales.to(torch.float32)[rows][:, columns]
    return found.to(to)


def groups_of(box: Box, group_values: int) -> tuple[int, int]:
    """Return the groups that hold a box of values: the first one, and the one after the last."""
    start, count = box.offsets[-1], box.sizes[-1]
    return start // group_values, -(-(start + count) // group_values)


def expand_groups(blocks: torch.Tensor, scales: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """
    Turn groups of 4-bit values into numbers; two to a byte, the low half first.

    Args:
        blocks: bytes, of shape [..., groups, bytes].
        scales: exponents with a bias of 127, of shape [..., groups].
        to: the dtype of the result, of shape [..., groups * bytes * 2].

    """
    table = torch.tensor(FP4_VALUES, dtype=to, device=blocks.device)
    found = torch.empty(*blocks.shape, 2, dtype=to, device=blocks.device)
    found[..., 0] = table[(blocks & 0x0F).to(torch.int64)]
    found[..., 1] = table[(blocks >> 4).to(torch.int64)]
    found = found.flatten(-2)
    torch.ldexp(found, (scales.to(torch.int32) - _EXPONENT_BIAS).unsqueeze(-1), out=found)
    return found.flatten(-2)


def strips(sizes: Ints, most: int) -> Iterator[Box]:
    """Cut a box of these sizes into ones of at most `most` elements, in row-major order."""
    if not math.prod(sizes):
        return
    steps: list[int] = []
    for size in reversed(sizes):
        steps.insert(0, max(1, min(size, most // math.prod(steps))))
    for start in itertools.product(*(range(0, size, step) for size, step in zip(sizes, steps, strict=True))):
        yield Box(start, tuple(min(step, size - at) for at, size, step in zip(start, sizes, steps, strict=True)))


_SCALE_SUFFIX, _WEIGHT_SUFFIX = ".weight_scale_inv", ".weight"
_SCALES_SUFFIX, _BLOCKS_SUFFIX = "_scales", "_blocks"
_STRIP_ELEMENTS = 256 << 10
"""Of these a thread holds the numbers in a few dtypes: some MiB."""
_STRIPS_A_THREAD = 4
"""Of so many the stored form and the scales are in memory."""
_HOOKS = (
    "_process_read_request",
    "_read_files_from_queue",
    "_read_quantized_tensor_with_block_alignment",
    "_get_slice_to_block_mapping",
    "_dequantize_tensor",
    "_dequantize_tensor_mxfp4",
)
"""Methods that a subclass may override; then whole requests go through them, as in torch."""


class _Strip(NamedTuple):
    """A box of a quantized tensor, and what its numbers are made of."""

    key: str
    box: Box
    stored: torch.Tensor
    scales: torch.Tensor


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """
    Reads quantized tensors as plain numbers, and all others as they are.

    Quantized are weights with `NAME.weight_scale_inv` beside `NAME.weight` (one scale for each block of
    `block_size` rows and columns), and `NAME_blocks` with `NAME_scales` (MXFP4).
    """

    def __init__(
        self,
        path: str,
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
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

    # -- what there is -------------------------------------------------------------------------------------------------

    def read_metadata(self) -> Metadata:
        """Describe what the directory holds: quantized tensors with the sizes and the dtype they will have."""
        metadata = super().read_metadata()
        # Made on access until here; below they are changed.
        metadata.state_dict_metadata = dict(metadata.state_dict_metadata)
        metadata.storage_data = dict(metadata.storage_data)
        self._load_quantization_metadata()
        for key, entry in metadata.state_dict_metadata.items():
            stored = self._catalog[key]
            self._tensor_full_shapes[key] = torch.Size(stored.shape)
            if not self._is_tensor_quantized(key):
                continue
            entry.properties.dtype = self.target_dtype  # type: ignore[union-attr]  # all are tensors
            if key.endswith(_BLOCKS_SUFFIX):
                self._tensor_full_shapes[key + "_quantized"] = torch.Size(stored.shape)
                self._tensor_full_shapes[key] = _expanded(key, stored.shape)
                self._describe_expanded(key, stored, metadata)
        return metadata

    def _describe_expanded(self, key: str, stored: CatalogEntry, metadata: Metadata) -> None:
        """Give the metadata of packed groups the sizes of what they hold; torch leaves the chunks as they are."""
        entry: Any = metadata.state_dict_metadata[key]
        values = 2 * stored.shape[-1]
        entry.size = _expanded(key, stored.shape)
        entry.chunks = []
        for chunk in stored.chunks:
            if chunk.box.sizes[-1] != stored.shape[-1]:
                raise MalformedFile(f"{chunk.path}: {key!r} is cut inside its groups", file=chunk.path, key=key)
            *at, group, _ = chunk.box.offsets
            *sizes, groups, _ = chunk.box.sizes
            offsets = torch.Size([*at, group * values])
            entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size([*sizes, groups * values])))
            metadata.storage_data[MetadataIndex(key, offsets)] = _HFStorageInfo(
                chunk.path, torch.Size(chunk.box.sizes), to_torch(stored.dtype)
            )

    def _load_quantization_metadata(self) -> None:
        """Find out which tensors are quantized, from the index file or, where there is none, from the files."""
        folder = list_model(storage_place(self))
        if folder.index is not None:
            self._build_weight_scale_mapping(read_weight_map(folder.index, folder.opens))
        else:
            homes = {key: os.path.basename(stored.chunks[0].path) for key, stored in self._catalog.items()}
            self._build_weight_scale_mapping(homes)

    def _build_weight_scale_mapping(self, weight_map: dict[str, str]) -> None:
        """Keep the file of each tensor, and pair those that are quantized with their scales."""
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

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        if self._extends(QuantizedHuggingFaceStorageReader, _HOOKS):
            self._read_one_by_one(items, planner)
            return
        quantized = [req for req in items if self._is_tensor_quantized(req.storage_index.fqn)]
        chosen = set(map(id, quantized))
        for key in dict.fromkeys(req.storage_index.fqn for req in quantized):
            self._check(key)
        self.read_plain([req for req in items if id(req) not in chosen], planner)
        files = self.open_files()
        for batch in in_batches(quantized, planner):
            targets = [target_tensor(req, planner) for req in batch]
            self._fill(batch, targets, files)
            for req, target in zip(batch, targets, strict=True):
                planner.commit_tensor(req, target)

    def _fill(self, items: Sequence[ReadItem], targets: Sequence[torch.Tensor], files: ItemFiles) -> None:
        """Read what requests ask for and dequantize it: a few strips for each thread, then the next ones."""
        threads = self._threads()
        cut = (
            (req.storage_index.fqn, _box_of(req, strip), target[slices(strip)])
            for req, target in zip(items, targets, strict=True)
            for strip in strips(tuple(req.lengths), _STRIP_ELEMENTS)
        )

        def work(task: tuple[_Strip, torch.Tensor], _: memoryview) -> bool:
            strip, into = task
            into.copy_(self._numbers(strip))
            return False  # no disk was waited for

        while group := list(itertools.islice(cut, _STRIPS_A_THREAD * threads)):
            reads: list[ChunkRequest] = []
            tasks = [(self._strip(key, box, files, reads), into) for key, box, into in group]
            fill_items(files, reads, threads=threads, budget_nbytes=Options().host_budget_bytes)
            run_workers(tasks, work, threads=min(threads, len(tasks)), buffer_nbytes=0)

    def _strip(self, key: str, box: Box, files: ItemFiles, reads: list[ChunkRequest]) -> _Strip:
        """Make room for what a box of a checked tensor is made of, and add to the reads that fill it."""
        stored, scales, _ = self._sources(key, box)
        return _Strip(
            key,
            box,
            self._room(key, stored, files, reads),
            self._room(self._weight_scale_mapping[key], scales, files, reads),
        )

    def _sources(self, key: str, box: Box) -> tuple[Box, Box, int]:
        """Return the boxes of stored elements and of scales that a box of numbers needs, and where it begins there."""
        if not key.endswith(_BLOCKS_SUFFIX):
            return box, block_ranges(box, self.block_size), 0
        width = self._catalog[key].shape[-1]
        first, last = groups_of(box, 2 * width)
        scales = Box((*box.offsets[:-1], first), (*box.sizes[:-1], last - first))
        return Box((*scales.offsets, 0), (*scales.sizes, width)), scales, box.offsets[-1] - first * 2 * width

    def _numbers(self, strip: _Strip) -> torch.Tensor:
        """Return the numbers of a strip that was read."""
        key, box, stored, scales = strip
        if not key.endswith(_BLOCKS_SUFFIX):
            return scale_blocks(stored, scales, box, self.block_size, self.target_dtype)
        at = self._sources(key, box)[2]
        return expand_groups(stored, scales, self.target_dtype)[..., at : at + box.sizes[-1]]

    def _check(self, key: str) -> None:
        """Make sure that there are scales for all of a quantized tensor."""
        if key not in self._catalog:  # metadata that another reader read
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

    def _room(self, key: str, box: Box, files: ItemFiles, reads: list[ChunkRequest]) -> torch.Tensor:
        """Return a tensor for a box as it is stored, and add to the reads that fill it, from whichever files have it."""
        stored = self._catalog[key]
        found = torch.empty(box.sizes, dtype=to_torch(stored.dtype), device="cpu")
        for chunk in stored.chunks:
            common = intersect(chunk.box, box)
            if common is not None:
                into = found[slices(relative(common, box))]
                reads.append(chunk_request(key, stored.dtype, chunk, relative(common, chunk.box), into))
        return found

    # -- for readers that extend this one: whole requests, in torch's steps ---------------------------------------------

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        """Read one item; `f` is its open file, which what is quantized may need more than."""
        if not self._is_tensor_quantized(req.storage_index.fqn):
            super()._process_read_request(f, req, planner)
            return
        target = target_tensor(req, planner)
        target.copy_(self._read_quantized_tensor_with_block_alignment(req, f))
        planner.commit_tensor(req, target)

    def _read_quantized_tensor_with_block_alignment(
        self,
        req: ReadItem,
        safetensor_file: Any,
    ) -> torch.Tensor:
        """Return the numbers that a request asks for; the file it is in need not have all of them."""
        key = req.storage_index.fqn
        self._check(key)
        req = dataclasses.replace(req, storage_offsets=torch.Size(_begin_of(req)))
        box = Box(tuple(req.storage_offsets), tuple(req.lengths))
        shape, scale_key = self._catalog[key].shape, self._weight_scale_mapping[key]
        files, reads = self.open_files(), list[ChunkRequest]()
        stored, some, at = self._sources(key, box)
        weight = self._room(key, stored, files, reads)
        scales = self._room(scale_key, whole(self._catalog[scale_key].shape), files, reads)
        fill_items(files, reads, threads=1, budget_nbytes=Options().host_budget_bytes)
        if not key.endswith(_BLOCKS_SUFFIX):
            return self._dequantize_tensor(weight, scales, torch.Size(shape), self._get_slice_to_block_mapping(req))
        return self._dequantize_tensor_mxfp4(weight, scales, req, some.offsets[-1], at)

    def _get_slice_to_block_mapping(self, req: ReadItem) -> tuple[tuple[int, int], tuple[int, int], slice, slice]:
        """Return the blocks that a request touches, from the first to after the last, and its rows and columns."""
        box = Box(tuple(req.storage_offsets), tuple(req.lengths))
        blocks = block_ranges(box, self.block_size)
        rows, columns = ((at, at + n) for at, n in zip(blocks.offsets, blocks.sizes, strict=True))
        row_slice, column_slice = slices(box)
        return rows, columns, row_slice, column_slice

    def _dequantize_tensor(
        self,
        weight: torch.Tensor,
        scale_inv: torch.Tensor,
        full_tensor_shape: torch.Size,
        slice_info: tuple[tuple[int, int], tuple[int, int], slice, slice],
    ) -> torch.Tensor:
        """Return the numbers of a part of a matrix, given all of its scales."""
        rows, columns, row_slice, column_slice = slice_info
        box = Box((row_slice.start, column_slice.start), tuple(weight.shape))
        scales = scale_inv[rows[0] : rows[1], columns[0] : columns[1]]
        return scale_blocks(weight, scales, box, self.block_size, self.target_dtype)

    def _dequantize_tensor_mxfp4(
        self,
        blocks: torch.Tensor,
        scales: torch.Tensor,
        req: ReadItem,
        group_start: int,
        offset_in_first_group: int,
    ) -> torch.Tensor:
        """Return the values of a request, given whole groups of them and all scales."""
        lead = tuple(slice(at, at + n) for at, n in zip(req.storage_offsets[:-1], req.lengths[:-1], strict=True))
        index = (*lead, slice(group_start, group_start + blocks.shape[-2]))
        values = expand_groups(blocks, scales[index], self.target_dtype)
        return values[..., offset_in_first_group : offset_in_first_group + req.lengths[-1]]


def _expanded(key: str, shape: tuple[int, ...]) -> torch.Size:
    if len(shape) < 2:
        raise MalformedFile(f"{key!r} has shape {list(shape)}, and not one of groups of bytes", key=key)
    *lead, groups, width = shape
    return torch.Size([*lead, groups * width * 2])


def _box_of(req: ReadItem, strip: Box) -> Box:
    """Return a strip of a request as a box of the whole tensor."""
    return Box(tuple(a + b for a, b in zip(_begin_of(req), strip.offsets, strict=True)), strip.sizes)


def _begin_of(req: ReadItem) -> tuple[int, ...]:
    """Return where a request begins in the whole tensor; the stored chunk may be a shard."""
    chunk = tuple(req.storage_index.offset or ())
    if len(chunk) != len(req.storage_offsets):
        chunk = (0,) * len(req.storage_offsets)  # torch's index of packed groups, which has an axis more
    return tuple(a + b for a, b in zip(chunk, req.storage_offsets, strict=True))
