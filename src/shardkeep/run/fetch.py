"""From boxes that are wanted to tensors that are filled: plan the load, plan each file's reads, do them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardkeep.format.columns import Boxes, IntArray
from shardkeep.format.dtypes import by_code, of_torch, to_torch
from shardkeep.layout.native import data_sizes
from shardkeep.plan.loads import Wants, plan_load
from shardkeep.plan.ranges import FileReads, plan_reads
from shardkeep.run.read import Source, keys_at, read_files
from shardkeep.run.workers import ACCELERATOR_WINDOW_NBYTES, WINDOW_NBYTES, window_for
from shardkeep.stage.tensors import host_address, scattered
from shardkeep.store.protocol import requests_of


def fill_native(
    source: Source,
    tensor: IntArray,
    boxes: Boxes,
    into: Sequence[torch.Tensor],
    *,
    threads: int,
    budget_nbytes: int,
    first_file: float,
) -> int:
    """Fill tensors from a native checkpoint, and return the bytes read."""
    index = source.index
    codes = np.asarray(index.tensors.dtype)[tensor]
    own = [of_torch(t.dtype).code for t in into]
    address = np.array(
        [host_address(t) if mine == stored else 0 for t, mine, stored in zip(into, own, codes.tolist(), strict=True)],
        np.int64,
    )
    axes = index.tensors.shape.shape[1]
    wants = Wants(tensor, _fit(boxes.offsets, axes, 0), _fit(boxes.sizes, axes, 1), address)
    on_host = all(each.device.type == "cpu" for each in into)
    threads = requests_of(source.store, threads)
    most = WINDOW_NBYTES if on_host else ACCELERATOR_WINDOW_NBYTES
    coded = any(file.chain is not None for file in source.record.files)
    threads, window = window_for(threads, budget_nbytes, most, coded=coded)
    plans, needs = _plan(source, wants, window)
    others = {want: scattered(into[want], to_torch(by_code(int(codes[want])))) for want in needs}
    start = int(first_file * len(plans))
    return read_files(
        source.store,
        source.record.files,
        plans[start:] + plans[:start],
        others,
        key_at=keys_at(index),
        threads=threads,
        window_nbytes=window,
        headers=source.headers,
    )


def _fit(matrix: IntArray, axes: int, fill: int) -> IntArray:
    """Give a box matrix the index's width; what is cut off is padding."""
    fitted = np.full((len(matrix), axes), fill, np.int64)
    width = min(axes, matrix.shape[1])
    fitted[:, :width] = matrix[:, :width]
    return fitted


def _plan(source: Source, wants: Wants, window_nbytes: int) -> tuple[list[FileReads], set[int]]:
    """Return the reads of each file, and the wants that are reached box by box."""
    sizes = data_sizes(source.record)
    runs, scatters = plan_load(source.index, wants, sizes)
    runs = runs.take(np.argsort(runs.file, kind="stable"))
    by_file: dict[int, list[int]] = {}
    for row, scatter in enumerate(scatters):
        by_file.setdefault(scatter.file, []).append(row)
    files = sorted({*np.unique(runs.file).tolist(), *by_file})
    low = np.searchsorted(runs.file, files, "left").tolist()
    high = np.searchsorted(runs.file, files, "right").tolist()
    plans = [
        plan_reads(
            file,
            runs.take(slice(a, b)),
            [scatters[row] for row in by_file.get(file, [])],
            data_nbytes=int(sizes[file]),
            block_nbytes=source.record.files[file].block_nbytes,
            window_nbytes=window_nbytes,
        )
        for file, a, b in zip(files, low, high, strict=True)
    ]
    return plans, {scatter.want for scatter in scatters}
