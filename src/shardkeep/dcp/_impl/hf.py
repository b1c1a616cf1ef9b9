"""
Writes Hugging Face models under torch's names: the storage writer, and the consolidation of shards into whole tensors.

All ranks write their files beside an existing model, which stays as it is until the new files are durable and published
(`layouts.safetensors_publish`). Consolidation opens the shards as a checkpoint and writes them through the conversion
pipeline, which reads the new files back before they are published.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.futures import Future

from shardkeep.conversion.pipeline import FileParts, TensorPart
from shardkeep.conversion.to_hf import model_file, write_model_files
from shardkeep.dcp._impl.file_writer import (
    CheckpointThere,
    FilePlan,
    FileSystemWriter,
    NotAsPlanned,
    measured_tensor,
    safetensors_plan,
    write_plans,
)
from shardkeep.dcp._impl.hf_files import SHARDED_DIR_NAME, _gen_file_name, _metadata_fn, no_tensor
from shardkeep.dcp._impl.hf_reader import storage_place
from shardkeep.display import format_count, format_seconds
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.engine.reader import Source
from shardkeep.engine.safetensors_source import open_shards, read_headers, read_weight_map
from shardkeep.errors import BadMapping, BrokenProtocol, CheckpointError, InvalidShards, MalformedFile
from shardkeep.format.boxes import whole
from shardkeep.layouts import safetensors_publish
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.safetensors import CUSTOM_METADATA_KEY, FILE_COUNT_KEY, SAVE_ID_KEY, read_header
from shardkeep.options import Options
from shardkeep.storage.base import Store, same_place
from shardkeep.storage.file_systems import by_store
from shardkeep.storage.resolve import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


logger = logging.getLogger("shardkeep")

SLOWEST_BYTES_PER_S = 50 << 20
"""A rank that writes at least this fast does not time out, however much it has to write."""
_MARKED = re.compile(r"model-\d+-of-\d+-[0-9a-f]{8}\.safetensors")
"""Files of consolidated models in stores."""


# -- consolidation -----------------------------------------------------------------------------------------------------


class _Consolidation(NamedTuple):
    """A model to make of shards, which are opened; its files by their number, and the file of each tensor."""

    source: Source
    output: Store
    files: dict[int, FileParts]
    weights: dict[str, str]
    total_nbytes: int
    options: Options


def consolidate_safetensors_files(
    input_dir: str, output_dir: str, fqn_to_index_mapping: dict[str, int], num_threads: int = 1
) -> None:
    """
    Write whole tensors from shards, as `model-XXXXX-of-NNNNN.safetensors` and `model.safetensors.index.json`.

    Args:
        input_dir: holds the shards that a `HuggingFaceStorageWriter`, shardkeep's or torch's, wrote: a path or a URL.
        output_dir: where the model goes: a path or a URL. A model there is replaced once the new one is complete.
        fqn_to_index_mapping: the number of the file that each tensor goes to, from 1; None for one file.
        num_threads: how many threads to use at least.

    Raises:
        MalformedFile: (a ValueError) the shards are not one whole checkpoint; nothing was written.
        BadMapping: (a ValueError) the mapping names tensors that do not exist; nothing was written.
        ChecksumMismatch: a new file does not hold what was written to it; nothing was published.

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
    """
    Consolidate shards on all ranks, each of which writes some of the files. Returns when the model is published.

    Args:
        input_dir: holds the shards, which all ranks see.
        output_dir: where the model goes.
        fqn_to_index_mapping: the number of the file that each tensor goes to; the same on all ranks.
        num_threads: how many threads each rank uses at least.
        process_group: the ranks that take part; all of them by default.

    Raises:
        CheckpointError: a rank failed; raised on all ranks. What was in `output_dir` is still there.

    """
    world = current_world(process_group, timeout_s=Options().timeout_s)
    _consolidate(lambda: _plan(input_dir, output_dir, fqn_to_index_mapping, num_threads), world)


