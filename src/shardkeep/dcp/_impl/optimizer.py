"""
The state of an optimizer over FSDP1, loaded in shards, before the optimizer has any.

The checkpoint says which tensors there are; the model's own sharded state dict says which part of them this rank needs.
Over FSDP alone each tensor is cut by rows over all ranks. Over FSDP and tensor parallelism the model's values are
ShardedTensors inside ShardedTensors: the outer one is the tensor parallel part, which is cut by rows over the data
parallel ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardkeep.dcp._impl import plans
from shardkeep.dcp._impl.driver import _load_state_dict
from shardkeep.dcp._impl.planners import DefaultLoadPlanner
from shardkeep.errors import BadState, BrokenProtocol, InvalidShards
from shardkeep.layouts import torch_values as protocol
from shardkeep.state.flatten import unflatten_state_dict
from shardkeep.state.leaves import is_dtensor, is_sharded_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec

STATE_DICT_2D_LAYOUT = dict[str, tuple[Sequence[int] | None, Sequence[int]]]
"""For each parameter, the offset of this rank's tensor parallel part (None: it has all of it) and its size."""


def load_sharded_optimizer_state_dict(
    model_state_dict: protocol.STATE_DICT_TYPE,
    optimizer_key: str,
    storage_reader: protocol.StorageReader,
    planner: protocol.LoadPlanner | None = None,
) -> protocol.STATE_DICT_TYPE:
    """
    Return the optimizer's state under a key of the checkpoint, as `FSDP.optim_state_dict_to_load` takes it.

    Tensors of one element are whole on each rank, all others ShardedTensors. All ranks must call this, with the model's
    state under `StateDictType.SHARDED_STATE_DICT`. The `planner` is not used over tensor parallelism.
    """
    metadata = storage_reader.read_metadata()
    layout, group = _get_state_dict_2d_layout(model_state_dict)
    paths = metadata.planner_data
    if not isinstance(paths, dict):
        raise BrokenProtocol(
            "the checkpoint does not store the paths of its keys", hint="save with flatten_state_dict=True"
        )
    state: protocol.STATE_DICT_TYPE = {}
    offsets: dict[str, Sequence[int]] = {}
    device_type = plans.device_of_group(group).type
    for key, entry in metadata.state_dict_metadata.items():
        path = paths[key]
        if path[0] != optimizer_key:
            continue
        if not protocol.is_tensor_entry(entry):
            state[key] = "<bytes_io>"
            continue
        tensor: Any = entry
        if tensor.size.numel() == 1:
            state[key] = _alloc_tensor(tensor.properties, tensor.size, device_type)
            continue
        offset, size = None, tensor.size
        if group is not None:
            offset, size = layout.get(str(path[2]) if len(path) > 2 else "", (None, size))
        state[key] = _cut_by_rows(tensor.properties, size, group, device_type)
        if offset is not None:
            offsets[key] = offset
    if not state:
        raise BadState(
            f"the checkpoint has nothing under {optimizer_key!r}",
            hint="pass the key that the optimizer was saved under",
        )
    storage_reader.reset()
    _load_state_dict(state, storage_reader, planner=planner if group is None else _ReaderWithOffset(offsets))
    return unflatten_state_dict(state, paths)


def _cut_by_rows(
    properties: protocol.TensorProperties, size: Sequence[int], group: ProcessGroup | None, device_type: str
) -> ShardedTensor:
    """Return a ShardedTensor that is split by rows over a group; this rank's shard is allocated."""
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there are ranks
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor  # noqa: PLC0415
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as Properties  # noqa: PLC0415
    from torch.distributed._shard.sharded_tensor.shard import Shard  # noqa: PLC0415

    whole = Properties(dtype=properties.dtype, layout=properties.layout, memory_format=properties.memory_format)
    metadata = _create_colwise_spec(group).build_metadata(torch.Size(size), whole)
    if group is None:
        # As with FSDP, ranks past the last row have no shard.
        metadata.shards_metadata = [each for each in metadata.shards_metadata if each.shard_sizes[0] > 0]
    plain = dataclasses.replace(properties, requires_grad=False)
    mine = [
        Shard(tensor=_alloc_tensor(plain, each.shard_sizes, device_type), metadata=each)
        for each in metadata.shards_metadata
        if each.placement.rank() == dist.get_rank()  # type: ignore[union-attr]
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata, process_group=group)


