"""The names of `torch.distributed.checkpoint._dedup_save_plans`."""

from shardkeep.protocol.dedupe import dedup_save_plans

__all__ = ["dedup_save_plans"]
