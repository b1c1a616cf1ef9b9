"""
Shared reads: ranks that want the same bytes read a part each and send it to each other.

Each rank offers what it wants (`make_offer`), rank 0 plans who reads what (`plan.sharing`), every rank reads its part, and
then the ranks exchange the parts (`Exchange`), from the memory they were read into, into the memory that wants them.
Messages go over the process group's CPU backend, a few at a time and in the same order on all ranks, so that the first
unfinished message is always in progress at both of its ends and no rank waits for ever. Nothing is sent through an
accelerator's communicator.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np
import torch

from shardkeep.dist.world import World
from shardkeep.engine.reader import Source
from shardkeep.engine.tensors import host_address, scattered_memory, span
from shardkeep.engine.workers import Scattered
from shardkeep.errors import RanksSilent
from shardkeep.format.boxes import Boxes, IntArray, flat_range_to_boxes, whole
from shardkeep.format.dtypes import known_to_torch, to_torch
from shardkeep.plan.sharing import TAGS, ShareOffer, SharePlan, column
from shardkeep.state.leaves import overlaps_itself, synchronize_devices
from shardkeep.storage.buffers import aligned_buffer, copy, view_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


log = logging.getLogger("shardkeep")


class Channel(NamedTuple):
    """The backend that carries bytes between the ranks of a group."""

    backend: Any
    """Torch's backend for the CPU."""
    rank: int
    timeout_s: float
    """How long a message may take."""


def open_channel(group: ProcessGroup | World | None, *, size: int, timeout_s: float) -> Channel | str:
    """Return a channel between the `size` ranks of a group (None: the default group), or why there is none."""
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


def all_agree(reasons: Sequence[str | None]) -> bool:
    """
    Return whether all ranks share their reads; log why not if only some of them would. `reasons` has for each rank None if
    it was not asked to, else why it cannot, or "" if it can.
    """
    if all(reason == "" for reason in reasons):
        return True
    if any(reason is not None for reason in reasons):
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason != "")
        log.warning("reads are not shared: rank %d: %s", rank, "share_reads is not set" if reason is None else reason)
    return False


_IN_PROGRESS = 6
"""Messages that a rank sends and receives at the same time."""


class _Step(NamedTuple):
    """A message to one of its receivers. Sorted by their first three fields, steps have the same order on all ranks."""

    turn: int
    shift: int
    """Distance of the receiver from the owner in the team, so that each rank sends to one and receives from one at a time."""
    owner: int
    peer: int
    """The rank at the other end."""
    parts: list[tuple[int, int, int]]
    """Requests, and the byte range of each."""
    last: bool
    """No other receiver gets it later."""

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)


class _Transfer(NamedTuple):
    step: _Step
    data: memoryview
    buffer: memoryview | None
    """The buffer that `data` is a part of, if it is not the memory of a tensor."""
    work: Any


