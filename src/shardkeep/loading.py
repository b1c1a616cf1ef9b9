"""
The load story: open -> match -> read -> place.

Three meetings of the ranks: rank 0 reads the commit record, so that all load one and the same save; every rank
compares its state with the index, before anything is changed; every rank reads its own boxes. Objects in the state are
given what is theirs in a fourth, after all have read. Where reads are shared, rank 0 says who reads what before they
begin, and ranks exchange it afterwards. A failure anywhere, on any rank, reaches all of them.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.engine.access import open_on_all_ranks
from shardkeep.engine.load_session import LoadSession
from shardkeep.engine.match import LoadFilter, MatchResult
from shardkeep.engine.report import LOAD_WORK, LoadEvents, LoadReport, Phases, SentPhases, find_slowest
from shardkeep.options import Options
from shardkeep.state.patterns import Patterns, Renames
from shardkeep.storage.base import Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def load(
    state: MutableMapping[str, Any],
    where: str | os.PathLike[str] | Store,
    *,
    strict: bool = True,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Renames = None,
    cast: bool | Patterns = False,
    allow_pickle: bool = False,
    group: ProcessGroup | World | None = None,
    options: Options | None = None,
) -> LoadReport:
    """
    Fill a state from a checkpoint, in place; called by all ranks of `group` (or of the default group).

    Tensors are filled where they are, whatever layout they were saved in; tensors on the meta device are replaced by
    real ones; plain values are replaced. The state and the checkpoint are compared before anything is changed. If a
    read fails later, on any rank, it raises on all of them, and the state's tensors may hold a mix of old and new.

    Args:
        state: what to fill: the same nesting as was saved, in any layout over any number of ranks. Modules are filled
            where they are; optimizers and objects with `load_state_dict` are given what was saved of them.
        where: a path, or a store.
        strict: missing and unexpected keys are an error, as are plain values of another kind and patterns that match
            no name; otherwise missing and unexpected keys are reported. Different shapes and dtypes are always an
            error.
        include: load only these names: a name, a dotted prefix, a glob, several of them, or a callable.
        exclude: do not load these.
        rename: from a name in the checkpoint to its name in the state: a mapping of names or dotted prefixes, pairs
            of regular expression and replacement, or a callable (None drops a name).
        cast: convert where dtypes differ: True, or the names for which it is allowed.
        allow_pickle: unpickle leaves that were pickled. Only for checkpoints you trust.
        group: the ranks that take part.
        options: threads, memory and deadlines.

    Raises:
        CheckpointNotFound: nothing is committed there.
        StateMismatch: lists every difference, with what may have been meant.
        StateError: an argument makes no sense, or the state holds what cannot be filled or changed.
        DamagedCheckpoint: what is stored is not what was saved; names file, offset and keys.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> where = tempfile.mkdtemp() + "/step-1"
        >>> _ = sk.save({"model": {"w": torch.ones(4, 4)}, "step": 1}, where)
        >>> state = {"model": {"w": torch.zeros(4, 4)}, "step": 0}
        >>> sk.load(state, where).missing, state["step"]
        ([], 1)

    """
    phases = Phases()
    options = options or Options()
    world = current_world(group, timeout_s=options.timeout_s)
    store = open_on_all_ranks(where, world, options, doing="load from")
    wishes = LoadFilter(include, exclude, rename, cast)
    telling = LoadEvents(phases, rank=world.rank, where=store.url)
    with telling.reporting(), rendezvous(world, f"load from {store.url}") as meeting:
        filling = LoadSession(store, wishes, world, options, group, allow_pickle=allow_pickle)

        def match() -> bytes:
            with phases.phase("plan"):
                return filling.match(state)

        def place() -> None:
            with phases.phase("place"):
                filling.place(state)

        def read() -> bytes:
            began_s = phases.now()
            filling.read(first_file=world.rank / world.size)
            phases.add("read", began_s, phases.now(), filling.bytes_read)
            if not filling.objects and not filling.orders:
                place()
            return msgspec.msgpack.encode(phases.sent())

        def exchange() -> bytes:
            with phases.phase("exchange"):
                filling.exchange()
            if not filling.objects:
                place()
            return msgspec.msgpack.encode(phases.sent())

        def place_objects() -> bytes:
            place()
            return msgspec.msgpack.encode(phases.sent())

        def end(payloads: list[bytes]) -> list[bytes]:
            phases.collect([msgspec.msgpack.decode(payload, type=SentPhases) for payload in payloads])
            return [b""] * len(payloads)

        with phases.phase("open"):
            filling.open(meeting.agree("open", lambda: filling.look(state), filling.tell))
            if filling.communicates:  # all that can fail on a rank alone comes before ranks wait for each other
                meeting.agree("prepare", filling.prepare, lambda done: done)
        judged = meeting.agree("match", match, lambda found: filling.judge(found, strict=strict, where=store.url))
        phases.mark_meeting()
        verdict = msgspec.msgpack.decode(judged, type=MatchResult)
        if filling.shares:
            filling.orders = meeting.agree("share", filling.offer, filling.share_out)
        meeting.agree("read", read, end)
        if filling.orders:  # on all ranks, none of which has failed to read
            meeting.agree("exchange", exchange, end)
        if filling.objects:  # which may talk to each other, and must not wait for a rank that failed to read
            meeting.agree("place", place_objects, end)
    ranks = phases.all_ranks()
    report = LoadReport(
        where=store.url,
        save_id=filling.record.save_id,
        step=filling.record.step,
        meta=filling.record.meta,
        missing=verdict.missing,
        unexpected=verdict.unexpected,
        cast=filling.matched.cast,
        bytes_read=filling.bytes_read,
        bytes_received=filling.bytes_received,
        seconds=phases.now(),
        phases=phases.spans,
        ranks=ranks,
        slowest=find_slowest(ranks, LOAD_WORK),
    )
    telling.finished(report)
    return report
