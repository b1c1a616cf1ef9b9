"""
What rank 0 knows to be wrong with a save before it begins: raised inside it, from where it reaches all ranks.

Raised in the call of rank 0 alone it would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from shardkeep.errors import CheckpointError, StateError
from shardkeep.manage.entries import meta_with
from shardkeep.manage.timelines import Timeline


def meta_or_refusal(
    meta: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None, timeline: Timeline
) -> Mapping[str, Any]:
    """Put metrics and the timeline to the user's own meta, or refuse the save."""
    try:
        return meta_with(meta, metrics, timeline.number, timeline.began_after)
    except StateError as error:
        return Refused(error)


class Refused(Mapping[str, Any]):
    """Meta that raises when it is looked at: inside the save, from where it reaches all ranks."""

    def __init__(self, error: CheckpointError) -> None:
        self._error = error

    def __getitem__(self, key: str) -> NoReturn:
        raise self._error

    def __iter__(self) -> Iterator[str]:
        raise self._error

    def __len__(self) -> int:
        return 1
