"""The names of `torch.distributed.checkpoint.storage`."""

from shardkeep.layouts.torch_values import *
