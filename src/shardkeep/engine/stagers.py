"""
Torch's stagers: copies of a whole state in host memory, which training can no longer change.

Writers and planners of users read the values there; a save without these is staged as by `sk.async_save`.
`prepare_copy` copies all but the tensors' values, on the caller's thread; `StateCopy.fill` copies these, on any thread
and stream. Tensors that share memory share it in the copy. A view takes its own bytes only, unless views interleave, as
columns of one matrix do: they are copied together, with the bytes between. Memory is used again when no copy uses it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import deprecated

from shardkeep.engine.pools import HostSlot, StoragePool
from shardkeep.engine.tensors import Geometry, MemoryRun, geometry, runs
from shardkeep.errors import BrokenProtocol, NotSavable
from shardkeep.layouts.torch_values import _copy_checkpointable_tensor_metadata, _is_checkpointable_tensor
from shardkeep.state.flatten import is_container, items_of
from shardkeep.state.leaves import TreePath, copy_bits, is_dtensor, is_sharded_tensor, path_name, wait_tensor
from shardkeep.state.offload import check_plain_types, sharded_tensor_like


@dataclass(frozen=True)
class OpenedTensor:
    """A tensor of any kind, such as a DTensor over a wrapper subclass, taken apart into plain ones."""

    parts: list[torch.Tensor]
    """Strided tensors with memory of their own."""
    rebuild: Callable[[list[torch.Tensor]], Any]
    """Rebuilds the tensor over one new tensor for each part; it never requires a gradient."""


def open_tensor(tensor: Any) -> OpenedTensor:
    """Take a tensor apart, after waiting for an asynchronous collective that still writes to it."""
    tensor = wait_tensor(tensor)
    if is_sharded_tensor(tensor):
        return _open_all(
            [shard.tensor for shard in tensor.local_shards()], lambda made: sharded_tensor_like(tensor, made)
        )
    if is_dtensor(tensor):
        return _open_all([tensor._local_tensor], lambda made: dtensor_over(made[0], tensor._spec, type(tensor)))
    if is_traceable_wrapper_subclass(tensor):
        return _open_wrapper(tensor)
    if tensor.is_meta:
        return OpenedTensor([], lambda _: tensor.detach())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        # Not one run of memory: torch copies it.
        copied = tensor.detach().to("cpu", copy=True)
        return OpenedTensor([], lambda _: copied)
    plain = type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)

    def rebuild(made: list[torch.Tensor]) -> torch.Tensor:
        rebuilt = made[0] if plain else made[0].as_subclass(type(tensor))
        if _is_checkpointable_tensor(tensor):
            rebuilt = rebuilt.detach()  # an object of its own, for its attributes
            _copy_checkpointable_tensor_metadata(tensor, rebuilt)
        return rebuilt

    return OpenedTensor([tensor], rebuild)


def _open_all(inner: list[Any], rebuild: Callable[[list[torch.Tensor]], Any]) -> OpenedTensor:
    opened = [open_tensor(each) for each in inner]

    def assemble(made: list[torch.Tensor]) -> Any:
        rest = iter(made)
        return rebuild([each.rebuild([next(rest) for _ in each.parts]) for each in opened])

    return OpenedTensor([part for each in opened for part in each.parts], assemble)


def _open_wrapper(tensor: Any) -> OpenedTensor:
    names, context = tensor.__tensor_flatten__()
    fields = {name: getattr(tensor, name) for name in names}
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}

    def wrap(made: list[torch.Tensor]) -> Any:
        inner = fields | dict(zip(tensors, made, strict=True))
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())

    return _open_all(list(tensors.values()), wrap)


def dtensor_over(local: torch.Tensor, spec: Any, kind: Any) -> Any:
    # Made from a blank tensor without an offset: torch takes a DTensor with an offset for one with memory, and crashes when it
    # pickles it.
    blank = local.new_empty(()).expand(local.shape)
    made = kind(blank, spec, requires_grad=False)
    made._local_tensor = local
    return made


_tensor_type: Final[Any] = torch.Tensor
_DATA: Final[Any] = _tensor_type.data.__get__


@dataclass
class StateCopy:
    """A copy of a state, whose tensors may still have to be filled."""

    tree: Any = None
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Targets in host memory and their sources, which are kept alive until they are copied."""
    devices: set[torch.device] = field(default_factory=set)
    """The accelerators that values are copied from."""

    def fill(self, *, non_blocking: bool = True, device: torch.device | None = None) -> None:
        """Copy the values: all of them, or those of one device."""
        # Inference mode also allows to fill a copy that was made in it, on another thread.
        with torch.inference_mode():
            for target, source in self.copies:
                if device is None or source.device == device:
                    copy_bits(target, source, non_blocking=non_blocking)

    def wait(self) -> None:
        for device in self.devices:
            torch.accelerator.current_stream(device).synchronize()


