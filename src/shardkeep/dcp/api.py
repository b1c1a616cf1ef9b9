"""The names of `torch.distributed.checkpoint.api`."""

from shardkeep.errors import WRAPPED_EXCEPTION as WRAPPED_EXCEPTION
from shardkeep.errors import CheckpointException as CheckpointException
from shardkeep.errors import _is_wrapped_exception, _wrap_exception
