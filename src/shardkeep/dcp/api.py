"""The names of `torch.distributed.checkpoint.api`."""

from shardkeep.errors import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    _is_wrapped_exception,
    _wrap_exception,
)

__all__ = ["WRAPPED_EXCEPTION", "CheckpointException", "_is_wrapped_exception", "_wrap_exception"]
