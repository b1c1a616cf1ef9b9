"""The names of `torch.distributed.checkpoint.logger`."""

from shardkeep.dcp._impl.driver import DCP_LOGGER_NAME as DCP_LOGGER_NAME
from shardkeep.dcp._impl.driver import (
    _dcp_logger,
    _dcp_method_logger,
    _get_msg_dict,
    _init_logger,
    _msg_dict_from_dcp_method_args,
)
from shardkeep.dcp._impl.driver import logger as logger
