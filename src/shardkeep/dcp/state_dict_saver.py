"""The names of `torch.distributed.checkpoint.state_dict_saver`."""

from shardkeep.compat.async_save import AsyncCheckpointerType, AsyncSaveResponse, async_save
from shardkeep.compat.calls import _stateful_to_state_dict
from shardkeep.compat.save_driver import _save_state_dict, save, save_state_dict

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "_save_state_dict",
    "_stateful_to_state_dict",
    "async_save",
    "save",
    "save_state_dict",
]