def prepare_copy(state: Any, memory: StoragePool) -> StateCopy:
    """Copy a state, all but the values of its tensors."""
    copier = ObjectCopier(memory)
    with torch.no_grad():
        copier.add(list(tensors_in(state)))
    copier.state_copy.tree = copier.copy(state, ())
    return copier.state_copy


class ObjectCopier(TorchFunctionMode):
    """Copies objects, with each tensor in or inside them in host memory, so that the state they are from may change."""

    def __init__(self, memory: StoragePool | None = None) -> None:
        super().__init__()
        self.state_copy = StateCopy()
        self._memory = memory or StoragePool()
        self._memo: dict[int, Any] = {}
        # The memo identifies objects by id, so they must stay alive.
        self._alive: list[torch.Tensor] = []
        self._bare_parameter: Any = None

    def copy(self, value: Any, path: TreePath) -> Any:
        """Return a copy of a value; an object that was copied before gives the same copy."""
        try:
            with torch.no_grad(), self:
                return copy.deepcopy(value, self._memo)
        except Exception as error:
            path, value = _find_uncopyable(value, path)
            raise NotSavable(
                f"{path_name(path)!r} holds a {type(value).__qualname__}, which cannot be copied: {error}",
                hint="take it out of the state, or give it a __deepcopy__",
                key=path_name(path),
            ) from error

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Find memory for tensors; those that share memory share it in the copy."""
        self._alive += tensors
        opened = [open_tensor(tensor) for tensor in tensors]
        parts = [part for each in opened for part in each.parts]
        self.state_copy.devices |= {part.device for part in parts if part.device.type != "cpu"}
        made = self._place(parts)
        for tensor, each in zip(tensors, opened, strict=True):
            self._memo[id(tensor)] = each.rebuild([made(part) for part in each.parts])

    def _add_at_once(self, tensor: torch.Tensor) -> None:
        """Copy a tensor inside an object with its values, because the object may read them while it is copied."""
        before = len(self.state_copy.copies)
        self.add([tensor])
        for target, source in self.state_copy.copies[before:]:
            copy_bits(target, source)
        del self.state_copy.copies[before:]

    def _place(self, parts: list[torch.Tensor]) -> Any:
        found = list(runs(part for part in parts if part.numel()))
        views: dict[Geometry, torch.Tensor] = {}
        for run, place in zip(found, self._memory.take([run.nbytes for run in found]), strict=True):
            self.state_copy.copies.append(_copy_of(run, place))
            views |= {geometry(tensor): _view(tensor, run, place) for tensor in run.tensors}

        def made(part: torch.Tensor) -> torch.Tensor:
            if part.numel() == 0:
                return torch.empty_like(part, device="cpu", requires_grad=False).as_subclass(torch.Tensor)
            return views[geometry(part)]

        return made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ or (func is torch.Tensor.clone and args[0] is self._bare_parameter):
            tensor = args[0]
            self._bare_parameter = None
            if id(tensor) not in self._memo:
                self._add_at_once(tensor)
            return self._memo[id(tensor)]
        result = func(*args, **(kwargs or {}))
        if func == _DATA:
            # A parameter copies itself by cloning this, and making a parameter of the clone.
            self._bare_parameter = result if isinstance(args[0], torch.nn.Parameter) else None
        if isinstance(result, torch.Tensor) and result.device.type not in ("cpu", "meta"):
            self.state_copy.devices.add(result.device)  # an object has copied its tensor on the device
        return result


def _copy_of(run: MemoryRun, place: HostSlot) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = run.tensors[0]
    if not run.whole:
        return _view(tensor, run, place), tensor.detach()
    row = ((run.nbytes,), (1,))
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), run.start, *row)
    target = torch.empty(0, dtype=torch.uint8, device="cpu").set_(place.storage, place.offset, *row)
    return target, source


def _view(tensor: torch.Tensor, run: MemoryRun, place: HostSlot) -> torch.Tensor:
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")  # whatever the default device is
    size = tensor.itemsize
    if not run.whole:
        strides = torch.empty(tensor.shape, device="meta").stride()
        return made.set_(place.storage, place.offset // size, tensor.shape, strides)
    offset = place.offset + int(tensor.storage_offset()) * size - run.start
    return made.set_(place.storage, offset // size, tensor.shape, tensor.stride())


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples, each once; `seen` has the ids of values to leave out."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif is_container(value):
        for _, each in items_of(value):
            yield from tensors_in(each, seen)


def _find_uncopyable(value: Any, path: TreePath) -> tuple[TreePath, Any]:
    """Return the path of the innermost value that cannot be copied, and that value."""
    for key, child in items_of(value) if is_container(value) else ():
        try:
            with ObjectCopier():
                copy.deepcopy(child)  # without the memo of the failed attempt
        except Exception:  # noqa: BLE001 - whatever it raises, the failure comes from this child
            return _find_uncopyable(child, (*path, key))
    return path, value


StateDict = dict[str, Any]


@runtime_checkable
class AsyncStager(Protocol):
    """
    Makes a copy of a state, from which it is then saved while training goes on.

    `stage` is called on the training thread. If it returns a future, the state must not change before that future is
    done; if not, and `should_synchronize_after_execute` is true, `synchronize_staging` is called before `async_save`
    returns. `close` ends its use.
    """

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `async_save` waits for `synchronize_staging` before it returns."""
        return self._synchronize_after_execute

    def stage(self, state_dict: StateDict) -> Future[StateDict] | StateDict:
        """Return a copy of the state that does not change with it, or a future of one."""
        raise NotImplementedError(f"{type(self).__name__} has no stage method of its own")

    @deprecated(
        "`synchronize_staging` is deprecated: wait for AsyncSaveResponse.staging_completion", category=FutureWarning
    )
    def synchronize_staging(self) -> None:
        """Wait until the state may be changed."""

    def close(self) -> None:
        """Release memory and threads."""


