"""
Which rank reads what several ranks want: each reads a share, balanced by bytes, and sends it to the others.

Requests with equal digests are equal. Large ones are divided by rows over the ranks that want them. Small ones that the same
ranks want and that lie side by side in the files are kept together, because otherwise every share would touch every block.
Pure functions: the same offers give the same shares.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class ShareOffer(Rows):
    """What one rank wants and others may want, too; one row each."""

    what: IntArray
    """A digest that identifies the wanted bytes, as two numbers."""
    nbytes: IntArray
    rows: IntArray
    """How many equal parts the bytes can be divided into."""
    file: IntArray
    """A number for its file; used only to keep neighbours together."""
    start: IntArray


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


class _OfferLetter(msgspec.Struct, frozen=True, array_like=True):
    alone_nbytes: int
    budget_nbytes: int
    columns: list[bytes]


class _ShareLetter(msgspec.Struct, frozen=True, array_like=True):
    first_tag: int
    message_nbytes: int
    teams: list[list[int]]
    columns: list[bytes]


@dataclass(frozen=True)
class SharePlan:
    """One rank's part in a shared read, as rank 0 sends it."""

    share: Share
    teams: list[list[int]]
    message_nbytes: int
    first_tag: int
    """The first tag of the messages, so that messages of an aborted exchange are not mistaken for them."""


def encode_offer(offer: ShareOffer, *, alone_nbytes: int, budget_nbytes: int) -> bytes:
    """Encode an offer for rank 0, with the bytes that the rank reads in any case, and its memory budget."""
    columns = [np.ascontiguousarray(column, "<i8").tobytes() for column in offer.columns()]
    return msgspec.msgpack.encode(_OfferLetter(alone_nbytes, budget_nbytes, columns))


def decode_share_plan(data: bytes) -> SharePlan:
    """Decode what rank 0 sent."""
    letter = msgspec.msgpack.decode(data, type=_ShareLetter)
    share = Share(*(np.frombuffer(column, "<i8") for column in letter.columns))
    return SharePlan(share, letter.teams, letter.message_nbytes, letter.first_tag)


def plan_sharing(letters: Sequence[bytes], *, first_tag: int) -> list[bytes] | None:
    """Divide what all ranks offer; return each rank's plan, or None if no two ranks want the same."""
    decoded = [msgspec.msgpack.decode(letter, type=_OfferLetter) for letter in letters]
    columns = [[np.frombuffer(column, "<i8") for column in letter.columns] for letter in decoded]
    offers = [ShareOffer(what.reshape(-1, 2), *rest) for what, *rest in columns]
    alone = np.array([letter.alone_nbytes for letter in decoded], np.int64)
    message_nbytes = message_nbytes_for(min(letter.budget_nbytes for letter in decoded))
    shares, teams = share_out(offers, alone, message_nbytes=message_nbytes)
    if not teams:
        return None
    return [_encode_share(share, teams, message_nbytes, first_tag) for share in shares]


