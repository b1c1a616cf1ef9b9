"""Torch's `format_utils`: converts between files of `torch.save` and checkpoints in bounded memory, and loads files."""

from __future__ import annotations

import argparse
import io
import logging
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import Enum
from operator import add
from typing import Any

import numpy as np
import torch
from torch.futures import Future

from shardkeep import errors
from shardkeep.conversion import pipeline, to_file
from shardkeep.dcp._impl.default_load import StoredNames
from shardkeep.dcp._impl.dist import _DistWrapper
from shardkeep.dcp._impl.driver import _save_state_dict
from shardkeep.dcp._impl.file_reader import FileSystemReader, completed, target_of
from shardkeep.dcp._impl.file_writer import FileSystemWriter
from shardkeep.dcp._impl.planners import DefaultLoadPlanner, load_safely
from shardkeep.dcp._impl.plans import _create_chunk_list, checked_path, current_device, device_of_group, missing_keys
from shardkeep.dist.world import current_world, is_initialised
from shardkeep.engine.reader import FoundCheckpoint, Source
from shardkeep.engine.sources import find_committed
from shardkeep.engine.torch_file_source import ZIP, open_torch_files
from shardkeep.engine.torch_source import Item, ItemFiles, TorchSource, bad_archives, find_torch, view_of
from shardkeep.format.boxes import Box, whole, within
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.torch import metadata_name
from shardkeep.options import Options
from shardkeep.state.collectives import Destination, TensorSpec, broadcast_batches, plain_source
from shardkeep.state.flatten import flatten_state_dict, set_element
from shardkeep.storage.base import Store, local_path
from shardkeep.storage.file_systems import BlobInput, StreamStore


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """
    Convert a checkpoint into a file that `torch.load` reads: nested as the state that was saved, tensors whole.

    The file is read back and then replaces what is at its place. Memory holds all objects, and of tensors one window a
    thread, or two whole tensors where some were saved through an extension. Either may also be given by its URL.
    """
    target, options = to_file.destination(torch_save_path), Options()
    store = FileSystemReader(dcp_checkpoint_dir).readable_store()
    alone = _DistWrapper(None, use_dist=False, coordinator_rank=0)  # its errors are those of a load
    source = alone.broadcast("plan", lambda: _find(store).open(options))
    pickled = to_file.pickle_state(alone.broadcast("read", lambda: _nested_state(source)))
    threads, window = pipeline.limits(options, store)
    if isinstance(source, TorchSource) and source.descriptors:
        # What went through an extension is decoded whole, for each window anew: a tensor should not have many.
        largest = max(part.nbytes for part in pickled.storages)
        threads, window = 1, window * max(1, -(-largest // window))
    reader = pipeline.PartReader(source, budget_nbytes=2 * window)

    def fill(wanted: list[pipeline.Wanted]) -> None:
        alone.broadcast("read", lambda: reader.fill(wanted))

    to_file.write_archive(target, pickled, fill, windows=(threads, window))


def _nested_state(source: Source) -> dict[str, Any]:
    """Return the state of a checkpoint, nested as it was saved, with a `TensorPart` for each tensor."""
    index = source.index
    source.check(np.arange(len(index.keys)))
    stored = StoredNames(source)
    values: dict[str, Any] = stored.load_objects(sorted(stored.objects))
    for key, row in stored.tensors.items():
        values[key] = pipeline.TensorPart(key, row, whole(index.shape(row)), index.dtype(row))
    state: dict[str, Any] = {}
    for key, path in stored.paths.items():
        set_element(state, checked_path(key, path, len(values)), values[key])
    return state


def _find(store: Store | StreamStore) -> FoundCheckpoint:
    try:
        return find_torch(store) if isinstance(store, StreamStore) else find_committed(store)
    except (errors.CheckpointNotFound, errors.BlobNotFound) as error:
        try:
            return find_torch(store, metadata_name(0))  # ranks saved without collectives
        except errors.BlobNotFound:
            raise errors.NoMetadata(
                f"metadata is None; global metadata read failed: {error.message}",
                hint="is there a complete checkpoint at this place?",
            ) from error


_READ_AHEAD_NBYTES = 1 << 20


def _load_dict(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the contents of a file of `torch.save`, on the CPU; mapped tensors are read on access."""
    # Every entry of the file is compared with its checksum first. Files in the format of torch before version 1.6 have
    # none, and are read into memory, as are files of a store.
    place, name = to_file.file_at(path)
    where, blob = f"{place.url}/{name}", local_path(place) is None
    files = ItemFiles(place, {})
    try:
        if not blob and not os.path.isfile(where):
            raise errors.BlobNotFound(f"{where}: there is no such file", file=where)
        item = Item(files.number(name), 0, files.entries[0].nbytes, where)
        reader = place.open(name)
    except errors.BlobNotFound as exc:
        raise errors.CheckpointNotFound(f"{where}: there is no such file", file=where) from exc

    def opened() -> Any:
        return io.BufferedReader(BlobInput(reader), _READ_AHEAD_NBYTES) if blob else where

    def keys_at(*at: int) -> str:
        with suppress(errors.CheckpointError):  # the file is damaged, and the keys are only for the message
            return open_torch_files(place, [name], {}, name).open(Options()).keys_at(*at)
        return "no tensor that can be named"

    with closing(reader):
        archive = view_of(reader, item)(0, len(ZIP)) == ZIP
        for bad in bad_archives(files, [(item, ())], keys_at, set()) if archive else ():
            raise bad
        how = {"archive": archive, "mmap": archive and not blob}
        state = load_safely(opened, where, {"file": where}, map_location="cpu", **how)
    if not isinstance(state, dict):
        raise errors.BrokenProtocol(
            f"{os.fspath(path)} holds a {type(state).__qualname__}, and not a dict",
            hint="load the file, put its value into a dict, and save that",
        )
    return state


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]) -> None:
    """
    Convert a file of `torch.save`, whose top-level value must be a dict, into a checkpoint.

    The file is mapped and not read into memory, unless it has the form that torch wrote before version 1.6, or is in a
    store. A checkpoint at the place is replaced, once the new one is complete. Either may also be given by its URL.
    """
    _save_state_dict(_load_dict(torch_save_path), storage_writer=FileSystemWriter(dcp_checkpoint_dir), no_dist=True)


# One rank reads the file, all ranks receive the tensors through one buffer of a fixed size, and each keeps its part. The
# coordinator first compares what all ranks want with the file, so that a problem with the file, its keys or the tensors of a
# rank is raised on all of them before anything is sent.

log = logging.getLogger("shardkeep")


@dataclass(eq=False)
class BroadcastingTorchSaveReader(protocol.StorageReader):
    """Reads tensors of a file of `torch.save` on one rank, gives all their parts; made for `DynamicMetaLoadPlanner`."""

    checkpoint_id: str | os.PathLike[str] | None = None
    """The file; only the coordinator must be able to open it."""
    coordinator_rank: int = 0
    """The rank that reads, which must be the one that coordinates the load."""
    is_coordinator: bool = field(default=False, init=False)

    def read_metadata(self, *args: Any, **kwargs: Any) -> protocol.Metadata:
        """Return empty metadata: the planner plans from its state."""
        return protocol.Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: protocol.Metadata, is_coordinator: bool) -> None:
        rank = current_world(None, timeout_s=Options().timeout_s).rank
        if is_coordinator and rank != self.coordinator_rank:
            raise errors.BrokenProtocol(f"Coordinator rank mismatch: expected {self.coordinator_rank}, got {rank}")
        if self.checkpoint_id is None:
            raise errors.BrokenProtocol(
                "no file to load from", hint="give it as checkpoint_id, to the load or to the reader"
            )
        self.is_coordinator = is_coordinator

    def read_data(self, plan: protocol.LoadPlan, planner: protocol.LoadPlanner) -> Future[None]:
        """Fill the tensors of all ranks' plans; all ranks must call this."""
        ranks = _DistWrapper(None, is_initialised(), self.coordinator_rank)
        ranks._world = ranks._world.with_prefix("file")
        sources: dict[str, torch.Tensor] = {}
        targets: dict[str, list[_Target]] = {}

        def prepare() -> _Wanted:
            for item in plan.items:
                if item.type == protocol.LoadItemType.BYTE_IO:
                    raise _only_tensors(item.storage_index.fqn, planner)
                chunk = item.storage_index.offset or (0,) * len(item.lengths)
                box = Box(tuple(map(add, chunk, item.storage_offsets)), tuple(item.lengths))
                targets.setdefault(item.storage_index.fqn, []).append((item, target_of(item, planner), box))
            entries = getattr(getattr(planner, "metadata", None), "state_dict_metadata", {})
            sizes = {key: getattr(entries.get(key), "size", None) for key in targets}
            return {key: (sizes[key], [box for _, _, box in asked]) for key, asked in targets.items()}

        def compare(wanted: list[_Wanted]) -> list[TensorSpec]:
            state = _load_dict(self.checkpoint_id or "")
            if getattr(planner, "flatten_state_dict", True):
                state, _ = flatten_state_dict(state)
            keys = {key for of_rank in wanted for key in of_rank}
            if missing := sorted(keys - state.keys()):
                unclaimed = [key for key in state if isinstance(key, str) and key not in keys]
                raise missing_keys(missing, unclaimed, "take the keys out of the state, or load another file")
            sources.update({key: _source(key, state[key]) for key in state if key in keys})
            for key, size, boxes in ((key, *each) for of_rank in wanted for key, each in of_rank.items()):
                _check_size(key, sources[key], size, boxes)
            return [TensorSpec(key, tuple(source.shape), source.dtype) for key, source in sources.items()]

        try:
            specs = ranks.all_reduce("read", prepare, compare)
        except errors.CheckpointException as failed:
            raise next(iter(failed.failures.values()))[0] from failed
        destinations = []
        for spec in specs:
            parts = [(box, target) for _, target, box in targets.get(spec.name, ())]
            destinations.append(Destination(None, tuple(parts)))
            for dtype in {target.dtype for _, target in parts} - {spec.dtype}:
                log.warning("%r is converted as it is loaded: %s -> %s", spec.name, spec.dtype, dtype)
        with torch.no_grad():
            broadcast_batches(
                specs,
                [sources[spec.name] for spec in specs] if self.is_coordinator else None,
                destinations,
                current_device(device_of_group().type) if ranks.use_dist else torch.device("cpu"),
                None,
                sender=self.coordinator_rank,
            )
        for item, target, _ in (each for asked in targets.values() for each in asked):
            planner.commit_tensor(item, target)
        return completed(None)

    def prepare_local_plan(self, plan: protocol.LoadPlan) -> protocol.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[protocol.LoadPlan]) -> list[protocol.LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint_id = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return to_file.file_exists(*to_file.file_at(checkpoint_id))


_Target = tuple[protocol.ReadItem, torch.Tensor, Box]
"""An item, the tensor to fill, and the box of the stored tensor that it gets."""
_Wanted = dict[str, tuple[Any, list[Box]]]
"""What a rank wants of each tensor: boxes, and the size that it expects of the whole, if it knows that."""


def _source(key: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        what = f"{key!r} is a {type(value).__qualname__} in the file, and a tensor in the state"
        raise errors.StateMismatch(what, hint="take the key out of the state", key=key)
    return plain_source(key, value)


def _check_size(key: str, source: torch.Tensor, size: Sequence[int] | None, boxes: Sequence[Box]) -> None:
    if size is not None and tuple(size) != tuple(source.shape):
        raise errors.StateMismatch(
            f"Size mismatch between saved {list(source.shape)} and current {list(size)} for {key!r}",
            hint="load into a state of the model that was saved",
            key=key,
            mismatched=[key],
        )
    for box in boxes:
        if not within(source.shape, box):
            raise errors.StateMismatch(f"{key!r}: a tensor of {tuple(source.shape)} has no {box}", key=key)


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Plans a load of tensors from the state alone, for storages without metadata: `BroadcastingTorchSaveReader`."""

    def set_up_planner(
        self,
        state_dict: protocol.STATE_DICT_TYPE,
        metadata: protocol.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Begin a load with metadata made from the state, which may hold only tensors."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        entries: dict[str, protocol.STORAGE_TYPES] = {}
        for key, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor):
                raise _only_tensors(key, self)
            entries[key] = protocol.TensorStorageMetadata(
                protocol.TensorProperties(dtype=value.dtype), value.size(), _create_chunk_list(value)
            )
        self.metadata = protocol.Metadata(state_dict_metadata=entries)


def _only_tensors(key: str, loader: object) -> errors.BrokenProtocol:
    return errors.BrokenProtocol(
        f"Non-tensor value identified at {key}. At this time {type(loader).__name__} only supports loading Tensors.",
        hint="take the key out of the state, and set its value after the load",
        key=key,
    )


class FormatMode(Enum):
    TORCH_TO_DCP = "torch_to_dcp"
    DCP_TO_TORCH = "dcp_to_torch"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert between a file of torch.save and a checkpoint directory.")
    parser.add_argument("mode", type=str, choices=[mode.value for mode in FormatMode], help="which way to convert")
    parser.add_argument("src", type=str, help="what to convert: a file of torch.save, or a checkpoint's directory")
    parser.add_argument("dst", type=str, help="where the result goes")
    args = parser.parse_args(argv)
    to_checkpoint = args.mode == FormatMode.TORCH_TO_DCP.value
    print(f"Converting checkpoint from {args.src} to {args.dst} using method: '{args.mode}'")  # noqa: T201
    if "://" not in args.src and not (os.path.isfile if to_checkpoint else os.path.isdir)(args.src):
        print(f"No checkpoint found at {args.src}. Skipping conversion.")  # noqa: T201
        return
    (torch_save_to_dcp if to_checkpoint else dcp_to_torch_save)(args.src, args.dst)
