"""The names of `torch.distributed.checkpoint._storage_utils`."""

from shardkeep.dcp._impl.driver import _storage_setup
from shardkeep.dcp._impl.file_reader import *
from shardkeep.dcp._impl.file_writer import *
from shardkeep.layouts.torch_values import *
