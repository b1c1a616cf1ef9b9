"""
Writes Hugging Face models under torch's names: the storage writer, and the consolidation of shards into whole tensors.

All ranks write their files beside an existing model, which stays as it is until the new files are durable and published
(`layouts.safetensors_publish`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.futures import Future

from shardkeep.conversion.pipeline import FileParts, TensorPart, WriteArguments
from shardkeep.conversion.to_hf import Place, model_file, write_and_publish
from shardkeep.dcp._impl import file_writer
from shardkeep.dcp._impl.file_reader import completed
from shardkeep.dcp._impl.file_writer import FileSystemWriter
from shardkeep.dcp._impl.hf_reader import no_tensor
from shardkeep.dcp._impl.planners import DefaultSavePlanner
from shardkeep.display import format_count, format_seconds
from shardkeep.dist.team import SLOWEST_BYTES_PER_S, team_of
from shardkeep.dist.world import World, current_world
from shardkeep.engine.reader import Source
from shardkeep.engine.safetensors_source import open_shards, read_headers, read_weight_map
from shardkeep.engine.workers import budget_for_store
from shardkeep.engine.writer import write_files
from shardkeep.errors import BadMapping, BrokenProtocol, CheckpointError, InvalidShards, MalformedFile
from shardkeep.format.boxes import whole
from shardkeep.layouts import safetensors, safetensors_publish
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.safetensors import CUSTOM_METADATA_KEY, FILE_COUNT_KEY, SAVE_ID_KEY
from shardkeep.options import Options
from shardkeep.state.leaves import synchronize_devices
from shardkeep.storage.base import Store, same_place
from shardkeep.storage.cancel import CancelScope
from shardkeep.storage.file_systems import by_store, keeps
from shardkeep.storage.resolve import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


logger = logging.getLogger("shardkeep")

_MARKED = re.compile(r"model-\d+-of-\d+-[0-9a-f]{8}\.safetensors")
"""Files of consolidated models in stores."""


class _Consolidation(NamedTuple):
    """A model to make of shards, which are opened; its files, and the file of each tensor."""

    source: Source
    output: Store
    files: list[FileParts]
    weights: dict[str, str]
    total_nbytes: int
    options: Options


def consolidate_safetensors_files(
    input_dir: str, output_dir: str, fqn_to_index_mapping: dict[str, int], num_threads: int = 1
) -> None:
    """
    Write whole tensors from shards, as `model-XXXXX-of-NNNNN.safetensors` and `model.safetensors.index.json`.

    Nothing is published if the shards are no whole checkpoint, or a new file does not hold what was written to it.

    Args:
        input_dir: holds the shards that a `HuggingFaceStorageWriter`, shardkeep's or torch's, wrote: a path or a URL.
        output_dir: where the model goes: a path or a URL. A model there is replaced once the new one is complete.
        fqn_to_index_mapping: the number of the file that each tensor goes to, from 1; None for one file.
        num_threads: how many threads to use at least.

    """
    begun = time.monotonic()
    _consolidate(lambda: _plan(input_dir, output_dir, fqn_to_index_mapping, num_threads))
    logger.info("consolidated %s into %s in %s", input_dir, output_dir, format_seconds(time.monotonic() - begun))


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: ProcessGroup | None = None,
) -> None:
    """Consolidate shards, which all ranks of `process_group` see; each writes some files. If one rank fails, all do."""
    world = current_world(process_group, timeout_s=Options().timeout_s)
    _consolidate(lambda: _plan(input_dir, output_dir, fqn_to_index_mapping, num_threads), world)


def _consolidate(make_plan: Callable[[], _Consolidation], world: World | None = None) -> None:
    """Plan on every rank, write this rank's files and read them back, and publish on rank 0."""
    call = partial(team_of, world or World(0, 1), "consolidate safetensors files", timeout_s=0.0)
    with call() as team:
        job = team.alike("plan", make_plan, lambda job: job.weights)

    def begin() -> Place:
        folder = safetensors_publish.prepare_directory(job.output)
        # A store cannot rename: the files that the new ones replace have other names, and are removed.
        there = () if safetensors_publish.can_rename(job.output) else folder.files
        names = {file.job.name for file in job.files}
        return Place(folder, [name for name in there if name in names or _MARKED.fullmatch(name)])

    with call(nbytes=job.total_nbytes) as team:
        how = WriteArguments(overwrite=True, options=job.options, progress=None, team=team)
        write_and_publish(job.output, job.files, job.weights, job.source, how, begin=begin)


def _plan(input_dir: str, output_dir: str, mapping: Mapping[str, int] | None, num_threads: int) -> _Consolidation:
    output, shards = _place(output_dir), _place(input_dir)
    folder = safetensors_publish.list_model(shards)
    if not folder.files:
        raise MalformedFile.of(folder.path, "there are no safetensors files")
    return _plan_of(folder, output, mapping, num_threads, in_place=same_place(shards, output))


