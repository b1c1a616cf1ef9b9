"""
Shared reads: ranks that want the same bytes read a part each and send it to each other.

Each rank offers what it wants (`Sharing.offer`), rank 0 plans who reads what (`plan.sharing`), every rank reads its part, and
then the ranks exchange the parts (`Exchange`), from the memory they were read into, into the memory that wants them.
Messages go over the process group's CPU backend, a few at a time and in the same order on all ranks, so that the first
unfinished message is always in progress at both of its ends and no rank waits for ever. Nothing is sent through an
accelerator's communicator.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shardkeep.dist.world import World
from shardkeep.engine.reader import Source
from shardkeep.engine.tensors import host_address, scattered_memory
from shardkeep.engine.workers import Scattered
from shardkeep.errors import RanksSilent
from shardkeep.format.boxes import Boxes, IntArray, Ints, flat_range_to_boxes, whole
from shardkeep.format.dtypes import known_to_torch, to_torch
from shardkeep.plan.sharing import ShareOffer, SharePlan, decode_share_plan, encode_offer
from shardkeep.state.leaves import overlaps_itself, synchronize_devices
from shardkeep.storage.buffers import aligned_buffer, copy, view_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# -- the channel -------------------------------------------------------------------------------------------------------

log = logging.getLogger("shardkeep")

TAGS = 1 << 31
"""Number of tags, which distinguish messages from each other and from those of other users of the group."""


class Channel(NamedTuple):
    """The backend that carries bytes between the ranks of a group."""

    backend: Any
    """Torch's backend for the CPU."""
    rank: int
    timeout_s: float
    """How long a message may take."""


def open_channel(group: ProcessGroup | World | None, *, size: int, timeout_s: float) -> Channel | str:
    """
    Return a channel between the `size` ranks of a group (None: the default group), or the reason why there is none.
    """
    if size == 1:
        return "there is only one rank"
    if isinstance(group, World):
        return "the ranks have no process group"
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - already loaded if there are several ranks

    members = group if group is not None else c10d._get_default_group()
    try:
        backend = members._get_backend(torch.device("cpu"))
    except RuntimeError:
        return f"the process group ({c10d.get_backend_config(members)}) has no backend for the CPU"
    if backend.name() != "gloo":
        return f"the process group's backend for the CPU is {backend.name()}, not gloo"
    # Half of it, so that a rank whose messages are not answered reports that while rank 0 is still waiting for it.
    return Channel(backend, c10d.get_rank(members), timeout_s / 2)


def new_tag() -> int:
    """Return the first tag of an exchange; rank 0 chooses it for all ranks."""
    return secrets.randbelow(TAGS)


def all_agree(reasons: Sequence[str | None]) -> bool:
    """
    Return whether all ranks share their reads. If only some of them would, log why reads are not shared.

    `reasons` has for each rank None if it was not asked to, else why it cannot, or "" if it can.
    """
    if all(reason == "" for reason in reasons):
        return True
    if any(reason is not None for reason in reasons):
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason != "")
        log.warning("reads are not shared: rank %d: %s", rank, "share_reads is not set" if reason is None else reason)
    return False


# -- the exchange ------------------------------------------------------------------------------------------------------

_IN_PROGRESS = 6
"""Messages that a rank sends and receives at the same time."""
_KEPT = 2
"""Additional buffers, for messages that were sent to some of their receivers and go to others next."""


@dataclass(frozen=True, eq=False)
class _Message:
    """What one rank has read for others."""

    owner: int
    turn: int
    team: list[int]
    place: dict[int, int]
    """Position of each rank in the team."""
    parts: list[tuple[int, int, int]]
    """Requests, and the byte range of each."""

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)


class _Step(NamedTuple):
    """A message to one of its receivers. Sorted by their first three fields, steps have the same order on all ranks."""

    turn: int
    shift: int
    """Distance of the receiver from the owner in the team, so that each rank sends to one and receives from one at a time."""
    owner: int
    message: _Message
    peer: int
    """The rank at the other end."""


