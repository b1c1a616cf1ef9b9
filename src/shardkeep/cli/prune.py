"""What speaks against deleting a checkpoint that no rule keeps: somebody saves there, or other things lie in its place."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import msgspec

from shardkeep.cli.output import (
    Table,
    UsageError,
    did_you_mean,
    echo,
    echo_err,
    format_count,
    format_size,
    is_terminal,
    print_json,
    printable,
    styled,
)
from shardkeep.cli.runs import Run, open_existing_run
from shardkeep.cli.verify import check_checkpoint
from shardkeep.errors import BlobNotFound, CheckpointError, DamagedCheckpoint, UnsupportedVersion
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import native
from shardkeep.layouts import orphans as leftovers
from shardkeep.layouts.native import save_id_of
from shardkeep.layouts.torch import DATA_SUFFIX, is_data, is_metadata
from shardkeep.manage.catalog import Entry
from shardkeep.manage.lease import LEASE_NAME, LEASE_S, Holder
from shardkeep.manage.retention import (
    AnyOf,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepYounger,
    Mode,
    Policy,
    plan,
)
from shardkeep.storage.base import REMOVING_NAME, Store
from shardkeep.storage.local import LocalStore
from shardkeep.storage.system import host_identity, process_start, storage_errors

_MAX_LEASE_NBYTES = 4096
_NAMED = 3
"""Foreign things that are named; of others there is only the number."""


def describe_writer(run: Run, entry: Entry) -> str:
    """Say who saves to a place, or may do so; empty where certainly nobody does."""
    found = leftovers.survey(run.catalog.root.place(entry.name))
    if found.living is not None:
        return f"being written by process {found.living.pid}"
    return "perhaps being written on another machine" if found.elsewhere else ""


def foreign_files(run: Run, entry: Entry) -> list[str]:
    """Name what lies in a place and is of no checkpoint: files and folders that somebody else has put there."""
    place = run.catalog.root.place(entry.name)
    if not isinstance(place, LocalStore):
        return sorted(info.name for info in place.list() if not _is_ours(info.name, entry))
    if os.path.islink(place.url):
        return []  # only the link goes
    # Not what the store lists: folders, and files that no blob is called, would go as well.
    with storage_errors("cannot list", place.url), os.scandir(place.url) as there:
        return sorted(
            f"{each.name}/" if each.is_dir(follow_symlinks=False) else each.name
            for each in there
            if each.is_dir(follow_symlinks=False) or not _is_ours(each.name, entry)
        )


def describe_foreign(names: list[str]) -> str:
    """Say in a few words what else lies in a place."""
    others = len(names) - _NAMED
    return f"it also holds {', '.join(names[:_NAMED])}" + (f" and {others:,} more" if others > 0 else "")


def _is_ours(name: str, entry: Entry) -> bool:
    named = [] if entry.record is None else entry.record.names
    return (
        name in (RECORD_NAME, REMOVING_NAME, *named)
        or name.startswith(".tmp-")
        or native.save_id_of(name) is not None
        or is_metadata(name)
        or is_data(name)
        or (entry.layout == "torch" and name.endswith(DATA_SUFFIX))
    )


def lease_holder(run: Run) -> str:
    """Say which living job holds the lease of a run; empty where there is none."""
    root = run.catalog.root
    try:
        holder = msgspec.json.decode(root.get(LEASE_NAME, limit=_MAX_LEASE_NBYTES), type=Holder)
        if holder.released:
            return ""
        if holder.host == host_identity():
            return str(holder) if process_start(holder.pid) == holder.started else ""
        written_s = max((info.modified_s for info in root.list() if info.name == LEASE_NAME), default=0.0)
    except BlobNotFound:
        return ""
    except (CheckpointError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "a lease that cannot be read"
    return str(holder) if time.time() - written_s < LEASE_S else ""


# Files in the places of a run that no checkpoint will ever name: what dead writers and removals cut short have left.


@dataclass(frozen=True)
class OrphanFiles:
    """What can go from one place."""

    entry: Entry
    names: list[str]
    nbytes: int
    reason: str


def find_orphans(run: Run, entry: Entry) -> OrphanFiles | None:
    """Find what can go from a place; None where nothing can, or somebody may still be writing there."""
    store = run.catalog.root.place(entry.name)
    sizes = {info.name: info.nbytes for info in store.list()}
    found = leftovers.survey(store)
    if not entry.committed and REMOVING_NAME in sizes and found.over:
        return OrphanFiles(entry, list(sizes), sum(sizes.values()), "its removal was cut short")
    names = _unnamed(store, found)
    if not names:
        return None
    nbytes = sum(sizes.get(name, 0) for name in names)
    return OrphanFiles(entry, names, nbytes, "left by a save that did not finish")


def _unnamed(store: Store, found: leftovers.Survey) -> list[str]:
    try:
        return leftovers.deletable(store, found)
    except (DamagedCheckpoint, UnsupportedVersion):
        return []  # the record may be mended


def delete_orphans(run: Run, litter: OrphanFiles) -> None:
    """Delete what was found and is litter still, file by file: a save that has begun there since keeps its own."""
    now = find_orphans(run, litter.entry)
    if now is None:
        return
    store = run.catalog.root.place(litter.entry.name)
    going = leftovers.claims_last(set(now.names) & set(litter.names))
    leftovers.sweep_uploads_of(store, {save_id for name in going if (save_id := save_id_of(name))})
    for name in sorted(going, key=REMOVING_NAME.__eq__):  # the mark goes last of all
        store.delete(name)
    run.catalog.root.drop_empty(litter.entry.name)


# `shardkeep prune`: delete the checkpoints of a run that no rule keeps, and what dead writers left.
#
# Nothing goes without a rule, and nothing without a yes. The newest checkpoint stays, and so do pinned ones. One that
# a
# quick look finds damaged counts for nothing and stays, so that it is never taken for the one to fall back to.
# Nothing is
# taken from a place that somebody is saving to, nor, without --force, from one in which other things lie than
# checkpoints.

EXAMPLES = """
  shardkeep prune runs/a --keep-last 3 --dry-run
  shardkeep prune runs/a --keep-last 3 --keep-every 10000 --keep-best loss:2
  shardkeep prune runs/a --keep-best accuracy:1:max --keep-hours 24 --yes