def _place(directory: str | os.PathLike[str]) -> Store:
    return open_store(directory, direct=Options().direct_io)


def _plan_of(
    folder: safetensors_publish.ModelDirectory,
    output: Store,
    mapping: Mapping[str, int] | None,
    num_threads: int,
    *,
    in_place: bool = False,
) -> _Consolidation:
    options = Options()
    options = replace(options, io_threads=max(num_threads, options.io_threads))
    headers = read_headers(folder.files.values(), threads=options.io_threads, opens=folder.opens)
    shards = []
    for file in headers:
        if file.metadata.get(CUSTOM_METADATA_KEY):
            shards.append(file)
        elif not (in_place and file.name.startswith("model-")):  # what an earlier call made of earlier shards
            why = f"no {CUSTOM_METADATA_KEY}, so it does not say which part of its tensors it holds"
            hint = "only shards of a distributed checkpoint can be consolidated; move other files elsewhere"
            raise MalformedFile.of(file.path, why, hint=hint)
    source = open_shards(folder, shards)
    rows = source.index.tensor_rows
    numbers = dict.fromkeys(rows, 1) if mapping is None else mapping
    last = _last(numbers)
    if missing := sorted(numbers.keys() - rows.keys()):
        raise BadMapping(
            f"fqn_to_index_mapping names {format_count(len(missing), 'tensor')} that the shards do not have: {missing[:4]}",
            hint="leave them out of the mapping, or save them",
            key=missing[0],
        )
    if dropped := sorted(rows.keys() - numbers.keys()):
        many = format_count(len(dropped), "tensor")
        logger.warning("fqn_to_index_mapping leaves out %s of the shards: %s", many, dropped[:4])
    groups: dict[int, dict[str, TensorPart]] = {}
    for key, number in numbers.items():
        part = TensorPart(key, rows[key], whole(source.index.shape(rows[key])), source.index.dtype(rows[key]))
        groups.setdefault(number, {})[key] = part
    names = {number: safetensors.file_name(number, last) for number in sorted(groups)}
    return _Consolidation(
        source,
        output,
        [model_file(name, groups[number], {}) for number, name in names.items()],
        {key: names[number] for key, number in numbers.items()},
        sum(part.nbytes for group in groups.values() for part in group.values()),
        options,
    )


def _last(mapping: Mapping[str, int] | None) -> int:
    """Return the largest number of a file; `BadMapping` if a mapping does not give each tensor one."""
    if mapping is None:
        return 1
    if not mapping:
        raise BadMapping("fqn_to_index_mapping is empty: there is no file to write")
    for key, number in mapping.items():
        if type(number) is not int or number < 1:
            raise BadMapping(
                f"fqn_to_index_mapping gives {key!r} the file {number!r}", hint="files are counted from 1", key=key
            )
    return max(mapping.values())


Split = Callable[[Any, list[protocol.WriteItem]], dict[int, list[protocol.WriteItem]]]
"""Returns the items of each file: the method of the writer, which a subclass may override."""


def files_of(plan: protocol.SavePlan, by: Split) -> dict[str, list[protocol.WriteItem]]:
    """Return the files that a rank writes, by torch's names, each with items of different tensors."""
    said: Mapping[str, Any] = plan.storage_data or {}
    mapping: Mapping[str, int] | None = said.get("fqn_to_index_mapping")
    last, files = _last(mapping), {}
    for number, items in by(mapping, plan.items).items() if plan.items else ():
        key, count = Counter(item.index.fqn for item in items).most_common(1)[0]
        if count > 1:
            raise InvalidShards(
                f"{key!r} has {count} shards on one rank, and a file holds only one",
                hint="save with FileSystemWriter",
                key=key,
            )
        files[safetensors.file_name(number, last, said.get("shard_index"))] = items
    return files


def check_files(plans: Sequence[protocol.SavePlan], files: Sequence[Mapping[str, object]]) -> None:
    """Check that no two ranks write one file and that, where files are not cut by rank, tensors are whole."""
    for plan in plans:
        for item in plan.items if "shard_index" not in (plan.storage_data or {}) else ():
            data = item.tensor_data
            if data is not None and tuple(data.chunk.sizes) != tuple(data.size):
                raise InvalidShards(
                    f"{item.index.fqn!r} is spread over ranks: of {list(data.size)}, this rank has {list(data.chunk.sizes)}",
                    hint="save with save_distributed=True, or gather the state on rank 0 first",
                    key=item.index.fqn,
                )
    for name in {name for of_rank in files for name in of_rank}:
        ranks = [rank for rank, of_rank in enumerate(files) if name in of_rank]
        if len(ranks) > 1:
            raise InvalidShards(
                f"ranks {ranks} have tensors for {name}, which only one rank can write",
                hint="save with save_distributed=True, or on one rank with no_dist=True",
            )