class Exchange:
    """One rank's part in an exchange. It allocates its buffers when it is made, before any rank begins to exchange."""

    def __init__(self, channel: Channel, plan: SharePlan, into: Sequence[torch.Tensor]) -> None:
        """`into` has the tensor of each row of the rank's offer: on any device, of any stride, in the stored dtype."""
        self._channel = channel
        self._plan = plan
        self._steps = _steps(plan, channel.rank)
        self._tensors = {want: into[want] for want in np.unique(plan.share.want).tolist()}
        self._address = {want: host_address(tensor) for want, tensor in self._tensors.items()}
        self._others: dict[int, Scattered] = {
            want: scattered_memory(tensor, tensor.dtype)
            for want, tensor in self._tensors.items()
            if not self._address[want]
        }
        # One more than messages in progress: the message being sent is kept for its other receivers.
        copied = sum(not self._in_place(step) for step in self._steps)
        self._free = [aligned_buffer(plan.message_nbytes) for _ in range(min(copied, _IN_PROGRESS + 1))]
        self._outgoing: tuple[int, memoryview, memoryview | None] | None = None
        self._lost: dict[int, str] = {}
        self._failure: Exception | None = None
        self._bytes_received = 0

    def run(self) -> int:
        """
        Send and receive everything; return the number of bytes received.

        If a rank is lost, the exchange goes on with the others. If this rank fails, it goes on sending, whatever the bytes.
        Both raise at the end, because until then other ranks wait.
        """
        synchronize_devices(self._tensors.values())
        transfers: deque[_Transfer] = deque()
        for step in self._steps:
            if len(transfers) == _IN_PROGRESS:
                self._end(transfers.popleft())
            if step.peer not in self._lost:
                transfers.append(self._begin(step))
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
            if self._outgoing is None or self._outgoing[0] != step.turn:
                data, buffer = self._memory_of(step)
                self._outgoing = step.turn, data, buffer
                if buffer is not None:
                    self._copy_or_fail(step, data, out=True)
            _, data, buffer = self._outgoing
            post = self._channel.backend.send
        else:
            data, buffer = self._memory_of(step)
            post = self._channel.backend.recv
        tag = (self._plan.first_tag + step.turn) % TAGS
        try:
            work = post([torch.frombuffer(data, dtype=torch.uint8)], step.peer, tag)
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
            return
        if not sends:
            self._bytes_received += step.nbytes
            if each.buffer is not None:
                self._copy_or_fail(step, each.data, out=False)
        # The backend may still use the buffers of failed messages.
        if each.buffer is not None and not self._lost and (step.last or not sends):
            self._free.append(each.buffer)

    def _loss(self) -> RanksSilent:
        reasons = "; ".join(f"rank {rank} {text}" for rank, text in self._lost.items())
        return RanksSilent(
            f"ranks that share their reading were lost while they exchanged it: {reasons}",
            hint="look at what these ranks logged last, then load again",
            ranks=list(self._lost),
        )

    def _in_place(self, step: _Step) -> bool:
        return len(step.parts) == 1 and self._address[step.parts[0][0]] != 0

    def _memory_of(self, step: _Step) -> tuple[memoryview, memoryview | None]:
        """Return the memory of a message, and the buffer that it is part of, if any."""
        if self._in_place(step):
            want, start, _ = step.parts[0]
            return view_memory(self._address[want] + start, step.nbytes), None
        buffer = self._free.pop() if self._free else aligned_buffer(self._plan.message_nbytes)
        return buffer[: step.nbytes], buffer

    def _copy_or_fail(self, step: _Step, data: memoryview, *, out: bool) -> None:
        try:
            self._copy(step, data, out=out)
        except Exception as error:  # noqa: BLE001 - raised when the others no longer wait for this rank
            self._failure = self._failure or error

    def _copy(self, step: _Step, data: memoryview, *, out: bool) -> None:
        """Copy the parts of a message from tensors to a buffer (`out`), or back."""
        at = 0
        for want, start, stop in step.parts:
            some = data[at : at + stop - start]
            at += stop - start
            if address := self._address[want]:
                there = view_memory(address + start, stop - start)
                copy(some, there) if out else copy(there, some)
            elif out:
                self._others[want].read(start, stop, some)
            else:
                shape, size = tuple(self._tensors[want].shape), self._tensors[want].element_size()
                for box in flat_range_to_boxes(shape, start // size, stop // size):
                    nbytes = box.volume * size
                    self._others[want].write(box, some[:nbytes], box.sizes, whole(box.sizes))
                    some = some[nbytes:]


def _steps(plan: SharePlan, rank: int) -> list[_Step]:
    """Return the steps in which a rank takes part, in order."""
    steps: list[_Step] = []
    rows = zip(*(column.tolist() for column in plan.share.columns()), strict=True)
    for (owner, turn, number), of_message in groupby(rows, key=lambda row: row[:3]):
        team, parts = plan.teams[number], [row[3:] for row in of_message]
        first, size = team.index(owner), len(team)
        for shift in range(1, size) if owner == rank else [(team.index(rank) - first) % size]:
            peer = team[(first + shift) % size] if owner == rank else owner
            steps.append(_Step(turn, shift, owner, peer, parts, last=shift == size - 1))
    return sorted(steps, key=lambda step: step[:3])


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

    axis: int
    begin: int
    end: int


Cuts = dict[int, "Cut | None"]
"""What a rank reads of each shared request, by its row; None: nothing."""


def make_offer(requests: Sequence[SharedRequest], *, budget_nbytes: int) -> bytes:
    """Return a rank's offer, encoded for rank 0."""
    offered = [request for request in requests if request.can_share]
    return msgspec.msgpack.encode(
        ShareOffer(
            alone_nbytes=sum(request.target.nbytes for request in requests if not request.can_share),
            budget_nbytes=budget_nbytes,
            what=b"".join(blake2b(request.what, digest_size=16).digest() for request in offered),
            nbytes=column([request.target.nbytes for request in offered]),
            rows=column([_rows(request.target)[1] for request in offered]),
            file=column([crc32(request.file.encode()) for request in offered]),
            start=column([request.start for request in offered]),
        )
    )


def accept_plan(channel: Channel, requests: Sequence[SharedRequest], data: bytes) -> tuple[Cuts, Exchange]:
    """Return what this rank reads by rank 0's plan, and the exchange that follows, with all memory that it needs."""
    plan = msgspec.msgpack.decode(data, type=SharePlan)
    offered = [row for row, request in enumerate(requests) if request.can_share]
    share = plan.share
    # A rank has at most one slice of a request, which may be sent in several messages.
    slices: dict[int, tuple[int, int]] = {}
    own = share.take(share.owner == channel.rank)
    for row, start, stop in zip(own.want.tolist(), own.start.tolist(), own.stop.tolist(), strict=True):
        low, high = slices.get(row, (start, stop))
        slices[row] = min(low, start), max(high, stop)
    cuts: Cuts = {offered[row]: None for row in np.unique(share.want).tolist()}
    for row, (start, stop) in slices.items():
        target = requests[offered[row]].target
        axis, count = _rows(target)
        row_nbytes = target.nbytes // count
        cuts[offered[row]] = Cut(axis, start // row_nbytes, stop // row_nbytes)
    return cuts, Exchange(channel, plan, [requests[row].target for row in offered])


def _rows(target: torch.Tensor) -> tuple[int, int]:
    """Return the axis along which a box is cut, the first with more than one index, and its extent."""
    axis = next((axis for axis, n in enumerate(target.shape) if n > 1), 0)
    return axis, target.shape[axis] if target.dim() else 1


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
    Memory that is filled twice may have the contents of either, which must not be sent to other ranks.
    """
    spans = []
    alone = [_in_memory(tensor) for tensor in tensors]
    for row, tensor in enumerate(tensors):
        if alone[row] and tensor.numel():
            spans.append((str(tensor.device), *span(tensor), row))
    before, end, widest = "", 0, -1
    for device, start, stop, row in sorted(spans):
        if device == before and start < end:
            alone[row] = alone[widest] = False
        if device != before or stop > end:
            before, end, widest = device, stop, row
    return alone


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
        chunks = index.chunk_rows(row)
        file, start = source.position(chunks.start) if chunks.stop > chunks.start else (0, 0)
        can_share = alone[want] and is_plain(target, to_torch(index.dtype(row)))
        wants.append(SharedRequest(repr((row, box.offsets, box.sizes)).encode(), target, str(file), start, can_share))
    return wants


def remaining_reads(to: Destinations, cuts: Cuts) -> Destinations:
    """Return what a rank reads itself, if it reads only parts of its shared requests."""
    rows = [want for want in range(len(to.into)) if want not in cuts or cuts[want]]
    offsets, sizes = to.boxes.offsets[rows], to.boxes.sizes[rows]  # copies, as the rows are a list
    into = [to.into[want] for want in rows]
    for row, want in enumerate(rows):
        if (cut := cuts.get(want)) and into[row].dim():
            offsets[row, cut.axis] += cut.begin
            sizes[row, cut.axis] = cut.end - cut.begin
            into[row] = into[row].narrow(cut.axis, cut.begin, cut.end - cut.begin)
    return Destinations(to.tensor[rows], Boxes(offsets, sizes), into)
