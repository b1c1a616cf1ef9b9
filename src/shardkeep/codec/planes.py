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

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
"""Unsigned numbers of some width."""
WIDTHS = (1, 2, 4, 8)


def type_of(width: int) -> np.dtype[Any]:
    """Return the type of unsigned numbers of so many bytes, the lowest byte first."""
    return np.dtype(f"<u{width}")


class Scratch:
    """Memory of a thread, kept for frame after frame: to be given new pages takes as long as what is done in them."""

    def __init__(self) -> None:
        self._data: Bytes = np.empty(0, np.uint8)

    def get(self, nbytes: int) -> Bytes:
        """Return so many bytes, whatever is in them; the same as the last time."""
        if self._data.size < nbytes:
            self._data = np.empty(nbytes, np.uint8)
        return self._data[:nbytes]


def aligned(data: Bytes, width: int) -> Words:
    """Return bytes as words; a copy of them, where they do not lie as words should: numpy is slow on those."""
    words: Words = data.view(type_of(width))
    return words if words.flags.aligned else words.copy()


def split(words: Words, begin: int, into: Words, scratch: Bytes, *, turn: bool) -> None:
    """
    Fill `into`, numbers of some bytes, with as many bytes of every word, from the `begin`th on.

    Args:
        words: unsigned numbers; in rows, or not.
        begin: the first byte that is wanted, of those of a turned word.
        into: as many numbers, in the same order.
        scratch: at least as many bytes as `into` has.
        turn: whether words are turned first; their top byte has to be taken by itself.

    """
    nbytes, width = into.itemsize, words.itemsize
    end = begin + nbytes
    if not turn or width == 1 or end < width - 1:
        _cast(words, 8 * begin, into)
    elif end == width - 1:
        # Instead of the lowest bit of the exponent comes the sign.
        sign = into.dtype.type(1 << (8 * nbytes - 1))
        _cast(words, 8 * begin, into)
        np.bitwise_and(into, ~sign, out=into)
        signs: Words = scratch[: into.nbytes].view(into.dtype).reshape(into.shape)
        _cast(words, 8 * (width - nbytes), signs)
        np.bitwise_and(signs, sign, out=signs)
        np.bitwise_or(into, signs, out=into)
    elif nbytes == 1:
        _cast(words, 8 * begin - 1, into)
    else:
        raise ValueError("the top byte of turned words is a part of its own")


def _cast(words: Words, shift: int, into: Words) -> None:
    if shift:
        np.right_shift(words, words.dtype.type(shift), out=into, casting="unsafe")
    else:
        np.copyto(into, words, casting="unsafe")


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


def merge(parts: list[Words], into: Words, scratch: Bytes, *, turn: bool) -> None:
    """Fill `into` with words made of parts, the lowest first: undo `split`. Needs scratch of its size."""
    held: Words = scratch[: into.nbytes].view(into.dtype)
    if turn and into.itemsize > 1:
        _merge_turned(parts, into, held)
    else:
        _merge(parts, into, held)


def _merge(parts: list[Words], into: Words, held: Words) -> None:
    np.copyto(into, parts[0], casting="unsafe")
    shift = 8 * parts[0].itemsize
    for part in parts[1:]:
        # By a product, as numpy casts for it faster than for a shift.
        np.multiply(part, into.dtype.type(1 << shift), out=held, dtype=into.dtype)
        np.bitwise_or(into, held, out=into)
        shift += 8 * part.itemsize


def _merge_turned(parts: list[Words], into: Words, held: Words) -> None:
    *low, signed, top = parts
    # The part below the top begins with the sign: taken for a signed number, it fills all bits above with it.
    signs: Words = signed.view(f"<i{signed.itemsize}")
    shift = 8 * (into.itemsize - 1 - signed.itemsize)
    if low:
        _merge(low, into, held)
        np.multiply(signs, 1 << shift, out=held.view(f"<i{into.itemsize}"), dtype=f"<i{into.itemsize}")
        np.bitwise_or(into, held, out=into)
    else:
        np.copyto(into, signs, casting="unsafe")
    kind, exponent = into.dtype.type, 8 * into.itemsize - 9
    np.bitwise_and(into, ~kind(0xFF << exponent), out=into)
    np.multiply(top, kind(1 << exponent), out=held, dtype=into.dtype)
    np.bitwise_or(into, held, out=into)
