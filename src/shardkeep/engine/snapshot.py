"""
The snapshot of a state that is saved while training goes on: which tensors are copied in the call, and which later.

Tensors in host memory are copied in the call, as far as there is room. Tensors on an accelerator are copied on the
device, which the call only queues; or later, if their memory cannot change before, because the step of an optimizer or
the caller waits. Tensors in host memory that find no room are treated in this second way: preferably memory of
optimizers, whose steps can wait, and a few large tensors rather than many small ones.

The parameters and the state of an optimizer change in its steps only, so they may be copied late if the step waits
(`StepBarrier`). A hook before the steps of an optimizer is registered once, and stays. The accelerator waits for the
copies; the host waits only until all copies are queued.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import statistics
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from shardkeep.display import format_size
from shardkeep.engine.pools import Arenas, Buffer
from shardkeep.engine.tensors import memory_keys, raw_dtype, scattered_memory, span
from shardkeep.engine.workers import Scattered
from shardkeep.format.boxes import strides_of
from shardkeep.options import per_process
from shardkeep.state.leaves import is_dtensor
from shardkeep.storage.buffers import copy_alike, copy_memory

log = logging.getLogger("shardkeep")

ALIGNMENT = 64
"""Of each copy in its arena."""
_SMALL_NBYTES = 64 << 10
"""Copies of up to this size are made together: each that releases the interpreter's lock may have to wait for it."""
_BATCH_NBYTES = 16 << 20
"""Copies are divided between threads in batches of this size."""

Events = dict[torch.device, torch.Event]


@dataclass(frozen=True)
class ArenaLayout:
    """Where tensors in host memory are copied to; equal memory is copied once. It holds no tensor."""

    rows: list[int]
    starts: list[int]
    forms: list[tuple[torch.dtype, torch.Size]]
    """The dtype and shape of each, which the caller may change before tensors over the arena are made."""
    small: dict[int, npt.NDArray[np.int64]]
    """By size, of each small copy: where in the arena it begins, and the address of its source."""
    large: list[tuple[int, int]]
    """Of each other copy: the row of its source, and where in the arena it begins."""
    nbytes: int


_ROOM = 0.5
"""How much of the free memory of a device a copy on it may take."""
_ROOM_TO_STAY = 0.25
"""How much of it a copy may take that stays there until its bytes are written, rather than until they are in host memory."""
_SEGMENT_NBYTES = 1 << 30
"""Copies on a device are packed into allocations of this size: few, and each is freed when it has been copied to the host."""


