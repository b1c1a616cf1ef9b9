"""
A snapshot of a state: a deep copy of it whose tensors are in host memory, made in two steps.

`prepare` copies everything but the tensors' values, and finds memory for those; it runs where the state is at rest,
on the caller's thread. `Snapshot.fill` copies the values, on any thread and any stream. Tensors that share memory in
the state share it in the snapshot, and none brings more than its own bytes. The state itself is never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from shardkeep.errors import StateError
from shardkeep.stage.aliases import Geometry, Run, geometry, runs
from shardkeep.stage.host import HostMemory, Place
from shardkeep.stage.leaves import open_tensor
from shardkeep.state.toolkit.bits import copy_bits
from shardkeep.state.toolkit.recognise import Path, spell

_tensor_type: Final[Any] = torch.Tensor
_DATA: Final[Any] = _tensor_type.data.__get__


class Uncopyable(StateError, TypeError, RuntimeError):
    """A value of the state cannot be copied; names its path."""


@dataclass
class Snapshot:
    """A copy of a state, and what is still to be done for it to hold the state's values."""

    tree: Any = None
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Targets in host memory, and where their values come from. Held until they are there."""
    devices: set[torch.device] = field(default_factory=set)
    """The accelerators that work for this snapshot is queued on, or will be."""

    def fill(self, *, non_blocking: bool = True, device: torch.device | None = None) -> None:
        """
        Copy the values: all of them, or those of one device.

        Args:
            non_blocking: queue copies on the current streams of the accelerators and return; the values are there
                once those have been synchronised.
            device: copy from this device alone.

        """
        # Which also lets a copy be filled that was made in this mode, on another thread.
        with torch.inference_mode():
            for target, source in self.copies:
                if device is None or source.device == device:
                    copy_bits(target, source, non_blocking=non_blocking)

    def wait(self) -> None:
        """Wait for what is queued on the current streams of this snapshot's accelerators."""
        for device in self.devices:
            torch.accelerator.current_stream(device).synchronize()


def prepare(state: Any, memory: HostMemory) -> Snapshot:
    """
    Copy a state, all but the values of its tensors.

    Raises:
        Uncopyable: a value that can be copied neither as a tensor nor by `copy.deepcopy`.

    """
    copying = _Copying(memory)
    with torch.no_grad():
        copying.add(list(tensors_in(state)))
        try:
            copying.snapshot.tree = copying.deepcopy(state)
        except Exception as error:
            path, value = _culprit(state)
            raise Uncopyable(
                f"{spell(path)!r} holds a {type(value).__qualname__}, which cannot be copied: {error}",
                hint="take it out of the state, or give it a __deepcopy__",
                key=spell(path),
            ) from error
    return copying.snapshot


