"""
Companions: tensors kept aside, into which those of a state dict are copied again and again.

Here is when a companion fits, and how one leaf is copied into it. Checking changes nothing and reads no values.
"""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from shardkeep.errors import StateError
from shardkeep.state.leaves import (
    TreePath,
    copy_bits,
    is_dtensor,
    is_sharded_tensor,
    overlaps_itself,
    path_name,
    wait_tensor,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CompanionMismatch(StateError, ValueError):
    """A companion tree does not fit the state dict; names the path at which they differ."""


def check_keys(value: Mapping[Any, Any], companion: Any, path: TreePath) -> None:
    """Raise `CompanionMismatch` unless `companion` is a mapping with the keys of `value`."""
    if not isinstance(companion, Mapping):
        _refuse(path, f"is a dict, its companion a {_name(companion)}")
    if value.keys() != companion.keys():
        missing = [path_name((*path, key)) for key in value if key not in companion]
        extra = [path_name((*path, key)) for key in companion if key not in value]
        _refuse(path, f"has other keys than its companion; missing there: {missing}, only there: {extra}")


def check_length(value: list[Any] | tuple[Any, ...], companion: Any, path: TreePath) -> None:
    """Raise `CompanionMismatch` unless `companion` is a list or tuple as long as `value`."""
    if not isinstance(companion, (list, tuple)):
        _refuse(path, f"is a {_name(value)}, its companion a {_name(companion)}")
    if len(value) != len(companion):
        _refuse(path, f"has {len(value)} items, its companion {len(companion)}")


def check_leaf(value: Any, companion: Any, path: TreePath) -> None:
    """Raise `CompanionMismatch` unless `value` can be copied into `companion` bit for bit."""
    if not isinstance(value, torch.Tensor):
        if isinstance(companion, (torch.Tensor, Mapping)):
            _refuse(path, f"is a {_name(value)}, its companion a {_name(companion)}")
        return
    if not isinstance(companion, torch.Tensor) or _family(value) != _family(companion):
        _refuse(path, f"is a {_name(value)}, its companion a {_name(companion)}")
    if value.dtype != companion.dtype:
        _refuse(path, f"is {value.dtype}, its companion {companion.dtype}")
    if value.size() != companion.size():
        _refuse(path, f"has size {tuple(value.size())}, its companion {tuple(companion.size())}")
    if is_dtensor(value):
        _check_dtensors(value, companion, path)
    elif is_sharded_tensor(value):
        _check_shards(value, companion, path)
    else:
        _check_memory(companion, path)


def copy_leaf(value: Any, companion: Any, *, non_blocking: bool) -> None:
    """Copy a tensor into the companion that `check_leaf` found to fit."""
    with torch.no_grad():
        if is_dtensor(value):
            copy_bits(wait_tensor(companion)._local_tensor, wait_tensor(value)._local_tensor, non_blocking=non_blocking)
        elif is_sharded_tensor(value):
            for source, target in zip(value.local_shards(), companion.local_shards(), strict=True):
                copy_bits(target.tensor, wait_tensor(source.tensor), non_blocking=non_blocking)
        else:
            copy_bits(companion, wait_tensor(value), non_blocking=non_blocking)


def same_layout(a: Any, b: Any) -> bool:
    """Say whether two DTensors are cut in the same way over the same ranks."""
    same_mesh = a.device_mesh is b.device_mesh or torch.equal(a.device_mesh.mesh, b.device_mesh.mesh)
    same_parts = a._local_tensor.shape == b._local_tensor.shape
    return a.size() == b.size() and a.placements == b.placements and same_mesh and same_parts


def _check_dtensors(value: Any, companion: Any, path: TreePath) -> None:
    if not same_layout(value, companion):
        _refuse(path, f"is cut as {_layout(value)}, its companion as {_layout(companion)}")
    _check_memory(companion._local_tensor, path)


def _check_shards(value: Any, companion: Any, path: TreePath) -> None:
    ours, theirs = _shards(value), _shards(companion)
    if ours != theirs:
        _refuse(path, f"has local shards (offsets, size) {ours}, its companion {theirs}")
    for shard in companion.local_shards():
        _check_memory(shard.tensor, path)


def _check_memory(memory: torch.Tensor, path: TreePath) -> None:
    if memory.is_meta:
        _refuse(path, "has a companion on the meta device, which holds no values")
    if memory.layout is torch.strided and overlaps_itself(memory):
        _refuse(path, "has a companion that is expanded: several of its elements share memory")


def _layout(dtensor: Any) -> str:
    return f"{dtensor.placements} over {dtensor.device_mesh}, local part {tuple(dtensor._local_tensor.shape)}"


def _shards(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(s.metadata.shard_offsets), tuple(s.tensor.shape)) for s in tensor.local_shards()]


