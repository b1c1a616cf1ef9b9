"""
State dicts sent from rank to rank over a process group.

What a peer sends is data: a description in msgpack, never pickle, that can name only types and layouts that we know. It is
checked against itself and against what it is received into before any memory is made or changed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import os
import re
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import shard as shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from shardkeep.engine.stagers import AsyncStager, StateDictStager, dtensor_over
from shardkeep.engine.tensors import extent
from shardkeep.errors import BrokenProtocol, CheckpointError, RanksDisagree, RanksSilent, StorageError, UnsupportedLeaf
from shardkeep.format.dtypes import by_name, of_torch, to_torch
from shardkeep.format.values import (
    Container,
    decode_tree,
    decode_value,
    encode_tree,
    encode_value,
    leaf_keys,
    unflatten,
)
from shardkeep.state.flatten import flatten
from shardkeep.state.leaves import TreePath, copy_bits, is_dtensor, is_sharded_tensor, path_name, wait_tensor
from shardkeep.storage.local import sync_directory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# -- the description of a state dict -----------------------------------------------------------------------------------
#
# The bytes of dense tensors are sent as they lie in memory, those of other tensors in row-major order. The dataclasses have
# torch's names and fields; `paths` are flat names, and `treespec` is our skeleton.

_CONTAINERS: Final = (dict, OrderedDict, list, tuple, torch.Size)


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

    treespec: Container
    paths: list[str]
    """The flat name of each leaf."""
    non_tensor_leaves: list[object | _TensorMeta | _DTensorMeta | _ShardedTensorMeta]
    bare: bool = False
    """The object is not a mapping: it is the only value of the skeleton."""


def tensors_of(leaf: object) -> list[_TensorMeta]:
    """Return the tensors whose bytes are sent for a leaf."""
    if isinstance(leaf, _ShardedTensorMeta):
        return leaf.local_shards_meta
    if isinstance(leaf, _DTensorMeta):
        return [leaf.local]
    return [leaf] if isinstance(leaf, _TensorMeta) else []


def take_apart(state: object) -> tuple[dict[str, Any], Container, bool]:
    """Return the leaves of a state by flat name, its skeleton, and whether it is not a mapping."""
    bare = not isinstance(state, Mapping)
    mapping: Any = {"": state} if bare else state
    leaves, tree = flatten(mapping, rank=0, is_tensor=lambda value: isinstance(value, torch.Tensor))
    return leaves, tree, bare


def _prepare_state_dict(state_dict: object, device: torch.device) -> tuple[_StateDictMeta, list[torch.Tensor]]:
    """
    Describe a state dict, and return the bytes of its tensors in the order in which they are described.

    `UnsupportedLeaf` names a value that is neither a tensor nor plain data, or a container of a class that is not sent.
    """
    del device
    _refuse_other_kinds(state_dict)
    leaves, tree, bare = take_apart(state_dict)
    described: list[object] = []
    tensors: list[torch.Tensor] = []
    for name, leaf in leaves.items():
        meta, parts = _describe(name, leaf)
        described.append(meta)
        tensors += parts
    return _StateDictMeta(tree, list(leaves), described, bare), tensors


def _refuse_other_kinds(value: object, path: TreePath = (), above: frozenset[int] = frozenset()) -> None:
    """Refuse containers of other classes, because classes are code and are not sent."""
    if isinstance(value, torch.Tensor) or not isinstance(value, (Mapping, list, tuple)) or id(value) in above:
        return  # a container that contains itself is refused when it is flattened
    if type(value) not in _CONTAINERS:
        raise UnsupportedLeaf(
            f"{path_name(path)!r} is a {type(value).__qualname__}, which would arrive as another container",
            hint="make it a dict, an OrderedDict, a list or a tuple",
            key=path_name(path),
        )
    for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
        _refuse_other_kinds(child, (*path, key), above | {id(value)})


def _describe(name: str, leaf: Any) -> tuple[object, list[torch.Tensor]]:
    if not isinstance(leaf, torch.Tensor):
        encode_value(leaf, key=name)  # raises before anything has been sent
        return leaf, []
    leaf = wait_tensor(leaf)
    if is_dtensor(leaf):
        data, meta = _prepare_tensor(leaf._local_tensor, name)
        return _DTensorMeta(meta, leaf._spec), [data]
    if is_sharded_tensor(leaf):
        shards = leaf.local_shards()
        pairs = [_prepare_tensor(shard.tensor, name) for shard in shards]
        described = _ShardedTensorMeta([meta for _, meta in pairs], [s.metadata for s in shards], leaf.metadata())
        return described, [data for data, _ in pairs]
    data, meta = _prepare_tensor(leaf, name)
    return meta, [data]


def _prepare_tensor(tensor: torch.Tensor, name: str = "a tensor") -> tuple[torch.Tensor, _TensorMeta]:
    """Return a tensor's bytes as a 1-d tensor on its own device, and their description."""
    if not (type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)) or tensor.is_meta:
        what = "a tensor on the meta device" if tensor.is_meta else f"a {type(tensor).__qualname__}"
        raise UnsupportedLeaf(f"{name!r} is {what}, which cannot be sent", hint="send plain tensors")
    of_torch(tensor.dtype)
    if tensor.layout is not torch.strided:
        raise UnsupportedLeaf(f"{name!r} is of layout {tensor.layout}, which cannot be sent", hint="send it dense")
    plain = tensor.detach().resolve_conj().resolve_neg()
    dense = plain if is_dense(plain.shape, plain.stride()) else plain.contiguous()
    return bytes_of(dense), _TensorMeta(dense.shape, dense.dtype, 0, dense.stride(), dense.nbytes)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor's elements fill one contiguous range of memory, in any order, without overlaps."""
    expected = 1
    for step, n in sorted(zip(stride, shape, strict=True)):
        if n != 1 and step != expected:
            return math.prod(shape) == 0
        expected *= n
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a dense tensor as bytes."""
    row = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if tensor.numel() == 0:
        return row
    start, stop = extent(tensor)
    return row.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View the whole storage of a plain tensor as elements of a dtype."""
    if type(tensor) is not torch.Tensor:
        raise BrokenProtocol(f"only plain tensors have one storage, not a {type(tensor).__qualname__}")
    storage = tensor.untyped_storage()
    row = torch.empty(0, dtype=dtype, device=tensor.device)
    return row.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


