"""The names of `torch.distributed.checkpoint.logging_handlers`."""

from torch.distributed.logging_handlers import _log_handlers

from shardkeep.dcp._impl.driver import DCP_LOGGER_NAME as DCP_LOGGER_NAME
