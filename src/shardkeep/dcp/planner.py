"""The names of `torch.distributed.checkpoint.planner`."""

from shardkeep.layouts.torch_values import *
