"""
Before a gather: do the ranks that share tensors hold the same ones, in the same order?

Collectives that do not match wait for each other until the process group gives up, or mix up tensors. So the ranks of
each mesh and group compare, through the store, a digest of what they are about to gather; where it differs, or one of
them cannot go on, all of them raise the same error and no collective has begun.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from shardkeep.errors import CheckpointError, RanksDisagree
from shardkeep.options import Options
from shardkeep.ranks.agree import meet
from shardkeep.ranks.world import World
from shardkeep.state.toolkit.recognise import Path, is_dtensor, is_sharded_tensor, spell

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Ranks = tuple[int, ...]


def compare_trees(tree: Any, pg: ProcessGroup | None, check: Callable[[], None]) -> None:
    """
    Raise, on all ranks that share tensors, unless they hold the same ones in the same order and `check` passes.

    Args:
        tree: what this rank is about to gather.
        pg: gathers the ShardedTensors; each its own group by default.
        check: looks at this rank's own tree, and raises a `CheckpointError` where it cannot be gathered.

    Raises:
        RanksDisagree: another tensor is next on another rank; names both.
        RanksSilent: a rank did not come at all.

    """
    shared: dict[Ranks, list[list[str]]] = {}
    for path, tensor in sharded_in(tree):
        shared.setdefault(_ranks_of(tensor, pg), []).append([spell(path), _form(tensor)])
    failure: CheckpointError | None = None
    try:
        check()
    except CheckpointError as error:
        failure = error
    # Small sets first, so that what goes wrong in one is known to the larger ones its ranks belong to; and all ranks
    # in one order, so that none waits in one set for a rank that waits for it in another.
    for ranks in sorted(shared, key=lambda each: (len(each), each)):
        try:
            _compare(ranks, shared[ranks], failure)
        except CheckpointError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _compare(ranks: Ranks, lines: list[list[str]], failure: CheckpointError | None) -> None:
    """Compare `lines` with those of the other ranks of the set, or tell them that this one cannot go on."""
    world = _world_of(ranks)
    text = json.dumps(lines).encode()

    def work() -> bytes:
        if failure is not None:
            raise failure
        return blake2b(text, digest_size=16).digest()

    with meet(world, "gather a state dict") as meeting:
        if meeting.agree("compare", work, _differ) == b"differ":
            meeting.agree("name what differs", lambda: text, _name_difference)


def _differ(said: list[bytes]) -> list[bytes]:
    return [b"" if len(set(said)) == 1 else b"differ"] * len(said)


def _name_difference(said: list[bytes]) -> list[bytes]:
    first = json.loads(said[0])
    for number, word in enumerate(said):
        for ours, theirs in itertools.zip_longest(first, json.loads(word), fillvalue=["nothing", ""]):
            if ours != theirs:
                raise RanksDisagree(
                    f"the tensors to gather differ: {' '.join(ours).strip()} on the first of the ranks that share "
                    f"them, {' '.join(theirs).strip()} on number {number} of them",
                    hint="give all ranks state dicts with the same sharded tensors in the same order",
                )
    return [b""] * len(said)


def sharded_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Return the sharded tensors of a tree, and where they stand, in the order in which they are gathered."""
    if is_dtensor(tree) or is_sharded_tensor(tree):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from sharded_in(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from sharded_in(value, (*path, index))


def _ranks_of(tensor: Any, pg: ProcessGroup | None) -> Ranks:
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a sharded tensor

    if is_dtensor(tensor):
        return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))
    return tuple(sorted(dist.get_process_group_ranks(pg or tensor._process_group or dist.group.WORLD)))


def _form(tensor: Any) -> str:
    if is_dtensor(tensor):
        return f"({tensor.dtype} {tuple(tensor.shape)} as {tensor.placements})"
    return f"({tensor.dtype} {tuple(tensor.size())} as a ShardedTensor)"


def _world_of(ranks: Ranks) -> World:
    """Return the world of these ranks; this process alone where it is none of them, or where all others are made up."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - loaded, as there is a sharded tensor

    mine = c10d.get_rank()
    if len(ranks) == 1 or mine not in ranks or c10d.get_backend() == "fake":
        return World(0, 1)
    digest = blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    store = c10d.PrefixStore(f"shardkeep/ranks/{digest}", c10d._get_default_store())
    return World(ranks.index(mine), len(ranks), store, Options().timeout_s)
