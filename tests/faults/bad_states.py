"""States in which one rank's part is wrong, and what every rank must say about it."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import shardkeep as sk

T = torch.arange(12.0).reshape(3, 4)


class Bad(NamedTuple):
    state: Any
    """From rank (of three) to its state."""
    error: type[sk.CheckpointError]
    says: tuple[str, ...]
    check_replicas: bool = False


def box(rank, rows=1, at=None, columns=4):
    return sk.ShardedBox(torch.ones(rows, columns), offsets=(rank if at is None else at, 0), shape=(3, 4))


CASES = {
    "no stored form": Bad(
        lambda rank: {"a": {"b": object() if rank == 2 else 3}, "w": T}, sk.UnsupportedLeaf, ("rank 2", "a.b", "object")
    ),
    "two leaves of one name": Bad(
        lambda rank: {"a": {"b": 1}, **({"a.b": 2} if rank == 1 else {})}, sk.KeyCollision, ("rank 1", "a.b")
    ),
    "replicas differ": Bad(
        lambda rank: {"x": T, "w": T + (rank == 1)}, sk.ReplicasDiffer, ("'w'", "ranks 0 and 1"), check_replicas=True
    ),
    "values differ": Bad(lambda rank: {"w": T, "lr": 0.1 * (rank == 1)}, sk.ReplicasDiffer, ("'lr'", "ranks 0 and 1")),
    "shapes differ": Bad(lambda rank: {"w": T if rank < 2 else T[:2]}, sk.InvalidShards, ("'w'", "rank 0", "rank 2")),
    "dtypes differ": Bad(
        lambda rank: {"w": T if rank < 2 else T.double()}, sk.InvalidShards, ("'w'", "rank 0", "rank 2")
    ),
    "a hole": Bad(lambda rank: {"w": box(min(rank, 1))}, sk.InvalidShards, ("'w'",)),
    "an overlap": Bad(lambda rank: {"w": box(rank, rows=2 if rank == 1 else 1)}, sk.InvalidShards, ("'w'",)),
    "outside": Bad(lambda rank: {"w": box(rank, at=rank + 1)}, sk.InvalidShards, ("rank 2", "'w'")),
    "a tensor here, a value there": Bad(
        lambda rank: {"w": T if rank else 3}, sk.InvalidShards, ("'w'", "rank 0", "rank 1")
    ),
    "a leaf here, a dict there": Bad(lambda rank: {"a": 1 if rank else {"b": 2}, "w": T}, sk.StateError, ("'a'",)),
    "a longer list": Bad(lambda rank: {"a": [1, 2, 3][: 2 + (rank == 1)], "w": T}, sk.StateError, ("'a'",)),
}


def fail_in_turn(place):
    """On a rank of a pool: try each of them; return the error's class, its text and the ranks it is about."""
    heard = []
    for bad in CASES.values():
        try:
            sk.save(bad.state(dist.get_rank()), place, overwrite=True, check_replicas=bad.check_replicas)
        except sk.CheckpointError as exc:
            heard.append((type(exc).__name__, str(exc), sorted(exc.by_rank)))
        else:
            heard.append(("", "", []))
    return heard
