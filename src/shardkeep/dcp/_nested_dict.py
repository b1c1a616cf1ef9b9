"""The names of `torch.distributed.checkpoint._nested_dict`."""

from shardkeep.dcp import _version
from shardkeep.dcp._traverse import STATE_DICT_ITEM as STATE_DICT_ITEM
from shardkeep.dcp._traverse import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.state.flatten import *
