"""The names of `torch.distributed.checkpoint._traverse`."""

from collections.abc import MutableMapping
from typing import Any

from shardkeep.state.flatten import *
from shardkeep.state.flatten import PATH_ITEM as PATH_ITEM
from shardkeep.state.flatten import _keep_visiting_tensors, _print_nested

STATE_DICT_ITEM = object
STATE_DICT_TYPE = dict[str, Any]
CONTAINER_TYPE = MutableMapping[PATH_ITEM, STATE_DICT_ITEM]
