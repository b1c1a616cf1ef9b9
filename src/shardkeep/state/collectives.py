"""
Collectives over state dicts: gather sharded tensors one at a time, broadcast full ones through a buffer of fixed size.

Tensors travel as bytes, so every dtype passes every backend bit for bit. Collectives that do not match hang, or mix up
tensors. So ranks first agree, through the key-value store, on what they are about to move: if anything differs or does
not fit on one rank, all ranks raise the same error and nothing has changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World, current_world, world_of_ranks
from shardkeep.errors import CheckpointError, InvalidShards, RanksDisagree, StateMismatch, UnsupportedLeaf
from shardkeep.format.boxes import Box, Ints, flat_range_to_boxes, intersect, relative, slices, whole
from shardkeep.options import Options
from shardkeep.state import leaves
from shardkeep.state.flatten import get_element, leaves_of, map_leaves
from shardkeep.state.offload import _identity_func, check_plain_types, iterate_state_dict, same_layout
from shardkeep.state.placement import dtensor_boxes

BATCH_BYTES = 64 << 20
"""Size of the broadcast buffer: large enough for full bandwidth, small beside any model."""
_ALIGNED = 16  # every dtype can be viewed at multiples of this
_CPU = torch.device("cpu")
_CARRIERS: Final = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""Dtypes that every backend can send; values of other dtypes travel as one of the same size."""
_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple})
"""Exactly these are opened in state dicts that are sent; a subclass is one value."""


def gather_state_dict(
    state_dict: dict[str, Any],
    *,
    pg: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
) -> dict[str, Any]:
    """
    Return the state dict with each DTensor and ShardedTensor as one full tensor; the arguments are those of `iterate_state_dict`.

    All ranks that hold parts of a tensor must call this, with trees of the same order; if not, all raise `RanksDisagree`
    before anything is gathered. ShardedTensors are gathered over `pg`, by default each over its own group, and on `device`,
    by default the one in their metadata; DTensors over their mesh.
    """
    _check_same_tensors(state_dict, pg, type_check=type_check)
    with torch.no_grad():
        full_of = partial(iterate_state_dict, state_dict, _full_of_sharded_tensor, _full_of_dtensor, _identity_func)
        gathered: dict[str, Any] = full_of(
            pg=pg, device=device, cpu_offload=cpu_offload, ranks_only=ranks_only, type_check=type_check
        )
    return gathered