_PLACE: Final = re.compile(r"rank:\d{1,9}/[a-z]{1,16}(:\d{1,4})?")
Ints = tuple[int, ...]


class MalformedMessage(CheckpointError, ValueError):
    """A peer sent a malformed state dict."""


class _Tensor(msgspec.Struct, frozen=True):
    shape: Ints
    dtype: str
    stride: Ints


class _Mesh(msgspec.Struct, frozen=True):
    """The mesh of a DTensor, and how it is placed there."""

    device: str
    ranks: Ints
    shape: Ints
    names: tuple[str, ...] | None
    placements: list[tuple[str, int | str, int]]
    owner: int
    """The rank whose part this is; -1 if the sender was not in the mesh."""


_Box = tuple[Ints, Ints, str]
"""Offsets, size and place of a shard."""


class _Leaf(msgspec.Struct, frozen=True, omit_defaults=True):
    """A plain value, or tensors whose bytes follow, and what they are parts of."""

    value: bytes = b""
    parts: list[_Tensor] = []
    whole: _Tensor | None = None
    mesh: _Mesh | None = None
    """Of a DTensor."""
    boxes: list[_Box] = []
    """One for each part of a ShardedTensor."""
    layout: list[_Box] = []
    """The boxes of all shards of all ranks."""


class _Message(msgspec.Struct, frozen=True):
    tree: bytes
    leaves: list[_Leaf]
    bare: bool


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Message).decode


def encode_meta(meta: _StateDictMeta) -> bytes:
    """Encode the description of a state dict; UnsupportedLeaf, with the key, for values without a safe encoding."""
    leaves = [_written(name, leaf) for name, leaf in zip(meta.paths, meta.non_tensor_leaves, strict=True)]
    return _encode(_Message(encode_tree(meta.treespec), leaves, meta.bare))


