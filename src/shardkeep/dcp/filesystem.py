"""The names of `torch.distributed.checkpoint.filesystem`."""

from shardkeep.codecs.stream_extensions import *
from shardkeep.codecs.stream_extensions import _StorageReaderTransforms, _StorageWriterTransforms
from shardkeep.dcp._impl.file_reader import FileSystemReader as FileSystemReader
from shardkeep.dcp._impl.file_reader import _create_file_view
from shardkeep.dcp._impl.file_writer import FileSystemWriter as FileSystemWriter
from shardkeep.dcp._impl.file_writer import (
    _FileSystemWriter,
    _generate_uuid,
    _split_by_size_and_type,
    _write_item,
)
from shardkeep.engine.stagers import BlockingAsyncStager as BlockingAsyncStager
from shardkeep.layouts.safetensors import *
from shardkeep.layouts.torch_values import *
from shardkeep.layouts.torch_values import _metadata_fn, _StorageInfo, _StoragePrefix
from shardkeep.layouts.torch_values import chunk_nbytes as _item_size
from shardkeep.storage.file_systems import *
