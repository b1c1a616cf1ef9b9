"""
The storage writer for Hugging Face models: safetensors files, whole or one set a rank, and their index.

All files of a save are written beside what is there, by all ranks, and take its place when the last one is durable: until
then an older model is as it was.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.futures import Future

from shardkeep.errors import CheckpointError
from shardkeep.layout.safetensors_files import read_header
from shardkeep.layout.safetensors_folder import Folder, look
from shardkeep.layout.safetensors_publish import Names, begin, discard, made_by_writer, prepare, publish, renames_in
from shardkeep.options import Options
from shardkeep.protocol.metadata import Metadata, is_tensor_entry
from shardkeep.protocol.planners import SavePlanner
from shardkeep.protocol.plans import SavePlan, WriteItem
from shardkeep.protocol.problems import BrokenProtocol
from shardkeep.protocol.storage import WriteResult
from shardkeep.protocol.stored_items import SerializationFormat, _StorageInfo
from shardkeep.run.safetensors_catalog import read_weight_map
from shardkeep.run.workers import window_for
from shardkeep.storages.choosing import by_store
from shardkeep.storages.consolidate import SLOWEST_BYTES_PER_S, consolidate_files
from shardkeep.storages.file_writer import CheckpointThere, FileSystemWriter
from shardkeep.storages.hugging_face_files import (
    Numbers,
    check_complete,
    files_of,
    number_shards,
    number_whole,
    split,
)
from shardkeep.storages.hugging_face_names import SHARDED_DIR_NAME, _metadata_fn
from shardkeep.storages.hugging_face_reader import place_of
from shardkeep.storages.safetensors_writes import no_tensor, write_files
from shardkeep.store.protocol import requests_of

_OURS = "shardkeep"
"""Under this key of a plan's storage data is what the coordinator decided for all files of the save."""


