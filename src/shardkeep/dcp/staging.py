"""The names of `torch.distributed.checkpoint.staging`."""

from shardkeep.dcp._impl.transport import PGTransport as PGTransport
from shardkeep.dcp._impl.transport import _ReplicationStager as _ReplicationStager
from shardkeep.engine.stagers import AsyncStager as AsyncStager
from shardkeep.engine.stagers import BlockingAsyncStager as BlockingAsyncStager
from shardkeep.engine.stagers import DefaultStager as DefaultStager
from shardkeep.engine.stagers import StagingOptions as StagingOptions
from shardkeep.engine.stagers import StateDictStager as StateDictStager
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.state.offload import copy_state_dict, create_cpu_state_dict

_copy_state_dict = copy_state_dict
_create_cpu_state_dict = create_cpu_state_dict
