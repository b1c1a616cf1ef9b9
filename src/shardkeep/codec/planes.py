"""
Numbers taken apart and put together again: the n-th byte of each stands beside the n-th byte of the next.

In a floating point number one byte, or one part of it, holds the exponent, which hardly varies between the weights of a
layer, while the rest looks random. Apart, the first compresses well and the second is left alone. The exponent is a
byte of its own after the number's bits are rotated left by one, which moves the sign to the other end.

Numpy does this with its vectorised casts and shifts, without the GIL; strided copies would take twice as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]
"""Unsigned numbers of some width."""
WIDTHS = (1, 2, 4, 8)


def type_of(width: int) -> np.dtype[Any]:
    """Return the type of unsigned numbers of so many bytes, the lowest byte first."""
    return np.dtype(f"<u{width}")


def rotated(words: Words) -> Words:
    """Rotate the bits of every word left by one."""
    top = 8 * words.itemsize - 1
    turned: Words = words << words.dtype.type(1)
    turned |= words >> words.dtype.type(top)
    return turned


class Splitter:
    """Takes words apart; part by part, so that each can go where it belongs at once."""

    def __init__(self, words: Words, *, rotate: bool) -> None:
        self._words = words
        self._rotate = rotate
        self._held: Words = np.empty_like(words)

    def part(self, begin: int, into: Words) -> None:
        """Fill `into` with the bytes `begin` and following of every word, as many as its type has."""
        words, held = self._words, self._held
        shift = 8 * begin - (1 if self._rotate else 0)
        if shift > 0:
            np.right_shift(words, words.dtype.type(shift), out=held)
            np.copyto(into, held, casting="unsafe")
            return
        np.copyto(into, words, casting="unsafe")
        if self._rotate:
            # The lowest part: one bit up, and the sign below. Adding is quicker than shifting small numbers.
            np.add(into, into, out=into)
            np.right_shift(words, words.dtype.type(8 * words.itemsize - 1), out=held)
            np.bitwise_or(into, held, out=into, casting="unsafe")


def merge(parts: list[Words], into: Words, *, rotate: bool) -> None:
    """Fill `into` with words made of parts, the lowest first: undo what a `Splitter` did."""
    kind = into.dtype.type
    np.copyto(into, parts[-1], casting="unsafe")
    for part in reversed(parts[:-1]):
        np.left_shift(into, kind(8 * part.itemsize), out=into)
        np.bitwise_or(into, part, out=into)
    if rotate:
        sign = np.left_shift(into, kind(8 * into.itemsize - 1))
        np.right_shift(into, kind(1), out=into)
        np.bitwise_or(into, sign, out=into)