def _consolidate(make_plan: Callable[[], _Consolidation], world: World | None = None) -> None:
    """Plan on every rank, write this rank's files and read them back, and publish on rank 0."""
    world = world or World(0, 1)
    jobs: list[_Consolidation] = []

    def plan() -> bytes:
        jobs.append(make_plan())
        return b""

    def begin_all(_: list[bytes]) -> list[bytes]:
        names = safetensors_publish.begin_save(
            jobs[0].output, str(uuid.uuid4()), safetensors_publish.prepare_directory(jobs[0].output)
        )
        return [json.dumps(asdict(names)).encode()] * world.size

    with rendezvous(world, "consolidate safetensors files") as meeting:
        names = safetensors_publish.SaveNames(**json.loads(meeting.agree("plan", plan, begin_all)))
    [job] = jobs

    def write() -> bytes:
        mine = [file for number, file in job.files.items() if number % world.size == world.rank]
        write_model_files(job.output, names, mine, job.source, job.options)
        return b""

    def publish(_: list[bytes]) -> list[bytes]:
        files = [file.job.name for file in job.files.values()]
        # A store cannot rename: the files that the new ones replace have other names, and are removed.
        there = () if names.renames else safetensors_publish.list_model(job.output).files
        safetensors_publish.publish_model(
            job.output,
            names,
            files,
            weights=job.weights,
            total_nbytes=job.total_nbytes,
            replaces_saves=False,
            removes=[name for name in there if name in files or _MARKED.fullmatch(name)],
        )
        return [b""] * world.size

    patient = replace(world, timeout_s=world.timeout_s + job.total_nbytes / SLOWEST_BYTES_PER_S)
    try:
        with rendezvous(patient, "consolidate safetensors files") as meeting:
            meeting.agree("write", write, publish)
    except BaseException as error:
        with suppress(CheckpointError):
            if world.solo:
                safetensors_publish.discard_save(job.output, names.save_id)
            elif world.rank == 0 and isinstance(error, CheckpointError):
                # Ranks that did not fail leave their files. Only here is it certain that they will not be published.
                safetensors_publish.prepare_directory(job.output)
        raise


def _plan(input_dir: str, output_dir: str, mapping: Mapping[str, int] | None, num_threads: int) -> _Consolidation:
    output, shards = _place(output_dir), _place(input_dir)
    folder = safetensors_publish.list_model(shards)
    if not folder.files:
        raise MalformedFile(f"{folder.path}: there are no safetensors files", file=folder.path)
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
            raise MalformedFile(
                f"{file.path}: no {CUSTOM_METADATA_KEY}, so it does not say which part of its tensors it holds",
                hint="only shards of a distributed checkpoint can be consolidated; move other files elsewhere",
                file=file.path,
            )
    source = open_shards(folder, shards)
    rows = source.index.tensor_rows
    numbers = dict.fromkeys(rows, 1) if mapping is None else mapping
    last = _last(numbers)
    if missing := sorted(numbers.keys() - rows.keys()):
        raise _not_there(missing, "the shards do not have")
    if dropped := sorted(rows.keys() - numbers.keys()):
        many = format_count(len(dropped), "tensor")
        logger.warning("fqn_to_index_mapping leaves out %s of the shards: %s", many, dropped[:4])
    groups: dict[int, dict[str, TensorPart]] = {}
    for key, number in numbers.items():
        part = TensorPart(key, rows[key], whole(source.index.shape(rows[key])), source.index.dtype(rows[key]))
        groups.setdefault(number, {})[key] = part
    names = {number: _gen_file_name(number, last) for number in sorted(groups)}
    return _Consolidation(
        source,
        output,
        {number: model_file(name, groups[number], {}) for number, name in names.items()},
        {key: names[number] for key, number in numbers.items()},
        sum(part.nbytes for group in groups.values() for part in group.values()),
        options,
    )