def decode_meta(data: bytes) -> _StateDictMeta:
    """Decode and check the description of a state dict; `CheckpointError` if it is none, or a value is malformed."""
    try:
        message = _decode(data)
        tree = decode_tree(message.tree)
        names = list(leaf_keys(tree))
        if tree is None or len(names) != len(message.leaves):
            raise ValueError(f"{len(names)} names for {len(message.leaves)} values")
        leaves = [_read(name, leaf) for name, leaf in zip(names, message.leaves, strict=True)]
    except CheckpointError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, RuntimeError, OverflowError, AssertionError) as error:
        raise MalformedMessage(f"a peer sent a malformed state dict: {error!s:.200}") from error
    return _StateDictMeta(tree, names, leaves, message.bare)


# Encoding


def _written(name: str, leaf: object) -> _Leaf:
    parts = [_tensor(part) for part in tensors_of(leaf)]
    if isinstance(leaf, _DTensorMeta):
        return _dtensor(name, leaf, parts)
    if isinstance(leaf, _ShardedTensorMeta):
        whole = leaf.sharded_tensor_metadata
        size = tuple(whole.size)
        return _Leaf(
            parts=parts,
            boxes=[_box(shard) for shard in leaf.local_shards_shard_metadata],
            whole=_Tensor(
                size, of_torch(whole.tensor_properties.dtype).name, torch.empty(size, device="meta").stride()
            ),
            layout=[_box(shard) for shard in whole.shards_metadata],
        )
    return _Leaf(parts=parts) if parts else _Leaf(encode_value(leaf, key=name))


def _tensor(meta: _TensorMeta | TensorMeta) -> _Tensor:
    return _Tensor(tuple(meta.shape), of_torch(meta.dtype).name, tuple(meta.stride))


def _dtensor(name: str, leaf: _DTensorMeta, parts: list[_Tensor]) -> _Leaf:
    spec, mesh = leaf.spec, leaf.spec.mesh
    meta = spec.tensor_meta
    usual = DTensorSpec(mesh, spec.placements, meta)
    if meta is None or getattr(spec, "shard_order", None) != getattr(usual, "shard_order", None):
        raise UnsupportedLeaf(f"{name!r} is a DTensor that is cut in an unusual order, which cannot be sent")
    here = mesh.get_coordinate()
    described = _Mesh(
        device=mesh.device_type,
        ranks=tuple(mesh.mesh.flatten().tolist()),
        shape=tuple(mesh.mesh.shape),
        names=None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names),
        placements=[_placement(name, each) for each in spec.placements],
        owner=-1 if here is None else int(mesh.mesh[tuple(here)]),
    )
    return _Leaf(parts=parts, whole=_tensor(meta), mesh=described)


def _placement(name: str, placement: Any) -> tuple[str, int | str, int]:
    kind = type(placement)
    if kind is Shard:
        return "shard", placement.dim, 0
    if kind is Replicate:
        return "replicate", 0, 0
    if kind is _StridedShard:
        return "strided", placement.dim, placement.split_factor
    if kind is Partial and isinstance(placement.reduce_op, str):
        return "partial", placement.reduce_op, 0
    raise UnsupportedLeaf(f"{name!r} is a DTensor placed as {placement!r}, which cannot be sent")


def _box(shard: ShardMetadata) -> _Box:
    return tuple(shard.shard_offsets), tuple(shard.shard_sizes), str(shard.placement)


# Decoding


def _read(name: str, leaf: _Leaf) -> object:
    parts = [_checked(name, part) for part in leaf.parts]
    if leaf.boxes or leaf.layout:
        whole = _checked(name, leaf.whole or _Tensor((), "", ()))
        fitting = [
            part.shape == box[1] and part.dtype == whole.dtype for part, box in zip(parts, leaf.boxes, strict=True)
        ]
        if not all(fitting):
            raise ValueError(f"{name!r} has a shard of another size or type than its place")
        shards = [_shard(name, box) for box in leaf.layout]
        metadata = ShardedTensorMetadata(shards, whole.shape, TensorProperties(dtype=whole.dtype))
        return _ShardedTensorMeta(parts, [_shard(name, box) for box in leaf.boxes], metadata)
    if not parts:
        return decode_value(leaf.value, key=name)
    [part] = parts
    return part if leaf.mesh is None or leaf.whole is None else _DTensorMeta(part, _spec(name, leaf.whole, leaf.mesh))


