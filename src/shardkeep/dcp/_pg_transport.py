"""The names of `torch.distributed.checkpoint._pg_transport`."""

from shardkeep.dcp._impl.transport import PGTransport as PGTransport
from shardkeep.dcp._impl.transport import _timeit as _timeit
from shardkeep.dcp._impl.transport_wire import _cast_tensor as _cast_tensor
from shardkeep.dcp._impl.transport_wire import _DTensorMeta as _DTensorMeta
from shardkeep.dcp._impl.transport_wire import _prepare_state_dict as _prepare_state_dict
from shardkeep.dcp._impl.transport_wire import _prepare_tensor as _prepare_tensor
from shardkeep.dcp._impl.transport_wire import _ShardedTensorMeta as _ShardedTensorMeta
from shardkeep.dcp._impl.transport_wire import _StateDictMeta as _StateDictMeta
from shardkeep.dcp._impl.transport_wire import _TensorMeta as _TensorMeta
