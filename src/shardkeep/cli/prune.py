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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.runs import Run, open_existing_run, path_hints, split_path
from shardkeep.cli.verify import check_checkpoint
from shardkeep.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint, UnsupportedVersion
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import orphans
from shardkeep.layouts.native import save_id_of
from shardkeep.layouts.torch import DATA_SUFFIX, is_data, is_metadata
from shardkeep.manage import catalog
from shardkeep.manage.catalog import Entry
from shardkeep.manage.lease import running_holder
from shardkeep.manage.retention import AnyOf, KeepBest, KeepEvery, KeepLast, KeepYounger, Policy, plan
from shardkeep.storage.base import REMOVING_NAME, is_name, local_path
from shardkeep.storage.local import storage_errors

_THREADS = 8
"""Threads that check checkpoints; most of the time they wait for the disk or the network."""

_RULES = "rules: what any of them selects is kept"
_MAX_NAMED = 3
"""Foreign files that a message names; the others are counted."""


class OrphanFiles(NamedTuple):
    """Files in the directory of one checkpoint that can be deleted."""

    entry: Entry
    names: list[str]
    nbytes: int
    reason: str


@dataclass(frozen=True)
class PrunePlan:
    """What to do with each checkpoint of a run."""

    kept: list[tuple[Entry, str]]
    """Each with the reason."""
    deleted: list[Entry]
    """Oldest first."""
    orphans: list[OrphanFiles]
    unmanaged: list[Entry]
    """Left alone, whatever the rules say."""

    @property
    def nbytes(self) -> int:
        """Bytes that will be freed."""
        return sum(entry.nbytes for entry in self.deleted) + sum(each.nbytes for each in self.orphans)


