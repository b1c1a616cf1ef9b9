"""The names of `torch.distributed.checkpoint._dedup_save_plans`."""

from shardkeep.dcp.planner import SavePlan, WriteItem
from shardkeep.protocol.dedupe import dedup_save_plans

__all__ = ["SavePlan", "WriteItem", "dedup_save_plans"]
