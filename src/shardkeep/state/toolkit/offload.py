"""
State dicts in host memory: moved there, or copied into companions that are made once and used again.

Companions may be pinned, so that accelerators copy into them without waiting, or shared, so that another process sees
them, or both.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shardkeep.errors import StateError
from shardkeep.state.toolkit.iterate import (
    CompanionMismatch,
    _identity_func,
    check_companion,
    check_types,
    iterate_state_dict,
)
from shardkeep.state.toolkit.recognise import is_dtensor, is_sharded_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