def _not_there(missing: list[str], where: str) -> BadMapping:
    return BadMapping(
        f"fqn_to_index_mapping names {format_count(len(missing), 'tensor')} that {where}: {missing[:4]}",
        hint="leave them out of the mapping, or save them",
        key=missing[0],
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


# -- which file each item goes to --------------------------------------------------------------------------------------

# Names are torch's. There are more files where torch's names would make ranks overwrite each other, or would let a
# second shard of a tensor replace the first.


@dataclass(frozen=True)
class Numbers:
    """The numbers in the names of a rank's files."""

    mapping: Mapping[str, int] | None
    """The number of each tensor's file; None where all go to file 1."""
    last: int
    """The largest number."""
    shard: int | None = None
    """Of this rank; None where files are not cut by rank."""
    ranks: int = 0
    """Added to `shard` for each further shard of one tensor that this rank has."""
    instead: Mapping[int, int] = field(default_factory=dict)
    """Other numbers for this rank's files, where other ranks have tensors for the same files."""


Split = Callable[[Any, list[protocol.WriteItem]], dict[int, list[protocol.WriteItem]]]
"""Returns the items of each file: the method of the writer, which a subclass may override."""


def files_of(items: Sequence[protocol.WriteItem], numbers: Numbers, by: Split) -> dict[str, list[protocol.WriteItem]]:
    """Return the files that a rank writes, each with items of different tensors."""
    files = {}
    for number, group in by(numbers.mapping, list(items)).items():
        layers: list[list[protocol.WriteItem]] = []  # no tensor is twice in one
        seen: Counter[str] = Counter()
        for item in group:
            if seen[item.index.fqn] == len(layers):
                layers.append([])
            layers[seen[item.index.fqn]].append(item)
            seen[item.index.fqn] += 1
        if len(layers) > 1 and not numbers.ranks:
            raise InvalidShards(
                f"{layers[-1][0].index.fqn!r} has {len(layers)} shards on one rank, and a file holds only one",
                hint="save with save_distributed=True",
                key=layers[-1][0].index.fqn,
            )
        for depth, layer in enumerate(layers):
            shard = None if numbers.shard is None else numbers.shard + depth * numbers.ranks
            name = _gen_file_name(numbers.instead.get(number, number), numbers.last, shard)
            files[name] = layer
    return files


def number_whole(plans: Sequence[protocol.SavePlan], mapping: Mapping[str, int] | None, by: Split) -> list[Numbers]:
    """Number the files of a save of whole tensors: where several ranks have some for one file, each writes its own."""
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is not None and tuple(data.chunk.sizes) != tuple(data.size):
                raise InvalidShards(
                    f"{item.index.fqn!r} is spread over ranks: of {list(data.size)}, this rank has {list(data.chunk.sizes)}",
                    hint="save with save_distributed=True, or gather the state on rank 0 first",
                    key=item.index.fqn,
                )
    last = _last(mapping)
    # A rank that only reported that its plan has not changed may write to all files.
    everywhere = [1] if mapping is None else sorted(set(mapping.values()))
    wanted = [(sorted(by(mapping, plan.items)) if plan.items else []) if plan.usable else everywhere for plan in plans]
    if max(Counter(number for numbers in wanted for number in numbers).values(), default=1) <= 1:
        return [Numbers(mapping, last) for _ in plans]
    pairs = sorted((number, rank) for rank, numbers in enumerate(wanted) for number in numbers)
    logger.warning("several ranks have tensors for one file: there will be up to %d files instead", len(pairs))
    new = {pair: place for place, pair in enumerate(pairs, start=1)}
    return [
        Numbers(mapping, len(pairs), instead={number: new[number, rank] for number in numbers})
        for rank, numbers in enumerate(wanted)
    ]


_OURS = "shardkeep"
"""Under this key of a plan's storage data is what the coordinator decided for all files of the save."""


# -- the writer --------------------------------------------------------------------------------------------------------


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
        self._alone = self._keys_known = False
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

    def prepare_local_plan(self, plan: protocol.SavePlan) -> protocol.SavePlan:
        """Make sure that the plan has tensors only."""
        storage_place(self)
        for item in plan.items:
            if item.tensor_data is None:
                raise no_tensor(item)
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[protocol.SavePlan]) -> list[protocol.SavePlan]:
        """Decide on all files of the save, and make the directory ready for them."""
        mapping = self.fqn_to_index_mapping
        told: dict[str, Any] = {} if mapping is None else {"fqn_to_index_mapping": mapping}
        return self._settle_plans(
            [
                dataclasses.replace(plan, storage_data=told | ({"shard_index": place} if self.save_distributed else {}))
                for place, plan in enumerate(plans, start=1)
            ]
        )

    def _settle_plans(self, plans: list[protocol.SavePlan]) -> list[protocol.SavePlan]:
        """Add the files to plans in torch's form: those of `prepare_global_plan`, or of a subclass in place of it."""
        if self._names is not None:
            return plans
        told: list[dict[str, Any]] = [plan.storage_data or {} for plan in plans]
        mappings: list[Mapping[str, int] | None] = [each.get("fqn_to_index_mapping") for each in told]
        known = all(plan.usable for plan in plans)  # else a rank only reported that its plan has not changed
        saved = {item.index.fqn for plan in plans for item in plan.items}
        if all("shard_index" in each for each in told):
            numbered = [
                Numbers(mapping, _last(mapping), each["shard_index"], len(plans))
                for mapping, each in zip(mappings, told, strict=True)
            ]
            wanted = mappings[0].keys() if mappings[0] is not None and self.enable_consolidation and known else set()
            if missing := sorted(wanted - saved):
                raise _not_there(missing, "the state does not have")
        else:
            numbered = number_whole(plans, mappings[0], self._split_by_storage_plan)
        count = None
        if known:
            count = sum(
                len(files_of(plan.items, numbers, self._split_by_storage_plan))
                for plan, numbers in zip(plans, numbered, strict=True)
                if plan.items
            )
        store = storage_place(self)
        self._alone, self._keys_known = len(plans) == 1, known
        folder = safetensors_publish.prepare_directory(store)
        self._check_place(folder, saved)
        self._names = safetensors_publish.begin_save(store, self.save_id, folder)
        decided = {"save_id": self.save_id, "marks": self._names.marks, "files": count}
        return [
            dataclasses.replace(plan, storage_data={**each, _OURS: {**decided, "numbers": numbers}})
            for plan, each, numbers in zip(plans, told, numbered, strict=True)
        ]

    def _check_place(self, folder: safetensors_publish.ModelDirectory, saved: set[str]) -> None:
        """Refuse shards beside a model that they do not replace: readers would see that model, or both."""
        if not self.save_distributed:
            return
        listed = set() if folder.index is None else set(read_weight_map(folder.index, folder.opens).values())
        for name, path in folder.files.items():
            if safetensors_publish.made_by_writer(folder, name):
                continue
            twice: list[str] = []
            with suppress(CheckpointError):  # readers report a file that cannot be read
                twice = sorted(saved.intersection(read_header(path, folder.opens).tensors))
            if name in listed or twice:
                why = "it has an index file, and" if name in listed else f"it has {twice[:4]}, too, and with them"
                raise CheckpointThere(
                    f"{folder.path}: holds a model that no save made ({name}): {why} shards could not be read",
                    hint="save to another directory, or delete the model",
                    file=name,
                )

    def write_data(self, plan: protocol.SavePlan, planner: protocol.SavePlanner) -> Future[list[protocol.WriteResult]]:
        """Write this rank's files; all of them are durable when this returns, and none is in place yet."""
        storage_place(self)
        done: Future[list[protocol.WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: protocol.SavePlan, planner: protocol.SavePlanner) -> list[protocol.WriteResult]:
        decided = (plan.storage_data or {}).get(_OURS)
        if decided is None:
            raise BrokenProtocol(
                "the plan does not say which files to write", hint="call prepare_global_plan of this writer first"
            )
        numbers, store = decided["numbers"], storage_place(self)
        names = safetensors_publish.SaveNames(
            decided["save_id"], renames=safetensors_publish.can_rename(store), marks=decided["marks"]
        )
        self._new_save = names.save_id
        metadata = {SAVE_ID_KEY: names.save_id}
        if decided["files"] is not None:
            metadata[FILE_COUNT_KEY] = str(decided["files"])
        plans, final = [], {}
        for name, items in files_of(plan.items, numbers, self._split_by_storage_plan).items():
            written = names.written(name)
            final[written] = name
            plans.append(FilePlan(self.fs.concat_path(self.path, written), written, items))
        try:
            results = write_plans(self, planner, [safetensors_plan(each, metadata) for each in plans])
        except NotAsPlanned:
            # The planner stores something else than it planned: make every tensor once to measure it.
            measure = partial(measured_tensor, planner)
            results = write_plans(self, planner, [safetensors_plan(each, metadata, measure) for each in plans])
        for stored in (result.storage_data for result in results):
            stored.relative_path = final[stored.relative_path]
        return results

    def _alone_s(self, metadata: protocol.Metadata) -> float:
        if self.save_distributed and not self.enable_consolidation:
            return 0.0
        # One rank writes all of it: whole tensors, or the consolidated ones.
        tensors: list[Any] = [
            entry for entry in metadata.state_dict_metadata.values() if protocol.is_tensor_entry(entry)
        ]
        total = sum(torch.Size(entry.size).numel() * entry.properties.dtype.itemsize for entry in tensors)
        return float(total / SLOWEST_BYTES_PER_S)

    def _discard_written(self) -> None:
        """Remove the files of all ranks of a save that failed, unless they are being published."""
        if self._new_save is not None:
            safetensors_publish.discard_save(storage_place(self), self._new_save, last=self._alone)

    def finish(self, metadata: protocol.Metadata, results: list[list[protocol.WriteResult]]) -> None:
        """Publish the files of all ranks, with an index if tensors are whole, and remove those of older saves."""
        written = [result for each in results for result in each]
        store = storage_place(self)
        weights, total = None, 0
        if not self.save_distributed:  # an index names one file for each tensor
            weights = {result.index.fqn: result.storage_data.relative_path for result in written}
            total = sum(result.storage_data.length for result in written)
        files = list(dict.fromkeys(result.storage_data.relative_path for result in written))
        names = self._names or safetensors_publish.SaveNames(
            self.save_id, renames=safetensors_publish.can_rename(store)
        )
        try:
            if not self._keys_known:
                self._check_place(safetensors_publish.list_model(store), {result.index.fqn for result in written})
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
            output, mapping, threads = (
                _place(self.consolidated_output_path),
                self.fqn_to_index_mapping,
                self.thread_count_consolidation,
            )
            _consolidate(lambda: _plan_of(folder, output, mapping, threads))

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
        """The name of the index file."""
        return _metadata_fn
