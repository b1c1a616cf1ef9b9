"""Values a user wraps around a leaf to say what kind of state it is."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch

from shardkeep.errors import InvalidShards, UnsupportedLeaf
from shardkeep.format.boxes import Ints, slices
from shardkeep.format.dtypes import known_to_torch, of_numpy, of_torch
from shardkeep.state.placement import dtensor_boxes


class PerRank:
    """
    State that belongs to one rank: RNG, data loader position. Every rank's value is stored under its own rank.

    `value` may be anything a state may hold, dicts and tensors included. Loading replaces `value` by what the same
    rank number saved: a plain value may be None before, and a dict, or a list of tensors, needs the same nesting, as
    everywhere in a state.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class EveryRank(PerRank):
    """What all ranks saved under a `PerRank`, for one that is to be given all of it."""

    __slots__ = ("values",)

    def __init__(self, values: dict[int, Any]) -> None:
        super().__init__(None)
        self.values = values


class ShardedBox:
    """
    Local pieces of a tensor that some framework shards in its own way: each a tensor and where it begins.

    ``ShardedBox(local, offsets=(4, 0), shape=(8, 16))`` is one piece; `ShardedBox.of` takes any number, none
    included. Pieces of all ranks together must tile `shape` exactly; equal pieces on several ranks are replicas.
    """

    __slots__ = ("dtype", "pieces", "shape")

    def __init__(self, local: torch.Tensor, *, offsets: Sequence[int], shape: Sequence[int]) -> None:
        loaded = sys.modules.get("torch")  # to import it takes seconds, and where it is not loaded there is no tensor
        if loaded is None or not isinstance(local, loaded.Tensor):
            raise InvalidShards(f"ShardedBox: local is a {type(local).__qualname__}, expected a torch.Tensor")
        self.pieces: tuple[tuple[torch.Tensor, tuple[int, ...]], ...] = ((local, _ints("offsets", offsets)),)
        self.shape = _ints("shape", shape)
        self.dtype = local.dtype

    @classmethod
    def of(
        cls,
        pieces: Iterable[tuple[torch.Tensor, Sequence[int]]],
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
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
        raise InvalidShards(
            f"ShardedBox: {name}={values!r}, expected integers, one for each dimension of the whole tensor"
        ) from exc


# Tensors whose own elements share memory, so that they cannot be filled.


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Say whether elements of a tensor may share memory: an axis steps no further than the smaller ones reach."""
    reach = 0
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if step <= reach:
                return True
            reach += step * (n - 1)
    return False


# Work in flight on accelerators, which our worker threads would neither wait for nor be waited for.


def synchronize_devices(tensors: Iterable[torch.Tensor]) -> None:
    """
    Wait until all work queued on the accelerators that hold these tensors is done.

    Streams belong to threads: a copy made by another thread is not ordered after what the caller has queued, nor
    before what it queues next. Where all lie in host memory, no accelerator is asked for anything: torch refuses CUDA to
    processes that are forked after that.
    """
    kind = torch.accelerator.current_accelerator()  # of this build of torch, whether one is there or not
    for device in {tensor.device for tensor in tensors}:
        if kind is not None and device.type == kind.type:
            torch.accelerator.synchronize(device)


# Which kind of tensor a leaf is, and tensors that are still on their way.
#
# DTensor, ShardedTensor and AsyncCollectiveTensor are looked for only where their modules are loaded already:
# importing
# them takes a second, and where they were never imported there is none.

TreePath = tuple[Any, ...]
"""Keys and indices that lead from the root of a tree to one of its values."""


def is_dtensor(obj: Any) -> bool:
    """Say whether this is a DTensor."""
    return _is_a(obj, "torch.distributed.tensor", "DTensor")


def is_sharded_tensor(obj: Any) -> bool:
    """Say whether this is a ShardedTensor."""
    return _is_a(obj, "torch.distributed._shard.sharded_tensor", "ShardedTensor")


def is_plain(obj: Any) -> bool:
    """Say whether this is a tensor that one rank holds as a whole."""
    return isinstance(obj, torch.Tensor) and not is_dtensor(obj) and not is_sharded_tensor(obj)


def wait_tensor(tensor: Any) -> Any:
    """
    Return the tensor once its values are there.

    A tensor that an asynchronous collective is still writing is waited for. A DTensor over such a tensor comes back
    as a new DTensor over the finished one; anything else as it is.
    """
    if is_dtensor(tensor):
        local = tensor._local_tensor
        if not is_pending(local):
            return tensor
        return type(tensor)(local.trigger_wait(), tensor._spec, requires_grad=tensor.requires_grad)
    return tensor.trigger_wait() if is_pending(tensor) else tensor


def path_name(path: TreePath) -> str:
    """Write a path as errors show it."""
    return ".".join(map(str, path)) if path else "the state dict itself"


def is_pending(obj: Any) -> bool:
    """Say whether this is a tensor that an asynchronous collective may still be writing."""
    return _is_a(obj, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def _is_a(obj: Any, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    # A module that is still being imported, by another thread, has not all its names yet.
    kind = getattr(loaded, name, None)
    return kind is not None and isinstance(obj, kind)


# Tensors as the bytes they are, for dtypes that torch can store and neither send nor copy.

_SENT_BY_ALL: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""What every backend can send."""
_CARRIERS: Final = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a row of bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same size as which every backend can send the bits of this one; itself if it can."""
    return dtype if dtype in _SENT_BY_ALL else _CARRIERS.get(dtype.itemsize, dtype)


def copy_bits(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy tensors of one shape: bit for bit where the dtypes are the same, converted where they are not."""
    if (
        target.dtype == source.dtype
        and target.dtype.itemsize == 1
        and type(target) in _PLAIN
        and type(source) in _PLAIN
    ):
        # torch has no copy of int4 and the like, which take a byte each.
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source, non_blocking=non_blocking)