def _checked(name: str, tensor: _Tensor) -> _TensorMeta:
    if len(tensor.shape) != len(tensor.stride) or len(tensor.shape) > 64 or min(tensor.shape, default=0) < 0:
        raise ValueError(f"{name!r} has no shape: {tensor.shape} by {tensor.stride}")
    dtype = to_torch(by_name(tensor.dtype))
    nbytes = math.prod(tensor.shape) * dtype.itemsize
    if nbytes >= 1 << 62:
        raise ValueError(f"{name!r} would have {nbytes} bytes")
    if not is_dense(tensor.shape, tensor.stride):
        raise ValueError(f"{name!r} does not fill its memory: {tensor.shape} by {tensor.stride}")
    if not nbytes and tensor.stride and not 0 <= min(tensor.stride) <= max(tensor.stride) < 1 << 62:
        raise ValueError(f"{name!r} has strides {tensor.stride}")
    return _TensorMeta(torch.Size(tensor.shape), dtype, 0, tensor.stride, nbytes)


def _spec(name: str, whole: _Tensor, of: _Mesh) -> DTensorSpec:
    if not of.ranks or math.prod(of.shape) != len(of.ranks) or len(of.placements) != len(of.shape):
        raise ValueError(f"{name!r} is on no mesh")
    if len(whole.shape) != len(whole.stride) or min((*whole.shape, *whole.stride), default=0) < 0:
        raise ValueError(f"{name!r} has no shape: {whole.shape} by {whole.stride}")
    mesh = DeviceMesh(
        of.device,
        torch.tensor(of.ranks, dtype=torch.int64, device="cpu").reshape(of.shape),
        mesh_dim_names=of.names,
        _init_backend=False,  # the mesh only describes placements; it is never used to communicate
        _rank=of.owner if of.owner in of.ranks else None,
    )
    placements = tuple(_placed(name, each, len(whole.shape)) for each in of.placements)
    meta = TensorMeta(torch.Size(whole.shape), whole.stride, to_torch(by_name(whole.dtype)))
    return DTensorSpec(mesh, placements, meta)


def _placed(name: str, placement: tuple[str, int | str, int], ndim: int) -> Any:
    kind, detail, factor = placement
    if kind == "replicate":
        return Replicate()
    if kind == "partial" and detail in ("sum", "avg", "min", "max", "product", "band", "bor", "bxor"):
        return Partial(str(detail))
    if kind in ("shard", "strided") and isinstance(detail, int) and 0 <= detail < ndim:
        return Shard(detail) if kind == "shard" else _StridedShard(detail, split_factor=factor)
    raise ValueError(f"{name!r} is placed as {placement}")


def _shard(name: str, box: _Box) -> ShardMetadata:
    offsets, sizes, place = box
    if len(offsets) != len(sizes) or min((*offsets, *sizes), default=0) < 0 or not _PLACE.fullmatch(place):
        raise ValueError(f"{name!r} has a shard at {box}")
    return ShardMetadata(shard_offsets=list(offsets), shard_sizes=list(sizes), placement=place)


# -- sending and receiving -----------------------------------------------------------------------------------------------

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
        """
        Send a state to some ranks, each of which calls `recv_checkpoint`. Returns when it has been handed over.

        A value that is neither a tensor nor plain data is an `UnsupportedLeaf` before anything is sent; the other ranks are
        notified, and fail too.
        """
        try:
            with _timeit("preparing the state dict"):
                meta, tensors = _prepare_state_dict(state_dict, self._device)
                message = encode_meta(meta)
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
        """
        Receive the state that a rank sends, into the tensors of the `state_dict` function that have the same names.

        If one of them has another shape or dtype, `BrokenProtocol` (an AssertionError) is raised before any has changed.
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
        """Exchange states with the partner, and return the one that came."""
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
