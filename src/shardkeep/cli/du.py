"""`shardkeep du`: what takes the space, by prefix of the keys or by checkpoint of a run. Reads no tensor data."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardkeep.cli.contents import Item, iter_items, key_filter
from shardkeep.cli.output import (
    Table,
    UsageError,
    echo,
    format_count,
    format_size,
    print_json,
    printable,
    styled,
)
from shardkeep.cli.runs import Run, open_checkpoint_or_run
from shardkeep.cli.show import bar_text
from shardkeep.manage.catalog import Entry
from shardkeep.opening import Checkpoint

EXAMPLES = """
  shardkeep du runs/a/step-500
  shardkeep du runs/a/step-500 --depth 3 --limit 10
  shardkeep du runs/a                              by checkpoint
"""
_BAR = 20


@dataclass
class Share:
    """What one prefix takes."""

    name: str
    keys: int = 0
    nbytes: int = 0

    def document(self, total: int) -> dict[str, Any]:
        """Return it for programs."""
        return {"name": self.name, "keys": self.keys, "nbytes": self.nbytes, "share": self.nbytes / (total or 1)}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or the directory of a run's checkpoints")
    parser.add_argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob")
    parser.add_argument("--depth", type=int, default=2, metavar="N", help="dotted parts of a prefix (2; 0: whole keys)")
    parser.add_argument("--limit", type=int, default=30, metavar="N", help="lines (30; 0: all)")
    parser.add_argument("--template", metavar="NAME", help='what checkpoints of the run are called: "step-{step}"')


def run(args: argparse.Namespace) -> int:
    """Add it up."""
    if args.depth < 0:
        raise UsageError(f"--depth {args.depth}: give 0 or more")
    found = open_checkpoint_or_run(args.path, args.template)
    if isinstance(found, Run):
        return _of_run(found, args)
    return _of_checkpoint(found, args)


def _of_checkpoint(checkpoint: Checkpoint, args: argparse.Namespace) -> int:
    items = list(iter_items(checkpoint, key_filter(args.pattern, None)))
    if not items and args.pattern:
        raise UsageError(f"no key fits {' '.join(args.pattern)!r}")
    shares = by_prefix(items, args.depth)
    parts = by_part(items)
    total = sum(share.nbytes for share in shares)
    record = checkpoint.record
    stored = record.stored_nbytes
    if args.json:
        print_json(
            {
                "kind": "checkpoint",
                "path": args.path,
                "nbytes": total,
                "stored_bytes": stored,
                "parts": {part.name: part.document(total) for part in parts},
                "prefixes": [share.document(total) for share in shares],
            }
        )
        return 0
    _print_shares(shares, total, args.limit)
    split = ", ".join(f"{part.name} {format_size(part.nbytes)} ({_percent(part.nbytes, total)})" for part in parts)
    echo(f"\n{styled(format_size(total), 'bold')} in {format_count(len(items), 'key')}\n{split}")
    if not args.pattern:
        echo(f"{format_count(len(record.files), 'file')} and the index take {format_size(stored)}")
    return 0


def by_prefix(items: Iterable[Item], depth: int) -> list[Share]:
    """Add up what keys take under each prefix, the largest first."""
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
    """Tell optimizer state, by the name it is saved under, from all other tensors, and those from plain values."""
    found = {name: Share(name) for name in ("model", "optimizer", "values")}
    for item in items:
        upper = item.key.lower().split(".")[:2]
        name = "values" if not item.is_tensor else "optimizer" if any("optim" in part for part in upper) else "model"
        found[name].keys += 1
        found[name].nbytes += item.own_nbytes
    return [share for share in found.values() if share.keys]


def _print_shares(shares: list[Share], total: int, limit: int) -> None:
    listed = shares[:limit] if limit > 0 else shares
    table = Table(("prefix", "keys", "size", "share", ""), right="keys size share", gives_way="prefix")
    most = max((share.nbytes for share in shares), default=0) or 1
    for share in listed:
        bar = bar_text(share.nbytes / most, _BAR)
        table.add(
            printable(share.name), f"{share.keys:,}", format_size(share.nbytes), _percent(share.nbytes, total), bar
        )
    table.print()
    if len(shares) > len(listed):
        rest = sum(share.nbytes for share in shares[len(listed) :])
        echo(f"and {len(shares) - len(listed):,} more of {format_size(rest)} (--limit 0 lists them)")


def _of_run(found: Run, args: argparse.Namespace) -> int:
    if args.pattern:
        raise UsageError(f"{args.path} is a run: patterns are for the keys of one checkpoint")
    entries = found.entries()
    sizes = {entry.name: _stored_nbytes(found, entry) for entry in entries}
    total = sum(sizes.values())
    if args.json:
        listed = [
            {"name": entry.name, "step": entry.step, "status": entry.status, "nbytes": sizes[entry.name]}
            for entry in entries
        ]
        print_json({"kind": "run", "path": args.path, "nbytes": total, "checkpoints": listed})
        return 0
    table = Table(("checkpoint", "size", "share", "", "status"), right="size share", gives_way="checkpoint")
    most = max(sizes.values(), default=0) or 1
    for entry in entries[: args.limit] if args.limit > 0 else entries:
        status = "" if entry.committed else entry.status
        nbytes = sizes[entry.name]
        table.add(
            printable(entry.name), format_size(nbytes), _percent(nbytes, total), bar_text(nbytes / most, _BAR), status
        )
    table.print()
    echo(f"\n{styled(format_size(total), 'bold')} in {format_count(len(entries), 'checkpoint')}")
    return 0


def _stored_nbytes(found: Run, entry: Entry) -> int:
    """Return what all files of a place take, also those that no record names."""
    return sum(info.nbytes for info in found.catalog.root.place(entry.name).list())


def _percent(nbytes: int, total: int) -> str:
    return f"{nbytes / (total or 1):.1%}"