@dataclass
class DeviceSnapshot:
    """The tensors of a state, some of which are copies by now."""

    found: list[torch.Tensor]
    """The caller's tensors; `tensors` replaces those that were copied."""
    on_host: list[int] = field(default_factory=list)
    optimizers: Sequence[Optimizer] = ()
    """Their steps wait for what is not copied on the host."""
    events: Events = field(default_factory=dict)
    """On each accelerator, an event after all that the caller had queued and after the copies on the device."""
    packed: list[PackedCopies] = field(default_factory=list)
    copied: list[tuple[int, int, int]] = field(default_factory=list)
    """Where the copies on devices lie: the index of the device, the first address, and the end."""
    live_nbytes: int = 0
    """How much is still the caller's memory."""
    guarded: bool = True
    """Whether that cannot change until it is copied; else the call must wait."""
    stays: bool = True
    """Whether devices have so much room that the copies may stay there until they are written."""
    choice: str = ""
    """How tensors on accelerators are copied, and what that followed from; empty if there are none."""
    arena: Buffer | None = None
    layout: ArenaLayout | None = None
    derived: dict[str, Any] = field(default_factory=dict)
    lent: list[torch.Tensor] = field(default_factory=list)
    """Tensors in host memory that were not copied. This list keeps their memory alive until it has been read."""
    refused: bool = False
    """Whether that is because the system refused memory, rather than because of a limit."""

    def copy_on_host(self, arenas: Arenas, most_nbytes: int, threads: int) -> None:
        """Copy host tensors up to `most_nbytes`, and lend the rest; the caller always gives the arena back."""
        optimizers, self.optimizers = self.optimizers, ()
        layout: ArenaLayout | None = self.derived.get("arena")
        if layout is None or layout.rows is not self.on_host:
            layout = self.derived["arena"] = _lay_out(self.found, self.on_host)
        if layout.nbytes > most_nbytes:
            loose = set(rows_outside_optimizers(self.found, self.on_host, optimizers))
            layout = _lay_out(self.found, _fitting(self.found, self.on_host, loose, most_nbytes))
        if layout.rows:
            try:
                self.arena, self.layout = arenas.take(layout.nbytes, most_nbytes), layout
            except (OSError, MemoryError) as error:
                log.warning("no memory for a copy of %s of the state: %s", format_size(layout.nbytes), error)
                self.refused = True
            else:
                _copy_all(self.found, layout, self.arena, threads)
        copied = self.layout.rows if self.layout else []
        if copied is self.on_host or not (left := sorted(set(self.on_host).difference(copied))):
            return
        self.guarded = self.guarded and not rows_outside_optimizers(self.found, left, optimizers)
        for row in left:
            # Detached: the caller may give its tensor other memory, or another shape, before this one is read.
            self.found[row] = self.found[row].detach()
            self.lent.append(self.found[row])
        self.live_nbytes += sum([tensor.nbytes for tensor in self.lent])

    def note_left_in_cache(self) -> None:
        """At the end of a save, note how much its copies leave in torch's cache of each device, for the next one."""
        if self.copied:
            left: Counter[int] = Counter()
            for index, begin, end in self.copied:
                left[index] += end - begin
            self.derived["left in cache"] = left

    def is_live(self, source: Scattered) -> bool:
        """Return whether a source on an accelerator is the caller's memory, rather than a copy there."""
        if source.accelerator is None or not source.nbytes:
            return False
        at = bisect_right(self.copied, (source.accelerator, source.address, sys.maxsize)) - 1
        return at < 0 or self.copied[at][0] != source.accelerator or self.copied[at][2] <= source.address

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors. The user empties the list, so that nothing else holds them."""
        # Made at first use, which is not in the call: for a small tensor, a view takes longer than copying its bytes.
        while self.packed:
            self.packed.pop().put_into(self.found)
        if self.arena is not None and self.layout is not None:
            whole = self.arena.tensor[: self.arena.tensor.numel() // ALIGNMENT * ALIGNMENT]
            by_dtype: dict[torch.dtype, torch.Tensor] = {}
            made: dict[int, torch.Tensor] = {}
            layout = self.layout
            for row, start, (dtype, shape) in zip(layout.rows, layout.starts, layout.forms, strict=True):
                if start not in made:
                    if dtype not in by_dtype:
                        by_dtype[dtype] = whole.view(dtype)
                    flat = by_dtype[dtype]
                    first = flat.storage_offset() + start // dtype.itemsize
                    made[start] = flat.as_strided(shape, strides_of(shape), first)
                self.found[row] = made[start]
        return self.found


def _lay_out(tensors: Sequence[torch.Tensor], rows: list[int]) -> ArenaLayout:
    sources = [tensors[row] for row in rows]
    places: dict[Hashable, int] = {}
    starts: list[int] = []
    small: dict[int, list[tuple[int, int]]] = {}
    large: list[tuple[int, int]] = []
    end = 0
    for row, source, key in zip(rows, sources, memory_keys(sources), strict=True):
        start = places.setdefault(key, end)
        starts.append(start)
        if start < end:
            continue
        nbytes = source.nbytes
        if 0 < nbytes <= _SMALL_NBYTES and source.is_contiguous():
            small.setdefault(nbytes, []).append((start, source.data_ptr()))
        else:
            large.append((row, start))
        end = -(-(end + nbytes) // ALIGNMENT) * ALIGNMENT
    forms = [(source.dtype, source.shape) for source in sources]
    by_size = {nbytes: np.array(pairs, np.int64).T.copy() for nbytes, pairs in small.items()}
    return ArenaLayout(rows, starts, forms, by_size, large, end)


def _fitting(tensors: Sequence[torch.Tensor], rows: list[int], loose: Container[int], most_nbytes: int) -> list[int]:
    """Return which rows fit: first those that may change at any time, and small ones before large ones."""
    keys = dict(zip(rows, memory_keys([tensors[row] for row in rows]), strict=True))
    taken: set[Hashable] = set()
    fits: list[int] = []
    free = most_nbytes
    for row in sorted(rows, key=lambda row: (row not in loose, tensors[row].nbytes)):
        nbytes = 0 if keys[row] in taken else -(-tensors[row].nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes <= free:
            free -= nbytes
            taken.add(keys[row])
            fits.append(row)
    return sorted(fits)


def _copy_all(tensors: Sequence[torch.Tensor], layout: ArenaLayout, arena: Buffer, threads: int) -> None:
    base = arena.address
    for nbytes, (starts, addresses) in layout.small.items():
        copy_alike(starts + base, addresses, nbytes)
    batches: list[list[tuple[int, int, int]]] = [[]]
    room = _BATCH_NBYTES
    for row, start in layout.large:
        source = tensors[row]
        nbytes = source.nbytes
        if not source.is_contiguous():
            scattered_memory(source, source.dtype).read(0, nbytes, arena.view[start : start + nbytes])
            continue
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


def take_snapshot(
    tensors: Sequence[torch.Tensor],
    *,
    staging: str,
    optimizers: Sequence[Optimizer],
    order: Callable[[], Sequence[int]] = tuple,
    derived: dict[str, Any] | None = None,
) -> DeviceSnapshot:
    """
    Queue the copies on devices; `DeviceSnapshot.copy_on_host` copies what lies in host memory.

    `order` returns the tensors in the order in which they will be written, if that is known. `derived` is that of their description.

    `staging` says which tensors on accelerators are copied on the device. "device": all. "host": none. "overlap": those outside the
    memory of optimizers, if there are optimizers; else none. "auto": all if there is room for them on the device. If not, those
    outside the memory of optimizers, and of that memory as much as there is room for. If even the former find no room, none. With "overlap", the steps of optimizers also wait for
    what finds no room in host memory; otherwise the call waits.
    """
    derived = {} if derived is None else derived
    if "places" not in derived:
        derived["places"] = _Places.of(tensors)
    places: _Places = derived["places"]
    taken = DeviceSnapshot(list(tensors), places.on_host, optimizers if staging == "overlap" else (), derived=derived)
    if places.on_device:
        _copy_on_device(taken, places, staging, optimizers, order())
    return taken


class _Places(NamedTuple):
    """Where the tensors of a state are: which are in host memory, which on accelerators, and how many bytes on each."""

    on_host: list[int]
    on_device: list[int]
    nbytes: Counter[torch.device]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Places:
        on_host = [at for at, tensor in enumerate(tensors) if tensor.is_cpu]
        on_device = [at for at, tensor in enumerate(tensors) if not tensor.is_cpu]
        return cls(on_host, on_device, _nbytes_by_device(tensors, on_device))


def _nbytes_by_device(tensors: Sequence[torch.Tensor], rows: Iterable[int]) -> Counter[torch.device]:
    found: Counter[torch.device] = Counter()
    for row in rows:
        found[tensors[row].device] += tensors[row].nbytes
    return found


def _copy_on_device(
    taken: DeviceSnapshot,
    places: _Places,
    staging: str,
    optimizers: Sequence[Optimizer],
    order: Sequence[int],
    free: Mapping[torch.device, int] | None = None,
) -> None:
    """Queue the copies on devices; tensors that are the same memory are copied once."""
    tensors = taken.found
    if free is None:
        # Taken out, because a save that begins before this one has ended must not count the same memory.
        left: Mapping[int, int] = taken.derived.pop("left in cache", {})
        wanted = places.nbytes.items()
        free = {device: _free_nbytes(device, nbytes, left.get(device.index or 0, 0)) for device, nbytes in wanted}
    chosen, taken.guarded = _chosen_for_copy(tensors, places, staging, optimizers, free, order)
    if chosen is not places.on_device:
        taken.live_nbytes = sum((places.nbytes - _nbytes_by_device(tensors, chosen)).values())
    known, segments = taken.derived.get("segments", (None, []))
    if known != (chosen, order):  # else these are the tensors of the last save, in its order
        segments = _lay_out_segments(tensors, _in_order(chosen, order))
        taken.derived["segments"] = (chosen, order), segments
    try:
        packed = list(map(PackedCopies.of, segments))
    except torch.OutOfMemoryError:
        if staging != "auto":
            raise
        # What is free may be in pieces, or in use since it was asked for.
        _copy_on_device(taken, places, staging, optimizers, order, dict.fromkeys(places.nbytes, 0))
        return
    way = "device" if not taken.live_nbytes else "overlap" if taken.guarded else "host"
    for device in places.nbytes:
        here = [each for each in packed if each.layout.device == device]
        nbytes = sum([each.layout.nbytes for each in here])
        taken.stays = taken.stays and nbytes <= _ROOM_TO_STAY * free[device]
        taken.choice += f"; {device}: " if taken.choice else f"{way}: "
        taken.choice += f"{format_size(nbytes)} copied on the device, of {format_size(free[device])} free there"
        taken.events[device] = _queue_copies(device, tensors, here)
        taken.copied += [(device.index or 0, flat.data_ptr(), flat.data_ptr() + flat.nbytes) for _, flat in here]
    taken.packed += packed
    taken.copied.sort()
    if taken.live_nbytes:
        taken.choice += f", {format_size(taken.live_nbytes)} to the host"


_COPIED_AS_BITS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""By `torch.cat` under CUDA, which saves a view of each tensor as integers."""