def saves_in_place(planner: protocol.SavePlanner) -> bool:
    """Return whether a planner saves the values of the state as they are."""
    methods = ("resolve_data", "lookup_object", "transform_object")
    return isinstance(planner, DefaultSavePlanner) and keeps(planner, DefaultSavePlanner, methods)


_OURS = "shardkeep"
"""Under this key of a plan's storage data is what the coordinator decided for all files of the save."""


class HuggingFaceStorageWriter(FileSystemWriter):
    """Writes tensors as a Hugging Face model; other objects are refused."""

    writes_sums = False

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
            enable_consolidation: consolidate the shards into `path`; the shards go to `path/sharded`.
            thread_count_consolidation: how many threads consolidate, at least.

        """
        super().__init__(
            path=path, serialization_format=protocol.SerializationFormat.SAFETENSORS, thread_count=thread_count
        )
        self.fqn_to_index_mapping: dict[str, int] | None = fqn_to_index_mapping
        self.save_distributed: bool = save_distributed
        self.enable_consolidation: bool = enable_consolidation
        self.consolidated_output_path: str | None = None
        self.thread_count_consolidation = thread_count_consolidation
        self._new_save: str | None = None
        self._names: safetensors_publish.SaveNames | None = None
        self._alone = False
        self._point_to_store()

    def _point_to_store(self) -> None:
        self.fs, self.path = by_store(self.fs, self.path)
        if self.enable_consolidation:
            self.consolidated_output_path = str(self.path)
            self.path = self.fs.concat_path(self.path, safetensors.SHARDED_DIR_NAME)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._point_to_store()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._new_save = self._names = None
        if not self.use_collectives and self.rank:
            raise BrokenProtocol(
                "a Hugging Face model is one for all ranks, and cannot be saved by each rank on its own",
                hint="save with use_collectives=True",
            )

    def prepare_local_plan(self, plan: protocol.SavePlan) -> protocol.SavePlan:
        self.open_store()
        for item in plan.items:
            if item.tensor_data is None:
                raise no_tensor(item.index.fqn)
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[protocol.SavePlan]) -> list[protocol.SavePlan]:
        """Decide on all files of the save, and make the directory ready for them."""
        mapping = self.fqn_to_index_mapping
        common: dict[str, Any] = {} if mapping is None else {"fqn_to_index_mapping": mapping}
        shards = [{"shard_index": place} if self.save_distributed else {} for place in range(1, len(plans) + 1)]
        pairs = zip(plans, shards, strict=True)
        return self._settle_plans([dataclasses.replace(plan, storage_data=common | shard) for plan, shard in pairs])

    def _settle_plans(self, plans: list[protocol.SavePlan]) -> list[protocol.SavePlan]:
        """Add the files to plans in torch's form: those of `prepare_global_plan`, or of a subclass in place of it."""
        if self._names is not None:
            return plans
        files = [files_of(plan, self._split_by_storage_plan) for plan in plans]
        check_files(plans, files)
        store = self.open_store()
        self._alone = len(plans) == 1
        folder = safetensors_publish.prepare_directory(store)
        self._check_place(folder)
        self._names = safetensors_publish.begin_save(store, self.save_id, folder)
        known = all(plan.usable for plan in plans)  # else a rank only reported that its plan has not changed
        count = sum(map(len, files)) if known else None
        decided = {_OURS: {"save_id": self.save_id, "files": count}}
        return [dataclasses.replace(plan, storage_data=(plan.storage_data or {}) | decided) for plan in plans]

    def _check_place(self, folder: safetensors_publish.ModelDirectory) -> None:
        """Refuse shards beside a model with an index file that no save made: readers would see that model."""
        if not self.save_distributed or folder.index is None:
            return
        for name in read_weight_map(folder.index, folder.opens).values():
            if name in folder.files and not safetensors_publish.made_by_writer(folder, name):
                raise file_writer.CheckpointThere(
                    f"{folder.path}: holds a model that no save made ({name}): it has an index file, and shards could"
                    " not be read",
                    hint="save to another directory, or delete the model",
                    file=name,
                )

    def write_data(self, plan: protocol.SavePlan, planner: protocol.SavePlanner) -> Future[list[protocol.WriteResult]]:
        """Write this rank's files; all of them are durable when this returns, and none is in place yet."""
        self.open_store()
        return completed(self._write(plan, planner) if plan.items else [])

    def _write(self, plan: protocol.SavePlan, planner: protocol.SavePlanner) -> list[protocol.WriteResult]:
        decided = (plan.storage_data or {}).get(_OURS)
        if decided is None:
            raise BrokenProtocol(
                "the plan does not say which files to write", hint="call prepare_global_plan of this writer first"
            )
        renames = safetensors_publish.can_rename(self.open_store())
        names = safetensors_publish.SaveNames(decided["save_id"], renames=renames)
        self._new_save = names.save_id
        metadata = {SAVE_ID_KEY: names.save_id}
        if decided["files"] is not None:
            metadata[FILE_COUNT_KEY] = str(decided["files"])
        plans, final, measured = [], {}, partial(file_writer.measured_tensor, planner)
        for name, items in files_of(plan, self._split_by_storage_plan).items():
            written = names.written(name)
            final[written] = name
            planned = file_writer.FilePlan(self.fs.concat_path(self.path, written), written, items)
            plans.append(file_writer.safetensors_plan(planned, metadata, measured))
        results = (
            self._write_in_place(planner, plans)
            if saves_in_place(planner)
            else file_writer.write_streams(self, planner, plans)
        )
        for stored in (result.storage_data for result in results):
            stored.relative_path = final[stored.relative_path]
        return results

    def _write_in_place(
        self, planner: protocol.SavePlanner, plans: Sequence[file_writer.FilePlan]
    ) -> list[protocol.WriteResult]:
        """Write files straight from the memory of the state, through the engine's write pipeline."""
        options, store = Options(), self.open_store()
        resolved = [[memoryview(plan.header), *file_writer.resolve_planned(plan, planner)] for plan in plans]
        laid_out = [
            file_writer.lay_out(plan.name, data, framed=False) for plan, data in zip(plans, resolved, strict=True)
        ]
        synchronize_devices(data for of_file in resolved for data in of_file if isinstance(data, torch.Tensor))
        threads = max(self.thread_count, options.io_threads)
        budget = budget_for_store(store, threads, options.host_budget_bytes, coded=False)
        write_files(
            store,
            [job for job, _ in laid_out],
            threads=budget.threads,
            window_nbytes=budget.window_nbytes,
            scope=CancelScope(budget=budget.room),
        )
        return [
            file_writer.written_result(item, written, plan.name)
            for plan, (_, (_, *placed)) in zip(plans, laid_out, strict=True)
            for item, written in zip(plan.items, placed, strict=True)
        ]

    def _alone_s(self, metadata: protocol.Metadata) -> float:
        if self.save_distributed and not self.enable_consolidation:
            return 0.0
        # One rank writes all of it: whole tensors, or the consolidated ones.
        tensors: Any = metadata.state_dict_metadata.values()  # `prepare_local_plan` refuses all else
        total = sum(torch.Size(entry.size).numel() * entry.properties.dtype.itemsize for entry in tensors)
        return float(total / SLOWEST_BYTES_PER_S)

    def _discard_written(self) -> None:
        """Remove the files of all ranks of a save that failed, unless they are being published."""
        if self._new_save is not None:
            safetensors_publish.discard_save(self.open_store(), self._new_save, last=self._alone)

    def finish(self, metadata: protocol.Metadata, results: list[list[protocol.WriteResult]]) -> None:
        """Publish the files of all ranks, with an index if tensors are whole, and remove those of older saves."""
        written = [result for each in results for result in each]
        store = self.open_store()
        weights, total = None, 0
        if not self.save_distributed:  # an index names one file for each tensor
            weights = {result.index.fqn: result.storage_data.relative_path for result in written}
            total = sum(result.storage_data.length for result in written)
        files = list(dict.fromkeys(result.storage_data.relative_path for result in written))
        names = self._names or safetensors_publish.SaveNames(
            self.save_id, renames=safetensors_publish.can_rename(store)
        )
        try:
            safetensors_publish.publish_model(
                store, names, files, weights=weights, total_nbytes=total, replaces_saves=True
            )
        except Exception:
            with suppress(CheckpointError):
                safetensors_publish.discard_save(store, self.save_id)
            raise
        if self.save_distributed and self.enable_consolidation and self.consolidated_output_path is not None and files:
            shards = {name: name for name in map(names.final, files)}
            folder = safetensors_publish.ModelDirectory(store.url, shards, None, store)
            output, threads = _place(self.consolidated_output_path), self.thread_count_consolidation
            _consolidate(lambda: _plan_of(folder, output, self.fqn_to_index_mapping, threads))

    def _split_by_storage_plan(
        self, storage_plan: dict[str, int] | None, items: list[protocol.WriteItem]
    ) -> dict[int, list[protocol.WriteItem]]:
        if storage_plan is None:
            return {1: items}
        found: dict[int, list[protocol.WriteItem]] = {}
        for item in items:
            key = item.index.fqn
            if key not in storage_plan:
                raise BadMapping(
                    f"fqn_to_index_mapping has no file for {key!r}", hint="give every tensor of the state one", key=key
                )
            found.setdefault(storage_plan[key], []).append(item)
        return found

    @property
    def metadata_path(self) -> str:
        return safetensors.INDEX_NAME