# Every tensor-like leaf of a state dict as the same plain value.
#
# A torch tensor of any kind, a DTensor, a ShardedTensor, a `ShardedBox` or a numpy array comes in; out comes its
# dtype,
# its global shape, and the pieces this rank holds, each a plain strided tensor over the leaf's own memory. Nothing is
# communicated and, but for what has no plain view (conjugates, reversed arrays), nothing is copied. What has no plain
# form at all is refused by name.

# Looked up for every leaf otherwise, and there are many.
_TENSOR, _PARAMETER, _STRIDED = torch.Tensor, torch.nn.Parameter, torch.strided
_ARRAYS = (np.ndarray, np.memmap)  # exactly these: a masked or a record array is more than its elements


class Piece(NamedTuple):  # a named tuple, as are the two below: a state has 50,000 leaves, and a dataclass costs twice
    """A part of a tensor that this rank holds."""

    offsets: Ints
    """Where it begins in the whole tensor."""
    tensor: torch.Tensor
    """Plain, strided, detached, on any device; its shape is the size of the part."""


class TensorLeaf(NamedTuple):
    """A tensor of the state, reduced to what saving and loading need."""

    dtype: torch.dtype
    shape: Ints
    """Of the whole tensor, over all ranks."""
    pieces: tuple[Piece, ...]
    """What this rank holds; none where that is nothing."""
    alias: tuple[Any, ...] | None
    """Equal for two leaves that are the same memory seen the same way; None where there is no memory."""


OrdinaryLeaf = tuple[torch.dtype, torch.Size, int, torch.Tensor]
"""The same of a tensor that is all here, in order: dtype, shape, the address of its first byte, the piece."""


class _Request(NamedTuple):
    """Which leaf is described, and what for."""

    key: str
    allow_meta: bool
    writable: bool

    def refuse(self, what: str, hint: str) -> NoReturn:
        raise UnsupportedLeaf(f"{self.key!r} {what}", hint=hint, key=self.key)


def is_tensor(obj: Any) -> bool:
    """Say whether `describe_leaf` is the one to describe, or refuse, this leaf."""
    if isinstance(obj, (torch.Tensor, ShardedBox)):  # DTensor and ShardedTensor are torch.Tensors
        return True
    return type(obj) in _ARRAYS and of_numpy(obj.dtype) is not None