def _family(tensor: torch.Tensor) -> str:
    return "DTensor" if is_dtensor(tensor) else "ShardedTensor" if is_sharded_tensor(tensor) else "Tensor"


def _refuse(path: TreePath, what: str) -> NoReturn:
    raise CompanionMismatch(
        f"{path_name(path)!r} {what}",
        hint="make a new companion: create_cpu_state_dict(state_dict)",
        key=path_name(path),
    )


def _name(obj: Any) -> str:
    return type(obj).__qualname__


# One walk over a state dict, with one function for each kind of tensor in it.
#
# A tree of dicts, lists and tuples comes in; out comes a new tree of the same nesting, in which every ShardedTensor,
# DTensor and tensor is what its function made of it, moved to the CPU or copied into a companion where that was asked
# for. The tree that came in is never changed.

LeafFunc = Callable[[Any, "ProcessGroup | None", "torch.device | None", Any], Any]
"""Gets a tensor, the process group, the device and the companion (or None) and returns what replaces the tensor."""

_NO_COMPANION: Final = object()  # not None: a tree of companions may hold None where a tensor should be
_PLAIN_VALUES: Final = (int, float, str, bytes, io.BytesIO, type(None))


class UnexpectedValue(StateError, ValueError):
    """A value that is neither a tensor nor of a plain type, where only those were asked for."""


def iterate_state_dict(
    iter_object: Any,
    sharded_tensor_func: LeafFunc,
    dtensor_func: LeafFunc,
    tensor_func: LeafFunc,
    *,
    pg: ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    companion_obj: Any = None,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
    non_blocking: bool = True,
) -> Any:
    """
    Build a tree in which each tensor is what the function of its kind returned for it.

    Tensors that an asynchronous collective still writes are waited for before their function sees them. Dicts come
    out as plain dicts, tuples as tuples, named tuples as what they were.

    Args:
        iter_object: the tree, or one value of it.
        sharded_tensor_func: called for each ShardedTensor.
        dtensor_func: called for each DTensor.
        tensor_func: called for each other tensor.
        pg: handed to the functions; also the group `ranks_only` counts in.
        device: handed to the functions.
        cpu_offload: move results to the CPU, unless there is a companion for them.
        companion_obj: a tree of the same nesting, into whose tensors the results are copied. Unlike torch's, it must
            fit: a None, another dtype or size in it is an error, never a cast, a broadcast or a value left as it is.
        ranks_only: ranks that get the result; the others, which call the functions all the same, get an empty dict
            (None in place of anything else). Empty for all ranks.
        type_check: refuse values other than tensors, int, float, str, bytes, BytesIO and None; else copy them deeply.
        non_blocking: queue copies into companions on the accelerator's current stream and return. The values are
            there once that stream has been synchronised.

    Raises:
        CompanionMismatch: the companion does not fit; names the path. Keys and lengths are looked at before anything
            is copied.
        UnexpectedValue: a value of another type, and `type_check` is on.

    """
    companion = _NO_COMPANION if companion_obj is None else companion_obj
    if companion is not _NO_COMPANION:
        _check_tree(iter_object, companion, (), leaves=False)
    walk = _Iteration(
        funcs=(sharded_tensor_func, dtensor_func, tensor_func),
        pg=pg,
        device=device,
        cpu_offload=cpu_offload,
        type_check=type_check,
        non_blocking=non_blocking,
        wanted=not ranks_only or _rank_in(pg) in ranks_only,
    )
    return walk.visit(iter_object, companion, ())