def _in_order(rows: list[int], order: Sequence[int]) -> list[int]:
    """Return rows in this order, and those that it lacks after them."""
    wanted = set(rows)
    first = [row for row in order if row in wanted]
    return [*first, *sorted(wanted.difference(first))]


@dataclass(frozen=True)
class SegmentLayout:
    """How copies on a device lie end to end in one allocation. It holds no tensor."""

    device: torch.device
    dtype: torch.dtype
    rows: list[list[int]]
    """Of each copy, the tensors that are this memory."""
    sizes: list[int]
    """In elements: the gap before each copy, and the copy."""
    shapes: list[torch.Size]
    """Of the copies; the caller may change those of its tensors."""
    contiguous: bool

    @functools.cached_property
    def count(self) -> int:
        """Of elements."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class PackedCopies(NamedTuple):
    layout: SegmentLayout
    flat: torch.Tensor

    @classmethod
    def of(cls, layout: SegmentLayout) -> PackedCopies:
        return cls(layout, torch.empty(layout.count, dtype=layout.dtype, device=layout.device))

    def put_into(self, tensors: list[torch.Tensor]) -> None:
        """Put the copies in the place of the tensors they are of."""
        copies = self.flat.split_with_sizes(self.layout.sizes)[1::2]
        for rows, copy in zip(self.layout.rows, map(torch.Tensor.view, copies, self.layout.shapes), strict=True):
            for row in rows:
                tensors[row] = copy

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queue the copies; as integers, because a device may change the bits of a NaN, and may not copy every type."""
        layout, flat, sources = self.layout, self.flat, [tensors[rows[0]] for rows in self.layout.rows]
        raw = flat.dtype
        if not (flat.is_cuda and layout.contiguous and raw in _COPIED_AS_BITS):
            raw = raw_dtype(flat)
            flat, sources = flat.view(raw), list(map(torch.Tensor.view, sources, repeat(raw)))
        if not layout.contiguous:
            copies = flat.split_with_sizes(layout.sizes)[1::2]
            torch._foreach_copy_(list(map(torch.Tensor.view, copies, layout.shapes)), sources)
            return
        pairs = zip(sources, layout.shapes, strict=True)
        parts = [source if len(shape) == 1 else source.ravel() for source, shape in pairs]
        if any(layout.sizes[::2]):
            gap = torch.empty(ALIGNMENT, dtype=raw, device=flat.device)
            parts = [each for size, part in zip(layout.sizes[::2], parts, strict=True) for each in (gap[:size], part)]
        torch.cat(parts, out=flat)  # one call: a view of each part of `flat` would take longer than the copy


