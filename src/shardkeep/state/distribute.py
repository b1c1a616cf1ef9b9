"""
A full state dict taken apart into what is sent as bytes, its tensors, and what is sent as it is, the rest.

Dicts, lists and tuples are gone through; any other container is one value. Putting together builds new containers
and leaves those that came in as they are.
"""

from __future__ import annotations

import functools
import itertools
import operator
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import current_world
from shardkeep.errors import RanksDisagree, StateMismatch, UnsupportedLeaf
from shardkeep.format.boxes import whole
from shardkeep.options import Options
from shardkeep.state import collectives as stream
from shardkeep.state.collectives import (
    Destination,
    TensorSpec,
    broadcast_batches,
    check_shape,
    communication_device,
    copy_box,
    destination_for,
)
from shardkeep.state.leaves import TreePath, describe_leaf, is_dtensor, is_plain, path_name
from shardkeep.state.offload import same_layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple})
"""Exactly these are gone through: what a subclass does beyond them is its own business."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Stands in a skeleton for the tensor of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class SplitStateDict:
    """A state dict, taken apart."""

    skeleton: dict[str, Any]
    """The tree, with a `Slot` in place of each tensor."""
    cargoes: list[TensorSpec]
    sources: list[torch.Tensor] | None
    """The tensors, plain and detached; None on ranks that wait for them."""

    def without_values(self) -> SplitStateDict:
        """Return what the other ranks need to know."""
        return replace(self, sources=None)


def split_tensors(state_dict: Mapping[str, Any]) -> SplitStateDict:
    """
    Take a full state dict apart; nothing is copied.

    Raises:
        UnsupportedLeaf: a tensor is sharded, on meta, or of no plain form.

    """
    cargoes: list[TensorSpec] = []
    sources: list[torch.Tensor] = []

    def take(value: Any, path: TreePath) -> Any:
        if isinstance(value, torch.Tensor):
            source = plain_source(value, path)
            cargoes.append(TensorSpec(path_name(path), tuple(source.shape), source.dtype))
            sources.append(source)
            return TensorSlot(len(sources) - 1)
        if type(value) in CONTAINERS:
            return rebuilt(value, lambda key, child: take(child, (*path, key)))
        return value

    return SplitStateDict({key: take(value, (key,)) for key, value in state_dict.items()}, cargoes, sources)


def join_tensors(part: Any, tensors: Mapping[int, Any]) -> Any:
    """Return a part of a skeleton with its slots filled."""
    if isinstance(part, TensorSlot):
        return tensors[part.number]
    if type(part) in CONTAINERS:
        return rebuilt(part, lambda _, child: join_tensors(child, tensors))
    return part


def plain_source(value: Any, path: TreePath) -> torch.Tensor:
    """
    Return a full tensor as a plain detached one over the same memory.

    Raises:
        UnsupportedLeaf: it is sharded, on meta, or of no plain form.

    """
    name = path_name(path)
    if not is_plain(value):
        raise UnsupportedLeaf(
            f"{name!r} is a {type(value).__qualname__}, expected a full tensor",
            hint="gather the state dict first (gather_state_dict, or full_state_dict=True)",
            key=name,
        )
    leaf = describe_leaf(name, value)
    return leaf.pieces[0].tensor if leaf.pieces else torch.empty(leaf.shape, dtype=leaf.dtype)


def items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and values of a dict, or indices and items of a list or tuple."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def child_of(container: Any, key: Any) -> Any:
    """Return what stands at a key or index; None where there is no such place."""
    if isinstance(container, Mapping):
        return container.get(key)
    if isinstance(container, (list, tuple)) and isinstance(key, int) and key < len(container):
        return container[key]
    return None


def rebuilt(container: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a new container of the same type, whose values are those that `change` made of key and value."""
    made = [(key, change(key, child)) for key, child in items_of(container)]
    return type(container)(made if isinstance(container, dict) else [child for _, child in made])


# Full state dicts into the state dicts of all ranks: from one rank that has the values, or from every rank's own
# copy.
#
# What a rank has a DTensor for, it gets its own part of; for anything else the full value. All ranks look at what
# will
# come before the first value moves: whatever does not fit on one of them is the same error on all, and nothing has
# changed anywhere.

