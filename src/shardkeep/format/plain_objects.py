"""
What pickles of plain values name: classes of the standard library and numpy that hold data and run nothing.

Constructors that would make much out of little are replaced by ones that take only what a pickle of a small value
gives them.
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
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.format.safe_pickle import Names

_MOST_ITEMS = 1 << 24
_MAX_EXPONENT = 100_000
_FRACTION = re.compile(r"-?[0-9]{1,20000}(/[0-9]{1,20000})?").fullmatch


@cache
def plain_names() -> Names:
    """Return what pickles of plain values name, and what that is."""
    plain: list[Any] = [
        *(set, frozenset, complex, slice, dict, list, tuple, int, float, str, bool),
        *(collections.OrderedDict, collections.deque, collections.Counter),
        *(dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone),
        *(uuid.UUID, uuid.SafeUUID, types.SimpleNamespace, argparse.Namespace),
        *(np.ndarray, np.dtype, np.random.bit_generator.SeedSequence),
        *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type)),
    ]
    names: dict[tuple[str, str], Any] = {(each.__module__, each.__qualname__): each for each in plain}
    names.update({("__builtin__", name): each for (module, name), each in names.items() if module == "builtins"})
    # Pickles that Python 2 could read, as torch's, have its names.
    names["__builtin__", "long"], names["__builtin__", "unicode"] = int, str
    names["builtins", "bytes"] = names["__builtin__", "bytes"] = _bytes
    names["collections", "defaultdict"] = _defaultdict
    names["_codecs", "encode"] = _encode
    names["fractions", "Fraction"] = _fraction
    names["decimal", "Decimal"] = _decimal
    names["builtins", "range"] = names["__builtin__", "xrange"] = _range
    names["builtins", "bytearray"] = names["__builtin__", "bytearray"] = _bytearray
    core: Any = getattr(np, "_core", None) or np.core
    for part in ("core", "_core"):  # as numpy 1 and numpy 2 call it
        for name in ("_reconstruct", "scalar"):
            names[f"numpy.{part}.multiarray", name] = getattr(core.multiarray, name)
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "Path"):
            names[module, name] = pathlib.Path
        for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath):
            names[module, kind.__name__] = kind
    return names


def _encode(text: str, encoding: str) -> bytes:
    """Stand for `codecs.encode`, by which old protocols write bytes: text in, bytes out, no codec but this one."""
    if encoding != "latin1" or type(text) is not str:
        raise MalformedFile(f"bytes stored as {encoding!r}")
    return text.encode("latin1")


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    """Make one that is empty, as pickles do; what makes its values is a class that they may name, or nothing."""
    made_by = _STAND_FOR.get(factory, factory)
    if made_by is not None and not isinstance(made_by, type):
        raise PickleRefused(f"the pickle has a defaultdict of {factory!r}")
    return collections.defaultdict(made_by)


def _range(*numbers: Any) -> range:
    made = range(*numbers)
    if len(made) > _MOST_ITEMS:
        raise MalformedFile(f"a range of {len(made)} numbers")
    return made


def _bytes() -> bytes:
    """Make the empty ones, which old protocols write as a call."""
    return b""


def _bytearray(*data: Any) -> bytearray:
    if data and not isinstance(data[0], (bytes, str)):
        raise MalformedFile("a bytearray that is not made of bytes")
    return bytearray(*data)


def _fraction(*parts: Any) -> fractions.Fraction:
    if not all(type(part) is int or (type(part) is str and _FRACTION(part)) for part in parts):
        raise MalformedFile("a fraction that no program writes")
    return fractions.Fraction(*parts)


def _decimal(*parts: Any) -> decimal.Decimal:
    made = decimal.Decimal(*parts)
    # As a whole number, which a pickle may ask for, it has as many digits.
    if made.is_finite() and abs(made.adjusted()) > _MAX_EXPONENT:
        raise MalformedFile(f"a decimal with {abs(made.adjusted())} zeros")
    return made


_STAND_FOR: Mapping[Any, type] = {
    _bytes: bytes,
    _bytearray: bytearray,
    _fraction: fractions.Fraction,
    _decimal: decimal.Decimal,
    _defaultdict: collections.defaultdict,
}
"""Which classes the functions here stand for, where a pickle does not call them but keeps them."""
