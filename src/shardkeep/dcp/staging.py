"""The names of `torch.distributed.checkpoint.staging`."""

from shardkeep.dcp._impl.transport import PGTransport as PGTransport
from shardkeep.dcp._impl.transport import _ReplicationStager
from shardkeep.engine.stagers import *
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.state.offload import copy_state_dict as _copy_state_dict
from shardkeep.state.offload import create_cpu_state_dict as _create_cpu_state_dict