def all_gather_sharded_tensor(
    sharded_tensor: Any, pg: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """
    Return the full tensor, on every rank of the group.

    Shards may have any sizes, order and dimensions, and a rank may hold several or none; torch assumes equal rows in the
    order of ranks. By default the group is the tensor's own, and the device that of the first shard.
    """
    group = pg or sharded_tensor._process_group or dist.group.WORLD
    metadata = sharded_tensor.metadata()
    pieces = _pieces_of("a ShardedTensor", sharded_tensor)
    if device is None:  # chosen by what all ranks know: a rank without shards must choose the same one
        known = (each.placement.device() for each in metadata.shards_metadata)
        device = _sending_device(torch.device(next((one.type for one in known if one is not None), "cpu")), group)
    shape, dtype = tuple(metadata.size), sharded_tensor.dtype
    # Each owner broadcasts its shards, straight into the full tensor if the shard is contiguous there.
    full = torch.empty(shape, dtype=dtype, device=device)
    for owner, box in _shards_of(sharded_tensor):
        target = full[slices(box)]
        carrier = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        if owner == dist.get_rank():
            leaves.copy_bits(carrier, pieces[box.offsets])
        dist.broadcast(carrier.view(-1).view(torch.uint8), src=owner, group=group)
        if carrier is not target:
            leaves.copy_bits(target, carrier)
    return full


def _shards_of(sharded_tensor: Any) -> list[tuple[int, Box]]:
    """Return rank and box of each shard that is not empty, as the metadata assign them."""
    shards = sharded_tensor.metadata().shards_metadata
    boxes = ((each.placement.rank(), Box(tuple(each.shard_offsets), tuple(each.shard_sizes))) for each in shards)
    return [(owner, box) for owner, box in boxes if box.volume]


def _pieces_of(name: str, sharded_tensor: Any) -> dict[Ints, torch.Tensor]:
    """Return this rank's shards as plain tensors by offsets; raise if they are not those the metadata assign to it."""
    pieces = {piece.offsets: piece.tensor for piece in leaves.describe_leaf(name, sharded_tensor).pieces}
    given = {box.offsets: box.sizes for owner, box in _shards_of(sharded_tensor) if owner == dist.get_rank()}
    held = {offsets: tuple(tensor.shape) for offsets, tensor in pieces.items()}
    if held != given:
        raise InvalidShards(
            f"{name!r} has local shards {held} (size by offsets), its metadata assign {given} to this rank",
            hint="a ShardedTensor is gathered by its metadata, which must be the same on all ranks",
            key=name,
        )
    return pieces


def _full_of_sharded_tensor(
    value: Any, pg: dist.ProcessGroup | None, device: torch.device | None, _: Any
) -> torch.Tensor:
    full = all_gather_sharded_tensor(value, pg, device)
    shards = value.local_shards()
    return full.to(shards[0].tensor.device if shards else _CPU)


def _full_of_dtensor(value: Any, *_: Any) -> torch.Tensor:
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - loaded, as there is a DTensor

    mesh, dtype = value.device_mesh, value.dtype
    # An offloaded tensor goes back to the device on which the mesh communicates.
    there = value if value.device.type == mesh.device_type else value.to(mesh.device_type)
    carrier = _CARRIERS.get(dtype.itemsize, dtype)
    # Sent as another dtype of the same size, except partial values: a reduction needs the numbers.
    if carrier != dtype and not any(placement.is_partial() for placement in there.placements):
        spec = dataclasses.replace(there._spec, tensor_meta=there._spec.tensor_meta._replace(dtype=carrier))
        there = type(there)(there._local_tensor.view(carrier), spec, requires_grad=False)
    everywhere = there.redistribute(device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    full: torch.Tensor = leaves.wait_tensor(everywhere.to_local())
    return full if full.dtype == dtype else full.view(dtype)


def _sending_device(wanted: torch.device, group: Any) -> torch.device:
    """Return `wanted` if the group can send from there, else a device from which it can."""
    able = [each.type for each in group._device_types]
    return wanted if wanted.type in able else torch.device("cpu" if "cpu" in able else able[0])


def _check_same_tensors(tree: Any, pg: dist.ProcessGroup | None, *, type_check: bool) -> None:
    """Raise, on all ranks that share tensors, unless each can gather its tree and all hold the same tensors in one order."""
    sharded = [
        (path, value) for path, value in leaves_of(tree) if leaves.is_dtensor(value) or leaves.is_sharded_tensor(value)
    ]
    shared: dict[Ints, list[str]] = {}
    for path, tensor in sharded:
        if leaves.is_dtensor(tensor):
            ranks, cut = tensor.device_mesh.mesh.flatten().tolist(), tensor.placements
        else:
            ranks = dist.get_process_group_ranks(pg or tensor._process_group or dist.group.WORLD)
            cut = "a ShardedTensor"
        line = f"{leaves.path_name(path)} ({tensor.dtype} {tuple(tensor.size())} as {cut})"
        shared.setdefault(tuple(sorted(ranks)), []).append(line)
    failure: CheckpointError | None = None
    try:
        if type_check:
            check_plain_types(tree)
        for path, tensor in sharded:
            if leaves.is_sharded_tensor(tensor):
                _pieces_of(leaves.path_name(path), tensor)
    except CheckpointError as error:
        failure = error
    # Small sets first, so that a failure in one reaches the larger sets that its ranks belong to; and in one order on
    # all ranks, so that no two ranks wait for each other in different sets.
    for ranks in sorted(shared, key=lambda each: (len(each), each)):
        try:
            _compare(ranks, shared[ranks], failure, to="gather")
        except CheckpointError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _compare(ranks: Ints, lines: list[str], failure: CheckpointError | None, *, to: str) -> None:
    """Compare `lines`, by their digest first, with those of the other `ranks`, or report this rank's failure to them."""
    text = "\n".join(lines).encode()

    def work() -> bytes:
        if failure is not None:
            raise failure
        return blake2b(text, digest_size=16).digest()

    def name_difference(said: list[bytes]) -> list[bytes]:
        first, *others = (each.decode().split("\n") for each in said)
        for rank, other in zip(ranks[1:], others, strict=True):
            for ours, theirs in itertools.zip_longest(first, other, fillvalue=""):
                if ours != theirs:
                    raise RanksDisagree(
                        f"the tensors to {to} differ: {ours or 'nothing'} on rank {ranks[0]}, {theirs or 'nothing'} on "
                        f"rank {rank}",
                        hint="give all ranks the same tensors, of the same sizes and dtypes, in the same order",
                    )
        return [b""] * len(said)

    # This process alone if it is none of the ranks, or under the fake backend.
    alone = dist.get_rank() not in ranks or dist.get_backend() == "fake"
    world = World(0, 1) if alone else world_of_ranks("ranks", ranks, Options().timeout_s)
    with rendezvous(world, f"{to} a state dict") as meeting:
        if meeting.agree("compare", work, lambda said: [b"" if len(set(said)) == 1 else b"differ"] * len(said)):
            meeting.agree("name what differs", lambda: text, name_difference)


class _TensorInfo(NamedTuple):
    """What other ranks than the sender know of a tensor; torch's name."""

    size: torch.Size
    dtype: torch.dtype


class TensorSpec(NamedTuple):
    """A tensor that is sent. In a state dict that is sent, it stands for the tensor."""

    name: str
    shape: Ints
    dtype: torch.dtype


class Destination(NamedTuple):
    result: Any
    """The value in the tree once everything has arrived."""
    parts: tuple[tuple[Box, torch.Tensor], ...]
    """Memory to fill, each piece with its box in the full tensor."""


_NOWHERE: Final = Destination(None, ())


def broadcast_state_dict(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
    strict: bool = False,
    cpu_offload: bool = False,
) -> None:
    """
    Put the full state dict of the group's first rank into the local state dict of every rank, in place.

    For a key that `local_state_dict` has: a DTensor is filled with its own part, in its own memory and dtype, or
    replaced by one on `device` if it is on meta; a tensor is replaced by the full one on `device` (0-dim ones on the
    CPU, as in torch), another value by the sender's. A key whose value is None is skipped if a tensor comes for it.
    Keys that only the sender has are ignored; with `strict`, keys that it lacks are removed. Dicts, lists and tuples inside
    are handled in the same way. With `cpu_offload`, everything stays on the CPU. If a tensor does not fit on some rank, all
    ranks raise the same error, and no local state dict has changed.
    """
    device = torch.device(device)
    world = current_world(pg, timeout_s=Options().timeout_s)
    via = device if world.solo else _sending_device(device, pg or dist.group.WORLD)
    sources: dict[tuple[str, leaves.TreePath], torch.Tensor] = {}  # by key and path inside it; empty on receivers
    skeleton: dict[str, Any] = {}  # the full state dict with a `TensorSpec` for each tensor
    destinations: dict[int, Destination] = {}  # by number of the tensor

    def describe() -> bytes:
        if world.rank > 0:
            return b""
        for key, value in full_state_dict.items():
            skeleton[key] = map_leaves(value, partial(take, key), _opens, keep_ordered=True)
        # Pickled, like torch's own object collectives: values of the user's classes travel too, within one job.
        return b"" if world.solo else pickle.dumps(skeleton)

    def take(key: str, path: leaves.TreePath, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        source = sources[key, path] = plain_source(name := leaves.path_name((key, *path)), value)
        return TensorSpec(name, tuple(source.shape), source.dtype)

    def prepare() -> bytes:
        for number, (key, path, spec) in enumerate(sent):
            if key in local_state_dict and (path or local_state_dict[key] is not None):
                present = get_element(local_state_dict[key], path)
                # 0-dim tensors are counters, which optimizers keep on the CPU.
                on_cpu = cpu_offload or not (spec.shape or leaves.is_dtensor(present))
                source = sources.get((key, path))
                destinations[number] = destination_for(spec, present, _CPU if on_cpu else device, source=source)
        flags = "".join("1" if destinations.get(n, _NOWHERE).parts else "0" for n in range(len(sent)))
        return f"{via.type} {flags}".encode()

    with rendezvous(world, "broadcast a state dict") as meeting:
        answer = meeting.agree("describe", describe, lambda said: [said[0]] * len(said))
        if world.rank > 0:
            skeleton = pickle.loads(answer)
        sent = [
            (key, path, leaf)
            for key, part in skeleton.items()
            for path, leaf in leaves_of(part, _opens)
            if isinstance(leaf, TensorSpec)
        ]
        wanted = meeting.agree("prepare", prepare, _merge_wanted).decode()
    numbers = [number for number, flag in enumerate(wanted) if flag == "1"]
    with torch.no_grad():
        broadcast_batches(
            [sent[number][2] for number in numbers],
            [sources[sent[number][:2]] for number in numbers] if world.rank == 0 else None,
            [destinations.get(number, _NOWHERE) for number in numbers],
            via,
            pg,
        )
        results = {sent[number][:2]: each.result for number, each in destinations.items()}
        if cpu_offload:
            results = {place: result.cpu() for place, result in results.items()}
    for key, part in skeleton.items():
        if key in local_state_dict and not (isinstance(part, TensorSpec) and local_state_dict[key] is None):
            local_state_dict[key] = map_leaves(
                part,
                lambda path, leaf: results[key, path] if isinstance(leaf, TensorSpec) else leaf,  # noqa: B023
                _opens,
                keep_ordered=True,
            )
    if strict:
        for key in local_state_dict.keys() - skeleton.keys():
            del local_state_dict[key]


def _opens(value: Any) -> bool:
    return type(value) in _CONTAINERS


def _merge_wanted(said: list[bytes]) -> list[bytes]:
    """Return, as a 0 or 1 for each, which tensors at least one rank needs."""
    kinds, _, flags = zip(*(word.decode().partition(" ") for word in said), strict=True)
    if len(set(kinds)) > 1:
        raise RanksDisagree(
            f"the ranks want to communicate from different kinds of devices: {dict(enumerate(kinds))}",
            hint="give all ranks a device of the same type",
        )
    return ["".join(map(max, zip(*flags, strict=True))).encode()] * len(said)


def broadcast_tensors(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    keys: list[str],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
) -> None:
    """
    Put some of the first rank's tensors into the local state dict of every rank, like `broadcast_state_dict`.

    Other ranks have a `_TensorInfo` for each, or the tensor; if keys, sizes or dtypes differ, all ranks raise `RanksDisagree`.
    """
    lines = []
    for key in keys:
        value = full_state_dict.get(key)
        size = value.size() if isinstance(value, torch.Tensor) else getattr(value, "size", ())
        lines.append(f"{key} ({getattr(value, 'dtype', 'missing')} {tuple(size)})")
    if dist.is_available() and dist.is_initialized():
        _compare(tuple(dist.get_process_group_ranks(pg or dist.group.WORLD)), lines, None, to="broadcast")
    wanted = {key: local_state_dict[key] for key in keys if key in local_state_dict}
    broadcast_state_dict({key: full_state_dict[key] for key in keys}, wanted, device, pg)
    local_state_dict.update(wanted)


def distribute_tensors(
    local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: dist.ProcessGroup | None = None
) -> None:
    """Replace each pair of a DTensor and a full tensor by the DTensor, filled with its part (on meta: a new one)."""
    del device, pg  # the arguments of torch's
    for key in keys:
        if isinstance(pair := local_state_dict.get(key), (tuple, list)):
            dtensor, full = pair
            spec = TensorSpec(key, tuple(full.shape), full.dtype)
            destination = destination_for(spec, dtensor, full.device)
            copy_box(whole(spec.shape), full.detach(), destination)
            local_state_dict[key] = destination.result


def distribute_state_dict(
    full_state_dict: dict[str, Any],
    local_state_dict: dict[str, Any],
    device: torch.device,
    pg: dist.ProcessGroup | None = None,
) -> None:
    """
    Put a full state dict, of which every rank has its own copy, into the local state dict, in place.

    A DTensor is replaced by a new one, of the full tensor's dtype and on the device of its mesh, that holds its own part;
    another tensor by the full one on `device`. Tensors for which `local_state_dict` has nothing are left out; 0-dim tensors
    (on the CPU) and other values are always added, as in torch. Dicts, lists and tuples inside are handled in the same way.
    Nothing is communicated, `pg` is not used, and `local_state_dict` is changed only if all of it can be filled.
    """
    del pg
    local_state_dict.update(
        {
            key: _local_part(key, value, local_state_dict.get(key), torch.device(device))
            for key, value in full_state_dict.items()
            if not (isinstance(value, torch.Tensor) and value.dim() and local_state_dict.get(key) is None)
        }
    )


def _local_part(key: str, full: Any, present: Any, device: torch.device) -> Any:
    def change(path: leaves.TreePath, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        held = get_element(present, path)
        if leaves.is_dtensor(value) and leaves.is_dtensor(held) and same_layout(value, held):
            return value.detach()
        source = plain_source(name := leaves.path_name((key, *path)), value)
        spec = TensorSpec(name, tuple(source.shape), source.dtype)
        where = (
            torch.device(held.device_mesh.device_type) if leaves.is_dtensor(held) else device if spec.shape else _CPU
        )
        destination = destination_for(spec, held, where, source=source, refill=False)
        with torch.no_grad():
            copy_box(whole(spec.shape), source, destination)
        return destination.result

    return change((), full) if present is None else map_leaves(full, change, _opens, keep_ordered=True)


def plain_source(name: str, value: Any) -> torch.Tensor:
    if leaves.is_dtensor(value) or leaves.is_sharded_tensor(value):
        raise UnsupportedLeaf(
            f"{name!r} is a {type(value).__qualname__}, expected a full tensor",
            hint="gather the state dict first (gather_state_dict, or full_state_dict=True)",
            key=name,
        )
    leaf = leaves.describe_leaf(name, value)
    return leaf.pieces[0].tensor if leaf.pieces else torch.empty(leaf.shape, dtype=leaf.dtype)


def destination_for(
    spec: TensorSpec, present: Any, device: torch.device, *, source: torch.Tensor | None = None, refill: bool = True
) -> Destination:
    """Make room for a tensor on this rank, in place of the present value; `source` is the full one if this rank has it."""
    # A DTensor takes its own part only: into its memory, or into new memory if it is on meta or `refill` is false.
    if isinstance(present, torch.Tensor) and tuple(present.size()) != spec.shape:
        raise StateMismatch(
            f"{spec.name!r} has shape {spec.shape} in the full state dict, {tuple(present.size())} here",
            hint="give a full state dict of the same model, or leave the key out",
            mismatched=[spec.name],
        )
    if not leaves.is_dtensor(present):
        if source is not None:
            return Destination(source.to(device), ())
        full = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        return Destination(full, ((whole(spec.shape), full),))
    dtensor = leaves.wait_tensor(present)
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


def broadcast_batches(
    specs: Sequence[TensorSpec],
    sources: Sequence[torch.Tensor] | None,
    destinations: Sequence[Destination],
    device: torch.device,
    pg: dist.ProcessGroup | None,
    *,
    sender: int = 0,
) -> None:
    """Fill the destinations of all ranks with the tensors of one, the `sender`, counted within the group."""
    # `specs` are the same on all ranks; `sources` are None on receivers. The group can send from `device`.
    batches = list(_batches(specs))
    nbytes = max((place.stop for pieces in batches for _, _, place in pieces), default=0)
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size(pg) > 1)
    for pieces in batches:
        batch = buffer[: pieces[-1][2].stop]
        boxes = [(number, box, batch[place].view(specs[number].dtype).view(box.sizes)) for number, box, place in pieces]
        if sources is not None:
            for number, box, values in boxes:
                leaves.copy_bits(values, sources[number][slices(box)])
        if not alone:
            dist.broadcast(batch, src=dist.get_process_group_ranks(pg or dist.group.WORLD)[sender], group=pg)
        for number, box, values in boxes:
            copy_box(box, values, destinations[number])


def copy_box(box: Box, values: torch.Tensor, destination: Destination) -> None:
    for wanted, memory in destination.parts:
        common = intersect(wanted, box)
        if common is not None:
            leaves.copy_bits(memory[slices(relative(common, wanted))], values[slices(relative(common, box))])


def _batches(specs: Sequence[TensorSpec]) -> Iterator[list[tuple[int, Box, slice]]]:
    """Cut the tensors, in order, into batches that are the same on all ranks: boxes with tensor number and place."""
    batch: list[tuple[int, Box, slice]] = []
    used = 0
    for number, spec in enumerate(specs):
        count, start = math.prod(spec.shape), 0
        while start < count:
            room = (BATCH_BYTES - used) // spec.dtype.itemsize
            if room <= 0 and batch:
                yield batch
                batch, used = [], 0
                continue
            stop = min(count, start + max(room, 1))
            for box in flat_range_to_boxes(spec.shape, start, stop):
                end = used + box.volume * spec.dtype.itemsize
                batch.append((number, box, slice(used, end)))
                used = end
            used = -(-used // _ALIGNED) * _ALIGNED
            start = stop
    if batch:
        yield batch
