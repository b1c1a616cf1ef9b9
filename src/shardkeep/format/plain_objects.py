"""
What pickles of plain values name: classes of the standard library and numpy that hold data and run nothing.

Each stands for a function here that takes only what a pickle of such a value gives it, so that little cannot become
much, and that gives a new value each time, so that a pickle which goes on to change it changes nothing else.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import pathlib
import re
import types
import uuid
from functools import cache, partial
from typing import Any

import numpy as np

from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.format.stand_ins import Call, Names, New, class_given

_MOST_ITEMS = 1 << 24
_MAX_EXPONENT = 100_000
_MAX_ITEMSIZE = 1 << 24
_FRACTION = re.compile(r"-?[0-9]{1,20000}(/[0-9]{1,20000})?").fullmatch
_DTYPE = re.compile(r"[|<>=]?[A-Za-z?][0-9]{0,8}").fullmatch


@cache
def plain_names() -> Names:
    """Return what pickles of plain values name, and what that is."""
    names: dict[tuple[str, str], Any] = {
        **{(each.__module__, each.__name__): each for each in (complex, slice)},
        **{("datetime", each.__name__): each for each in (dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone)},
        ("collections", "OrderedDict"): Call(partial(_of_items, collections.OrderedDict), collections.OrderedDict),
        ("collections", "deque"): Call(_deque, collections.deque),
        ("collections", "Counter"): Call(_counter, collections.Counter),
        ("collections", "defaultdict"): Call(_defaultdict, collections.defaultdict),
        ("builtins", "set"): Call(partial(_of_items, set), set),
        ("builtins", "frozenset"): Call(partial(_of_items, frozenset), frozenset),
        ("builtins", "bytes"): Call(_bytes, bytes),
        ("builtins", "bytearray"): Call(_bytearray, bytearray),
        ("builtins", "range"): Call(_range),
        **{("builtins", each.__name__): Call(_never, each) for each in (dict, list, tuple, int, float, str, bool)},
    }
    # Pickles that Python 2 could read, as torch's, have its names.
    names.update({("__builtin__", name): each for (module, name), each in names.items() if module == "builtins"})
    for old, new in (("long", "int"), ("unicode", "str"), ("xrange", "range")):
        names["__builtin__", old] = names["builtins", new]
    names.update(_numpy_names())
    names["_codecs", "encode"] = Call(_encode)
    names["fractions", "Fraction"] = Call(_fraction, fractions.Fraction)
    names["decimal", "Decimal"] = Call(_decimal, decimal.Decimal)
    names["types", "SimpleNamespace"] = Call(_namespace)
    names["argparse", "Namespace"] = New(argparse.Namespace)
    names["uuid", "UUID"] = New(uuid.UUID)
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "Path"):
            names[module, name] = Call(partial(_path, pathlib.Path))
        for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath):
            names[module, kind.__name__] = Call(partial(_path, kind))
    return names


def _numpy_names() -> dict[tuple[str, str], Any]:
    names: dict[tuple[str, str], Any] = {
        ("numpy", "dtype"): Call(_dtype),
        ("numpy", "ndarray"): Call(_never, np.ndarray),
    }
    for part in ("core", "_core"):  # as numpy 1 and numpy 2 call it
        names[f"numpy.{part}.multiarray", "_reconstruct"] = Call(_empty_array)
        names[f"numpy.{part}.multiarray", "scalar"] = Call(_scalar)
    return names


def _never(*_: Any) -> Any:
    raise MalformedFile("the pickle calls what no program calls in one")


def _of_items(kind: Any, *items: Any) -> Any:
    """Make a collection; from a list or a tuple of its items, if from anything."""
    if len(items) > 1 or not all(type(each) in (list, tuple) for each in items):
        raise MalformedFile(f"a {kind.__name__} that is not made of a list")
    return kind(*items)


def _deque(items: Any = (), maxlen: Any = None) -> collections.deque[Any]:
    if type(items) not in (list, tuple):
        raise MalformedFile("a deque that is not made of a list")
    return collections.deque(items, maxlen)


def _counter(counts: Any = None) -> collections.Counter[Any]:
    if counts is not None and type(counts) is not dict:
        raise MalformedFile("a Counter that is not made of a dict")
    return collections.Counter(counts)


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    """Make one that is empty, as pickles do; what makes its values is a class that they may name, or nothing."""
    made_by = class_given(factory)
    if made_by is None and factory is not None:
        raise PickleRefused(f"the pickle has a defaultdict of {factory!r}")
    return collections.defaultdict(made_by)


def _encode(text: Any, encoding: Any) -> bytes:
    """Stand for `codecs.encode`, by which old protocols write bytes: text in, bytes out, no codec but this one."""
    if encoding != "latin1" or type(text) is not str:
        raise MalformedFile(f"bytes stored as {encoding!r}")
    return text.encode("latin1")


def _range(*numbers: Any) -> range:
    made = range(*numbers)
    if len(made) > _MOST_ITEMS:
        raise MalformedFile(f"a range of {len(made)} numbers")
    return made


def _bytes() -> bytes:
    """Make the empty ones, which old protocols write as a call."""
    return b""


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    """Make one of bytes, or of text, as which old protocols write them."""
    if type(data) is str and encoding == "latin-1":
        return bytearray(data, "latin-1")
    if type(data) is not bytes or encoding is not None:
        raise MalformedFile("a bytearray that is not made of bytes")
    return bytearray(data)


def _fraction(*parts: Any) -> fractions.Fraction:
    if not all(type(part) is int or (type(part) is str and _FRACTION(part)) for part in parts):
        raise MalformedFile("a fraction that no program writes")
    return fractions.Fraction(*parts)


def _decimal(*parts: Any) -> decimal.Decimal:
    made = decimal.Decimal(*parts)
    # As a whole number it would have as many digits.
    if made.is_finite() and abs(made.adjusted()) > _MAX_EXPONENT:
        raise MalformedFile(f"a decimal with {abs(made.adjusted())} zeros")
    return made


def _namespace() -> types.SimpleNamespace:
    return types.SimpleNamespace()


def _path(kind: Any, *parts: Any) -> Any:
    if not all(type(part) is str for part in parts):
        raise MalformedFile("a path that is not made of text")
    return kind(*parts)


def _dtype(name: Any, *_: Any) -> np.dtype[Any]:
    """Make a new one; what else there is to it, as the fields of a record, the pickle says next."""
    if type(name) is not str or not _DTYPE(name):
        raise MalformedFile("a dtype that no program writes")
    # A copy: numpy's own would be changed by what the pickle says next, for every array of the process.
    made: np.dtype[Any] = np.dtype(name, align=False, copy=True)
    if made.itemsize > _MAX_ITEMSIZE:
        raise MalformedFile(f"a dtype of {made.itemsize} bytes")
    return made


def _empty_array(kind: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    """Make an array without elements; the pickle says next what it is."""
    if class_given(kind) is not np.ndarray or shape != (0,) or code not in (b"b", "b"):
        raise MalformedFile("an array that no program writes")
    return np.empty((0,), np.int8)


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(data) is not bytes or len(data) != dtype.itemsize:
        raise MalformedFile("a number of numpy's that no program writes")
    return _multiarray().scalar(dtype, data)


def _multiarray() -> Any:
    core: Any = getattr(np, "_core", None) or np.core
    return core.multiarray
