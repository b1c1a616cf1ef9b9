"""
The pieces of a state that is to be saved while training goes on: which are copied at once, and which later.

What lies in host memory is copied in the call, as far as there is room. On an accelerator there are two ways: a copy on
the device, queued in the call; or none in the call, where something keeps the memory from changing until it has been
copied (the step of an optimizer waits, or the caller does). What finds no room in host memory goes that second way too.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from shardkeep.engine.memory import copy_memory
from shardkeep.engine.pools import Arenas, Buffer
from shardkeep.engine.step_barrier import rows_outside_optimizers
from shardkeep.engine.tensors import as_raw, memory_keys, scattered_memory
from shardkeep.format.boxes import strides_of
from shardkeep.storage.buffers import address_of

# Copies of tensors that lie in host memory, into one arena, as far as there is room for them.
#
# What finds no room is left where it is. That should be what an optimizer guards, whose step can wait; and rather few
# large tensors than many small ones.

log = logging.getLogger("shardkeep")

ALIGNMENT = 64
"""Where a copy begins in its arena."""
_SMALL_NBYTES = 64 << 10
"""Up to here a copy keeps the interpreter's lock: who lets go of it for each of a thousand may wait as often for it."""
_PART_NBYTES = 16 << 20
"""Larger copies are shared out between threads in parts of this size."""

_signature = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_small = _signature(ctypes.cast(copy_memory, ctypes.c_void_p).value or 0)

ArenaSlot = tuple[int, int, torch.dtype, torch.Size]
"""A row, where in the arena it begins, and what it is."""


class HostCopyResult(NamedTuple):
    """What was copied, and what was not."""

    arena: Buffer | None
    places: list[ArenaSlot]
    nbytes: int
    """What they take."""
    left: list[int]
    """Rows that found no room."""
    guarded: bool
    """Whether the steps of optimizers keep all of these from changing."""
    refused: bool = False
    """There was no memory, where there should have been some."""


class _Layout(NamedTuple):
    """Where tensors go in an arena; those that are one and the same go to one place."""

    starts: list[int]
    copies: list[tuple[int, int, torch.Tensor]]
    """Where to, how much, and what."""
    nbytes: int


class HostCopy(NamedTuple):
    """Rows of a state that lie in host memory."""

    rows: list[int]
    arenas: Arenas
    threads: int
    optimizers: Sequence[Optimizer]
    """Those whose steps may wait for what is not copied."""

    def copy(self, tensors: Sequence[torch.Tensor], most_nbytes: int) -> HostCopyResult:
        """Copy what fits."""
        rows = self.rows
        sources = [tensors[row] for row in rows]
        keys = memory_keys(sources)
        layout = _lay_out(sources, keys)
        loose: set[int] = set()
        if layout.nbytes > most_nbytes:
            loose = set(rows_outside_optimizers(tensors, rows, self.optimizers))
            fits = _fitting(sources, keys, [row in loose for row in rows], most_nbytes)
            rows = [rows[at] for at in fits]
            sources = [sources[at] for at in fits]
            layout = _lay_out(sources, [keys[at] for at in fits])
        arena = self._arena(layout.nbytes, most_nbytes) if rows else None
        if arena is None:
            loose = loose or set(rows_outside_optimizers(tensors, self.rows, self.optimizers))
            return HostCopyResult(None, [], 0, self.rows, guarded=not loose, refused=bool(rows))
        try:
            _copy_all(layout.copies, arena, self.threads)
            # Now: until somebody asks for tensors, the caller may have given its own another shape.
            dtypes, shapes = [source.dtype for source in sources], [source.shape for source in sources]
            places = list(zip(rows, layout.starts, dtypes, shapes, strict=True))
            left = sorted(set(self.rows).difference(rows)) if len(rows) < len(self.rows) else []
            return HostCopyResult(arena, places, layout.nbytes, left, guarded=loose.isdisjoint(left))
        except BaseException:
            self.arenas.give(arena)
            raise

    def _arena(self, nbytes: int, most_nbytes: int) -> Buffer | None:
        """Take an arena; None where there is no memory for it."""
        try:
            return self.arenas.take(nbytes, most_nbytes)
        except (OSError, MemoryError) as error:
            log.warning("no memory for a copy of %.2f GB of the state: %s", nbytes / 1e9, error)
            return None


