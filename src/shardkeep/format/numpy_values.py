"""
numpy's scalars, dtypes and arrays as plain parts: dtypes described as data, items as bytes.

A dtype comes back equal, of the same C type and byte order; a description is checked before numpy sees it. Objects,
numpy's own variable-width strings and dtypes added by other packages have no form here.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

import numpy as np

SCALAR, TEXT, DTYPE, ARRAY = 29, 30, 31, 32

MAX_ITEMSIZE: Final = 1 << 20
"""Bytes of one item of a dtype: numpy allocates one item even for an empty array."""
MAX_EMPTY_ITEMS: Final = 1 << 16
"""Items of an array whose items have no bytes, so that no file can declare a size it does not pay for."""
_X87_MANTISSA_BITS: Final = 63


class NotHereError(Exception):
    """A well-formed value that this machine cannot build: its text says what is missing."""


def check_types(parts: list[Any], expected: tuple[type, ...]) -> None:
    if len(parts) != len(expected) or any(
        want is not object and type(part) is not want for part, want in zip(parts, expected, strict=True)
    ):
        raise TypeError(f"expected parts {[t.__name__ for t in expected]}, found {[type(p).__name__ for p in parts]}")


def take(value: Any) -> tuple[int, list[Any]] | None:
    """Split a scalar, dtype or array into code and parts; None where it has no plain form."""
    kind = type(value)
    if kind is np.str_:
        # numpy's own str() would drop trailing zeros.
        return TEXT, [str.__str__(value)]
    if kind is np.bytes_:
        return TEXT, [bytes(value)]
    dtype = value if isinstance(value, np.dtype) else value.dtype
    described = _describe_dtype(dtype)
    if described is None:
        return None
    if value is dtype:
        return DTYPE, [described]
    if kind is np.ndarray:
        if dtype.itemsize == 0 and value.size > MAX_EMPTY_ITEMS:
            return None
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        order: Any = "F" if fortran else "C"
        return ARRAY, [described, list(value.shape), fortran, _raw(value, order)]
    if kind is not dtype.type:
        return None
    return SCALAR, [described, _raw(np.asarray(value))]


def _raw(array: np.ndarray[Any, Any], order: Any = "C") -> bytes:
    data = array.tobytes(order=order)
    if array.dtype.char not in "gG" or np.finfo(np.longdouble).nmant != _X87_MANTISSA_BITS:
        return data
    # Ten bytes carry the 80-bit long double; the rest is noise, and equal values must have equal bytes.
    items = np.frombuffer(bytearray(data), np.uint8).reshape(-1, np.dtype("g").itemsize)
    noise = slice(-10) if array.dtype.byteorder == ">" else slice(10, None)
    items[:, noise] = 0
    return items.tobytes()


def _describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Describe a dtype as plain data; None where `make_dtype` would not give it back."""
    if dtype.hasobject or dtype.itemsize > MAX_ITEMSIZE:
        return None
    described = _dtype_parts(dtype)
    try:
        again = make_dtype(described)
    except (TypeError, ValueError):
        return None
    return described if again == dtype and again.type is dtype.type and again.char == dtype.char else None


def _dtype_parts(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        return ["array", _dtype_parts(dtype.subdtype[0]), list(dtype.subdtype[1])]
    if dtype.names is not None and dtype.fields is not None:
        fields = []
        for name in dtype.names:
            field, offset, *title = dtype.fields[name]
            fields.append([name, _dtype_parts(field), offset, title[0] if title else None])
        return ["struct", dtype.itemsize, dtype.isalignedstruct, fields]
    if dtype.char in "gG":
        return ["long double", int(np.finfo(dtype).nmant), dtype.str]
    # Two C types can share one numpy string (long, long long); the character tells them apart.
    same = np.dtype(dtype.str).char == dtype.char
    return dtype.str if same else dtype.str[0] + dtype.char


def make_dtype(described: Any) -> np.dtype[Any]:
    if type(described) is str:
        if not re.fullmatch(r"[<>|=]?[biufcSUVMmhIlLqQ][0-9]{0,9}(\[[0-9]{0,9}[a-zA-Z]{1,7}\])?", described):
            raise ValueError(f"not a dtype: {described[:80]!r}")
        dtype: np.dtype[Any] = np.dtype(described)
    elif described[0] == "array":
        check_types(described, (str, object, list))
        dtype = np.dtype((make_dtype(described[1]), tuple(map(_size, described[2]))))
    elif described[0] == "struct":
        check_types(described, (str, int, bool, list))
        dtype = _make_struct(*described[1:])
    elif described[0] == "long double":
        check_types(described, (str, int, str))
        dtype = _make_long_double(*described[1:])
    else:
        raise ValueError("not a dtype")
    if dtype.hasobject or dtype.itemsize > MAX_ITEMSIZE:
        raise ValueError(f"dtype refused: {described!r:.80}")
    return dtype


def _make_struct(itemsize: int, aligned: bool, fields: list[Any]) -> np.dtype[Any]:
    for field in fields:
        check_types(field, (str, object, int, object))
        if field[3] is not None and type(field[3]) is not str:
            raise TypeError("a field's title is not a str")
    names, formats, offsets, titles = map(list, zip(*fields, strict=True)) if fields else ([], [], [], [])
    layout: Any = {"names": names, "formats": [make_dtype(part) for part in formats], "offsets": offsets}
    if any(title is not None for title in titles):
        layout["titles"] = titles
    layout |= {"itemsize": itemsize, "aligned": aligned}
    dtype: np.dtype[Any] = np.dtype(layout)
    return dtype


def _make_long_double(mantissa_bits: int, text: str) -> np.dtype[Any]:
    if not re.fullmatch(r"[<>|=]?[fc][0-9]{1,2}", text):
        raise ValueError(f"not a dtype: {text[:80]!r}")
    if mantissa_bits != np.finfo(np.longdouble).nmant:
        raise NotHereError(f"its long double has {mantissa_bits} bits of mantissa, which this machine has not")
    return np.dtype(text[0] + ("G" if "c" in text else "g"))


def _size(part: Any) -> int:
    if type(part) is not int or part < 0:
        raise ValueError("a size is not an int of 0 or more")
    return part


def make_array(parts: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape = make_dtype(parts[0]), tuple(map(_size, parts[1]))
    count = math.prod(shape)
    if count * dtype.itemsize != len(parts[3]) or (dtype.itemsize == 0 and count > MAX_EMPTY_ITEMS):
        raise ValueError(f"array of {len(parts[3])} bytes does not fit its shape and dtype")
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, parts[3], order="F" if parts[2] else "C").copy(order="K")
    return array


def make_scalar(parts: list[Any]) -> Any:
    return make_array([parts[0], [], False, parts[1]])[()]


def make_text(parts: list[Any]) -> Any:
    if type(parts[0]) not in (str, bytes):
        raise TypeError("neither str nor bytes")
    return np.str_(parts[0]) if type(parts[0]) is str else np.bytes_(parts[0])
