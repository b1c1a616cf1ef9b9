"""
From the shards of a checkpoint to a Hugging Face model: whole tensors, files as a mapping says, and an index of them.

All headers are read and checked first, so that nothing is written for shards that are not one whole checkpoint. New
files are written beside what is there and take its place when all of them are durable, the index file last.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from shardkeep.errors import CheckpointError, MalformedFile, StateError
from shardkeep.layout.safetensors_files import SafetensorsFile
from shardkeep.layout.safetensors_folder import Reads, look
from shardkeep.layout.safetensors_names import CUSTOM_METADATA_KEY
from shardkeep.layout.safetensors_publish import Names, begin, discard, prepare, publish
from shardkeep.options import Options
from shardkeep.ranks.agree import meet
from shardkeep.ranks.world import current_world
from shardkeep.run.safetensors_catalog import Catalog, catalog_of, read_headers
from shardkeep.storages.consolidate_windows import OutputFile, output_file, write_whole
from shardkeep.storages.hugging_face_names import _gen_file_name
from shardkeep.storages.places import same_place
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("shardkeep")

SLOWEST_BYTES_PER_S = 50 << 20
"""A rank that writes this fast is waited for, however much it has to write."""


_MARKED = re.compile(r"model-\d+-of-\d+-[0-9a-f]{8}\.safetensors")
"""What only this makes."""


class BadMapping(StateError, ValueError, KeyError):
    """A mapping from tensors to files that does not fit the tensors."""


@dataclass(frozen=True)
class _Job:
    """What is to be made."""

    inputs: Reads
    """Opens the shards."""
    output: Store
    files: dict[int, OutputFile]
    """By their number."""
    weights: dict[str, str]
    total_nbytes: int

    @property
    def names(self) -> list[str]:
        """What the files are called."""
        return [file.name for file in self.files.values()]


def consolidate_safetensors_files(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
) -> None:
    """
    Make whole tensors of sharded ones: files `model-XXXXX-of-NNNNN.safetensors` and `model.safetensors.index.json`.

    Args:
        input_dir: holds the shards, as `HuggingFaceStorageWriter` of ours or torch's writes them: a path or a URL.
        output_dir: where the model goes: a path or a URL. One that is there stays as it is until the new one is complete.
        fqn_to_index_mapping: the number of the file that each tensor goes to, from 1; None for one file.
        num_threads: how many threads to use at least.

    Raises:
        MalformedFile: (a ValueError) the shards are not one whole checkpoint; nothing was written.
        BadMapping: (a ValueError) the mapping names tensors that there are not; nothing was written.

    """
    begun = time.monotonic()
    save_id = str(uuid.uuid4())
    _make(_plan(input_dir, output_dir, fqn_to_index_mapping, num_threads), save_id, num_threads)
    logger.info("consolidated %s into %s in %.1f s", input_dir, output_dir, time.monotonic() - begun)


def consolidate_files(
    store: Store,
    names: Sequence[str],
    output_dir: str,
    fqn_to_index_mapping: Mapping[str, int] | None,
    num_threads: int,
) -> None:
    """Do the same for shards that are known by their names in a store."""
    headers = read_headers(names, threads=_threads(num_threads), opens=store)
    job = _plan_of(store, catalog_of(headers), _place(output_dir), fqn_to_index_mapping)
    _make(job, str(uuid.uuid4()), num_threads)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: ProcessGroup | None = None,
) -> None:
    """
    Do the same on all ranks, each of which makes some of the files. Returns when all of them are there.

    Args:
        input_dir: holds the shards; all ranks see the same ones.
        output_dir: where the model goes.
        fqn_to_index_mapping: the number of the file that each tensor goes to; the same on all ranks.
        num_threads: how many threads each rank uses at least.
        process_group: the ranks that take part; all of them by default.

    Raises:
        CheckpointError: some rank failed; the same on all ranks. What was in `output_dir` is still there.

    """
    world = current_world(process_group, timeout_s=Options().timeout_s)
    if world.solo:
        consolidate_safetensors_files(input_dir, output_dir, fqn_to_index_mapping, num_threads)
        return
    jobs: list[_Job] = []

    def plan() -> bytes:
        jobs.append(_plan(input_dir, output_dir, fqn_to_index_mapping, num_threads))
        return b""

    def begin_all(_: list[bytes]) -> list[bytes]:
        [job] = jobs
        names = begin(job.output, str(uuid.uuid4()), prepare(job.output))
        return [json.dumps(asdict(names)).encode()] * world.size

    with meet(world, "consolidate safetensors files") as meeting:
        names = Names(**json.loads(meeting.agree("plan", plan, begin_all)))
    [job] = jobs
    mine = [number for number in job.files if number % world.size == world.rank]

    def write() -> bytes:
        _write(job, mine, names, num_threads)
        return b""

    def complete(_: list[bytes]) -> list[bytes]:
        _publish(job, names)
        return [b""] * world.size

    patient = replace(world, timeout_s=world.timeout_s + job.total_nbytes / SLOWEST_BYTES_PER_S)
    try:
        with meet(patient, "consolidate safetensors files") as meeting:
            meeting.agree("write", write, complete)
    except CheckpointError:
        if world.rank == 0:
            # Ranks that did not fail leave their files: only here is it known that nobody will publish them.
            with suppress(CheckpointError):
                prepare(job.output)
        raise


# -- steps -------------------------------------------------------------------------------------------------------------


def _plan(input_dir: str, output_dir: str, mapping: Mapping[str, int] | None, num_threads: int) -> _Job:
    output, shards = _place(output_dir), _place(input_dir)
    folder = look(shards)
    if not folder.files:
        raise MalformedFile(f"{folder.path}: there are no safetensors files", file=folder.path)
    headers = read_headers(folder.files.values(), threads=_threads(num_threads), opens=folder.opens)
    if same_place(shards, output):
        # What an earlier call made of earlier shards.
        headers = [file for file in headers if _is_shard(file) or not file.name.startswith("model-")]
    for file in headers:
        if not _is_shard(file):
            raise MalformedFile(
                f"{file.path}: no {CUSTOM_METADATA_KEY}, so it does not say which part of its tensors it holds",
                hint="only what a distributed checkpoint wrote can be consolidated; move other files elsewhere",
                file=file.path,
            )
    return _plan_of(folder.opens, catalog_of(headers), output, mapping)


def _place(directory: str | os.PathLike[str]) -> Store:
    return open_store(directory, direct=Options().direct_io)


def _is_shard(file: SafetensorsFile) -> bool:
    return bool(file.metadata.get(CUSTOM_METADATA_KEY))


def _plan_of(inputs: Reads, catalog: Catalog, output: Store, mapping: Mapping[str, int] | None) -> _Job:
    numbers = dict.fromkeys(catalog, 1) if mapping is None else mapping
    check_mapping(numbers)
    if missing := sorted(numbers.keys() - catalog.keys()):
        raise BadMapping(
            f"fqn_to_index_mapping names {len(missing)} tensors that the shards do not have: {missing[:4]}",
            hint="leave them out of the mapping, or save them",
            key=missing[0],
        )
    if dropped := sorted(catalog.keys() - numbers.keys()):
        logger.warning("fqn_to_index_mapping leaves out %d tensors of the shards: %s …", len(dropped), dropped[:4])
    last = max(numbers.values())
    groups: dict[int, Catalog] = {}
    for key, number in numbers.items():
        groups.setdefault(number, {})[key] = catalog[key]
    files = {number: output_file(_gen_file_name(number, last), group) for number, group in sorted(groups.items())}
    weights = {key: _gen_file_name(number, last) for key, number in numbers.items()}
    return _Job(inputs, output, files, weights, sum(catalog[key].nbytes for key in numbers))


def check_mapping(mapping: Mapping[str, int]) -> None:
    """Make sure that a mapping gives each tensor the number of a file."""
    if not mapping:
        raise BadMapping("fqn_to_index_mapping is empty: there is no file to write")
    for key, number in mapping.items():
        if type(number) is not int or number < 1:
            raise BadMapping(
                f"fqn_to_index_mapping gives {key!r} the file {number!r}", hint="files are counted from 1", key=key
            )


def _make(job: _Job, save_id: str, num_threads: int) -> None:
    names = begin(job.output, save_id, prepare(job.output))
    try:
        _write(job, list(job.files), names, num_threads)
        _publish(job, names)
    except BaseException:
        with suppress(CheckpointError):
            discard(job.output, save_id)
        raise


def _write(job: _Job, numbers: Sequence[int], names: Names, num_threads: int) -> None:
    write_whole(
        job.output,
        [job.files[number] for number in numbers],
        job.inputs,
        names=names,
        threads=_threads(num_threads),
        budget_nbytes=Options().host_budget_bytes,
    )


def _publish(job: _Job, names: Names) -> None:
    # Where new files cannot take the names of those that they replace, these have to go.
    there = () if names.renames else look(job.output).files
    old = [name for name in there if name in job.names or _MARKED.fullmatch(name)]
    publish(
        job.output,
        names,
        job.names,
        weights=job.weights,
        total_nbytes=job.total_nbytes,
        replaces_saves=False,
        removes=old,
    )


def _threads(asked: int) -> int:
    return max(asked, Options().io_threads)
