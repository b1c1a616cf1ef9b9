"""`shardkeep show`: tensors and values of a checkpoint, with statistics that are computed in bounded memory."""

from __future__ import annotations

import argparse
import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.contents import Item, find_items, item_json, print_chunks, stored_chunks, value_text
from shardkeep.cli.runs import open_with_hints
from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.boxes import parse_index
from shardkeep.opening import Checkpoint, StoredTensor

if TYPE_CHECKING:
    from shardkeep.cli.tensors import Statistics

_MAX_VALUES = 1_000_000
_MAX_CHUNKS = 8
_FIRST_VALUES = 6
_BAR_WIDTH = 40
_VISIBLE = 1 / 8
"""The shortest bar, in characters."""
_INDEX_PART = re.compile(r"\s*(-?\d*)\s*(?::\s*(-?\d*)\s*(?::\s*(-?\d*)\s*)?)?")


@command(
    argument("checkpoint", metavar="CHECKPOINT"),
    argument("key", metavar="KEY", help="a key, or a dotted prefix of keys"),
    argument("--slice", metavar="INDEX", help='print these values, indexed as in Python: "3:7, ::2"'),
    argument("--bins", type=int, default=12, metavar="N", help="bars of the histogram (12)"),
    argument("--chunks", action="store_true", help="list all chunks, not only the first few"),
    argument("--no-stats", action="store_true", help="read no data: only type and location"),
    examples="""
  shardkeep show runs/a/step-500 model.layers.0.weight
  shardkeep show runs/a/step-500 model.layers                a line for each
  shardkeep show runs/a/step-500 model.layers.0.weight --slice "3:7, ::2"
  shardkeep show runs/a/step-500 model.layers.0.weight --slice="-4:"
  shardkeep show runs/a/step-500 step
""",
    paged=True,
)
def show(args: argparse.Namespace) -> int:
    if not 1 <= args.bins <= 1000:
        raise out.UsageError(f"--bins {args.bins}: give 1 to 1000")
    checkpoint = open_with_hints(args.checkpoint)
    item, *others = find_items(checkpoint, args.key)
    if others or item.key != args.key:
        return _show_prefix(checkpoint, [item, *others], args)
    found = checkpoint[args.key]
    if item.is_tensor:
        return (_show_tensor if args.slice is None else _show_slice)(checkpoint, item, found, args)
    if args.slice is not None:
        raise out.UsageError(f"{item.key!r} is a value, not a tensor: it has no slices")
    if args.json:
        out.print_json(item_json(checkpoint, item, chunks=False) | {"type": type(found).__name__, "value": found})
    else:
        print(out.printable_lines(found if isinstance(found, str) else repr(found)))
    return 0


# -- slices


