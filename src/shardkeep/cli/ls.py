"""`shardkeep ls`, `latest` and `cat`: list a run or the keys of a checkpoint, find the latest one, print its record."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import msgspec

from shardkeep.cli import argument, command, contents
from shardkeep.cli import output as out
from shardkeep.cli.runs import Run, open_checkpoint_or_run, open_run, path_hints, reject_checkpoint, suggest_path
from shardkeep.cli.verify import check_checkpoint
from shardkeep.engine.sources import find
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.format.record import MAX_RECORD_NBYTES, RECORD_NAME
from shardkeep.manage.catalog import Entry
from shardkeep.opening import Checkpoint
from shardkeep.options import Options
from shardkeep.state.patterns import prefixes_of
from shardkeep.storage.resolve import open_store

_STYLES: dict[str, out.Style] = {"damaged": "red", "unfinished": "yellow"}
_MAX_VALUE_WIDTH = 24


@command(
    argument("path", metavar="PATH", help="a checkpoint, or the directory of a run's checkpoints"),
    argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob"),
    argument("--prefix", metavar="KEY", help="only keys that begin with this"),
    argument("-l", "--long", action="store_true", help="show where every chunk is stored"),
    argument("--names", action="store_true", help="print only names, one per line, for scripts"),
    argument("--tree", action="store_true", help="print a tree with sizes"),
    argument("--depth", type=int, metavar="N", help="depth of the tree"),
    argument("--template", metavar="NAME", help='how checkpoints of the run are named: "step-{step}"'),
    examples="""
  shardkeep ls runs/a                              the checkpoints of a run
  shardkeep ls runs/a/step-500                     the keys of one
  shardkeep ls runs/a/step-500 'model.*.weight'    keys that match a glob
  shardkeep ls runs/a/step-500 --tree --depth 2
""",
)
def ls(args: argparse.Namespace) -> int:
    found = open_checkpoint_or_run(args.path, args.template)
    return _list_run(found, args) if isinstance(found, Run) else _list_keys(found, args)


# -- the checkpoints of a run


def _list_run(run: Run, args: argparse.Namespace) -> int:
    if args.pattern or args.prefix or args.tree or args.long:
        raise out.UsageError(
            f"{args.path} is a run, not a checkpoint: it has no keys",
            hint=f"`shardkeep ls {args.path}` lists its checkpoints; choose one of them",
        )
    latest = next((entry for entry in run.entries if entry.committed), None)
    if args.json:
        listed = [entry_json(run, entry) | {"latest": entry is latest} for entry in run.entries]
        document = {"kind": "run", "path": args.path, "template": run.catalog.naming.template}
        out.print_json(document | {"latest": latest and run.path_of(latest), "checkpoints": listed})
    elif args.names:
        _print_names(entry.name for entry in run.entries if entry.committed)
    else:
        _print_run(run.entries, latest)
    return 0


def _print_names(names: Iterable[str]) -> None:
    for name in names:
        print(out.printable(name))


def _print_run(entries: list[Entry], latest: Entry | None) -> None:
    table = out.Table(
        ("name", "step", "status", "size", "age", "ranks", "format", "metrics", "marks"),
        right="step size age ranks",
        flexible="metrics",
    )
    for entry in entries:
        marks = [word for word, holds in (("latest", entry is latest), ("pinned", entry.pinned)) if holds]
        style = _STYLES.get(entry.status) or ("green" if entry is latest else None)
        age = (datetime.now(timezone.utc) - entry.saved_at).total_seconds() if entry.saved_at else None
        table.add(
            out.printable(entry.name),
            str(entry.step),
            entry.status,
            out.format_size(entry.nbytes) if entry.nbytes else "",
            out.format_duration(age) if age is not None else "",
            str(entry.record.world_size) if entry.record else "",
            entry.layout if entry.layout not in {"native", None} else "",
            "  ".join(f"{out.printable(name)} {value:.4g}" for name, value in entry.metrics.items()),
            ", ".join(marks),
            style=style,
            note=out.printable(entry.reason),
        )
    table.print()
    counts = [out.format_count(sum(entry.committed for entry in entries), "checkpoint")]
    counts += [f"{count:,} {status}" for status in _STYLES if (count := sum(e.status == status for e in entries))]
    print(f"\n{out.styled(out.format_size(sum(entry.nbytes for entry in entries)), 'bold')} in {', '.join(counts)}")


def entry_json(run: Run, entry: Entry) -> dict[str, Any]:
    """Describe a checkpoint of a run as JSON."""
    named = ("name", "step", "status", "layout", "nbytes", "metrics", "pinned")
    return {
        **{name: getattr(entry, name) for name in named},
        "path": run.path_of(entry),
        "reason": entry.reason or None,
        "saved_at": entry.saved_at.isoformat() if entry.saved_at else None,
        "world_size": entry.record.world_size if entry.record else None,
        "meta": entry.record.meta if entry.record else None,
    }


# -- the keys of a checkpoint


def _list_keys(checkpoint: Checkpoint, args: argparse.Namespace) -> int:
    items = list(contents.iter_items(checkpoint, contents.key_filter(args.pattern, args.prefix)))
    if not items and (args.pattern or args.prefix):
        asked = args.prefix or args.pattern[0]
        known = prefixes_of(checkpoint)
        hint = out.did_you_mean(asked, known, otherwise="a pattern is a key, a dotted prefix of keys, or a glob")
        raise out.UsageError(f"no key matches {' '.join([*args.pattern, args.prefix or '']).strip()!r}", hint=hint)
    if args.json:
        found = [contents.item_json(checkpoint, item, chunks=args.long) for item in items]
        out.print_json(
            {"kind": "checkpoint", "path": args.path, **contents.checkpoint_json(checkpoint), "items": found}
        )
        return 0
    if args.names:
        _print_names(item.key for item in items)
        return 0
    print(f"{out.styled(args.path, 'bold')}  {contents.summarize(checkpoint)}\n")
    if args.tree:
        _print_tree(_build_tree(items), args.depth)
    elif args.long:
        _print_long(checkpoint, items)
    else:
        _print_table(checkpoint, items)
    return 0


def _print_table(checkpoint: Checkpoint, items: Iterable[contents.Item]) -> None:
    table = out.Table(("key", "dtype", "shape", "size", "chunks"), right="size chunks", flexible="key")
    for item in items:
        if item.is_tensor:
            size = "tied" if item.tied_to else out.format_size(item.nbytes)
            table.add(out.printable(item.key), item.dtype, out.format_shape(item.shape), size, f"{item.chunks:,}")
        else:  # other layouts keep values in files, which a listing does not read
            text = _value_text(checkpoint, item) if checkpoint.record.format == NATIVE else ""
            table.add(out.printable(item.key), item.dtype, out.shorten(text, _MAX_VALUE_WIDTH), "", "")
    table.print()


def _value_text(checkpoint: Checkpoint, item: contents.Item) -> str:
    value, why_not = contents.plain_value(checkpoint, item.key)
    return f"({why_not})" if why_not else out.printable(repr(value))


def _print_long(checkpoint: Checkpoint, items: Iterable[contents.Item]) -> None:
    for item in items:
        text = item.description if item.is_tensor else _value_text(checkpoint, item)
        print(f"{out.styled(out.printable(item.key), 'cyan')}  {text}")
        contents.print_chunks(contents.stored_chunks(checkpoint, item) if not item.tied_to else ())


@dataclass
class _Branch:
    keys: int = 0
    nbytes: int = 0
    leaf: contents.Item | None = None
    below: dict[str, _Branch] = field(default_factory=dict)


def _build_tree(items: Iterable[contents.Item]) -> _Branch:
    root = _Branch()
    for item in items:
        branch = root
        for part in item.key.split("."):
            branch = branch.below.setdefault(part, _Branch())
            branch.keys += 1
            branch.nbytes += item.own_nbytes
        branch.leaf = item
    return root


def _print_tree(root: _Branch, depth: int | None) -> None:
    stack: list[tuple[str, str, _Branch, int, bool]] = []

    def natural_order(name: str) -> tuple[bool, int, str]:
        """Sort numbers as numbers, so that layer 10 comes after layer 9."""
        is_number = name.isascii() and name.isdigit() and len(name) < 19
        return not is_number, int(name) if is_number else 0, name

    def push(branch: _Branch, indent: str, level: int) -> None:
        for at, name in enumerate(sorted(branch.below, key=natural_order, reverse=True)):
            stack.append((indent, name, branch.below[name], level, at == 0))

    push(root, "", 1)
    while stack:  # not recursive, because a key may have thousands of dots
        indent, name, branch, level, last = stack.pop()
        while branch.leaf is None and len(branch.below) == 1:  # a branch without alternatives shares the line
            [(more, branch)] = branch.below.items()
            name = f"{name}.{more}"
        leaf = branch.leaf
        text = leaf.what if leaf else f"{out.format_count(branch.keys, 'key')}, {out.format_size(branch.nbytes)}"
        print(f"{indent}{'└─ ' if last else '├─ '}{out.printable(name)}  {out.styled(text, 'dim')}")
        if depth is None or level < depth:
            push(branch, indent + ("   " if last else "│  "), level + 1)


# -- latest


@command(
    argument("root", metavar="ROOT", help="the directory of a run's checkpoints"),
    argument("--template", metavar="NAME", help='how its checkpoints are named: "step-{step}"'),
    examples="""
  shardkeep latest runs/a
  python evaluate.py --from "$(shardkeep latest runs/a)"
