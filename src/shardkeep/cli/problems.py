"""What a command line can get wrong, and guesses at what was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from heapq import nlargest

from shardkeep.errors import CheckpointError

_MANY = 1000


class NotUsable(CheckpointError, ValueError):
    """What was asked for cannot be done as it was asked."""


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """
    Return a hint that names what is spelt almost like a word, or `otherwise` where nothing is.

    Of many thousand names only those are looked at that have the most dotted parts in common with the word.
    """
    names = list(known)
    if len(names) > _MANY:
        parts = set(word.split("."))
        names = nlargest(_MANY, names, key=lambda name: len(parts.intersection(name.split("."))))
    close = get_close_matches(word, names, n=3, cutoff=0.6)
    if not close:
        return otherwise
    return f"did you mean {', '.join(close[:-1]) + ' or ' if close[:-1] else ''}{close[-1]}?"
