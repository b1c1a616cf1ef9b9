"""`shardkeep ls`, `latest` and `cat`: list a run or the keys of a checkpoint, find the latest one, print its record."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, TypeVar

import msgspec

from shardkeep.cli import argument, command, contents
from shardkeep.cli import output as out
from shardkeep.cli.runs import Run, open_checkpoint_or_run, open_run, path_hints, suggest_path
from shardkeep.cli.verify import check_checkpoint
from shardkeep.engine.sources import find
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.format.record import MAX_RECORD_NBYTES, RECORD_NAME
from shardkeep.manage.entry import Entry
from shardkeep.opening import Checkpoint
from shardkeep.options import Options
from shardkeep.storage.resolve import open_store

T = TypeVar("T")
_STYLES: dict[str, out.Style] = {"damaged": "red", "unfinished": "yellow"}


@command(
    argument("path", metavar="PATH", help="a checkpoint, the directory of a run's checkpoints, or a folder of runs"),
    argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob"),
    argument("-l", "--long", action="store_true", help="show where every chunk is stored"),
    argument("--names", action="store_true", help="print only names, one per line, for scripts"),
    argument("--tree", action="store_true", help="print a tree with shapes and sizes"),
    argument("--depth", type=int, metavar="N", help="depth of the tree"),
    argument("--sort", choices=("name", "size"), help="by name, or the largest first"),
    argument("--limit", type=int, default=0, metavar="N", help="lines (0: all)"),
    argument("--last", type=int, default=0, metavar="N", help="only the newest N checkpoints; the others are not read"),
    argument("--template", metavar="NAME", help='only checkpoints of these names: "step-{step}"'),
    examples="""
  shardkeep ls runs/a                              the checkpoints of a run
  shardkeep ls runs/a --last 5                     the newest five
  shardkeep ls runs                                the runs in a folder
  shardkeep ls runs/a/step-500                     the keys of one
  shardkeep ls runs/a/step-500 'model.*.weight'    keys that match a glob
  shardkeep ls runs/a/step-500 --sort size --limit 5
  shardkeep ls runs/a/step-500 --tree --depth 2