class HuggingFaceStorageWriter(FileSystemWriter):
    """
    Writes tensors as a Hugging Face model.

    Objects that are no tensors have no place in such a model and are refused.
    """

    def __init__(
        self,
        path: str,
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
    ) -> None:
        """
        Point to a directory.

        Args:
            path: where the model goes: a directory, or the URL of a place.
            fqn_to_index_mapping: the number of the file that each tensor goes to, from 1; one file by default.
            thread_count: how many threads to write with, at least.
            save_distributed: every rank writes its own shards; otherwise tensors must be whole.
            enable_consolidation: make whole tensors of the shards, in `path`; the shards go to `path/sharded`.
            thread_count_consolidation: how many threads to do that with, at least.

        """
        super().__init__(path=path, serialization_format=SerializationFormat.SAFETENSORS, thread_count=thread_count)
        self.fqn_to_index_mapping: dict[str, int] | None = fqn_to_index_mapping
        self.save_distributed: bool = save_distributed
        self.enable_consolidation: bool = enable_consolidation
        self.consolidated_output_path: str | None = None
        self.thread_count_consolidation = thread_count_consolidation
        self._new_save: str | None = None
        self._keys_known = True
        self._names: Names | None = None
        self._alone = False
        self.fs, self.path = by_store(self.fs, self.path)
        self._point_to(self.path)

    def _point_to(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        if self.enable_consolidation:
            self.consolidated_output_path = str(path)
            self.path = self.fs.concat_path(path, SHARDED_DIR_NAME)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous save; the next one goes to `checkpoint_id`, if given, shards and result alike."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.fs, self.path = by_store(self.fs, self.path)
            self._point_to(self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._new_save = self._names = None
        if not self.use_collectives and self.rank:
            raise BrokenProtocol(
                "a Hugging Face model is one for all ranks, and cannot be saved by each rank on its own",
                hint="save with use_collectives=True",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """
        Make sure that the plan has tensors only.

        Raises:
            UnsupportedLeaf: (a TypeError) it has something else; names it.

        """
        place_of(self)
        for item in plan.items:
            if item.tensor_data is None:
                raise no_tensor(item)
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide on all files of the save, and make the directory ready for them."""
        mapping = self.fqn_to_index_mapping
        if self.save_distributed:
            numbered = number_shards(plans, mapping)
            if mapping is not None and self.enable_consolidation and all(plan.usable for plan in plans):
                check_complete(plans, mapping)
        else:
            numbered = number_whole(plans, mapping, self._split_by_storage_plan)
        # Unknown where a rank only sent word that its plan has not changed.
        count = None
        self._keys_known = all(plan.usable for plan in plans)
        if self._keys_known:
            count = sum(
                len(files_of(plan.items, numbers, self._split_by_storage_plan))
                for plan, numbers in zip(plans, numbered, strict=True)
                if plan.items
            )
        store = place_of(self)
        self._alone = len(plans) == 1
        folder = prepare(store)
        self._check_place(folder, {item.index.fqn for plan in plans for item in plan.items})
        self._names = begin(store, self.save_id, folder)
        new_plans = []
        for place, (plan, numbers) in enumerate(zip(plans, numbered, strict=True), start=1):
            storage_data: dict[str, Any] = {}
            if mapping is not None:
                storage_data["fqn_to_index_mapping"] = mapping
            if self.save_distributed:
                storage_data["shard_index"] = place
            decided = {"save_id": self.save_id, "marks": self._names.marks, "files": count, "numbers": numbers}
            storage_data[_OURS] = decided
            new_plans.append(dataclasses.replace(plan, storage_data=storage_data))
        return new_plans

    def _check_place(self, folder: Folder, keys: set[str]) -> None:
        """Refuse to put shards beside a model that they do not replace: readers take it for the one, or for both."""
        if not self.save_distributed:
            return
        named = set() if folder.index is None else set(read_weight_map(folder.index, folder.opens).values())
        for name in folder.files:
            if made_by_writer(folder, name):
                continue
            if name in named:
                raise CheckpointThere(
                    f"{folder.path}: holds a model ({name}, …) with an index file; shards beside it would never be read",
                    hint="save to another directory, or delete the model",
                    file=name,
                )
            if twice := sorted(keys.intersection(_keys_in(folder, name))):
                raise CheckpointThere(
                    f"{folder.path}: {name}, which no save made, holds {len(twice)} of the tensors to save: {twice[:4]}; "
                    "with shards beside it they would be there twice",
                    hint="save to another directory, or delete the file",
                    file=name,
                    key=twice[0],
                )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; all of them are durable when this returns, and none is in place yet."""
        place_of(self)
        results: list[WriteResult] = []
        if plan.items:
            results = self._write(plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        said: dict[str, Any] = plan.storage_data or {}
        decided = said.get(_OURS)
        if decided is None:
            # A plan that somebody else made, as torch's `prepare_global_plan` does: there is nobody to wait for.
            mapping = said.get("fqn_to_index_mapping")
            numbers = Numbers(mapping, max(mapping.values()) if mapping else 1, said.get("shard_index"))
            decided = {"save_id": self.save_id, "marks": False, "files": None, "numbers": numbers}
        numbers, store = decided["numbers"], place_of(self)
        names = Names(decided["save_id"], renames=renames_in(store), marks=decided["marks"])
        self._new_save = names.save_id
        files = files_of(plan.items, numbers, self._split_by_storage_plan)
        options = Options()
        threads = max(self.thread_count, requests_of(store, options.io_threads))
        threads, window = window_for(threads, options.host_budget_bytes)
        if _OURS not in said and not names.renames:
            for file in files:
                store.delete(file.name)
        sizes = write_files(
            store,
            files,
            lambda item: _tensor(planner, item),
            names=names,
            file_count=decided["files"],
            threads=threads,
            window_nbytes=window,
        )
        if _OURS not in said and names.renames:
            for file in files:
                new = os.path.join(str(self.path), names.written(file.name))
                os.replace(new, os.path.join(str(self.path), file.name))
        return [
            WriteResult(item.index, sizes[id(item)], _StorageInfo(file.name, 0, sizes[id(item)]))
            for file in files
            for item in file.items
        ]

    def _alone_s(self, metadata: Metadata) -> float:
        if self.save_distributed and not self.enable_consolidation:
            return 0.0
        # All of it is written, or written once more, by one rank.
        tensors: list[Any] = [entry for entry in metadata.state_dict_metadata.values() if is_tensor_entry(entry)]
        total = sum(torch.Size(entry.size).numel() * entry.properties.dtype.itemsize for entry in tensors)
        return float(total / SLOWEST_BYTES_PER_S)

    def _discard_written(self) -> None:
        """Remove what all ranks wrote last, unless it is being published; for a save that will not be."""
        if self._new_save is not None:
            discard(place_of(self), self._new_save, last=self._alone)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the files of all ranks into place, with an index where tensors are whole, and drop those of older saves."""
        written = [result for each in results for result in each]
        store = place_of(self)
        weights, total = None, 0
        if not self.save_distributed:  # otherwise tensors are in several files, and no index can say where each one is
            weights = {result.index.fqn: result.storage_data.relative_path for result in written}
            total = sum(result.storage_data.length for result in written)
        files = list(dict.fromkeys(result.storage_data.relative_path for result in written))
        names = self._names or Names(self.save_id, renames=renames_in(store))
        try:
            if not self._keys_known:
                self._check_place(look(store), {result.index.fqn for result in written})
            publish(store, names, files, weights=weights, total_nbytes=total, replaces_saves=True)
        except Exception:
            with suppress(CheckpointError):
                discard(store, self.save_id)
            raise
        if self.save_distributed and self.enable_consolidation and self.consolidated_output_path is not None and files:
            consolidate_files(
                store,
                list(map(names.final, files)),
                self.consolidated_output_path,
                self.fqn_to_index_mapping,
                self.thread_count_consolidation,
            )

    def _split_by_storage_plan(
        self, storage_plan: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        return split(storage_plan, items)

    @property
    def metadata_path(self) -> str:
        """The name of the index file."""
        return _metadata_fn


def _keys_in(folder: Folder, name: str) -> Iterable[str]:
    try:
        return read_header(folder.files[name], folder.opens).tensors
    except CheckpointError:
        return ()  # readers will name it


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    found = planner.resolve_data(item)
    if not isinstance(found, torch.Tensor):
        raise no_tensor(item)
    return found