def describe_leaf(key: str, obj: Any, *, allow_meta: bool = False, writable: bool = False) -> TensorLeaf:
    """
    Describe a leaf for which `is_tensor` holds.

    Args:
        key: the leaf's name, for errors.
        obj: the leaf.
        allow_meta: take tensors on the meta device, which have a shape and no values.
        writable: the pieces will be written to; refuse a leaf that would not see it.

    Raises:
        UnsupportedLeaf: it has no plain form; says what it is and what to do.
        InvalidShards: its pieces are not what it says they are.

    """
    found = describe_ordinary(obj)
    if found is not None:
        dtype, size, pointer, plain = found
        shape, origin = tuple(size), (0,) * len(size)
        alias = (dtype, shape, origin, pointer, shape, obj.stride(), obj.device)
        return TensorLeaf(dtype, shape, (Piece(origin, plain),), alias)
    ask = _Request(key, allow_meta, writable)
    kind = type(obj)
    if kind is _TENSOR or kind is _PARAMETER:
        return _describe_plain(ask, obj)
    if kind in _ARRAYS:
        return _describe_plain(ask, _from_numpy(ask, obj))
    if isinstance(obj, ShardedBox):
        return _describe_box(ask, obj)
    if is_dtensor(obj):
        return _describe_dtensor(ask, obj)
    if is_sharded_tensor(obj):
        return _describe_sharded_tensor(ask, obj)
    return _describe_plain(ask, _unwrap(ask, obj))


def describe_ordinary(obj: Any) -> OrdinaryLeaf | None:
    """
    Describe a tensor about which there is nothing special; None for whatever needs the closer look of `describe_leaf`.

    Almost every leaf of every state comes this way, and only this way, so it is spelt out in the fewest calls.
    """
    kind = type(obj)
    if kind is not _TENSOR and kind is not _PARAMETER:
        return None
    if obj.is_nested or obj.layout is not _STRIDED or obj.is_neg() or not obj.is_contiguous():
        return None
    dtype, shape, pointer = obj.dtype, obj.shape, obj.data_ptr()
    if pointer == 0 or obj.storage_offset() or 0 in shape or dtype not in known_to_torch():
        return None
    if dtype.is_complex and obj.is_conj():
        return None
    return dtype, shape, pointer, obj.detach() if obj.requires_grad or kind is not _TENSOR else obj


def materialize(key: str, obj: Any) -> Any:
    """
    Give a leaf on the meta device memory, uninitialised; return any other leaf as it is.

    The result is the same kind of object: shape, order of strides, dtype, `requires_grad`, placements, parameter
    class and attributes are kept. It lies on the default device, or a DTensor on its mesh's.
    """
    if not needs_memory(obj):
        return obj
    if isinstance(obj, ShardedBox):
        pieces = [(materialize(key, tensor), offsets) for tensor, offsets in obj.pieces]
        return ShardedBox.of(pieces, shape=obj.shape, dtype=obj.dtype)
    if is_dtensor(obj):
        return with_attributes_of(obj, torch.empty_like(obj, device=obj.device_mesh.device_type))
    ask = _Request(key, allow_meta=True, writable=True)
    if is_sharded_tensor(obj):
        ask.refuse("is a ShardedTensor on the meta device", "give its shards memory before loading into it")
    plain = _unwrap(ask, obj)
    device = torch.get_default_device()
    # Under `with torch.device("meta")` the default is no place to load to.
    return with_attributes_of(obj, torch.empty_like(plain, device="cpu" if device.type == "meta" else device))


def needs_memory(obj: Any) -> bool:
    """Say whether `materialize` would make another object of this leaf."""
    if isinstance(obj, ShardedBox):
        return any(_on_meta(tensor) for tensor, _ in obj.pieces)
    return _on_meta(obj)


def meta_signature(obj: Any) -> tuple[Any, ...]:
    """Return what a leaf on the meta device asks for: two that ask for the same may become one object."""
    if isinstance(obj, ShardedBox):
        return (obj.shape, *((offsets, meta_signature(tensor)) for tensor, offsets in obj.pieces))
    with torch._C.DisableTorchFunctionSubclass():
        form = (type(obj), obj.dtype, tuple(obj.shape), obj.stride(), obj.requires_grad, obj.device)
    return (*form, getattr(obj, "_spec", None))  # of a DTensor


def _on_meta(obj: Any) -> bool:
    if is_sharded_tensor(obj):
        return any(_on_meta(shard.tensor) for shard in obj.local_shards())
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(obj, torch.Tensor) and obj.is_meta


