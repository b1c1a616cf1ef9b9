"""`shardkeep show`: tensors and values of a checkpoint, with statistics that are computed in bounded memory."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.contents import Item, brief_value, find_items, print_chunks, stored_chunks, text_of
from shardkeep.cli.runs import open_with_hints
from shardkeep.format.boxes import parse_index
from shardkeep.opening import Checkpoint, StoredTensor

if TYPE_CHECKING:
    from shardkeep.cli.tensors import Histogram, Statistics

_MAX_VALUES = 1_000_000
_MAX_CHUNKS = 8
_FIRST_VALUES = 6
_BINS = 12
_BAR_WIDTH = 40
_VISIBLE = 1 / 8
"""The shortest bar, in characters."""


@command(
    argument("checkpoint", metavar="CHECKPOINT"),
    argument("key", metavar="KEY", help="a key, or a dotted prefix of keys"),
    argument("--slice", metavar="INDEX", help='print these values, indexed as in Python: "3:7, ::2"'),
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
    checkpoint = open_with_hints(args.checkpoint)
    item, *others = find_items(checkpoint, args.key)
    if others or item.key != args.key:
        return _show_prefix(checkpoint, [item, *others], args)
    found = checkpoint[args.key]
    if item.is_tensor:
        return _show_tensor(checkpoint, item, found, args) if args.slice is None else _show_slice(item, found, args)
    if args.slice is not None:
        raise out.UsageError(f"{item.key!r} is a value, not a tensor: it has no slices")
    if args.json:
        return out.print_json({**asdict(item), "type": type(found).__name__, "value": found})
    print(out.printable_lines(found if isinstance(found, str) else repr(found)))
    return 0


def parse_slice(text: str) -> tuple[Any, ...]:
    """Parse an index expression: integers, slices and one `...`, separated by commas, with or without brackets."""
    inner = text.strip().removeprefix("[").removesuffix("]").strip()
    return tuple(_parse_part(part.strip(), text) for part in inner.split(",")) if inner else ()


def _parse_part(part: str, text: str) -> Any:
    if part == "...":
        return ...
    try:
        bounds = [int(number) if number.strip() else None for number in part.split(":")]
        return slice(*bounds) if ":" in part else int(part)
    except (TypeError, ValueError):
        hint = 'write it as in Python: "3:7, ::2"'
        raise out.UsageError(f"--slice {text!r}: {part!r} is not an index", hint=hint) from None


def _show_slice(item: Item, stored: StoredTensor, args: argparse.Namespace) -> int:
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

    from shardkeep.cli.tensors import as_array  # noqa: PLC0415

    values = as_array(stored[index])
    if args.json:
        return out.print_json({**asdict(item), "slice": args.slice, "values": values.tolist()})
    print(f"{out.printable(item.key)}[{args.slice}]  {item.dtype} {out.format_shape(values.shape)}")
    print(np.array2string(values, max_line_width=out.terminal_width() or 100, precision=6, separator=" "))
    return 0


def _show_prefix(checkpoint: Checkpoint, items: list[Item], args: argparse.Namespace) -> int:
    if args.slice is not None:
        raise out.UsageError(
            f"{args.key!r} is a prefix of {out.format_count(len(items), 'key')}, and not a tensor",
            hint=f"give one of them, such as {items[0].key}",
        )
    found = _statistics_of(checkpoint, [item for item in items if item.is_tensor])
    if args.json:
        listed = [{**asdict(item), "statistics": found.get(item.key)} for item in items]
        return out.print_json({"prefix": args.key, "items": listed})
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
        indent="  ",
    )
    for item in items:
        name = item.key.removeprefix(args.key.rstrip(".") + ".")
        if not item.is_tensor:
            table.add(name, item.dtype, brief_value(checkpoint, item), *[""] * 6)
            continue
        numbers, bad = [""] * 4, [0, 0]
        if (each := found.get(item.key)) is not None:
            numbers = ["-" if value is None else f"{value:.4g}" for value in (each.min, each.max, each.mean, each.std)]
            bad = [each.nan, each.inf]
        style: out.Style | None = "red" if any(bad) else None
        cells = (f"{count:,}" if count else "" for count in bad)
        table.add(name, item.dtype, out.format_shape(item.shape), *numbers, *cells, style=style)
    table.print()
    return 0


def _statistics_of(checkpoint: Checkpoint, items: list[Item]) -> dict[str, Statistics]:
    from shardkeep.cli import tensors  # noqa: PLC0415 - torch only where values are read

    with out.byte_bar("reading", sum(item.nbytes for item in items)) as update:
        return tensors.compute_statistics(checkpoint, items, lambda read: update(advance=read))


def _show_tensor(checkpoint: Checkpoint, item: Item, stored: StoredTensor, args: argparse.Namespace) -> int:
    from shardkeep.cli import tensors  # noqa: PLC0415 - torch only where values are read

    statistics = _statistics_of(checkpoint, [item]).get(item.key)
    histogram = None
    if statistics is not None:
        with out.byte_bar("counting", item.nbytes) as update:
            histogram = tensors.compute_histogram(
                checkpoint, item, statistics, _BINS, lambda read: update(advance=read)
            )
    chunks = stored_chunks(checkpoint, item)
    if args.json:
        return out.print_json({**asdict(item), "chunks": chunks, "statistics": statistics, "histogram": histogram})
    print(out.styled(out.printable(item.key), "bold"))
    print(f"  {text_of(checkpoint, item)}")
    print_chunks(chunks[:_MAX_CHUNKS])
    if len(chunks) > _MAX_CHUNKS:
        print(f"  and {out.format_count(len(chunks) - _MAX_CHUNKS, 'more chunk')} (`shardkeep ls --long` lists them)")
    if first := tensors.first_values(stored, _FIRST_VALUES):
        more = "  …" if math.prod(item.shape) > len(first) else ""
        line = f"  values   {'  '.join(map(out.format_number, first))}{more}"
        print(out.shorten(line, out.terminal_width() or sys.maxsize))
    if statistics is None:
        print(f"  no statistics: {item.dtype} has no arithmetic")
    else:
        _print_statistics(statistics, by_magnitude=item.dtype.startswith("complex"))
    if histogram is not None:
        _print_histogram(histogram)
    return 0


def _print_statistics(found: Statistics, *, by_magnitude: bool) -> None:
    number = out.format_number
    nan, inf = (
        out.styled(f"{name} {count:,}", "red") if count else f"{name} 0"
        for name, count in (("NaN", found.nan), ("Inf", found.inf))
    )
    print(f"\n  {out.format_count(found.count, 'element')}" + (", by absolute value" if by_magnitude else ""))
    print(f"  min {number(found.min):>13}   mean {number(found.mean):>13}   zeros {found.zeros:>12,}")
    print(f"  max {number(found.max):>13}   std  {number(found.std):>13}   {nan}  {inf}")
    print(f"                      norm {number(found.norm):>13}")


def _print_histogram(found: Histogram) -> None:
    most = max(found.counts)
    print()
    for at, count in enumerate(found.counts):
        length = max(count / most, _VISIBLE / _BAR_WIDTH if count else 0)  # so that a single number is visible
        bar = out.styled(out.format_bar(length, _BAR_WIDTH).ljust(_BAR_WIDTH), "cyan")
        begin = found.low + at * (found.high - found.low) / len(found.counts)
        print(f"  {begin:>11.4g} ┤{bar} {count:,}")
    print(f"  {found.high:>11.4g} ┘")
