"""`shardkeep du`: what takes the space, by prefix of the keys or by checkpoint of a run. Reads no tensor data."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardkeep.cli import Command
from shardkeep.cli.contents import Item, iter_items, key_filter
from shardkeep.cli.output import (
    Table,
    UsageError,
    echo,
    format_bar,
    format_count,
    format_size,
    print_json,
    printable,
    styled,
)
from shardkeep.cli.runs import Run, open_checkpoint_or_run
from shardkeep.manage.catalog import Entry
from shardkeep.opening import Checkpoint

_BAR_WIDTH = 20


@dataclass
class Share:
    """The space that one prefix takes."""

    name: str
    keys: int = 0
    nbytes: int = 0

    def json(self, total: int) -> dict[str, Any]:
        """Describe it as JSON."""
        return {"name": self.name, "keys": self.keys, "nbytes": self.nbytes, "share": self.nbytes / (total or 1)}


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or the directory of a run's checkpoints")
    parser.add_argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob")
    parser.add_argument("--depth", type=int, default=2, metavar="N", help="dotted parts of a prefix (2; 0: whole keys)")
    parser.add_argument("--limit", type=int, default=30, metavar="N", help="lines (30; 0: all)")
    parser.add_argument("--template", metavar="NAME", help='how checkpoints of the run are named: "step-{step}"')


def _run(args: argparse.Namespace) -> int:
    if args.depth < 0:
        raise UsageError(f"--depth {args.depth}: give 0 or more")
    found = open_checkpoint_or_run(args.path, args.template)
    return _du_run(found, args) if isinstance(found, Run) else _du_checkpoint(found, args)


def _du_checkpoint(checkpoint: Checkpoint, args: argparse.Namespace) -> int:
    items = list(iter_items(checkpoint, key_filter(args.pattern, None)))
    if not items and args.pattern:
        raise UsageError(f"no key matches {' '.join(args.pattern)!r}")
    shares = by_prefix(items, args.depth)
    parts = by_part(items)
    total = sum(share.nbytes for share in shares)
    stored = checkpoint.record.stored_nbytes
    if args.json:
        print_json(
            {
                "kind": "checkpoint",
                "path": args.path,
                "nbytes": total,
                "stored_bytes": stored,
                "parts": {part.name: part.json(total) for part in parts},
                "prefixes": [share.json(total) for share in shares],
            }
        )
        return 0
    _print_shares(shares, total, args.limit)
    split = ", ".join(f"{part.name} {format_size(part.nbytes)} ({_percent(part.nbytes, total)})" for part in parts)
    echo(f"\n{styled(format_size(total), 'bold')} in {format_count(len(items), 'key')}\n{split}")
    if not args.pattern:
        echo(f"{format_count(len(checkpoint.record.files), 'file')} and the index take {format_size(stored)}")
    return 0


def by_prefix(items: Iterable[Item], depth: int) -> list[Share]:
    """Add up the sizes of keys by prefix, the largest first."""
    found: dict[str, Share] = {}
    for item in items:
        parts = item.key.split(".")
        cut = depth if 0 < depth < len(parts) else len(parts)
        name = ".".join(parts[:cut]) + (".*" if cut < len(parts) else "")
        share = found.setdefault(name, Share(name))
        share.keys += 1
        share.nbytes += item.own_nbytes
    return sorted(found.values(), key=lambda share: (-share.nbytes, share.name))


def by_part(items: Iterable[Item]) -> list[Share]:
    """Add up sizes of optimizer state (recognised by its name), of other tensors, and of plain values."""
    found = {name: Share(name) for name in ("model", "optimizer", "values")}
    for item in items:
        upper = item.key.lower().split(".")[:2]
        name = "values" if not item.is_tensor else "optimizer" if any("optim" in part for part in upper) else "model"
        found[name].keys += 1
        found[name].nbytes += item.own_nbytes
    return [share for share in found.values() if share.keys]


def _print_shares(shares: list[Share], total: int, limit: int) -> None:
    listed = shares[:limit] if limit > 0 else shares
    table = Table(("prefix", "keys", "size", "share", ""), right="keys size share", flexible="prefix")
    most = max((share.nbytes for share in shares), default=0) or 1
    for share in listed:
        size, bar = format_size(share.nbytes), format_bar(share.nbytes / most, _BAR_WIDTH)
        table.add(printable(share.name), f"{share.keys:,}", size, _percent(share.nbytes, total), bar)
    table.print()
    if len(shares) > len(listed):
        rest = sum(share.nbytes for share in shares[len(listed) :])
        echo(f"and {len(shares) - len(listed):,} more of {format_size(rest)} (--limit 0 lists them)")


def _du_run(run: Run, args: argparse.Namespace) -> int:
    if args.pattern:
        raise UsageError(f"{args.path} is a run: patterns are for the keys of one checkpoint")
    sizes = {entry.name: _stored_nbytes(run, entry) for entry in run.entries}
    total = sum(sizes.values())
    if args.json:
        listed = [
            {"name": entry.name, "step": entry.step, "status": entry.status, "nbytes": sizes[entry.name]}
            for entry in run.entries
        ]
        print_json({"kind": "run", "path": args.path, "nbytes": total, "checkpoints": listed})
        return 0
    table = Table(("checkpoint", "size", "share", "", "status"), right="size share", flexible="checkpoint")
    most = max(sizes.values(), default=0) or 1
    for entry in run.entries[: args.limit] if args.limit > 0 else run.entries:
        status = "" if entry.committed else entry.status
        nbytes = sizes[entry.name]
        bar = format_bar(nbytes / most, _BAR_WIDTH)
        table.add(printable(entry.name), format_size(nbytes), _percent(nbytes, total), bar, status)
    table.print()
    echo(f"\n{styled(format_size(total), 'bold')} in {format_count(len(run.entries), 'checkpoint')}")
    return 0


def _stored_nbytes(run: Run, entry: Entry) -> int:
    """Return the size of all files of a checkpoint, including those that its record does not name."""
    return sum(info.nbytes for info in run.catalog.root.place(entry.name).list())


def _percent(nbytes: int, total: int) -> str:
    return f"{nbytes / (total or 1):.1%}"


COMMANDS = {
    "du": Command(
        _configure,
        _run,
        examples="""
  shardkeep du runs/a/step-500
  shardkeep du runs/a/step-500 --depth 3 --limit 10
  shardkeep du runs/a                              by checkpoint
""",
    )
}