def check_companion(tree: Any, companion: Any) -> None:
    """
    Raise `CompanionMismatch`, naming the path, unless each tensor of `tree` can be copied as it is into `companion`.

    Nothing is copied.
    """
    _check_tree(tree, companion, (), leaves=True)


def check_types(tree: Any, path: TreePath = ()) -> None:
    """Raise `UnexpectedValue`, naming the path, for a value that `iterate_state_dict` refuses."""
    if isinstance(tree, torch.Tensor):
        return
    if isinstance(tree, dict):
        for key, value in tree.items():
            check_types(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            check_types(value, (*path, index))
    elif not isinstance(tree, _PLAIN_VALUES):
        raise UnexpectedValue(
            f"{path_name(path)!r} is a {type(tree).__qualname__}, expected a tensor, int, float, str, bytes or None",
            hint="take it out of the state dict, or pass type_check=False to have it copied",
            key=path_name(path),
        )


def _identity_func(obj: Any, pg: ProcessGroup | None, device: torch.device | None, companion_obj: Any) -> Any:
    """Return the tensor as it is."""
    del pg, device, companion_obj
    return obj


@dataclass(frozen=True)
class _Iteration:
    """What stays the same from the root of a tree to its leaves."""

    funcs: tuple[LeafFunc, LeafFunc, LeafFunc]
    pg: ProcessGroup | None
    device: torch.device | None
    cpu_offload: bool
    type_check: bool
    non_blocking: bool
    wanted: bool
    """False on a rank that takes part and gets nothing."""

    def visit(self, value: Any, companion: Any, path: TreePath) -> Any:
        if isinstance(value, torch.Tensor):
            return self._visit_tensor(value, companion, path)
        if isinstance(value, dict):
            items = {key: self.visit(item, _child(companion, key), (*path, key)) for key, item in value.items()}
            return items if self.wanted else {}
        if isinstance(value, (list, tuple)):
            return self._visit_sequence(value, companion, path)
        if isinstance(value, _PLAIN_VALUES):
            return value if self.wanted else None
        if self.type_check:
            check_types(value, path)
        return copy.deepcopy(value) if self.wanted else None

    def _visit_sequence(self, value: list[Any] | tuple[Any, ...], companion: Any, path: TreePath) -> Any:
        items = [self.visit(item, _child(companion, index), (*path, index)) for index, item in enumerate(value)]
        if not self.wanted:
            return None
        if isinstance(value, list):
            return items
        rebuild = getattr(value, "_make", tuple)  # of a named tuple
        return rebuild(items)

    def _visit_tensor(self, value: torch.Tensor, companion: Any, path: TreePath) -> Any:
        paired = companion is not _NO_COMPANION
        if paired and companion is None:  # the functions could not tell it from no companion
            check_leaf(value, companion, path)
        func = self.funcs[0 if is_sharded_tensor(value) else 1 if is_dtensor(value) else 2]
        made = func(wait_tensor(value), self.pg, self.device, companion if paired else None)
        if not self.wanted:
            return {} if isinstance(made, dict) else None
        if not isinstance(made, torch.Tensor):
            return made
        if paired:
            check_leaf(made, companion, path)
            copy_leaf(made, companion, non_blocking=self.non_blocking)
            return companion
        return made.to(torch.device("cpu")) if self.cpu_offload else made


def _check_tree(value: Any, companion: Any, path: TreePath, *, leaves: bool) -> None:
    if isinstance(value, dict):
        check_keys(value, companion, path)
        for key, item in value.items():
            _check_tree(item, companion[key], (*path, key), leaves=leaves)
    elif isinstance(value, (list, tuple)):
        check_length(value, companion, path)
        for index, item in enumerate(value):
            _check_tree(item, companion[index], (*path, index), leaves=leaves)
    elif leaves:
        check_leaf(value, companion, path)


def _child(companion: Any, key: Any) -> Any:
    return _NO_COMPANION if companion is _NO_COMPANION else companion[key]


def _rank_in(pg: ProcessGroup | None) -> int:
    import torch.distributed as dist  # noqa: PLC0415 - takes a second, and most calls never ask

    if pg is None and not (dist.is_available() and dist.is_initialized()):
        return 0
    return dist.get_rank(pg)


# State dicts in host memory: moved there, or copied into companions that are made once and used again.
#
# Companions may be pinned, so that accelerators copy into them without waiting, or shared, so that another process
# sees
# them, or both.


class PinningRefused(StateError, RuntimeError):
    """Memory cannot be pinned as it was asked for."""


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for the contexts of all devices


def offload_state_dict_to_cpu(
    state_dict: dict[str, Any], *, ranks_only: tuple[int, ...] = (), type_check: bool = True
) -> dict[str, Any]:
    """
    Return the state dict with its tensors on the CPU; those that are there already are not copied.

    DTensors and ShardedTensors stay what they are, with their local parts moved. The values are there on return.

    Args:
        state_dict: the tree.
        ranks_only: ranks that get the result; the others get an empty dict. Empty for all ranks.
        type_check: refuse values that are neither tensors nor of a plain type; else copy them deeply.

    Raises:
        UnexpectedValue: a value of another type, and `type_check` is on.

    """
    moved: dict[str, Any] = iterate_state_dict(
        state_dict,
        _identity_func,
        _identity_func,
        _identity_func,
        cpu_offload=True,
        ranks_only=ranks_only,
        type_check=type_check,
    )
    return moved


def copy_state_dict(
    state_dict: dict[str, Any],
    copy_state_dict: dict[str, Any],
    non_blocking: bool = False,
    type_check: bool = True,
) -> dict[str, Any]:
    """
    Copy all tensors into those of another tree, and return a tree of the latter.

    Values that are no tensors are in the result as they are in `state_dict`. The whole companion is checked before
    the first tensor is copied.

    Args:
        state_dict: where to copy from; never changed.
        copy_state_dict: the companion, a tree of the same nesting; only the values of its tensors change.
        non_blocking: return while copies are still queued on the accelerator's current stream, for the caller to
            synchronise. Else all copies are queued together and waited for once.
        type_check: refuse values that are neither tensors nor of a plain type; else copy them deeply.

    Raises:
        CompanionMismatch: keys, lengths, kinds, sizes or dtypes differ; names the path. torch casts and broadcasts.
        UnexpectedValue: a value of another type, and `type_check` is on.

    """
    check_companion(state_dict, copy_state_dict)
    if type_check:
        check_types(state_dict)
    copied: dict[str, Any] = iterate_state_dict(
        state_dict,
        _identity_func,
        _identity_func,
        _identity_func,
        companion_obj=copy_state_dict,
        type_check=type_check,
        non_blocking=True,
    )
    if not non_blocking:
        _await_copies(state_dict, copy_state_dict)
    return copied


def create_cpu_state_dict(
    state_dict: dict[str, Any], pin_memory: bool = False, share_memory: bool = False
) -> dict[str, Any]:
    """
    Make a companion: the same nesting, with a new tensor on the CPU for each tensor, its values undefined.

    Every tensor has memory of its own; torch's hands back 0-dim DTensors themselves, and leaves 0-dim tensors out of
    shared and pinned memory. Other values are copied deeply.

    Args:
        state_dict: the tree to be copied from later; never changed.
        pin_memory: in page-locked memory. Together with `share_memory` this registers each tensor's memory with the
            driver, once, which is slow, and takes it back when the memory is freed.
        share_memory: in memory that other processes can map.

    Raises:
        RuntimeError: `pin_memory`, and there is no accelerator (AssertionError together with `share_memory`); these
            are torch's own errors.
        PinningRefused: the driver will not, or the accelerator cannot, pin shared memory.

    """

    def plain(obj: torch.Tensor) -> torch.Tensor:
        return _new_memory(obj, pin_memory=pin_memory, share_memory=share_memory)

    def tensor_func(obj: torch.Tensor, pg: ProcessGroup | None, device: torch.device | None, _: Any) -> torch.Tensor:
        del pg, device
        return plain(obj)

    def dtensor_func(obj: Any, pg: ProcessGroup | None, device: torch.device | None, _: Any) -> Any:
        del pg, device
        local = plain(obj._local_tensor)
        return type(obj)(local, obj._spec, requires_grad=False)

    def sharded_tensor_func(obj: Any, pg: ProcessGroup | None, device: torch.device | None, _: Any) -> Any:
        del pg, device
        return _sharded_like(obj, [plain(shard.tensor) for shard in obj.local_shards()])

    with torch.no_grad():
        made: dict[str, Any] = iterate_state_dict(
            state_dict, sharded_tensor_func, dtensor_func, tensor_func, type_check=False
        )
    return made


def check_state_dict_similarity(state_dict: dict[str, Any], compared_state_dict: dict[str, Any]) -> bool:
    """
    Say whether each tensor of one tree could be copied as it is into the other: nesting, kinds, sizes and dtypes.

    Nothing is changed; torch's copies the first tree into the second while it compares, and does not look at DTensors
    and ShardedTensors at all.
    """
    try:
        check_companion(state_dict, compared_state_dict)
    except CompanionMismatch:
        return False
    return True


def _new_memory(obj: torch.Tensor, *, pin_memory: bool, share_memory: bool) -> torch.Tensor:
    # A counter that nobody has copied to yet reads as zero; other values stay undefined.
    blank = torch.zeros if obj.dim() == 0 else torch.empty
    made = blank(obj.size(), dtype=obj.dtype, device="cpu")
    has_bytes = obj.numel() > 0  # else there is nothing to pin
    if share_memory:
        made.share_memory_()  # type: ignore[no-untyped-call]  # torch's is
        if pin_memory and has_bytes:
            _register(made)
        return made
    return made.pin_memory() if pin_memory and has_bytes else made


def _register(tensor: torch.Tensor) -> None:
    """Pin memory that exists already, until it is freed."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type != "cuda":
        raise PinningRefused(
            f"memory cannot be both pinned and shared on {accelerator.type}",
            hint="ask create_cpu_state_dict for pin_memory or for share_memory",
        )
    # Raises where there is no CUDA; is HIP's under ROCm.
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's is
    storage = tensor.untyped_storage()
    status = int(driver.cudaHostRegister(storage.data_ptr(), storage.nbytes(), _PORTABLE))
    if status != 0:
        raise PinningRefused(
            f"the driver would not pin {storage.nbytes()} bytes of shared memory (CUDA error {status})",
            hint="raise the limit of locked memory (ulimit -l), or go without pin_memory",
        )
    # Tied to the memory, not to the tensor, of which views may outlive it. At exit the driver lets go by itself.
    weakref.finalize(storage, driver.cudaHostUnregister, storage.data_ptr()).atexit = False


def _sharded_like(obj: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a ShardedTensor of the same layout over other local tensors, which are on the CPU."""
    if not tensors:
        return obj  # it holds no memory
    from torch.distributed._shard.sharded_tensor.shard import Shard  # noqa: PLC0415 - loaded, as there is one

    metadata = copy.deepcopy(obj.metadata())
    metadata.tensor_properties.pin_memory = tensors[0].is_pinned()
    metadata.tensor_properties.requires_grad = False
    shards = [Shard(t, copy.deepcopy(s.metadata)) for t, s in zip(tensors, obj.local_shards(), strict=True)]
    for each in [*metadata.shards_metadata, *(shard.metadata for shard in shards)]:
        each.placement._device = torch.device("cpu")
    return type(obj)._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=obj._process_group, init_rrefs=obj._init_rrefs
    )


def _await_copies(*trees: Any) -> None:
    """Wait for what is queued on the current streams of all accelerators that hold tensors of the trees."""
    for device in {tensor.device for tree in trees for tensor in _local_tensors(tree)}:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()


def _local_tensors(tree: Any) -> Iterator[torch.Tensor]:
    if is_sharded_tensor(tree):
        yield from (shard.tensor for shard in tree.local_shards())
    elif is_dtensor(tree):
        yield tree._local_tensor
    elif isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _local_tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _local_tensors(value)
