"""
What all ranks raise together, made on rank 0 from the failures of each.

In come failures by rank; out goes a `Verdict`, plain data that every rank turns into the same error. Nothing here
talks to anybody, and nothing but text and msgpack's own types ever goes into a verdict.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import msgspec

from shardkeep.errors import CheckpointError, Failure, error_class, failure_of

MOST_GROUPS = 8
"""How many different failures a message spells out; also how many keep their traceback and details."""
MOST_CHARS = 16_000
"""Longest message or traceback that travels."""
MOST_LINE_CHARS = 1_000
"""Longest line of such a traceback."""


class RemoteTraceback(Exception):
    """
    The traceback of another rank, as text.

    It is the cause of an error that did not begin on this rank, so that Python prints it there; it is never raised.
    """


class FailedRanks(msgspec.Struct, frozen=True):
    """Ranks on which the same thing went wrong."""

    ranks: list[int]
    failure: Failure


class GroupError(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of a phase, the same on all ranks."""

    kind: str
    """Class name of the error to raise."""
    message: str
    title: str
    """What rank 0 was doing."""
    hint: str = ""
    details: dict[str, Any] = {}
    groups: list[FailedRanks] = []

    def error(self) -> CheckpointError:
        """Make the exception to raise."""
        error = error_class(self.kind)(self.message, hint=self.hint, **self.details)
        error.by_rank = {rank: group.failure for group in self.groups for rank in group.ranks}
        return error


def describe_error(error: BaseException) -> Failure:
    """Describe `error` as data that msgpack can carry, whatever it holds."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    # The end of a traceback is where the error is; one endless line of text must not push the rest out.
    trace = "\n".join(line[:MOST_LINE_CHARS] for line in lines)[-MOST_CHARS:]
    try:
        failure = failure_of(error, trace)
    except Exception:  # noqa: BLE001 - a foreign __str__ may do anything; the other ranks must still hear of it
        failure = Failure(type(error).__name__, "an error whose text cannot be made", trace)
    return Failure(
        failure.kind,
        _plain_text(failure.message),
        _plain_text(failure.trace),
        _plain_text(failure.hint),
        _plain_details(failure.details),
    )


def attach_remote_traceback(error: BaseException) -> None:
    """Let whoever prints an error that began on other ranks see where: by the traceback of the first that has one."""
    origin, seen = error, {id(error)}
    while origin.__cause__ is not None and id(origin.__cause__) not in seen:
        origin = origin.__cause__
        seen.add(id(origin))
    # What began on this rank has causes and frames of its own, and knows nothing of ranks.
    told = origin.by_rank if isinstance(origin, CheckpointError) else {}
    if (first := next((failure for failure in told.values() if failure.trace), None)) is not None:
        ranks = [rank for rank, failure in told.items() if failure == first]
        origin.__cause__ = RemoteTraceback(f"on {format_ranks(ranks)}:\n{first.trace}")


def merge_failures(failures: dict[int, Failure], *, phase: str, title: str) -> GroupError:
    """Make the verdict where at least one rank failed."""
    groups = _group(failures)
    first = groups[0].failure
    return GroupError(
        kind=first.kind,
        message=_spell(groups, f"during {phase!r} of {title}"),
        title=title,
        hint=first.hint,
        details=first.details,
        groups=_lighten(groups),
    )


def merge_silence(silent: dict[int, str], failures: dict[int, Failure], *, phase: str, title: str) -> GroupError:
    """Make the verdict where ranks did not answer; `silent` says of each what is known."""
    unheard = {rank: Failure("RanksSilent", text) for rank, text in silent.items()}
    groups = _group(unheard) + _group(failures)
    return GroupError(
        kind="RanksSilent",
        message=_spell(groups, f"during {phase!r} of {title}"),
        title=title,
        details={"ranks": sorted(silent)},
        groups=_lighten(groups),
    )


def merge_disagreement(said: dict[int, str], failures: dict[int, Failure], *, title: str) -> GroupError:
    """Make the verdict where ranks are not in the same call or phase; `said` is what each one said."""
    strays = {rank: Failure("RanksDisagree", f"called {what}") for rank, what in said.items()}
    return GroupError(
        kind="RanksDisagree",
        message=_spell(_group(strays), "all ranks must make the same calls in the same order"),
        title=title,
        groups=_lighten(_group({**strays, **failures})),
    )


def format_ranks(ranks: list[int]) -> str:
    """Name ranks in few words, such as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    spans = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {spans}" if len(ranks) == 1 else f"ranks {spans}"


def _group(failures: dict[int, Failure]) -> list[FailedRanks]:
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, failure in sorted(failures.items()):
        ranks.setdefault((failure.kind, failure.message, failure.hint), []).append(rank)
    return [FailedRanks(members, failures[members[0]]) for members in ranks.values()]


def _spell(groups: list[FailedRanks], where: str) -> str:
    lines = [f"{format_ranks(group.ranks)}: {_text(group.failure)}" for group in groups[:MOST_GROUPS]]
    unsaid = sum(len(group.ranks) for group in groups[MOST_GROUPS:])
    if unsaid:
        lines.append(f"and {unsaid} more rank{'s' * (unsaid > 1)}")
    return "\n".join([*lines, f"({where})"])


def _text(failure: Failure) -> str:
    ours = error_class(failure.kind)
    if ours.__name__ == failure.kind:
        return failure.message
    # The class of a foreign exception is lost on the way, so the text has to say it.
    bare = failure.message == f"{failure.kind}()"
    return failure.kind if bare else f"{failure.kind}: {failure.message}"


def _lighten(groups: list[FailedRanks]) -> list[FailedRanks]:
    # A thousand different tracebacks, sent to a thousand ranks, would be gigabytes.
    light = [
        FailedRanks(group.ranks, Failure(group.failure.kind, group.failure.message, "", group.failure.hint))
        for group in groups[MOST_GROUPS:]
    ]
    return groups[:MOST_GROUPS] + light


def _plain_text(text: str) -> str:
    # Names of files may hold lone surrogates, which UTF-8 cannot carry.
    plain = text.encode("utf-8", "backslashreplace").decode()
    return plain if len(plain) <= MOST_CHARS else f"{plain[:MOST_CHARS]}… ({len(plain)} characters in all)"


def _plain_details(details: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in details.items():
        if name in ("message", "hint"):  # arguments of their own, where the error is made again
            continue
        with contextlib.suppress(Exception):  # what cannot travel stays behind
            plain[name] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    return plain
