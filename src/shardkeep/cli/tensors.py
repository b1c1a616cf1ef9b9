"""
Arithmetic on stored tensors in bounded memory: statistics, histograms and comparisons. The only cli module with torch.

Tensors are cut into blocks. A block never crosses a stored box, so it is one contiguous range of a file. Several threads
read blocks, many small ones at a time, and numpy computes with each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.cli.contents import Item, is_raw
from shardkeep.cli.output import OnRead
from shardkeep.engine.fill import fill
from shardkeep.engine.torch_source import item_batches
from shardkeep.format.boxes import Box, Boxes, flat_range_to_boxes
from shardkeep.format.dtypes import by_name, known_to_torch, to_torch
from shardkeep.opening import Checkpoint, StoredTensor
from shardkeep.options import Options, cores

T = TypeVar("T")
Array = npt.NDArray[Any]
BLOCK_ELEMENTS = 1 << 19
"""Most elements of a block: 4 MiB as float64."""
_READ_NBYTES = 16 << 20
"""How much a thread reads at a time."""
_LEAST_NBYTES = 4 << 10
"""What a block counts for, however small it is, because each has its cost."""
_MAX_THREADS = 4


def map_blocks(
    checkpoints: Sequence[Checkpoint], tensors: Sequence[Sequence[Item]], work: Callable[..., T], on_read: OnRead
) -> list[list[T]]:
    """
    Read tensors, each given by its item in each of the checkpoints, block by block on several threads.

    `work` is called with the box of a block, and with its elements in each checkpoint. Its results are returned by tensor.
    """
    for checkpoint, items in zip(checkpoints, zip(*tensors, strict=True), strict=False):
        owners = checkpoint.index.tensors.alias[[item.row for item in items]]
        checkpoint.source.check(np.unique(owners.astype(np.int64)))

    def nbytes(block: tuple[int, Box]) -> int:
        number, box = block
        return max(_LEAST_NBYTES, box.volume * by_name(tensors[number][0].dtype).itemsize)

    def read(blocks: list[tuple[int, Box]]) -> list[T]:
        boxes = [box for _, box in blocks]
        sides = []
        for side, checkpoint in enumerate(checkpoints):
            sides.append(_read(checkpoint, [tensors[number][side].row for number, _ in blocks], boxes))
        with np.errstate(all="ignore"):  # NaN, Inf and sums that overflow are results like others
            results = [work(box, *elements) for box, *elements in zip(boxes, *sides, strict=True)]
        on_read(sum(elements.nbytes for elements in sides[0]))
        return results

    blocks = ((at, box) for at, items in enumerate(tensors) for box in iter_blocks(checkpoints[0][items[0].key]))
    batches = list(item_batches(blocks, nbytes, most_nbytes=_READ_NBYTES))
    found: list[list[T]] = [[] for _ in tensors]
    with ThreadPoolExecutor(min(_MAX_THREADS, cores())) as threads:
        for batch, results in zip(batches, threads.map(read, batches), strict=True):
            for (number, _), result in zip(batch, results, strict=True):
                found[number].append(result)
    return found


def iter_blocks(stored: StoredTensor) -> Iterator[Box]:
    """Split a tensor into boxes of at most `BLOCK_ELEMENTS`, in the order in which they are stored."""
    for box in stored.boxes:
        for start in range(0, box.volume, BLOCK_ELEMENTS):
            for part in flat_range_to_boxes(box.sizes, start, min(box.volume, start + BLOCK_ELEMENTS)):
                yield Box(tuple(map(sum, zip(box.offsets, part.offsets, strict=True))), part.sizes)


def _read(checkpoint: Checkpoint, rows: list[int], boxes: list[Box]) -> list[torch.Tensor]:
    dtypes = [to_torch(checkpoint.index.dtype(row)) for row in rows]
    into = [torch.empty(box.sizes, dtype=dtype) for box, dtype in zip(boxes, dtypes, strict=True)]
    fill(checkpoint.source, np.array(rows, np.int64), Boxes.of(boxes), into, Options())
    return into


def as_array(block: torch.Tensor) -> Array:
    """Return elements in a dtype that numpy has: small floats become float32, and raw bits unsigned integers."""
    dtype = known_to_torch()[block.dtype]
    if dtype.numpy is None:
        if is_raw(dtype.name):
            block = block.view(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
        else:
            block = block.to(torch.complex64 if block.is_complex() else torch.float32)
    return block.numpy()


def first_values(stored: StoredTensor, many: int) -> list[Any]:
    if not math.prod(stored.shape):
        return []
    first: tuple[Any, ...] = (*(0 for _ in stored.shape[1:]), slice(many)) if stored.shape else ()
    found: list[Any] = as_array(stored[first]).reshape(-1).tolist()
    return found


@dataclass(frozen=True)
class Statistics:
    """Statistics of elements, of complex ones by absolute value. NaN and Inf are counted, and are part of nothing else."""

    count: int
    zeros: int
    nan: int
    inf: int
    min: float | None
    max: float | None
    mean: float
    std: float
    """Standard deviation of the finite elements as a population, not as a sample."""
    norm: float


def compute_statistics(checkpoint: Checkpoint, items: Sequence[Item], on_read: OnRead) -> dict[str, Statistics]:
    tensors = [(item,) for item in items if not is_raw(item.dtype)]
    blocks = map_blocks([checkpoint], tensors, _statistics, on_read)
    return {item.key: _combined(of_blocks) for (item,), of_blocks in zip(tensors, blocks, strict=True)}


def _statistics(_: Box, block: torch.Tensor) -> Statistics:
    numbers = _real(block)
    finite = numbers[np.isfinite(numbers)]
    wide, nan = finite.astype(np.float64), int(np.isnan(numbers).sum())
    return Statistics(
        count=numbers.size,
        zeros=int((numbers == 0).sum()),
        nan=nan,
        inf=numbers.size - finite.size - nan,
        min=finite.min().item() if finite.size else None,
        max=finite.max().item() if finite.size else None,
        mean=float(wide.mean()) if finite.size else math.nan,
        std=float(wide.std()) if finite.size else math.nan,
        norm=_norm(wide),
    )


def _norm(numbers: Array) -> float:
    return math.sqrt(np.square(numbers).sum())


def _combined(blocks: Sequence[Statistics]) -> Statistics:
    """Combine blocks by their means and deviations, so that those of a billion elements are accurate."""
    count, zeros, nan, inf = (sum(getattr(each, name) for each in blocks) for name in ("count", "zeros", "nan", "inf"))
    some = [each for each in blocks if each.min is not None]
    weights = [(each.count - each.nan - each.inf) / (count - nan - inf) for each in some]
    mean = sum(weight * each.mean for weight, each in zip(weights, some, strict=True))
    apart = [math.hypot(each.std, each.mean - mean) for each in some]
    return Statistics(
        count,
        zeros,
        nan,
        inf,
        min=min((each.min for each in some if each.min is not None), default=None),
        max=max((each.max for each in some if each.max is not None), default=None),
        mean=mean if some else math.nan,
        std=math.sqrt(sum(weight * off * off for weight, off in zip(weights, apart, strict=True)))
        if some
        else math.nan,
        norm=math.hypot(*(each.norm for each in blocks)),
    )


def _real(block: torch.Tensor) -> Array:
    numbers = as_array(block).reshape(-1)
    if numbers.dtype == np.bool_:
        return numbers.view(np.uint8)
    return np.abs(numbers.astype(np.complex128)) if np.iscomplexobj(numbers) else numbers


@dataclass(frozen=True)
class Histogram:
    low: float
    high: float
    counts: list[int]


def compute_histogram(
    checkpoint: Checkpoint, item: Item, found: Statistics, bins: int, on_read: OnRead
) -> Histogram | None:
    """Read a tensor again and count its finite elements; None if there are none, or all are the same number."""
    if found.min is None or found.max is None or found.min == found.max:
        return None
    low, high = float(found.min), float(found.max)
    if isinstance(found.min, int) and found.max - found.min < bins:  # each integer gets its own interval
        bins = int(found.max - found.min) + 1
        high = low + bins
    if not math.isfinite(high - low):
        return None  # they span the whole range of float64, so the width of an interval would be infinite

    def count(_: Box, block: torch.Tensor) -> Array:
        numbers = _real(block).astype(np.float64)
        return np.histogram(numbers[np.isfinite(numbers)], bins, (low, high))[0]

    [counts] = map_blocks([checkpoint], [(item,)], count, on_read)
    return Histogram(low, high, np.sum(counts, axis=0).tolist())


@dataclass(frozen=True)
class ChangedElement:
    index: tuple[int, ...]
    a: Any
    b: Any


@dataclass(frozen=True)
class TensorChange:
    elements: int
    changed: int
    max_abs: float
    """Greatest distance; NaN if one side is NaN and the other is not, or the dtype has no arithmetic."""
    norm: float
    base_norm: float
    first: ChangedElement | None

    @property
    def relative(self) -> float:
        return self.norm / self.base_norm if self.base_norm else math.inf if self.norm else 0.0


def compare_tensors(
    a: Checkpoint, b: Checkpoint, pairs: Sequence[tuple[Item, Item]], rtol: float, atol: float, on_read: OnRead
) -> list[TensorChange]:
    """Compare pairs of tensors of the same shapes; numbers as in `np.isclose`, or bits if there is no tolerance."""
    return list(map(_added, map_blocks([a, b], pairs, partial(_compare, rtol=rtol, atol=atol), on_read)))


def _compare(box: Box, a: torch.Tensor, b: torch.Tensor, *, rtol: float, atol: float) -> TensorChange:
    x, y = as_array(a).reshape(-1), as_array(b).reshape(-1)
    if a.dtype == b.dtype and not rtol and not atol:
        differs = (_bits(a) != _bits(b)).any(axis=1)
    else:
        differs = ~np.isclose(x, y, rtol, atol, equal_nan=True)
    wide = np.result_type(x, y, np.float64)
    base = np.abs(x[np.isfinite(x)].astype(wide))
    p, q = x[differs], y[differs]
    if p.dtype == q.dtype and p.dtype.kind in "iu":  # exact: what overflows is right as an unsigned number
        distance = np.where(p > q, p - q, q - p).view(f"u{p.itemsize}").astype(np.float64)
    else:
        distance = np.abs(p.astype(wide) - q.astype(wide))
    if is_raw(str(a.dtype).removeprefix("torch.")):
        distance = np.full(p.size, np.nan)
    first = None
    if distance.size:
        at = int(differs.argmax())
        inside = np.unravel_index(at, box.sizes)
        index = tuple(offset + int(i) for offset, i in zip(box.offsets, inside, strict=True))
        first = ChangedElement(index, x[at].item(), y[at].item())
    return TensorChange(
        elements=x.size,
        changed=distance.size,
        max_abs=float(distance.max(initial=0)),
        norm=_norm(distance),
        base_norm=_norm(base),
        first=first,
    )


def _bits(block: torch.Tensor) -> Array:
    return block.reshape(-1, 1).view(torch.uint8).numpy().view(f"u{min(block.itemsize, 8)}")


def _added(blocks: Sequence[TensorChange]) -> TensorChange:
    return TensorChange(
        elements=sum(block.elements for block in blocks),
        changed=sum(block.changed for block in blocks),
        max_abs=float(np.max([block.max_abs for block in blocks], initial=0)),
        norm=math.hypot(*(block.norm for block in blocks)),
        base_norm=math.hypot(*(block.base_norm for block in blocks)),
        first=next((block.first for block in blocks if block.first), None),
    )
