"""
State dicts sent from rank to rank over a process group.

What a peer sends is data: it is checked against itself and against what it is received into before any memory is
made or changed, and nothing of it is ever unpickled.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor

from shardkeep.dcp._impl.transport_wire import (
    MalformedMessage,
    _DTensorMeta,
    _prepare_state_dict,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
    bytes_of,
    decode_meta,
    encode_meta,
    is_dense,
    take_apart,
    tensors_of,
)
from shardkeep.engine.stagers import AsyncStager, StateDictStager, dtensor_over
from shardkeep.errors import BrokenProtocol, CheckpointError, RanksDisagree, RanksSilent, StorageError
from shardkeep.format.values import unflatten
from shardkeep.state.leaves import copy_bits
from shardkeep.storage.local import sync_directory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


logger = logging.getLogger("shardkeep")

_LONGEST: Final = 1 << 30
"""The most bytes that the description of a state dict may have."""
_LONGEST_REASON: Final = 4096
_LENGTH, _META, _FIRST_TENSOR = 1, 2, 3  # tags


class PeerRefused(CheckpointError, RuntimeError):
    """A peer has a state that cannot be sent."""


@contextmanager
def _timeit(name: str) -> Iterator[None]:
    """Log how long something took."""
    began = time.perf_counter()
    yield
    logger.info("%s took %.3f s", name, time.perf_counter() - began)


class PGTransport:
    """
    Sends and receives state dicts: tensors, DTensors and ShardedTensors by their local parts, and plain values.

    Args:
        pg: the group; ranks are counted in it.
        timeout: how long a single message may take.
        device: where its backend sends from and receives to.
        state_dict: returns a state into whose tensors what arrives is written, where it fits. Without it new tensors
            are made, on the CPU.

    """

    def __init__(
        self, pg: ProcessGroup, timeout: timedelta, device: torch.device, state_dict: Callable[[], object] | None = None
    ) -> None:
        self._pg = pg
        self._timeout = timeout
        self._device = torch.device(device)
        self._state_dict = state_dict

    def send_checkpoint(self, dst_ranks: list[int], state_dict: object) -> None:
        """
        Send a state to some ranks, each of which calls `recv_checkpoint`. Returns when it has been handed over.

        Raises:
            UnsupportedLeaf: a value that is neither a tensor nor plain data. Nothing of the state has been sent; the
                other ranks are notified, and fail too.
            RanksSilent: a rank did not take it within the timeout.

        """
        try:
            with _timeit("preparing the state dict"):
                meta, tensors = _prepare_state_dict(state_dict, self._device)
                message = encode_meta(meta)
        except Exception as error:
            self._refuse(dst_ranks, error)
            raise
        with _timeit("sending the state dict"):
            self._send_message(dst_ranks, message, sign=1)
            for index, tensor in enumerate(tensors):
                self._send(dst_ranks, tensor, _FIRST_TENSOR + index)

    def recv_checkpoint(self, src_rank: int) -> object:
        """
        Receive the state that a rank sends.

        Returns:
            The state. Its tensors are those of the `state_dict` function where that has one of the same name.

        Raises:
            MalformedMessage: what arrived is no state dict.
            BrokenProtocol: (an AssertionError) a tensor to receive into has another shape or dtype; none has changed.
            PeerRefused: the rank has a state that it cannot send.
            RanksSilent: the rank did not send within the timeout.

        """
        targets = take_apart(self._state_dict())[0] if self._state_dict is not None else {}
        announced = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._recv(src_rank, announced, _LENGTH)
        length = int(announced.item())
        if not 0 < abs(length) <= _LONGEST:
            raise MalformedMessage(f"rank {src_rank} announced a description of {length} bytes")
        message = torch.empty(abs(length), dtype=torch.uint8, device=self._device)
        self._recv(src_rank, message, _META)
        data = message.cpu().numpy().tobytes()
        if length < 0:
            raise PeerRefused(f"rank {src_rank} cannot send its state: {data.decode(errors='replace')}")
        meta = decode_meta(data)
        leaves = dict(zip(meta.paths, meta.non_tensor_leaves, strict=True))
        # All targets are checked before the first tensor is changed.
        memory = {name: _memory_for(name, leaf, targets.get(name)) for name, leaf in leaves.items()}
        tags = itertools.count(_FIRST_TENSOR)
        for name, leaf in leaves.items():
            parts = zip(tensors_of(leaf), memory[name], strict=True)
            tensors = [self._receive_tensor(src_rank, next(tags), part, into) for part, into in parts]
            if isinstance(leaf, _TensorMeta):
                leaves[name] = tensors[0]
            elif isinstance(leaf, _DTensorMeta):
                leaves[name] = dtensor_over(tensors[0], leaf.spec, DTensor)
            elif isinstance(leaf, _ShardedTensorMeta):
                leaves[name] = self._sharded(src_rank, leaf, tensors)
        state = unflatten(meta.treespec, leaves.__getitem__)
        return state[""] if meta.bare else state

    def _receive_tensor(self, src_rank: int, tag: int, meta: _TensorMeta, into: torch.Tensor | None) -> torch.Tensor:
        """Receive a tensor, into memory that fits it if there is any."""
        here = into is not None and into.device.type == self._device.type and into.stride() == meta.stride
        if into is not None and here and is_dense(into.shape, into.stride()):
            self._recv(src_rank, bytes_of(into.detach()), tag)
            return into
        row = torch.empty(meta.nbytes, dtype=torch.uint8, device=self._device)
        self._recv(src_rank, row, tag)
        made = row.view(meta.dtype).as_strided(meta.shape, meta.stride)
        if into is None:
            return made.cpu()
        with torch.no_grad():
            copy_bits(into, made)
        return into

    def _sharded(self, them: int, leaf: _ShardedTensorMeta, tensors: list[torch.Tensor]) -> object:
        """Build a ShardedTensor in which this rank takes the place of the sender."""
        me = int(self._pg.rank())
        metadata = copy.deepcopy(leaf.sharded_tensor_metadata)
        device = tensors[0].device.type if tensors else "cpu"
        for shard in metadata.shards_metadata:
            owner = None if shard.placement is None else shard.placement.rank()
            placed = me if owner == them else them if owner == me else owner
            shard.placement = ShardMetadata([], [], f"rank:{placed}/{device}").placement
        shards = []
        for tensor, each in zip(tensors, leaf.local_shards_shard_metadata, strict=True):
            place = f"rank:{me}/{tensor.device.type}"
            shards.append(Shard(tensor, ShardMetadata(each.shard_offsets, each.shard_sizes, place)))
        try:
            return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, process_group=self._pg)
        except (ValueError, RuntimeError) as error:
            raise MalformedMessage(f"rank {them} sent a malformed ShardedTensor: {error!s:.200}") from error

    def _send_message(self, ranks: list[int], message: bytes, *, sign: int) -> None:
        """Send a message after its length; a negative length announces the reason why there is no state."""
        self._send(ranks, torch.tensor([sign * len(message)], dtype=torch.int64, device="cpu"), _LENGTH)
        self._send(ranks, torch.frombuffer(bytearray(message), dtype=torch.uint8), _META)

    def _refuse(self, ranks: list[int], error: Exception) -> None:
        """Notify the receivers that there is no state; otherwise they would wait for the group's timeout."""
        reason = (str(error).strip() or type(error).__name__).encode()[:_LONGEST_REASON]
        try:
            self._send_message(ranks, reason, sign=-1)
        except RanksSilent as silent:
            logger.warning("the receivers could not be notified that a state cannot be sent: %s", silent)

    def _send(self, ranks: list[int], tensor: torch.Tensor, tag: int) -> None:
        if tensor.numel():
            there = tensor.to(self._device)
            works = [(rank, self._pg.send([there], rank, tag)) for rank in ranks]
            for rank, work in works:
                self._wait(work, f"rank {rank} did not take message {tag} of a state dict", rank)

    def _recv(self, rank: int, tensor: torch.Tensor, tag: int) -> None:
        if tensor.numel():
            work = self._pg.recv([tensor], rank, tag)
            self._wait(work, f"rank {rank} did not send message {tag} of a state dict", rank)

    def _wait(self, work: Work, what: str, rank: int) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:  # backends raise it also for a lost peer
            raise RanksSilent(f"{what} within {self._timeout}: {error!s:.200}", ranks=[rank]) from error


