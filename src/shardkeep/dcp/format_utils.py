"""The names of `torch.distributed.checkpoint.format_utils`, and its command."""

from shardkeep.compat.conversion import dcp_to_torch_save, torch_save_to_dcp
from shardkeep.compat.conversion_broadcast import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from shardkeep.compat.conversion_command import FormatMode, main

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "FormatMode",
    "dcp_to_torch_save",
    "main",
    "torch_save_to_dcp",
]

if __name__ == "__main__":
    main()
