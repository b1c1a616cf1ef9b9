"""
Files of `torch.save` loaded on many ranks: one rank reads, all get the tensors, and each keeps its own part.

The ranks first agree on what is sent, and make room for it; whatever is wrong with the file, its keys or a rank's
tensors is raised on all of them then. The tensors go through one buffer of a fixed size, from the mapped file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.futures import Future

from shardkeep.compat.conversion_source import load_torch_file
from shardkeep.errors import StateMismatch, UnsupportedLeaf
from shardkeep.exchange.archive_blob import exists, is_blob
from shardkeep.format.dtypes import by_name, of_torch, to_torch
from shardkeep.format.region import Box
from shardkeep.options import Options
from shardkeep.protocol.chunks import within
from shardkeep.protocol.items import _create_chunk_list
from shardkeep.protocol.load_planner import DefaultLoadPlanner
from shardkeep.protocol.materialise import current_device, device_of_group
from shardkeep.protocol.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.protocol.planners import LoadPlanner
from shardkeep.protocol.plans import LoadItemType, LoadPlan, ReadItem
from shardkeep.protocol.problems import BrokenProtocol, MissingKeys
from shardkeep.protocol.storage import StorageReader
from shardkeep.ranks.agree import meet
from shardkeep.ranks.world import World, current_world
from shardkeep.state.toolkit import stream
from shardkeep.state.toolkit.parcel import plain_source
from shardkeep.state.toolkit.stream import Berth, Cargo, send
from shardkeep.state.toolkit.trees import flatten_state_dict

log = logging.getLogger("shardkeep")


class BroadcastingTorchSaveReader(StorageReader):
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

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - of the interface
        """Return nothing: the planner knows from its state what is to be loaded."""
        return Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Begin a load."""
        del metadata
        rank = _world().rank
        if is_coordinator and rank != self.coordinator_rank:
            raise BrokenProtocol(f"Coordinator rank mismatch: expected {self.coordinator_rank}, got {rank}")
        self._file()
        self.is_coordinator = is_coordinator

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plans of all ranks ask for; all ranks must call this."""
        world = _world()
        sources: dict[str, torch.Tensor] = {}
        berths: list[Berth] = []

        def describe() -> bytes:
            wanted = _wanted(plan.items, planner)
            held = self._held(planner, sources) if self.is_coordinator else None
            return json.dumps([wanted, held]).encode()

        def prepare() -> bytes:
            berths.extend(_berths(cargoes, plan.items, planner))
            return b""

        with meet(world, "load a file of torch.save") as meeting:
            told, batch_bytes = json.loads(meeting.agree("describe", describe, _decide))
            cargoes = [Cargo(key, tuple(shape), to_torch(by_name(dtype))) for key, shape, dtype in told]
            meeting.agree("prepare", prepare, lambda said: [b""] * len(said))
        with torch.no_grad():
            send(
                cargoes,
                [sources[cargo.name] for cargo in cargoes] if self.is_coordinator else None,
                berths,
                torch.device("cpu") if world.solo else current_device(device_of_group().type),
                None,
                batch_bytes=batch_bytes,
                sender=self.coordinator_rank,
            )
        for berth in berths:
            for item, target in berth.result:
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from this file from now on."""
        self.checkpoint_id = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether there is such a file."""
        where = os.fspath(checkpoint_id)
        return exists(where) if is_blob(where) else os.path.isfile(where)

    def _file(self) -> str | os.PathLike[str]:
        if self.checkpoint_id is None:
            raise BrokenProtocol("no file to load from", hint="give it as checkpoint_id, to the load or to the reader")
        return self.checkpoint_id

    def _held(self, planner: LoadPlanner, sources: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Open the file, keep its tensors in `sources`, and describe each; where one cannot be sent, say why."""
        state = load_torch_file(self._file())
        if not isinstance(state, dict):
            raise BrokenProtocol(
                f"{self._file()} holds a {type(state).__qualname__}, and a state is loaded from a dict"
            )
        if getattr(planner, "flatten_state_dict", True):
            state, _ = flatten_state_dict(state)
        held: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(key, str):
                continue  # of a state that is not flattened; no plan names it
            if not isinstance(value, torch.Tensor):
                held[key] = f"{key!r} is a {type(value).__qualname__} in {self._file()}, and a tensor in the state"
                continue
            try:
                sources[key] = plain_source(value, (key,))
                held[key] = [list(value.shape), of_torch(value.dtype).name]
            except UnsupportedLeaf as error:
                held[key] = error.message
        return held


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """
    Plans a load from the state alone, for storages that have no metadata; made for `BroadcastingTorchSaveReader`.

    Only tensors are loaded.
    """

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """
        Begin a load, with metadata that describe what the state holds.

        Raises:
            BrokenProtocol: (a RuntimeError) the state holds something that is no tensor.

        """
        super().set_up_planner(state_dict, metadata, is_coordinator)
        entries: dict[str, STORAGE_TYPES] = {}
        for key, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor):
                raise _only_tensors(key, self)
            entries[key] = TensorStorageMetadata(
                TensorProperties(dtype=value.dtype), value.size(), _create_chunk_list(value)
            )
        self.metadata = Metadata(state_dict_metadata=entries)