def _memory_for(name: str, leaf: object, target: Any) -> list[torch.Tensor | None]:
    """Return the tensors that a leaf is received into; None for those to be allocated."""
    metas = tensors_of(leaf)
    if isinstance(leaf, _ShardedTensorMeta):
        boxes = [(list(each.shard_offsets), list(each.shard_sizes)) for each in leaf.local_shards_shard_metadata]
        shards = target.local_shards() if isinstance(target, ShardedTensor) else []
        if boxes != [(list(s.metadata.shard_offsets), list(s.metadata.shard_sizes)) for s in shards]:
            return [None] * len(metas)
        return [_fitting(name, meta, shard.tensor) for meta, shard in zip(metas, shards, strict=True)]
    if isinstance(target, DTensor):
        target = target._local_tensor
    if not isinstance(target, torch.Tensor) or isinstance(target, ShardedTensor):
        return [None] * len(metas)
    return [_fitting(name, meta, target) for meta in metas]


def _fitting(name: str, meta: _TensorMeta, target: torch.Tensor) -> torch.Tensor:
    if target.shape != meta.shape or target.dtype != meta.dtype or target.is_meta:
        raise BrokenProtocol(
            f"{name!r} arrives as {meta.dtype} of size {tuple(meta.shape)}, and would be received into a tensor of "
            f"{target.dtype} of size {tuple(target.shape)} on {target.device}",
            hint="the state to receive into must have the shapes and dtypes of the sender's",
            key=name,
        )
    return target