""",
    paged=True,
)
def ls(args: argparse.Namespace) -> int:
    found = open_checkpoint_or_run(args.path, args.template, max(0, args.last))
    return _list_run(found, args) if isinstance(found, Run) else _list_keys(found, args)


def _select(rows: Iterable[T], args: argparse.Namespace, name: Callable[[T], str], size: Callable[[T], int]) -> list[T]:
    """Return the rows that `--sort` and `--limit` ask for, in order; how many are left out is printed at the end."""
    found = list(rows)
    if args.sort:
        found.sort(key=lambda row: out.natural_order(name(row)))
    if args.sort == "size":
        found.sort(key=size, reverse=True)
    return found[: args.limit] if args.limit > 0 else found


def _print_rest(count: int, args: argparse.Namespace) -> None:
    if 0 < args.limit < count:
        print(out.styled(f"and {count - args.limit:,} more (--limit 0 lists them)", "dim"))


def _print_names(names: Iterable[str]) -> None:
    for name in names:
        print(out.printable(name))


def _list_run(run: Run, args: argparse.Namespace) -> int:
    if args.pattern or args.tree or args.long:
        what = "run" if run.entries else "folder of runs" if run.runs else "folder with nothing in it"
        raise out.UsageError(
            f"{args.path} is a {what}, not a checkpoint: it has no keys",
            hint=f"`shardkeep ls {args.path}` lists what it has; choose one of them",
        )
    entries = _select(run.entries, args, lambda entry: entry.name, lambda entry: entry.nbytes)
    runs = _select(run.runs, args, lambda each: each.path, lambda each: each.nbytes)
    if args.json:
        document = _run_json(run, entries) | {"runs": [_run_json(each, each.entries) for each in runs]}
        return out.print_json(document | ({"kind": "runs"} if runs and not entries else {}))
    if args.names:
        _print_names(entry.name for entry in entries if entry.committed)
        _print_names(map(run.name_of, runs))
        return 0
    if entries:
        _print_run(entries, run.latest)
        _print_rest(len(run.entries), args)
        print(f"\n{_totals(run.entries)}" + ("\n" if runs else ""))
    if runs:
        _print_runs(run, runs)
        _print_rest(len(run.runs), args)
        every = [entry for each in run.runs for entry in each.entries]
        print(f"\n{_totals(every)} of {out.format_count(len(run.runs), 'run')}")
    if not entries and not runs:
        print("no checkpoint yet")
    return 0


def _totals(entries: Iterable[Entry]) -> str:
    known = list(entries)
    counts = [out.format_count(sum(entry.committed for entry in known), "checkpoint"), *_doubtful(known)]
    return f"{out.styled(out.format_size(sum(entry.nbytes for entry in known)), 'bold')} in {', '.join(counts)}"


def _doubtful(entries: Iterable[Entry]) -> list[str]:
    found: Counter[str] = Counter(entry.status for entry in entries)
    return [f"{found[status]:,} {status}" for status in _STYLES if found[status]]


def _print_run(entries: list[Entry], latest: Entry | None) -> None:
    columns = ("name", "step", "status", "size", "age", "ranks", "format")
    names = list(dict.fromkeys(name for entry in entries for name in entry.metrics))
    metrics = list(map(out.printable, names))
    table = out.Table(
        (*columns, *metrics, "marks"),
        right={"step", "size", "age", "ranks", *metrics},
        flexible="name",
        optional=[*reversed(metrics), "ranks", "format"],
    )
    for entry in entries:
        marks = [word for word, holds in (("latest", entry is latest), ("pinned", entry.pinned)) if holds]
        table.add(
            entry.name,
            _step(entry),
            entry.status,
            out.format_size(entry.nbytes) if entry.nbytes else "",
            _age(entry),
            str(entry.record.world_size) if entry.record else "",
            entry.layout if entry.layout not in {"native", None} else "",
            *(f"{entry.metrics[name]:.4g}" if name in entry.metrics else "" for name in names),
            ", ".join(marks),
            style=_STYLES.get(entry.status) or ("green" if entry is latest else None),
            note=entry.reason,
        )
    table.print()


def _step(entry: Entry | None) -> str:
    return "" if entry is None or entry.known_step is None else str(entry.step)


def _age(entry: Entry | None) -> str:
    when = entry.saved_at if entry else None
    return out.format_age((datetime.now(timezone.utc) - when).total_seconds()) if when else ""


def _print_runs(folder: Run, runs: Iterable[Run]) -> None:
    columns = ("run", "checkpoints", "latest", "step", "size", "age", "")
    table = out.Table(columns, right={"checkpoints", "step", "size", "age"}, flexible="run")
    for run in runs:
        count = f"{sum(entry.committed for entry in run.entries):,}"
        latest = (run.latest.name if run.latest else "none", _step(run.latest))
        sizes = (out.format_size(run.nbytes), _age(run.latest))
        table.add(folder.name_of(run), count, *latest, *sizes, ", ".join(_doubtful(run.entries)))
    table.print()


def entry_json(run: Run, entry: Entry) -> dict[str, Any]:
    named = ("name", "status", "layout", "nbytes", "metrics", "pinned", "managed")
    return {
        **{name: getattr(entry, name) for name in named},
        "step": entry.known_step,
        "path": run.path_to(entry.name),
        "reason": entry.reason or None,
        "saved_at": entry.saved_at.isoformat() if entry.saved_at else None,
        "world_size": entry.record.world_size if entry.record else None,
        "meta": entry.record.meta if entry.record else None,
    }


def _run_json(run: Run, entries: Iterable[Entry]) -> dict[str, Any]:
    listed = [entry_json(run, entry) | {"latest": entry is run.latest} for entry in entries]
    document = {"kind": "run", "path": run.path, "template": run.catalog.naming.template}
    return document | {"latest": run.path_to(run.latest.name) if run.latest else None, "checkpoints": listed}


def _list_keys(checkpoint: Checkpoint, args: argparse.Namespace) -> int:
    every = contents.matching_items(checkpoint, args.pattern)
    items = _select(every, args, lambda item: item.key, lambda item: item.own_nbytes)
    if args.json:
        found = [
            asdict(item) | ({"chunks": contents.stored_chunks(checkpoint, item)} if args.long else {}) for item in items
        ]
        return out.print_json(
            {"kind": "checkpoint", "path": args.path, **contents.checkpoint_json(checkpoint), "items": found}
        )
    if args.names:
        _print_names(item.key for item in items)
        return 0
    print(out.titled(out.printable(args.path), f"  {contents.summarize(checkpoint)}", "bold") + "\n")
    count = len(every)
    if args.tree:
        lines = list(_tree_lines(checkpoint, every, args))
        count = len(lines)
        print("\n".join(lines[: args.limit] if args.limit > 0 else lines))
    elif args.long:
        for item in items:
            print(out.titled(out.printable(item.key), f"  {contents.text_of(checkpoint, item)}", "cyan"))
            contents.print_chunks(contents.stored_chunks(checkpoint, item) if not item.tied_to else ())
    else:
        _print_table(checkpoint, items)
    _print_rest(count, args)
    return 0


def _print_table(checkpoint: Checkpoint, items: Iterable[contents.Item]) -> None:
    table = out.Table(
        ("key", "dtype", "shape", "size", "chunks"),
        right={"size", "chunks"},
        flexible="key",
        optional=["chunks"],
    )
    for item in items:
        if item.is_tensor:
            size = "tied" if item.tied_to else out.format_size(item.nbytes)
            table.add(item.key, item.dtype, out.format_shape(item.shape), size, f"{item.chunks:,}")
        else:
            table.add(item.key, item.dtype, contents.brief_value(checkpoint, item), "", "")
    table.print()


_Branch = list[tuple[list[str], contents.Item]]
"""The items below a node of the tree, each with the rest of its key, in parts."""


def _tree_lines(checkpoint: Checkpoint, items: Iterable[contents.Item], args: argparse.Namespace) -> Iterator[str]:
    """Return the lines of a tree, one for each branch; two in one string if a branch does not fit into one."""
    room = out.terminal_width() or sys.maxsize

    def nbytes_of(branch: _Branch) -> int:
        return sum(item.own_nbytes for _, item in branch)

    def below(above: _Branch, indent: str, level: int) -> Iterator[str]:
        branches: dict[str, _Branch] = {}
        for parts, item in above:
            if parts:
                branches.setdefault(parts[0], []).append((parts[1:], item))
        by_size = sorted(branches, key=lambda name: -nbytes_of(branches[name]))
        names = by_size if args.sort == "size" else list(branches)
        for name in names:
            shown, branch, is_last = name, branches[name], name == names[-1]
            while branch[0][0] and len({tuple(parts[:1]) for parts, _ in branch}) == 1:
                shown += f".{branch[0][0][0]}"  # a branch without alternatives shares the line
                branch = [(parts[1:], item) for parts, item in branch]
            leaf = next((item for parts, item in branch if not parts), None)
            text = f"{out.format_count(len(branch), 'key')}, {out.format_size(nbytes_of(branch))}"
            text = text if leaf is None else contents.text_of(checkpoint, leaf)
            inner = indent + ("   " if is_last else "│  ")
            line, first = f"{indent}{'└─ ' if is_last else '├─ '}{out.printable(shown)}  ", ""
            if len(line) + min(len(text), 30) > room:  # the description gets a line of its own
                first, line = line.rstrip() + "\n", inner + "  "
            yield first + line + out.styled(out.shorten(text, max(30, room - len(line))), "dim")
            if args.depth is None or level < args.depth:
                yield from below(branch, inner, level + 1)

    return below([(item.key.split("."), item) for item in items], "", 1)


@command(
    argument("root", metavar="ROOT", help="the directory of a run's checkpoints"),
    examples="""
  shardkeep latest runs/a
  python evaluate.py --from "$(shardkeep latest runs/a)"
