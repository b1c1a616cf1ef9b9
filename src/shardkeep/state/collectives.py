"""
Collectives over state dicts: gather sharded tensors, broadcast or distribute full ones.

Gathering makes each DTensor and ShardedTensor whole, one at a time, so a rank holds at most one full tensor beyond the
result. Broadcasting sends the full tensors of one rank through one buffer of fixed size; a rank keeps only its own part.
Bytes are moved and not numbers, so every dtype travels over every backend bit for bit.

Collectives that do not match hang, or mix up tensors. So ranks first agree, through the key-value store, on what they are
about to move: if anything differs or does not fit on one rank, all ranks raise the same error and nothing has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import operator
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.errors import CheckpointError, InvalidShards, RanksDisagree, StateMismatch, UnsupportedLeaf
from shardkeep.format.boxes import Box, Ints, flat_range_to_boxes, intersect, relative, slices, whole
from shardkeep.options import Options
from shardkeep.state.flatten import leaves_of, map_leaves, value_at
from shardkeep.state.leaves import (
    TreePath,
    as_bytes,
    carrier_of,
    copy_bits,
    describe_leaf,
    is_dtensor,
    is_plain,
    is_sharded_tensor,
    path_name,
    wait_tensor,
)
from shardkeep.state.offload import _identity_func, check_plain_types, iterate_state_dict, same_layout
from shardkeep.state.placement import dtensor_boxes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BATCH_BYTES = 64 << 20
"""Size of the broadcast buffer: large enough for full bandwidth, small beside any model."""
_ALIGNED = 16  # every dtype can be viewed at multiples of this
_CPU = torch.device("cpu")
_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple})
"""Exactly these are opened in state dicts that are sent; a subclass is one value."""


def gather_state_dict(
    state_dict: dict[str, Any],
    *,
    pg: ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
) -> dict[str, Any]:
    """
    Return the state dict with each DTensor and ShardedTensor as one full tensor.

    All ranks that hold parts of a tensor must call this, with trees of the same order; this is checked before anything
    is gathered. Gathered values are detached; other tensors are in the result as they are. The arguments are those of
    `iterate_state_dict`. ShardedTensors are gathered over `pg`, by default each over its own group, and on `device`, by
    default the one in their metadata; DTensors over their mesh.

    Raises:
        UnexpectedValue: a value of another type, and `type_check` is on.
        InvalidShards: the shards of a ShardedTensor differ from its metadata.
        RanksDisagree: ranks that share a mesh or group hold different tensors on it; the same error on all of them.
        CheckpointError: another rank cannot go on.

    """
    _check_same_tensors(state_dict, pg, type_check=type_check)
    with torch.no_grad():
        gathered: dict[str, Any] = iterate_state_dict(
            state_dict,
            _full_of_sharded_tensor,
            _full_of_dtensor,
            _identity_func,
            pg=pg,
            device=device,
            cpu_offload=cpu_offload,
            ranks_only=ranks_only,
            type_check=type_check,
        )
    return gathered


def all_gather_sharded_tensor(
    sharded_tensor: Any, pg: ProcessGroup | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """
    Return the full tensor, on every rank of the group.

    Shards may have any sizes, order and dimensions, and a rank may hold several or none; torch assumes equal rows in the
    order of ranks. By default the group is the tensor's own, and the device that of the first shard if the group supports
    it.
    """
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a ShardedTensor

    group = pg or sharded_tensor._process_group or dist.group.WORLD
    metadata = sharded_tensor.metadata()
    pieces = _pieces_of("a ShardedTensor", sharded_tensor)
    where = _gather_device(metadata, group) if device is None else device
    shape = tuple(metadata.size)
    boxes = [
        (each.placement.rank(), Box(tuple(each.shard_offsets), tuple(each.shard_sizes)))
        for each in metadata.shards_metadata
        if 0 not in each.shard_sizes
    ]
    ranks = dist.get_process_group_ranks(group)
    if _chunked_in_rank_order(shape, boxes, ranks):
        # One collective, with the last chunks padded to the size of the others.
        rows = -(-shape[0] // len(ranks))
        mine = torch.empty((rows, *shape[1:]), dtype=sharded_tensor.dtype, device=where)
        for piece in pieces.values():
            copy_bits(mine[: piece.shape[0]], piece)
        padded = torch.empty((rows * len(ranks), *shape[1:]), dtype=sharded_tensor.dtype, device=where)
        # Named all_gather_into_tensor before torch 2.13, which deprecates that name.
        all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(as_bytes(padded), as_bytes(mine), group=group)
        return padded[: shape[0]]
    # Each owner broadcasts its shards, straight into the full tensor if the shard is contiguous there.
    full = torch.empty(shape, dtype=sharded_tensor.dtype, device=where)
    for owner, box in boxes:
        target = full[slices(box)]
        carrier = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        if owner == dist.get_rank():
            copy_bits(carrier, pieces[box.offsets])
        dist.broadcast(as_bytes(carrier), src=owner, group=group)
        if carrier is not target:
            copy_bits(target, carrier)
    return full


def _pieces_of(name: str, sharded_tensor: Any) -> dict[Ints, torch.Tensor]:
    """Return this rank's shards as plain tensors by offsets; raise if they are not those the metadata assign to it."""
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a ShardedTensor

    pieces = {piece.offsets: piece.tensor for piece in describe_leaf(name, sharded_tensor).pieces}
    given = {
        tuple(each.shard_offsets): tuple(each.shard_sizes)
        for each in sharded_tensor.metadata().shards_metadata
        if each.placement.rank() == dist.get_rank() and 0 not in each.shard_sizes
    }
    held = {offsets: tuple(tensor.shape) for offsets, tensor in pieces.items()}
    if held != given:
        raise InvalidShards(
            f"{name!r} has local shards {held} (size by offsets), its metadata assign {given} to this rank",
            hint="a ShardedTensor is gathered by its metadata, which must be the same on all ranks",
            key=name,
        )
    return pieces


