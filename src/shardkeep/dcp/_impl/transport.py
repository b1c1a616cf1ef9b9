"""
State dicts sent from rank to rank over a process group.

The description of a state is pickled, as in torch: ranks of one job trust each other. It is compared with what it is received
into before any memory is made or changed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import shard as shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree

from shardkeep.display import format_seconds
from shardkeep.engine.stagers import AsyncStager, StateDictStager, dtensor_over
from shardkeep.errors import BrokenProtocol, CheckpointError, RanksDisagree, RanksSilent, StorageError, UnsupportedLeaf
from shardkeep.state.leaves import copy_bits, is_dtensor, is_sharded_tensor
from shardkeep.state.offload import local_tensors
from shardkeep.storage.local import sync_directory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# The elements of tensors are sent in row-major order. The dataclasses have torch's names and fields.


@dataclass
class _TensorMeta:
    """A tensor whose bytes follow."""

    shape: torch.Size
    dtype: torch.dtype
    storage_offset: int
    """Always 0: only the tensor's own bytes are sent."""
    stride: tuple[int, ...]
    nbytes: int


@dataclass
class _DTensorMeta:
    """The local part of a DTensor, and the placement of the whole."""

    local: _TensorMeta
    spec: DTensorSpec


@dataclass
class _ShardedTensorMeta:
    """The local shards of a ShardedTensor, and where all of them are."""

    local_shards_meta: list[_TensorMeta]
    local_shards_shard_metadata: list[ShardMetadata]
    sharded_tensor_metadata: ShardedTensorMetadata


@dataclass
class _StateDictMeta:
    """A state dict without the bytes of its tensors."""

    treespec: pytree.TreeSpec
    paths: list[pytree.KeyPath]
    non_tensor_leaves: list[object | _TensorMeta | _DTensorMeta | _ShardedTensorMeta]


def tensors_of(leaf: object) -> list[_TensorMeta]:
    if isinstance(leaf, _ShardedTensorMeta):
        return leaf.local_shards_meta
    if isinstance(leaf, _DTensorMeta):
        return [leaf.local]
    return [leaf] if isinstance(leaf, _TensorMeta) else []


def _prepare_state_dict(state_dict: object, device: torch.device) -> tuple[_StateDictMeta, list[torch.Tensor]]:
    """Describe a state dict, and return the bytes of its tensors in the order in which they are described."""
    del device
    found, tree = pytree.tree_flatten_with_path(state_dict)
    described: list[object] = []
    tensors: list[torch.Tensor] = []
    for path, leaf in found:
        meta, parts = _describe(pytree.keystr(path), leaf)
        described.append(meta)
        tensors += parts
    return _StateDictMeta(tree, [path for path, _ in found], described), tensors


def _describe(name: str, leaf: Any) -> tuple[object, list[torch.Tensor]]:
    if not isinstance(leaf, torch.Tensor):
        return leaf, []
    tensor: Any = leaf
    prepared = [_prepare_tensor(part, name) for part in local_tensors(tensor)]
    parts, metas = [part for part, _ in prepared], [meta for _, meta in prepared]
    if is_sharded_tensor(leaf):
        return _ShardedTensorMeta(metas, [shard.metadata for shard in tensor.local_shards()], tensor.metadata()), parts
    return (_DTensorMeta(metas[0], tensor._spec) if is_dtensor(leaf) else metas[0]), parts


