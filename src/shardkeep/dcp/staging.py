"""The names of `torch.distributed.checkpoint.staging`."""

from shardkeep.compat.replication import _ReplicationStager
from shardkeep.dcp._pg_transport import PGTransport
from shardkeep.dcp._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from shardkeep.protocol.metadata import STATE_DICT_TYPE
from shardkeep.stage.blocking import BlockingAsyncStager
from shardkeep.stage.stagers import AsyncStager, DefaultStager, StagingOptions, StateDictStager

__all__ = [
    "STATE_DICT_TYPE",
    "AsyncStager",
    "BlockingAsyncStager",
    "DefaultStager",
    "PGTransport",
    "StagingOptions",
    "StateDictStager",
    "_ReplicationStager",
    "_copy_state_dict",
    "_create_cpu_state_dict",
]
