"""Chunks, statistics and bars, drawn with letters."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardkeep.cli.contents import Chunk, Item, find_item, item_json, stored_chunks
from shardkeep.cli.output import (
    ReadProgress,
    UsageError,
    echo,
    format_count,
    format_number,
    format_shape,
    format_size,
    print_json,
    printable,
    printable_lines,
    shorten_middle,
    styled,
    terminal_width,
    to_json,
)
from shardkeep.cli.runs import open_with_hints
from shardkeep.errors import UnsupportedLeaf
from shardkeep.opening import Checkpoint, StoredTensor

if TYPE_CHECKING:
    import torch

    from shardkeep.cli.tensors import Histogram, Statistics


_BAR = 40


def print_chunks(chunks: Sequence[Chunk]) -> None:
    """Print box, size and place of each; on a terminal names of files are shortened to fit."""
    widest = max((len(str(chunk.box)) for chunk in chunks), default=0)
    room = terminal_width()
    for chunk in chunks:
        line, place = f"  {str(chunk.box).ljust(widest)}  {format_size(chunk.nbytes):>7}  ", f" at {chunk.offset:,}"
        name = printable(chunk.file)
        echo(line + (name if room is None else shorten_middle(name, max(12, room - len(line) - len(place)))) + place)


def print_statistics(found: Statistics) -> None:
    """Print statistics, what is worth an alarm in red."""
    inf = found.positive_inf + found.negative_inf
    echo()
    echo(f"  {format_count(found.count, 'element')}" + (", by absolute value" if found.of_magnitudes else ""))
    echo(f"  min {format_number(found.least):>13}   mean {format_number(found.mean):>13}   zeros {found.zeros:>12,}")
    nan = styled(f"NaN {found.nan:,}", "red") if found.nan else "NaN 0"
    infinite = styled(f"Inf {inf:,}", "red") if inf else "Inf 0"
    echo(f"  max {format_number(found.greatest):>13}   std  {format_number(found.std):>13}   {nan}  {infinite}")
    echo(f"                      norm {format_number(found.norm):>13}")


def print_histogram(histogram: Histogram) -> None:
    """Print a bar for each interval, at where it begins."""
    most = max(histogram.counts)
    echo()
    for at, count in enumerate(histogram.counts):
        low, _ = histogram.edges(at)
        echo(f"  {low:>11.4g} ┤{styled(bar_text(count / most, _BAR).ljust(_BAR), 'cyan')} {count:,}")
    echo(f"  {histogram.high:>11.4g} ┘")


def bar_text(share: float, width: int) -> str:
    """Draw a bar in eighths of a letter; what is not nothing shows."""
    eighths = round(share * width * 8) or int(share > 0)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()


# `shardkeep show`: one tensor or value of a checkpoint, with statistics that are made in bounded memory.

EXAMPLES = """
  shardkeep show runs/a/step-500 model.layers.0.weight
  shardkeep show runs/a/step-500 model.layers.0.weight --slice "3:7, ::2"
  shardkeep show runs/a/step-500 model.layers.0.weight --slice="-4:"
  shardkeep show runs/a/step-500 step
"""
_MOST_VALUES = 1_000_000
_MOST_CHUNKS = 8
_FIRST = 6
_PART = re.compile(r"\s*(-?\d*)\s*(?::\s*(-?\d*)\s*(?::\s*(-?\d*)\s*)?)?")

Index = tuple[Any, ...]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("key", metavar="KEY")
    parser.add_argument("--slice", metavar="INDEX", help='print these values, as Python would: "3:7, ::2"')
    parser.add_argument("--bins", type=int, default=12, metavar="N", help="bars of the histogram (12)")
    parser.add_argument("--chunks", action="store_true", help="list all chunks, not the first few")
    parser.add_argument("--no-stats", action="store_true", help="read nothing: only what and where it is")


def run(args: argparse.Namespace) -> int:
    """Show it."""
    if not 1 <= args.bins <= 1000:
        raise UsageError(f"--bins {args.bins}: give 1 to 1000")
    checkpoint = open_with_hints(args.checkpoint)
    item = find_item(checkpoint, args.key)
    if not item.is_tensor:
        return _show_value(checkpoint, item, args)
    stored = checkpoint[args.key]
    if args.slice is not None:
        return _show_slice(checkpoint, item, stored, args)
    return _show_tensor(checkpoint, item, stored, args)


def _show_value(checkpoint: Checkpoint, item: Item, args: argparse.Namespace) -> int:
    value = checkpoint[item.key]
    if args.slice is not None:
        raise UsageError(f"{item.key!r} is a value, not a tensor: it has no slices")
    if args.json:
        document = item_json(checkpoint, item, chunks=False)
        print_json(document | {"type": type(value).__name__, "value": to_json(value)})
    else:
        echo(printable_lines(value if isinstance(value, str) else repr(value)))
    return 0


def parse_slice(text: str) -> Index:
    """
    Read an index expression: integers, slices and one `...`, separated by commas; brackets around it are allowed.

    Raises:
        NotUsable: it is something else.

    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    parts = [part.strip() for part in inner.split(",")] if inner else []
    found: list[Any] = []
    for part in parts:
        if part == "...":
            found.append(...)
            continue
        match = _PART.fullmatch(part)
        if match is None or not part:
            raise UsageError(f"--slice {text!r}: {part!r} is no index", hint='write it as in Python: "3:7, ::2"')
        first, second, third = (int(number) if number else None for number in match.groups())
        found.append(slice(first, second, third) if ":" in part else first)
    return tuple(found)