def _full_of_sharded_tensor(value: Any, pg: ProcessGroup | None, device: torch.device | None, _: Any) -> torch.Tensor:
    full = all_gather_sharded_tensor(value, pg, device)
    shards = value.local_shards()
    return full.to(shards[0].tensor.device if shards else _CPU)


def _full_of_dtensor(value: Any, *_: Any) -> torch.Tensor:
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - loaded, as there is a DTensor

    mesh = value.device_mesh
    # An offloaded tensor goes back to the device on which the mesh communicates.
    there = value if value.device.type == mesh.device_type else value.to(mesh.device_type)
    dtype = there.dtype
    if not any(placement.is_partial() for placement in there.placements):  # a reduction needs the numbers
        there = _viewed_as(carrier_of(dtype), there)
    everywhere = there.redistribute(device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    full: torch.Tensor = wait_tensor(everywhere.to_local())
    return full if full.dtype == dtype else full.view(dtype)


def _viewed_as(dtype: torch.dtype, dtensor: Any) -> Any:
    """Return a DTensor of another dtype of the same size, over the same memory."""
    if dtensor.dtype == dtype:
        return dtensor
    spec = dtensor._spec
    viewed = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
    return type(dtensor)(dtensor._local_tensor.view(dtype), viewed, requires_grad=False)


def _gather_device(metadata: Any, group: Any) -> torch.device:
    """Choose a device by what all ranks know: a rank without shards must choose the same one."""
    able = [device.type for device in group._device_types]
    said = [each.placement.device() for each in metadata.shards_metadata if each.placement.device() is not None]
    kind = said[0].type if said and said[0].type in able else "cpu" if "cpu" in able else able[0]
    return torch.device(kind)


def _chunked_in_rank_order(shape: Ints, boxes: list[tuple[int, Box]], ranks: list[int]) -> bool:
    """Return True if the shards are what `torch.chunk` makes of the rows, the first on the first rank."""
    if not shape or 0 in shape:
        return False
    rows, rest = shape[0], shape[1:]
    each = -(-rows // len(ranks))
    expected = {
        (rank, Box((at * each, *(0,) * len(rest)), (min(each, rows - at * each), *rest)))
        for at, rank in enumerate(ranks)
        if at * each < rows
    }
    return set(boxes) == expected


def _check_same_tensors(tree: Any, pg: ProcessGroup | None, *, type_check: bool) -> None:
    """Raise, on all ranks that share tensors, unless each can gather its tree and all hold the same tensors in one order."""
    sharded = [(path, value) for path, value in leaves_of(tree) if is_dtensor(value) or is_sharded_tensor(value)]
    shared: dict[Ints, list[list[str]]] = {}
    for path, tensor in sharded:
        shared.setdefault(_ranks_of(tensor, pg), []).append([path_name(path), _form(tensor)])
    failure: CheckpointError | None = None
    try:
        if type_check:
            check_plain_types(tree)
        for path, tensor in sharded:
            if is_sharded_tensor(tensor):
                _pieces_of(path_name(path), tensor)
    except CheckpointError as error:
        failure = error
    # Small sets first, so that a failure in one reaches the larger sets that its ranks belong to; and in one order on
    # all ranks, so that no two ranks wait for each other in different sets.
    for ranks in sorted(shared, key=lambda each: (len(each), each)):
        try:
            _compare(ranks, shared[ranks], failure)
        except CheckpointError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _compare(ranks: Ints, lines: list[list[str]], failure: CheckpointError | None) -> None:
    """Compare `lines` with those of the other ranks of the set, or report this rank's failure to them."""
    text = json.dumps(lines).encode()

    def work() -> bytes:
        if failure is not None:
            raise failure
        return blake2b(text, digest_size=16).digest()

    def differ(said: list[bytes]) -> list[bytes]:
        return [b"" if len(set(said)) == 1 else b"differ"] * len(said)

    with rendezvous(_world_of(ranks), "gather a state dict") as meeting:
        if meeting.agree("compare", work, differ) == b"differ":
            meeting.agree("name what differs", lambda: text, _name_difference)


def _name_difference(said: list[bytes]) -> list[bytes]:
    first = json.loads(said[0])
    for number, word in enumerate(said):
        for ours, theirs in itertools.zip_longest(first, json.loads(word), fillvalue=["nothing", ""]):
            if ours != theirs:
                raise RanksDisagree(
                    f"the tensors to gather differ: {' '.join(ours).strip()} on the first of the ranks that share "
                    f"them, {' '.join(theirs).strip()} on number {number} of them",
                    hint="give all ranks state dicts with the same sharded tensors in the same order",
                )
    return [b""] * len(said)


def _ranks_of(tensor: Any, pg: ProcessGroup | None) -> Ints:
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a sharded tensor

    if is_dtensor(tensor):
        return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))
    return tuple(sorted(dist.get_process_group_ranks(pg or tensor._process_group or dist.group.WORLD)))


