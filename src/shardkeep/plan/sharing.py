"""
Which rank reads what several ranks want: each reads a share, balanced by bytes, and sends it to the others.

Requests with equal digests are equal. Large ones are divided by rows over the ranks that want them. Small ones that the same
ranks want and that lie side by side in the files are kept together, because otherwise every share would touch every block.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from shardkeep.format.boxes import IntArray, Rows, concat_ranges
from shardkeep.plan.save_plan import SLICE_NBYTES, assign_replicas

MESSAGE_NBYTES = 8 << 20
"""The most bytes of a message: enough for the full speed of a network, and little compared with the memory budget."""
_LEAST_MESSAGE_NBYTES = 64 << 10
_WINDOW_PARTS = 32
"""A message takes at most this fraction of the memory budget, because several are in progress at a time."""
TAGS = 1 << 31
"""Number of tags, which distinguish messages from each other and from those of other users of the group."""


class ShareOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wants and others may want, too, as columns of 64-bit integers; sent to rank 0."""

    alone_nbytes: int
    """Bytes that the rank reads in any case."""
    budget_nbytes: int
    what: bytes
    """A digest of 16 bytes for each request, which identifies the wanted bytes."""
    nbytes: bytes
    rows: bytes
    """How many equal parts the bytes can be divided into."""
    file: bytes
    """A number for its file; used only to keep neighbours together."""
    start: bytes


@dataclass(frozen=True)
class Share(Rows):
    """
    The parts of one rank's requests that are sent: by itself to the rest of the team, or by another rank to it.

    Rows with the same owner and turn are one message. A rank reads what it owns, and what is in no row.
    """

    owner: IntArray
    """The rank that reads and sends it."""
    turn: IntArray
    """Counts the messages of each owner."""
    team: IntArray
    """The team of ranks that want it, including the owner."""
    want: IntArray
    """Row in the rank's offer."""
    start: IntArray
    """First byte, in row-major order of the request."""
    stop: IntArray


class SharePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part in a shared read, as rank 0 sends it."""

    first_tag: int
    """The first tag of the messages, so that messages of an aborted exchange are not mistaken for them."""
    message_nbytes: int
    teams: list[list[int]]
    columns: list[bytes]

    @property
    def share(self) -> Share:
        """Its rows, in the order of turns and owners."""
        return Share(*(np.frombuffer(column, "<i8") for column in self.columns))


def column(numbers: Sequence[int] | IntArray) -> bytes:
    """Encode a column."""
    return np.ascontiguousarray(numbers, "<i8").tobytes()


@dataclass(frozen=True)
class _Groups(Rows):
    """Groups of equal requests that several ranks have."""

    team: IntArray
    nbytes: IntArray
    rows: IntArray
    file: IntArray
    start: IntArray


def plan_sharing(offers: Sequence[bytes]) -> list[bytes] | None:
    """Divide equal requests over the ranks that have them; return each rank's plan, or None if no two want the same."""
    decoded = [msgspec.msgpack.decode(offer, type=ShareOffer) for offer in offers]
    nbytes, rows, file, start = (
        np.frombuffer(b"".join(getattr(offer, name) for offer in decoded), "<i8")
        for name in ("nbytes", "rows", "file", "start")
    )
    counts = np.array([len(offer.nbytes) // 8 for offer in decoded], np.int64)
    rank, want = np.repeat(np.arange(len(decoded)), counts), concat_ranges(np.zeros_like(counts), counts)
    what, group = np.unique(np.frombuffer(b"".join(offer.what for offer in decoded), "V16"), return_inverse=True)
    # If a rank has equal requests, one of them is shared, and the rank reads the others itself.
    _, members = np.unique(group * len(decoded) + rank, return_index=True)
    members = members[np.bincount(group[members], minlength=len(what))[group[members]] > 1]
    if not len(members):
        return None
    group = np.unique(group[members], return_inverse=True)[1]  # those of several ranks, numbered in order
    first = np.flatnonzero(np.diff(group, prepend=-1))
    teams: dict[tuple[int, ...], int] = {}
    of_group = np.split(rank[members], first[1:])
    team = np.array([teams.setdefault(tuple(ranks.tolist()), len(teams)) for ranks in of_group], np.int64)
    lead = members[first]
    load = np.array([offer.alone_nbytes for offer in decoded], np.int64)
    np.add.at(load, rank, nbytes)
    np.subtract.at(load, rank[members], nbytes[members])
    message_nbytes = min(offer.budget_nbytes for offer in decoded) // _WINDOW_PARTS
    # A multiple of every element size.
    message_nbytes = max(_LEAST_MESSAGE_NBYTES, min(MESSAGE_NBYTES, message_nbytes)) & ~15
    groups = _Groups(team, nbytes[lead], rows[lead], file[lead], start[lead])
    by_number = [list(ranks) for ranks in teams]
    parts = _parts(groups, by_number, load, message_nbytes)
    tag = secrets.randbelow(TAGS)
    plans = []
    for each in range(len(decoded)):
        own = rank[members] == each
        want_of = np.full(len(groups), -1, np.int64)
        want_of[group[own]] = want[members[own]]
        share = parts.take(want_of[parts.want] >= 0)
        used, number = np.unique(share.team, return_inverse=True)
        columns = (share.owner, share.turn, number, want_of[share.want], share.start, share.stop)
        its_teams = [by_number[at] for at in used.tolist()]
        plan = SharePlan(
            first_tag=tag, message_nbytes=message_nbytes, teams=its_teams, columns=[column(c) for c in columns]
        )
        plans.append(msgspec.msgpack.encode(plan))
    return plans


def _parts(groups: _Groups, teams: list[list[int]], load: IntArray, message_nbytes: int) -> Share:
    """Return everything that is sent, with the group instead of a rank's request."""
    bundles = _bundles(groups, min(SLICE_NBYTES, message_nbytes))
    nbytes = np.array([sum(groups.nbytes[bundle].tolist()) for bundle in bundles], np.int64)
    rows = np.array([groups.rows[bundle[0]] if len(bundle) == 1 else 1 for bundle in bundles], np.int64)
    sizes = np.array([len(ranks) for ranks in teams], np.int64)
    team = groups.team[[bundle[0] for bundle in bundles]]
    holder = np.concatenate([np.array(ranks, np.int64) for ranks in teams])
    which, at, begin, end = assign_replicas(load, nbytes, (np.cumsum(sizes) - sizes)[team], sizes[team], holder, rows)
    turns = [0] * len(load)
    made: list[tuple[int, int, int, int, int, int]] = []
    for of, owner, low, high in zip(which.tolist(), holder[at].tolist(), begin.tolist(), end.tolist(), strict=True):
        bundle, its_team = bundles[of], int(team[of])
        if len(bundle) > 1:
            made += [(owner, turns[owner], its_team, group, 0, int(groups.nbytes[group])) for group in bundle]
            turns[owner] += 1
            continue
        row_nbytes = int(nbytes[of] // rows[of])
        for start in range(low * row_nbytes, high * row_nbytes, message_nbytes):
            stop = min(start + message_nbytes, high * row_nbytes)
            made.append((owner, turns[owner], its_team, bundle[0], start, stop))
            turns[owner] += 1
    columns = np.array(made, np.int64).reshape(-1, 6)
    # The sort must be stable, because sender and receivers rely on the order of the parts of a message.
    return Share(*columns[np.lexsort((columns[:, 0], columns[:, 1]))].T)


def _bundles(groups: _Groups, most_nbytes: int) -> list[list[int]]:
    """Bundle small groups of the same team, in the order in which they lie in the files."""
    bundles: list[list[int]] = []
    held, before = 0, -1
    for group in np.lexsort((groups.start, groups.file, groups.team)).tolist():
        team, nbytes = int(groups.team[group]), int(groups.nbytes[group])
        if team != before or held + nbytes > most_nbytes:
            bundles.append([])
            held = 0
        bundles[-1].append(group)
        held, before = held + nbytes, team
    return bundles
