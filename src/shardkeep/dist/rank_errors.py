"""
The error that all ranks raise together, which rank 0 makes from the failures of each.

A `GroupError` is plain data, from which every rank makes the same exception. It contains only text and msgpack's own types.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import msgspec

from shardkeep.errors import CheckpointError, Failure, error_class, failure_of

ALL_CALL = "all ranks must make this call, not only some of them; a slow rank needs a larger Options(timeout_s=...)"
MOST_GROUPS = 8
"""How many different failures a message contains; also how many keep their traceback and details."""
MOST_CHARS = 16_000
"""Longest message or traceback that is sent."""
MOST_LINE_CHARS = 1_000
"""Longest line of such a traceback."""


class RemoteTraceback(Exception):
    """The traceback of another rank as text. It is never raised, only the cause of an error, so that Python prints it."""


class FailedRanks(msgspec.Struct, frozen=True):
    ranks: list[int]
    failure: Failure


class GroupError(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of a phase, the same on all ranks."""

    kind: str
    message: str
    title: str
    """The call that rank 0 was in."""
    hint: str = ""
    details: dict[str, Any] = {}
    groups: list[FailedRanks] = []

    def error(self) -> CheckpointError:
        error = error_class(self.kind)(self.message, hint=self.hint, **self.details)
        error.by_rank = {rank: group.failure for group in self.groups for rank in group.ranks}
        return error


def describe_error(error: BaseException) -> Failure:
    """Describe an exception as data that msgpack can carry, whatever it contains."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    # The end of a traceback is kept, because the error is there; one very long line must not displace the rest.
    trace = "\n".join(line[:MOST_LINE_CHARS] for line in lines)[-MOST_CHARS:]
    try:
        failure = failure_of(error, trace)
    except Exception:  # noqa: BLE001 - a foreign __str__ may raise anything; the other ranks need a message all the same
        failure = Failure(type(error).__name__, "an error whose text cannot be made", trace)
    return Failure(
        failure.kind,
        _plain_text(failure.message),
        _plain_text(failure.trace),
        _plain_text(failure.hint),
        _plain_details(failure.details),
    )


def attach_remote_traceback(error: BaseException) -> None:
    """If an error began on other ranks, make the traceback of the first of them its cause, so that it is printed."""
    origin, seen = error, {id(error)}
    while origin.__cause__ is not None and id(origin.__cause__) not in seen:
        origin = origin.__cause__
        seen.add(id(origin))
    # An error that began on this rank has a traceback of its own, and no `by_rank`.
    by_rank = origin.by_rank if isinstance(origin, CheckpointError) else {}
    if (first := next((failure for failure in by_rank.values() if failure.trace), None)) is not None:
        ranks = [rank for rank, failure in by_rank.items() if failure == first]
        origin.__cause__ = RemoteTraceback(f"on {format_ranks(ranks)}:\n{first.trace}")


def merge_failures(failures: dict[int, Failure], *, phase: str, title: str) -> GroupError:
    """Make the error of at least one rank that failed."""
    groups = _group(failures)
    first = groups[0].failure
    message = _message(groups, f"during {phase!r} of {title}")
    return _error(first.kind, message, title, groups, hint=first.hint, details=first.details)


def merge_silence(
    silent: dict[int, str], failures: dict[int, Failure], *, phase: str, title: str, hint: str = ALL_CALL
) -> GroupError:
    """Make the error of ranks that did not answer; `silent` has what is known of each."""
    groups = _group({rank: Failure("RanksSilent", text) for rank, text in silent.items()}) + _group(failures)
    message = _message(groups, f"during {phase!r} of {title}")
    return _error("RanksSilent", message, title, groups, hint=hint, details={"ranks": sorted(silent)})


def merge_disagreement(said: dict[int, str], failures: dict[int, Failure], *, title: str) -> GroupError:
    """Make the error of ranks that are not in the same call or phase; `said` has what each one called."""
    strays = {rank: Failure("RanksDisagree", f"called {what}") for rank, what in said.items()}
    message = _message(_group(strays), "all ranks must make the same calls in the same order")
    return _error("RanksDisagree", message, title, _group({**strays, **failures}))


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


def _message(groups: list[FailedRanks], where: str) -> str:
    lines = []
    for group in groups[:MOST_GROUPS]:
        kind, text = group.failure.kind, group.failure.message
        # A foreign exception becomes a CheckpointError on the other ranks, so the text has to name its class.
        if error_class(kind).__name__ != kind:
            text = kind if text == f"{kind}()" else f"{kind}: {text}"
        lines.append(f"{format_ranks(group.ranks)}: {text}")
    omitted = sum(len(group.ranks) for group in groups[MOST_GROUPS:])
    if omitted:
        lines.append(f"and {omitted} more rank{'s' * (omitted > 1)}")
    return "\n".join([*lines, f"({where})"])


def _error(kind: str, message: str, title: str, groups: list[FailedRanks], **more: Any) -> GroupError:
    # Without tracebacks beyond the first few: a thousand different ones, sent to a thousand ranks, would be gigabytes.
    light = [
        FailedRanks(group.ranks, Failure(group.failure.kind, group.failure.message, "", group.failure.hint))
        for group in groups[MOST_GROUPS:]
    ]
    return GroupError(kind=kind, message=message, title=title, groups=groups[:MOST_GROUPS] + light, **more)


def _plain_text(text: str) -> str:
    # File names may contain lone surrogates, which UTF-8 cannot encode.
    plain = text.encode("utf-8", "backslashreplace").decode()
    return plain if len(plain) <= MOST_CHARS else f"{plain[:MOST_CHARS]}… ({len(plain)} characters in all)"


def _plain_details(details: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in details.items():
        if name in ("message", "hint"):  # these are arguments of their own
            continue
        with contextlib.suppress(Exception):  # a detail that msgpack cannot carry is left out
            plain[name] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    return plain
