"""
`FileSystemWriter`: a save in torch's layout, on any file system or store.

Data files get names that no other file has; the metadata, which name them, are put in place last and in one step. Only
then are the files of the checkpoint that was replaced removed. A save that fails or dies leaves what was there before.
"""

from __future__ import annotations

import dataclasses
import queue
import time
import uuid
import warnings
from collections.abc import Sequence
from typing import Any

from torch.futures import Future

from shardkeep.codec.extensions import StreamTransformExtension
from shardkeep.codec.transforms import _StorageWriterTransforms
from shardkeep.errors import CheckpointExists
from shardkeep.format.record import RECORD_NAME
from shardkeep.layout.torch_files import SUMS_SUFFIX, Sums, metadata_name
from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from shardkeep.protocol.planners import SavePlanner
from shardkeep.protocol.plans import SavePlan, WriteItem, WriteItemType
from shardkeep.protocol.storage import StorageWriter, WriteResult
from shardkeep.protocol.stored_items import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    SerializationFormat,
    _StorageInfo,
    _StoragePrefix,
)
from shardkeep.stage.blocking import BlockingAsyncStager
from shardkeep.storages.buckets import _split_by_size_and_type
from shardkeep.storages.choosing import file_system_for, is_of_store, pointed
from shardkeep.storages.commit import Commit
from shardkeep.storages.commit_place import first_number, place_for
from shardkeep.storages.file_systems import FileSystem, FileSystemBase, PathLike
from shardkeep.storages.metadata_files import files_of, metadata_files
from shardkeep.storages.writing import FilePlan, write_plans


class CheckpointThere(CheckpointExists, RuntimeError):
    """A checkpoint is there already, and the writer may not replace it."""


def _generate_uuid() -> str:
    return str(uuid.uuid4())


