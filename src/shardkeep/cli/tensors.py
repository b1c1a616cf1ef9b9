"""
Arithmetic on stored tensors in bounded memory: statistics, histograms and comparisons. The only cli module with torch.

Tensors of any size are read block by block. A block never crosses a stored box, so it is one contiguous range of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from shardkeep.cli.contents import Item
from shardkeep.engine.fill import read_whole
from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.boxes import Box, flat_range_to_boxes, slices, whole
from shardkeep.opening import Checkpoint, StoredTensor
from shardkeep.options import Options, cores

T = TypeVar("T")
OnBlock = Callable[[int], None]
"""Called with the size of each block that was read, from any thread."""
BLOCK_ELEMENTS = 4 << 20
"""Most elements of a block, which is what a thread reads at a time."""
PIECE_ELEMENTS = 1 << 18
"""Elements that are computed with at a time: 2 MiB as float64, which stay in the CPU's cache."""
_MAX_THREADS = 4
"""Each holds one or two blocks in memory."""
_SUB_BYTE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))


@contextmanager
def compute_pool() -> Iterator[ThreadPoolExecutor]:
    """Provide threads that read and compute, at most one per core. If the caller fails, queued work is cancelled."""
    # Each runs torch with one thread of its own, because more would contend in every small operation.
    before = torch.get_num_threads()
    with ThreadPoolExecutor(min(_MAX_THREADS, cores()), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(before)


def iter_blocks(stored: StoredTensor, block_elements: int = BLOCK_ELEMENTS) -> Iterator[Box]:
    """Split a tensor into boxes of at most `block_elements`, in the order in which they are stored."""
    for box in stored.boxes:
        for start in range(0, box.volume, block_elements):
            for part in flat_range_to_boxes(box.sizes, start, min(box.volume, start + block_elements)):
                yield Box(tuple(map(sum, zip(box.offsets, part.offsets, strict=True))), part.sizes)


def iter_pieces(block: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a flat block into pieces to compute with."""
    for start in range(0, len(block), PIECE_ELEMENTS):
        yield block.narrow(0, start, min(PIECE_ELEMENTS, len(block) - start))


def as_numbers(block: torch.Tensor) -> torch.Tensor:
    """Convert elements without rounding to float64, complex128 or int64; raise `UnsupportedLeaf` if they are raw bits."""
    dtype = block.dtype
    name = str(dtype).removeprefix("torch.")
    if dtype.is_complex:
        return block.to(torch.complex128)
    if name in _SUB_BYTE or name.startswith(("bits", "float4")):
        raise UnsupportedLeaf(f"no arithmetic with {name}: a byte may hold several numbers")
    if dtype == torch.uint64:
        # Torch has few operations for uint64, and int64 would wrap. float64 is exact up to 2**53.
        array = block.numpy()
        return torch.from_numpy(array.astype(np.int64 if not array.size or array.max() < 1 << 63 else np.float64))
    if dtype.is_floating_point:
        return block.to(torch.float32).to(torch.float64) if dtype.itemsize == 1 else block.to(torch.float64)
    return block.to(torch.int64 if dtype.itemsize == 8 else torch.float64)


def plain_values(block: torch.Tensor) -> torch.Tensor:
    """Convert elements to a dtype that can be printed; raw bits become bytes."""
    if block.dtype in {torch.bool, torch.uint64, torch.float32, torch.complex64}:
        return block  # float64 would print digits that float32 does not have
    try:
        numbers = as_numbers(block)
    except UnsupportedLeaf:
        return block.view(torch.uint8)
    return numbers.to(torch.float32) if block.dtype.is_floating_point and block.dtype.itemsize < 4 else numbers


def first_values(stored: StoredTensor, many: int) -> torch.Tensor:
    """Read the first elements of a tensor in row-major order, as a flat tensor."""
    count = min(many, math.prod(stored.shape))
    parts = [stored[slices(box)].reshape(-1) for box in flat_range_to_boxes(stored.shape, 0, count)]
    return torch.cat([plain_values(part) for part in parts]) if parts else torch.empty(0)


# -- statistics

Number = int | float


@dataclass
class Statistics:
    """Statistics of some elements. NaN and infinities are counted, and are part of nothing else."""

    count: int = 0
    min: Number | None = None
    max: Number | None = None
    mean: float = math.nan
    zeros: int = 0
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    of_magnitudes: bool = False
    """Whether the elements are complex, and these are statistics of their absolute values."""
    _finite: int = 0
    _spread: float = 0.0
    """Sum of squared distances from the mean."""

    @property
    def std(self) -> float:
        """Standard deviation of the finite elements as a population, not as a sample."""
        return math.sqrt(self._spread / self._finite) if self._finite else math.nan

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite elements."""
        return math.sqrt(self._spread + self._finite * self.mean * self.mean) if self._finite else 0.0

    @classmethod
    def of(cls, piece: torch.Tensor) -> Statistics:
        """Compute the statistics of a few elements."""
        numbers = _real(as_numbers(piece))
        found = cls(numbers.numel(), zeros=int((numbers == 0).sum()), of_magnitudes=piece.dtype.is_complex)
        if numbers.is_floating_point() and not (good := numbers.isfinite()).all():
            found.nan = int(numbers.isnan().sum())
            found.positive_inf, found.negative_inf = int(numbers.isposinf().sum()), int(numbers.isneginf().sum())
            numbers = numbers[good]
        if numbers.numel():
            is_whole = not piece.dtype.is_floating_point and not piece.dtype.is_complex
            found.min, found.max = (int(bound) if is_whole else bound.item() for bound in torch.aminmax(numbers))
            if piece.dtype == torch.uint64:  # `numbers` may be rounded
                found.min, found.max = int(piece.numpy().min()), int(piece.numpy().max())
            floats = numbers.to(torch.float64)
            found._finite, found.mean = floats.numel(), float(floats.mean())
            found._spread = float((floats - found.mean).square_().sum())
        return found

    @classmethod
    def merged(cls, parts: Sequence[Statistics]) -> Statistics:
        """Combine statistics of parts, by their means, so that the deviation of a billion elements is accurate."""
        names = ("count", "zeros", "nan", "positive_inf", "negative_inf", "_finite")
        found = cls(**{name: sum(getattr(part, name) for part in parts) for name in names})
        found.of_magnitudes = any(part.of_magnitudes for part in parts)
        if found._finite:
            some = [part for part in parts if part._finite]
            found.min = min(part.min for part in some if part.min is not None)
            found.max = max(part.max for part in some if part.max is not None)
            found.mean = sum(part.mean * (part._finite / found._finite) for part in some)
            apart = [part.mean - found.mean for part in some]
            found._spread = sum(p._spread + p._finite * (off * off) for p, off in zip(some, apart, strict=True))
        return found


def _real(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.abs() if numbers.is_complex() else numbers.reshape(-1)


@dataclass
class Histogram:
    """Counts of elements in intervals of equal width."""

    low: float
    high: float
    counts: list[int]


def map_pieces(stored: StoredTensor, work: Callable[[torch.Tensor], T], on_block: OnBlock) -> list[T]:
    """Read a tensor block by block on several threads, and return the results of `work` on all pieces."""

    def read(box: Box) -> list[T]:
        block = stored[slices(box)].reshape(-1)
        results = list(map(work, iter_pieces(block)))
        on_block(block.nbytes)
        return results

    with compute_pool() as threads:
        return [result for results in threads.map(read, iter_blocks(stored)) for result in results]


def compute_statistics(stored: StoredTensor, on_block: OnBlock) -> Statistics:
    """Read a tensor once and compute its statistics."""
    return Statistics.merged(map_pieces(stored, Statistics.of, on_block))


def compute_histogram(stored: StoredTensor, found: Statistics, bins: int, on_block: OnBlock) -> Histogram | None:
    """Read a tensor again and count its finite elements; None if there are none, or all are the same number."""
    if found.min is None or found.max is None or found.min == found.max:
        return None
    low, high = float(found.min), float(found.max)
    if isinstance(found.min, int) and found.max - found.min < bins:  # each integer gets its own interval
        bins = int(found.max - found.min) + 1
        high = low + bins
    if not math.isfinite(high - low):
        return None  # they span the whole range of float64, so the width of an interval would be infinite

    def count(piece: torch.Tensor) -> torch.Tensor:
        numbers = _real(as_numbers(piece)).to(torch.float64)
        inside = numbers[numbers.isfinite()]
        at = ((inside - low) / (high - low) * bins).to(torch.int64).clamp_(0, bins - 1)
        return torch.bincount(at, minlength=bins)

    return Histogram(low, high, torch.stack(map_pieces(stored, count, on_block)).sum(0).tolist())


# -- comparison


@dataclass
class TensorChange:
    """How two tensors differ. Norms and the greatest distance cover the elements that are finite in both."""

    elements: int = 0
    changed: int = 0
    bits_alone: int = 0
    """Changed elements that are equal as numbers: -0.0 and 0.0, or two kinds of NaN."""
    not_finite: int = 0
    """Changed elements that are NaN or infinite on at least one side."""
    max_abs: float = 0.0
    squares: float = 0.0
    """Sum of squared distances."""
    base_squares: float = 0.0
    """Sum of squares of the first tensor's elements."""
    first: tuple[int, ...] | None = None
    """Index of the first changed element, in the order of storage."""
    before: Any = None
    after: Any = None
    has_numbers: bool = True
    """False if the dtype has no arithmetic, so that only bits were compared."""

    @property
    def norm(self) -> float:
        """Euclidean norm of the change."""
        return math.sqrt(self.squares)

    @property
    def relative(self) -> float:
        """Norm of the change divided by the norm of the first tensor."""
        base = math.sqrt(self.base_squares)
        return self.norm / base if base else math.inf if self.squares else 0.0


class Tolerance(NamedTuple):
    """How far apart equal numbers may be, as in `torch.allclose(equal_nan=True)`. If both are 0, bits are compared."""

    relative: float
    absolute: float


def compare_tensors(one: StoredTensor, other: StoredTensor, tolerance: Tolerance, *, on_block: OnBlock) -> TensorChange:
    """Compare two tensors of the same shape. `on_block` is called with the size of each block of the first."""
    found = TensorChange()
    for box in iter_blocks(one):
        a, b = one[slices(box)], other[slices(box)]
        _add_block(found, a, b, box, tolerance)
        on_block(a.nbytes)
    return found


def compare_tensor_batch(
    one: Checkpoint, other: Checkpoint, pairs: Sequence[tuple[Item, Item]], tolerance: Tolerance
) -> list[TensorChange]:
    """Compare pairs of small tensors, reading those of each checkpoint in one go."""
    changes = []
    both = (_read(one, [item for item, _ in pairs]), _read(other, [item for _, item in pairs]))
    for a, b in zip(*both, strict=True):
        found = TensorChange()
        if a.dtype == b.dtype and torch.equal(_raw(a.reshape(-1)), _raw(b.reshape(-1))):
            found.elements = a.numel()
        else:
            _add_block(found, a, b, whole(tuple(a.shape)), tolerance)
        changes.append(found)
    return changes


def _read(checkpoint: Checkpoint, items: Sequence[Item]) -> list[torch.Tensor]:
    """Read whole tensors; tied ones are read once."""
    owners = checkpoint.index.tensors.alias[[item.row for item in items]].astype(np.int64)
    rows, where = np.unique(owners, return_inverse=True)
    tensors = read_whole(checkpoint.source, rows, Options())
    return [tensors[at] for at in where.tolist()]


def _add_block(found: TensorChange, a: torch.Tensor, b: torch.Tensor, box: Box, tolerance: Tolerance) -> None:
    """Include the same box of both tensors."""
    pieces = zip(iter_pieces(a.reshape(-1)), iter_pieces(b.reshape(-1)), strict=True)
    for number, piece in enumerate(pieces):
        differs = _compare(found, *piece, tolerance)
        many = int(differs.sum())
        found.changed += many
        if many and found.first is None:
            at = int(differs.nonzero()[0])
            inside = np.unravel_index(number * PIECE_ELEMENTS + at, box.sizes)
            found.first = tuple(offset + int(i) for offset, i in zip(box.offsets, inside, strict=True))
            values = [plain_values(side.narrow(0, at, 1)).tolist() for side in piece]
            found.before, found.after = (value[0] if len(value) == 1 else value for value in values)


def _compare(found: TensorChange, a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Compare consecutive elements, and return which of them differ."""
    found.elements += a.numel()
    bits = None
    if a.dtype == b.dtype:
        one, other = _raw(a), _raw(b)
        same = torch.equal(one, other)  # faster, and most are
        bits = torch.zeros(len(a), dtype=torch.bool) if same else (one != other).any(dim=1)
    try:
        x, y = as_numbers(a), as_numbers(b)
    except UnsupportedLeaf:
        found.has_numbers = False
        return bits if bits is not None else torch.ones(a.shape, dtype=torch.bool)
    common = torch.promote_types(x.dtype, y.dtype)
    x, y = x.to(common), y.to(common)
    finite = x.isfinite()
    all_finite = bool(finite.all())
    found.base_squares += float((x if all_finite else x[finite]).abs().to(torch.float64).square_().sum())
    if bits is not None and not bits.any():
        return bits
    is_whole = not a.dtype.is_floating_point and not a.dtype.is_complex
    # Integers are compared by their bits, because their conversion may round.
    same_number = ~bits if bits is not None and is_whole else (x == y) | (x.isnan() & y.isnan())
    if a.dtype == b.dtype == torch.uint64:  # float64 would round them, and int64 cannot hold them
        p, q = a.numpy(), b.numpy()
        distance = torch.from_numpy(np.where(p > q, p - q, q - p).astype(np.float64))
    else:
        distance = _distance(x, y)
    if any(tolerance):
        # An infinite distance is never within a tolerance, not even an infinite one.
        differs = ~same_number & ~(
            distance.isfinite() & (distance <= tolerance.absolute + tolerance.relative * y.abs().to(torch.float64))
        )
    elif bits is not None:
        differs = bits
        found.bits_alone += int((bits & same_number).sum())
    else:
        differs = ~same_number
    both = finite & y.isfinite()
    found.not_finite += int((differs & ~both & ~same_number).sum())
    apart = distance[both & ~same_number]
    if apart.numel():
        found.max_abs = max(found.max_abs, float(apart.max()))
        found.squares += float(apart.square_().sum())
    return differs


def _distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return |x - y| as float64, without overflow for int64."""
    apart = x - y
    if x.dtype != torch.int64:
        return apart.abs().to(torch.float64)
    wrapped = ((x ^ y) & (x ^ apart)) < 0
    return torch.where(wrapped, x.to(torch.float64) - y.to(torch.float64), apart.to(torch.float64)).abs()


def _raw(elements: torch.Tensor) -> torch.Tensor:
    """Return the bytes of elements, one row per element."""
    return elements.contiguous().view(torch.uint8).reshape(len(elements), elements.element_size())
