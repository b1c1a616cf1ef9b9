"""
The storage reader for quantized Hugging Face models: tensors are dequantized while they are read.

There are two forms: 8-bit weights with one scale for each square block, and 4-bit values (MXFP4) with one exponent for
each group. Numbers are bit for bit those of torch's reader. A request is cut into strips, which several threads read
and dequantize, so memory is a few strips and the scales. Requests may begin inside a block, and quantized tensors may be
stored in shards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from shardkeep.dcp._impl.file_reader import batches_for, fill_targets, target_of
from shardkeep.dcp._impl.hf_files import _HFStorageInfo
from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader, chunk_request, most_nbytes, storage_place
from shardkeep.engine.fill import fill_items
from shardkeep.engine.safetensors_source import CatalogEntry, read_weight_map
from shardkeep.engine.torch_source import ItemFiles
from shardkeep.engine.workers import run_workers
from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import Box, Ints, intersect, relative, slices, whole
from shardkeep.format.dtypes import to_torch
from shardkeep.layouts.safetensors_publish import list_model
from shardkeep.layouts.torch_values import ChunkStorageMetadata, LoadPlanner, Metadata, MetadataIndex, ReadItem
from shardkeep.options import Options

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the sixteen codes of a 4-bit float (E2M1)."""
_EXPONENT_BIAS = 127
_SCALE_SUFFIX, _WEIGHT_SUFFIX = ".weight_scale_inv", ".weight"
_SCALES_SUFFIX, _BLOCKS_SUFFIX = "_scales", "_blocks"
_STRIP_ELEMENTS = 512 << 10
"""A thread holds this many numbers in a few dtypes: some MiB."""
_MOST_SCALES = 4
"""Tensors whose scales are kept for the next strips."""
_HOOKS = (
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

    def read_metadata(self) -> Metadata:
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

    def _describe_expanded(self, key: str, stored: CatalogEntry, metadata: Metadata) -> torch.Size:
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
            entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size([*sizes, groups * values])))
            metadata.storage_data[MetadataIndex(key, offsets)] = _HFStorageInfo(
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

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        if self._extends(QuantizedHuggingFaceStorageReader, _HOOKS):
            self._read_one_by_one(items, planner)
            return
        quantized = [req for req in items if self._is_tensor_quantized(req.storage_index.fqn)]
        for key in dict.fromkeys(req.storage_index.fqn for req in quantized):
            self._check(key)  # before anything is filled
        chosen = set(map(id, quantized))
        self.read_plain([req for req in items if id(req) not in chosen], planner)

        for batch in batches_for(planner, quantized, most_nbytes):
            fill_targets(batch, planner, partial(self._fill_dequantized, batch))

    def _fill_dequantized(self, batch: Sequence[ReadItem], targets: Sequence[torch.Tensor]) -> None:
        cut = (
            (req, target, strip)
            for req, target in zip(batch, targets, strict=True)
            for strip in strips(tuple(req.lengths), _STRIP_ELEMENTS)
        )

        def work(task: tuple[ReadItem, torch.Tensor, Box], _: memoryview) -> bool:
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

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        """Read one request; `f` is its open file, which may not hold all that a quantized tensor needs."""
        if not self._is_tensor_quantized(req.storage_index.fqn):
            super()._process_read_request(f, req, planner)
            return
        target = target_of(req, planner)
        target.copy_(self._read_quantized_tensor_with_block_alignment(req, f))
        planner.commit_tensor(req, target)

    def _read_quantized_tensor_with_block_alignment(self, req: ReadItem, safetensor_file: Any) -> torch.Tensor:
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

    def _get_slice_to_block_mapping(self, req: ReadItem) -> tuple[tuple[int, int], tuple[int, int], slice, slice]:
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
        self, blocks: torch.Tensor, scales: torch.Tensor, req: ReadItem, group_start: int, offset_in_first_group: int
    ) -> torch.Tensor:
        """Return the values of a request, given whole groups of them and all scales."""
        lead = tuple(slice(at, at + n) for at, n in zip(req.storage_offsets[:-1], req.lengths[:-1], strict=True))
        index = (*lead, slice(group_start, group_start + blocks.shape[-2]))
        values = expand_groups(blocks, scales[index], self.target_dtype)
        return values[..., offset_in_first_group : offset_in_first_group + req.lengths[-1]]


def expand_groups(blocks: torch.Tensor, scales: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """
    Return the numbers of groups of 4-bit values, two to a byte, the low half first.

    `blocks` are bytes of shape [..., groups, bytes], `scales` exponents with a bias of 127 of shape [..., groups], and
    the result has the shape [..., groups * bytes * 2].
    """
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