_CPU = torch.device("cpu")


class _TensorInfo(NamedTuple):
    """What ranks other than the sender know of a tensor."""

    size: torch.Size
    dtype: torch.dtype


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
    replaced by one on `device` where it is on meta; anything else is replaced, a tensor by the full one on `device`
    (0-dim ones on the CPU, as torch has it), another value by the sender's. A key whose value is None is left alone
    if a tensor comes for it. Keys only the sender has are ignored, and sent to nobody if no rank wants them. Dicts,
    lists and tuples inside are gone through in the same way; torch sends them whole, and puts full tensors in place
    of their DTensors.

    Values go through one buffer of `stream.BATCH_BYTES`, element by element in the order of indices; of tensors that
    are not contiguous torch sends the memory as it lies, and receivers get them wrong. On the sender, full tensors
    that are on `device` already are put into its local state dict themselves, not copies.

    Args:
        full_state_dict: read on the first rank of the group only; others may pass anything.
        local_state_dict: what to fill, on each rank; changed only if all ranks can be filled.
        device: where full tensors and those in place of meta ones are made.
        pg: the ranks that take part; all by default. Unlike torch's, it need not hold rank 0.
        strict: remove keys of `local_state_dict` that the sender does not have.
        cpu_offload: leave everything on the CPU.

    Raises:
        StateMismatch: a tensor has another shape on some rank; the same error on all.
        UnsupportedLeaf: a full tensor is sharded, on meta or of no plain form, or a DTensor's placements do not say
            which part a rank holds; the same error on all.

    """
    world = current_world(pg, timeout_s=Options().timeout_s)
    sent: list[SplitStateDict] = []

    def describe() -> bytes:
        if world.rank > 0:
            return b""
        sent.append(split_tensors(full_state_dict))
        # Pickled, as in torch's own object collectives: values of the user's classes travel too, within one job.
        return b"" if world.solo else pickle.dumps(sent[0].without_values())

    with rendezvous(world, "broadcast a state dict") as meeting:
        told = meeting.agree("describe", describe, lambda said: [said[0]] * len(said))
        parcel: SplitStateDict = sent[0] if sent else pickle.loads(told)
        wishes = _Receiver(parcel, torch.device(device), cpu_offload=cpu_offload)

        def prepare() -> None:
            for key, value in parcel.skeleton.items():
                if key in local_state_dict and not (isinstance(value, TensorSlot) and local_state_dict[key] is None):
                    wishes.want(value, local_state_dict[key])

        agreed = _agree_on(meeting, wishes, prepare, pg)
    results = wishes.fulfil(agreed, pg)
    for key, value in parcel.skeleton.items():
        if key in local_state_dict and not (isinstance(value, TensorSlot) and local_state_dict[key] is None):
            local_state_dict[key] = join_tensors(value, results)
    if strict:
        for key in local_state_dict.keys() - parcel.skeleton.keys():
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

    Args:
        full_state_dict: tensors on the first rank of the group, a `_TensorInfo` for each on the others.
        local_state_dict: what to fill; keys it lacks, or has None for, are left out.
        keys: which tensors, the same on all ranks.
        device: where full tensors and those in place of meta ones are made.
        pg: the ranks that take part; all by default.

    Raises:
        StateMismatch: a key is missing, or its size or dtype differs between ranks; the same error on all.
        UnsupportedLeaf: as for `broadcast_state_dict`.

    """
    world = current_world(pg, timeout_s=Options().timeout_s)
    taken: list[SplitStateDict] = []

    def describe() -> bytes:
        if missing := [key for key in keys if key not in full_state_dict]:
            raise StateMismatch(f"the full state dict lacks {missing}", hint="give all ranks the same keys")
        taken.append(_split_flat({key: full_state_dict[key] for key in keys}, sender=world.rank == 0))
        return pickle.dumps(taken[0].cargoes)

    with rendezvous(world, "broadcast tensors") as meeting:
        meeting.agree("describe", describe, _check_same_specs)
        wishes = _Receiver(taken[0], torch.device(device), cpu_offload=False)

        def prepare() -> None:
            for key, slot in taken[0].skeleton.items():
                if local_state_dict.get(key) is not None:
                    wishes.want(slot, local_state_dict[key])

        agreed = _agree_on(meeting, wishes, prepare, pg)
    results = wishes.fulfil(agreed, pg)
    for key, slot in taken[0].skeleton.items():
        if local_state_dict.get(key) is not None:
            local_state_dict[key] = join_tensors(slot, results)


