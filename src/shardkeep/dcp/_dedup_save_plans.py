"""The names of `torch.distributed.checkpoint._dedup_save_plans`."""

from shardkeep.dcp._impl.plans import dedup_save_plans as dedup_save_plans
from shardkeep.layouts.torch_values import *
