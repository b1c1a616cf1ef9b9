"""
Numbers taken apart and put together again: the n-th byte of each stands beside the n-th byte of the next.

In a floating point number some bits hold the exponent, which hardly varies between the weights of a layer, while the
rest looks random. Apart, the first compress well and the second are left alone. The exponent of bf16 and fp32 is a byte
of its own after words are *turned*: their sign and the eight bits below it change places.

Numpy does this by casts, shifts and products, which are vectorised and do not hold the GIL. Copies with strides would
take twice as long.
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


class Splitter:
    """Takes words apart; part by part, so that each can go where it belongs at once."""

    def __init__(self, words: Words, *, turn: bool) -> None:
        self._words = words
        self._turn = turn and words.itemsize > 1

    def part(self, begin: int, nbytes: int) -> Words:
        """Return the bytes `begin` to `begin + nbytes` of every turned word, as numbers of their own."""
        end = begin + nbytes
        if self._turn and end == self._words.itemsize:
            if nbytes > 1:
                raise ValueError("the top byte of turned words is a part of its own")
            return self._cast(8 * begin - 1, nbytes)
        part = self._cast(8 * begin, nbytes)
        if self._turn and end == self._words.itemsize - 1:
            # Instead of the lowest bit of the exponent comes the sign.
            sign = part.dtype.type(1 << (8 * nbytes - 1))
            np.bitwise_and(part, ~sign, out=part)
            signs = self._cast(8 * (self._words.itemsize - nbytes), nbytes)
            np.bitwise_and(signs, sign, out=signs)
            np.bitwise_or(part, signs, out=part)
        return part

    def _cast(self, shift: int, nbytes: int) -> Words:
        words = self._words
        if not shift:
            return words.astype(type_of(nbytes), casting="unsafe")
        part: Words = np.empty(words.size, type_of(nbytes))
        np.right_shift(words, words.dtype.type(shift), out=part, casting="unsafe")
        return part


def turned(words: Words) -> Words:
    """Return words whose sign and the eight bits below it have changed places; those of one byte as they are."""
    if words.itemsize == 1:
        return words
    kind, top = words.dtype.type, 8 * words.itemsize - 1
    exponent = kind(0xFF << (top - 8))
    made: Words = (words & exponent) << kind(1)
    made |= (words >> kind(top)) << kind(top - 8)
    made |= words & kind((1 << (top - 8)) - 1)
    return made


def merge(parts: list[Words], into: Words, *, turn: bool) -> None:
    """Fill `into` with words made of parts, the lowest first: undo what a `Splitter` did."""
    if turn and into.itemsize > 1:
        _merge_turned(parts, into)
        return
    np.copyto(into, parts[0], casting="unsafe")
    shift = 8 * parts[0].itemsize
    held = np.empty_like(into) if len(parts) > 1 else into
    for part in parts[1:]:
        # By a product, as numpy casts for it faster than for a shift.
        np.multiply(part, into.dtype.type(1 << shift), out=held, dtype=into.dtype)
        np.bitwise_or(into, held, out=into)
        shift += 8 * part.itemsize


def _merge_turned(parts: list[Words], into: Words) -> None:
    *low, signed, top = parts
    # The part below the top begins with the sign: taken for a signed number, it fills all bits above with it.
    signs: Words = signed.view(f"<i{signed.itemsize}")
    shift = 8 * (into.itemsize - 1 - signed.itemsize)
    held = np.empty_like(into)
    if low:
        merge(low, into, turn=False)
        np.multiply(signs, 1 << shift, out=held.view(f"<i{into.itemsize}"), dtype=f"<i{into.itemsize}")
        np.bitwise_or(into, held, out=into)
    else:
        np.copyto(into, signs, casting="unsafe")
    kind, exponent = into.dtype.type, 8 * into.itemsize - 9
    np.bitwise_and(into, ~kind(0xFF << exponent), out=into)
    np.multiply(top, kind(1 << exponent), out=held, dtype=into.dtype)
    np.bitwise_or(into, held, out=into)
