"""The names of `torch.distributed.checkpoint._dedup_tensors`."""

from shardkeep.dcp.planner import SavePlan
from shardkeep.protocol.dedupe import dedup_tensors

__all__ = ["SavePlan", "dedup_tensors"]
