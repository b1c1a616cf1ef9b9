"""The names of `torch.distributed.checkpoint._checkpointer`."""

from shardkeep.compat.checkpointer import _Checkpointer

__all__ = ["_Checkpointer"]
