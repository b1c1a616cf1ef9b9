"""
Leaves of a state: every tensor-like leaf is described as the same plain value.

A torch tensor of any kind, a DTensor, a ShardedTensor, a `ShardedBox` or a numpy array is reduced to its dtype, its global
shape, and the pieces that this rank holds, each a plain strided tensor over the leaf's own memory. Nothing is communicated,
and only what has no plain view (conjugates, reversed arrays) is copied. A leaf without a plain form is refused by name.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch

from shardkeep.errors import InvalidShards, UnsupportedLeaf
from shardkeep.format.boxes import Box, Ints, slices, strides_of, within
from shardkeep.format.dtypes import known_to_torch, of_numpy, of_torch
from shardkeep.state.placement import dtensor_boxes


class PerRank:
    """
    State that belongs to one rank, such as RNG or data loader position; every rank's value is stored.

    `value` may be anything that a state may hold, dicts and tensors included. Loading replaces `value` by what the same
    rank number saved. A plain value may be None before; a dict, or a list of tensors, needs the same nesting as saved.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class EveryRank(PerRank):
    """The values of all ranks, for an object that loads all of them."""

    __slots__ = ("values",)

    def __init__(self, values: dict[int, Any]) -> None:
        super().__init__(None)
        self.values = values


class ShardedBox:
    """
    The local pieces, each with its offsets, of a tensor that another framework shards.

    ``ShardedBox(local, offsets=(4, 0), shape=(8, 16))`` is one piece; `ShardedBox.of` takes any number of pieces,
    or none. Pieces of all ranks together must tile `shape` exactly; equal pieces on several ranks are replicas.
    """

    __slots__ = ("dtype", "pieces", "shape")

    def __init__(self, local: torch.Tensor, *, offsets: Sequence[int], shape: Sequence[int]) -> None:
        if not isinstance(local, torch.Tensor):
            raise InvalidShards(f"ShardedBox: local is a {type(local).__qualname__}, expected a torch.Tensor")
        self.pieces: tuple[tuple[torch.Tensor, tuple[int, ...]], ...] = ((local, _ints("offsets", offsets)),)
        self.shape = _ints("shape", shape)
        self.dtype = local.dtype

    @classmethod
    def of(
        cls, pieces: Iterable[tuple[torch.Tensor, Sequence[int]]], *, shape: Sequence[int], dtype: torch.dtype
    ) -> ShardedBox:
        """Build from any number of `(tensor, offsets)`, which share one dtype."""
        box = cls.__new__(cls)
        box.pieces = tuple((tensor, _ints("offsets", offsets)) for tensor, offsets in pieces)
        box.shape = _ints("shape", shape)
        box.dtype = dtype
        return box

    def __repr__(self) -> str:
        where = ", ".join(f"{tuple(t.shape)} at {o}" for t, o in self.pieces)
        return f"ShardedBox(shape={self.shape}, dtype={self.dtype}, pieces=[{where}])"