@dataclass
class StagingOptions:
    """How a `DefaultStager` copies. Without an accelerator, memory is not pinned."""

    use_pinned_memory: bool = True
    """Copy into page-locked memory, which accelerators write to at full speed."""
    use_shared_memory: bool = True
    """Copy into memory that another process can map, as process-based saves do."""
    use_async_staging: bool = True
    """Copy on a thread: `stage` returns a future."""
    use_non_blocking_copy: bool = True
    """Queue all copies on the accelerator and wait once, instead of after each."""


class StateDictStager:
    """Copies states into host memory, on the caller's thread and stream."""

    def __init__(self, pin_memory: bool = False, share_memory: bool = False, pin_memory_min_bytes: int = 5) -> None:
        if pin_memory and not torch.accelerator.is_available():
            warnings.warn("pin_memory is ignored: there is no accelerator to pin memory for", stacklevel=2)
            pin_memory = False
        self.pin_memory = pin_memory
        self.share_memory = share_memory
        self.pin_memory_min_bytes = pin_memory_min_bytes
        self._memory = StoragePool(pinned=pin_memory, shared=share_memory, pinned_from=pin_memory_min_bytes)

    def stage(self, state_dict: Any, non_blocking: bool = False) -> Any:
        """Return a deep copy of the state with its tensors in host memory."""
        state_copy = prepare_copy(state_dict, self._memory)
        self._memory.pin()
        state_copy.fill()
        if not non_blocking:
            state_copy.wait()
        return state_copy.tree

    def deepcopy_with_tensor_offload(
        self, x: Any, memo: dict[int, Any] | None = None, _nil: Any = (), non_blocking: bool = False
    ) -> Any:
        """Return a deep copy of anything, its tensors in host memory."""
        if memo is not None and id(x) in memo:
            return memo[id(x)]
        copied = self.stage(x, non_blocking)
        if memo is not None:
            memo[id(x)] = copied
        return copied

    def close(self) -> None:
        """Release the memory that no copy uses."""
        self._memory.release()

    def __reduce__(self) -> Any:
        # Without its memory: a stager in another process starts with none.
        return _unpickled, (self.pin_memory, self.share_memory, self.pin_memory_min_bytes)


def _unpickled(pin_memory: bool, share_memory: bool, pin_memory_min_bytes: int) -> StateDictStager:
    return StateDictStager(pin_memory and torch.accelerator.is_available(), share_memory, pin_memory_min_bytes)


