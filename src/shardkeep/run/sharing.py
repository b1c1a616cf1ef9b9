"""
The exchange of what ranks have read for each other: from the memory it was read into, into the memory that wants it.

Messages go from rank to rank over the group's CPU backend, a few at a time and in one order on all ranks: the first one
that is not done yet is under way at both its ends, so nobody waits for ever. Memory that is not one run of host bytes
is reached through a few buffers of a message's length. Nothing is ever sent through an accelerator's communicator.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch

from shardkeep.errors import RanksSilent
from shardkeep.format.region import flat_range_to_boxes, whole
from shardkeep.plan.sharing import Orders
from shardkeep.run.sharing_channel import TAGS, Channel
from shardkeep.stage.memory import Scattered, view_memory
from shardkeep.stage.tensors import host_address, scattered
from shardkeep.state.devices import settle
from shardkeep.store.aligned import aligned_buffer, copy

_UNDER_WAY = 6
"""Messages that a rank sends and receives at a time."""
_KEPT = 2
"""Buffers besides those: of messages that were sent to some of their receivers, and go to others next."""


@dataclass(frozen=True, eq=False)
class _Message:
    """What one rank has read for others."""

    owner: int
    turn: int
    team: list[int]
    place: dict[int, int]
    """Of each rank in the team."""
    parts: list[tuple[int, int, int]]
    """Wants, and the bytes of each, from and to."""

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)


class _Step(NamedTuple):
    """A message to one of its receivers. Steps are sorted by their first three fields, in one order on all ranks."""

    turn: int
    shift: int
    """How far the receiver is from the owner in the team: so every rank sends to one and hears from one at a time."""
    owner: int
    message: _Message
    peer: int
    """At the other end."""


class _UnderWay(NamedTuple):
    step: _Step
    data: memoryview
    buffer: memoryview | None
    """What `data` is a part of, where it is not the memory of a tensor."""
    work: Any


@dataclass
class _Packed:
    """A message of this rank, as it is sent."""

    data: memoryview
    buffer: memoryview | None
    left: int
    """How many have not got it yet."""


class Exchange:
    """One rank's part in an exchange. Made before the ranks agree to begin it, as it may fail for lack of memory."""

    def __init__(self, channel: Channel, orders: Orders, into: Sequence[torch.Tensor]) -> None:
        """
        Prepare to send and receive.

        Args:
            channel: carries the bytes.
            orders: this rank's part.
            into: the tensor of each row of the rank's offer: of any device and stride, in the stored dtype.

        """
        self._channel = channel
        messages = list(_messages(orders))
        self._steps = sorted(
            (step for message in messages for step in _steps(message, channel.rank)), key=lambda step: step[:3]
        )
        wants = np.unique(orders.share.want).tolist()
        self._tensors = {want: into[want] for want in wants}
        self._address = {want: host_address(into[want]) for want in wants}
        self._others: dict[int, Scattered] = {
            want: scattered(into[want], into[want].dtype) for want in wants if not self._address[want]
        }
        self._first_tag = orders.first_tag
        self._message_nbytes = orders.message_nbytes
        packed = sum(not self._in_place(message) for message in messages)
        self._free = [aligned_buffer(orders.message_nbytes) for _ in range(min(packed, _UNDER_WAY + _KEPT))]
        self._packed: dict[int, _Packed] = {}
        self._lost: dict[int, str] = {}
        self._failure: Exception | None = None
        self.bytes_received = 0

    def run(self) -> None:
        """
        Send and receive everything.

        A rank that is gone does not end the exchange: others need what it has nothing to do with. Nor does a failure of
        this rank, which goes on with whatever bytes: it fails at the end, and with it the load of all.

        Raises:
            RanksSilent: ranks are gone, or did not answer.

        """
        settle(self._tensors.values())
        under_way: deque[_UnderWay] = deque()
        for step in self._steps:
            if len(under_way) == _UNDER_WAY:
                self._end(under_way.popleft())
            if step.peer not in self._lost:
                under_way.append(self._begin(step))
            elif step.owner == self._channel.rank:
                self._done(step.message)
        while under_way:
            self._end(under_way.popleft())
        settle(self._tensors.values())
        # The bytes went past autograd, which must not take what it saved from these tensors for still valid.
        torch.autograd.graph.increment_version(list(self._tensors.values()))
        if self._lost:
            raise self._loss()
        if self._failure is not None:
            raise self._failure

    def _begin(self, step: _Step) -> _UnderWay:
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
        return _UnderWay(step, data, buffer, work)

    def _end(self, each: _UnderWay) -> None:
        step, timeout_s = each.step, self._channel.timeout_s
        sends = step.owner == self._channel.rank
        began = time.monotonic()
        try:
            if isinstance(each.work, RuntimeError):
                raise each.work
            each.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:  # what backends raise, for a peer that is gone and for one that is silent
            waited_s = time.monotonic() - began
            verb = "did not take what was sent" if sends else "did not send"
            self._lost.setdefault(step.peer, f"{verb} ({waited_s:.1f} s): {error!s:.160}")
            if waited_s >= timeout_s:  # the backend gives up all its connections then, which says nothing of others
                raise self._loss() from error
        else:
            if not sends:
                self._unpack(step.message, each.data)
                if each.buffer is not None:
                    self._free.append(each.buffer)
        if sends:
            self._done(step.message)

    def _loss(self) -> RanksSilent:
        told = "; ".join(f"rank {rank} {text}" for rank, text in self._lost.items())
        return RanksSilent(
            f"ranks that share their reading were lost while they exchanged it: {told}",
            hint="look at what these ranks logged last, then load again",
            ranks=list(self._lost),
        )

    # -- memory --------------------------------------------------------------------------------------------------------

    def _in_place(self, message: _Message) -> bool:
        return len(message.parts) == 1 and self._address[message.parts[0][0]] != 0

    def _room(self, message: _Message) -> tuple[memoryview, memoryview | None]:
        """Return the memory that a message lies in, and the buffer it is of, if it is one."""
        if self._in_place(message):
            want, start, _ = message.parts[0]
            return view_memory(self._address[want] + start, message.nbytes), None
        # There are none left where messages failed, of which nobody knows who still writes to them.
        buffer = self._free.pop() if self._free else aligned_buffer(self._message_nbytes)
        return buffer[: message.nbytes], buffer

    def _pack(self, message: _Message) -> _Packed:
        """Return the bytes of a message that goes out, put together when it goes to its first receiver."""
        packed = self._packed.get(message.turn)
        if packed is None:
            data, buffer = self._room(message)
            packed = self._packed[message.turn] = _Packed(data, buffer, len(message.team) - 1)
            if buffer is not None:
                self._try(self._copy, message, data, out=True)
        return packed

    def _done(self, message: _Message) -> None:
        """Note that one receiver has a message, or never will."""
        packed = self._packed.get(message.turn)
        if packed is None:  # its first receiver is lost
            packed = self._pack(message)
        packed.left -= 1
        if packed.left == 0:
            del self._packed[message.turn]
            if packed.buffer is not None and not self._lost:
                self._free.append(packed.buffer)

    def _unpack(self, message: _Message, data: memoryview) -> None:
        self.bytes_received += message.nbytes
        if not self._in_place(message):
            self._try(self._copy, message, data, out=False)

    def _try(self, work: Any, *args: Any, **kwargs: Any) -> None:
        try:
            work(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised when the others no longer wait for this rank
            self._failure = self._failure or error

    def _copy(self, message: _Message, data: memoryview, *, out: bool) -> None:
        """Copy the parts of a message from tensors to a buffer, or back."""
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


def _messages(orders: Orders) -> Iterator[_Message]:
    """Put rows of one owner and turn together."""
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
