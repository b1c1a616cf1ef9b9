"""
Whether ranks can send each other what they read: over which backend, and whether all of them are asked to.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardkeep.ranks.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("shardkeep")

TAGS = 1 << 31
"""How many tags there are, by which messages are told from each other, and from those of others on the same group."""


class Channel(NamedTuple):
    """The ranks of a group, and what carries bytes between them."""

    backend: Any
    """Of torch, for the CPU."""
    rank: int
    timeout_s: float
    """How long a message may take."""


def open_channel(group: ProcessGroup | World | None, *, size: int, timeout_s: float) -> Channel | str:
    """
    Return what the ranks of a group can send each other bytes by, or why they cannot.

    Args:
        group: the ranks; None for all.
        size: how many they are.
        timeout_s: how long they wait for each other in a step that they make together.

    """
    if size == 1:
        return "there is only one rank"
    if isinstance(group, World):
        return "the ranks have no process group"
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - loaded, as there are several ranks

    members = group if group is not None else c10d._get_default_group()
    try:
        backend = members._get_backend(torch.device("cpu"))
    except RuntimeError:
        return f"the process group ({c10d.get_backend_config(members)}) has no backend for the CPU"
    if backend.name() != "gloo":
        return f"the process group's backend for the CPU is {backend.name()}, not gloo"
    # Half of it, so that a rank whose messages are not answered says so while rank 0 still waits for its word.
    return Channel(backend, c10d.get_rank(members), timeout_s / 2)


def new_tag() -> int:
    """Return where to number the messages of an exchange from; rank 0 does, for all."""
    return secrets.randbelow(TAGS)


def all_agree(words: Sequence[str | None]) -> bool:
    """
    Say whether all ranks share their reads; where only some would, one line of the log says why it is not done.

    `words` has for each rank None where nobody asked for it, else why it cannot, which is empty where it can.
    """
    if all(word == "" for word in words):
        return True
    if any(word is not None for word in words):
        rank, word = next((rank, word) for rank, word in enumerate(words) if word != "")
        log.warning("reads are not shared: rank %d: %s", rank, "share_reads is not set" if word is None else word)
    return False