class _Copying(TorchFunctionMode):
    """Lets `copy.deepcopy` find a place in host memory for each tensor it meets, inside other objects too."""

    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self.snapshot = Snapshot()
        self._memory = memory
        self._memo: dict[int, Any] = {}
        # What the memo knows by id must not be freed, and its id given to another.
        self._alive: list[torch.Tensor] = []
        self._bare_parameter: Any = None

    def deepcopy(self, value: Any) -> Any:
        """Copy anything; an object that was copied already is that copy again."""
        with self:
            return copy.deepcopy(value, self._memo)

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Find memory for tensors, which share it where they do so now."""
        self._alive += tensors
        opened = [open_tensor(tensor) for tensor in tensors]
        parts = [part for each in opened for part in each.parts]
        self.snapshot.devices |= {part.device for part in parts if part.device.type != "cpu"}
        made = self._place(parts)
        for tensor, each in zip(tensors, opened, strict=True):
            self._memo[id(tensor)] = each.rebuild([made(part) for part in each.parts])
        for tensor in tensors:
            self._copy_attributes(tensor, self._memo[id(tensor)])

    def _add_bare(self, data: torch.Tensor) -> torch.Tensor:
        """Copy the data of a parameter inside an object; what is copied of it becomes a parameter again."""
        self._bare_parameter = None
        self._add_at_once(data)
        made: torch.Tensor = self._memo[id(data)]
        return made

    def _add_at_once(self, tensor: torch.Tensor) -> None:
        """Copy a tensor inside an object, values and all: the object may look at them while it is being copied."""
        before = len(self.snapshot.copies)
        self.add([tensor])
        for target, source in self.snapshot.copies[before:]:
            copy_bits(target, source)
        del self.snapshot.copies[before:]

    def _place(self, parts: list[torch.Tensor]) -> Any:
        found = list(runs(part for part in parts if part.numel()))
        views: dict[Geometry, torch.Tensor] = {}
        for run, place in zip(found, self._memory.take([run.nbytes for run in found]), strict=True):
            self.snapshot.copies.append(_copy_of(run, place))
            views |= {geometry(tensor): _view(tensor, run, place) for tensor in run.tensors}

        def made(part: torch.Tensor) -> torch.Tensor:
            if part.numel() == 0:
                return torch.empty_like(part, device="cpu", requires_grad=False).as_subclass(torch.Tensor)
            return views[geometry(part)]

        return made

    def _copy_attributes(self, tensor: torch.Tensor, made: Any) -> None:
        """Copy what users hung on a plain tensor; what cannot be copied stays what it is."""
        if not isinstance(made, torch.Tensor) or made.layout is not torch.strided or type(made) is not torch.Tensor:
            return
        for name, value in vars(tensor).items():
            try:
                setattr(made, name, self.deepcopy(value))
            except Exception:  # noqa: BLE001 - any object may hang there, and none of them is saved
                setattr(made, name, value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor = args[0]
            if id(tensor) not in self._memo:
                self._add_at_once(tensor)
            return self._memo[id(tensor)]
        if func is torch.Tensor.clone and args[0] is self._bare_parameter:
            return self._add_bare(args[0])
        result = func(*args, **(kwargs or {}))
        if func == _DATA:
            # How a parameter copies itself: it clones this, and makes a parameter of it.
            self._bare_parameter = result if isinstance(args[0], torch.nn.Parameter) else None
        if isinstance(result, torch.Tensor) and result.device.type not in ("cpu", "meta"):
            self.snapshot.devices.add(result.device)  # an object copied its own tensor there
        return result


def _copy_of(run: Run, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the bytes of a run go, and where they come from."""
    tensor = run.tensors[0]
    if not run.whole:
        return _view(tensor, run, place), tensor.detach()
    row = ((run.nbytes,), (1,))
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), run.start, *row)
    target = torch.empty(0, dtype=torch.uint8, device="cpu").set_(place.storage, place.offset, *row)
    return target, source


def _view(tensor: torch.Tensor, run: Run, place: Place) -> torch.Tensor:
    """Return what stands for a tensor of the run in host memory."""
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")  # wherever the user has tensors made by default
    size = tensor.itemsize
    if not run.whole:
        strides = torch.empty(tensor.shape, device="meta").stride()
        return made.set_(place.storage, place.offset // size, tensor.shape, strides)
    offset = place.offset + int(tensor.storage_offset()) * size - run.start
    return made.set_(place.storage, offset // size, tensor.shape, tensor.stride())


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Give the tensors in nested mappings, lists and tuples, each once; `seen` are the ids of values to leave out."""
    seen = set() if seen is None else seen
    if not isinstance(value, (torch.Tensor, Mapping, list, tuple)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    for each in value.values() if isinstance(value, Mapping) else value:
        yield from tensors_in(each, seen)


def _culprit(value: Any, path: Path = ()) -> tuple[Path, Any]:
    """Find the innermost value that cannot be copied."""
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    for key, child in children:
        try:
            _Copying(HostMemory()).deepcopy(child)  # a new one: the other remembers what it has begun
        except Exception:  # noqa: BLE001 - whatever it raises, it is where the failure comes from
            return _culprit(child, (*path, key))
    return path, value