def message_nbytes_for(budget_nbytes: int) -> int:
    """Return the most bytes of a message, a multiple of every element size."""
    return max(_LEAST_MESSAGE_NBYTES, min(MESSAGE_NBYTES, budget_nbytes // _WINDOW_PARTS)) & ~15


def _encode_share(share: Share, teams: list[list[int]], message_nbytes: int, first_tag: int) -> bytes:
    used, team = np.unique(share.team, return_inverse=True)
    own = Share(share.owner, share.turn, np.asarray(team, np.int64), share.want, share.start, share.stop)
    columns = [np.ascontiguousarray(column, "<i8").tobytes() for column in own.columns()]
    letter = _ShareLetter(first_tag, message_nbytes, [teams[number] for number in used.tolist()], columns)
    return msgspec.msgpack.encode(letter)


def share_out(
    offers: Sequence[ShareOffer], alone_nbytes: IntArray, *, message_nbytes: int
) -> tuple[list[Share], list[list[int]]]:
    """
    Divide equal requests over the ranks that have them.

    `alone_nbytes` is what each rank reads in any case, which counts in the balance. Returns the share of each rank, its rows in
    the order of turns and owners, and the teams.

    """
    groups = _groups(_wanted(offers))
    by_rank = np.split(
        np.argsort(groups.rank, kind="stable"), np.cumsum(np.bincount(groups.rank, minlength=len(offers)))[:-1]
    )
    load = np.asarray(alone_nbytes, np.int64).copy()
    for rank, (offer, members) in enumerate(zip(offers, by_rank, strict=True)):
        load[rank] += int(offer.nbytes.sum() - offer.nbytes[groups.want[members]].sum())
    if not len(groups.first):
        nothing = np.empty(0, np.int64)
        return [Share(*[nothing] * 6) for _ in offers], []
    teams, team = _teams(groups)
    parts = _parts(groups, teams, team, load, message_nbytes)
    shares = []
    for members in by_rank:
        want = np.full(len(groups.first), -1, np.int64)
        want[groups.group[members]] = groups.want[members]
        of_part = want[parts.want]
        rows = of_part >= 0
        own = parts.take(rows)
        shares.append(Share(own.owner, own.turn, own.team, of_part[rows], own.start, own.stop))
    return shares, teams


@dataclass(frozen=True)
class _Wanted(Rows):
    """All requests of all ranks, equal ones next to each other, at most one per rank among those."""

    rank: IntArray
    want: IntArray
    what: IntArray
    nbytes: IntArray
    rows: IntArray
    file: IntArray
    start: IntArray


@dataclass(frozen=True)
class _Groups:
    """Groups of equal requests of several ranks: the columns of the groups, then those of their members."""

    first: IntArray
    count: IntArray
    nbytes: IntArray
    rows: IntArray
    file: IntArray
    start: IntArray
    group: IntArray
    rank: IntArray
    want: IntArray


def _wanted(offers: Sequence[ShareOffer]) -> _Wanted:
    lengths = [len(offer) for offer in offers]
    rank = np.repeat(np.arange(len(offers), dtype=np.int64), lengths)
    want = concat_ranges(np.zeros(len(offers), np.int64), np.array(lengths, np.int64))
    what, nbytes, rows, file, start = (
        np.concatenate(each) for each in zip(*(o.columns() for o in offers), strict=True)
    )
    table = _Wanted(rank, want, what, nbytes, rows, file, start)
    table = table.take(np.lexsort((want, rank, what[:, 1], what[:, 0])))
    # If a rank has equal requests, one of them is shared, and the rank reads the others itself.
    again = np.zeros(len(table), bool)
    again[1:] = np.all(table.what[1:] == table.what[:-1], axis=1) & (table.rank[1:] == table.rank[:-1])
    return table.take(~again)


def _groups(wanted: _Wanted) -> _Groups:
    new = np.ones(len(wanted), bool)
    new[1:] = np.any(wanted.what[1:] != wanted.what[:-1], axis=1)
    first = np.flatnonzero(new)
    count = np.diff(np.append(first, len(wanted)))
    shared = count >= 2
    first, count = first[shared], count[shared]
    members = wanted.take(concat_ranges(first, count))
    known = wanted.take(first)
    return _Groups(
        first=np.cumsum(count) - count,
        count=count,
        nbytes=known.nbytes,
        rows=known.rows,
        file=known.file,
        start=known.start,
        group=np.repeat(np.arange(len(first), dtype=np.int64), count),
        rank=members.rank,
        want=members.want,
    )


def _teams(groups: _Groups) -> tuple[list[list[int]], IntArray]:
    """Return the distinct sets of ranks, and the number of each group's set."""
    number: dict[bytes, int] = {}
    teams: list[list[int]] = []
    team = np.empty(len(groups.first), np.int64)
    for group, (first, count) in enumerate(zip(groups.first.tolist(), groups.count.tolist(), strict=True)):
        ranks = groups.rank[first : first + count]
        found = number.setdefault(ranks.tobytes(), len(number))
        if found == len(teams):
            teams.append(ranks.tolist())
        team[group] = found
    return teams, team


def _parts(groups: _Groups, teams: list[list[int]], team: IntArray, load: IntArray, message_nbytes: int) -> Share:
    """Return everything that is sent, with the group instead of a rank's request."""
    unit, order = _units(groups, team, min(SLICE_NBYTES, message_nbytes))
    first = np.flatnonzero(np.diff(unit, prepend=-1))
    members = np.diff(np.append(first, len(unit)))
    lead = order[first]
    nbytes = np.add.reduceat(groups.nbytes[order], first)
    rows = np.where(members == 1, groups.rows[lead], 1)
    sizes = np.array([len(ranks) for ranks in teams], np.int64)
    begins = np.cumsum(sizes) - sizes
    holder = np.concatenate([np.array(ranks, np.int64) for ranks in teams])
    which, at, begin, end = assign_replicas(load, nbytes, begins[team[lead]], sizes[team[lead]], holder, rows)
    turns = [0] * len(load)
    made: list[tuple[int, int, int, int, int, int]] = []
    for of, owner, low, high in zip(which.tolist(), holder[at].tolist(), begin.tolist(), end.tolist(), strict=True):
        some = order[first[of] : first[of] + members[of]].tolist()
        its_team = int(team[some[0]])
        if len(some) > 1:
            made += [(owner, turns[owner], its_team, group, 0, int(groups.nbytes[group])) for group in some]
            turns[owner] += 1
            continue
        row_nbytes = int(groups.nbytes[some[0]]) // int(groups.rows[some[0]])
        for start in range(low * row_nbytes, high * row_nbytes, message_nbytes):
            stop = min(start + message_nbytes, high * row_nbytes)
            made.append((owner, turns[owner], its_team, some[0], start, stop))
            turns[owner] += 1
    columns = np.array(made, np.int64).reshape(-1, 6)
    # The sort must be stable, because sender and receivers rely on the order of the parts of a message.
    return Share(*columns[np.lexsort((columns[:, 0], columns[:, 1]))].T)


def _units(groups: _Groups, team: IntArray, bundle_nbytes: int) -> tuple[IntArray, IntArray]:
    """
    Bundle small groups of the same team in the order in which they lie in the files.

    Returns the number of each group's bundle, ascending, and the groups in that order.
    """
    order = np.lexsort((groups.start, groups.file, team))
    unit = np.empty(len(order), np.int64)
    now, held, before = -1, bundle_nbytes, -1
    sizes, of_team = groups.nbytes[order].tolist(), team[order].tolist()
    for at, (nbytes, its_team) in enumerate(zip(sizes, of_team, strict=True)):
        if its_team != before or held + nbytes > bundle_nbytes:
            now, held = now + 1, 0
        held, before = held + nbytes, its_team
        unit[at] = now
    return unit, order