"""
_THREADS = 8
"""That look at checkpoints: most of them wait for the disk or the network."""


@dataclass(frozen=True)
class Rule:
    """A policy, and how it was asked for."""

    words: str
    policy: Policy


@dataclass(frozen=True)
class PrunePlan:
    """What becomes of the places of a run."""

    kept: list[tuple[Entry, str]]
    """With why."""
    deleted: list[Entry]
    """The oldest first."""
    swept: list[OrphanFiles]

    @property
    def nbytes(self) -> int:
        """What is won."""
        return sum(entry.nbytes for entry in self.deleted) + sum(litter.nbytes for litter in self.swept)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("root", metavar="ROOT", help="the directory of a run's checkpoints")
    rules = parser.add_argument_group("rules: what any of them keeps stays")
    rules.add_argument("--keep-last", type=int, metavar="K", help="the newest K")
    rules.add_argument("--keep-every", type=int, metavar="N", help="those whose step is a multiple of N")
    rules.add_argument(
        "--keep-best", action="append", default=[], metavar="METRIC:K[:max]", help="the K lowest (highest) by a metric"
    )
    rules.add_argument("--keep-hours", type=float, metavar="H", help="those saved in the last H hours")
    parser.add_argument("-n", "--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    parser.add_argument("-f", "--force", action="store_true", help="also where other files lie beside a checkpoint")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument("--template", metavar="NAME", help='what its checkpoints are called: "step-{step}"')


def run(args: argparse.Namespace) -> int:
    """Show what goes, ask, and delete it."""
    rules = parse_rules(args)
    found = open_existing_run(args.root, args.template)
    _check_metrics(rules, found.entries())
    planned = make_plan(found, rules, force=args.force)
    if job := lease_holder(found):
        echo_err(f"a job saves to this run: {printable(job)}", "yellow")
    if not args.json:
        _print_plan(found, planned)
    failed: dict[str, str] = {}
    if not args.dry_run and (planned.deleted or planned.swept):
        if not args.yes and not _agreed(args, planned):
            echo("nothing was deleted")
            return 0
        failed = _carry_out(found, planned, force=args.force)
        if not args.json and not failed:
            echo(styled(f"deleted, {format_size(planned.nbytes)} freed", "green"))
    # No listing shows them: they may be all that there is to take back.
    if not args.dry_run and (many := _sweep_uploads(found)):
        echo_err(f"{format_count(many, 'upload')} that nobody will finish taken back", "yellow")
    if args.json:
        print_json(_document(planned, failed, dry_run=args.dry_run))
    elif args.dry_run:
        echo("nothing was deleted: --dry-run")
    for name, why in failed.items():
        echo_err(f"could not delete {printable(name)}: {printable(why)}", "red")
    return 2 if failed else 0


def parse_rules(args: argparse.Namespace) -> list[Rule]:
    """
    Return the policies that were asked for.

    Raises:
        NotUsable: there is none, or one makes no sense.

    """
    rules = []
    if args.keep_last is not None:
        _insist(args.keep_last >= 1, f"--keep-last {args.keep_last}", "the newest is always kept: give 1 or more")
        rules.append(Rule(f"last {args.keep_last}", KeepLast(args.keep_last)))
    if args.keep_every is not None:
        _insist(args.keep_every >= 1, f"--keep-every {args.keep_every}", "give a number of steps, 1 or more")
        rules.append(Rule(f"every {args.keep_every}", KeepEvery(args.keep_every)))
    rules += [Rule(f"best {words}", _best(words)) for words in args.keep_best]
    if args.keep_hours is not None:
        _insist(args.keep_hours > 0, f"--keep-hours {args.keep_hours:g}", "give a time in hours, more than 0")
        rules.append(Rule(f"last {args.keep_hours:g} hours", KeepYounger(args.keep_hours * 3600)))
    if not rules:
        raise UsageError(
            "prune needs a rule that says what to keep", hint="for example --keep-last 3, and --dry-run to try it"
        )
    return rules


def _insist(right: bool, words: str, hint: str) -> None:
    if not right:
        raise UsageError(words, hint=hint)


def _best(words: str) -> KeepBest:
    metric, *rest = words.split(":")
    mode: Mode = "min"
    if rest and rest[-1] in {"min", "max"}:
        mode = "max" if rest.pop() == "max" else "min"
    if not metric or len(rest) > 1 or not all(part.isdigit() for part in rest):
        raise UsageError(f"--keep-best {words!r}", hint="write METRIC:K or METRIC:K:max, such as loss:2")
    count = int(rest[0]) if rest else 1
    _insist(count >= 1, f"--keep-best {words!r}", "give 1 or more after the metric, such as loss:2")
    return KeepBest(metric, count, mode)


def _check_metrics(rules: list[Rule], entries: list[Entry]) -> None:
    """Refuse a metric that no checkpoint has: a misspelt one keeps nothing."""
    known = {name for entry in entries for name in entry.metrics}
    for rule in rules:
        if isinstance(rule.policy, KeepBest) and rule.policy.metric not in known and entries:
            metrics = f"they have {', '.join(sorted(known))}" if known else "they have none"
            hint = did_you_mean(rule.policy.metric, known, otherwise=metrics)
            raise UsageError(f"no checkpoint has the metric {rule.policy.metric!r}", hint=hint)


def make_plan(found: Run, rules: list[Rule], *, force: bool = False) -> PrunePlan:
    """Decide what becomes of every place."""
    with ThreadPoolExecutor(_THREADS) as threads:
        entries = list(threads.map(lambda entry: _looked_at(found, entry), found.entries()))
    now = datetime.now(timezone.utc)
    policy = AnyOf(tuple(rule.policy for rule in rules))
    _, deleted = plan(entries, policy, now)
    committed = [entry for entry in entries if entry.committed]
    wanted = {rule.words: rule.policy.wants(committed, now) for rule in rules}
    with ThreadPoolExecutor(_THREADS) as threads:
        spared = {
            entry.name: reason
            for entry, reason in zip(
                deleted, threads.map(lambda entry: _spared(found, entry, force=force), deleted), strict=True
            )
            if reason
        }

    def why(entry: Entry) -> str:
        if not entry.committed:
            return f"{entry.status}: {entry.reason}"
        reasons = [words for words, names in wanted.items() if entry.name in names]
        reasons += ["pinned"] if entry.pinned else []
        reasons += [spared[entry.name]] if entry.name in spared else []
        return ", ".join(reasons) or "the newest"

    deleted = [entry for entry in deleted if entry.name not in spared]
    going = {entry.name for entry in deleted}
    staying = [entry for entry in entries if entry.name not in going]
    litter = [find_orphans(found, entry) for entry in staying]
    return PrunePlan([(entry, why(entry)) for entry in staying], deleted, [each for each in litter if each is not None])


def _spared(found: Run, entry: Entry, *, force: bool) -> str:
    """Say why a checkpoint that no rule keeps stays; empty where nothing speaks for it."""
    if writer := describe_writer(found, entry):
        return writer
    others = [] if force else foreign_files(found, entry)
    return f"{describe_foreign(others)}: --force deletes that, too" if others else ""


def _looked_at(found: Run, entry: Entry) -> Entry:
    """Return an entry, as damaged where its index, or the size or header of a file, says so."""
    if not entry.committed:
        return entry
    verdict = check_checkpoint(found.path_of(entry), deep=False)
    if verdict.sound:
        return entry
    return replace(entry, status="damaged", reason=verdict.unknown or "; ".join(verdict.problems))


def _print_plan(found: Run, planned: PrunePlan) -> None:
    table = Table(("", "checkpoint", "size", "why"), right="size", gives_way="why")
    swept = {litter.entry.name: litter for litter in planned.swept}
    for entry, why in planned.kept:
        litter = swept.get(entry.name)
        if litter is None or entry.committed:
            table.add("keep", printable(entry.name), format_size(entry.nbytes), printable(why))
        if litter is not None:
            what = f"{format_count(len(litter.names), 'file')} {litter.reason}"
            table.add("sweep", printable(entry.name), format_size(litter.nbytes), what, style="yellow")
    for entry in reversed(planned.deleted):
        others = foreign_files(found, entry)
        why = "no rule keeps it" + (f"; {describe_foreign(others)}" if others else "")
        table.add("delete", printable(entry.name), format_size(entry.nbytes), printable(why), style="red")
    table.print()
    if not planned.deleted and not planned.swept:
        echo("\nnothing to delete")
    else:
        echo(f"\n{_summary(planned)}")


def _summary(planned: PrunePlan) -> str:
    words = [format_count(len(planned.deleted), "checkpoint")] if planned.deleted else []
    files = sum(len(litter.names) for litter in planned.swept)
    words += [format_count(files, "leftover file")] if files else []
    return f"{' and '.join(words)} to delete, {styled(format_size(planned.nbytes), 'bold')}"


def _agreed(args: argparse.Namespace, planned: PrunePlan) -> bool:
    if args.json or not is_terminal(sys.stdin) or not is_terminal():
        raise UsageError(
            f"{_summary(planned)}, and nobody to ask", hint="--yes deletes without asking, --dry-run only shows"
        )
    try:
        return input("delete? [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        return False


def _carry_out(found: Run, planned: PrunePlan, *, force: bool) -> dict[str, str]:
    """Delete, the oldest first; return what could not be, and why."""
    failed: dict[str, str] = {}
    for entry in planned.deleted:
        try:
            now = found.catalog.find(entry.step)
            if now is None or now.pinned or _identity(now) != _identity(entry):
                failed[entry.name] = "it was changed, pinned or deleted by somebody else meanwhile"
                continue
            if writer := describe_writer(found, entry):
                failed[entry.name] = f"somebody is saving there: {writer}"
                continue
            if not force and (others := foreign_files(found, entry)):
                failed[entry.name] = describe_foreign(others)
                continue
            found.catalog.root.remove(entry.name)
        except CheckpointError as exc:
            failed[entry.name] = exc.message
    for litter in planned.swept:
        try:
            delete_orphans(found, litter)
        except CheckpointError as exc:
            failed[litter.entry.name] = exc.message
    return failed


def _sweep_uploads(found: Run) -> int:
    """Take back uploads to the run that nobody goes on with."""
    try:
        return leftovers.sweep_lost_uploads(found.catalog.root)
    except CheckpointError as exc:
        echo_err(f"uploads that nobody will finish could not be looked for: {printable(exc.message)}", "yellow")
        return 0


def _identity(entry: Entry) -> tuple[Any, ...]:
    return entry.status, entry.saved_at, entry.nbytes, entry.record.save_id if entry.record else None


def _document(planned: PrunePlan, failed: dict[str, str], *, dry_run: bool) -> dict[str, Any]:
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
            {"name": litter.entry.name, "files": litter.names, "nbytes": litter.nbytes, "why": litter.reason}
            for litter in planned.swept
            if litter.entry.name not in failed
        ],
        "failed": failed,
    }