def parse_slice(text: str) -> tuple[Any, ...]:
    """Parse an index expression: integers, slices and one `...`, separated by commas, with or without brackets."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    found: list[Any] = []
    for part in map(str.strip, inner.split(",") if inner else ()):
        match = _INDEX_PART.fullmatch(part) if part else None
        if part == "...":
            found.append(...)
        elif match is None:
            hint = 'write it as in Python: "3:7, ::2"'
            raise out.UsageError(f"--slice {text!r}: {part!r} is not an index", hint=hint)
        else:
            bounds = [int(number) if number else None for number in match.groups()]
            found.append(slice(*bounds) if ":" in part else bounds[0])
    return tuple(found)


def _show_slice(checkpoint: Checkpoint, item: Item, stored: StoredTensor, args: argparse.Namespace) -> int:
    index = parse_slice(args.slice)
    try:
        picks = parse_index(item.key, item.shape, index)
    except (IndexError, ValueError) as exc:
        raise out.UsageError(str(exc), hint=f"the tensor is {item.what}") from exc
    count = math.prod(pick.count for pick in picks)
    if count > _MAX_VALUES:
        raise out.UsageError(
            f"--slice {args.slice!r} has {count:,} values", hint=f"print at most {_MAX_VALUES:,} at a time"
        )
    import numpy as np  # noqa: PLC0415 - torch and numpy only where values are read
    import torch  # noqa: PLC0415

    from shardkeep.cli.tensors import plain_values  # noqa: PLC0415

    values = plain_values(stored[index])
    if args.json:
        document = item_json(checkpoint, item, chunks=False)
        pairs = torch.view_as_real(values) if values.is_complex() else values
        out.print_json(document | {"slice": args.slice, "values": pairs.tolist()})
        return 0
    print(f"{out.printable(item.key)}[{args.slice}]  {item.dtype} {out.format_shape(values.shape)}")
    print(np.array2string(values.numpy(), max_line_width=out.terminal_width() or 100, precision=6, separator=" "))
    return 0


# -- all keys below a prefix


def _show_prefix(checkpoint: Checkpoint, items: list[Item], args: argparse.Namespace) -> int:
    """Print statistics of each tensor, and each value, below a prefix."""
    if args.slice is not None or args.chunks:
        raise out.UsageError(
            f"{args.key!r} is a prefix of {out.format_count(len(items), 'key')}, and not a tensor",
            hint=f"give one of them, such as {items[0].key}",
        )
    found = {} if args.no_stats else _statistics_of(checkpoint, [item for item in items if item.is_tensor])
    if args.json:
        listed = [item_json(checkpoint, item, chunks=False) | _statistics_json(found.get(item.key)) for item in items]
        out.print_json({"prefix": args.key, "items": listed})
        return 0
    total = sum(item.own_nbytes for item in items)
    print(
        f"{out.styled(out.printable(args.key), 'bold')}  {out.format_count(len(items), 'key')}, {out.format_size(total)}"
    )
    columns = ("min", "max", "mean", "std")
    table = out.Table(
        ("key", "dtype", "shape", *columns, "NaN", "Inf"),
        right={*columns, "NaN", "Inf"},
        flexible="key",
        optional=["dtype"],
        spills="shape",
        indent="  ",
    )
    for item in items:
        name = out.printable(item.key.removeprefix(args.key.rstrip(".") + "."))
        if not item.is_tensor:
            table.add(name, item.dtype, value_text(checkpoint, item), *[""] * 6)
            continue
        numbers, bad = [""] * 4, [0, 0]
        if (each := found.get(item.key)) is not None:
            numbers = ["-" if value is None else f"{value:.4g}" for value in (each.min, each.max, each.mean, each.std)]
            bad = [each.nan, each.positive_inf + each.negative_inf]
        style: out.Style | None = "red" if any(bad) else None
        cells = (f"{count:,}" if count else "" for count in bad)
        table.add(name, item.dtype, out.format_shape(item.shape), *numbers, *cells, style=style)
    table.print()
    return 0


def _statistics_of(checkpoint: Checkpoint, items: list[Item]) -> dict[str, Statistics]:
    from shardkeep.cli import tensors  # noqa: PLC0415 - torch only where values are read

    found = {}
    with out.ReadProgress("reading", sum(item.nbytes for item in items)) as progress:
        for item in items:
            with suppress(UnsupportedLeaf):  # no arithmetic
                found[item.key] = tensors.compute_statistics(checkpoint[item.key], progress.add)
    return found


def _statistics_json(found: Statistics | None) -> dict[str, Any]:
    if found is None:
        return {"statistics": None}
    public = {name: value for name, value in vars(found).items() if not name.startswith("_")}
    return {"statistics": {**public, "std": found.std, "norm": found.norm}}


# -- whole tensors


def _show_tensor(checkpoint: Checkpoint, item: Item, stored: StoredTensor, args: argparse.Namespace) -> int:
    statistics, histogram, why_not = None, None, ""
    first: list[str] = []
    if not args.no_stats:
        from shardkeep.cli import tensors  # noqa: PLC0415 - torch only where values are read

        try:
            with out.ReadProgress("reading", 2 * item.nbytes) as progress:
                statistics = tensors.compute_statistics(stored, progress.add)
                histogram = tensors.compute_histogram(stored, statistics, args.bins, progress.add)
        except UnsupportedLeaf as exc:
            why_not = exc.message
        first = list(map(out.format_number, tensors.first_values(stored, _FIRST_VALUES).tolist()))
    if args.json:
        document = item_json(checkpoint, item, chunks=True) | _statistics_json(statistics)
        out.print_json(document | {"histogram": vars(histogram) if histogram is not None else None})
        return 0
    print(out.styled(out.printable(item.key), "bold"))
    print(f"  {item.description}")
    chunks = stored_chunks(checkpoint, item)
    listed = chunks if args.chunks else chunks[:_MAX_CHUNKS]
    print_chunks(listed)
    if len(chunks) > len(listed):
        print(f"  and {out.format_count(len(chunks) - len(listed), 'more chunk')} (--chunks lists them)")
    if first:
        print(f"  values   {_fit_line(first, more=math.prod(item.shape) > len(first))}")
    if why_not:
        print(f"  no statistics: {why_not}")
    if statistics is not None:
        _print_statistics(statistics)
    if histogram is not None:
        most = max(histogram.counts)
        print()
        for at, count in enumerate(histogram.counts):
            length = max(count / most, _VISIBLE / _BAR_WIDTH if count else 0)  # so that a single number is visible
            bar = out.styled(out.format_bar(length, _BAR_WIDTH).ljust(_BAR_WIDTH), "cyan")
            begin = histogram.low + at * (histogram.high - histogram.low) / len(histogram.counts)
            print(f"  {begin:>11.4g} ┤{bar} {count:,}")
        print(f"  {histogram.high:>11.4g} ┘")
    return 0


def _fit_line(values: list[str], *, more: bool) -> str:
    """Join as many values as fit on a line, with dots for the rest."""
    room = (out.terminal_width() or 1000) - len("  values   ") - len("  …")
    while len(values) > 1 and len("  ".join(values)) > room:
        values, more = values[:-1], True
    return "  ".join(values) + ("  …" if more else "")


def _print_statistics(found: Statistics) -> None:
    infinite = found.positive_inf + found.negative_inf
    nan = out.styled(f"NaN {found.nan:,}", "red") if found.nan else "NaN 0"
    inf = out.styled(f"Inf {infinite:,}", "red") if infinite else "Inf 0"
    print()
    print(f"  {out.format_count(found.count, 'element')}" + (", by absolute value" if found.of_magnitudes else ""))
    print(
        f"  min {out.format_number(found.min):>13}   mean {out.format_number(found.mean):>13}   zeros {found.zeros:>12,}"
    )
    print(f"  max {out.format_number(found.max):>13}   std  {out.format_number(found.std):>13}   {nan}  {inf}")
    print(f"                      norm {out.format_number(found.norm):>13}")
