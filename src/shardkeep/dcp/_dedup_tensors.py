"""The names of `torch.distributed.checkpoint._dedup_tensors`."""

from shardkeep.protocol.dedupe import dedup_tensors

__all__ = ["dedup_tensors"]
