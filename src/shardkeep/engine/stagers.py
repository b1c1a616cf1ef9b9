"""
Copies of a whole state, which training can no longer change: the snapshot that our own writers save from, and torch's stagers.

`StateSnapshot` is taken as `sk.async_save` takes it. A stager makes a copy in host memory, for writers and planners that read
the values there: `prepare_copy` copies everything except the tensors' values, and finds memory for those; it runs on the caller's
thread. `StateCopy.fill` copies the values, on any thread and any stream. Tensors that share memory in the state share it in the
copy. A view takes its own bytes only, unless views interleave, as columns of one matrix do: then they are copied together, with
the bytes between them. One stager serves any number of saves: memory is used again when no copy uses it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import deprecated

from shardkeep.engine.pools import HostSlot, StoragePool, staging_memory
from shardkeep.engine.process.client import writer_manager
from shardkeep.engine.queue import SaveHandle
from shardkeep.engine.report import Phases, SaveEvents
from shardkeep.engine.snapshot import take_snapshot
from shardkeep.engine.staging import BackgroundWrite
from shardkeep.engine.tensors import Geometry, MemoryRun, geometry, runs
from shardkeep.engine.writer import FileJob
from shardkeep.errors import CheckpointError, StateError
from shardkeep.events import Event
from shardkeep.format.pickles import collector_paused
from shardkeep.layouts.torch_values import _copy_checkpointable_tensor_metadata, _is_checkpointable_tensor
from shardkeep.options import Options
from shardkeep.state.flatten import map_leaves
from shardkeep.state.leaves import TreePath, copy_bits, is_dtensor, is_sharded_tensor, path_name, wait_tensor
from shardkeep.state.offload import check_plain_types, sharded_tensor_like
from shardkeep.storage.base import Store

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class OpenedTensor:
    """
    A tensor of any kind, taken apart into plain ones.

    A DTensor is its local tensor, a ShardedTensor its local shards, a wrapper subclass what it wraps; any of these may be one of
    the others. The rebuilt tensor never requires a gradient.
    """

    parts: Tensors
    """Strided tensors with memory of their own."""
    rebuild: Callable[[Tensors], Any]
    """Rebuilds the tensor over one new tensor for each part."""


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

    def rebuild(made: Tensors) -> torch.Tensor:
        rebuilt = made[0] if plain else made[0].as_subclass(type(tensor))
        if _is_checkpointable_tensor(tensor):
            rebuilt = rebuilt.detach()  # an object of its own, for its attributes
            _copy_checkpointable_tensor_metadata(tensor, rebuilt)
        return rebuilt

    return OpenedTensor([tensor], rebuild)


def _open_all(inner: list[Any], rebuild: Callable[[Tensors], Any]) -> OpenedTensor:
    opened = [open_tensor(each) for each in inner]

    def assemble(made: Tensors) -> Any:
        rest = iter(made)
        return rebuild([each.rebuild([next(rest) for _ in each.parts]) for each in opened])

    return OpenedTensor([part for each in opened for part in each.parts], assemble)


def _open_wrapper(tensor: Any) -> OpenedTensor:
    names, context = tensor.__tensor_flatten__()
    fields = {name: getattr(tensor, name) for name in names}
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}

    def wrap(made: Tensors) -> Any:
        inner = fields | dict(zip(tensors, made, strict=True))
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())

    return _open_all(list(tensors.values()), wrap)


def dtensor_over(local: torch.Tensor, spec: Any, kind: Any) -> Any:
    """Return a DTensor, or one of a subclass, over a local tensor."""
    # Made from a blank tensor without an offset: torch takes a DTensor with an offset for one with memory, and crashes when it
    # pickles it.
    blank = local.new_empty(()).expand(local.shape)
    made = kind(blank, spec, requires_grad=False)
    made._local_tensor = local
    return made


_tensor_type: Final[Any] = torch.Tensor
_DATA: Final[Any] = _tensor_type.data.__get__


class Uncopyable(StateError, TypeError, RuntimeError):
    """A value of the state cannot be copied; names its path."""


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
        """Wait for what is queued on the current streams of these accelerators."""
        for device in self.devices:
            torch.accelerator.current_stream(device).synchronize()


def prepare_copy(state: Any, memory: StoragePool) -> StateCopy:
    """Copy a state, all but the values of its tensors."""
    copying = _Copying(memory)
    with torch.no_grad():
        copying.add(list(tensors_in(state)))
        try:
            copying.state_copy.tree = copying.deepcopy(state)
        except Exception as error:
            raise _uncopyable(state, (), error) from error
    return copying.state_copy


class _Copying(TorchFunctionMode):
    """Makes `copy.deepcopy` put each tensor it meets into host memory, also inside other objects."""

    def __init__(self, memory: StoragePool) -> None:
        super().__init__()
        self.state_copy = StateCopy()
        self._memory = memory
        self._memo: dict[int, Any] = {}
        # The memo identifies objects by id, so they must stay alive.
        self._alive: list[torch.Tensor] = []
        self._bare_parameter: Any = None

    def deepcopy(self, value: Any) -> Any:
        """Copy anything; an object that was copied before gives the same copy."""
        with self:
            return copy.deepcopy(value, self._memo)

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
    """Return the target and the source of a run of bytes."""
    tensor = run.tensors[0]
    if not run.whole:
        return _view(tensor, run, place), tensor.detach()
    row = ((run.nbytes,), (1,))
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), run.start, *row)
    target = torch.empty(0, dtype=torch.uint8, device="cpu").set_(place.storage, place.offset, *row)
    return target, source


def _view(tensor: torch.Tensor, run: MemoryRun, place: HostSlot) -> torch.Tensor:
    """Return the copy of a tensor of the run, in host memory."""
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
    if not isinstance(value, (torch.Tensor, Mapping, list, tuple)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    for each in value.values() if isinstance(value, Mapping) else value:
        yield from tensors_in(each, seen)


def _uncopyable(value: Any, path: TreePath, error: Exception) -> Uncopyable:
    path, value = _find_uncopyable(value, path)
    return Uncopyable(
        f"{path_name(path)!r} holds a {type(value).__qualname__}, which cannot be copied: {error}",
        hint="take it out of the state, or give it a __deepcopy__",
        key=path_name(path),
    )


def _find_uncopyable(value: Any, path: TreePath) -> tuple[TreePath, Any]:
    """Find the innermost value that cannot be copied."""
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    for key, child in children:
        try:
            _Copying(StoragePool()).deepcopy(child)  # a new one, without the memo of the failed attempt
        except Exception:  # noqa: BLE001 - whatever it raises, the failure comes from this child
            return _find_uncopyable(child, (*path, key))
    return path, value


StateDict = dict[str, Any]


class _Place(NamedTuple):
    """Stands in a tree for a tensor of the snapshot."""

    number: int


class _Silent(SaveEvents):
    """Events that no listener gets."""

    def _emit(self, event: type[Event], /, **figures: Any) -> None:
        del event, figures


class StateSnapshot:
    """
    A state at the time of a call, to be written in the background.

    Tensors are copied on their devices, and to the engine's host memory. What finds no room there is read from the caller's
    memory, and may be changed when `handle.staged` is done. Objects are copied, with the tensors inside them.
    """

    def __init__(
        self, state: Mapping[str, Any], where: str, *, in_process: bool, thread: ThreadPoolExecutor | None = None
    ) -> None:
        """Take the snapshot; on `thread`, as far as it is in host memory. `in_process`: the writer process will write it."""
        self.handle: SaveHandle[Any] = SaveHandle(where)
        self._in_process = in_process
        self._opened: list[OpenedTensor] = []
        options, memory = Options(), writer_manager().memory() if in_process else staging_memory()
        copying = _Copying(StoragePool())  # of objects, and of tensors inside them
        with torch.no_grad(), collector_paused():
            self._tree = map_leaves(state, lambda path, leaf: self._copied(path, leaf, copying), _is_opened)
            copying.state_copy.wait()
            parts = [part for each in self._opened for part in each.parts if part.numel()]
            resolved = [part.detach().resolve_conj().resolve_neg() for part in parts]
            self._snapshot = take_snapshot(resolved, staging="auto", optimizers=())
        silent = _Silent(Phases(), rank=0, where=where)
        self._background = BackgroundWrite(self._snapshot, self.handle, memory, options, silent)
        self._copying: Future[bool] = Future()
        """Of what is in host memory; its result is whether some of it is still the caller's."""
        try:
            if thread is not None and self._snapshot.on_host:
                self._copying = thread.submit(self._background.copy_on_host)
            else:
                self._copying.set_result(self._background.copy_on_host())
        except BaseException:
            with self._background.releasing():
                raise

    def _copied(self, path: TreePath, leaf: Any, copying: _Copying) -> Any:
        if isinstance(leaf, torch.Tensor):
            self._opened.append(open_tensor(leaf))
            return _Place(len(self._opened) - 1)
        try:
            return copying.deepcopy(leaf)
        except Exception as error:
            raise _uncopyable(leaf, path, error) from error

    @property
    def completion(self) -> Future[None]:
        """Done when the state may be changed; fails if the save does before."""
        return self.handle.staged._future

    def wait(self) -> None:
        """Wait until the state may be changed; an interrupted wait cancels the save."""
        if self._copying.result():
            try:
                self.handle.staged.wait_without_raising()
            except BaseException:
                self.handle.cancel()
                raise

    def state(self) -> StateDict:
        """Return the state, in plain dicts and lists; called once, inside `open`."""
        tensors = iter(self._snapshot.tensors)

        def over(part: torch.Tensor) -> torch.Tensor:
            return next(tensors) if part.numel() else part.detach().clone()

        made = [each.rebuild([over(part) for part in each.parts]) for each in self._opened]
        state: StateDict = map_leaves(
            self._tree, lambda _, leaf: made[leaf.number] if type(leaf) is _Place else leaf, _is_plain
        )
        self._tree, self._opened = state, []
        self._snapshot.found.clear()
        return state

    @contextmanager
    def open(self) -> Iterator[None]:
        """Use the snapshot, on one thread; at the end, release it."""
        try:
            wait([self._copying])
            with self._background.releasing(), torch.no_grad():
                self._copying.result()
                for device, event in self._snapshot.events.items():
                    torch.accelerator.set_device_index(device.index)
                    torch.accelerator.current_stream(device).wait_event(event)
                yield
        except BaseException as error:
            self.handle.end_staging(error)
            raise
        finally:
            self.handle.end_staging()
            self.forget()

    def forget(self) -> None:
        """Drop the state: from here on only file jobs hold its tensors."""
        self._tree.clear()

    def write(self, store: Store, jobs: list[FileJob]) -> None:
        """Write files over tensors of the state."""
        if not self._in_process:
            self._background.write(store, jobs)
            return
        options = Options()
        with writer_manager().session(
            store, options.io_threads, wanted=self.handle.wanted, timeout_s=options.timeout_s
        ) as process:
            self._background.write(store, jobs, writer=process)