class _FileSystemWriter(StorageWriter):
    """Writes items into a few files a rank."""

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Point to a directory.

        Args:
            path: where the checkpoint goes: a directory, or a URL (`s3://`, `gs://`, `az://`, `file://`, or what fsspec
                opens).
            single_file_per_rank: one file a rank and thread, instead of one for each tensor or object.
            sync_files: make files survive a loss of power before the save ends.
            thread_count: how many files a rank writes at the same time.
            per_thread_copy_ahead: has no effect: copies from a device are always made a window ahead.
            overwrite: replace a checkpoint that is there; otherwise it is an error.
            _extensions: transform what is written, the first one nearest to the file.
            serialization_format: tensors as `torch.save` writes them, or safetensors files.

        """
        super().__init__()
        self.fs: FileSystemBase
        self.fs, self.path = file_system_for(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.save_id = _generate_uuid()
        self.overwrite = overwrite
        self.transforms = _StorageWriterTransforms(_extensions)
        self.serialization_format = serialization_format
        self.rank: int | None = None
        self.use_collectives = True
        self._began_s = time.time()
        self._written: list[str] = []

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        if checkpoint_id:
            self.fs, self.path = pointed(self.fs, checkpoint_id)
        self.save_id = _generate_uuid()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._began_s = time.time()
        self._written = []  # of a save before this one, which is not to be discarded with it

    def _alone_s(self, metadata: Metadata) -> float:
        """Return how long the coordinator may be at work on this save when the other ranks are done."""
        return 0.0

    def _metadata_exists(self) -> bool:
        # Where each rank has metadata of its own, others may have put theirs there in this very save.
        own = self._get_metadata_path(None if self.use_collectives else self.rank)
        return self.fs.exists(own) or self.fs.exists(self.fs.concat_path(self.path, RECORD_NAME))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.fs.mkdir(self.path)
        if self._metadata_exists():
            if not self.overwrite:
                raise CheckpointThere(
                    f"{self.path}: Checkpoint already exists and self.overwrite={self.overwrite}.",
                    hint="save to another place, or pass overwrite=True",
                )
            warnings.warn(f"{self.path} holds a checkpoint, which this save will replace", stacklevel=2)
        if self.rank is not None and not self.use_collectives:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_")) if plan.storage_data is None else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        buckets = (
            _split_by_size_and_type(self.thread_count, plan.items)
            if self.single_file_per_rank
            else [[item] for item in plan.items]
        )
        files: queue.Queue[tuple[PathLike, str, list[Any]]] = queue.Queue()
        number = first_number(place_for(self.fs, self.path, sync=self.sync_files))
        for bucket in filter(None, self._split_formats(buckets)):
            # A name that is taken belongs to a checkpoint that must stay whole until this one is.
            while True:
                name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
                path = self.fs.concat_path(self.path, name)
                number += 1
                if not self.fs.exists(path):
                    break
            files.put((path, name, bucket))
        self._written = [name for _, name, _ in files.queue]
        return self._write_data(planner, files)

    def _supersede_common(self) -> None:
        """Take away the metadata of all ranks together, once each rank has put its own in their place."""
        self._commit().supersede_common()

    def _discard_written(self) -> None:
        """Remove what this rank wrote last; for a save that failed on another rank, and was not committed."""
        self._commit().remove({name + suffix for name in self._written for suffix in ("", SUMS_SUFFIX)})

    def _split_formats(self, buckets: list[list[WriteItem]]) -> list[list[WriteItem]]:
        """Keep objects apart from tensors where tensors are to be in safetensors files."""
        if self.serialization_format == SerializationFormat.TORCH_SAVE:
            return buckets
        objects = [[item for item in bucket if item.type == WriteItemType.BYTE_IO] for bucket in buckets]
        tensors = [[item for item in bucket if item.type != WriteItemType.BYTE_IO] for bucket in buckets]
        return [*objects, *tensors]

    def _write_data(
        self, planner: SavePlanner, file_queue: queue.Queue[tuple[PathLike, str, list[Any]]]
    ) -> Future[list[WriteResult]]:
        """Write files, each given by its path, its name in the checkpoint, and its items."""
        plans = []
        while not file_queue.empty():
            path, name, items = file_queue.get_nowait()
            plans.append(FilePlan(path, name, items))
        written: Future[list[WriteResult]] = Future()
        written.set_result(write_plans(self, planner, plans))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        sums: dict[str, Sums] = {}
        places: dict[Any, Any] = {}
        for result in (each for of_rank in results for each in of_rank):
            places[result.index] = result.storage_data
            if isinstance(result.storage_data, _StorageInfo) and (of_file := result.storage_data.take_sums()):
                nbytes, block_nbytes, checksum = of_file
                sums[result.storage_data.relative_path] = Sums(
                    nbytes=nbytes, block_nbytes=block_nbytes, checksum=checksum
                )
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        keep_sums(metadata, sums)
        rank = None if self.use_collectives else self.rank
        self._commit().publish(
            metadata_files(metadata, metadata_name(rank)),
            sums=sums,
            own=self._written,
            keep=files_of(metadata),
            began_s=self._began_s,
        )

    def _commit(self) -> Commit:
        return Commit(place_for(self.fs, self.path, sync=self.sync_files))

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def _get_metadata_path(self, rank: int | None = None) -> PathLike:
        return self.fs.concat_path(self.path, metadata_name(rank))

    @property
    def checkpoint_id(self) -> PathLike:
        """Where the checkpoint goes."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return is_of_store(checkpoint_id) or FileSystem.validate_checkpoint_id(checkpoint_id)


def keep_sums(metadata: Metadata, sums: dict[str, Sums]) -> None:
    """Put what is known of the data files where torch's classes have nothing: it is pickled, and torch ignores it."""
    vars(metadata)["shardkeep_sums"] = {
        name: (each.nbytes, each.block_nbytes, each.checksum) for name, each in sorted(sums.items())
    }


class FileSystemWriter(_FileSystemWriter, BlockingAsyncStager):
    """
    Writes a checkpoint in torch's layout into a directory: a few data files a rank, and `.metadata`.

    Any torch reads it. Digests of the data files are kept beside them, which our reader checks.
    """

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        """
        Point to a directory.

        Args:
            path: where the checkpoint goes: a directory, or a URL (`s3://`, `gs://`, `az://`, `file://`, or what fsspec
                opens).
            single_file_per_rank: one file a rank and thread, instead of one for each tensor or object.
            sync_files: make files survive a loss of power before the save ends.
            thread_count: how many files a rank writes at the same time.
            per_thread_copy_ahead: has no effect: copies from a device are always made a window ahead.
            cache_staged_state_dict: keep the memory of staged states for the next save.
            overwrite: replace a checkpoint that is there; otherwise it is an error.
            _extensions: transform what is written, the first one nearest to the file.
            serialization_format: tensors as `torch.save` writes them, or safetensors files.

        """
        _FileSystemWriter.__init__(
            self,
            path=path,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """Return a copy of the state in host memory."""
        return super().stage(state_dict)