@command(
    argument("root", metavar="ROOT", help="the directory of a run's checkpoints"),
    argument("--keep-last", type=int, metavar="K", help="the newest K", group=_RULES),
    argument("--keep-every", type=int, metavar="N", help="those whose step is a multiple of N", group=_RULES),
    argument(
        "--keep-best",
        action="append",
        default=[],
        metavar="METRIC:K[:min|max]",
        help="the K best by a metric, and those without it",
        group=_RULES,
    ),
    argument("--keep-hours", type=float, metavar="H", help="those saved in the last H hours", group=_RULES),
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
    run = open_existing_run(args.root, args.template)
    managed = [entry for entry in run.entries if entry.managed]
    _check_metrics([words.partition(":")[0] for words in args.keep_best], managed)
    rules = parse_rules(args)
    planned = make_plan(run, rules, force=args.force)
    if job := running_holder(run.catalog.root):
        out.echo_err(f"a job is saving to this run: {out.printable(job)}", "yellow")
    if not args.json:
        _print_plan(run, planned)
    failed: dict[str, str] = {}
    if not args.dry_run and (planned.deleted or planned.orphans):
        if not args.yes and not _confirmed(args, planned):
            print("nothing was deleted")
            return 0
        failed = _execute(run, planned, force=args.force)
        if not args.json and not failed:
            print(out.styled(f"deleted, {out.format_size(planned.nbytes)} freed", "green"))
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
        if not is_name(name):
            hint = "no rule deletes it: rules are for names such as step-500"
            raise out.UsageError(f"{path} cannot be pinned: no file can be named after it in every store", hint=hint)
        found.append((path, run.catalog.root, entry))
    for _, root, entry in found:
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


# -- rules


def parse_rules(args: argparse.Namespace) -> dict[str, Policy]:
    """Return the policies that the arguments choose, by the words that the user chose them with."""
    for option, number in (("last", args.keep_last), ("every", args.keep_every), ("hours", args.keep_hours)):
        if number is not None and not number > 0:
            raise out.UsageError(f"--keep-{option} {number}", hint="give more than 0; the newest is always kept")
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
    return KeepBest(found[1], int(found[2] or 1), mode)


def _check_metrics(metrics: Iterable[str], entries: list[Entry]) -> None:
    """Reject a metric that no checkpoint has, because it is misspelt."""
    known = {name for entry in entries for name in entry.metrics}
    for metric in metrics:
        if metric not in known and entries:
            hint = out.did_you_mean(metric, known, otherwise=f"they have {', '.join(sorted(known)) or 'none'}")
            raise out.UsageError(f"no checkpoint has the metric {metric!r}", hint=hint)


# -- what to delete


def make_plan(run: Run, rules: dict[str, Policy], *, force: bool = False) -> PrunePlan:
    """Decide what to do with every checkpoint."""
    with ThreadPoolExecutor(_THREADS) as threads:
        managed = [entry for entry in run.entries if entry.managed]
        entries = list(threads.map(lambda entry: _checked(run, entry), managed))
        now = datetime.now(timezone.utc)
        _, unwanted = plan(entries, AnyOf(tuple(rules.values())), now)
        reasons = threads.map(lambda entry: _reason_to_spare(run, entry, force=force), unwanted)
        spared = {entry.name: reason for entry, reason in zip(unwanted, reasons, strict=True) if reason}
    committed = [entry for entry in entries if entry.committed]
    wanted = {words: policy.wants(committed, now) for words, policy in rules.items()}
    unmanaged = [entry for entry in run.entries if not entry.managed]
    planned = PrunePlan([], [entry for entry in unwanted if entry.name not in spared], [], unmanaged)
    deleted = {entry.name for entry in planned.deleted}
    for entry in entries:
        if entry.name in deleted:
            continue
        by = [words for words, names in wanted.items() if entry.name in names]
        by += [*(["pinned"] if entry.pinned else []), *filter(None, [spared.get(entry.name)])]
        why = ", ".join(by) or "the newest" if entry.committed else f"{entry.status}: {entry.reason}"
        planned.kept.append((entry, why))
        planned.orphans.extend(filter(None, [find_orphans(run, entry)]))
    return planned


def _checked(run: Run, entry: Entry) -> Entry:
    """Return an entry, marked as damaged if a shallow check finds it so."""
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
    if not foreign:
        return ""
    rest = f" and {len(foreign) - _MAX_NAMED:,} more" if len(foreign) > _MAX_NAMED else ""
    return f"it also holds {', '.join(foreign[:_MAX_NAMED])}{rest}"


def find_orphans(run: Run, entry: Entry) -> OrphanFiles | None:
    """Find files that no checkpoint will ever name; None if there are none, or a save may still be writing them."""
    store = run.catalog.root.place(entry.name)
    sizes = {info.name: info.nbytes for info in store.list()}
    found = orphans.survey(store)
    if not entry.committed and REMOVING_NAME in sizes and found.over:
        return OrphanFiles(entry, list(sizes), sum(sizes.values()), "its deletion was interrupted")
    try:
        names = orphans.deletable(store, found)
    except (DamagedCheckpoint, UnsupportedVersion):
        return None  # the record may be repaired
    nbytes = sum(sizes.get(name, 0) for name in names)
    return OrphanFiles(entry, names, nbytes, "left by a save that did not finish") if names else None


# -- output


def _print_plan(run: Run, planned: PrunePlan) -> None:
    table = out.Table(("", "checkpoint", "size", "why"), right={"size"}, flexible="why")
    swept = {each.entry.name: each for each in planned.orphans}
    for entry, why in planned.kept:
        found = swept.get(entry.name)
        if found is None or entry.committed:
            table.add("keep", out.printable(entry.name), out.format_size(entry.nbytes), out.printable(why))
        if found is not None:
            what = f"{out.format_count(len(found.names), 'file')} {found.reason}"
            table.add("sweep", out.printable(entry.name), out.format_size(found.nbytes), what, style="yellow")
    for entry in reversed(planned.deleted):
        others = foreign_files(run, entry)
        why = "no rule keeps it" + (f"; {others}" if others else "")
        table.add("delete", out.printable(entry.name), out.format_size(entry.nbytes), out.printable(why), style="red")
    for entry in planned.unmanaged:
        why = "of another program" if entry.layout == "safetensors" else f"not named {run.catalog.naming.template}"
        table.add("leave", out.printable(entry.name), out.format_size(entry.nbytes), f"not managed: {why}", style="dim")
    table.print()
    print(f"\n{_summary(planned)}" if planned.deleted or planned.orphans else "\nnothing to delete")


def _summary(planned: PrunePlan) -> str:
    words = [out.format_count(len(planned.deleted), "checkpoint")] if planned.deleted else []
    files = sum(len(each.names) for each in planned.orphans)
    words += [out.format_count(files, "orphan file")] if files else []
    return f"{' and '.join(words)} to delete, {out.styled(out.format_size(planned.nbytes), 'bold')}"


def _plan_json(planned: PrunePlan, failed: dict[str, str], *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "nbytes": planned.nbytes,
        "kept": [{"name": entry.name, "step": entry.step, "why": why} for entry, why in planned.kept],
        "deleted": [
            {"name": entry.name, "step": entry.step, "nbytes": entry.nbytes}
            for entry in planned.deleted
            if entry.name not in failed
        ],
        "swept": [
            {"name": entry.name, "files": names, "nbytes": nbytes, "why": why}
            for entry, names, nbytes, why in planned.orphans
            if entry.name not in failed
        ],
        "failed": failed,
        "unmanaged": [entry.name for entry in planned.unmanaged],
    }


# -- deleting


def _confirmed(args: argparse.Namespace, planned: PrunePlan) -> bool:
    if args.json or not out.is_terminal(sys.stdin) or not out.is_terminal():
        raise out.UsageError(
            f"{_summary(planned)}, but there is no terminal to ask on",
            hint="--yes deletes without asking, --dry-run only shows",
        )
    try:
        return input("delete? [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        return False


def _execute(run: Run, planned: PrunePlan, *, force: bool) -> dict[str, str]:
    """Delete, oldest first; return what could not be deleted, with the reason."""
    failed: dict[str, str] = {}
    work = [(each, partial(_delete_checkpoint, run, each, force=force)) for each in planned.deleted]
    for entry, delete in work + [(each.entry, partial(_delete_orphans, run, each)) for each in planned.orphans]:
        try:
            if reason := delete():
                failed[entry.name] = reason
        except CheckpointError as exc:
            failed[entry.name] = exc.message
    return failed


def _delete_checkpoint(run: Run, entry: Entry, *, force: bool) -> str:
    """Delete a checkpoint, or return why not. It is checked again, because the plan may be minutes old."""
    now = run.catalog.get(entry.name)
    same = ("status", "saved_at", "nbytes", "save_id")
    if now is None or now.pinned or any(getattr(now, name) != getattr(entry, name) for name in same):
        return "another process has changed, pinned or deleted it since"
    if reason := _reason_to_spare(run, entry, force=force):
        return reason
    run.catalog.root.remove(entry.name)
    return ""


def _delete_orphans(run: Run, planned: OrphanFiles) -> str:
    """Delete files that are still orphans, one by one; a save that has started since keeps its own."""
    now = find_orphans(run, planned.entry)
    if now is not None:
        store = run.catalog.root.place(planned.entry.name)
        names = orphans.claims_last(set(now.names) & set(planned.names))
        for name in sorted(names, key=REMOVING_NAME.__eq__):  # the deletion marker goes last
            store.delete(name)
        run.catalog.root.drop_empty(planned.entry.name)
    return ""
