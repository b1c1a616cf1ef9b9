"""
`shardkeep prune`: delete the checkpoints of a run that no rule keeps, and orphan files of saves that died; `pin`, `unpin`.

Nothing is deleted without a rule and a confirmation. Only checkpoints whose names the template gives are managed; rules do
not see the others. The newest checkpoint and pinned ones are always kept. A checkpoint that a shallow check finds damaged
is kept but does not count, so that no rule relies on it. A checkpoint that is being written is kept, and so is, without
--force, one whose directory holds other files.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, Literal

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.runs import Run, open_run, path_hints, split_path
from shardkeep.cli.verify import check_checkpoint
from shardkeep.display import some_of
from shardkeep.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint, StateError, UnsupportedVersion
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import orphans
from shardkeep.layouts.native import save_id_of
from shardkeep.layouts.torch import DATA_SUFFIX, is_data, is_metadata
from shardkeep.manage import catalog
from shardkeep.manage.entry import Entry
from shardkeep.manage.lease import running_holder
from shardkeep.manage.retention import AnyOf, KeepBest, KeepEvery, KeepLast, KeepYounger, Policy, compared_metrics, plan
from shardkeep.storage.base import REMOVING_NAME, local_path
from shardkeep.storage.local import storage_errors

_THREADS = 8
"""Threads that check checkpoints; most of the time they wait for the disk or the network."""
_MAX_NAMED = 3
"""Foreign files that a message names; the others are counted."""


@dataclass(frozen=True)
class Action:
    """What is done with a checkpoint, or with orphan files in its directory."""

    verb: Literal["keep", "sweep", "delete", "leave"]
    entry: Entry
    nbytes: int
    why: str
    orphans: Sequence[str] = ()


@command(
    argument("root", metavar="ROOT", help="the directory of a run's checkpoints"),
    argument("--keep-last", type=int, metavar="K", help="keep the newest K"),
    argument("--keep-every", type=int, metavar="N", help="keep those whose step is a multiple of N"),
    argument(
        "--keep-best",
        action="append",
        default=[],
        metavar="METRIC:K[:min|max]",
        help="keep the K best by a metric, and those without it",
    ),
    argument("--keep-hours", type=float, metavar="H", help="keep those saved in the last H hours"),
    argument("-n", "--dry-run", action="store_true", help="show what would be deleted; delete nothing"),
    argument("-f", "--force", action="store_true", help="also delete other files beside a checkpoint"),
    argument("-y", "--yes", action="store_true", help="do not ask"),
    argument("--template", metavar="NAME", help='manage checkpoints of these names: "step-{step}"'),
    examples="""
  shardkeep prune runs/a --keep-last 3 --dry-run
  shardkeep prune runs/a --keep-last 3 --keep-every 10000 --keep-best loss:2
  shardkeep prune runs/a --keep-best accuracy:1:max --keep-hours 24 --yes