def _form(tensor: Any) -> str:
    if is_dtensor(tensor):
        return f"({tensor.dtype} {tuple(tensor.shape)} as {tensor.placements})"
    return f"({tensor.dtype} {tuple(tensor.size())} as a ShardedTensor)"


def _world_of(ranks: Ints) -> World:
    """Return the world of these ranks; this process alone if it is none of them, or under the fake backend."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - loaded, as there is a sharded tensor

    mine = c10d.get_rank()
    if len(ranks) == 1 or mine not in ranks or c10d.get_backend() == "fake":
        return World(0, 1)
    digest = blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    store = c10d.PrefixStore(f"shardkeep/ranks/{digest}", c10d._get_default_store())
    return World(ranks.index(mine), len(ranks), store, Options().timeout_s)


class _TensorInfo(NamedTuple):
    """What ranks other than the sender know of a tensor; torch's name."""

    size: torch.Size
    dtype: torch.dtype


class TensorSpec(NamedTuple):
    """A tensor that is sent."""

    name: str
    shape: Ints
    dtype: torch.dtype


class Destination(NamedTuple):
    """Where a tensor goes on this rank."""

    result: Any
    """The value in the tree once everything has arrived."""
    parts: tuple[tuple[Box, torch.Tensor], ...]
    """Memory to fill, each piece with its box in the full tensor."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Stands in a skeleton for the tensor of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class SplitStateDict:
    """A full state dict, split into its tensors, which are sent as bytes, and the rest."""

    skeleton: dict[str, Any]
    """The tree, with a `TensorSlot` in place of each tensor."""
    specs: list[TensorSpec]
    sources: list[torch.Tensor] | None
    """The tensors, plain and detached; None on ranks that receive them."""


def broadcast_state_dict(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    device: torch.device,
    pg: ProcessGroup | None = None,
    strict: bool = False,
    cpu_offload: bool = False,
) -> None:
    """
    Put the first rank's full state dict into the local state dict of every rank, in place.

    For a key that `local_state_dict` has: a DTensor is filled with its own part, in its own memory and dtype, or
    replaced by one on `device` if it is on meta; a tensor is replaced by the full one on `device` (0-dim ones on the
    CPU, as in torch), another value by the sender's. A key whose value is None is skipped if a tensor comes for it.
    Keys that only the sender has are ignored, and not sent if no rank wants them. Dicts, lists and tuples inside are
    handled in the same way; torch sends them whole, with full tensors in place of their DTensors.

    Elements are sent in the order of indices, in batches of `BATCH_BYTES`; torch sends the memory of tensors that are
    not contiguous as it lies, so receivers get them wrong. On the sender, full tensors that are on `device` already
    are put into its local state dict themselves, without a copy.

    `full_state_dict` is read on the first rank of the group only. With `strict`, keys that the sender does not have are
    removed; with `cpu_offload`, everything stays on the CPU. Unlike in torch, `pg` need not contain rank 0. If a tensor
    does not fit on some rank, all ranks raise the same error, and no local state dict has changed.
    """
    made: list[SplitStateDict] = []

    def describe(world: World) -> bytes:
        if world.rank > 0:
            return b""
        made.append(split_tensors(full_state_dict))
        # Pickled, like torch's own object collectives: values of the user's classes travel too, within one job.
        return b"" if world.solo else pickle.dumps(replace(made[0], sources=None))

    def split_of(answer: bytes) -> SplitStateDict:
        split: SplitStateDict = made[0] if made else pickle.loads(answer)
        return split

    split = _broadcast(
        "broadcast a state dict",
        describe,
        lambda said: [said[0]] * len(said),
        split_of,
        local_state_dict,
        torch.device(device),
        pg,
        cpu_offload=cpu_offload,
    )
    if strict:
        for key in local_state_dict.keys() - split.skeleton.keys():
            del local_state_dict[key]


def broadcast_tensors(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    keys: list[str],
    device: torch.device,
    pg: ProcessGroup | None = None,
) -> None:
    """
    Put some of the first rank's tensors into the local state dict of every rank, in place, as `broadcast_state_dict`.

    `full_state_dict` has tensors on the first rank of the group, and a `_TensorInfo` for each on the others. `keys` must be
    the same on all ranks; those that `local_state_dict` lacks, or has None for, are skipped.
    """
    made: list[SplitStateDict] = []

    def describe(world: World) -> bytes:
        if missing := [key for key in keys if key not in full_state_dict]:
            raise StateMismatch(f"the full state dict lacks {missing}", hint="give all ranks the same keys")
        values = {key: full_state_dict[key] for key in keys}
        sources = [plain_source(value, (key,)) for key, value in values.items()] if world.rank == 0 else None
        # Ranks other than the first have a `_TensorInfo`, or the tensor as well.
        shapes = [info.shape if isinstance(info, torch.Tensor) else info.size for info in values.values()]
        specs = [
            TensorSpec(key, tuple(shape), info.dtype) for (key, info), shape in zip(values.items(), shapes, strict=True)
        ]
        made.append(SplitStateDict({key: TensorSlot(number) for number, key in enumerate(values)}, specs, sources))
        return pickle.dumps(made[0].specs)

    _broadcast(
        "broadcast tensors",
        describe,
        _check_same_specs,
        lambda _: made[0],
        local_state_dict,
        torch.device(device),
        pg,
        cpu_offload=False,
    )


def distribute_tensors(
    local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: ProcessGroup | None = None
) -> None:
    """
    Replace each pair of a DTensor and a full tensor in the state dict by the DTensor, filled with its own part.

    A DTensor on meta becomes one on the full tensor's device. Other values stay. Nothing is communicated.
    """
    del device, pg  # the arguments of torch's
    pairs = {key: pair for key in keys if isinstance(pair := local_state_dict.get(key), tuple)}
    destinations = {
        key: destination_for(TensorSpec(key, tuple(full.shape), full.dtype), dtensor, full.device)
        for key, (dtensor, full) in pairs.items()
    }
    for key, (_, full) in pairs.items():
        copy_box(whole(tuple(full.shape)), full.detach(), destinations[key])
        local_state_dict[key] = destinations[key].result


def distribute_state_dict(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    device: torch.device,
    pg: ProcessGroup | None = None,
) -> None:
    """
    Put a full state dict, of which every rank has its own copy, into the local state dict, in place.

    A DTensor is replaced by a new one, of the full tensor's dtype, that holds its own part; another tensor by the full
    one on `device`. Tensors for which `local_state_dict` has nothing are left out; 0-dim tensors (on the CPU) and
    values of other types are always added, as in torch. Dicts, lists and tuples inside are handled in the same way.
    Nothing is communicated; torch scatters from one rank what every rank has already. New DTensors are on the device of
    their mesh. `local_state_dict` is changed only if all of it can be filled; `pg` is not used.
    """
    del pg
    local_state_dict.update(
        {
            key: _local_part(value, local_state_dict.get(key), (key,), torch.device(device))
            for key, value in full_state_dict.items()
            if not (isinstance(value, torch.Tensor) and value.dim() and local_state_dict.get(key) is None)
        }
    )


def _local_part(full: Any, present: Any, path: TreePath, device: torch.device) -> Any:
    """Return the local value for one value of a full state dict, given the present local value."""

    def change(at: TreePath, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        held = value_at(present, at)
        if is_dtensor(value) and is_dtensor(held) and same_layout(value, held):
            return value.detach()
        source = plain_source(value, (*path, *at))
        spec = TensorSpec(path_name((*path, *at)), tuple(source.shape), source.dtype)
        if not is_dtensor(held):
            check_shape(spec, held)
            return source.to(device if spec.shape else _CPU)
        destination = destination_for(spec, held, torch.device(held.device_mesh.device_type), refill=False)
        with torch.no_grad():
            copy_box(whole(spec.shape), source, destination)
        return destination.result

    return change((), full) if present is None else map_leaves(full, change, _opens, keep_ordered=True)


def _opens(value: Any) -> bool:
    return type(value) in _CONTAINERS


def split_tensors(state_dict: Mapping[str, Any]) -> SplitStateDict:
    """Split a full state dict into skeleton and tensors, without copying."""
    specs: list[TensorSpec] = []
    sources: list[torch.Tensor] = []

    def change(path: TreePath, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        source = plain_source(value, path)
        specs.append(TensorSpec(path_name(path), tuple(source.shape), source.dtype))
        sources.append(source)
        return TensorSlot(len(sources) - 1)

    skeleton = {key: map_leaves(value, change, _opens, (key,), keep_ordered=True) for key, value in state_dict.items()}
    return SplitStateDict(skeleton, specs, sources)


def plain_source(value: Any, path: TreePath) -> torch.Tensor:
    """Return a full tensor as a plain detached one over the same memory."""
    name = path_name(path)
    if not is_plain(value):
        raise UnsupportedLeaf(
            f"{name!r} is a {type(value).__qualname__}, expected a full tensor",
            hint="gather the state dict first (gather_state_dict, or full_state_dict=True)",
            key=name,
        )
    leaf = describe_leaf(name, value)
    return leaf.pieces[0].tensor if leaf.pieces else torch.empty(leaf.shape, dtype=leaf.dtype)


def _check_same_specs(said: list[bytes]) -> list[bytes]:
    """Raise unless all ranks have the same specs."""
    first: list[TensorSpec] = pickle.loads(said[0])
    for rank, word in enumerate(said):
        theirs: list[TensorSpec] = first if word == said[0] else pickle.loads(word)
        for ours, other in itertools.zip_longest(first, theirs):
            if ours != other:
                raise StateMismatch(
                    f"the tensors to broadcast differ: {ours} on the first rank, {other} on rank {rank}",
                    hint="give all ranks the same keys, in the same order, and the size and dtype of the first rank's",
                    mismatched=[(ours or other).name],
                )
    return [b""] * len(said)


def _broadcast(
    what: str,
    describe: Callable[[World], bytes],
    decide: Callable[[list[bytes]], list[bytes]],
    split_of: Callable[[bytes], SplitStateDict],
    local_state_dict: dict[str, Any],
    device: torch.device,
    pg: ProcessGroup | None,
    *,
    cpu_offload: bool,
) -> SplitStateDict:
    """
    Agree on what is sent, send it, and put it into the local state dict.

    Every rank describes its side, `decide` answers on the first rank, and `split_of` turns the answer into what is sent.
    """
    world = current_world(pg, timeout_s=Options().timeout_s)
    destinations: dict[int, Destination] = {}
    with rendezvous(world, what) as meeting:
        split = split_of(meeting.agree("describe", lambda: describe(world), decide))
        wanted = {
            key: part
            for key, part in split.skeleton.items()
            if key in local_state_dict and not (isinstance(part, TensorSlot) and local_state_dict[key] is None)
        }

        def prepare() -> set[int]:
            for key, part in wanted.items():
                for path, slot in leaves_of(part, _opens):
                    if isinstance(slot, TensorSlot):
                        present = value_at(local_state_dict[key], path)
                        destinations[slot.number] = _destination(split, slot.number, present, device, cpu_offload)
            return {number for number, destination in destinations.items() if destination.parts}

        numbers, batch_bytes = _agree_on_sent(meeting, prepare, len(split.specs), communication_device(device, pg))
    nowhere = Destination(None, ())
    with torch.no_grad():
        broadcast_batches(
            [split.specs[number] for number in numbers],
            None if split.sources is None else [split.sources[number] for number in numbers],
            [destinations.get(number, nowhere) for number in numbers],
            communication_device(device, pg),
            pg,
            batch_bytes=batch_bytes,
        )
        results = {number: destination.result for number, destination in destinations.items()}
        if cpu_offload:
            results = {number: result.cpu() for number, result in results.items()}
    for key, part in wanted.items():
        local_state_dict[key] = map_leaves(
            part,
            lambda _, leaf: results[leaf.number] if isinstance(leaf, TensorSlot) else leaf,
            _opens,
            keep_ordered=True,
        )
    return split


def _destination(
    split: SplitStateDict, number: int, present: Any, device: torch.device, cpu_offload: bool
) -> Destination:
    spec = split.specs[number]
    # 0-dim tensors are counters, which optimizers keep on the CPU.
    on_cpu = cpu_offload or not (spec.shape or is_dtensor(present))
    device = _CPU if on_cpu else device
    if split.sources is None or is_dtensor(present):
        return destination_for(spec, present, device)
    check_shape(spec, present)
    return Destination(split.sources[number].to(device), ())  # the sender has it already


def _agree_on_sent(
    meeting: Rendezvous, prepare: Callable[[], set[int]], count: int, device: torch.device
) -> tuple[list[int], int]:
    """Return the tensors, of `count`, that at least one rank needs, and the size of a batch; the same on all ranks."""

    def work() -> bytes:
        mine = prepare()
        flags = "".join("1" if number in mine else "0" for number in range(count))
        return f"{device.type} {int(flags or '0', 2):x}".encode()

    def decide(said: list[bytes]) -> list[bytes]:
        kinds, flags = zip(*(word.decode().split() for word in said), strict=True)
        if len(set(kinds)) > 1:
            raise RanksDisagree(
                f"the ranks want to communicate from different kinds of devices: {dict(enumerate(kinds))}",
                hint="give all ranks a device of the same type",
            )
        union = functools.reduce(operator.or_, (int(each, 16) for each in flags))
        return [f"{union:x} {BATCH_BYTES}".encode()] * len(said)

    union, batch_bytes = meeting.agree("prepare", work, decide).split()
    flags = format(int(union, 16), "b").zfill(count)
    return [number for number in range(count) if flags[number] == "1"], int(batch_bytes)


def destination_for(spec: TensorSpec, present: Any, device: torch.device, *, refill: bool = True) -> Destination:
    """
    Make room for a tensor on this rank, in place of the present value.

    A DTensor takes its own part only: into its memory, or into new memory on `device` if it is on meta or `refill` is
    false. For anything else a full tensor is made on `device`.
    """
    check_shape(spec, present)
    if not is_dtensor(present):
        full = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        return Destination(full, ((whole(spec.shape), full),))
    dtensor = wait_tensor(present)
    if dtensor._local_tensor.is_meta or not refill:
        dtensor = torch.empty_like(dtensor, dtype=spec.dtype, device=device, requires_grad=False)
    elif not torch.can_cast(spec.dtype, dtensor.dtype):
        raise StateMismatch(
            f"{spec.name!r} is {spec.dtype} in the full state dict, {dtensor.dtype} here, which cannot hold it",
            hint="convert one of the two, or leave the key out",
            mismatched=[spec.name],
        )
    local = dtensor._local_tensor.detach()
    boxes = dtensor_boxes(spec.name, dtensor._spec, tuple(local.shape))
    return Destination(dtensor, tuple((there, local[slices(here)]) for there, here in boxes))


def check_shape(spec: TensorSpec, present: Any) -> None:
    """Raise `StateMismatch` if the present value is a tensor of another shape."""
    if isinstance(present, torch.Tensor) and tuple(present.size()) != spec.shape:
        raise StateMismatch(
            f"{spec.name!r} has shape {spec.shape} in the full state dict, {tuple(present.size())} here",
            hint="give a full state dict of the same model, or leave the key out",
            mismatched=[spec.name],
        )


def communication_device(device: torch.device, pg: ProcessGroup | None) -> torch.device:
    """Return `device` if the group can send from there, else a device from which it can."""
    import torch.distributed as dist  # noqa: PLC0415 - takes a second, and a single process needs none

    if not (dist.is_available() and dist.is_initialized()):
        return device
    group: Any = pg or dist.group.WORLD
    able = [each.type for each in group._device_types]
    return device if device.type in able else torch.device(able[0])


class _Run(NamedTuple):
    """Consecutive elements of one tensor, in a batch."""

    number: int
    start: int
    stop: int
    at_byte: int


def broadcast_batches(
    specs: Sequence[TensorSpec],
    sources: Sequence[torch.Tensor] | None,
    destinations: Sequence[Destination],
    device: torch.device,
    pg: ProcessGroup | None,
    *,
    batch_bytes: int,
    sender: int = 0,
) -> None:
    """
    Fill the destinations of all ranks with the tensors of one, the `sender`, counted within the group.

    `specs` and `batch_bytes`, the size of the buffer, must be the same on all ranks; `sources` are the values on the
    sender, and None on the others. The group must be able to send from `device`, where the buffer is.
    """
    batches = list(_batches(specs, batch_bytes))
    length = max((_end(specs, runs[-1]) for runs in batches), default=0)
    buffer = torch.empty(length, dtype=torch.uint8, device=device)
    for runs in batches:
        batch = buffer[: _end(specs, runs[-1])]
        if sources is not None:
            for run in runs:
                for box, values in _boxes_in(batch, specs[run.number], run):
                    copy_bits(values, sources[run.number][slices(box)])
        _broadcast_tensor(batch, pg, sender)
        for run in runs:
            for box, values in _boxes_in(batch, specs[run.number], run):
                copy_box(box, values, destinations[run.number])


def copy_box(box: Box, values: torch.Tensor, destination: Destination) -> None:
    """Copy the elements of one box of a full tensor into the parts of a destination."""
    for wanted, memory in destination.parts:
        common = intersect(wanted, box)
        if common is not None:
            copy_bits(memory[slices(relative(common, wanted))], values[slices(relative(common, box))])


def _batches(specs: Sequence[TensorSpec], limit_bytes: int) -> Iterator[list[_Run]]:
    """Cut the tensors' elements, one after another, into batches of at most `limit_bytes`; the same on all ranks."""
    batch: list[_Run] = []
    used = 0
    for number, spec in enumerate(specs):
        count, start = math.prod(spec.shape), 0
        while start < count:
            room = (limit_bytes - used) // spec.dtype.itemsize
            if room <= 0 and batch:
                yield batch
                batch, used = [], 0
                continue
            stop = min(count, start + max(room, 1))
            batch.append(_Run(number, start, stop, used))
            used += -(-(stop - start) * spec.dtype.itemsize // _ALIGNED) * _ALIGNED
            start = stop
    if batch:
        yield batch


def _end(specs: Sequence[TensorSpec], run: _Run) -> int:
    return run.at_byte + (run.stop - run.start) * specs[run.number].dtype.itemsize


def _boxes_in(batch: torch.Tensor, spec: TensorSpec, run: _Run) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a tensor that a run covers, each with its memory in the batch."""
    row = batch[run.at_byte : run.at_byte + (run.stop - run.start) * spec.dtype.itemsize].view(spec.dtype)
    at = 0
    for box in flat_range_to_boxes(spec.shape, run.start, run.stop):
        yield box, row[at : at + box.volume].view(box.sizes)
        at += box.volume


def _broadcast_tensor(batch: torch.Tensor, pg: ProcessGroup | None, sender: int) -> None:
    import torch.distributed as dist  # noqa: PLC0415 - takes a second, and a single process needs none

    if dist.is_available() and dist.is_initialized() and dist.get_world_size(pg) > 1:
        dist.broadcast(batch, src=dist.get_process_group_ranks(pg or dist.group.WORLD)[sender], group=pg)
