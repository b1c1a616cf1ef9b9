"""The names of `torch.distributed.checkpoint.logger`."""

from shardkeep.dcp._impl.driver import DCP_LOGGER_NAME as DCP_LOGGER_NAME
from shardkeep.dcp._impl.driver import _dcp_logger as _dcp_logger
from shardkeep.dcp._impl.driver import _dcp_method_logger as _dcp_method_logger
from shardkeep.dcp._impl.driver import _get_msg_dict as _get_msg_dict
from shardkeep.dcp._impl.driver import _init_logger as _init_logger
from shardkeep.dcp._impl.driver import _msg_dict_from_dcp_method_args as _msg_dict_from_dcp_method_args
from shardkeep.dcp._impl.driver import logger as logger
