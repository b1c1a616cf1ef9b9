"""The keys of one checkpoint: as a table, with their chunks, or as a tree."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from shardkeep.cli.contents import (
    Item,
    checkpoint_json,
    item_json,
    iter_items,
    key_filter,
    plain_value,
    stored_chunks,
    summarize,
)
from shardkeep.cli.output import (
    Style,
    Table,
    UsageError,
    did_you_mean,
    echo,
    format_count,
    format_duration,
    format_shape,
    format_size,
    print_json,
    printable,
    styled,
)
from shardkeep.cli.runs import Run, open_checkpoint_or_run
from shardkeep.cli.show import print_chunks
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.manage.catalog import Entry
from shardkeep.opening import Checkpoint

_MOST_VALUE = 40


def list_keys(checkpoint: Checkpoint, args: argparse.Namespace) -> int:
    """List what is in a checkpoint."""
    items = list(iter_items(checkpoint, key_filter(args.pattern, args.prefix)))
    if not items and (args.pattern or args.prefix):
        asked = args.prefix or args.pattern[0]
        hint = did_you_mean(asked, checkpoint, otherwise="a pattern is a key, a dotted prefix of keys, or a glob")
        raise UsageError(f"no key fits {' '.join([*args.pattern, args.prefix or '']).strip()!r}", hint=hint)
    if args.json:
        found = [item_json(checkpoint, item, chunks=args.long) for item in items]
        print_json({"kind": "checkpoint", "path": args.path, **checkpoint_json(checkpoint), "items": found})
        return 0
    if args.names:
        for item in items:
            echo(printable(item.key))
        return 0
    echo(f"{styled(args.path, 'bold')}  {summarize(checkpoint)}\n")
    if args.tree:
        _print_tree(_grown(items), args.depth)
    elif args.long:
        _print_long(checkpoint, items)
    else:
        _print_table(checkpoint, items)
    return 0


def _print_table(checkpoint: Checkpoint, items: Iterable[Item]) -> None:
    table = Table(("key", "dtype", "shape", "size", "chunks"), right="size chunks", gives_way="key")
    for item in items:
        if item.is_tensor:
            size = "tied" if item.tied_to else format_size(item.nbytes)
            table.add(printable(item.key), item.dtype, format_shape(item.shape), size, f"{item.chunks:,}")
        else:
            table.add(printable(item.key), "value", tail=_value_text(checkpoint, item))
    table.print()


def _value_text(checkpoint: Checkpoint, item: Item) -> str:
    """Return a value in few letters; what lies in files of its own is not read for a list."""
    if checkpoint.record.format != NATIVE:
        return ""
    value, why_not = plain_value(checkpoint, item.key)
    text = f"({why_not})" if why_not else printable(repr(value))
    return text if len(text) <= _MOST_VALUE else text[: _MOST_VALUE - 1] + "…"


def _print_long(checkpoint: Checkpoint, items: Iterable[Item]) -> None:
    for item in items:
        if not item.is_tensor:
            value, why_not = plain_value(checkpoint, item.key)
            echo(f"{styled(printable(item.key), 'cyan')}  {why_not or printable(repr(value))}")
            continue
        tied = f", shared with {printable(item.tied_to)}" if item.tied_to else ""
        echo(f"{styled(printable(item.key), 'cyan')}  {item.what}, {format_size(item.nbytes)}{tied}")
        print_chunks(stored_chunks(checkpoint, item) if not tied else ())


@dataclass
class _Branch:
    keys: int = 0
    nbytes: int = 0
    leaf: Item | None = None
    below: dict[str, _Branch] = field(default_factory=dict)


def _grown(items: Iterable[Item]) -> _Branch:
    root = _Branch()
    for item in items:
        branch = root
        for part in item.key.split("."):
            branch.keys += 1
            branch.nbytes += item.own_nbytes
            branch = branch.below.setdefault(part, _Branch())
        branch.keys += 1
        branch.nbytes += item.own_nbytes
        branch.leaf = item
    return root


def _print_tree(root: _Branch, depth: int | None) -> None:
    stack: list[tuple[str, str, _Branch, int, bool]] = []

    def push(branch: _Branch, indent: str, level: int) -> None:
        children = sorted(branch.below.items(), key=_in_order)
        for at, (name, child) in reversed(list(enumerate(children))):
            stack.append((indent, name, child, level, at == len(children) - 1))

    push(root, "", 1)
    while stack:  # not by recursion: a key may have thousands of dots
        indent, name, branch, level, last = stack.pop()
        while branch.leaf is None and len(branch.below) == 1:  # nothing to choose from: on one line
            [(more, branch)] = branch.below.items()
            name = f"{name}.{more}"
        line = f"{indent}{'└─ ' if last else '├─ '}{printable(name)}"
        if branch.leaf is not None:
            echo(f"{line}  {styled(branch.leaf.what, 'dim')}")
        else:
            holds = f"{format_count(branch.keys, 'key')}, {format_size(branch.nbytes)}"
            echo(f"{line}  {styled(holds, 'dim')}")
        if depth is None or level < depth:
            push(branch, indent + ("   " if last else "│  "), level + 1)


def _in_order(child: tuple[str, Any]) -> tuple[int, int, str]:
    """Sort numbers as numbers: layer 10 comes after layer 9."""
    name = child[0]
    return (0, int(name), name) if name.isascii() and name.isdigit() and len(name) < 19 else (1, 0, name)


# The checkpoints of a run as a table: what is there, what is good, and why the rest is not.

_STYLES: dict[str, Style] = {"damaged": "red", "unfinished": "yellow"}
_MOST_METRICS = 24


def list_run(run: Run, args: argparse.Namespace) -> int:
    """List the checkpoints of a run, the newest first."""
    if args.pattern or args.prefix or args.tree or args.long:
        raise UsageError(
            f"{args.path} is a run, not a checkpoint: it has no keys",
            hint=f"`shardkeep ls {args.path}` lists its checkpoints; name one of them",
        )
    entries = run.entries()
    latest = next((entry for entry in entries if entry.committed), None)
    if args.json:
        listed = [entry_json(run, entry) | {"latest": entry is latest} for entry in entries]
        document = {"kind": "run", "path": args.path, "template": run.catalog.naming.template}
        print_json(document | {"latest": latest and run.path_of(latest), "checkpoints": listed})
        return 0
    if args.names:
        for entry in entries:
            if entry.committed:
                echo(printable(entry.name))
        return 0
    table = Table(
        ("name", "step", "status", "size", "age", "ranks", "format", "metrics", "marks"),
        right="step size age ranks",
        gives_way="metrics",
    )
    for entry in entries:
        marks = [word for word, is_so in (("latest", entry is latest), ("pinned", entry.pinned)) if is_so]
        style = _STYLES.get(entry.status) or ("green" if entry is latest else None)
        table.add(*_cells(entry), ", ".join(marks), style=style, below=printable(entry.reason))
    table.print()
    counts = [format_count(sum(entry.committed for entry in entries), "checkpoint")]
    counts += [f"{many:,} {status}" for status in _STYLES if (many := sum(e.status == status for e in entries))]
    echo(f"\n{styled(format_size(sum(entry.nbytes for entry in entries)), 'bold')} in {', '.join(counts)}")
    return 0


def _cells(entry: Entry) -> tuple[str, ...]:
    age = (datetime.now(timezone.utc) - entry.saved_at).total_seconds() if entry.saved_at else None
    return (
        printable(entry.name),
        str(entry.step),
        entry.status,
        format_size(entry.nbytes) if entry.nbytes else "",
        format_duration(age) if age is not None else "",
        str(entry.record.world_size) if entry.record else "",
        entry.layout if entry.layout not in {"native", None} else "",
        _metrics_text(entry),
    )


def _metrics_text(entry: Entry) -> str:
    return "  ".join(f"{printable(name)} {value:.4g}" for name, value in entry.metrics.items())


def entry_json(run: Run, entry: Entry) -> dict[str, Any]:
    """Return a checkpoint of a run for programs."""
    return {
        "name": entry.name,
        "path": run.path_of(entry),
        "step": entry.step,
        "status": entry.status,
        "reason": entry.reason or None,
        "layout": entry.layout,
        "saved_at": entry.saved_at.isoformat() if entry.saved_at else None,
        "nbytes": entry.nbytes,
        "world_size": entry.record.world_size if entry.record else None,
        "metrics": dict(entry.metrics),
        "meta": entry.record.meta if entry.record else None,
        "pinned": entry.pinned,
    }


# `shardkeep ls`: the checkpoints of a run, or the keys of one checkpoint.

EXAMPLES = """
  shardkeep ls runs/a                              the checkpoints of a run
  shardkeep ls runs/a/step-500                     what is in one
  shardkeep ls runs/a/step-500 'model.*.weight'    keys that fit a glob
  shardkeep ls runs/a/step-500 --tree --depth 2
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or the directory of a run's checkpoints")
    parser.add_argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob")
    parser.add_argument("--prefix", metavar="KEY", help="only keys that begin with this")
    parser.add_argument("-l", "--long", action="store_true", help="say where every chunk is stored")
    parser.add_argument("--names", action="store_true", help="names alone, one a line, for scripts")
    parser.add_argument("--tree", action="store_true", help="as a tree, with sizes")
    parser.add_argument("--depth", type=int, metavar="N", help="of the tree")
    parser.add_argument("--template", metavar="NAME", help='what checkpoints of the run are called: "step-{step}"')


def run(args: argparse.Namespace) -> int:
    """List it."""
    found = open_checkpoint_or_run(args.path, args.template)
    return list_run(found, args) if isinstance(found, Run) else list_keys(found, args)
