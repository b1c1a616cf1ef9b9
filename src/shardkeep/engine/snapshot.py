"""
The snapshot of a state that is saved while training goes on: which tensors are copied in the call, and which later.

Tensors in host memory are copied in the call, as far as there is room. Tensors on an accelerator are copied on the device, which
the call only queues; or not in the call, if the memory cannot change before it is copied, because the step of an optimizer or
the caller waits. Tensors in host memory that find no room are treated in this second way, too: preferably memory of
optimizers, whose steps can wait, and a few large tensors rather than many small ones.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from shardkeep.display import format_size
from shardkeep.engine.pools import Arenas, Buffer
from shardkeep.engine.step_barrier import rows_outside_optimizers
from shardkeep.engine.tensors import as_raw, memory_keys, scattered_memory
from shardkeep.format.boxes import strides_of
from shardkeep.storage.buffers import address_of, copy_memory

log = logging.getLogger("shardkeep")

ALIGNMENT = 64
"""Of each copy in its arena."""
_SMALL_NBYTES = 64 << 10
"""Up to this size a copy keeps the interpreter's lock: a thousand releases could mean a thousand waits for it."""
_BATCH_NBYTES = 16 << 20
"""Copies are divided between threads in batches of this size."""

_signature = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_small = _signature(ctypes.cast(copy_memory, ctypes.c_void_p).value or 0)

ArenaSlot = tuple[int, int, torch.dtype, torch.Size]
"""A row, where in the arena it begins, its dtype and its shape."""


_ROOM = 0.5
"""How much of the free memory of a device a copy on it may take."""


