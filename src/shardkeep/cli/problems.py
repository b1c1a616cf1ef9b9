"""What a command line can get wrong, and guesses at what was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from shardkeep.errors import CheckpointError


class NotUsable(CheckpointError, ValueError):
    """What was asked for cannot be done as it was asked."""


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """
    Return a hint that names what is spelt almost like a word, or `otherwise` where nothing is.

    Of many thousand names only those that share a part with the word are looked at, so that a guess takes no time.
    """
    names = list(known)
    if len(names) > _MANY:
        parts = [part for part in word.split(".") if part]
        names = [name for name in names if any(part in name for part in parts)][:_MANY]
    close = get_close_matches(word, names, n=3, cutoff=0.7)
    if not close:
        return otherwise
    return f"did you mean {', '.join(close[:-1]) + ' or ' if close[:-1] else ''}{close[-1]}?"


_MANY = 2000
