"""
What a rank offers to share, and what is left for it to read.

Only what is exactly alike is shared: plain tensors in the dtype that is stored, whose memory nothing else is loaded
into. A rank reads everything else itself, and so it does with what turns out to be wanted by no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from shardkeep.format.dtypes import known_to_torch
from shardkeep.format.region import Ints
from shardkeep.plan.sharing import Offer, Orders, decode_orders, encode_offer
from shardkeep.run.sharing import Exchange
from shardkeep.run.sharing_channel import Channel
from shardkeep.state.overlap import overlaps_itself


class Want(NamedTuple):
    """A box of a stored tensor that a rank wants."""

    what: bytes
    """Equal on all ranks that want the same bytes."""
    target: torch.Tensor
    file: str
    start: int
    """Where in the file it is, about."""
    can_share: bool


class Cut(NamedTuple):
    """The part of a shared want that this rank reads."""

    want: int
    axis: int
    begin: int
    end: int


class Sharing:
    """One rank's part in sharing the reads of a load."""

    def __init__(self, channel: Channel, wants: Sequence[Want], *, budget_nbytes: int) -> None:
        self._channel = channel
        self._budget_nbytes = budget_nbytes
        self._alone_nbytes = sum(want.target.nbytes for want in wants if not want.can_share)
        # Rows of the offer, as positions among the wants.
        self._offered = [row for row, want in enumerate(wants) if want.can_share]
        self._wants = [wants[row] for row in self._offered]
        self._orders: Orders
        self._exchange: Exchange

    def offer(self) -> bytes:
        """Return what rank 0 is told."""
        digests = [blake2b(want.what, digest_size=16).digest() for want in self._wants]
        files = {want.file: _number(want.file) for want in self._wants}
        offer = Offer(
            what=np.frombuffer(b"".join(digests), "<i8").reshape(-1, 2),
            nbytes=np.array([want.target.nbytes for want in self._wants], np.int64),
            rows=np.array([_rows(tuple(want.target.shape))[1] for want in self._wants], np.int64),
            file=np.array([files[want.file] for want in self._wants], np.int64),
            start=np.array([want.start for want in self._wants], np.int64),
        )
        return encode_offer(offer, alone_nbytes=self._alone_nbytes, budget_nbytes=self._budget_nbytes)

    def take(self, orders: bytes) -> tuple[set[int], list[Cut]]:
        """
        Take what rank 0 decided, and all memory that the exchange needs.

        Returns the wants that this rank does not read as they are, and the parts of them that it reads instead.
        """
        self._orders = decode_orders(orders)
        share = self._orders.share
        self._exchange = Exchange(self._channel, self._orders, [want.target for want in self._wants])
        # A rank has at most one slice of a want, which may be sent in several messages.
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
        return {self._offered[row] for row in np.unique(share.want).tolist()}, cuts

    def exchange(self) -> int:
        """Send and receive what is shared; all ranks have read. Return the bytes received."""
        self._exchange.run()
        return self._exchange.bytes_received


def is_plain(tensor: torch.Tensor, stored: torch.dtype) -> bool:
    """Say whether a tensor's memory holds what is stored, byte by byte, and nothing twice."""
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


def apart(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """
    Say of each tensor whether no other one begins or ends in the memory between its first and its last element.

    What is loaded into memory of two tensors may be one or the other, which is no matter for the rank that has them, but
    not for those that it sends one of them to.
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
    """Return the axis along which a box is cut, the first that can be, and its extent."""
    axis = next((axis for axis, n in enumerate(shape) if n > 1), 0)
    return axis, shape[axis] if shape else 1


def _number(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
