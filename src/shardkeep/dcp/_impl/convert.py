"""
Torch's `format_utils`: converts between files of `torch.save` and checkpoints in bounded memory, and loads such files.

`dcp_to_torch_save` opens a checkpoint of any layout and writes the file with `conversion.to_file`.
`torch_save_to_dcp` maps the file and saves it. `BroadcastingTorchSaveReader` reads a file on one rank and sends every
rank its part of each tensor.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import pickle
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.futures import Future

from shardkeep import errors
from shardkeep.conversion import pipeline, to_file
from shardkeep.dcp._impl.default_load import StoredNames
from shardkeep.dcp._impl.dist import _DistWrapper
from shardkeep.dcp._impl.driver import _save_state_dict
from shardkeep.dcp._impl.file_reader import FileSystemReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter
from shardkeep.dcp._impl.planners import DefaultLoadPlanner, load_safely
from shardkeep.dcp._impl.plans import (
    _create_chunk_list,
    checked_path,
    current_device,
    device_of_group,
    missing_keys,
)
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import current_world
from shardkeep.engine.fill import read_whole
from shardkeep.engine.reader import FoundCheckpoint
from shardkeep.engine.sources import find_committed
from shardkeep.engine.torch_file_source import ZIP, open_torch_files
from shardkeep.engine.torch_source import Item, ItemFiles, TorchSource, bad_archives, find_torch, view_of
from shardkeep.format.boxes import Box, whole, within
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.torch import metadata_name
from shardkeep.options import Options
from shardkeep.state.collectives import Destination, TensorSpec, broadcast_batches, plain_source
from shardkeep.state.flatten import flatten_state_dict, set_element
from shardkeep.storage.base import Store
from shardkeep.storage.buffers import view_memory
from shardkeep.storage.file_systems import BlobInput, StreamStore
from shardkeep.storage.local import LocalStore

# -- a checkpoint, opened ----------------------------------------------------------------------------------------------


class _OpenedCheckpoint:
    """A checkpoint whose tensors are read in parts; errors are those of a load."""

    def __init__(self, store: Store | StreamStore, options: Options) -> None:
        self._alone = _DistWrapper(None, use_dist=False, coordinator_rank=0)
        self._options = options
        self._held: tuple[int, torch.Tensor] | None = None
        [self._source] = self._alone.all_gather("plan", lambda: _find(store).open(options))
        self._decoded: set[int] = set()
        """Rows of tensors that were saved through an extension, which must be read whole."""
        if isinstance(self._source, TorchSource):
            self._decoded = set(map(self._source.tensor_of, self._source.descriptors))
        threads, window = pipeline.limits(options, store)
        # On one thread, windows come in order: each such tensor is decoded once, and one is held at a time.
        self.windows = 1 if self._decoded else threads, window
        self._reader = pipeline.PartReader(self._source, budget_nbytes=2 * self.windows[1])

    def read_state(self) -> dict[str, Any]:
        """Return the state, nested as it was saved, with a `TensorPart` for each tensor."""
        [state] = self._alone.all_gather("read", self._read_state)
        return state

    def _read_state(self) -> dict[str, Any]:
        index = self._source.index
        self._source.check(np.arange(len(index.keys)))
        stored = StoredNames(self._source, "")
        values: dict[str, Any] = stored.load_objects(sorted(stored.objects))
        for key, row in stored.tensors.items():
            values[key] = pipeline.TensorPart(key, row, whole(index.shape(row)), index.dtype(row))
        state: dict[str, Any] = {}
        for key, path in stored.paths.items():
            set_element(state, checked_path(key, path, len(values)), values[key])
        return state

    def fill(self, wanted: list[pipeline.Wanted]) -> None:
        """Fill memory with bytes of the tensors, and of storages in memory."""
        stored: list[pipeline.Wanted] = []
        for each in wanted:
            if isinstance(each.part, to_file.MemoryPart):
                each.into[:] = view_memory(each.part.storage.data_ptr(), each.part.nbytes)[each.start : each.stop]
            elif each.part.row in self._decoded:
                self._copy_decoded(each)
            else:
                stored.append(each)
        self._alone.all_gather("read", lambda: self._reader.fill(stored))

    def _copy_decoded(self, wanted: pipeline.Wanted) -> None:
        """Copy bytes of a tensor that is read whole, and kept for the windows after this one."""
        row = wanted.part.row
        if self._held is None or self._held[0] != row:
            self._held = None
            [[tensor]] = self._alone.all_gather(
                "read", lambda: read_whole(self._source, np.array([row]), self._options)
            )
            self._held = row, tensor
        tensor = self._held[1]
        wanted.into[:] = view_memory(tensor.data_ptr(), tensor.nbytes)[wanted.start : wanted.stop]


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


# -- a file of torch.save, opened --------------------------------------------------------------------------------------

_READ_AHEAD_NBYTES = 1 << 20


def _load_dict(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """
    Return the contents of a file of `torch.save`, on the CPU. Tensors are mapped: their bytes are read on access.

    Every entry of the file is compared with its checksum first. Files in the format of torch before version 1.6 have no
    checksums, and are read into memory, as are files of a store, given by URL.
    """
    blob = isinstance(path, str) and to_file.is_blob_url(path)
    where = os.fspath(path) if blob else os.path.abspath(to_file.file_path(path))
    place, name = (
        to_file.blob_location(where)
        if blob
        else (LocalStore(os.path.dirname(where), foreign=True), os.path.basename(where))
    )
    files = ItemFiles(place, {})
    try:
        if not blob and not os.path.isfile(where):
            raise errors.BlobNotFound(f"{where}: there is no such file", file=where)
        item = Item(files.number(name), 0, files.entries[0].nbytes, where)
        reader = place.open(name)
    except errors.BlobNotFound as exc:
        raise errors.CheckpointNotFound(f"{where}: there is no such file", file=where) from exc

    def opened() -> Any:
        return io.BufferedReader(BlobInput(reader, closes=False), _READ_AHEAD_NBYTES) if blob else where

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


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """
    Convert a checkpoint into a file that `torch.load` reads: nested as the state that was saved, tensors whole.

    The file is read back and then replaces what is at its place. Memory holds all objects, and of tensors one window a
    thread, or one whole tensor where it was saved through an extension.

    Args:
        dcp_checkpoint_dir: the checkpoint's directory, or the URL of its place.
        torch_save_path: the file to write: a path or a URL.

    Raises:
        CheckpointException: the checkpoint cannot be read.
        StorageError: the file cannot be written.

    """
    path = to_file.destination(torch_save_path)
    options = Options()
    opened = _OpenedCheckpoint(FileSystemReader(dcp_checkpoint_dir).readable_store(), options)
    to_file.write_archive(path, to_file.pickle_state(opened.read_state()), opened.fill, windows=opened.windows)


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]) -> None:
    """
    Convert a file of `torch.save` into a checkpoint.

    The file is mapped and not read into memory, unless it has the form that torch wrote before version 1.6, or is in a
    store. A checkpoint that is at the place is replaced, once the new one is complete.

    Args:
        torch_save_path: the file, by its path or URL; its top-level value must be a dict.
        dcp_checkpoint_dir: the directory to write the checkpoint to, or the URL of a place.

    Raises:
        PickleRefused: the file names a class that is not known to be safe.
        DamagedCheckpoint: the file is no file of `torch.save`, or is damaged.
        CheckpointException: the checkpoint cannot be written.

    """
    _save_state_dict(_load_dict(torch_save_path), storage_writer=FileSystemWriter(dcp_checkpoint_dir), no_dist=True)


# -- a file of torch.save, loaded on many ranks ------------------------------------------------------------------------

# One rank reads the file, all ranks receive the tensors through one buffer of a fixed size, and each keeps its part. The
# ranks first agree on what is sent and allocate memory for it, so that a problem with the file, its keys or the tensors
# of a rank is raised on all of them before anything is sent.

log = logging.getLogger("shardkeep")


class BroadcastingTorchSaveReader(protocol.StorageReader):
    """
    Reads a file of `torch.save` on one rank and gives every rank its part; made for `DynamicMetaLoadPlanner`.

    Only tensors are loaded. All ranks of the default process group take part.
    """

    def __init__(self, checkpoint_id: str | os.PathLike[str] | None = None, coordinator_rank: int = 0) -> None:
        """
        Point to a file.

        Args:
            checkpoint_id: the file; only the coordinator must be able to open it.
            coordinator_rank: the rank that reads, which must be the one that coordinates the load.

        """
        self.checkpoint_id = checkpoint_id
        self.coordinator_rank = coordinator_rank
        self.is_coordinator = False

    def read_metadata(self, *args: Any, **kwargs: Any) -> protocol.Metadata:
        """Return empty metadata: the planner plans from its state."""
        return protocol.Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: protocol.Metadata, is_coordinator: bool) -> None:
        """Begin a load."""
        del metadata
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
        world = current_world(None, timeout_s=Options().timeout_s)
        sources: dict[str, torch.Tensor] = {}
        destinations: dict[str, Destination] = {}

        def describe() -> bytes:
            return pickle.dumps(self._held(planner, sources)) if self.is_coordinator else b""

        def one_description(said: list[bytes]) -> list[bytes]:
            if not any(said):
                raise errors.BrokenProtocol("no rank coordinates the load", hint="use the reader with `load`")
            return [b"".join(said)] * len(said)

        def prepare() -> bytes:
            destinations.update(_destinations(held, plan.items, planner))
            return pickle.dumps(list(destinations))

        def all_wanted(said: list[bytes]) -> list[bytes]:
            wanted = {key for each in said for key in pickle.loads(each)}
            return [pickle.dumps([key for key in held if key in wanted])] * len(said)

        with rendezvous(world, "load a file of torch.save") as meeting:
            held = pickle.loads(meeting.agree("describe", describe, one_description))
            specs = [held[key] for key in pickle.loads(meeting.agree("prepare", prepare, all_wanted))]
        with torch.no_grad():
            broadcast_batches(
                specs,
                [sources[spec.name] for spec in specs] if self.is_coordinator else None,
                [destinations.get(spec.name, Destination([], ())) for spec in specs],
                torch.device("cpu") if world.solo else current_device(device_of_group().type),
                None,
                sender=self.coordinator_rank,
            )
        for each in destinations.values():
            for item, target in each.result:
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def prepare_local_plan(self, plan: protocol.LoadPlan) -> protocol.LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[protocol.LoadPlan]) -> list[protocol.LoadPlan]:
        """Return the plans as they are."""
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from this file from now on."""
        self.checkpoint_id = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether the file exists."""
        where = os.fspath(checkpoint_id)
        return to_file.file_exists(where) if to_file.is_blob_url(where) else os.path.isfile(where)

    def _held(self, planner: protocol.LoadPlanner, sources: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Open the file, put its tensors into `sources`, and describe each; for one that cannot be sent, say why."""
        state = _load_dict(self.checkpoint_id or "")
        if getattr(planner, "flatten_state_dict", True):
            state, _ = flatten_state_dict(state)
        held: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(key, str):
                continue  # the state is not flattened, and no plan names this key
            if not isinstance(value, torch.Tensor):
                held[key] = (
                    f"{key!r} is a {type(value).__qualname__} in {self.checkpoint_id}, and a tensor in the state"
                )
                continue
            try:
                sources[key] = plain_source(key, value)
                held[key] = TensorSpec(key, tuple(value.shape), value.dtype)
            except errors.UnsupportedLeaf as error:
                held[key] = error.message
        return held


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """
    Plans a load from the state alone, for storages that have no metadata; made for `BroadcastingTorchSaveReader`.

    Only tensors are loaded.
    """

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


