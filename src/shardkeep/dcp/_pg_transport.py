"""The names of `torch.distributed.checkpoint._pg_transport`."""

from shardkeep.dcp._impl.transport import PGTransport as PGTransport
from shardkeep.dcp._impl.transport import (
    _cast_tensor,
    _DTensorMeta,
    _prepare_state_dict,
    _prepare_tensor,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
    _timeit,
)
