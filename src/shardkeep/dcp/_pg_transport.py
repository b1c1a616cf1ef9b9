"""The names of `torch.distributed.checkpoint._pg_transport`."""

from shardkeep.dcp._impl.transport import PGTransport, _timeit
from shardkeep.dcp._impl.transport_wire import (
    _cast_tensor,
    _DTensorMeta,
    _prepare_state_dict,
    _prepare_tensor,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
)

__all__ = [
    "PGTransport",
    "_DTensorMeta",
    "_ShardedTensorMeta",
    "_StateDictMeta",
    "_TensorMeta",
    "_cast_tensor",
    "_prepare_state_dict",
    "_prepare_tensor",
    "_timeit",
]