""",
)
def prune(args: argparse.Namespace) -> int:
    run = open_run(args.root, args.template, must_exist=True)
    rules = parse_rules(args)
    planned = make_plan(run, rules, force=args.force)
    if job := running_holder(run.catalog.root):
        out.echo_err(f"a job is saving to this run: {out.printable(job)}", "yellow")
    if not args.json:
        _print_plan(planned)
    failed: dict[str, str] = {}
    if not args.dry_run and _summary(planned):
        if not args.yes and not _confirmed(args, planned):
            print("nothing was deleted")
            return 0
        failed = _execute(run, planned, force=args.force)
        if not args.json and not failed:
            print(out.styled(f"deleted, {out.format_size(_freed_nbytes(planned))} freed", "green"))
    if args.json:
        out.print_json(_plan_json(planned, failed, dry_run=args.dry_run))
    elif args.dry_run:
        print("nothing was deleted: --dry-run")
    for name, why in failed.items():
        out.echo_err(f"could not delete {out.printable(name)}: {out.printable(why)}", "red")
    return 2 if failed else 0


def _pin(args: argparse.Namespace, *, pinned: bool) -> int:
    """Pin checkpoints, so that neither `prune` nor the retention of a `Checkpointer` deletes them, or unpin them."""
    found = []
    for path in args.checkpoint:  # all of them, before any is pinned
        parent, name = split_path(path)
        run = Run(parent) if parent else None
        if run is None or (entry := run.catalog.get(name)) is None:
            with path_hints(path):
                raise CheckpointNotFound(f"{path}: there is no checkpoint to {'pin' if pinned else 'unpin'}")
        found.append((path, run.catalog.root, entry))
    for _, root, entry in found:
        if entry.pinned != pinned:
            (catalog.pin if pinned else catalog.unpin)(root, entry.name)
    if args.json:
        out.print_json({"pinned": pinned, "checkpoints": args.checkpoint})
    else:
        for path, _, entry in found:
            change = "" if entry.pinned != pinned else "already "
            print(f"{out.printable(path)}: {change}{'pinned' if pinned else 'not pinned'}")
    return 0


_CHECKPOINTS = argument("checkpoint", metavar="CHECKPOINT", nargs="+", help="checkpoints of runs")
pin = command(_CHECKPOINTS, examples="  shardkeep pin runs/a/step-500")(partial(_pin, pinned=True))
unpin = command(_CHECKPOINTS, examples="  shardkeep unpin runs/a/step-500")(partial(_pin, pinned=False))


def parse_rules(args: argparse.Namespace) -> dict[str, Policy]:
    """Return the policies that the arguments choose, by the words that the user chose them with."""
    rules: dict[str, Policy] = {f"best {words}": _parse_best(words) for words in args.keep_best}
    if args.keep_last is not None:
        rules[f"last {args.keep_last}"] = KeepLast(args.keep_last)
    if args.keep_every is not None:
        rules[f"every {args.keep_every}"] = KeepEvery(args.keep_every)
    if args.keep_hours is not None:
        rules[f"last {args.keep_hours:g} hours"] = KeepYounger(args.keep_hours * 3600)
    if not rules:
        raise out.UsageError(
            "prune needs a rule that says what to keep", hint="for example --keep-last 3, and --dry-run to try it"
        )
    return rules


def _parse_best(words: str) -> KeepBest:
    found = re.fullmatch(r"([^:]+)(?::([1-9]\d*))?(?::(min|max))?", words)
    if found is None:
        raise out.UsageError(f"--keep-best {words!r}", hint="write METRIC:K or METRIC:K:max, such as loss:2")
    mode: Any = found[3]  # None: by the name of the metric
    try:
        return KeepBest(found[1], int(found[2] or 1), mode)
    except StateError as exc:
        raise out.UsageError(exc.message, hint=f"--keep-best {found[1]}:{found[2] or 1}:max, or :min") from exc


def make_plan(run: Run, rules: dict[str, Policy], *, force: bool) -> list[Action]:
    """Decide what to do with every checkpoint, the newest first: those that are kept, deleted, and left alone."""
    with ThreadPoolExecutor(_THREADS) as threads:
        entries = list(threads.map(partial(_checked, run), (entry for entry in run.entries if entry.managed)))
        now = datetime.now(timezone.utc)
        unwanted = {entry.name for entry in plan(entries, AnyOf(tuple(rules.values())), now).to_delete}
        committed = [entry for entry in entries if entry.committed]
        wanted = {words: policy.wants(committed, now) for words, policy in rules.items()}

        def lacks(words: str, entry: Entry) -> str:
            return " (not saved with it)" if compared_metrics(rules[words]) - entry.metrics.keys() else ""

        def decide(entry: Entry) -> list[Action]:
            spared = _reason_to_spare(run, entry, force=force) if entry.name in unwanted else ""
            if entry.name in unwanted and not spared:
                others = foreign_files(run, entry)
                why = "no rule keeps it" + (f"; {others}" if others else "")
                return [Action("delete", entry, entry.nbytes, why)]
            reasons = [words + lacks(words, entry) for words, names in wanted.items() if entry.name in names]
            reasons += ["pinned"] * entry.pinned + [spared] * bool(spared)
            why = ", ".join(reasons) or "the newest" if entry.committed else f"{entry.status}: {entry.reason}"
            kept, found = Action("keep", entry, entry.nbytes, why), find_orphans(run, entry)
            return [kept] if found is None else [kept, found] if entry.committed else [found]

        decided = [each for of_entry in threads.map(decide, entries) for each in of_entry]
    left = []
    for entry in run.entries:
        if not entry.managed:
            by_template = entry.layout in ("native", "torch", None)
            why = f"not named {run.catalog.naming.template}" if by_template else "of another program"
            left.append(Action("leave", entry, entry.nbytes, f"not managed: {why}"))
    return [*sorted(decided, key=lambda each: each.verb == "delete"), *left]


def _checked(run: Run, entry: Entry) -> Entry:
    if not entry.committed:
        return entry
    reason = check_checkpoint(run.path_to(entry.name), deep=False).reason
    return replace(entry, status="damaged", reason=reason) if reason else entry


def _reason_to_spare(run: Run, entry: Entry, *, force: bool) -> str:
    """Return why a checkpoint that no rule keeps must not be deleted; empty if it may be."""
    found = orphans.survey(run.catalog.root.place(entry.name))
    if found.living is not None:
        return f"being written by process {found.living.pid}"
    if found.elsewhere:
        return "perhaps being written on another machine"
    others = "" if force else foreign_files(run, entry)
    return f"{others}: --force deletes that, too" if others else ""


def foreign_files(run: Run, entry: Entry) -> str:
    """Name files and folders in the directory of a checkpoint that belong to no checkpoint; empty if there are none."""
    place = run.catalog.root.place(entry.name)
    ours = {RECORD_NAME, REMOVING_NAME, *([] if entry.record is None else entry.record.names)}

    def is_ours(name: str) -> bool:
        known = name in ours or name.startswith(".tmp-") or save_id_of(name) or is_metadata(name) or is_data(name)
        return bool(known) or (entry.layout == "torch" and name.endswith(DATA_SUFFIX))

    if local_path(place) is None:
        names = [info.name for info in place.list()]
    elif os.path.islink(place.url):
        names = []  # only the link is deleted
    else:
        # The store does not list folders and files whose names no blob can have, but they would be deleted as well.
        with storage_errors("cannot list", place.url), os.scandir(place.url) as there:
            names = [f"{each.name}/" if each.is_dir(follow_symlinks=False) else each.name for each in there]
    foreign = sorted(name for name in names if name.endswith("/") or not is_ours(name))
    return f"it also holds {some_of(foreign, _MAX_NAMED)}" if foreign else ""


def find_orphans(run: Run, entry: Entry) -> Action | None:
    """Find files that no checkpoint will ever name; None if there are none, or a save may still be writing them."""
    store = run.catalog.root.place(entry.name)
    sizes = {info.name: info.nbytes for info in store.list()}
    found = orphans.survey(store)
    if not entry.committed and REMOVING_NAME in sizes and found.over:
        return Action("sweep", entry, sum(sizes.values()), "its deletion was interrupted", list(sizes))
    try:
        names = orphans.deletable(store, found)
    except (DamagedCheckpoint, UnsupportedVersion):
        return None  # the record may be repaired
    nbytes = sum(sizes.get(name, 0) for name in names)
    return Action("sweep", entry, nbytes, "left by a save that did not finish", names) if names else None


_STYLES: dict[str, out.Style] = {"sweep": "yellow", "delete": "red", "leave": "dim"}


def _print_plan(planned: Sequence[Action]) -> None:
    table = out.Table(("", "checkpoint", "size", "why"), right={"size"}, flexible="why")
    for each in planned:
        files = f"{out.format_count(len(each.orphans), 'file')} " if each.orphans else ""
        size = out.format_size(each.nbytes)
        table.add(each.verb, each.entry.name, size, files + each.why, style=_STYLES.get(each.verb))
    table.print()
    print(f"\n{_summary(planned) or 'nothing to delete'}")


def _freed_nbytes(planned: Sequence[Action]) -> int:
    return sum(each.nbytes for each in planned if each.verb in {"delete", "sweep"})


def _summary(planned: Sequence[Action]) -> str:
    checkpoints, files = sum(each.verb == "delete" for each in planned), sum(len(each.orphans) for each in planned)
    counts = [(checkpoints, "checkpoint"), (files, "orphan file")]
    words = " and ".join(out.format_count(count, noun) for count, noun in counts if count)
    return words and f"{words} to delete, {out.styled(out.format_size(_freed_nbytes(planned)), 'bold')}"


def _plan_json(planned: Sequence[Action], failed: dict[str, str], *, dry_run: bool) -> dict[str, Any]:
    listed: dict[str, list[dict[str, Any]]] = {"keep": [], "sweep": [], "delete": [], "leave": []}
    for each in planned:
        about = {"name": each.entry.name, "step": each.entry.known_step, "nbytes": each.nbytes, "why": each.why}
        if each.verb in {"keep", "leave"} or each.entry.name not in failed:
            listed[each.verb].append(about | ({"files": each.orphans} if each.orphans else {}))
    return {"dry_run": dry_run, "nbytes": _freed_nbytes(planned), **listed, "failed": failed}


def _confirmed(args: argparse.Namespace, planned: Sequence[Action]) -> bool:
    if args.json or not out.is_terminal(sys.stdin) or not out.is_terminal():
        raise out.UsageError(
            f"{_summary(planned)}, but there is no terminal to ask on",
            hint="--yes deletes without asking, --dry-run only shows",
        )
    try:
        return input("delete? [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        return False


def _execute(run: Run, planned: Sequence[Action], *, force: bool) -> dict[str, str]:
    """Delete, oldest first; return what could not be deleted, with the reason."""
    failed: dict[str, str] = {}
    for each in reversed(planned):
        try:
            if each.verb == "delete":
                _delete_checkpoint(run, each.entry, force=force)
            elif each.verb == "sweep":
                _delete_orphans(run, each)
        except CheckpointError as exc:
            failed[each.entry.name] = exc.message
    return failed


def _delete_checkpoint(run: Run, entry: Entry, *, force: bool) -> None:
    """Delete a checkpoint. It is checked again, because the plan may be minutes old."""
    now = run.catalog.get(entry.name)
    same = ("status", "saved_at", "nbytes", "save_id")
    if now is None or now.pinned or any(getattr(now, name) != getattr(entry, name) for name in same):
        raise CheckpointError("another process has changed, pinned or deleted it since")
    if reason := _reason_to_spare(run, entry, force=force):
        raise CheckpointError(reason)
    run.catalog.root.remove(entry.name)


def _delete_orphans(run: Run, planned: Action) -> None:
    """Delete files that are still orphans, one by one; a save that has started since keeps its own."""
    now = find_orphans(run, planned.entry)
    if now is not None:
        store = run.catalog.root.place(planned.entry.name)
        names = orphans.claims_last(set(now.orphans) & set(planned.orphans))
        for name in sorted(names, key=REMOVING_NAME.__eq__):  # the deletion marker goes last
            store.delete(name)
        run.catalog.root.drop_empty(planned.entry.name)