def distribute_tensors(
    local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: ProcessGroup | None = None
) -> None:
    """
    Replace each pair of a DTensor and a full tensor in the state dict by the DTensor, filled with its own part.

    A DTensor on meta becomes one where the full tensor is. Other values stay. Nothing is communicated.

    Raises:
        StateMismatch: the two of a pair have different shapes; nothing has changed then.

    """
    del device, pg  # the arguments of torch's
    pairs = {key: pair for key in keys if isinstance(pair := local_state_dict.get(key), tuple)}
    berths = {
        key: destination_for(TensorSpec(key, tuple(full.shape), full.dtype), dtensor, full.device)
        for key, (dtensor, full) in pairs.items()
    }
    for key, (_, full) in pairs.items():
        copy_box(whole(tuple(full.shape)), full.detach(), berths[key])
        local_state_dict[key] = berths[key].result


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
    values of other types always come, as torch has it. Dicts, lists and tuples inside are gone through in the same
    way. Nothing is communicated: torch scatters from one rank what every rank has already.

    Args:
        full_state_dict: the same values on all ranks; never changed.
        local_state_dict: what to fill; changed only if all of it can be.
        device: where full tensors are put; new DTensors are where their mesh is.
        pg: not used.

    Raises:
        StateMismatch: a tensor has another shape than its destination.
        UnsupportedLeaf: a full tensor is on meta or of no plain form, or a DTensor's placements do not say which part
            this rank holds.

    """
    del pg
    placed = {
        key: _local_part(value, local_state_dict.get(key), (key,), torch.device(device))
        for key, value in full_state_dict.items()
        if not (isinstance(value, torch.Tensor) and value.dim() and local_state_dict.get(key) is None)
    }
    local_state_dict.update(placed)


class _Receiver:
    """What this rank wants of a parcel, and where it will put it."""

    def __init__(self, parcel: SplitStateDict, device: torch.device, *, cpu_offload: bool) -> None:
        self.parcel = parcel
        self.device = device
        self._cpu_offload = cpu_offload
        self._berths: dict[int, Destination] = {}

    def want(self, part: Any, destination: Any) -> None:
        """Make room for all tensors in one part of the skeleton; `destination` is what stands there now."""
        if isinstance(part, TensorSlot):
            self._berths[part.number] = self._berth(part.number, destination)
        elif type(part) in CONTAINERS:
            for key, child in items_of(part):
                self.want(child, child_of(destination, key))

    def missing(self) -> set[int]:
        """Return the numbers of the tensors that have to come from the sender."""
        return {number for number, berth in self._berths.items() if berth.parts}

    def fulfil(self, agreed: _BroadcastPlan, pg: ProcessGroup | None) -> dict[int, Any]:
        """Send, as the other ranks do, what any rank misses, and return the tensors that are wanted here."""
        sources, wanted = self.parcel.sources, agreed.numbers
        nowhere = Destination(None, ())
        with torch.no_grad():
            broadcast_batches(
                [self.parcel.cargoes[number] for number in wanted],
                None if sources is None else [sources[number] for number in wanted],
                [self._berths.get(number, nowhere) for number in wanted],
                communication_device(self.device, pg),
                pg,
                batch_bytes=agreed.batch_bytes,
            )
            return {number: self._finished(berth.result) for number, berth in self._berths.items()}

    def _berth(self, number: int, destination: Any) -> Destination:
        cargo, sources = self.parcel.cargoes[number], self.parcel.sources
        # 0-dim tensors are counters, which optimizers keep on the CPU.
        on_cpu = self._cpu_offload or not (cargo.shape or is_dtensor(destination))
        device = _CPU if on_cpu else self.device
        if sources is None or is_dtensor(destination):
            return destination_for(cargo, destination, device)
        check_shape(cargo, destination)
        return Destination(sources[number].to(device), ())  # here already, or needed here as a whole

    def _finished(self, result: Any) -> Any:
        return result.cpu() if self._cpu_offload else result


class _BroadcastPlan(NamedTuple):
    """What all ranks know alike before the first tensor is sent."""

    numbers: list[int]
    """The tensors that are sent: those that at least one rank misses."""
    batch_bytes: int


def _agree_on(
    meeting: Rendezvous, wishes: _Receiver, prepare: Callable[[], None], pg: ProcessGroup | None
) -> _BroadcastPlan:
    """Let every rank prepare, and return what is to be sent."""
    count = len(wishes.parcel.cargoes)

    def work() -> bytes:
        prepare()
        mine = wishes.missing()
        flags = "".join("1" if number in mine else "0" for number in range(count))
        return f"{communication_device(wishes.device, pg).type} {int(flags or '0', 2):x}".encode()

    def decide(said: list[bytes]) -> list[bytes]:
        kinds, flags = zip(*(word.decode().split() for word in said), strict=True)
        if len(set(kinds)) > 1:
            raise RanksDisagree(
                f"the ranks want to talk from different kinds of devices: {dict(enumerate(kinds))}",
                hint="give all ranks a device of the same type",
            )
        union = functools.reduce(operator.or_, (int(each, 16) for each in flags))
        return [f"{union:x} {stream.BATCH_BYTES}".encode()] * len(said)

    union, batch_bytes = meeting.agree("prepare", work, decide).split()
    flags = format(int(union, 16), "b").zfill(count)
    return _BroadcastPlan([number for number in range(count) if flags[number] == "1"], int(batch_bytes))


def _split_flat(values: Mapping[str, Any], *, sender: bool) -> SplitStateDict:
    """Make the parcel of a flat dict of tensors, or of what stands for them on ranks that do not send."""
    if sender:
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                raise UnsupportedLeaf(f"{key!r} is a {type(value).__qualname__}, expected a tensor", key=key)
        return split_tensors(values)
    # A rank that has the tensor too, and not only the info, may pass it.
    shapes = {key: info.shape if isinstance(info, torch.Tensor) else info.size for key, info in values.items()}
    cargoes = [TensorSpec(key, tuple(shapes[key]), info.dtype) for key, info in values.items()]
    return SplitStateDict({key: TensorSlot(number) for number, key in enumerate(values)}, cargoes, None)


def _check_same_specs(said: list[bytes]) -> list[bytes]:
    """Raise unless all ranks know the same of the same tensors."""
    first: list[TensorSpec] = pickle.loads(said[0])
    for rank, word in enumerate(said):
        theirs: list[TensorSpec] = first if word == said[0] else pickle.loads(word)
        for ours, other in itertools.zip_longest(first, theirs):
            if ours != other:
                raise StateMismatch(
                    f"the tensors to broadcast differ: {ours} on the first rank, {other} on rank {rank}",
                    hint="give all ranks the same keys, in the same order, and what the first rank has for them",
                    mismatched=[(ours or other).name],
                )
    return [b""] * len(said)


def _local_part(value: Any, destination: Any, path: TreePath, device: torch.device) -> Any:
    """Return what stands in the local state dict for one value of a full one that is here."""
    if type(value) in CONTAINERS and destination is not None:
        return rebuilt(value, lambda key, child: _local_part(child, child_of(destination, key), (*path, key), device))
    if not isinstance(value, torch.Tensor):
        return value
    if is_dtensor(value) and is_dtensor(destination) and same_layout(value, destination):
        return value.detach()
    source = plain_source(value, path)
    cargo = TensorSpec(path_name(path), tuple(source.shape), source.dtype)
    if not is_dtensor(destination):
        check_shape(cargo, destination)
        return source.to(device if cargo.shape else _CPU)
    berth = destination_for(cargo, destination, torch.device(destination.device_mesh.device_type), refill=False)
    with torch.no_grad():
        copy_box(whole(cargo.shape), source, berth)
    return berth.result