def with_attributes_of(model: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Give a fresh tensor the class, attributes and `requires_grad` of another."""
    kind: Any = type(model)
    if kind is torch.nn.Parameter:
        fresh = torch.nn.Parameter(fresh, requires_grad=model.requires_grad)
    elif type(fresh) is not kind:
        fresh = fresh.as_subclass(kind)
    # A DTensor's class keeps its spec and local tensor there, the fresh one's of course.
    fresh.__dict__.update({name: value for name, value in model.__dict__.items() if name not in fresh.__dict__})
    with torch._C.DisableTorchFunctionSubclass():
        return fresh.requires_grad_(model.requires_grad)


def _describe_plain(ask: _Request, tensor: torch.Tensor) -> TensorLeaf:
    if tensor.layout is not torch.strided or tensor.is_nested:
        _refuse_layout(ask, tensor)
    shape = tuple(tensor.shape)
    return _describe_parts(ask, tensor.dtype, shape, [((0,) * len(shape), tensor)])


def _describe_parts(
    ask: _Request, dtype: torch.dtype, shape: Ints, parts: Iterable[tuple[Ints, torch.Tensor]]
) -> TensorLeaf:
    """Describe a tensor of which this rank holds `parts`, each of plain strided layout and the same dtype."""
    _check_dtype(ask, dtype)
    pieces: list[Piece] = []
    alias: list[Any] = [dtype, shape]
    on_meta = False
    for offsets, tensor in parts:
        if tensor.dtype != dtype:
            raise InvalidShards(
                f"{ask.key!r} is {dtype}, but its piece at {offsets} is {tensor.dtype}",
                hint="give all pieces of a tensor one dtype",
                key=ask.key,
            )
        if tensor.numel() == 0:
            continue
        plain, memory = _plain_view(ask, tensor)
        pieces.append(Piece(offsets, plain))
        if memory is None:
            on_meta = True
        else:
            alias += (offsets, *memory)
    return TensorLeaf(dtype, shape, tuple(pieces), tuple(alias) if pieces and not on_meta else None)


def _describe_box(ask: _Request, box: ShardedBox) -> TensorLeaf:
    parts = []
    for tensor, offsets in box.pieces:
        plain = _unwrap(ask, tensor)
        _check_inside(ask, box.shape, offsets, tuple(plain.shape))
        parts.append((offsets, plain))
    return _describe_parts(ask, box.dtype, box.shape, parts)


def _describe_dtensor(ask: _Request, obj: Any) -> TensorLeaf:
    local = _unwrap(ask, obj._local_tensor).detach()  # to_local() would put itself on the autograd tape
    whole = tuple(local.shape)
    boxes = dtensor_boxes(ask.key, obj._spec, whole)
    parts = ((there.offsets, local if here.sizes == whole else local[slices(here)]) for there, here in boxes)
    return _describe_parts(ask, obj.dtype, tuple(obj.shape), parts)


def _describe_sharded_tensor(ask: _Request, obj: Any) -> TensorLeaf:
    shape = tuple(obj.metadata().size)
    parts = []
    for shard in obj.local_shards():
        plain = _unwrap(ask, shard.tensor)
        offsets, sizes = tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
        if tuple(plain.shape) != sizes:
            raise InvalidShards(
                f"{ask.key!r}: the shard at {offsets} is {tuple(plain.shape)}, its metadata say {sizes}", key=ask.key
            )
        _check_inside(ask, shape, offsets, sizes)
        parts.append((offsets, plain))
    return _describe_parts(ask, obj.dtype, shape, parts)


def _check_inside(ask: _Request, shape: Ints, offsets: Ints, sizes: Ints) -> None:
    if len(offsets) == len(sizes) == len(shape) and all(
        o >= 0 and o + n <= full for o, n, full in zip(offsets, sizes, shape, strict=True)
    ):
        return
    raise InvalidShards(
        f"{ask.key!r}: a piece of size {sizes} at {offsets} does not lie inside {shape}",
        hint="offsets and size of a piece are counted in elements of the whole tensor",
        key=ask.key,
    )


def _plain_view(ask: _Request, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...] | None]:
    """Return a tensor of at least one element as a detached plain view, and what tells its memory from any other."""
    pointer = tensor.data_ptr()
    # A freed storage is at address 0, so that a view into it seems to be at its offset.
    if pointer == 0 or (tensor.storage_offset() and tensor.untyped_storage().nbytes() == 0):
        if not tensor.is_meta:
            _refuse_without_memory(ask, tensor)
        if not ask.allow_meta:
            ask.refuse("is on the meta device: it has no values", "materialize and initialise it before saving")
        return tensor.detach(), None
    stride = tensor.stride()
    memory = (pointer, tuple(tensor.shape), stride, tensor.device)
    if ask.writable and overlaps_itself(tensor):
        ask.refuse("is expanded: several elements share memory, so it cannot be filled", "load into t.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        return _resolve(ask, tensor), (*memory, tensor.is_conj(), tensor.is_neg())
    return tensor.detach(), memory


def _resolve(ask: _Request, tensor: torch.Tensor) -> torch.Tensor:
    if ask.writable:
        ask.refuse(
            "is a conjugate or negative view, which cannot be filled in place",
            "load into t.resolve_conj().resolve_neg()",
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _unwrap(ask: _Request, obj: Any) -> torch.Tensor:
    """Return the plain tensor inside a leaf or piece that is a `torch.Tensor` of any class."""
    if is_pending(obj):
        obj = obj.trigger_wait()
    kind = type(obj)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        if not isinstance(obj, torch.Tensor):
            ask.refuse(f"has a piece that is a {_name(kind)}, not a torch.Tensor", "give pieces as tensors")
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            _refuse_subclass(ask, obj)
        if torch.nn.parameter.is_lazy(obj):
            ask.refuse("is a lazy parameter without a shape yet", "run the module once before saving it")
        # The class keeps all its values in its own memory, whatever it does with operators.
        with torch._C.DisableTorchFunctionSubclass():
            obj = obj.as_subclass(torch.Tensor)
    if obj.layout is not torch.strided or obj.is_nested:
        _refuse_layout(ask, obj)
    return obj  # type: ignore[no-any-return]  # checked above


def _from_numpy(ask: _Request, array: np.ndarray[Any, Any]) -> torch.Tensor:
    """View an array as a tensor; copy it where torch cannot view it."""
    row = of_numpy(array.dtype)
    if row is None:
        ask.refuse(f"is a numpy array of {array.dtype!r}, which torch does not have", "convert it to a native dtype")
    # The C type behind a name matters to torch, which knows `unsigned long` and not `unsigned long long`.
    array = array.view(row.numpy)
    if array.size == 0:
        return torch.from_numpy(np.empty(array.shape, array.dtype))
    if ask.writable and not array.flags.writeable:
        ask.refuse("is a read-only numpy array, which cannot be filled in place", "give a writable array to load into")
    if not array.flags.aligned or any(n < 0 or n % array.itemsize for n in array.strides):
        if ask.writable:
            ask.refuse("is a reversed or unaligned numpy array", "give np.ascontiguousarray(a) to load into")
        array = np.array(array, subok=False)  # rebuilt in memory torch can view
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Unlocked(array)))


class _Unlocked:
    """The memory of a read-only array, offered as writable: torch has no read-only tensors, and warns."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = array.__array_interface__
        self.owner = array
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _check_dtype(ask: _Request, dtype: torch.dtype) -> None:
    try:
        of_torch(dtype)
    except UnsupportedLeaf as error:
        ask.refuse(f"is of dtype {dtype}, which has no stored form", error.hint)


def _refuse_layout(ask: _Request, tensor: torch.Tensor) -> NoReturn:
    if tensor.is_nested:
        ask.refuse("is a nested tensor", "save its .values() and .offsets(), or t.unbind()")
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]  # absent from torch's stubs
        ask.refuse("has the opaque mkldnn layout", "save t.to_dense()")
    ask.refuse(f"has layout {tensor.layout}", "save its indices and values, or t.to_dense()")


def _refuse_without_memory(ask: _Request, tensor: torch.Tensor) -> NoReturn:
    if torch._is_functional_tensor(tensor):
        ask.refuse("is a functional tensor, which exists while torch traces", "save the tensor outside of tracing")
    ask.refuse(
        f"has shape {tuple(tensor.shape)} but no memory behind it",
        "its storage was freed (a parameter FSDP has resharded?): save the state dict of the wrapped module",
    )


def _refuse_subclass(ask: _Request, obj: torch.Tensor) -> NoReturn:
    name = _name(type(obj))
    if type(obj).__name__ in ("FakeTensor", "FunctionalTensor"):
        ask.refuse(f"is a {name}, which has no values", "save the tensor outside of tracing and fake modes")
    if type(obj).__name__ in ("DTensor", "ShardedTensor"):
        ask.refuse(
            f"is sharded in two ways: a piece of it is itself a {name}", "save it as one DTensor over a 2-d mesh"
        )
    with torch._C.DisableTorchFunctionSubclass():
        if obj.is_nested:
            _refuse_layout(ask, obj)
    ask.refuse(f"is a {name}, whose inner tensors are not plain", "save t.dequantize(), or its parts, each as a tensor")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
