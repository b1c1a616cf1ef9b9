"""
What rank 0 knows, made known to all ranks; its failure too, so that none waits for a rank that gave up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardkeep.errors import CheckpointError
from shardkeep.state.training.problems import BadState

T = TypeVar("T")


def from_rank0(make: Callable[[], T]) -> T:
    """
    Call `make` on rank 0 and return what it returned on all ranks of the default group.

    Raises:
        BadState: on the other ranks, where `make` failed; rank 0 raises what it raised.

    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    told: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told = [make(), None]
        except Exception as exc:  # noqa: BLE001 - raised again below, once the others know
            failure = exc
            told = [None, _words(exc)]
    dist.broadcast_object_list(told, src=0)
    if failure is not None:
        raise failure
    if told[1] is not None:
        message, hint = told[1]
        raise BadState(f"rank 0: {message}", hint=hint)
    result: T = told[0]
    return result


def _words(error: Exception) -> tuple[str, str]:
    if isinstance(error, CheckpointError):
        return error.message, error.hint
    return f"{type(error).__name__}: {error}", ""