def _get_state_dict_2d_layout(state_dict: protocol.STATE_DICT_TYPE) -> tuple[STATE_DICT_2D_LAYOUT, ProcessGroup | None]:
    """Return this rank's tensor parallel part of each parameter, and the group that shares it, or None."""
    layout: STATE_DICT_2D_LAYOUT = {}
    group: ProcessGroup | None = None
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            continue
        layout[key] = (None, value.size())
        if not _is_nested_tensor(value):
            continue
        shards = value.local_shards()  # type: ignore[attr-defined]  # a ShardedTensor
        if len(shards) != 1:
            raise InvalidShards(f"{key!r} has {len(shards)} local shards, expected one", key=key)
        layout[key] = (shards[0].metadata.shard_offsets, shards[0].metadata.shard_sizes)
        group = shards[0].tensor._process_group
    return layout, group


def _is_nested_tensor(val: torch.Tensor) -> bool:
    """Return whether a tensor is a ShardedTensor of ShardedTensors; raise for other tensors inside each other."""
    if is_sharded_tensor(val):
        shards = val.local_shards()  # type: ignore[attr-defined]  # a ShardedTensor
        if shards and is_dtensor(shards[0].tensor):
            raise InvalidShards("a DTensor inside a ShardedTensor cannot be loaded for")
        return bool(shards) and is_sharded_tensor(shards[0].tensor)
    if is_dtensor(val):
        local = val._local_tensor  # type: ignore[attr-defined]  # a DTensor
        if is_dtensor(local) or is_sharded_tensor(local):
            raise InvalidShards(f"a {type(local).__name__} inside a DTensor cannot be loaded for")
    return False


def _gen_rank_device(global_rank: int, device_type: str = "cuda") -> str:
    """Return the device of a rank as placements write it: ranks are assigned to devices in turn."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:
        return "cpu"
    return _normalize_device_info(device_type, global_rank % torch.accelerator.device_count())


def _create_colwise_spec(pg: ProcessGroup | None = None) -> ChunkShardingSpec:
    """Return how a tensor is cut by rows over a group; ranks are those of the default group."""
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there are ranks
    from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec  # noqa: PLC0415

    device_type = plans.device_of_group(pg).type
    placements: list[Any] = []
    for rank in range(dist.get_world_size(pg)):
        everywhere = rank if pg is None else dist.get_global_rank(pg, rank)
        placements.append(f"rank:{everywhere}/{_gen_rank_device(everywhere, device_type)}")
    return ChunkShardingSpec(dim=0, placements=placements)


def _alloc_tensor(props: protocol.TensorProperties, size: Sequence[int], device_type: str = "cuda") -> torch.Tensor:
    return torch.empty(
        size=tuple(size),
        dtype=props.dtype,
        layout=props.layout,
        requires_grad=props.requires_grad,
        # Only CPU memory can be pinned, whatever the saved tensor was.
        pin_memory=props.pin_memory and device_type == "cpu",
        device=plans.current_device(device_type),
    )


class _ReaderWithOffset(DefaultLoadPlanner):
    """Fills ShardedTensors that are a part of a stored tensor, which begins at `fqn_to_offset`."""

    metadata: protocol.Metadata

    def __init__(self, fqn_to_offset: dict[str, Sequence[int]]) -> None:
        super().__init__()
        self.fqn_to_offset = fqn_to_offset
        self.translation: dict[protocol.MetadataIndex, protocol.MetadataIndex] = {}

    def create_local_plan(self) -> protocol.LoadPlan:
        """Return what this rank needs, with the offsets of its shards in the stored tensor."""
        items: list[protocol.ReadItem] = []
        self.translation = {}
        for fqn, value in self.state_dict.items():
            entry: Any = self.metadata.state_dict_metadata[fqn]
            if fqn not in self.fqn_to_offset or not is_sharded_tensor(value):
                items += plans._create_read_items(fqn, entry, value)
                continue
            offset = self.fqn_to_offset[fqn]
            moved = [
                protocol.ChunkStorageMetadata(
                    offsets=torch.Size(_element_wise_add(shard.metadata.shard_offsets, offset)),
                    sizes=torch.Size(shard.metadata.shard_sizes),
                )
                for shard in value.local_shards()
            ]
            of_shards = plans.create_read_items_for_chunk_list(fqn, entry, moved)
            for there in (item.dest_index for item in of_shards):
                here = _element_wise_sub(there.offset or (), offset)
                self.translation[there] = dataclasses.replace(there, offset=torch.Size(here))
            items += of_shards
        return protocol.LoadPlan(items)

    def lookup_tensor(self, index: protocol.MetadataIndex) -> torch.Tensor:
        return super().lookup_tensor(self.translation.get(index, index))


def _element_wise_add(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=False)]


def _element_wise_sub(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x - y for x, y in zip(a, b, strict=False)]


def _normalize_device_info(device_type: str, device_id: int) -> str:
    return "cpu" if device_type == "cpu" else f"{device_type}:{device_id}"
