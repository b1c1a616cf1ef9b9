"""
Statistics and histogram of a stored tensor, in one pass each, in bounded memory. Imports torch.

Sums are float64 and blocks are joined by their means, so that the deviation of a billion elements keeps its digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shardkeep.cli.blocks import as_numbers, blocks_of, calculators, pieces_of, read_block
from shardkeep.format.region import Box
from shardkeep.opening import StoredTensor

Number = int | float


@dataclass
class Statistics:
    """Of all elements so far; NaN and infinities are counted, and are in nothing else."""

    count: int = 0
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    positive_inf: int = 0
    negative_inf: int = 0
    least: Number | None = None
    greatest: Number | None = None
    mean: float = math.nan
    _spread: float = 0.0
    """Sum of squares of distances from the mean."""
    of_magnitudes: bool = False
    """The elements are complex, and these are statistics of their absolute values."""

    @property
    def std(self) -> float:
        """The deviation, of all elements as they are (not of a sample)."""
        return math.sqrt(self._spread / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The Euclidean norm of the finite elements."""
        return math.sqrt(self._spread + self.finite * self.mean * self.mean) if self.finite else 0.0

    def add(self, block: torch.Tensor) -> None:
        """Take the elements of one block into account."""
        for piece in pieces_of(block):
            self._add(piece)

    def _add(self, block: torch.Tensor) -> None:
        numbers = _real(as_numbers(block))
        self.of_magnitudes |= block.dtype.is_complex
        self.count += numbers.numel()
        self.zeros += int((numbers == 0).sum())
        if numbers.is_floating_point():
            good = numbers.isfinite()
            if not good.all():
                self.nan += int(numbers.isnan().sum())
                self.positive_inf += int(numbers.isposinf().sum())
                self.negative_inf += int(numbers.isneginf().sum())
                numbers = numbers[good]
        if numbers.numel():
            self._join(numbers, *_bounds(block, numbers))

    def _join(self, numbers: torch.Tensor, least: Number, greatest: Number) -> None:
        floats = numbers.to(torch.float64)
        mean = float(floats.mean())
        spread = float((floats - mean).square_().sum())
        self.merge(Statistics(finite=floats.numel(), least=least, greatest=greatest, mean=mean, _spread=spread))

    def merge(self, other: Statistics) -> None:
        """Take the elements of others into account."""
        for name in ("count", "zeros", "nan", "positive_inf", "negative_inf"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.of_magnitudes |= other.of_magnitudes
        if not other.finite:
            return
        if not self.finite:
            self.least, self.greatest, self.mean, self._spread = other.least, other.greatest, other.mean, other._spread
        else:
            self.least = min(x for x in (self.least, other.least) if x is not None)
            self.greatest = max(x for x in (self.greatest, other.greatest) if x is not None)
            both = self.finite + other.finite
            apart = other.mean - self.mean
            self.mean += apart * (other.finite / both)
            self._spread += other._spread + apart * apart * self.finite * (other.finite / both)
        self.finite += other.finite


def _bounds(block: torch.Tensor, numbers: torch.Tensor) -> tuple[Number, Number]:
    if block.dtype == torch.uint64:  # of which the numbers may be rounded
        array = block.numpy()
        return int(array.min()), int(array.max())
    least, greatest = (bound.item() for bound in torch.aminmax(numbers))
    is_whole = not block.dtype.is_floating_point and not block.dtype.is_complex
    return (int(least), int(greatest)) if is_whole else (least, greatest)


def _real(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.abs() if numbers.is_complex() else numbers.reshape(-1)


@dataclass
class Histogram:
    """How many elements lie in each of equal intervals."""

    low: float
    high: float
    counts: list[int] = field(default_factory=list)

    def edges(self, at: int) -> tuple[float, float]:
        """Return where an interval begins and ends."""
        step = (self.high - self.low) / len(self.counts)
        return self.low + at * step, self.low + (at + 1) * step


def statistics_of(stored: StoredTensor, on_block: Callable[[int], None] = lambda _: None) -> Statistics:
    """Read a tensor once; `on_block` is told the bytes of each block."""

    def work(box: Box) -> Statistics:
        block = read_block(stored, box).reshape(-1)
        found = Statistics()
        found.add(block)
        on_block(block.nbytes)
        return found

    whole = Statistics()
    with calculators() as threads:
        for found in threads.map(work, blocks_of(stored)):
            whole.merge(found)
    return whole


def histogram_of(
    stored: StoredTensor, found: Statistics, bins: int, on_block: Callable[[int], None] = lambda _: None
) -> Histogram | None:
    """
    Read a tensor again, and count its finite elements; None where there are none, or all are one number.

    Few whole numbers get an interval each.
    """
    if found.least is None or found.greatest is None or found.least == found.greatest:
        return None
    low, high = float(found.least), float(found.greatest)
    if isinstance(found.least, int) and found.greatest - found.least < bins:
        bins = int(found.greatest - found.least) + 1  # one for each number
        high = low + bins
    if not math.isfinite(high - low):
        return None  # the whole range of float64: there is no width of an interval

    def work(box: Box) -> torch.Tensor:
        block = read_block(stored, box).reshape(-1)
        counts = torch.zeros(bins, dtype=torch.int64)
        for piece in pieces_of(block):
            numbers = _real(as_numbers(piece)).to(torch.float64)
            good = numbers.isfinite()
            inside = numbers if good.all() else numbers[good]
            at = ((inside - low) / (high - low) * bins).to(torch.int64).clamp_(0, bins - 1)
            counts += torch.bincount(at, minlength=bins)
        on_block(block.nbytes)
        return counts

    whole = torch.zeros(bins, dtype=torch.int64)
    with calculators() as threads:
        for counts in threads.map(work, blocks_of(stored)):
            whole += counts
    return Histogram(low, high, whole.tolist())
