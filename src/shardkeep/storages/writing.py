"""
Data files of a rank: items resolved, written, and what is to be said of each.

Whole tensors of a default planner, written as they are to this machine's disk or to a store, go through the engine's
pipeline. All else is written as a stream, item by item: file systems of others, transformed items, planners that make
what they save.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch

from shardkeep.codec.transforms import _StorageWriterTransforms
from shardkeep.errors import CheckpointError, StateError
from shardkeep.layout.torch_files import SUMS_SUFFIX, Sums, encode_sums
from shardkeep.options import Options
from shardkeep.protocol.planners import SavePlanner
from shardkeep.protocol.plans import WriteItem, WriteItemType
from shardkeep.protocol.problems import BrokenProtocol
from shardkeep.protocol.save_planner import DefaultSavePlanner
from shardkeep.protocol.storage import WriteResult
from shardkeep.protocol.stored_items import SerializationFormat, _StorageInfo
from shardkeep.run.torch_write import Data, Placed, Stream, lay_out, plain_tensor, write_stream
from shardkeep.run.workers import Consequence, run_workers, window_for
from shardkeep.run.write import FileJob, write_files
from shardkeep.state.devices import settle
from shardkeep.storages.choosing import store_of
from shardkeep.storages.file_systems import FileSystemBase, PathLike
from shardkeep.storages.safetensors_layout import header_of, in_order
from shardkeep.storages.stream_store import sync_stream, write_all
from shardkeep.store.protocol import is_name, requests_of

if TYPE_CHECKING:
    from shardkeep.storages.file_writer import _FileSystemWriter


_MOST_MADE_NBYTES = 64 << 20
"""Of pickled objects, held until they are written."""


class FilePlan(NamedTuple):
    """A data file to write."""

    path: PathLike
    name: str
    items: list[WriteItem]
    header: bytes | None = None
    """What stands before bare tensors; None where each item is an archive of its own."""


def write_plans(writer: _FileSystemWriter, planner: SavePlanner, plans: list[FilePlan]) -> list[WriteResult]:
    """Write files; all of them are there, durable if asked for, or none."""
    if writer.serialization_format == SerializationFormat.SAFETENSORS:
        if writer.transforms.extensions:
            raise StateError("extensions cannot be applied to safetensors files", hint="write TORCH_SAVE files")
        plans = [_as_safetensors(plan) for plan in plans]
    plans = [plan._replace(items=_objects_first(plan.items)) for plan in plans]
    if _can_be_laid_out(writer, planner, plans):
        return _write_laid_out(writer, planner, plans)
    return _write_streams(writer, planner, plans)


def _as_safetensors(plan: FilePlan) -> FilePlan:
    if any(item.type == WriteItemType.BYTE_IO for item in plan.items):
        return plan
    items = in_order(plan.items)
    return plan._replace(items=items, header=header_of(items, where=plan.name))


def _objects_first(items: Sequence[WriteItem]) -> list[WriteItem]:
    return sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)


def _can_be_laid_out(writer: _FileSystemWriter, planner: SavePlanner, plans: list[FilePlan]) -> bool:
    own = type(planner)
    gives_what_is_there = isinstance(planner, DefaultSavePlanner) and all(
        getattr(own, name) is getattr(DefaultSavePlanner, name) and name not in vars(planner)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )
    transforms = writer.transforms
    untouched = type(transforms) is _StorageWriterTransforms and not transforms.extensions
    here = store_of(writer.fs, writer.path) is not None and all(
        is_name(plan.name) and str(plan.path) == str(writer.fs.concat_path(writer.path, plan.name)) for plan in plans
    )
    return gives_what_is_there and untouched and here


def _write_laid_out(writer: _FileSystemWriter, planner: SavePlanner, plans: list[FilePlan]) -> list[WriteResult]:
    options = Options()
    store = store_of(writer.fs, writer.path, durable=writer.sync_files)
    held = _held(planner, plans)
    if held is None or store is None:
        return _write_streams(writer, planner, plans)
    settle(data for of_file in held for data in of_file if isinstance(data, torch.Tensor))
    laid = [_lay_out(plan, of_file) for plan, of_file in zip(plans, held, strict=True)]
    threads, window = window_for(requests_of(store, options.io_threads), options.host_budget_bytes)
    jobs = [job for job, _ in laid]
    digests = write_files(store, jobs, threads=threads, window_nbytes=window)
    results: list[WriteResult] = []
    made = [job.name for job in jobs]
    try:
        for plan, (job, placed), of_file, items in zip(plans, laid, digests, held, strict=True):
            faithful = [_as_planned(item, data) for item, data in zip(plan.items, items, strict=True)]
            sums, data = encode_sums(job.data_nbytes, job.block_nbytes, of_file)
            made.append(f"{plan.name}{SUMS_SUFFIX}")  # before: it may fail with the file in place
            store.put(f"{plan.name}{SUMS_SUFFIX}", data, replace=True)
            results += _results(plan, placed, faithful, sums)
    except BaseException:
        for name in made:
            with suppress(CheckpointError):
                store.delete(name)
        raise
    return results


def _held(planner: SavePlanner, plans: list[FilePlan]) -> list[list[Data]] | None:
    """Return what goes into each file; None where so much is made for it that it must be made piece by piece."""
    made = 0
    held: list[list[Data]] = []
    for plan in plans:
        held.append([])
        for item in plan.items:
            data = _data_of(planner, item)
            held[-1].append(data)
            made += 0 if isinstance(data, torch.Tensor) else data.nbytes
            if made > _MOST_MADE_NBYTES:
                return None
    return held


def _lay_out(plan: FilePlan, data: list[Data]) -> tuple[FileJob, list[Placed]]:
    if plan.header is None:
        return lay_out(plan.name, data)
    for item, each in zip(plan.items, data, strict=True):
        _check_as_planned(item, each)
    job, placed = lay_out(plan.name, [memoryview(plan.header), *data], framed=False)
    return job, placed[1:]


def _check_as_planned(item: WriteItem, data: Data) -> None:
    if not _as_planned(item, data):
        raise StateError(
            f"{item.index.fqn!r} is not the dense tensor that was planned: a safetensors file cannot hold it",
            hint="write TORCH_SAVE files, or leave it out",
            key=item.index.fqn,
        )


def _data_of(planner: SavePlanner, item: WriteItem) -> Data:
    """Resolve an item: a tensor whose memory can be written as it is, or bytes."""
    data = planner.resolve_data(item)
    key = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise BrokenProtocol(f"{key!r} is to be written as bytes, and the planner gave a {type(data).__name__}")
        return memoryview(data.getvalue())  # its own from now on: a planner may use the stream again
    if not isinstance(data, torch.Tensor):
        raise BrokenProtocol(f"{key!r} is to be written as a tensor, and the planner gave a {type(data).__name__}")
    return _plain_or_saved(key, data)


def _plain_or_saved(key: str, data: torch.Tensor) -> Data:
    plain = plain_tensor(key, data)
    if plain is not None:
        return plain
    made = io.BytesIO()
    torch.save(data.detach().cpu(), made)
    return made.getbuffer()


def _as_planned(item: WriteItem, data: Data) -> bool:
    """Say whether the bytes of a tensor are what its metadata will say they are."""
    planned = item.tensor_data
    if planned is None or not isinstance(data, torch.Tensor):
        return False
    return data.dtype == planned.properties.dtype and tuple(data.shape) == tuple(planned.chunk.sizes)


def _results(plan: FilePlan, placed: list[Placed], faithful: list[bool], sums: Sums) -> list[WriteResult]:
    results = []
    for item, place, as_planned in zip(plan.items, placed, faithful, strict=True):
        info = _StorageInfo(plan.name, place.offset, place.nbytes, place.descriptors or None)
        if place.data_start is not None and as_planned:
            info.keep_data_start(place.data_start)
        results.append(WriteResult(index=item.index, size_in_bytes=place.nbytes, storage_data=info))
    if results:
        results[0].storage_data.keep_sums((sums.nbytes, sums.block_nbytes, sums.checksum))
    return results


def _write_item(
    transforms: Any,
    stream: io.IOBase,
    data: io.BytesIO | torch.Tensor,
    write_item: WriteItem,
    storage_key: str,
    serialization_format: SerializationFormat,
) -> WriteResult:
    """Write one item to a stream that others write to as well; for writers that have files of their own."""
    if serialization_format != SerializationFormat.TORCH_SAVE and isinstance(data, torch.Tensor):
        raise StateError(f"{write_item.index.fqn!r}: a safetensors file is not written item by item")
    item = data.getbuffer() if isinstance(data, io.BytesIO) else _plain_or_saved(write_item.index.fqn, data)
    out = Stream(cast("IO[bytes]", stream), at=stream.tell())

    def wrap(raw: IO[bytes]) -> tuple[IO[bytes], list[str]]:
        wrapped, descriptors = transforms.transform_save_stream(write_item, raw)
        return wrapped, list(descriptors)

    [place] = write_stream(out, [item], wrap)
    info = _StorageInfo(storage_key, place.offset, place.nbytes, place.descriptors or None)
    return WriteResult(index=write_item.index, size_in_bytes=place.nbytes, storage_data=info)


def _write_streams(writer: _FileSystemWriter, planner: SavePlanner, plans: list[FilePlan]) -> list[WriteResult]:
    results: dict[str, list[WriteResult]] = {}
    stop = threading.Event()

    def write(plan: FilePlan, _: memoryview) -> bool:
        results[plan.name] = _write_one_stream(
            writer.fs, writer.transforms, planner, plan, sync=writer.sync_files, stop=stop
        )
        return True

    try:
        run_workers(plans, write, threads=max(1, min(writer.thread_count, len(plans))), buffer_nbytes=0, stop=stop)
    except BaseException:
        for plan in plans:
            for path in (plan.path, f"{os.fspath(plan.path)}{SUMS_SUFFIX}"):
                with suppress(Exception):  # whatever a file system raises: the failure is what counts
                    writer.fs.rm_file(path)
        raise
    return [result for plan in plans for result in results[plan.name]]


def _write_one_stream(
    fs: FileSystemBase, transforms: Any, planner: SavePlanner, plan: FilePlan, *, sync: bool, stop: threading.Event
) -> list[WriteResult]:
    turn = iter(plan.items)
    faithful: list[bool] = []

    def wrap(out: IO[bytes]) -> tuple[IO[bytes], list[str]]:
        item = next(turn)
        if type(transforms) is _StorageWriterTransforms and not transforms.extensions:
            return out, []
        stream, descriptors = transforms.transform_save_stream(item, out)
        return stream, list(descriptors)

    def resolved() -> Iterator[Data]:
        for item in plan.items:
            if stop.is_set():
                raise Consequence("the save was given up")
            data = _data_of(planner, item)
            settle([data] if isinstance(data, torch.Tensor) else [])
            faithful.append(_as_planned(item, data))
            if plan.header is not None:
                _check_as_planned(item, data)
            yield data

    with fs.create_stream(plan.path, "wb") as raw:
        out = Stream(raw)  # type: ignore[arg-type]  # opened to be written
        if plan.header is not None:
            out.write(plan.header)
        placed = write_stream(out, resolved(), wrap, framed=plan.header is None)
        sync_stream(raw, sync=sync)
    sums, data = encode_sums(out.nbytes, out.block_nbytes, out.digests())
    with fs.create_stream(f"{os.fspath(plan.path)}{SUMS_SUFFIX}", "wb") as raw:
        write_all(raw, data, sync=sync)
    return _results(plan, placed, faithful, sums)