""",
)
def latest(args: argparse.Namespace) -> int:
    """Print the path alone on stdout; nothing if there is none."""
    run = open_run(args.root, must_exist=False)  # a directory that does not exist has no checkpoint yet
    skipped: list[dict[str, str]] = []
    latest: Entry | None = None
    for entry in run.newest():
        reason = entry.reason
        if entry.committed:
            reason = check_checkpoint(run.path_to(entry.name), deep=False).reason
        if not reason:
            latest = entry
            break
        skipped.append({"name": entry.name, "reason": reason})
        out.echo_err(f"skipped {out.printable(entry.name)}: {out.printable(reason)}", "yellow")
    if args.json:
        out.print_json({"latest": entry_json(run, latest) if latest else None, "skipped": skipped})
    elif latest:
        print(run.path_to(latest.name))
    if latest is None:
        out.echo_err(f"{args.root}: no checkpoint" + (" that can be loaded" if skipped else " below it yet"))
        if not skipped and (hint := suggest_path(args.root)):
            out.echo_err(f"  hint: {hint}")
    return 0 if latest else 1


@command(
    argument("checkpoint", metavar="CHECKPOINT"),
    examples="""
  shardkeep cat runs/a/step-500
  shardkeep cat runs/a/step-500 --json | jq .meta
""",
    paged=True,
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
