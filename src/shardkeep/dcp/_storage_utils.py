"""The names of `torch.distributed.checkpoint._storage_utils`."""

from shardkeep.compat.calls import _storage_setup

__all__ = ["_storage_setup"]