# -- replication -------------------------------------------------------------------------------------------------------


class _ReplicationStager(AsyncStager):
    """
    Sends this rank's state to its partner, half the group away, and returns the partner's, which is kept in a file.

    A rank alone gets a copy of its own state.

    Args:
        pg: the ranks; an even number of them, or one.
        timeout: how long a message between partners may take.
        device: where the group's backend sends from and receives to.
        storage_dir: where the partner's state is kept; a new temporary folder by default.

    """

    _synchronize_after_execute: bool = False

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta = timedelta(minutes=30),
        device: torch.device = torch.device("cpu"),  # noqa: B008 - torch's default; a device never changes
        storage_dir: str | None = None,
    ) -> None:
        self._pg = pg
        self._timeout = timeout
        self._device = device
        self._transport = PGTransport(pg, timeout, device, None)
        self._storage_dir = tempfile.mkdtemp(prefix="replication_stager_") if storage_dir is None else storage_dir
        os.makedirs(self._storage_dir, exist_ok=True)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """
        Exchange states with the partner, and return the one that came.

        Raises:
            RanksDisagree: the group has an odd number of ranks, so that not all have a partner.
            RanksSilent: the partner did not answer in time.
            StorageError: the state that came could not be stored.

        """
        size, me = self._pg.size(), self._pg.rank()
        if size == 1:
            staged: dict[str, Any] = StateDictStager().stage(state_dict)
            return staged
        if size % 2:
            raise RanksDisagree(f"{size} ranks cannot be paired", hint="use a group with an even number of ranks")
        partner = (me + size // 2) % size
        # One of the two sends first; otherwise both would wait for the other to receive.
        if me < partner:
            self._transport.send_checkpoint([partner], state_dict)
        received: Any = self._transport.recv_checkpoint(partner)
        if me > partner:
            self._transport.send_checkpoint([partner], state_dict)
        self._persist_state_dict(received, me, partner)
        replica: dict[str, Any] = received
        return replica

    def _persist_state_dict(self, state_dict: dict[str, Any], current_rank: int, partner_rank: int) -> None:
        """Replace the stored state of the partner, in one step."""
        final = Path(self._get_persisted_path(current_rank, partner_rank))
        temporary = final.with_name(f"{final.name}.{os.getpid()}.tmp")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(final)
            sync_directory(str(final.parent))
        except Exception as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise _NotKept(f"rank {current_rank} could not store the state of rank {partner_rank}: {error}") from error

    def _get_persisted_path(self, current_rank: int, partner_rank: int) -> str:
        """Return the file that the partner's state is kept in."""
        return os.path.join(self._storage_dir, f"rank_{current_rank}_replica_partner_{partner_rank}.pt")

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` is synchronous."""

    def close(self) -> None:
        """Do nothing: the files stay, so that they can be found later."""


class _NotKept(StorageError, RuntimeError):
    """The partner's state could not be stored."""