def _lay_out_segments(tensors: Sequence[torch.Tensor], rows: list[int]) -> list[SegmentLayout]:
    """Lay out copies of these rows, end to end in a few large allocations for each device and dtype."""
    # Each begins at a multiple of the power of two that divides its size, as it does in a file. So what is written in
    # this order is one piece of memory, which is copied to the host at once.
    shares: dict[tuple[torch.device, torch.dtype, bool], dict[Hashable, list[int]]] = {}
    sources = [tensors[row] for row in rows]
    for row, source, key in zip(rows, sources, memory_keys(sources), strict=True):
        kind = source.device, source.dtype, source.is_contiguous()
        shares.setdefault(kind, {}).setdefault(key, []).append(row)
    made: list[SegmentLayout] = []
    for (device, dtype, contiguous), by_memory in shares.items():
        copies, itemsize = list(by_memory.values()), dtype.itemsize
        shapes = [tensors[rows[0]].shape for rows in copies]
        sizes: list[int] = []
        first = end = 0
        for at, shape in enumerate(shapes):
            count = shape.numel()
            if end and (end + count) * itemsize > _SEGMENT_NBYTES:
                made.append(SegmentLayout(device, dtype, copies[first:at], sizes, shapes[first:at], contiguous))
                sizes, first, end = [], at, 0
            step = max(1, min(count & -count, ALIGNMENT // itemsize)) if count else 1
            gap = -end % step
            sizes += gap, count
            end += gap + count
        made.append(SegmentLayout(device, dtype, copies[first:], sizes, shapes[first:], contiguous))
    return made


def _queue_copies(device: torch.device, tensors: Sequence[torch.Tensor], packed: Sequence[PackedCopies]) -> torch.Event:
    """Copy on a device, after all that is queued there and before what will be; return an event after the copies."""
    # On a stream of their own: that of the caller may be so full that each kernel waits for another to end.
    caller = torch.accelerator.current_stream(device)
    queued = caller.record_event()
    if not packed:
        return queued
    side = torch.Stream(device)
    side.wait_event(queued)
    try:
        with side, torch.no_grad():
            for each in packed:
                each.fill(tensors)
    finally:
        # Also after a failure: the memory of abandoned copies is reused by what the caller queues next.
        copied = side.record_event()
        caller.wait_event(copied)
    return copied


def _chosen_for_copy(
    tensors: Sequence[torch.Tensor],
    places: _Places,
    staging: str,
    optimizers: Sequence[Optimizer],
    free: Mapping[torch.device, int],
    order: Sequence[int] = (),
) -> tuple[list[int], bool]:
    """
    Return the rows that are copied on the device, and whether the rest cannot change until it is copied.

    `free` is the memory that each device has free, and `order` that in which the rows will be written, if it is known.
    """
    on_device = places.on_device
    if staging == "host":
        return [], False
    if staging == "overlap" and not optimizers:
        _warn_without_optimizer()
        return [], True
    if staging == "device" or (staging == "auto" and not _without_room(places.nbytes, free)):
        return on_device, True
    chosen = rows_outside_optimizers(tensors, on_device, optimizers)
    if staging == "overlap":
        return chosen, True
    taken = _nbytes_by_device(tensors, chosen)
    if full := _without_room(taken, free):
        return [at for at in chosen if tensors[at].device not in full], False
    # The rest waits for the link to the host, and the next step for the rest. So more of it is copied on the device, as far as
    # there is room: what is written last, because the host gets what is left in the order in which it is written.
    late = set(on_device).difference(chosen)
    for row in reversed(_in_order(sorted(late), order)):
        device = tensors[row].device
        taken[device] += tensors[row].nbytes
        if taken[device] <= _ROOM * free[device]:  # the first that does not fit leaves no room for those before it
            chosen.append(row)
    return sorted(chosen), True


@functools.cache  # once is enough
def _warn_without_optimizer() -> None:
    log.warning(
        'staging="overlap" without an optimizer in the state: wait for handle.staged before anything of it changes'
    )


def _without_room(wanted: Counter[torch.device], free: Mapping[torch.device, int]) -> set[torch.device]:
    """Return the devices on which copies of so many bytes would take too much of the free memory."""
    return {device for device, nbytes in wanted.items() if nbytes > _ROOM * free[device]}


def _free_nbytes(device: torch.device, wanted_nbytes: int, left_nbytes: int) -> int:
    """
    Return the free memory of a device, without torch's cache, which the next forward needs again; 0 if unknown.

    If little is free, beside what is wanted, then the `left_nbytes` that the copies of the last save left in the cache count too, as
    far as so much is unused there.
    """
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    free = int(module.mem_get_info(device)[0])
    if wanted_nbytes <= _ROOM_TO_STAY * free or not left_nbytes or not hasattr(module, "memory_reserved"):
        return free
    unused: int = module.memory_reserved(device) - module.memory_allocated(device)
    return free + min(left_nbytes, unused)


class StepBarrier:
    """Makes optimizer steps wait until the copies of one save are queued, and their work on the device until they are done."""

    def __init__(self) -> None:
        self._queued: Future[Events] = Future()

    def open(self, after: Events) -> None:
        """Let steps pass; their work comes after these events."""
        if not self._queued.done():
            self._queued.set_result(after)

    def is_passed(self) -> bool:
        return self._queued.done() and all(event.query() for event in self._queued.result().values())

    def wait(self) -> None:
        """Wait, and let the current streams wait for the copies."""
        for device, event in self._queued.result().items():
            torch.accelerator.current_stream(device).wait_event(event)


_MOST_INTERVALS = 32
_FEWEST_INTERVALS = 4
"""Between steps; the median of fewer says little."""


class StepTimes:
    """When an optimizer steps, so that a save can estimate what it costs training."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=1 + _MOST_INTERVALS)
        self._count = 0
        self._usual_s: float | None = None

    def note(self) -> None:
        self._recent.append(time.perf_counter())
        self._count += 1

    def measure(self) -> Callable[[], float | None]:
        """Return what returns, at the end of a save, by how much the steps in between took longer than usual."""
        # Usual is the median interval of the steps between saves.
        times = list(self._recent)
        if len(times) > _FEWEST_INTERVALS:
            self._usual_s = statistics.median(after - before for before, after in itertools.pairwise(times))
        usual_s, count = self._usual_s, self._count

        def lost_s() -> float | None:
            steps = self._count - count
            if usual_s is None or not steps:
                return None
            last = self._recent[-1]
            self._recent = deque([last], self._recent.maxlen)  # the next save compares with steps after this one
            return max(0.0, last - times[-1] - steps * usual_s)

        return lost_s


class StepBarriers:
    """The optimizers of a process that have a hook, the barriers before their next step, and when they stepped."""

    def __init__(self) -> None:
        self._barriers: WeakKeyDictionary[Optimizer, list[StepBarrier]] = WeakKeyDictionary()
        self._times: WeakKeyDictionary[Optimizer, StepTimes] = WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._lock = threading.Lock()
        self._process_id = os.getpid()

    def put(self, barrier: StepBarrier, optimizers: Iterable[Optimizer]) -> None:
        with self._lock:
            for optimizer in optimizers:
                self._watch(optimizer)
                # The barriers of an optimizer that never steps must not accumulate.
                standing = [each for each in self._barriers[optimizer] if not each.is_passed()]
                self._barriers[optimizer] = [*standing, barrier]

    def measure(self, optimizer: Optimizer) -> Callable[[], float | None]:
        with self._lock:
            return self._watch(optimizer).measure()

    def _watch(self, optimizer: Optimizer) -> StepTimes:
        if optimizer not in self._barriers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._barriers[optimizer] = []
        return self._times.setdefault(optimizer, StepTimes())

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if os.getpid() != self._process_id:  # a fork has memory of its own, of which nothing is saved
            return
        with self._lock:
            barriers = list(self._barriers.get(optimizer, ()))
            if (times := self._times.get(optimizer)) is not None:
                times.note()
        for barrier in barriers:
            barrier.wait()
            with self._lock:  # after the wait: one that was interrupted has to be repeated
                self._barriers[optimizer].remove(barrier)

    def remove(self) -> None:
        """Remove all hooks; called between steps."""
        with self._lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._barriers.clear()
            self._times.clear()


step_barriers = per_process(StepBarriers)


def rows_outside_optimizers(
    tensors: Sequence[torch.Tensor], rows: list[int], optimizers: Iterable[Optimizer]
) -> list[int]:
    """Return the rows, all or none in host memory, whose memory may also change outside the steps of these optimizers."""
    on_host = any(tensors[row].is_cpu for row in rows[:1])
    owned = [each for each in _optimizer_tensors(optimizers) if each.is_cpu == on_host]
    whole = {_memory_key(each) for each in owned if each.is_contiguous()}
    rest = [row for row in rows if not (tensors[row].is_contiguous() and _memory_key(tensors[row]) in whole)]
    if not rest:
        return rest
    # They may be parts of optimizer memory, which is slower to find out: by ranges of addresses that do not touch each other.
    ranges: dict[int, list[tuple[int, int]]] = {}
    spans = [(*span(each), each) for each in owned if each.numel()]
    for device, begin, end in sorted(
        (t.get_device(), begin, end) for begin, end, t in spans if end - begin == t.nbytes
    ):
        found = ranges.setdefault(device, [])
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))

    def is_covered(tensor: torch.Tensor) -> bool:
        begin, end = span(tensor)
        found = ranges.get(tensor.get_device(), [])
        at = bisect_right(found, (begin, sys.maxsize)) - 1
        return at >= 0 and end <= found[at][1]

    return [row for row in rest if tensors[row].numel() and not is_covered(tensors[row])]


def _memory_key(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.get_device(), tensor.data_ptr(), tensor.nbytes


def _optimizer_tensors(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield the parameters and state tensors of optimizers that are one piece of memory, found by its address."""
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
        for value in (*parameters, *kept):
            tensor: Any = value._local_tensor if is_dtensor(value) else value
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                with contextlib.suppress(RuntimeError):  # a tensor made of others
                    if tensor.data_ptr():
                        yield tensor
