"""
State dicts in host memory: moved there, or copied into companions that are made once and reused.

A companion is a state dict of the same nesting whose tensors receive the values. It must fit exactly: a copy never casts or
broadcasts. The functions have torch's names and arguments, and never change the state dict they read.
"""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from shardkeep.errors import BadValue, CompanionMismatch, PinningRefused
from shardkeep.state.flatten import get_element, items_of, leaves_of, map_leaves
from shardkeep.state.leaves import (
    TreePath,
    copy_bits,
    is_dtensor,
    is_sharded_tensor,
    overlaps_itself,
    path_name,
    synchronize_devices,
    wait_tensor,
)

LeafFunc = Callable[[Any, "dist.ProcessGroup | None", "torch.device | None", Any], Any]
"""Takes a tensor, the process group, the device and the companion (or None); returns what replaces the tensor."""

_PLAIN_VALUES: Final = (int, float, str, bytes, io.BytesIO, type(None))
_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for the contexts of all devices


def iterate_state_dict(
    iter_object: Any,
    sharded_tensor_func: LeafFunc,
    dtensor_func: LeafFunc,
    tensor_func: LeafFunc,
    *,
    pg: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    cpu_offload: bool = False,
    companion_obj: Any = None,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
    non_blocking: bool = True,
) -> Any:
    """
    Return a tree in which each tensor is replaced by the result of the function for its kind.

    Results are copied into the tensors of `companion_obj`, a tree of the same nesting (else `CompanionMismatch`), or, with
    `cpu_offload`, moved to the CPU. With `non_blocking`, copies into companions are only queued on the accelerator's
    current stream. Only `ranks_only` (of `pg`; empty for all ranks) get the result; the others also call the functions,
    and get an empty dict (None if the root is no dict). With `type_check`, values other than tensors, int, float, str,
    bytes, BytesIO and None are a `BadValue`, else they are copied deeply.
    """
    if companion_obj is not None:
        _check_companion(iter_object, companion_obj, (), leaves=False)
    rank = dist.get_rank(pg) if dist.is_available() and dist.is_initialized() else 0
    wanted = not ranks_only or rank in ranks_only

    def change(path: TreePath, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if type_check:
                check_plain_types(value, path)
            return value if isinstance(value, _PLAIN_VALUES) or not wanted else copy.deepcopy(value)
        companion = None if companion_obj is None else get_element(companion_obj, path)
        if companion_obj is not None and companion is None:  # the functions could not tell it from no companion
            check_leaf(value, None, path)
        func = sharded_tensor_func if is_sharded_tensor(value) else dtensor_func if is_dtensor(value) else tensor_func
        made = func(wait_tensor(value), pg, device, companion)
        if not wanted:
            return {} if isinstance(made, dict) else None
        if not isinstance(made, torch.Tensor):
            return made
        if companion is not None:
            check_leaf(made, companion, path)
            with torch.no_grad():
                for source, target in zip(local_tensors(made), local_tensors(companion), strict=True):
                    copy_bits(target, source, non_blocking=non_blocking)
            return companion
        return made.to(torch.device("cpu")) if cpu_offload else made

    made = map_leaves(iter_object, change, _opens)  # torch returns plain dicts
    if wanted or isinstance(iter_object, torch.Tensor):
        return made
    return {} if isinstance(iter_object, dict) else None


def _opens(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))


def check_plain_types(tree: Any, path: TreePath = ()) -> None:
    """Raise `BadValue`, naming the path, for a value that is neither a tensor nor of a plain type."""
    for at, value in leaves_of(tree, _opens, path):
        if not isinstance(value, (torch.Tensor, *_PLAIN_VALUES)):
            name = path_name(at)
            why = f"{name!r} is a {_name(value)}, expected a tensor, int, float, str, bytes or None"
            raise BadValue(why, hint="remove it from the state dict, or pass type_check=False to copy it", key=name)


def _identity_func(obj: Any, pg: dist.ProcessGroup | None, device: torch.device | None, companion_obj: Any) -> Any:
    del pg, device, companion_obj
    return obj


_UNCHANGED: Final = (_identity_func,) * 3