class DefaultStager(AsyncStager):
    """Copies a state into host memory; with `use_async_staging`, on a thread and a stream of its own."""

    def __init__(self, config: StagingOptions = StagingOptions()) -> None:  # noqa: B008 - torch's default, never changed
        self._config = config
        self._state_dict_stager = StateDictStager(
            pin_memory=config.use_pinned_memory and torch.accelerator.is_available(),
            share_memory=config.use_shared_memory,
        )
        self._staging_executor = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardkeep-stage")
            if config.use_async_staging
            else None
        )
        self._streams: dict[torch.device, torch.Stream] = {}
        self._staging_future: Future[Any] | None = None
        self._closed = False

    def lend(self, state_dict: StateDict, staged: Future[Any]) -> ThreadPoolExecutor | None:
        """Let the engine stage a state in place of `stage`; return the thread to copy on, None for the caller's."""
        del state_dict
        self._check_open()
        self._staging_future = staged
        return self._staging_executor

    def _check_open(self) -> None:
        if self._closed:
            raise BrokenProtocol("this stager has been closed", hint="make a new one, and close it after the last save")

    def stage(self, state_dict: StateDict, **kwargs: Any) -> StateDict | Future[StateDict]:
        del kwargs
        self._check_open()
        if self._staging_future is not None and self._staging_future.done():
            self._staging_future = None  # it holds the last copy, whose memory can be used again
        memory = self._state_dict_stager._memory
        state_copy = prepare_copy(state_dict, memory)
        if self._staging_executor is None:
            memory.pin()
            state_copy.fill(non_blocking=self._config.use_non_blocking_copy)
            state_copy.wait()
            staged: StateDict = state_copy.tree
            return staged
        # Recorded on the streams of the caller; the copies wait for these events on their own streams.
        made = {device: torch.accelerator.current_stream(device).record_event() for device in state_copy.devices}
        for device in made.keys() - self._streams.keys():
            self._streams[device] = torch.Stream(device)
        here = torch.accelerator.current_device_index() if made else None
        filling = self._staging_future = self._staging_executor.submit(self._fill, state_copy, made, here)
        return filling

    def _fill(self, state_copy: StateCopy, made: dict[torch.device, torch.Event], here: int | None) -> StateDict:
        """Fill a copy on the staging thread; its sources stay alive until they are copied."""
        self._state_dict_stager._memory.pin()  # here: it takes seconds
        if here is not None:
            # A new thread uses device 0, and would create a context there.
            torch.accelerator.set_device_index(here)
        for device, event in made.items():
            stream = self._streams[device]
            stream.wait_event(event)
            with stream:
                state_copy.fill(non_blocking=self._config.use_non_blocking_copy, device=device)
        state_copy.fill(device=torch.device("cpu"))
        for device in made:
            self._streams[device].synchronize()
        staged: StateDict = state_copy.tree
        return staged

    def synchronize_staging(self) -> None:
        if self._staging_future is not None:
            self._staging_future.result()

    def close(self) -> None:
        self._closed = True
        if self._staging_executor is not None:
            self._staging_executor.shutdown(wait=True)
        if self._staging_future is not None:
            wait([self._staging_future])
        self._staging_future = None
        self._streams.clear()
        self._state_dict_stager.close()


class BlockingAsyncStager(AsyncStager):
    """Copies a state in the call, tensors on the CPU too; `synchronize_staging` has nothing to wait for."""

    _synchronize_after_execute: bool = False
    type_check = False
    state_dict_cache: StateDict | None = None
    _stager: StateDictStager | None = None

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        """
        Choose how states are staged: `cache_staged_state_dict` keeps the memory, pinned where there is an accelerator,
        for the next save; `type_check` refuses values other than tensors, numbers, strings, bytes and None.
        """
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check

    def lend(self, state_dict: StateDict, staged: Future[Any]) -> None:
        """Let the engine stage a state in place of `stage`, on the caller's thread."""
        del staged
        if self.type_check:
            check_plain_types(state_dict)

    def stage(self, state_dict: StateDict) -> StateDict:
        if self.type_check:
            check_plain_types(state_dict)
        if not self.cache_staged_state_dict:
            staged: StateDict = StateDictStager().stage(state_dict)
            return staged
        self.state_dict_cache = None  # or its memory would count as used
        if self._stager is None:
            self._stager = StateDictStager(torch.accelerator.is_available())
        self.state_dict_cache = self._stager.stage(state_dict)
        return self.state_dict_cache

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has waited."""

    def close(self) -> None:
        self.state_dict_cache = None
        if self._stager is not None:
            self._stager.close()

    def __getstate__(self) -> dict[str, Any]:
        # A writer that is sent to another process leaves the last copy behind.
        return {**self.__dict__, "state_dict_cache": None}
