"""The names of `torch.distributed.checkpoint.metadata`."""

from shardkeep.dcp.stateful import StatefulT as StatefulT
from shardkeep.layouts.torch_values import *
from shardkeep.layouts.torch_values import _MEM_FORMAT_ENCODING
