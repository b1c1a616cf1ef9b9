"""
When a call did what, on this rank and, as far as rank 0 is told, on all.

Each rank times its phases by a clock that never jumps, and sends them along with what it says at the end of its work.
Clocks of machines differ. So a rank counts from a moment that all have in common, when rank 0's answer to a meeting
reached them, and rank 0 puts them on its own time by when it gave that answer. Ranks are then apart by what an answer
takes to arrive: milliseconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from shardkeep.events import RankPhases, Slowest, Span

WORK_OF_SAVES = ("describe", "stage", "write")
"""Phases in which a rank waits for no other."""
WORK_OF_LOADS = ("plan", "read", "place")
_EXPLAINED = 0.5
"""A rank that stages late writes late: so much of the one makes it the reason for the other."""

Sent = list[tuple[str, float, float, int]]
"""Phases on their way to rank 0; the first is no phase, but the moment of the call."""
_CALL = "call"


class Phases:
    """The phases of one call."""

    def __init__(self) -> None:
        """Begin to count."""
        self.called_s = time.perf_counter()
        """When the call was made, by that clock."""
        self._met_s = 0.0
        # Added to by several threads; to append is atomic.
        self._spans: list[Span] = []
        self.ranks: list[RankPhases] = []
        """What all ranks did, in the order of ranks; known on rank 0, once it has collected it."""

    @property
    def spans(self) -> list[Span]:
        """What this rank did so far, in order."""
        return sorted(self._spans, key=lambda span: span.begin_s)

    def now(self) -> float:
        """Return how many seconds ago the call began."""
        return time.perf_counter() - self.called_s

    def add(self, name: str, begin_s: float, end_s: float, nbytes: int = 0) -> None:
        """Note a phase."""
        self._spans.append(Span(name, begin_s, max(begin_s, end_s), nbytes))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note what is done inside as a phase, however it ends."""
        begin_s = self.now()
        try:
            yield
        finally:
            self.add(name, begin_s, self.now())

    def meet(self) -> float:
        """Note that an answer has come that rank 0 gave to all at once, and return when."""
        self._met_s = self.now()
        return self._met_s

    def sent(self) -> Sent:
        """Return what this rank did so far, as it is sent to rank 0: counted from when all met."""
        met_s = self._met_s
        did = [(span.name, span.begin_s - met_s, span.end_s - met_s, span.nbytes) for span in self.spans]
        return [(_CALL, -met_s, -met_s, 0), *did]

    def collect(self, sent: list[Sent]) -> None:
        """On rank 0: take what all ranks have sent, in their order."""
        met_s = self._met_s
        first_s = min(called_s for (_, called_s, _, _), *_ in sent)
        self.ranks = [
            RankPhases(
                rank,
                [Span(name, begin_s + met_s, end_s + met_s, nbytes) for name, begin_s, end_s, nbytes in did],
                called_s - first_s,
            )
            for rank, ((_, called_s, _, _), *did) in enumerate(sent)
        ]

    def all_ranks(self) -> list[RankPhases]:
        """On rank 0: what all ranks did, and this one also since."""
        return [RankPhases(0, self.spans, self.ranks[0].late_s), *self.ranks[1:]] if self.ranks else []


def seconds_by_name(spans: list[Span]) -> dict[str, float]:
    """Return how long each phase took, all its parts together."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
    return seconds


def find_slowest(ranks: list[RankPhases], work: tuple[str, ...]) -> Slowest | None:
    """
    Name the rank whose time for some work of its own, or to make the call, is furthest above the median of all.

    None where there is one rank. `work` has the phases in which a rank waits for no other.
    """
    if len(ranks) < 2:
        return None
    taken = [seconds_by_name(each.spans) | ({"late": each.late_s} if each.late_s else {}) for each in ranks]
    names = [name for name in (*work, "late") if any(name in seconds for seconds in taken)]
    if not names:
        return None
    # The lower of two: in a pair, the one that did not have to be waited for.
    medians = {name: sorted(seconds.get(name, 0.0) for seconds in taken)[(len(ranks) - 1) // 2] for name in names}

    def excess(place: int, name: str) -> float:
        return taken[place].get(name, 0.0) - medians[name]

    place, name = max(
        ((place, name) for place in range(len(ranks)) for name in names),
        key=lambda each: (excess(*each), taken[each[0]].get(each[1], 0.0)),
    )
    if name == "write" and "stage" in names and excess(place, "stage") >= _EXPLAINED * excess(place, "write") > 0:
        name = "stage"
    return Slowest(ranks[place].rank, name, taken[place].get(name, 0.0), medians[name])
