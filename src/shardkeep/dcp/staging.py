"""The names of `torch.distributed.checkpoint.staging`."""

from shardkeep.compat.replication import _ReplicationStager
from shardkeep.protocol.metadata import STATE_DICT_TYPE
from shardkeep.stage.blocking import BlockingAsyncStager
from shardkeep.stage.stagers import AsyncStager, DefaultStager, StagingOptions, StateDictStager

__all__ = [
    "STATE_DICT_TYPE",
    "AsyncStager",
    "BlockingAsyncStager",
    "DefaultStager",
    "StagingOptions",
    "StateDictStager",
    "_ReplicationStager",
]