def _lay_out(sources: Sequence[torch.Tensor], keys: Sequence[Hashable]) -> _Layout:
    places: dict[Hashable, int] = {}
    starts: list[int] = []
    copies: list[tuple[int, int, torch.Tensor]] = []
    end = 0
    for source, key in zip(sources, keys, strict=True):
        start = places.setdefault(key, end)
        starts.append(start)
        if start == end:
            nbytes = source.nbytes
            copies.append((start, nbytes, source))
            end = -(-(end + nbytes) // ALIGNMENT) * ALIGNMENT  # not by a call: there may be many thousands
    return _Layout(starts, copies, end)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _fitting(
    sources: Sequence[torch.Tensor], keys: Sequence[Hashable], loose: Sequence[bool], most_nbytes: int
) -> list[int]:
    """Return which tensors fit: first what nothing guards, and of that what is small."""
    sizes = [source.nbytes for source in sources]
    taken: set[Hashable] = set()
    fits: list[int] = []
    free = most_nbytes
    for at in sorted(range(len(sources)), key=lambda at: (not loose[at], sizes[at])):
        nbytes = 0 if keys[at] in taken else _aligned(sizes[at])
        if nbytes <= free:
            free -= nbytes
            taken.add(keys[at])
            fits.append(at)
    return sorted(fits)


def _copy_all(copies: list[tuple[int, int, torch.Tensor]], arena: Buffer, threads: int) -> None:
    base = address_of(arena.view)
    large: list[tuple[int, int, int]] = []
    for start, nbytes, source in copies:
        if not source.is_contiguous():
            scattered_memory(source, source.dtype).read(0, nbytes, arena.view[start : start + nbytes])
        elif nbytes <= _SMALL_NBYTES:
            _copy_small(base + start, source.data_ptr(), nbytes)
        elif nbytes < _PART_NBYTES:
            copy_memory(base + start, source.data_ptr(), nbytes)
        else:
            address, target = source.data_ptr(), base + start
            large += [
                (target + at, address + at, min(_PART_NBYTES, nbytes - at)) for at in range(0, nbytes, _PART_NBYTES)
            ]
    if large:
        with ThreadPoolExecutor(threads, thread_name_prefix="shardkeep-stage") as pool:
            for _ in pool.map(lambda copy: copy_memory(*copy), large):
                pass


_ROOM = 0.5
"""How much of the free memory of a device a copy on it may take."""


@dataclass
class DeviceSnapshot:
    """The pieces of a state, some of them by now copies."""

    found: list[torch.Tensor]
    """As they came, or copies on the device; what lies in the arena is put in by `tensors`."""
    events: dict[torch.device, torch.Event] = field(default_factory=dict)
    """On each accelerator: after all that the caller had queued, the copies on the device included."""
    live_nbytes: int = 0
    """What is still the caller's own memory."""
    guarded: bool = True
    """Whether the caller or an optimizer keeps that from changing; else the call must wait until it is copied."""
    arena: Buffer | None = None
    """The host memory that copies lie in."""
    in_arena: list[ArenaSlot] = field(default_factory=list)
    """Which of the pieces do, and where, as what they were at the call."""
    copied_nbytes: int = 0
    """How much of it they take."""
    lent: list[torch.Tensor] = field(default_factory=list)
    """Those in host memory that were not copied. What reads them by address needs this list until it has done so."""
    refused: bool = False
    """Whether that is for want of memory, rather than for a limit."""
    on_host: HostCopy | None = None
    """What `copy_on_host` is to copy."""

    def copy_on_host(self, most_nbytes: int) -> None:
        """
        Copy what lies in host memory, as far as the copy takes no more than so much; the rest is lent.

        Called once, in the call, after `take_pieces`: what that has queued on devices goes on meanwhile.
        """
        if self.on_host is None:
            return
        # In one statement: an arena that an interrupt keeps from being noted here would never be given back.
        self.arena, self.in_arena, self.copied_nbytes, left, guarded, self.refused = self.on_host.copy(
            self.found, most_nbytes
        )
        self.on_host = None  # it knows optimizers
        self.guarded = self.guarded and guarded
        for row in left:
            # A tensor of its own: the caller may give theirs other memory, or another shape, before this one is read.
            self.found[row] = self.found[row].detach()
            self.lent.append(self.found[row])
        self.live_nbytes += sum([tensor.nbytes for tensor in self.lent])

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """
        All pieces; to be emptied by whoever asks, so that nothing else holds them.

        What was copied to the arena becomes tensors when this is first asked for, which need not be in the call: of a
        small tensor the bytes are copied faster than a view of them is made.
        """
        if self.arena is not None:
            views = _Views(self.arena)
            for row, start, dtype, shape in self.in_arena:
                self.found[row] = views.at(start, dtype, shape)
        return self.found


class _Views:
    """Tensors over an arena; one for all that are the same."""

    def __init__(self, arena: Buffer) -> None:
        self._whole = arena.tensor[: arena.tensor.numel() // ALIGNMENT * ALIGNMENT]
        self._as: dict[torch.dtype, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}

    def at(self, start: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """View what begins at a byte, in order; each place is seen in one way."""
        if start not in self._made:
            if dtype not in self._as:
                self._as[dtype] = self._whole.view(dtype)
            whole = self._as[dtype]
            first = whole.storage_offset() + start // dtype.itemsize
            self._made[start] = whole.as_strided(shape, strides_of(shape), first)
        return self._made[start]


def take_snapshot(
    tensors: Sequence[torch.Tensor], arenas: Arenas, *, staging: str, optimizers: Sequence[Optimizer], threads: int
) -> DeviceSnapshot:
    """
    Copy what must be copied on devices in the call; what lies in host memory is left to `Pieces.copy_on_host`.

    `staging` says what becomes of tensors on accelerators: "device": all are copied there; "host": none; "overlap":
    those that no optimizer guards, if there are optimizers, else none; "auto": all if there is room for it on the
    device, else those that no optimizer guards if there is room for these, else none. With "overlap" the steps of optimizers
    also wait for what finds no room in host memory; otherwise the call does, as what lies there always was copied in it.
    """
    taken = DeviceSnapshot(list(tensors))
    on_host = [at for at, tensor in enumerate(tensors) if tensor.is_cpu]
    if len(on_host) < len(tensors):
        on_device = [at for at, tensor in enumerate(tensors) if not tensor.is_cpu]
        _copy_on_device(taken, on_device, staging, optimizers)
    if on_host:
        waiting = optimizers if staging == "overlap" else ()
        taken.on_host = HostCopy(on_host, arenas, threads, waiting)
    return taken


def _copy_on_device(taken: DeviceSnapshot, rows: list[int], staging: str, optimizers: Sequence[Optimizer]) -> None:
    """Queue copies of what is to be copied there; those that are one and the same are copied once."""
    tensors = taken.found
    chosen, taken.guarded = _chosen_for_copy(tensors, rows, staging, optimizers)
    taken.live_nbytes = sum([tensors[at].nbytes for at in rows]) - sum([tensors[at].nbytes for at in chosen])
    devices = {tensors[at].device for at in rows}
    copies: dict[Hashable, torch.Tensor] = {}
    alike: dict[torch.device, dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]]] = {}
    for at, key in zip(chosen, memory_keys([tensors[at] for at in chosen]), strict=True):
        source = tensors[at]
        copy = copies.get(key)
        if copy is None:
            copies[key] = copy = torch.empty_like(source)
            # As numbers that no device changes on the way, as it does with some that are not a number.
            ours, theirs = alike.setdefault(source.device, {}).setdefault(source.element_size(), ([], []))
            ours.append(as_raw(copy))
            theirs.append(as_raw(source))
        tensors[at] = copy
    for device in devices:
        taken.events[device] = _queue_copies(device, alike.get(device, {}))


def _queue_copies(
    device: torch.device, alike: Mapping[int, tuple[list[torch.Tensor], list[torch.Tensor]]]
) -> torch.Event:
    """
    Copy on a device after all that is queued there, and before what will be; return what comes after the copies.

    They are put on a stream of their own: the caller's may be so full that each kernel waits for another to end.
    """
    caller = torch.accelerator.current_stream(device)
    queued = caller.record_event()
    if not alike:
        return queued
    side = torch.Stream(device)
    side.wait_event(queued)
    try:
        with side, torch.no_grad():
            for ours, theirs in alike.values():
                torch._foreach_copy_(ours, theirs)
    finally:
        # Whatever happens: the memory of copies that are given up goes to what the caller queues next.
        copied = side.record_event()
        caller.wait_event(copied)
    return copied


def _chosen_for_copy(
    tensors: Sequence[torch.Tensor], on_device: list[int], staging: str, optimizers: Sequence[Optimizer]
) -> tuple[list[int], bool]:
    """Return what is copied on the device, and whether somebody keeps the rest from changing."""
    if staging == "host":
        return [], False
    if staging == "device" or (staging == "auto" and not _without_room(tensors, on_device)):
        return on_device, True
    if staging == "overlap" and not optimizers:
        if on_device:
            _warn_without_optimizer()
        return [], True
    chosen = rows_outside_optimizers(tensors, on_device, optimizers)
    if staging == "overlap":
        return chosen, True
    full = _without_room(tensors, chosen)
    return [at for at in chosen if tensors[at].device not in full], not full


@functools.cache  # once is enough
def _warn_without_optimizer() -> None:
    log.warning(
        'staging="overlap" without an optimizer in the state: wait for handle.staged before anything of it changes'
    )


def _without_room(tensors: Sequence[torch.Tensor], rows: list[int]) -> set[torch.device]:
    """Return the devices on which copies of these tensors would take too much."""
    wanted: dict[torch.device, int] = {}
    for row in rows:
        device = tensors[row].device
        wanted[device] = wanted.get(device, 0) + tensors[row].nbytes
    return {device for device, nbytes in wanted.items() if nbytes > _ROOM * _free_nbytes(device)}


def _free_nbytes(device: torch.device) -> int:
    """
    Return what nobody has taken of a device's memory; nothing where it does not say.

    What torch holds without using it is not counted: the next forward needs it again.
    """
    module: Any = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else 0
