"""Chunks, statistics and bars, drawn with letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardkeep.cli.contents import Chunk
from shardkeep.cli.output import count_text, line_width, number_text, say, shortened, shown, size_text, styled

if TYPE_CHECKING:
    from shardkeep.cli.statistics import Histogram, Statistics

_BAR = 40


def print_chunks(chunks: Sequence[Chunk]) -> None:
    """Print box, size and place of each; on a terminal names of files are shortened to fit."""
    widest = max((len(str(chunk.box)) for chunk in chunks), default=0)
    room = line_width()
    for chunk in chunks:
        line, place = f"  {str(chunk.box).ljust(widest)}  {size_text(chunk.nbytes):>7}  ", f" at {chunk.offset:,}"
        name = shown(chunk.file)
        say(line + (name if room is None else shortened(name, max(12, room - len(line) - len(place)))) + place)


def print_statistics(found: Statistics) -> None:
    """Print statistics, what is worth an alarm in red."""
    inf = found.positive_inf + found.negative_inf
    say()
    say(f"  {count_text(found.count, 'element')}" + (", by absolute value" if found.of_magnitudes else ""))
    say(f"  min {number_text(found.least):>13}   mean {number_text(found.mean):>13}   zeros {found.zeros:>12,}")
    nan = styled(f"NaN {found.nan:,}", "red") if found.nan else "NaN 0"
    infinite = styled(f"Inf {inf:,}", "red") if inf else "Inf 0"
    say(f"  max {number_text(found.greatest):>13}   std  {number_text(found.std):>13}   {nan}  {infinite}")
    say(f"                      norm {number_text(found.norm):>13}")


def print_histogram(histogram: Histogram) -> None:
    """Print a bar for each interval, at where it begins."""
    most = max(histogram.counts)
    say()
    for at, count in enumerate(histogram.counts):
        low, _ = histogram.edges(at)
        say(f"  {low:>11.4g} ┤{styled(bar_text(count / most, _BAR).ljust(_BAR), 'cyan')} {count:,}")
    say(f"  {histogram.high:>11.4g} ┘")


def bar_text(share: float, width: int) -> str:
    """Draw a bar in eighths of a letter; what is not nothing shows."""
    eighths = round(share * width * 8) or int(share > 0)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()