def _show_slice(checkpoint: Checkpoint, item: Item, stored: StoredTensor, args: argparse.Namespace) -> int:
    from shardkeep.format.boxes import parse_index  # noqa: PLC0415 - for slices alone

    index = parse_slice(args.slice)
    try:
        picks = parse_index(item.key, item.shape, index)
    except (IndexError, ValueError) as exc:
        raise UsageError(str(exc), hint=f"it is {item.what}") from exc
    many = math.prod(pick.count for pick in picks)
    if many > _MOST_VALUES:
        raise UsageError(
            f"--slice {args.slice!r} has {many:,} values", hint=f"print at most {_MOST_VALUES:,} at a time"
        )
    from shardkeep.cli.tensors import plain_values  # noqa: PLC0415 - torch only where values are read

    values = plain_values(stored[index])
    if args.json:
        document = item_json(checkpoint, item, chunks=False)
        print_json(document | {"slice": args.slice, "values": _listed(values)})
        return 0
    echo(f"{printable(item.key)}[{args.slice}]  {item.dtype} {format_shape(values.shape)}")
    echo(_printed(values))
    return 0


def _listed(values: torch.Tensor) -> Any:
    listed = values.tolist()
    return to_json(listed) if not values.is_complex() else _pairs(listed)


def _pairs(listed: Any) -> Any:
    return [_pairs(item) for item in listed] if isinstance(listed, list) else [listed.real, listed.imag]


def _printed(values: torch.Tensor) -> str:
    import numpy as np  # noqa: PLC0415 - only where values are read

    return np.array2string(values.numpy(), max_line_width=terminal_width() or 100, precision=6, separator=" ")


def _show_tensor(checkpoint: Checkpoint, item: Item, stored: StoredTensor, args: argparse.Namespace) -> int:
    found, histogram, why_not = None, None, ""
    first: list[str] = []
    if not args.no_stats:
        from shardkeep.cli.tensors import (  # noqa: PLC0415
            compute_histogram,
            compute_statistics,
            first_values,
        )

        try:
            with ReadProgress("reading", 2 * item.nbytes) as progress:
                found = compute_statistics(stored, progress.add)
                histogram = compute_histogram(stored, found, args.bins, progress.add)
        except UnsupportedLeaf as exc:
            why_not = exc.message
        values = first_values(stored, _FIRST)
        first = list(map(format_number, values.tolist()))
    if args.json:
        document = item_json(checkpoint, item, chunks=True)
        print_json(document | {"statistics": _statistics_document(found), "histogram": _histogram_document(histogram)})
        return 0
    echo(styled(printable(item.key), "bold"))
    echo(
        f"  {item.what}, {format_size(item.nbytes)}"
        + (f", shared with {printable(item.tied_to)}" if item.tied_to else "")
    )
    _print_chunks(checkpoint, item, everything=args.chunks)
    if first:
        echo(f"  values   {_fitting(first, more=math.prod(item.shape) > len(first))}")
    if why_not:
        echo(f"  no statistics: {why_not}")
    if found is not None:
        print_statistics(found)
    if histogram is not None:
        print_histogram(histogram)
    return 0


def _fitting(values: list[str], *, more: bool) -> str:
    """Return as many values as a line takes, and dots for the others."""
    room = (terminal_width() or 1000) - len("  values   ") - len("  …")
    while len(values) > 1 and len("  ".join(values)) > room:
        values, more = values[:-1], True
    return "  ".join(values) + ("  …" if more else "")


def _print_chunks(checkpoint: Checkpoint, item: Item, *, everything: bool) -> None:
    chunks = stored_chunks(checkpoint, item)
    listed = chunks if everything else chunks[:_MOST_CHUNKS]
    print_chunks(listed)
    if len(chunks) > len(listed):
        echo(f"  and {format_count(len(chunks) - len(listed), 'more chunk')} (--chunks lists them)")


def _statistics_document(found: Statistics | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "count": found.count,
        "min": found.least,
        "max": found.greatest,
        "mean": found.mean,
        "std": found.std,
        "norm": found.norm,
        "zeros": found.zeros,
        "nan": found.nan,
        "positive_inf": found.positive_inf,
        "negative_inf": found.negative_inf,
        "of_magnitudes": found.of_magnitudes,
    }


def _histogram_document(histogram: Histogram | None) -> dict[str, Any] | None:
    return {"low": histogram.low, "high": histogram.high, "counts": histogram.counts} if histogram else None