""",
)
def latest(args: argparse.Namespace) -> int:
    """Print the path alone on stdout; if there is none, print nothing there and return 1."""
    reject_checkpoint(args.root)
    run = open_run(args.root, args.template)  # a directory that does not exist has no checkpoint yet
    skipped: list[dict[str, str]] = []
    latest: Entry | None = None
    for entry in run.entries:
        reason = entry.reason
        if entry.committed:
            reason = check_checkpoint(run.path_of(entry), deep=False).reason
        if not reason:
            latest = entry
            break
        skipped.append({"name": entry.name, "reason": reason})
        out.echo_err(f"skipped {out.printable(entry.name)}: {out.printable(reason)}", "yellow")
    if args.json:
        out.print_json({"latest": entry_json(run, latest) if latest else None, "skipped": skipped})
    elif latest:
        print(run.path_of(latest))
    if latest is None:
        out.echo_err(f"{args.root}: no checkpoint" + (" that can be loaded" if skipped else " below it yet"))
        if not skipped and (hint := suggest_path(args.root)):
            out.echo_err(f"  hint: {hint}")
    return 0 if latest else 1


# -- cat


@command(
    argument("checkpoint", metavar="CHECKPOINT"),
    examples="""
  shardkeep cat runs/a/step-500
  shardkeep cat runs/a/step-500 --json | jq .meta
""",
)
def cat(args: argparse.Namespace) -> int:
    """Print the commit record as it is stored, or what shardkeep derives for a checkpoint of another format."""
    store = open_store(args.checkpoint, direct=Options().direct_io)
    with path_hints(args.checkpoint):
        record = find(store).record
    if record.format == NATIVE:
        text = store.get(RECORD_NAME, limit=MAX_RECORD_NBYTES)
    else:
        text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    if args.json:
        out.print_json(msgspec.json.decode(text))
    else:
        decoded = text.decode().rstrip()
        print(out.printable_lines(decoded) if out.is_terminal() else decoded)
    return 0