def offload_state_dict_to_cpu(
    state_dict: dict[str, Any], *, ranks_only: tuple[int, ...] = (), type_check: bool = True
) -> dict[str, Any]:
    """Return the state dict with its tensors, or their local parts, on the CPU; those that are there are not copied."""
    moved: dict[str, Any] = iterate_state_dict(
        state_dict, *_UNCHANGED, cpu_offload=True, ranks_only=ranks_only, type_check=type_check
    )
    return moved


def copy_state_dict(
    state_dict: dict[str, Any], copy_state_dict: dict[str, Any], non_blocking: bool = False, type_check: bool = True
) -> dict[str, Any]:
    """
    Copy all tensors into those of a companion, and return a tree of the companion's tensors.

    Other values in the result are those of `state_dict`. The whole companion is checked before the first copy: keys,
    lengths, kinds, sizes and dtypes must be the same; torch casts and broadcasts. With `non_blocking`, this returns while
    copies are still queued on the accelerator's current stream, which the caller must synchronise.
    """
    _check_companion(state_dict, copy_state_dict, (), leaves=True)
    if type_check:
        check_plain_types(state_dict)
    copied: dict[str, Any] = iterate_state_dict(
        state_dict, *_UNCHANGED, companion_obj=copy_state_dict, type_check=type_check, non_blocking=True
    )
    if not non_blocking:
        leaves = [leaf for tree in (state_dict, copy_state_dict) for _, leaf in leaves_of(tree, _opens)]
        synchronize_devices(each for leaf in leaves if isinstance(leaf, torch.Tensor) for each in local_tensors(leaf))
    return copied


def local_tensors(value: Any) -> list[torch.Tensor]:
    if is_sharded_tensor(value):
        return [wait_tensor(shard.tensor) for shard in value.local_shards()]
    finished = wait_tensor(value)
    return [finished._local_tensor if is_dtensor(value) else finished]


def create_cpu_state_dict(
    state_dict: dict[str, Any], pin_memory: bool = False, share_memory: bool = False
) -> dict[str, Any]:
    """
    Return a companion: the same nesting, with a new CPU tensor of undefined values for each tensor.

    Every tensor gets memory of its own; torch returns 0-dim DTensors themselves, and leaves 0-dim tensors out of shared
    and pinned memory. Other values are copied deeply. If memory is page-locked (`pin_memory`) and also shared between
    processes (`share_memory`), each tensor is registered with the driver, which is slow, or raises `PinningRefused`.
    """

    def plain(obj: torch.Tensor) -> torch.Tensor:
        # A counter reads as zero until it is copied to; other values stay undefined.
        blank = torch.zeros if obj.dim() == 0 else torch.empty
        made = blank(obj.size(), dtype=obj.dtype, device="cpu")
        pin = pin_memory and obj.numel() > 0
        if share_memory:
            made.share_memory_()  # type: ignore[no-untyped-call]  # torch's is
            if pin:
                register_pinned(made)
            return made
        return made.pin_memory() if pin else made

    with torch.no_grad():
        made: dict[str, Any] = iterate_state_dict(
            state_dict,
            lambda obj, *_: sharded_tensor_like(obj, [plain(shard.tensor) for shard in obj.local_shards()]),
            lambda obj, *_: type(obj)(plain(obj._local_tensor), obj._spec, requires_grad=False),
            lambda obj, *_: plain(obj),
            type_check=False,
        )
    return made


def check_state_dict_similarity(state_dict: dict[str, Any], compared_state_dict: dict[str, Any]) -> bool:
    """Return True if each tensor of one tree could be copied as it is into the other; nothing is copied."""
    try:
        _check_companion(state_dict, compared_state_dict, (), leaves=True)
    except CompanionMismatch:
        return False
    return True


