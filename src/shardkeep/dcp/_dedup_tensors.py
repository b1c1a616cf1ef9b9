"""The names of `torch.distributed.checkpoint._dedup_tensors`."""

from shardkeep.dcp._impl.plans import dedup_tensors as dedup_tensors
from shardkeep.layouts.torch_values import SavePlan as SavePlan