def _world() -> World:
    return current_world(None, timeout_s=Options().timeout_s)


def _only_tensors(key: str, loader: object) -> BrokenProtocol:
    return BrokenProtocol(
        f"Non-tensor value identified at {key}. At this time {type(loader).__name__} only supports loading Tensors.",
        hint="take the key out of the state, and set its value after the load",
        key=key,
    )


def _wanted(items: Iterable[ReadItem], planner: LoadPlanner) -> dict[str, list[int] | None]:
    """Return the keys that a rank wants, and the size that it expects each to have, as far as its planner knows."""
    entries = getattr(getattr(planner, "metadata", None), "state_dict_metadata", {})
    wanted: dict[str, list[int] | None] = {}
    for item in items:
        key = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            raise _only_tensors(key, planner)
        size = getattr(entries.get(key), "size", None)
        wanted[key] = None if size is None else list(size)
    return wanted


def _decide(said: list[bytes]) -> list[bytes]:
    """Compare what the ranks want with what the file holds, and return what is sent."""
    heard = [json.loads(each) for each in said]
    held = next((each for _, each in heard if each is not None), None)
    if held is None:
        raise BrokenProtocol("no rank was told to coordinate the load", hint="use the reader with `load`")
    wanted = {key: size for sizes, _ in heard for key, size in sizes.items()}
    if missing := sorted(wanted.keys() - held.keys()):
        raise MissingKeys(
            f"Missing key in checkpoint state_dict: {', '.join(missing)}.",
            hint="take the keys out of the state, or load another file",
            missing=missing,
        )
    for key in wanted:
        if isinstance(held[key], str):
            raise StateMismatch(held[key], hint="take the key out of the state", key=key)
    for rank, (sizes, _) in enumerate(heard):
        for key, size in sizes.items():
            if size is not None and size != held[key][0]:
                raise StateMismatch(
                    f"Size mismatch between saved {held[key][0]} and current {size} for {key!r} on rank {rank}",
                    hint="load into a state of the model that was saved",
                    key=key,
                    mismatched=[key],
                )
    sent = [[key, *held[key]] for key in held if key in wanted]
    return [json.dumps([sent, stream.BATCH_BYTES]).encode()] * len(said)


def _berths(cargoes: list[Cargo], items: list[ReadItem], planner: LoadPlanner) -> list[Berth]:
    """Ask the planner for the memory of all that this rank wants; a berth's result is what to tell it afterwards."""
    by_key: dict[str, list[ReadItem]] = {}
    for item in items:
        by_key.setdefault(item.storage_index.fqn, []).append(item)
    berths = []
    for cargo in cargoes:
        asked = by_key.get(cargo.name, [])
        targets = [planner.resolve_tensor(item).detach() for item in asked]
        boxes = [_box(item, target, cargo) for item, target in zip(asked, targets, strict=True)]
        berths.append(Berth(list(zip(asked, targets, strict=True)), tuple(zip(boxes, targets, strict=True))))
    return berths


def _box(item: ReadItem, target: torch.Tensor, cargo: Cargo) -> Box:
    """Return which box of the whole tensor an item wants."""
    chunk = item.storage_index.offset or (0,) * len(item.lengths)
    offsets = tuple(there + inside for there, inside in zip(chunk, item.storage_offsets, strict=True))
    box = Box(offsets, tuple(item.lengths))
    if tuple(target.shape) != box.sizes or not within(cargo.shape, box):
        raise StateMismatch(
            f"{cargo.name!r}: {box} of a tensor of {cargo.shape} cannot be put into one of {tuple(target.shape)}",
            hint="the planner's items do not fit the file",
            key=cargo.name,
        )
    if target.dtype != cargo.dtype:
        log.warning("%r is converted as it is loaded: %s -> %s", cargo.name, cargo.dtype, target.dtype)
        _try_conversion(cargo, target)
    return box


def _try_conversion(cargo: Cargo, target: torch.Tensor) -> None:
    """Raise now, and not in the midst of sending, if torch cannot convert the tensor."""
    try:
        torch.empty(1, dtype=target.dtype, device="cpu").copy_(torch.empty(1, dtype=cargo.dtype, device="cpu"))
    except RuntimeError as error:
        raise StateMismatch(
            f"{cargo.name!r}: {cargo.dtype} cannot be loaded as {target.dtype}", key=cargo.name
        ) from error
