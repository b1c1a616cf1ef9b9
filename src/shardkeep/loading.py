"""
Loads: open -> match -> read -> place.

The ranks meet three times. Rank 0 reads the commit record, so that all ranks load the same save. Every rank compares its
state with the index, before anything is changed. Every rank reads its own boxes. Objects in the state get their saved state
in a fourth meeting, after all ranks have read. If ranks share their reads, rank 0 first decides which rank reads what, and
the ranks exchange it afterwards. A failure on any rank is raised on all of them. `engine.load_session` has the steps.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.engine.load_session import LoadSession
from shardkeep.engine.match import LoadFilter, LoadSummary, NativeTarget
from shardkeep.engine.report import LoadEvents, LoadReport, Phases
from shardkeep.options import Options
from shardkeep.state.patterns import Patterns, Renames
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_on_all_ranks

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
            where they are; optimizers and objects with `load_state_dict` get their saved state.
        where: a path, a URL, or a store.
        strict: missing and unexpected keys are an error, as are plain values of another kind and patterns that match
            no name; otherwise missing and unexpected keys are reported, and such patterns are a warning. Different
            shapes and dtypes are always an error, as is a load that fills none of the state's tensors.
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
        StateMismatch: lists every difference, and suggests similar names.
        StateError: an argument is invalid, or the state has a leaf that cannot be filled or replaced.
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
    store = open_on_all_ranks(where, world, direct=options.direct_io, doing="load from")
    events = LoadEvents(phases, rank=world.rank, where=store.url)
    load_filter = LoadFilter(include, exclude, rename, cast)
    with events.reporting(), rendezvous(world, f"load from {store.url}") as ranks:
        target = NativeTarget(state, load_filter, world, store.url, allow_pickle, strict)
        session = LoadSession(target, store, world, ranks.agree, phases, options)
        matched, report = session.load(session.open())
    summary = msgspec.msgpack.decode(matched.answer, type=LoadSummary)
    report = replace(report, cast=matched.found[0].cast, **msgspec.structs.asdict(summary))
    events.finished(report)
    return report