def _destinations(
    held: dict[str, Any], items: list[protocol.ReadItem], planner: protocol.LoadPlanner
) -> dict[str, Destination]:
    """Return where each tensor of the plan goes; results list what to commit. Raises where the file does not fit."""
    by_key: dict[str, list[protocol.ReadItem]] = defaultdict(list)
    for item in items:
        if item.type == protocol.LoadItemType.BYTE_IO:
            raise _only_tensors(item.storage_index.fqn, planner)
        by_key[item.storage_index.fqn].append(item)
    if missing := sorted(by_key.keys() - held.keys()):
        unclaimed = [key for key in held if key not in by_key]
        raise missing_keys(missing, unclaimed, "take the keys out of the state, or load another file")
    entries = getattr(getattr(planner, "metadata", None), "state_dict_metadata", {})
    destinations = {}
    for key, asked in by_key.items():
        if isinstance(held[key], str):
            raise errors.StateMismatch(held[key], hint="take the key out of the state", key=key)
        spec, size = held[key], getattr(entries.get(key), "size", None)
        if size is not None and tuple(size) != spec.shape:
            raise errors.StateMismatch(
                f"Size mismatch between saved {list(spec.shape)} and current {list(size)} for {key!r}",
                hint="load into a state of the model that was saved",
                key=key,
                mismatched=[key],
            )
        targets = [planner.resolve_tensor(item).detach() for item in asked]
        boxes = [_box(item, target, spec) for item, target in zip(asked, targets, strict=True)]
        destinations[key] = Destination(list(zip(asked, targets, strict=True)), tuple(zip(boxes, targets, strict=True)))
    return destinations


