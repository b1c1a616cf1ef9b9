"""The names of `torch.distributed.checkpoint.logging_handlers`."""

from shardkeep.compat.call_log import DCP_LOGGER_NAME

__all__ = ["DCP_LOGGER_NAME"]
