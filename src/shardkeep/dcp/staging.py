"""The names of `torch.distributed.checkpoint.staging`."""

from shardkeep.dcp._impl.transport import PGTransport, _ReplicationStager
from shardkeep.engine.stagers import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions, StateDictStager
from shardkeep.layouts.torch_values import STATE_DICT_TYPE
from shardkeep.state.offload import (
    copy_state_dict as _copy_state_dict,
)
from shardkeep.state.offload import (
    create_cpu_state_dict as _create_cpu_state_dict,
)

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