def _box(item: protocol.ReadItem, target: torch.Tensor, spec: TensorSpec) -> Box:
    """Return which box of the whole tensor an item wants."""
    chunk = item.storage_index.offset or (0,) * len(item.lengths)
    offsets = tuple(there + inside for there, inside in zip(chunk, item.storage_offsets, strict=True))
    box = Box(offsets, tuple(item.lengths))
    if tuple(target.shape) != box.sizes or not within(spec.shape, box):
        raise errors.StateMismatch(
            f"{spec.name!r}: {box} of a tensor of {spec.shape} cannot be put into one of {tuple(target.shape)}",
            hint="the planner's items do not fit the file",
            key=spec.name,
        )
    if target.dtype != spec.dtype:
        log.warning("%r is converted as it is loaded: %s -> %s", spec.name, spec.dtype, target.dtype)
        try:  # now, and not in the midst of sending
            torch.empty(1, dtype=target.dtype, device="cpu").copy_(torch.empty(1, dtype=spec.dtype, device="cpu"))
        except RuntimeError as error:
            message = f"{spec.name!r}: {spec.dtype} cannot be loaded as {target.dtype}"
            raise errors.StateMismatch(message, key=spec.name) from error
    return box


# -- the command -------------------------------------------------------------------------------------------------------


class FormatMode(Enum):
    """Which way to convert."""

    TORCH_TO_DCP = "torch_to_dcp"
    DCP_TO_TORCH = "dcp_to_torch"


def main(argv: Sequence[str] | None = None) -> None:
    """Convert what the command line names."""
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