def _ints(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError as exc:
        raise InvalidShards(f"ShardedBox: {name}={values!r}, expected an integer for each dimension") from exc


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if elements of a tensor may share memory: the step of an axis is within the reach of smaller ones."""
    reach = 0
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if step <= reach:
                return True
            reach += step * (n - 1)
    return False


def synchronize_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until all work queued on the accelerators that hold these tensors is done."""
    # Streams belong to threads, so a copy made by a worker thread is not ordered with what the caller queues. If all tensors
    # are in host memory, no accelerator is touched, because torch refuses CUDA to processes forked after that.
    kind = torch.accelerator.current_accelerator()  # of this build of torch, even if no device is present
    for device in {tensor.device for tensor in tensors}:
        if kind is not None and device.type == kind.type:
            torch.accelerator.synchronize(device)


TreePath = tuple[Any, ...]
"""Keys and indices that lead from the root of a tree to one of its values."""
_PLAIN: Final = {torch.Tensor, torch.nn.Parameter}


def is_ordinary(value: Any) -> bool:
    """Return whether a value is a whole tensor or parameter, and neither a subclass nor described as a shard."""
    return type(value) in _PLAIN and "global_shape" not in value.__dict__


# DTensor, ShardedTensor and AsyncCollectiveTensor are looked up in loaded modules only: importing them takes a second, and
# if they were never imported there is no such tensor.


def is_dtensor(obj: Any) -> bool:
    return _is_a(obj, "torch.distributed.tensor", "DTensor")


def has_part(value: Any) -> bool:
    """Return whether this rank holds a part of a value: the mesh of a DTensor may not include it."""
    return not is_dtensor(value) or value.device_mesh.get_coordinate() is not None


def is_sharded_tensor(obj: Any) -> bool:
    return _is_a(obj, "torch.distributed._shard.sharded_tensor", "ShardedTensor")


def wait_tensor(tensor: Any) -> Any:
    """Wait until an asynchronous collective has written a tensor (of a DTensor: the local one), and return it."""
    if is_dtensor(tensor):
        local = tensor._local_tensor
        if not is_pending(local):
            return tensor
        return type(tensor)(local.trigger_wait(), tensor._spec, requires_grad=tensor.requires_grad)
    return tensor.trigger_wait() if is_pending(tensor) else tensor


def path_name(path: TreePath) -> str:
    return ".".join(map(str, path)) if path else "the state dict itself"


def is_pending(obj: Any) -> bool:
    """Return True for a tensor that an asynchronous collective may still be writing."""
    return _is_a(obj, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def _is_a(obj: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)  # which a module that another thread is importing may lack
    return kind is not None and isinstance(obj, kind)


def copy_bits(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy tensors of one shape: bit for bit if the dtypes are the same, converted otherwise."""
    if target.dtype == source.dtype and target.dtype.itemsize == 1 and {type(target), type(source)} <= _PLAIN:
        # torch cannot copy int4 and similar dtypes, which take a byte each.
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source, non_blocking=non_blocking)


_TENSOR, _STRIDED = torch.Tensor, torch.strided
_DTYPE, _SHAPE, _DEVICE = map(attrgetter, ("dtype", "shape", "device"))
_ON_CPU, _REQUIRES_GRAD = map(attrgetter, ("is_cpu", "requires_grad"))
_TRACING_HINT = "save the tensor outside of tracing and fake modes"
_ARRAYS = (np.ndarray, np.memmap)  # exactly these: masked and record arrays hold more than elements


class Piece(NamedTuple):  # a named tuple, like the next: a state may have 50,000 leaves, and a dataclass costs twice
    offsets: Ints
    """Where it begins in the whole tensor."""
    tensor: torch.Tensor
    """Plain, strided, detached, on any device; its shape is the size of the part."""


class TensorLeaf(NamedTuple):
    dtype: torch.dtype
    shape: Ints
    """Of the whole tensor, over all ranks."""
    pieces: tuple[Piece, ...]
    """What this rank holds; may be empty."""
    alias: tuple[Any, ...] | None
    """Equal for two leaves that view the same memory in the same way; None without memory."""


OrdinaryLeaf = tuple[torch.dtype, Ints, int, torch.Tensor]
"""A contiguous tensor that is not sharded: dtype, shape, the address of its first byte, the piece."""


class _Request(NamedTuple):
    key: str
    allow_meta: bool
    writable: bool

    def refuse(self, what: str, hint: str) -> NoReturn:
        raise UnsupportedLeaf(f"{self.key!r} {what}", hint=hint, key=self.key)


def is_tensor(obj: Any) -> bool:
    if isinstance(obj, (torch.Tensor, ShardedBox)):  # DTensor and ShardedTensor are torch.Tensors
        return True
    return type(obj) in _ARRAYS and of_numpy(obj.dtype) is not None


def describe_leaf(key: str, obj: Any, *, allow_meta: bool = False, writable: bool = False) -> TensorLeaf:
    """Describe a leaf called `key`, which may be on meta if `allow_meta`, and must be possible to fill if `writable`."""
    request = _Request(key, allow_meta, writable)
    if isinstance(obj, ShardedBox):
        parts = _shards(request, obj.shape, [(tensor, offsets, None) for tensor, offsets in obj.pieces])
        return _describe_parts(request, obj.dtype, obj.shape, parts)
    if is_dtensor(obj):
        local = _unwrap(request, obj._local_tensor).detach()  # to_local() would be recorded by autograd
        whole = tuple(local.shape)
        boxes = dtensor_boxes(key, obj._spec, whole)
        parts = [(there.offsets, local if here.sizes == whole else local[slices(here)]) for there, here in boxes]
        return _describe_parts(request, obj.dtype, tuple(obj.shape), parts)
    if is_sharded_tensor(obj):
        shape = tuple(obj.metadata().size)
        shards = [(each.tensor, each.metadata) for each in obj.local_shards()]
        sized = [(tensor, tuple(data.shard_offsets), tuple(data.shard_sizes)) for tensor, data in shards]
        return _describe_parts(request, obj.dtype, shape, _shards(request, shape, sized))
    plain = _unwrap(request, _from_numpy(request, obj) if type(obj) in _ARRAYS else obj)
    return _describe_parts(request, plain.dtype, tuple(plain.shape), [((0,) * plain.dim(), plain)])


def describe_ordinary(obj: Any) -> OrdinaryLeaf | None:
    """Describe a contiguous plain tensor, as almost every leaf is, in few calls; return None for anything else."""
    kind = type(obj)
    if kind not in _PLAIN or obj.is_nested or obj.layout is not _STRIDED or obj.is_neg() or not obj.is_contiguous():
        return None
    dtype, shape, pointer = obj.dtype, obj.shape, obj.data_ptr()
    if pointer == 0 or obj.storage_offset() or 0 in shape or dtype not in known_to_torch():
        return None
    if dtype.is_complex and obj.is_conj():
        return None
    return dtype, shape, pointer, obj.detach() if obj.requires_grad or kind is not _TENSOR else obj


class OrdinaryLeaves(NamedTuple):
    """What describes a block of ordinary tensors, as lists; equal for the same shapes and types in the same memory."""

    starts: list[int]
    shapes: Sequence[Ints]
    dtypes: list[torch.dtype]
    devices: list[torch.device]
    """Empty if all lie in host memory."""
    specs: list[Any]
    """Of DTensors, of which all the others describe the local tensors; empty if there are none."""


TENSORS_IN_CACHE = 512
"""Tensors that are looked at together: few enough to stay in the cache of a core while one attribute after the other is read."""


def describe_blocks(leaves: Sequence[Any]) -> Iterator[tuple[OrdinaryLeaves, Sequence[torch.Tensor]] | None]:
    """Yield what `describe_ordinary` finds of leaves, and their pieces, for each block; None if a leaf of it is not ordinary."""
    return (_describe_block(leaves[at : at + TENSORS_IN_CACHE]) for at in range(0, len(leaves), TENSORS_IN_CACHE))


def _describe_block(leaves: Sequence[Any]) -> tuple[OrdinaryLeaves, Sequence[torch.Tensor]] | None:
    # Without a step of Python for each leaf.
    classes, specs = set(map(type, leaves)), list[Any]()
    if not classes <= _PLAIN:
        sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        if sharded not in classes:
            return None
        specs = [_said_of(leaf._spec) if type(leaf) is sharded else None for leaf in leaves]
        leaves = [leaf._local_tensor if type(leaf) is sharded else leaf for leaf in leaves]
        classes = set(map(type, leaves))
    if not classes <= _PLAIN:
        return None
    try:
        starts = list(map(_TENSOR.data_ptr, leaves))
        shapes, dtypes = list(map(_SHAPE, leaves)), list(map(_DTYPE, leaves))
    except RuntimeError:  # tensors that are not strided have no address, and nested ones no shape
        return None
    kinds = set(dtypes)
    if (
        not all(starts)  # as that of a tensor without elements
        or not all(map(_TENSOR.is_contiguous, leaves))
        or any(map(_TENSOR.is_neg, leaves))
        or any(map(_TENSOR.storage_offset, leaves))
        or not kinds <= known_to_torch().keys()
        or (any(kind.is_complex for kind in kinds) and any(map(_TENSOR.is_conj, leaves)))
    ):
        return None
    devices = [] if all(map(_ON_CPU, leaves)) else list(map(_DEVICE, leaves))
    described = OrdinaryLeaves(starts, shapes, dtypes, devices, specs)
    if classes == {_TENSOR} and not any(map(_REQUIRES_GRAD, leaves)):
        return described, leaves
    # Not `data`, which is quicker: autograd would not notice that a load has filled it.
    return described, [leaf if type(leaf) is _TENSOR and not leaf.requires_grad else leaf.detach() for leaf in leaves]


def _said_of(spec: Any) -> tuple[Any, ...]:
    """Return all that boxes follow from; without holding the mesh, which holds the connections of its process groups."""
    return weakref.ref(spec.mesh), spec.placements, spec.tensor_meta, getattr(spec, "shard_order", None)


def materialize(key: str, obj: Any) -> Any:
    """Give a leaf on the meta device uninitialised memory, on the default device or that of its mesh; keep all else."""
    if not needs_memory(obj):
        return obj
    if isinstance(obj, ShardedBox):
        pieces = [(materialize(key, tensor), offsets) for tensor, offsets in obj.pieces]
        return ShardedBox.of(pieces, shape=obj.shape, dtype=obj.dtype)
    if is_dtensor(obj):
        return with_attributes_of(obj, torch.empty_like(obj, device=obj.device_mesh.device_type))
    request = _Request(key, allow_meta=True, writable=True)
    if is_sharded_tensor(obj):
        request.refuse("is a ShardedTensor on the meta device", "give its shards memory before loading into it")
    plain = _unwrap(request, obj)
    device = torch.get_default_device()
    # Under `with torch.device("meta")` the default device cannot hold values.
    return with_attributes_of(obj, memory_for(plain, torch.device("cpu") if device.type == "meta" else device))


def memory_for(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory for a meta tensor. For `empty_like`, torch first imports sympy, slower than many loads."""
    if type(meta) in _PLAIN and meta.stride() == strides_of(meta.shape):
        return torch.empty(meta.shape, dtype=meta.dtype, device=device)
    return torch.empty_like(meta, device=device)


def needs_memory(obj: Any) -> bool:
    if isinstance(obj, ShardedBox):
        return any(needs_memory(tensor) for tensor, _ in obj.pieces)
    if is_sharded_tensor(obj):
        return any(needs_memory(shard.tensor) for shard in obj.local_shards())
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(obj, torch.Tensor) and obj.is_meta


def meta_signature(obj: Any) -> tuple[Any, ...]:
    """Return all that `materialize` depends on: two meta leaves with equal signatures may become one object."""
    if isinstance(obj, ShardedBox):
        return (obj.shape, *((offsets, meta_signature(tensor)) for tensor, offsets in obj.pieces))
    with torch._C.DisableTorchFunctionSubclass():
        form = (type(obj), obj.dtype, tuple(obj.shape), obj.stride(), obj.requires_grad, obj.device)
    return (*form, getattr(obj, "_spec", None))  # of a DTensor


def with_attributes_of(model: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Give a fresh tensor the class, attributes and `requires_grad` of another."""
    kind: Any = type(model)
    if kind is torch.nn.Parameter:
        fresh = torch.nn.Parameter(fresh, requires_grad=model.requires_grad)
    elif type(fresh) is not kind:
        fresh = fresh.as_subclass(kind)
    # A DTensor has its spec and local tensor there: those of the fresh one stay.
    fresh.__dict__.update({name: value for name, value in model.__dict__.items() if name not in fresh.__dict__})
    with torch._C.DisableTorchFunctionSubclass():
        return fresh.requires_grad_(model.requires_grad)


def _describe_parts(
    request: _Request, dtype: torch.dtype, shape: Ints, parts: Iterable[tuple[Ints, torch.Tensor]]
) -> TensorLeaf:
    """Describe a tensor of which this rank holds `parts`, each of plain strided layout and the same dtype."""
    of_torch(dtype, key=request.key)
    pieces: list[Piece] = []
    alias: list[Any] = [dtype, shape]
    on_meta = False
    for offsets, tensor in parts:
        if tensor.dtype != dtype:
            raise InvalidShards(
                f"{request.key!r} is {dtype}, but its piece at {offsets} is {tensor.dtype}",
                hint="give all pieces of a tensor one dtype",
                key=request.key,
            )
        if tensor.numel() == 0:
            continue
        plain, memory = _plain_view(request, tensor)
        pieces.append(Piece(offsets, plain))
        if memory is None:
            on_meta = True
        else:
            alias += (offsets, *memory)
    return TensorLeaf(dtype, shape, tuple(pieces), tuple(alias) if pieces and not on_meta else None)


def _shards(
    request: _Request, shape: Ints, pieces: Iterable[tuple[Any, Ints, Ints | None]]
) -> list[tuple[Ints, torch.Tensor]]:
    """Return pieces, each given with its offsets and the size said of it, as plain tensors that lie inside `shape`."""
    parts = []
    for tensor, offsets, said in pieces:
        plain = _unwrap(request, tensor)
        sizes = tuple(plain.shape)
        if said not in (None, sizes):
            raise InvalidShards(
                f"{request.key!r}: the shard at {offsets} is {sizes}, its metadata say {said}", key=request.key
            )
        if not within(shape, Box(offsets, sizes)):
            raise InvalidShards(
                f"{request.key!r}: a piece of size {sizes} at {offsets} does not lie inside {shape}",
                hint="offsets and size of a piece are counted in elements of the whole tensor",
                key=request.key,
            )
        parts.append((offsets, plain))
    return parts


def _plain_view(request: _Request, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...] | None]:
    """Return a non-empty tensor as a detached plain view, and a key that identifies its memory."""
    pointer = tensor.data_ptr()
    # A freed storage has address 0, so a view into it has its offset as address.
    if pointer == 0 or (tensor.storage_offset() and tensor.untyped_storage().nbytes() == 0):
        if not tensor.is_meta:
            if torch._is_functional_tensor(tensor):
                request.refuse("is a functional tensor, which exists while torch traces", _TRACING_HINT)
            request.refuse(
                f"has shape {tuple(tensor.shape)} but no memory behind it",
                "its storage was freed (a parameter FSDP has resharded?): save the state dict of the wrapped module",
            )
        if not request.allow_meta:
            request.refuse("is on the meta device: it has no values", "materialize and initialise it before saving")
        return tensor.detach(), None
    memory = (pointer, tuple(tensor.shape), tensor.stride(), tensor.device)
    if request.writable and overlaps_itself(tensor):
        request.refuse("is expanded: several elements share memory, so it cannot be filled", "load into t.contiguous()")
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor.detach(), memory
    if request.writable:
        request.refuse(
            "is a conjugate or negative view: it cannot be filled", "load into t.resolve_conj().resolve_neg()"
        )
    return tensor.detach().resolve_conj().resolve_neg(), (*memory, tensor.is_conj(), tensor.is_neg())


def _unwrap(request: _Request, obj: Any) -> torch.Tensor:
    if is_pending(obj):
        obj = obj.trigger_wait()
    kind = type(obj)
    if kind not in _PLAIN:
        if not isinstance(obj, torch.Tensor):
            name = f"{kind.__module__}.{kind.__qualname__}"
            request.refuse(f"has a piece that is a {name}, not a torch.Tensor", "give pieces as tensors")
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            _refuse_subclass(request, obj)
        if torch.nn.parameter.is_lazy(obj):
            request.refuse("is a lazy parameter without a shape yet", "run the module once before saving it")
        # Without __torch_dispatch__, a subclass has all its values in its own memory.
        with torch._C.DisableTorchFunctionSubclass():
            obj = obj.as_subclass(torch.Tensor)
    if obj.layout is not torch.strided or obj.is_nested:
        _refuse_layout(request, obj)
    return obj  # type: ignore[no-any-return]  # checked above


def _from_numpy(request: _Request, array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return an array as a tensor over its memory, or over a copy if torch cannot view it."""
    row = of_numpy(array.dtype)
    if row is None:
        request.refuse(f"is a numpy array of {array.dtype!r}, which torch lacks", "convert it to a native dtype")
    # torch distinguishes C types of one size: it accepts `unsigned long`, but not `unsigned long long`.
    array = array.view(row.numpy)
    if array.size == 0:
        return torch.from_numpy(np.empty(array.shape, array.dtype))
    if request.writable and not array.flags.writeable:
        request.refuse("is a read-only numpy array, which cannot be filled", "give a writable array to load into")
    if not array.flags.aligned or any(n < 0 or n % array.itemsize for n in array.strides):
        if request.writable:
            request.refuse("is a reversed or unaligned numpy array", "give np.ascontiguousarray(a) to load into")
        array = np.array(array, subok=False)  # rebuilt in memory torch can view
    if not array.flags.writeable:  # torch warns about read-only arrays, so the memory is offered as writable
        interface = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}
        array = np.asarray(SimpleNamespace(owner=array, __array_interface__=interface))
    return torch.from_numpy(array)


def _refuse_layout(request: _Request, tensor: torch.Tensor) -> NoReturn:
    if tensor.is_nested:
        request.refuse("is a nested tensor", "save its .values() and .offsets(), or t.unbind()")
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]  # absent from torch's stubs
        request.refuse("has the opaque mkldnn layout", "save t.to_dense()")
    request.refuse(f"has layout {tensor.layout}", "save its indices and values, or t.to_dense()")


def _refuse_subclass(request: _Request, obj: torch.Tensor) -> NoReturn:
    name = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if type(obj).__name__ in ("FakeTensor", "FunctionalTensor"):
        request.refuse(f"is a {name}, which has no values", _TRACING_HINT)
    if type(obj).__name__ in ("DTensor", "ShardedTensor"):
        request.refuse(f"is sharded in two ways: a piece of it is a {name}", "save it as one DTensor over a 2-d mesh")
    with torch._C.DisableTorchFunctionSubclass():
        if obj.is_nested:
            _refuse_layout(request, obj)
    request.refuse(f"is a {name}, whose inner tensors are not plain", "save t.dequantize(), or its parts as tensors")
