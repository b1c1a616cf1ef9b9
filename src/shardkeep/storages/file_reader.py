"""
`FileSystemReader`: a load from torch's layout or the native one, on any file system.

Tensors are read in ranges, by several threads, straight into place; what has digests is checked. Nothing of a file is
unpickled but what the allow-list of `protocol.pickled_metadata` and `torch.load(weights_only=True)` let through;
objects go to the planner as bytes.
"""

from __future__ import annotations

import io
import uuid
from typing import IO, Any, cast

from torch.futures import Future

from shardkeep.codec.registry import ExtensionRegistry
from shardkeep.codec.transforms import _StorageReaderTransforms
from shardkeep.errors import BlobNotFound
from shardkeep.format.record import RECORD_NAME
from shardkeep.layout.torch_files import metadata_name
from shardkeep.protocol.file_view import _create_file_view
from shardkeep.protocol.foreign import in_words_of_caller
from shardkeep.protocol.metadata import Metadata, StorageMeta
from shardkeep.protocol.planners import LoadPlanner
from shardkeep.protocol.plans import LoadPlan
from shardkeep.protocol.problems import BrokenProtocol
from shardkeep.protocol.storage import StorageReader
from shardkeep.protocol.stored_items import _StorageInfo
from shardkeep.run.sources import latest
from shardkeep.storages.choosing import file_system_for, is_of_store, pointed, store_of
from shardkeep.storages.file_systems import FileSystem, FileSystemBase, PathLike
from shardkeep.storages.metadata_files import read_metadata
from shardkeep.storages.native_view import NativeView, is_native
from shardkeep.storages.reading import read_plan
from shardkeep.storages.stream_store import StreamStore
from shardkeep.store.protocol import Store


class FileSystemReader(StorageReader):
    """Reads a checkpoint that is a directory of files, or a place of a store."""

    def __init__(self, path: PathLike, _extension_registry: ExtensionRegistry | None = None) -> None:
        """
        Point to a checkpoint.

        Args:
            path: its directory, or the URL of its place: `s3://`, `gs://`, `az://`, `file://`, or what fsspec opens.
            _extension_registry: knows the extensions that items were written through.

        """
        super().__init__()
        self.fs: FileSystemBase
        self.fs, self.path = file_system_for(path)
        self.storage_data: dict[Any, Any] = {}
        self.load_id = str(uuid.uuid4())
        self.transforms = _StorageReaderTransforms(_extension_registry)
        self.rank: int | None = None
        self.use_collectives = True
        self._metadata: Metadata | None = None
        self._native: NativeView | None = None

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        return cast("IO[bytes]", _create_file_view(cast("io.IOBase", file), sinfo.offset, sinfo.length))

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        self.storage_data = {}
        if checkpoint_id:
            self.fs, self.path = pointed(self.fs, checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def _store(self) -> Store | StreamStore:
        return store_of(self.fs, self.path, foreign=True) or StreamStore(self.fs, self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        name = metadata_name(kwargs.get("rank"))
        store = self._store()
        try:
            if kwargs.get("rank") is None and not isinstance(store, StreamStore) and latest(store) == RECORD_NAME:
                raise BlobNotFound(f"{name}: a native checkpoint was saved here since", name=name)
            metadata = read_metadata(store, name, where=str(self.fs.concat_path(self.path, name)))
            self._native = None
        except BlobNotFound:
            if kwargs.get("rank") is not None or not is_native(store):
                raise
            self._native = NativeView.open(store, self.path)
            metadata = self._native.metadata()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return in_words_of_caller(metadata)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if metadata.storage_data is None:
            raise BrokenProtocol(f"the metadata of {self.path} do not say where anything is (storage_data is None)")
        self.storage_data = metadata.storage_data
        self._metadata = metadata
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._native is not None:
            self._native.read(self.storage_data, plan, planner)
        else:
            read_plan(self._store(), self._metadata, self.storage_data, plan, planner, self.transforms)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _get_metadata_path(self, rank: int | None = None) -> PathLike:
        return self.fs.concat_path(self.path, metadata_name(rank))

    @property
    def checkpoint_id(self) -> PathLike:
        """Where the checkpoint is."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return is_of_store(checkpoint_id) or FileSystem.validate_checkpoint_id(checkpoint_id)
