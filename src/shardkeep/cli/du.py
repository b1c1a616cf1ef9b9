"""`shardkeep du`: what takes the space, by prefix of the keys, checkpoint of a run, or run of a folder. Reads no tensors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.contents import Item, matching_items
from shardkeep.cli.runs import Run, open_checkpoint_or_run
from shardkeep.opening import Checkpoint
from shardkeep.storage.base import is_single_file

_BAR_WIDTH = 20
_RNG = re.compile(r"(?:^|_)rng(?:_|$)|rng_?states?$|random_states?$")

Shares = dict[str, tuple[int, int]]
"""The number of keys, and their bytes, by name."""


@command(
    argument("path", metavar="PATH", help="a checkpoint, the directory of a run's checkpoints, or a folder of runs"),
    argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob"),
    argument("--depth", type=int, default=2, metavar="N", help="dotted parts of a prefix (2; 0: whole keys)"),
    argument("--limit", type=int, default=30, metavar="N", help="lines (30; 0: all)"),
    examples="""
  shardkeep du runs/a/step-500
  shardkeep du runs/a/step-500 --depth 3 --limit 10
  shardkeep du runs/a                              by checkpoint
  shardkeep du runs                                by run
""",
    paged=True,
)
def du(args: argparse.Namespace) -> int:
    if args.depth < 0:
        raise out.UsageError(f"--depth {args.depth}: give 0 or more")
    found = open_checkpoint_or_run(args.path)
    return _du_run(found, args) if isinstance(found, Run) else _du_checkpoint(found, args)


def _du_checkpoint(checkpoint: Checkpoint, args: argparse.Namespace) -> int:
    items = matching_items(checkpoint, args.pattern)
    shares = _add_up(items, lambda item: _prefix(item.key, args.depth))
    parts = _add_up(items, _part)
    total = sum(nbytes for _, nbytes in shares.values())
    stored = checkpoint.record.stored_nbytes
    if args.json:

        def as_json(found: Shares) -> list[dict[str, Any]]:
            return [
                {"name": name, "keys": keys, "nbytes": nbytes, "share": nbytes / (total or 1)}
                for name, (keys, nbytes) in found.items()
            ]

        sizes = {"nbytes": total, "stored_bytes": stored, "prefixes": as_json(shares)}
        by_name = {part["name"]: part for part in as_json(parts)}
        return out.print_json({"kind": "checkpoint", "path": args.path, **sizes, "parts": by_name})
    _print_shares("prefix", [(name, f"{keys:,}", nbytes, "") for name, (keys, nbytes) in shares.items()], args.limit)
    named = [(name, parts[name][1]) for name in ("model", "optimizer", "rng", "values") if name in parts]
    split = ", ".join(f"{name} {out.format_size(nbytes)} ({_percent(nbytes, total)})" for name, nbytes in named)
    print(f"\n{out.styled(out.format_size(total), 'bold')} in {out.format_count(len(items), 'key')}")
    print(out.wrap_lines(split))
    if not args.pattern:
        print(f"{out.format_count(len(checkpoint.record.files), 'file')} and the index take {out.format_size(stored)}")
    return 0


def _add_up(items: Iterable[Item], name_of: Callable[[Item], str]) -> Shares:
    found: Shares = {}
    for item in items:
        keys, nbytes = found.get(name_of(item), (0, 0))
        found[name_of(item)] = keys + 1, nbytes + item.own_nbytes
    return dict(sorted(found.items(), key=lambda share: (-share[1][1], out.natural_order(share[0]))))


def _prefix(key: str, depth: int) -> str:
    parts = key.split(".")
    return ".".join(parts[:depth]) + ".*" if 0 < depth < len(parts) else key


def _part(item: Item) -> str:
    """Return what an item belongs to: by its name, random number generators or an optimizer; the model, or plain values."""
    parts = item.key.lower().split(".")
    if any(_RNG.search(part) for part in parts):
        return "rng"
    if not item.is_tensor:
        return "values"
    return "optimizer" if any("optim" in part for part in parts[:2]) else "model"


def _print_shares(what: str, rows: Sequence[tuple[str, str, int, str]], limit: int, *, counted: str = "keys") -> None:
    """Print names, how many keys or checkpoints each has, sizes and states, up to a limit, which is 0 for all."""
    listed = rows[:limit] if limit > 0 else rows
    right = {counted, "size", "share"}
    table = out.Table((what, counted, "size", "share", "", "status"), right=right, flexible=what, optional=[""])
    sizes = [nbytes for _, _, nbytes, _ in rows]
    total = sum(sizes)
    for name, keys, nbytes, status in listed:
        bar = out.format_bar(nbytes / (total or 1), _BAR_WIDTH)
        table.add(name, keys, out.format_size(nbytes), _percent(nbytes, total), bar, status)
    table.print()
    if len(rows) > len(listed):
        rest = sum(sizes[len(listed) :])
        print(f"and {len(rows) - len(listed):,} more of {out.format_size(rest)} (--limit 0 lists them)")


def _du_run(run: Run, args: argparse.Namespace) -> int:
    if args.pattern:
        raise out.UsageError(f"{args.path} is not a checkpoint: patterns select keys of a checkpoint")
    sizes, below = _sizes(run), {run.name_of(each): _sizes(each) for each in run.runs}
    totals = {name: sum(each.values()) for name, each in below.items()}
    total = sum(sizes.values()) + sum(totals.values())
    if args.json:
        listed = [
            {"name": entry.name, "step": entry.known_step, "status": entry.status, "nbytes": sizes[entry.name]}
            for entry in run.entries
        ]
        runs = [{"name": name, "checkpoints": len(below[name]), "nbytes": nbytes} for name, nbytes in totals.items()]
        kind = "runs" if runs and not listed else "run"
        return out.print_json({"kind": kind, "path": args.path, "nbytes": total, "checkpoints": listed, "runs": runs})
    rows = [(each.name, "", sizes[each.name], "" if each.committed else each.status) for each in run.entries]
    rows += [(name, f"{len(below[name]):,}", nbytes, "") for name, nbytes in totals.items()]
    _print_shares("checkpoint" if sizes else "run", rows, args.limit, counted="checkpoints")
    count = out.format_count(len(sizes) + sum(map(len, below.values())), "checkpoint")
    of_runs = f" of {out.format_count(len(below), 'run')}" if below else ""
    print(f"\n{out.styled(out.format_size(total), 'bold')} in {count}{of_runs}" if rows else "no checkpoint yet")
    return 0


def _sizes(run: Run) -> dict[str, int]:
    """Return what the files of each checkpoint take, including those that a record does not name."""
    root = run.catalog.root  # which does not list links to files
    sizes = {}
    for entry in run.entries:
        place = root.place(entry.name)
        files = () if is_single_file(place) else place.list()
        sizes[entry.name] = sum(info.nbytes for info in files) or entry.nbytes
    return sizes


def _percent(nbytes: int, total: int) -> str:
    share = nbytes / (total or 1)
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"