def _prepare_tensor(tensor: torch.Tensor, name: str = "a tensor") -> tuple[torch.Tensor, _TensorMeta]:
    """Return a tensor's bytes as a 1-d tensor on its own device, and their description."""
    if not (type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)) or tensor.is_meta:
        what = "a tensor on the meta device" if tensor.is_meta else f"a {type(tensor).__qualname__}"
        raise UnsupportedLeaf(f"{name} is {what}, which cannot be sent", hint="send plain tensors")
    if tensor.layout is not torch.strided:
        raise UnsupportedLeaf(f"{name} is of layout {tensor.layout}, which cannot be sent", hint="send it dense")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes_of(plain), _TensorMeta(plain.shape, plain.dtype, 0, plain.stride(), plain.nbytes)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View the whole storage of a plain tensor as elements of a dtype."""
    if type(tensor) is not torch.Tensor:
        raise BrokenProtocol(f"only plain tensors have one storage, not a {type(tensor).__qualname__}")
    storage = tensor.untyped_storage()
    row = torch.empty(0, dtype=dtype, device=tensor.device)
    return row.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


class MalformedMessage(CheckpointError, ValueError):
    """A peer sent a malformed state dict."""


def _pickled(meta: _StateDictMeta) -> bytes:
    try:
        return pickle.dumps(meta)
    except Exception as error:
        for path, leaf in zip(meta.paths, meta.non_tensor_leaves, strict=True):
            try:
                pickle.dumps(leaf)
            except Exception:  # noqa: BLE001 - of any class
                what = f"{pytree.keystr(path)} is a {type(leaf).__qualname__}, which cannot be sent: {error}"
                raise UnsupportedLeaf(what, hint="take it out of the state") from error
        raise


logger = logging.getLogger("shardkeep")

_LONGEST_REASON: Final = 4096
_LENGTH, _META, _FIRST_TENSOR = 1, 2, 3  # tags


class PeerRefused(CheckpointError, RuntimeError):
    """A peer has a state that cannot be sent."""


@contextmanager
def _timeit(name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    logger.info("%s took %s", name, format_seconds(time.perf_counter() - began))


class PGTransport:
    """
    Sends and receives state dicts: tensors, DTensors and ShardedTensors by their local parts, and plain values.

    `timeout` is how long a single message may take, and `device` where the group's backend sends from and receives to.
    What arrives is written into the tensors of the state that `state_dict` returns, where it fits, else into new ones on
    the CPU.
    """

    def __init__(
        self, pg: ProcessGroup, timeout: timedelta, device: torch.device, state_dict: Callable[[], object] | None = None
    ) -> None:
        self._pg = pg
        self._timeout = timeout
        self._device = torch.device(device)
        self._state_dict = state_dict

    def send_checkpoint(self, dst_ranks: list[int], state_dict: object) -> None:
        """Send a state to ranks that call `recv_checkpoint`; if it cannot be pickled, they fail as well."""
        try:
            with _timeit("preparing the state dict"):
                meta, tensors = _prepare_state_dict(state_dict, self._device)
                message = _pickled(meta)
        except Exception as error:
            # Notify the receivers that there is no state; otherwise they would wait for the group's timeout.
            reason = (str(error).strip() or type(error).__name__).encode()[:_LONGEST_REASON]
            try:
                self._send_message(dst_ranks, reason, sign=-1)
            except RanksSilent as silent:
                logger.warning("the receivers could not be notified that a state cannot be sent: %s", silent)
            raise
        with _timeit("sending the state dict"):
            self._send_message(dst_ranks, message, sign=1)
            for index, tensor in enumerate(tensors):
                self._send(dst_ranks, tensor, _FIRST_TENSOR + index)

    def recv_checkpoint(self, src_rank: int) -> object:
        """Receive a state into tensors of the same names; `BrokenProtocol` if one does not fit, then none changed."""
        targets = dict(pytree.tree_flatten_with_path(self._state_dict())[0]) if self._state_dict is not None else {}
        announced = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._recv(src_rank, announced, _LENGTH)
        length = int(announced.item())
        message = torch.empty(abs(length), dtype=torch.uint8, device=self._device)
        self._recv(src_rank, message, _META)
        data = message.cpu().numpy().tobytes()
        if length < 0:
            raise PeerRefused(f"rank {src_rank} cannot send its state: {data.decode(errors='replace')}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's own specs of trees name a deprecated class
                meta: _StateDictMeta = pickle.loads(data)
        except Exception as error:
            raise MalformedMessage(f"rank {src_rank} sent a state dict that cannot be unpickled: {error}") from error
        leaves: dict[pytree.KeyPath, Any] = dict(zip(meta.paths, meta.non_tensor_leaves, strict=True))
        # All targets are checked before the first tensor is changed.
        memory = {path: _memory_for(path, leaf, targets.get(path)) for path, leaf in leaves.items()}
        tags = itertools.count(_FIRST_TENSOR)
        for path, leaf in leaves.items():
            parts = zip(tensors_of(leaf), memory[path], strict=True)
            tensors = [self._receive_tensor(src_rank, next(tags), part, into) for part, into in parts]
            if isinstance(leaf, _TensorMeta):
                leaves[path] = tensors[0]
            elif isinstance(leaf, _DTensorMeta):
                leaves[path] = dtensor_over(tensors[0], leaf.spec, DTensor)
            elif isinstance(leaf, _ShardedTensorMeta):
                leaves[path] = self._sharded(src_rank, leaf, tensors)
        return pytree.tree_unflatten(list(leaves.values()), meta.treespec)

    def _receive_tensor(self, src_rank: int, tag: int, meta: _TensorMeta, into: torch.Tensor | None) -> torch.Tensor:
        """Receive a tensor, into memory that fits it if there is any."""
        if into is not None and into.device.type == self._device.type and into.is_contiguous():
            self._recv(src_rank, bytes_of(into.detach()), tag)
            return into
        row = torch.empty(meta.nbytes, dtype=torch.uint8, device=self._device)
        self._recv(src_rank, row, tag)
        made = row.view(meta.dtype).view(meta.shape)
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
        shards_here = []
        for tensor, each in zip(tensors, leaf.local_shards_shard_metadata, strict=True):
            place = f"rank:{me}/{tensor.device.type}"
            shards_here.append(shards.Shard(tensor, ShardMetadata(each.shard_offsets, each.shard_sizes, place)))
        try:
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                shards_here, metadata, process_group=self._pg
            )
        except (ValueError, RuntimeError) as error:
            raise MalformedMessage(f"rank {them} sent a malformed ShardedTensor: {error!s:.200}") from error

    def _send_message(self, ranks: list[int], message: bytes, *, sign: int) -> None:
        """Send a message after its length; a negative length announces the reason why there is no state."""
        self._send(ranks, torch.tensor([sign * len(message)], dtype=torch.int64, device="cpu"), _LENGTH)
        self._send(ranks, torch.frombuffer(bytearray(message), dtype=torch.uint8), _META)

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


def _memory_for(path: pytree.KeyPath, leaf: object, target: Any) -> list[torch.Tensor | None]:
    """Return the tensors that a leaf is received into; None for those to be allocated."""
    metas = tensors_of(leaf)
    here = [shard.metadata for shard in target.local_shards()] if isinstance(target, ShardedTensor) else None
    there = leaf.local_shards_shard_metadata if isinstance(leaf, _ShardedTensorMeta) else None
    if not metas or not isinstance(target, torch.Tensor) or _boxes(here) != _boxes(there):
        return [None] * len(metas)
    return [_fitting(path, meta, each) for meta, each in zip(metas, local_tensors(target), strict=True)]


def _boxes(shards: list[ShardMetadata] | None) -> list[Any] | None:
    return shards and [(list(each.shard_offsets), list(each.shard_sizes)) for each in shards]


def _fitting(path: pytree.KeyPath, meta: _TensorMeta, target: torch.Tensor) -> torch.Tensor:
    if target.shape != meta.shape or target.dtype != meta.dtype or target.is_meta:
        raise BrokenProtocol(
            f"{pytree.keystr(path)} arrives as {meta.dtype} of size {tuple(meta.shape)}, and would be received into a tensor of "
            f"{target.dtype} of size {tuple(target.shape)} on {target.device}",
            hint="the state to receive into must have the shapes and dtypes of the sender's",
        )
    return target


class _ReplicationStager(AsyncStager):
    """Exchanges states with the partner, half the group away, whose state stays in a file; alone, copies its own."""

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
        return os.path.join(self._storage_dir, f"rank_{current_rank}_replica_partner_{partner_rank}.pt")

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` is synchronous."""


class _NotKept(StorageError, RuntimeError):
    """The partner's state could not be stored."""
