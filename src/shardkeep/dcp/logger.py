"""The names of `torch.distributed.checkpoint.logger`."""

from shardkeep.dcp._impl.calls import (
    DCP_LOGGER_NAME,
    _dcp_logger,
    _dcp_method_logger,
    _get_msg_dict,
    _init_logger,
    _msg_dict_from_dcp_method_args,
    logger,
)

__all__ = [
    "DCP_LOGGER_NAME",
    "_dcp_logger",
    "_dcp_method_logger",
    "_get_msg_dict",
    "_init_logger",
    "_msg_dict_from_dcp_method_args",
    "logger",
]