def register_pinned(tensor: torch.Tensor) -> None:
    """Pin the existing memory of a tensor, until that memory is freed."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type != "cuda":
        raise PinningRefused(
            f"memory cannot be both pinned and shared on {accelerator.type}",
            hint="ask create_cpu_state_dict for pin_memory or for share_memory",
        )
    # Raises without CUDA; is HIP's under ROCm.
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's is
    storage = tensor.untyped_storage()
    status = int(driver.cudaHostRegister(storage.data_ptr(), storage.nbytes(), _PORTABLE))
    if status != 0:
        raise PinningRefused(
            f"the driver refused to pin {storage.nbytes()} bytes of shared memory (CUDA error {status})",
            hint="raise the limit of locked memory (ulimit -l), or leave pin_memory out",
        )
    # Tied to the memory and not to the tensor, because views may outlive the tensor. At exit the driver unpins by itself.
    weakref.finalize(storage, driver.cudaHostUnregister, storage.data_ptr()).atexit = False


def sharded_tensor_like(obj: Any, tensors: list[torch.Tensor]) -> Any:
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


def _check_companion(value: Any, companion: Any, path: TreePath, *, leaves: bool) -> None:
    """Raise `CompanionMismatch` unless keys and lengths match and, with `leaves`, each leaf can be copied."""
    if not _opens(value):
        if leaves:
            check_leaf(value, companion, path)
        return
    if not isinstance(companion, Mapping if isinstance(value, dict) else (list, tuple)):
        _refuse_companion(path, f"is a {_name(value)}, its companion a {_name(companion)}")
    ours, theirs = dict(items_of(value)), dict(items_of(companion))
    if ours.keys() != theirs.keys():
        pairs = (ours, theirs), (theirs, ours)
        missing, extra = ([path_name((*path, key)) for key in one if key not in other] for one, other in pairs)
        _refuse_companion(path, f"has other keys than its companion; missing there: {missing}, only there: {extra}")
    for key, item in ours.items():
        _check_companion(item, theirs[key], (*path, key), leaves=leaves)


def check_leaf(value: Any, companion: Any, path: TreePath) -> None:
    """Raise `CompanionMismatch` unless `value` can be copied into `companion` bit for bit."""
    if not isinstance(value, torch.Tensor):
        if isinstance(companion, (torch.Tensor, Mapping)):
            _refuse_companion(path, f"is a {_name(value)}, its companion {_form(companion)}")
        return
    ours, theirs = _form(value), _form(companion)
    if ours != theirs or (is_dtensor(value) and not same_layout(value, companion)):
        mesh = " over another mesh" if ours == theirs else ""
        _refuse_companion(path, f"is {ours}, its companion {theirs}{mesh}")
    for tensor in local_tensors(companion):
        if tensor.is_meta:
            _refuse_companion(path, "has a companion on the meta device, which holds no values")
        if tensor.layout is torch.strided and overlaps_itself(tensor):
            _refuse_companion(path, "has a companion that is expanded: several of its elements share memory")


def _form(obj: Any) -> str:
    """Describe what a tensor and its companion must have in common."""
    if is_dtensor(obj):
        kind = f"a DTensor sharded as {obj.placements}, local part {tuple(obj._local_tensor.shape)},"
    elif is_sharded_tensor(obj):
        shards = [(tuple(shard.metadata.shard_offsets), tuple(shard.tensor.shape)) for shard in obj.local_shards()]
        kind = f"a ShardedTensor with local shards (offsets, size) {shards},"
    elif isinstance(obj, torch.Tensor):
        kind = "a Tensor"
    else:
        return f"a {_name(obj)}"
    return f"{kind} of {obj.dtype} and size {tuple(obj.size())}"


def same_layout(a: Any, b: Any) -> bool:
    """Return True if two DTensors are sharded in the same way over the same ranks."""
    same_mesh = a.device_mesh is b.device_mesh or torch.equal(a.device_mesh.mesh, b.device_mesh.mesh)
    same_parts = a._local_tensor.shape == b._local_tensor.shape
    return a.size() == b.size() and a.placements == b.placements and same_mesh and same_parts


def _refuse_companion(path: TreePath, what: str) -> NoReturn:
    name = path_name(path)
    raise CompanionMismatch(f"{name!r} {what}", hint="make a new one: create_cpu_state_dict(state_dict)", key=name)


def _name(obj: Any) -> str:
    return type(obj).__qualname__