def _is_opened(value: Any) -> bool:
    """Return whether torch's flattening opens a value: a mapping, or a list that holds tensors or mappings."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(_is_opened(item) or isinstance(item, torch.Tensor) for item in value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (dict, list))


_written: ContextVar[StateSnapshot | None] = ContextVar("snapshot that is being written", default=None)


def current_snapshot() -> StateSnapshot | None:
    """Return the snapshot that the current save writes; None: it writes tensors of the caller's, or of a stager's."""
    return _written.get()


@contextmanager
def writing(snapshot: StateSnapshot | None) -> Iterator[None]:
    """Let the writer that is called inside find the snapshot: a context variable, because users' classes may be between."""
    token = _written.set(snapshot)
    try:
        yield
    finally:
        _written.reset(token)


class StagerClosed(CheckpointError, RuntimeError):
    """A stager was used after it had been closed."""


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
    """
    Copies a state into host memory, on a thread and a stream of its own if so asked.

    Copies from an accelerator come after all work that was queued on the caller's current streams. With
    `use_async_staging` the state must not change before the future is done.
    """

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

    def snapshot(self, state_dict: StateDict, where: str, *, in_process: bool) -> StateSnapshot:
        """Take a snapshot, for a save that needs no copy of the whole state in host memory."""
        self._check_open()
        snapshot = StateSnapshot(state_dict, where, in_process=in_process, thread=self._staging_executor)
        self._staging_future = snapshot.completion
        return snapshot

    def _check_open(self) -> None:
        if self._closed:
            raise StagerClosed("this stager has been closed", hint="make a new one, and close it after the last save")

    def stage(self, state_dict: StateDict, **kwargs: Any) -> StateDict | Future[StateDict]:
        """Return a copy of the state, or a future of one with `use_async_staging`."""
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
        """Wait until the last state that was staged may be changed; raises what staging raised."""
        if self._staging_future is not None:
            self._staging_future.result()

    def close(self) -> None:
        """Wait for what is being staged, then release the thread and the memory."""
        self._closed = True
        if self._staging_executor is not None:
            self._staging_executor.shutdown(wait=True)
        if self._staging_future is not None:
            wait([self._staging_future])
        self._staging_future = None
        self._streams.clear()
        self._state_dict_stager.close()