class _Transfer(NamedTuple):
    step: _Step
    data: memoryview
    buffer: memoryview | None
    """The buffer that `data` is a part of, if it is not the memory of a tensor."""
    work: Any


@dataclass
class _Packed:
    """A message of this rank, as it is sent."""

    data: memoryview
    buffer: memoryview | None
    left: int
    """Receivers that do not have it yet."""


class Exchange:
    """One rank's part in an exchange. It allocates all buffers when it is made, before any rank begins to exchange."""

    def __init__(self, channel: Channel, orders: SharePlan, into: Sequence[torch.Tensor]) -> None:
        """`into` has the tensor of each row of the rank's offer: on any device, of any stride, in the stored dtype."""
        self._channel = channel
        messages = list(_messages(orders))
        self._steps = sorted(
            (step for message in messages for step in _steps(message, channel.rank)), key=lambda step: step[:3]
        )
        wants = np.unique(orders.share.want).tolist()
        self._tensors = {want: into[want] for want in wants}
        self._address = {want: host_address(into[want]) for want in wants}
        self._others: dict[int, Scattered] = {
            want: scattered_memory(into[want], into[want].dtype) for want in wants if not self._address[want]
        }
        self._first_tag = orders.first_tag
        self._message_nbytes = orders.message_nbytes
        packed = sum(not self._in_place(message) for message in messages)
        self._free = [aligned_buffer(orders.message_nbytes) for _ in range(min(packed, _IN_PROGRESS + _KEPT))]
        self._packed: dict[int, _Packed] = {}
        self._lost: dict[int, str] = {}
        self._failure: Exception | None = None
        self._bytes_received = 0

    def run(self) -> int:
        """
        Send and receive everything; return the number of bytes received.

        If a rank is lost, the exchange goes on with the others, because they also need what does not come from that rank.
        If this rank fails, it goes on sending, whatever the bytes, and raises at the end, which fails the load on all ranks.

        Raises:
            RanksSilent: ranks are gone, or did not answer.

        """
        synchronize_devices(self._tensors.values())
        transfers: deque[_Transfer] = deque()
        for step in self._steps:
            if len(transfers) == _IN_PROGRESS:
                self._end(transfers.popleft())
            if step.peer not in self._lost:
                transfers.append(self._begin(step))
            elif step.owner == self._channel.rank:
                self._done(step.message)
        while transfers:
            self._end(transfers.popleft())
        synchronize_devices(self._tensors.values())
        # The bytes bypassed autograd, which must not take what it saved of these tensors for still valid.
        torch.autograd.graph.increment_version(list(self._tensors.values()))
        if self._lost:
            raise self._loss()
        if self._failure is not None:
            raise self._failure
        return self._bytes_received

    def _begin(self, step: _Step) -> _Transfer:
        if step.owner == self._channel.rank:
            packed = self._pack(step.message)
            data, buffer, post = packed.data, packed.buffer, self._channel.backend.send
        else:
            data, buffer = self._room(step.message)
            post = self._channel.backend.recv
        try:
            work = post([torch.frombuffer(data, dtype=torch.uint8)], step.peer, (self._first_tag + step.turn) % TAGS)
        except RuntimeError as error:  # the connection is closed already
            work = error
        return _Transfer(step, data, buffer, work)

    def _end(self, each: _Transfer) -> None:
        step, timeout_s = each.step, self._channel.timeout_s
        sends = step.owner == self._channel.rank
        began = time.monotonic()
        try:
            if isinstance(each.work, RuntimeError):
                raise each.work
            each.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:  # raised for a lost peer as well as for a silent one
            waited_s = time.monotonic() - began
            verb = "did not receive what was sent" if sends else "did not send"
            self._lost.setdefault(step.peer, f"{verb} ({waited_s:.1f} s): {error!s:.160}")
            if waited_s >= timeout_s:  # the backend then closes all connections, so the state of the others is unknown
                raise self._loss() from error
        else:
            if not sends:
                self._unpack(step.message, each.data)
                if each.buffer is not None:
                    self._free.append(each.buffer)
        if sends:
            self._done(step.message)

    def _loss(self) -> RanksSilent:
        reasons = "; ".join(f"rank {rank} {text}" for rank, text in self._lost.items())
        return RanksSilent(
            f"ranks that share their reading were lost while they exchanged it: {reasons}",
            hint="look at what these ranks logged last, then load again",
            ranks=list(self._lost),
        )

    # -- memory --------------------------------------------------------------------------------------------------------

    def _in_place(self, message: _Message) -> bool:
        return len(message.parts) == 1 and self._address[message.parts[0][0]] != 0

    def _room(self, message: _Message) -> tuple[memoryview, memoryview | None]:
        """Return the memory of a message, and the buffer that it is part of, if any."""
        if self._in_place(message):
            want, start, _ = message.parts[0]
            return view_memory(self._address[want] + start, message.nbytes), None
        # Buffers of failed messages are not reused, because the backend may still write to them.
        buffer = self._free.pop() if self._free else aligned_buffer(self._message_nbytes)
        return buffer[: message.nbytes], buffer

    def _pack(self, message: _Message) -> _Packed:
        """Return the bytes of an outgoing message, which is put together for its first receiver."""
        packed = self._packed.get(message.turn)
        if packed is None:
            data, buffer = self._room(message)
            packed = self._packed[message.turn] = _Packed(data, buffer, len(message.team) - 1)
            if buffer is not None:
                self._try(self._copy, message, data, out=True)
        return packed

    def _done(self, message: _Message) -> None:
        """Record that one receiver has a message, or never will."""
        packed = self._packed.get(message.turn)
        if packed is None:  # its first receiver is lost
            packed = self._pack(message)
        packed.left -= 1
        if packed.left == 0:
            del self._packed[message.turn]
            if packed.buffer is not None and not self._lost:
                self._free.append(packed.buffer)

    def _unpack(self, message: _Message, data: memoryview) -> None:
        self._bytes_received += message.nbytes
        if not self._in_place(message):
            self._try(self._copy, message, data, out=False)

    def _try(self, work: Any, *args: Any, **kwargs: Any) -> None:
        try:
            work(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised when the others no longer wait for this rank
            self._failure = self._failure or error

    def _copy(self, message: _Message, data: memoryview, *, out: bool) -> None:
        """Copy the parts of a message from tensors to a buffer (`out`), or back."""
        at = 0
        for want, start, stop in message.parts:
            some = data[at : at + stop - start]
            at += stop - start
            if address := self._address[want]:
                there = view_memory(address + start, stop - start)
                copy(some, there) if out else copy(there, some)
            elif out:
                self._others[want].read(start, stop, some)
            else:
                self._spread(want, start, stop, some)

    def _spread(self, want: int, start: int, stop: int, data: memoryview) -> None:
        tensor = self._tensors[want]
        size, at = tensor.element_size(), 0
        for box in flat_range_to_boxes(tuple(tensor.shape), start // size, stop // size):
            nbytes = box.volume * size
            self._others[want].write(box, data[at : at + nbytes], box.sizes, whole(box.sizes))
            at += nbytes


def _messages(orders: SharePlan) -> Iterator[_Message]:
    """Group rows of the same owner and turn."""
    places = [{rank: place for place, rank in enumerate(team)} for team in orders.teams]
    made: _Message | None = None
    for owner, turn, team, *part in zip(*(column.tolist() for column in orders.share.columns()), strict=True):
        if made is None or (made.owner, made.turn) != (owner, turn):
            if made is not None:
                yield made
            made = _Message(owner, turn, orders.teams[team], places[team], [])
        made.parts.append((part[0], part[1], part[2]))
    if made is not None:
        yield made


def _steps(message: _Message, rank: int) -> Iterator[_Step]:
    """Return the steps of a message in which a rank takes part."""
    team, owner = message.team, message.owner
    first = message.place[owner]
    if owner == rank:
        for shift in range(1, len(team)):
            yield _Step(message.turn, shift, owner, message, team[(first + shift) % len(team)])
    else:
        yield _Step(message.turn, (message.place[rank] - first) % len(team), owner, message, owner)


# -- offers ------------------------------------------------------------------------------------------------------------

# Only what is exactly the same is shared: plain tensors in the stored dtype, whose memory nothing else is loaded into. A rank
# reads everything else itself, and also what no other rank wants.


class SharedRequest(NamedTuple):
    """A box of a stored tensor that a rank wants to read."""

    what: bytes
    """Identifies the bytes: equal on all ranks that want the same ones."""
    target: torch.Tensor
    file: str
    start: int
    """About where it begins in the file."""
    can_share: bool


class Cut(NamedTuple):
    """The part of a shared request that this rank reads."""

    want: int
    axis: int
    begin: int
    end: int


class SharedPart(NamedTuple):
    """What one rank does in a load with shared reads."""

    rows: set[int]
    """The requests that it does not read as they are."""
    cuts: list[Cut]
    """The parts of them that it reads instead."""
    exchange: Exchange
    """To be run once all ranks have read."""


class Sharing:
    """One rank's part in sharing the reads of a load."""

    def __init__(self, channel: Channel, wants: Sequence[SharedRequest], *, budget_nbytes: int) -> None:
        self._channel = channel
        self._budget_nbytes = budget_nbytes
        self._alone_nbytes = sum(want.target.nbytes for want in wants if not want.can_share)
        # The positions of the offered requests among all requests.
        self._offered = [row for row, want in enumerate(wants) if want.can_share]
        self._wants = [wants[row] for row in self._offered]

    def offer(self) -> bytes:
        """Return this rank's offer, encoded for rank 0."""
        digests = [blake2b(want.what, digest_size=16).digest() for want in self._wants]
        files = {want.file: _number(want.file) for want in self._wants}
        offer = ShareOffer(
            what=np.frombuffer(b"".join(digests), "<i8").reshape(-1, 2),
            nbytes=np.array([want.target.nbytes for want in self._wants], np.int64),
            rows=np.array([_rows(tuple(want.target.shape))[1] for want in self._wants], np.int64),
            file=np.array([files[want.file] for want in self._wants], np.int64),
            start=np.array([want.start for want in self._wants], np.int64),
        )
        return encode_offer(offer, alone_nbytes=self._alone_nbytes, budget_nbytes=self._budget_nbytes)

    def accept(self, plan: bytes) -> SharedPart:
        """Return what this rank does by rank 0's plan, and allocate all memory that the exchange needs."""
        planned = decode_share_plan(plan)
        share = planned.share
        exchange = Exchange(self._channel, planned, [want.target for want in self._wants])
        # A rank has at most one slice of a request, which may be sent in several messages.
        slices: dict[int, tuple[int, int]] = {}
        own = share.take(share.owner == self._channel.rank)
        for row, start, stop in zip(own.want.tolist(), own.start.tolist(), own.stop.tolist(), strict=True):
            low, high = slices.get(row, (start, stop))
            slices[row] = min(low, start), max(high, stop)
        cuts = []
        for row, (start, stop) in slices.items():
            target = self._wants[row].target
            axis, count = _rows(tuple(target.shape))
            row_nbytes = target.nbytes // count
            cuts.append(Cut(self._offered[row], axis, start // row_nbytes, stop // row_nbytes))
        return SharedPart({self._offered[row] for row in np.unique(share.want).tolist()}, cuts, exchange)


def is_plain(tensor: torch.Tensor, stored: torch.dtype) -> bool:
    """Return whether a tensor's memory holds the stored bytes as they are, each element once."""
    return (
        _in_memory(tensor)
        and tensor.dtype == stored
        and stored in known_to_torch()
        and tensor.numel() > 0
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not overlaps_itself(tensor)
    )


def _in_memory(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.layout == torch.strided and tensor.device.type != "meta"


def in_disjoint_memory(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """
    Return for each tensor whether no other one begins or ends between its first and its last element in memory.

    Memory that two tensors share ends up with the contents of either of them. That is fine on the rank that has them, but such
    memory must not be sent to other ranks.
    """
    spans = []
    alone = [_in_memory(tensor) for tensor in tensors]
    for row, tensor in enumerate(tensors):
        if alone[row] and tensor.numel():
            reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + (reach + 1) * tensor.element_size(), row))
    before, end, widest = "", 0, -1
    for device, start, stop, row in sorted(spans):
        if device == before and start < end:
            alone[row] = alone[widest] = False
        if device != before or stop > end:
            before, end, widest = device, stop, row
    return alone


def _rows(shape: Ints) -> tuple[int, int]:
    """Return the axis along which a box is cut, the first with more than one index, and its extent."""
    axis = next((axis for axis, n in enumerate(shape) if n > 1), 0)
    return axis, shape[axis] if shape else 1


def _number(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


# -- requests of a load ------------------------------------------------------------------------------------------------


class Destinations(NamedTuple):
    """Tensors to fill: for each one, the row of a tensor in the index, and a box."""

    tensor: IntArray
    boxes: Boxes
    into: list[torch.Tensor]


def shared_requests(source: Source, to: Destinations) -> list[SharedRequest]:
    """Return what is to be read from a checkpoint; all ranks have opened the same one."""
    index = source.index
    owner = np.asarray(index.tensors.alias, np.int64)[to.tensor]
    alone = in_disjoint_memory(to.into)
    wants = []
    for want, (row, target) in enumerate(zip(owner.tolist(), to.into, strict=True)):
        box = to.boxes.box(want, int(index.tensors.ndim[row]))
        file, start = _place(source, row, box.offsets) if target.numel() else ("", 0)
        can_share = alone[want] and is_plain(target, to_torch(index.dtype(row)))
        wants.append(SharedRequest(repr((row, box.offsets, box.sizes)).encode(), target, file, start, can_share))
    return wants


def remaining_reads(to: Destinations, shared: set[int], cuts: Sequence[Cut]) -> Destinations:
    """Return what a rank reads itself, if it reads only parts of its shared requests."""
    whole = [want for want in range(len(to.into)) if want not in shared]
    rows = np.array([*whole, *(cut.want for cut in cuts)], np.int64)
    offsets, sizes = to.boxes.offsets[rows], to.boxes.sizes[rows]  # copies, as the rows are a list
    into = [to.into[want] for want in whole]
    for row, cut in enumerate(cuts, start=len(whole)):
        target = to.into[cut.want]
        if target.dim():
            offsets[row, cut.axis] += cut.begin
            sizes[row, cut.axis] = cut.end - cut.begin
            target = target.narrow(cut.axis, cut.begin, cut.end - cut.begin)
        into.append(target)
    return Destinations(to.tensor[rows], Boxes(offsets, sizes), into)


def _place(source: Source, row: int, offsets: tuple[int, ...]) -> tuple[str, int]:
    """Return the file in which a box of a tensor begins, and about where."""
    index = source.index
    rows = index.chunk_rows(row)
    at = rows.start
    if rows.stop == rows.start:  # reading reports what is wrong
        return "", 0
    if rows.stop - rows.start > 1 and offsets:
        chunks = index.chunks.take(rows)
        low = np.asarray(chunks.offsets, np.int64)[:, : len(offsets)]
        high = low + np.asarray(chunks.sizes, np.int64)[:, : len(offsets)]
        at += int(np.argmax(np.all((low <= offsets) & (high > offsets), axis=1)))
    file, start = source.position(at)
    return str(file), start