@dataclass
class DeviceSnapshot:
    """The tensors of a state, some of which are copies by now."""

    found: list[torch.Tensor]
    """The caller's tensors, or copies on the device; `tensors` replaces those that were copied to the arena."""
    on_host: list[int] = field(default_factory=list)
    """Which of them lie in host memory."""
    optimizers: Sequence[Optimizer] = ()
    """Their steps wait for what is not copied on the host."""
    events: dict[torch.device, torch.Event] = field(default_factory=dict)
    """On each accelerator, an event after all that the caller had queued and after the copies on the device."""
    live_nbytes: int = 0
    """How much is still the caller's memory."""
    guarded: bool = True
    """Whether that cannot change until it is copied; else the call must wait."""
    arena: Buffer | None = None
    """The host memory of the copies."""
    in_arena: list[ArenaSlot] = field(default_factory=list)
    """Which tensors are in the arena, and where; with their dtype and shape at the call."""
    copied_nbytes: int = 0
    """How much of the arena they take."""
    lent: list[torch.Tensor] = field(default_factory=list)
    """Tensors in host memory that were not copied. This list keeps their memory alive until it has been read."""
    refused: bool = False
    """Whether that is because the system refused memory, rather than because of a limit."""

    def copy_on_host(self, arenas: Arenas, most_nbytes: int, threads: int) -> None:
        """
        Copy tensors in host memory, up to `most_nbytes`; the rest is lent.

        Called once, in the call, after `take_snapshot`, whose copies on devices go on meanwhile. The caller gives the arena back,
        also after a failure.
        """
        rows, optimizers, self.optimizers = self.on_host, self.optimizers, ()
        sources = [self.found[row] for row in rows]
        keys = memory_keys(sources)
        starts, copies, nbytes = _lay_out(sources, keys)
        if nbytes > most_nbytes:
            loose = set(rows_outside_optimizers(self.found, rows, optimizers))
            fits = _fitting(sources, keys, [row in loose for row in rows], most_nbytes)
            rows, sources = [rows[at] for at in fits], [sources[at] for at in fits]
            starts, copies, nbytes = _lay_out(sources, [keys[at] for at in fits])
        if rows:
            try:
                self.arena = arenas.take(nbytes, most_nbytes)
            except (OSError, MemoryError) as error:
                log.warning("no memory for a copy of %s of the state: %s", format_size(nbytes), error)
                self.refused, rows = True, []
        if self.arena is not None:
            _copy_all(copies, self.arena, threads)
            # Now: the caller may change the shape of its tensors before `tensors` is used.
            dtypes, shapes = [source.dtype for source in sources], [source.shape for source in sources]
            self.in_arena = list(zip(rows, starts, dtypes, shapes, strict=True))
            self.copied_nbytes = nbytes
        if len(rows) == len(self.on_host):
            return
        left = sorted(set(self.on_host).difference(rows))
        self.guarded = self.guarded and not rows_outside_optimizers(self.found, left, optimizers)
        for row in left:
            # Detached: the caller may give its tensor other memory, or another shape, before this one is read.
            self.found[row] = self.found[row].detach()
            self.lent.append(self.found[row])
        self.live_nbytes += sum([tensor.nbytes for tensor in self.lent])

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """
        All tensors. The user empties the list, so that nothing else holds them.

        Tensors over the arena are made when this is first used, which is not in the call: for a small tensor, making a view takes
        longer than copying its bytes.
        """
        if self.arena is not None:
            whole = self.arena.tensor[: self.arena.tensor.numel() // ALIGNMENT * ALIGNMENT]
            by_dtype: dict[torch.dtype, torch.Tensor] = {}
            made: dict[int, torch.Tensor] = {}
            for row, start, dtype, shape in self.in_arena:
                if start not in made:
                    if dtype not in by_dtype:
                        by_dtype[dtype] = whole.view(dtype)
                    flat = by_dtype[dtype]
                    first = flat.storage_offset() + start // dtype.itemsize
                    made[start] = flat.as_strided(shape, strides_of(shape), first)
                self.found[row] = made[start]
        return self.found


def _lay_out(
    sources: Sequence[torch.Tensor], keys: Sequence[Hashable]
) -> tuple[list[int], list[tuple[int, int, torch.Tensor]], int]:
    """Return the place of each tensor in an arena, each copy (offset, size, source), and the size; equal memory goes once."""
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
            end = -(-(end + nbytes) // ALIGNMENT) * ALIGNMENT
    return starts, copies, end


def _fitting(
    sources: Sequence[torch.Tensor], keys: Sequence[Hashable], loose: Sequence[bool], most_nbytes: int
) -> list[int]:
    """Return which tensors fit: first those that may change at any time, and small ones before large ones."""
    sizes = [-(-source.nbytes // ALIGNMENT) * ALIGNMENT for source in sources]
    taken: set[Hashable] = set()
    fits: list[int] = []
    free = most_nbytes
    for at in sorted(range(len(sources)), key=lambda at: (not loose[at], sources[at].nbytes)):
        nbytes = 0 if keys[at] in taken else sizes[at]
        if nbytes <= free:
            free -= nbytes
            taken.add(keys[at])
            fits.append(at)
    return sorted(fits)


def _copy_all(copies: list[tuple[int, int, torch.Tensor]], arena: Buffer, threads: int) -> None:
    base = address_of(arena.view)
    batches: list[list[tuple[int, int, int]]] = [[]]
    room = _BATCH_NBYTES
    for start, nbytes, source in copies:
        if not source.is_contiguous():
            scattered_memory(source, source.dtype).read(0, nbytes, arena.view[start : start + nbytes])
        elif nbytes <= _SMALL_NBYTES:
            _copy_small(base + start, source.data_ptr(), nbytes)
        else:
            address, target, at = source.data_ptr(), base + start, 0
            while at < nbytes:
                part = min(room, nbytes - at)
                batches[-1].append((target + at, address + at, part))
                at, room = at + part, room - part
                if not room:
                    batches.append([])
                    room = _BATCH_NBYTES
    if len(batches) <= 2:
        list(itertools.starmap(copy_memory, itertools.chain(*batches)))
        return
    # Also of many tensors of a few megabytes: fresh memory, of which most of the time of a first save goes, scales with threads.
    with ThreadPoolExecutor(threads, thread_name_prefix="shardkeep-stage") as pool:
        for _ in pool.map(lambda batch: list(itertools.starmap(copy_memory, batch)), batches):
            pass


def take_snapshot(tensors: Sequence[torch.Tensor], *, staging: str, optimizers: Sequence[Optimizer]) -> DeviceSnapshot:
    """
    Queue the copies on devices; `DeviceSnapshot.copy_on_host` copies what lies in host memory.

    `staging` says which tensors on accelerators are copied on the device. "device": all. "host": none. "overlap": those outside the
    memory of optimizers, if there are optimizers; else none. "auto": all if there is room for it on the device, else those
    outside the memory of optimizers if there is room for these, else none. With "overlap", the steps of optimizers also wait for
    what finds no room in host memory; otherwise the call waits.
    """
    on_host = [at for at, tensor in enumerate(tensors) if tensor.is_cpu]
    taken = DeviceSnapshot(list(tensors), on_host, optimizers if staging == "overlap" else ())
    if len(on_host) < len(tensors):
        on_device = [at for at, tensor in enumerate(tensors) if not tensor.is_cpu]
        _copy_on_device(taken, on_device, staging, optimizers)
    return taken


def _copy_on_device(taken: DeviceSnapshot, rows: list[int], staging: str, optimizers: Sequence[Optimizer]) -> None:
    """Queue the copies on devices; tensors that are the same memory are copied once."""
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
            # As integers, because a device may change the bits of a NaN.
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
    Copy on a device, after all that is queued there and before what will be; return an event after the copies.

    They go on a stream of their own: that of the caller may be so full that each kernel waits for another to end.
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
        # Also after a failure: the memory of abandoned copies is reused by what the caller queues next.
        copied = side.record_event()
        caller.wait_event(copied)
    return copied


def _chosen_for_copy(
    tensors: Sequence[torch.Tensor], on_device: list[int], staging: str, optimizers: Sequence[Optimizer]
) -> tuple[list[int], bool]:
    """Return the rows that are copied on the device, and whether the rest cannot change until it is copied."""
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
    """Return the devices on which copies of these tensors would take too much memory."""
    wanted: Counter[torch.device] = Counter()
    for row in rows:
        wanted[tensors[row].device] += tensors[row].nbytes
    return {device for device, nbytes in wanted.items() if nbytes > _ROOM * _free_nbytes(device)}


def _free_nbytes(device: torch.device) -> int:
    """Return the free memory of a device, without torch's cache, which the next forward needs again; 0 if unknown."""
    module: Any = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else 0