class BlockingAsyncStager(AsyncStager):
    """
    Copies a state into host memory and returns when it is done; `synchronize_staging` has nothing to wait for.

    A base of `FileSystemWriter`. The copy is of the values at the time of the call, for tensors on the CPU too.
    """

    _synchronize_after_execute: bool = False

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        """
        Choose how states are staged.

        Args:
            cache_staged_state_dict: keep the memory, pinned where there is an accelerator, for the next save. The
                copy of an earlier save is overwritten only if it is no longer used.
            type_check: refuse values other than tensors, numbers, strings, bytes and None.

        """
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self.state_dict_cache: StateDict | None = None
        self._stager: StateDictStager | None = None

    def snapshot(self, state_dict: StateDict, where: str, *, in_process: bool) -> StateSnapshot:
        """Take a snapshot, for a save that needs no copy of the whole state in host memory."""
        if self.type_check:
            check_plain_types(state_dict)
        return StateSnapshot(state_dict, where, in_process=in_process)

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a copy of the state in host memory."""
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
        """Release the memory kept for the next save."""
        self.state_dict_cache = None
        if self._stager is not None:
            self._stager.close()

    def __getstate__(self) -> dict[str, Any]:
        # A writer that is sent to another process leaves the last copy behind.
        return {**self.__dict__, "state_dict_cache": None}
