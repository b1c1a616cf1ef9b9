"""
Reading pickles that other programs wrote, without running anything that they name.

A pickle can name classes and functions, call them, and set attributes on them. Here each name is looked up in a table that
the caller gives; everything else is refused, nothing is imported, and what a name gives cannot be changed. A pickle is also
scanned before it is read, because a few forged bytes can ask the interpreter for all memory.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import gc
import io
import pathlib
import pickle
import pickletools
import re
import sys
import types
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np

from shardkeep.errors import ChecksumMismatch, MalformedFile, PickleRefused
from shardkeep.format.data_file import ALGORITHM, DIGEST_NBYTES, digest


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cycle collector, which would scan a million new objects again and again although none is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# -- seal --------------------------------------------------------------------------------------------------------------

# A digest behind the pickle, where readers of pickles do not look, so that damage is detected:
#
#     pickle | mark, digest of the pickle
#
# Older versions put the digest of a second file between the two, which is ignored.

_MARK = f"shardkeep {ALGORITHM} ".encode()
_SEAL_NBYTES = len(_MARK) + DIGEST_NBYTES
_OLD_MARK = b"shardkeep columns "
_OLD_NBYTES = len(_OLD_MARK) + DIGEST_NBYTES


def sealed(raw: bytes) -> bytes:
    """Return the bytes with their digest behind them."""
    return raw + _MARK + digest(raw)


def unsealed(data: bytes, where: str) -> bytes:
    """
    Return the bytes that were sealed, or all bytes if they have no seal.

    Raises:
        ChecksumMismatch: the digest is not that of the bytes.

    """
    raw, seal = data[:-_SEAL_NBYTES], data[-_SEAL_NBYTES:]
    if not seal.startswith(_MARK):
        return data
    if seal[len(_MARK) :] != digest(raw):
        raise ChecksumMismatch(f"{where}: the metadata are not what was saved", file=where, offset=0)
    return raw[:-_OLD_NBYTES] if raw[-_OLD_NBYTES:].startswith(_OLD_MARK) else raw


# -- what names stand for ----------------------------------------------------------------------------------------------

# A pickle can set attributes on anything that a name gives it, including classes of the standard library. So it never gets a
# class or function itself, but an object that can be called and not changed (`Call`), or a class that cannot be changed and
# whose instances belong to another class (`New`). Both are made for one load. One that is left in the result, because the
# pickle meant the class itself, is detected.
#
# Calls also have a budget for what they copy. A pickle can refer to one list a thousand times and make a set of it each time;
# all copies together may be as long as the pickle, which is enough for every pickle that a program writes.

Names = Mapping[tuple[str, str], Any]
"""What each module and name of a pickle stands for: a `Call`, a `New`, or a value that cannot be changed."""

_ITEMS = (tuple, list, dict, set, frozenset, range, deque, np.ndarray)
_TEXTS = (str, bytes, bytearray)
_LETTERS_AN_ITEM = 32
_FREE_ITEMS = 1024


@dataclass(frozen=True, slots=True)
class Call:
    """A name that pickles call."""

    make: Callable[..., Any]
    """Returns the value, given the arguments in the pickle."""
    kind: type | None = None
    """The class, if a pickle may also pass it to another call."""


@dataclass(frozen=True, slots=True)
class New:
    """A class whose instances pickles create empty and then fill."""

    kind: type


def names_of(safe: Iterable[Any]) -> Names:
    """Return the entries of `torch.serialization.get_safe_globals()` by the module and name that a pickle has for them."""
    found: dict[tuple[str, str], Any] = {}
    for entry in safe:
        if isinstance(entry, tuple):  # with the name that it is pickled by
            kind, named = entry
            module, _, name = named.rpartition(".")
            found[module, name] = kind
        elif hasattr(entry, "__qualname__"):
            found[entry.__module__, entry.__qualname__] = entry
    return found


class NameTable:
    """The objects that one pickle gets for its names."""

    def __init__(self, names: Names, nbytes: int, others: Callable[[], Names] = dict) -> None:
        """For a pickle of `nbytes`, which may contain `names` and `others`."""
        self._names = names
        self._others = others
        self._purse = _Purse(nbytes + _FREE_ITEMS)
        self._calls: dict[tuple[str, str], _Callable] = {}
        self._classes: dict[tuple[str, str], type] = {}
        self._counts: dict[tuple[str, str], int] = {}

    def find(self, module: str, name: str) -> Any:
        """Return what a name stands for; raise KeyError for an unknown one."""
        at = module, name
        found = self._calls.get(at)
        if found is not None:
            return found
        if at in self._classes:
            return self._classes[at]
        known = self._names[at] if at in self._names else self._others()[at]
        if isinstance(known, FunctionType):
            known = Call(known)
        if isinstance(known, Call):
            self._calls[at] = made = _Callable(known, self._purse)
            return made
        if isinstance(known, New):
            self._classes[at] = _guard(known.kind)
            self._counts[at] = sys.getrefcount(self._classes[at])
            return self._classes[at]
        return known

    def left_behind(self) -> str | None:
        """
        Return a name whose object is itself part of the result; None if there is none.

        To be called once, when only the result is left of the load.
        """
        calls = {at: weakref.ref(call) for at, call in self._calls.items()}
        self._calls.clear()
        held = [at for at, call in calls.items() if call() is not None]
        if held:  # perhaps only by garbage
            gc.collect()
            held = [at for at in held if calls[at]() is not None]
        # A class is part of a reference cycle and does not vanish, so its references are counted.
        held += [at for at, count in self._counts.items() if sys.getrefcount(self._classes[at]) > count]
        return ".".join(held[0]) if held else None


class _Purse:
    """How many items calls may still copy."""

    __slots__ = ("left",)

    def __init__(self, items: int) -> None:
        self.left = items


class _Callable:
    """Can be called but not changed."""

    __slots__ = ("__weakref__", "_make", "_purse", "kind")

    kind: type | None
    _make: Callable[..., Any]
    _purse: _Purse

    def __init__(self, does: Call, purse: _Purse) -> None:
        for name, value in (("kind", does.kind), ("_make", does.make), ("_purse", purse)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any) -> Any:
        purse = self._purse
        for arg in args:
            if isinstance(arg, _ITEMS):
                purse.left -= len(arg)
            elif isinstance(arg, _TEXTS):
                purse.left -= len(arg) // _LETTERS_AN_ITEM
        if purse.left < 0:
            raise MalformedFile("the pickle asks for copies that are longer than itself")
        return self._make(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise MalformedFile(f"the pickle would change {name!r} of what it may only call")

    def __delattr__(self, name: str) -> None:
        raise MalformedFile(f"the pickle would change {name!r} of what it may only call")


def class_given(value: Any) -> type | None:
    """Return the class that a pickle meant by an argument of a call; None if it is not a known class."""
    return value.kind if type(value) is _Callable else None


class _Unchangeable(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise MalformedFile(f"the pickle would change {name!r} of a class")

    def __delattr__(cls, name: str) -> None:
        raise MalformedFile(f"the pickle would change {name!r} of a class")

    def __call__(cls, *_args: Any, **_named: Any) -> Any:
        raise MalformedFile(f"the pickle calls {cls.__name__}, which no program does")


def _guard(kind: type) -> type:
    new = object.__new__

    def __new__(_cls: type) -> Any:  # noqa: N807 - it becomes one
        return new(kind)

    return _Unchangeable(kind.__name__, (), {"__slots__": (), "__new__": __new__})


# -- reading -----------------------------------------------------------------------------------------------------------

_FIXED = {"u1": 1, "u2": 2, "u4": 4, "u8": 8, "i4": 4, "f8": 8}
_COUNTED = {"BINSTRING": 4, "SHORT_BINSTRING": 1, "BINUNICODE": 4, "SHORT_BINUNICODE": 1, "BINUNICODE8": 8,
            "BINBYTES": 4, "SHORT_BINBYTES": 1, "BINBYTES8": 8, "BYTEARRAY8": 8, "LONG1": 1, "LONG4": 4}  # fmt: skip
_LINES = {"INT": 1, "LONG": 1, "STRING": 1, "UNICODE": 1, "FLOAT": 1, "GET": 1, "PUT": 1, "GLOBAL": 2}
# No program writes these. With the last, nested tuples take exponentially long to hash.
_REFUSED = frozenset({"PERSID", "INST", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "DUP"})
_MAX_INT_TEXT = 32


def load_pickle(
    data: bytes,
    names: Names,
    *,
    where: str,
    others: Callable[[], Names] = dict,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """
    Read a pickle.

    Args:
        data: the pickle, without anything behind it.
        names: what it may name, and what each name stands for.
        where: the file, for errors.
        others: returns more names; called for those that `names` lack.
        persistent: returns the object for a persistent id; without it, such ids are refused.

    Raises:
        PickleRefused: it names anything else, or has a class as a value.
        MalformedFile: it is not a pickle, or not one that any program writes.

    """
    end = end_of_pickle(data, where)
    if end != len(data):
        raise MalformedFile(f"{where}: {len(data) - end} bytes behind the end of the pickle", file=where, offset=end)
    given = NameTable(names, len(data), others)
    try:
        with collector_paused():
            made = _Reader(data, given, where, persistent).load()
    except PickleRefused:
        raise
    except Exception as exc:
        said = exc.message if isinstance(exc, MalformedFile) else str(exc)
        raise MalformedFile(f"{where}: not a readable pickle: {said}", file=where) from exc
    name = given.left_behind()
    if name is not None:
        raise PickleRefused(f"{where}: the pickle has {name} itself as a value", file=where, name=name)
    return made


def load_trusted(data: bytes, names: Mapping[tuple[str, str], Any], *, where: str) -> Any:
    """
    Read a pickle that the user trusts: names that are not in `names` are imported.

    Raises:
        MalformedFile: it is not a pickle, or names what does not exist.

    """
    try:
        with collector_paused():
            return _TrustingReader(data, names).load()
    except Exception as exc:  # the classes that it names may raise anything
        raise MalformedFile(f"{where}: not a readable pickle: {exc!r}", file=where) from exc


class _TrustingReader(pickle.Unpickler):
    def __init__(self, raw: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._names = names

    def find_class(self, module: str, name: str, /) -> Any:
        known = self._names.get((module, name))
        return super().find_class(module, name) if known is None else known


class _Reader(pickle.Unpickler):
    def __init__(self, raw: bytes, given: NameTable, where: str, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(raw))
        self._given = given
        self._where = where
        self._persistent = persistent

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self._given.find(module, name)
        except KeyError:
            raise PickleRefused(
                f"{self._where}: the pickle names {module}.{name}, which shardkeep does not load from a file",
                hint="if you trust the file: import that class and call torch.serialization.add_safe_globals([it])",
                file=self._where,
                name=f"{module}.{name}",
            ) from None

    def persistent_load(self, pid: Any, /) -> Any:
        if self._persistent is None:
            raise MalformedFile(f"{self._where}: the pickle refers to data outside itself", file=self._where)
        return self._persistent(pid)


def _table() -> list[tuple[str, int]]:
    """Return, for each opcode, the kind of its argument, and a number of bytes or lines."""
    table = [("unknown", 0)] * 256
    for op in pickletools.opcodes:
        way, number = "fixed", 0
        if op.name in _REFUSED:
            way = "refused"
        elif op.name in _COUNTED:
            way, number = "counted", _COUNTED[op.name]
        elif op.name in _LINES:
            way, number = "lines", _LINES[op.name]
        elif op.name == "STOP":
            way = "stop"
        elif op.name == "LONG_BINPUT":
            way, number = "memo", 4
        elif op.arg is not None:
            number = op.arg.n
        table[ord(op.code)] = (way, number)
    return table


def _runs() -> re.Pattern[bytes]:
    """Return the pattern of consecutive operations with arguments of fixed size, which most operations have."""
    by_number: dict[int, bytes] = {}
    for byte, (way, number) in enumerate(_TABLE):
        if way == "fixed":
            by_number[number] = by_number.get(number, b"") + re.escape(bytes([byte]))
    ways = [b"[%b]+" % each if number == 0 else b"[%b].{%d}" % (each, number) for number, each in by_number.items()]
    # A limited number at a time, because each needs memory until the last is found.
    return re.compile(b"(?:%b){1,500}" % b"|".join(ways), re.DOTALL)


_TABLE = _table()
_RUN = _runs().match


def end_of_pickle(raw: bytes, where: str) -> int:
    """Scan the operations of a pickle and return where it ends; raise `MalformedFile` for what no program writes."""
    at, length = 0, len(raw)
    while at < length:
        run = _RUN(raw, at)
        if run is not None:
            at = run.end()
            continue
        way, number = _TABLE[raw[at]]
        if way == "stop":
            return at + 1
        if way == "counted":
            at += 1 + number + int.from_bytes(raw[at + 1 : at + 1 + number], "little")
        elif way == "memo" and int.from_bytes(raw[at + 1 : at + 5], "little") < length:
            at += 5
        elif way == "lines":
            at = _after_lines(raw, at, number, where)
        else:
            break
    raise MalformedFile(f"{where}: not a pickle that any program writes (at byte {at})", file=where, offset=at)


def _after_lines(raw: bytes, at: int, lines: int, where: str) -> int:
    end = at
    for _ in range(lines):
        end = raw.find(b"\n", end + 1)
        if end < 0:
            raise MalformedFile(f"{where}: the pickle is cut short", file=where, offset=at)
    # Parsing a number from text takes quadratic time, and an index of the memo allocates that much memory.
    if raw[at : at + 1] in (b"I", b"L", b"p", b"g") and end - at > _MAX_INT_TEXT:
        raise MalformedFile(f"{where}: a number of {end - at} digits in the pickle", file=where, offset=at)
    memo = raw[at + 1 : end]
    if raw[at : at + 1] == b"p" and not (memo.isdigit() and int(memo) < len(raw)):
        raise MalformedFile(f"{where}: the pickle's memo is larger than itself", file=where, offset=at)
    return end + 1


# -- plain values ------------------------------------------------------------------------------------------------------

# Classes of the standard library and numpy that hold data and run nothing. Each name stands for a function that takes only
# what a pickle of such a value contains, so that small input cannot become large, and that returns a new value each time, so
# that a pickle which changes it changes nothing else.

_MOST_ITEMS = 1 << 24
_MAX_EXPONENT = 100_000
_MAX_ITEMSIZE = 1 << 24
_FRACTION = re.compile(r"-?[0-9]{1,20000}(/[0-9]{1,20000})?").fullmatch
_DTYPE = re.compile(r"[|<>=]?[A-Za-z?][0-9]{0,8}").fullmatch


@cache
def plain_names() -> Names:
    """Return what pickles of plain values may name."""
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
    # Pickles that Python 2 can read, such as torch's, use its names.
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
    for part in ("core", "_core"):  # numpy 1 and numpy 2
        names[f"numpy.{part}.multiarray", "_reconstruct"] = Call(_empty_array)
        names[f"numpy.{part}.multiarray", "scalar"] = Call(_scalar)
    return names


def _never(*_: Any) -> Any:
    raise MalformedFile("the pickle calls what no program calls in one")


def _of_items(kind: Any, *items: Any) -> Any:
    """Make a collection of a list or tuple of items, or an empty one."""
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
    """Make an empty one, as pickles do; its factory is a known class or None."""
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
    """Make empty bytes, which old protocols write as a call."""
    return b""


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    """Make a bytearray of bytes, or of text, as old protocols write it."""
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
    # Converted to an int it would have that many digits.
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
    """Make a new dtype; the pickle sets its fields next."""
    if type(name) is not str or not _DTYPE(name):
        raise MalformedFile("a dtype that no program writes")
    # A copy, because the pickle changes it next, and numpy's own dtype is shared by every array of the process.
    made: np.dtype[Any] = np.dtype(name, align=False, copy=True)
    if made.itemsize > _MAX_ITEMSIZE:
        raise MalformedFile(f"a dtype of {made.itemsize} bytes")
    return made


def _empty_array(kind: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    """Make an empty array; the pickle sets its contents next."""
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
