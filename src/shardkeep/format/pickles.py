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
import itertools
import pathlib
import pickle
import pickletools
import re
import sys
import types
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np

from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.options import collector_paused

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


class Call(NamedTuple):
    make: Callable[..., Any]
    """Returns the value, given the arguments in the pickle."""
    kind: type | None = None
    """The class, if a pickle may also pass it to another call."""


class New(NamedTuple):
    """A class whose instances pickles create empty and then fill."""

    kind: type


class NameTable:
    """The objects that one pickle of `nbytes` gets for its names, which are among `names` and `others`."""

    def __init__(
        self,
        names: Names,
        nbytes: int,
        others: Callable[[], Names] = dict,
        *,
        where: str = "the file",
        unknown: dict[str, None] | None = None,
    ) -> None:
        self._names = names
        self._others = others
        self._where = where
        self._unknown = unknown
        self._made: dict[tuple[str, str], Any] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._left = nbytes + _FREE_ITEMS

    def find(self, module: str, name: str) -> Any:
        """Return the object that stands for a name; raise `PickleRefused` for an unknown name."""
        at = module, name
        if at in self._made:
            return self._made[at]
        known = self._names.get(at) or self._others().get(at)
        if known is None:
            if self._unknown is not None:
                self._unknown[f"{module}.{name}"] = None
                return Opaque
            raise PickleRefused(
                f"{self._where}: the pickle names {module}.{name}, which shardkeep does not load from a file",
                hint="if you trust the file: import that class and call torch.serialization.add_safe_globals([it])",
                file=self._where,
                name=f"{module}.{name}",
            )
        if isinstance(known, FunctionType):
            known = Call(known)
        if not isinstance(known, (Call, New)):
            return known
        self._made[at] = _Callable(known, self) if isinstance(known, Call) else _guard(known.kind)
        self._counts[at] = sys.getrefcount(self._made[at])
        return self._made[at]

    def spend(self, values: tuple[Any, ...]) -> None:
        """Count what will be copied; raise `MalformedFile` if that is more than a pickle of this size may copy."""
        for value in values:
            if isinstance(value, _ITEMS):
                self._left -= len(value)
            elif isinstance(value, _TEXTS):
                self._left -= len(value) // _LETTERS_AN_ITEM
        if self._left < 0:
            raise MalformedFile("the pickle asks for copies that are longer than itself")

    def left_behind(self) -> str | None:
        """End the load. Return a name whose object is part of the result, which is all that is left of the load; else None."""
        held = self._held()
        if held:  # perhaps only by garbage
            gc.collect()
            held = self._held()
        return ".".join(held[0]) if held else None

    def _held(self) -> list[tuple[str, str]]:
        return [at for at, count in self._counts.items() if sys.getrefcount(self._made[at]) > count]


def _refuse_change(_self: Any, name: str, *_value: Any) -> None:
    raise MalformedFile(f"the pickle sets the attribute {name!r} of a class or a function")


class _Callable:
    __slots__ = ("_make", "_table", "kind")

    kind: type | None
    _make: Callable[..., Any]
    _table: NameTable

    def __init__(self, does: Call, table: NameTable) -> None:
        for name, value in (("kind", does.kind), ("_make", does.make), ("_table", table)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any) -> Any:
        self._table.spend(args)
        return self._make(*args)

    __setattr__ = __delattr__ = _refuse_change


def _class_given(value: Any) -> type | None:
    """Return the class that a pickle meant by an argument of a call; None if it is not a known class."""
    return value.kind if type(value) is _Callable else None


class _Unchangeable(type):
    __setattr__ = __delattr__ = _refuse_change

    def __call__(cls, *_args: Any, **_named: Any) -> Any:
        raise MalformedFile(f"the pickle calls the class {cls.__name__}, which it may only create empty")


def _guard(kind: type) -> type:
    """Make a class that cannot be changed, and whose instances are those of `kind`."""

    def __new__(_cls: type) -> Any:  # noqa: N807 - it becomes one
        return kind.__new__(kind)  # type: ignore[call-overload]  # `kind` is not a metaclass

    return _Unchangeable(kind.__name__, (), {"__slots__": (), "__new__": __new__})


class _OpaqueType(type):
    __setattr__ = __delattr__ = _refuse_change


class Opaque(metaclass=_OpaqueType):
    """Stands for what a name that is not known makes: takes every argument and state, and keeps nothing of it."""

    __slots__ = ()

    def __new__(cls, *_args: Any, **_named: Any) -> Any:
        return object.__new__(cls)

    def _take(self, *_: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _take


# No program writes these operations. With the last one, nested tuples take exponentially long to hash.
_REFUSED = frozenset({"PERSID", "INST", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "DUP"})
_MAX_INT_TEXT = 32
_LEAST_EXPANDED_NBYTES, _EXPANDED_NBYTES = 32 << 20, 16
_MAX_DEPTH = 100


def load_pickle(
    data: bytes,
    names: Names,
    *,
    where: str,
    others: Callable[[], Names] = dict,
    persistent: Callable[[Any], Any] | None = None,
    unknown: dict[str, None] | None = None,
) -> Any:
    """
    Read a pickle, with nothing behind it. It may name what is in `names`, or in `others()`, which is called if needed.

    `persistent` returns the object for a persistent id; without it, such ids are refused. Raises `PickleRefused` if the
    pickle names anything else or has a class as a value, and `MalformedFile` if it is not valid. If `unknown` is given,
    other names are added to it, in order, `Opaque` stands for them, and nothing is refused.
    """
    end = end_of_pickle(data, where)
    if end != len(data):
        raise MalformedFile(f"{where}: {len(data) - end} bytes behind the end of the pickle", file=where, offset=end)

    def read(kind: ReaderClass) -> tuple[Any, NameTable]:
        given = NameTable(names, len(data), others, where=where, unknown=unknown)
        reader: Any = kind(io.BytesIO(data), given=given)
        reader.persistent_load = persistent or _refuse_persistent
        return reader.load(), given

    try:
        with collector_paused():
            made, given = read_checked(read)
    except PickleRefused:
        raise
    except Exception as exc:
        said = exc.message if isinstance(exc, MalformedFile) else str(exc)
        raise MalformedFile(f"{where}: not a readable pickle: {said}", file=where) from exc
    name = given.left_behind()
    if name is not None and unknown is None:
        raise PickleRefused(f"{where}: the pickle has {name} itself as a value", file=where, name=name)
    return made


def check_expanded(value: Any, nbytes: int, *, where: str, leaf: type | None = None) -> None:
    """
    Raise `MalformedFile` for a value of a pickle of `nbytes` that is far larger with every shared part written out.

    A pickle can refer to one list a thousand times, and that list to another one: copied, it would fill the memory.
    Values of the class `leaf` are not copied.
    """
    left = max(_LEAST_EXPANDED_NBYTES, _EXPANDED_NBYTES * nbytes)
    sizes: dict[int, int] = {}

    def spend(value: Any, depth: int) -> None:
        nonlocal left
        kind = type(value)
        parts: Any = ()
        if isinstance(value, dict):
            parts = itertools.chain(value, value.values())
        elif kind in (list, tuple, set, frozenset):
            parts = value
        elif kind is slice:
            parts = (value.start, value.stop, value.step)
        elif kind in (str, bytes, bytearray):
            left -= len(value)
        elif kind not in (bool, float, type(None), leaf):
            if id(value) not in sizes:
                try:
                    sizes[id(value)] = len(pickle.dumps(value))  # with shared parts once
                except Exception:  # noqa: BLE001 - what stands for something else; it is not copied
                    sizes[id(value)] = 0
            left -= sizes[id(value)]
        left -= _EXPANDED_NBYTES
        if left < 0 or depth > _MAX_DEPTH:
            raise MalformedFile(f"{where}: values that are too large, or nested too deeply", file=where)
        for part in parts:
            spend(part, depth + 1)

    spend(value, 0)


def load_trusted(data: bytes, names: Mapping[tuple[str, str], Any], *, where: str) -> Any:
    """Read a pickle that the user trusts: names that are not in `names` are imported."""

    class Trusting(pickle.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            known = names.get((module, name))
            return super().find_class(module, name) if known is None else known

    try:
        with collector_paused():
            return Trusting(io.BytesIO(data)).load()
    except Exception as exc:  # the classes that it names may raise anything
        raise MalformedFile(f"{where}: not a readable pickle: {exc!r}", file=where) from exc


def _refuse_persistent(_: Any) -> Any:
    raise MalformedFile("the pickle refers to data outside itself")


class _HasStateError(Exception):
    """A pickle has an object whose state must be checked."""


ReaderClass: TypeAlias = "type[_Reader | _CheckingReader]"
T = TypeVar("T")


def read_checked(read: Callable[[ReaderClass], T]) -> T:
    """Call `read` with the class of the unpickler to use: first that in C, then, if states must be checked, that in Python."""
    # The second takes twenty times as long. That in C does not let go of the states of objects.
    try:
        return read(_Reader)
    except _HasStateError:
        return read(_CheckingReader)


class _Names:
    def __init__(self, file: io.BytesIO, *, given: NameTable, **how: Any) -> None:
        super().__init__(file, **how)  # type: ignore[call-arg]  # an unpickler comes next
        self._given = given

    def find_class(self, module: str, name: str, /) -> Any:
        return self._given.find(module, name)


class _Reader(_Names, pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in (("numpy", "dtype"), ("_io", "BytesIO")):
            raise _HasStateError
        return super().find_class(module, name)


_PythonUnpickler: Any = pickle._Unpickler


class _CheckingReader(_Names, _PythonUnpickler):  # type: ignore[misc]  # see above
    """Checks states: numpy believes any state that a dtype is given, and many buffers may be filled with the same bytes."""

    def load_build(self) -> None:
        made, state = self.stack[-2:]
        if isinstance(made, np.dtype):
            self.stack[-1] = _dtype_state(made, state)
        elif isinstance(made, io.BytesIO):
            if type(state[0]) is not bytes:
                raise MalformedFile("a BytesIO with an invalid state")
            self._given.spend(state)
            self.stack[-1] = (*state[:2], None)
        super().load_build()

    dispatch: ClassVar[dict[int, Any]] = {**_PythonUnpickler.dispatch, pickle.BUILD[0]: load_build}


def _argument(op: pickletools.OpcodeInfo) -> tuple[str, int]:
    """Return the kind of an opcode's argument, and a number of bytes or lines."""
    if op.name in _REFUSED:
        return "refused", 0
    if op.name == "STOP":
        return "stop", 0
    if op.name == "LONG_BINPUT":
        return "memo", 4
    number = op.arg.n if op.arg is not None else 0
    if number >= 0:
        return "fixed", number
    if number == pickletools.UP_TO_NEWLINE:
        return "lines", 2 if op.name == "GLOBAL" else 1
    widths = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT8U: 8}
    return "counted", widths.get(number, 4)


def _runs() -> re.Pattern[bytes]:
    """Return the pattern of consecutive operations with arguments of fixed size, which most operations have."""
    by_number: dict[int, bytes] = {}
    for byte, (way, number) in _ARGUMENTS.items():
        if way == "fixed":
            by_number[number] = by_number.get(number, b"") + re.escape(bytes([byte]))
    ways = [b"[%b]+" % each if number == 0 else b"[%b].{%d}" % (each, number) for number, each in by_number.items()]
    # A limited number at a time, because each needs memory until the last is found.
    return re.compile(b"(?:%b){1,500}" % b"|".join(ways), re.DOTALL)


_ARGUMENTS = {ord(op.code): _argument(op) for op in pickletools.opcodes}
_RUN = _runs().match


def end_of_pickle(raw: bytes, where: str) -> int:
    """Scan the operations of a pickle and return where it ends; raise `MalformedFile` if it is not valid."""
    at, length = 0, len(raw)
    while at < length:
        run = _RUN(raw, at)
        if run is not None:
            at = run.end()
            continue
        way, number = _ARGUMENTS.get(raw[at], ("refused", 0))
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
    raise MalformedFile(f"{where}: not a valid pickle (at byte {at})", file=where, offset=at)


def _after_lines(raw: bytes, at: int, lines: int, where: str) -> int:
    end = at
    for _ in range(lines):
        end = raw.find(b"\n", end + 1)
        if end < 0:
            raise MalformedFile(f"{where}: the pickle is cut short", file=where, offset=at)
    # Parsing a number from text takes quadratic time, and an index of the memo allocates that much memory.
    code, text = raw[at : at + 1], raw[at + 1 : end]
    if code in (b"I", b"L", b"p", b"g") and len(text) >= _MAX_INT_TEXT:
        raise MalformedFile(f"{where}: a number of {len(text)} digits in the pickle", file=where, offset=at)
    if code == b"p" and not (text.isdigit() and int(text) < len(raw)):
        raise MalformedFile(f"{where}: the pickle's memo is larger than itself", file=where, offset=at)
    return end + 1


# Classes of the standard library and numpy that hold data and run nothing. Each name stands for a function that takes only
# what a pickle of such a value contains, so that small input cannot become large, and that returns a new value each time, so
# that a pickle which changes it changes nothing else.

_MOST_ITEMS = 1 << 24
_MAX_EXPONENT = 100_000
_MAX_ITEMSIZE = 1 << 24
_ALIGNED_STRUCT = 0x80  # a flag of dtypes
_FRACTION = re.compile(r"-?[0-9]{1,20000}(/[0-9]{1,20000})?").fullmatch
_DTYPE = re.compile(r"[|<>=]?[A-Za-z?][0-9]{0,8}").fullmatch
_LIST = (list, tuple)


@cache
def plain_names() -> Names:
    made_of: dict[Any, tuple[tuple[type, ...], ...]] = {
        collections.OrderedDict: (_LIST,),
        collections.deque: (_LIST, (int, type(None))),
        collections.Counter: ((dict,),),
        set: (_LIST,),
        frozenset: (_LIST,),
        bytes: (),  # empty, which old protocols write as a call
        types.SimpleNamespace: (),
        slice: ((int, float, str, type(None)),) * 3,
    }
    names: dict[tuple[str, str], Any] = {
        ("builtins", "complex"): complex,
        **{("datetime", each.__name__): each for each in (dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone)},
        **{(each.__module__, each.__name__): Call(_maker(each, *args), each) for each, args in made_of.items()},
        ("collections", "defaultdict"): Call(_defaultdict, collections.defaultdict),
        ("builtins", "bytearray"): Call(_bytearray, bytearray),
        ("builtins", "range"): Call(_range),
        ("_io", "BytesIO"): New(io.BytesIO),
        **{("builtins", each.__name__): Call(_never, each) for each in (dict, list, tuple, int, float, str, bool)},
    }
    # Pickles that Python 2 can read, such as torch's, use its names.
    names.update({("__builtin__", name): each for (module, name), each in names.items() if module == "builtins"})
    for old, new in (("long", "int"), ("unicode", "str"), ("xrange", "range")):
        names["__builtin__", old] = names["builtins", new]
    names["numpy", "dtype"] = Call(_dtype)
    names["numpy", "ndarray"] = Call(_never, np.ndarray)
    for part in ("core", "_core"):  # numpy 1 and numpy 2
        names[f"numpy.{part}.multiarray", "_reconstruct"] = Call(_empty_array)
        names[f"numpy.{part}.multiarray", "scalar"] = Call(_scalar)
    names["_codecs", "encode"] = Call(_encode)
    names["fractions", "Fraction"] = Call(_fraction, fractions.Fraction)
    names["decimal", "Decimal"] = Call(_decimal, decimal.Decimal)
    names["argparse", "Namespace"] = New(argparse.Namespace)
    names["uuid", "UUID"] = New(uuid.UUID)
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "Path"):
            names[module, name] = Call(partial(_path, pathlib.Path))
        for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath):
            names[module, kind.__name__] = Call(partial(_path, kind))
    return names


def _never(*_: Any) -> Any:
    raise MalformedFile("the pickle calls a type that it may only name")


def _maker(kind: Any, *allowed: tuple[type, ...]) -> Callable[..., Any]:
    """Return a function that makes a value of at most these arguments, each of one of the types given for it."""

    def make(*args: Any) -> Any:
        if len(args) > len(allowed) or not all(type(arg) in types for arg, types in zip(args, allowed, strict=False)):
            raise MalformedFile(f"a {kind.__name__} with invalid arguments")
        return kind(*args)

    return make


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    """Make an empty one, as pickles do; its factory is a known class or None."""
    made_by = _class_given(factory)
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


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    if type(data) is str and encoding == "latin-1":
        return bytearray(data, "latin-1")
    if type(data) is not bytes or encoding is not None:
        raise MalformedFile("a bytearray that is not made of bytes")
    return bytearray(data)


def numbers_of(parts: Any = ()) -> tuple[int, ...]:
    """Return sizes or offsets as a tuple; raise `MalformedFile` for anything else."""
    made = tuple(parts)
    if made and (set(map(type, made)) != {int} or min(made) < 0):
        raise MalformedFile(f"{made!s:.200} are not sizes")
    return made


def _fraction(*parts: Any) -> fractions.Fraction:
    if not all(type(part) is int or (type(part) is str and _FRACTION(part)) for part in parts):
        raise MalformedFile("a Fraction with invalid arguments")
    return fractions.Fraction(*parts)


def _decimal(*parts: Any) -> decimal.Decimal:
    made = decimal.Decimal(*parts)
    # Converted to an int it would have that many digits.
    if made.is_finite() and abs(made.adjusted()) > _MAX_EXPONENT:
        raise MalformedFile(f"a decimal with {abs(made.adjusted())} zeros")
    return made


def _path(kind: Any, *parts: Any) -> Any:
    if not all(type(part) is str for part in parts):
        raise MalformedFile("a path that is not made of text")
    return kind(*parts)


def _dtype(name: Any, *_: Any) -> np.dtype[Any]:
    """Make a new dtype; the pickle sets its fields next."""
    if type(name) is not str or not _DTYPE(name):
        raise MalformedFile("an invalid dtype")
    # A copy, because the pickle changes it next, and numpy's own dtype is shared by every array of the process.
    made: np.dtype[Any] = np.dtype(name, align=False, copy=True)
    if made.itemsize > _MAX_ITEMSIZE:
        raise MalformedFile(f"a dtype of {made.itemsize} bytes")
    return made


def _dtype_state(made: np.dtype[Any], state: Any) -> Any:
    """Return the state of the dtype that a pickle describes as numpy itself makes it."""
    _, order, base, names, held, nbytes, _, flags, *more = state
    described: Any = made
    if base is not None:
        described = tuple(base)
    elif names is not None:
        formats, offsets, titles = ([(*held[name], None)[at] for name in names] for at in range(3))
        described = {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": nbytes}
        described |= {"aligned": bool(flags & _ALIGNED_STRUCT)} | ({"titles": titles} if any(titles) else {})
    elif made.kind in "mM":
        unit, number, *_ = more[0][1]
        described = made if unit == b"generic" else f"{made.kind}8[{number}{unit.decode()}]"
    elif nbytes >= 0:  # of text, bytes and void
        described = f"{made.kind}{nbytes // (4 if made.kind == 'U' else 1)}"
    found: np.dtype[Any] = np.dtype(described)
    if type(found) is not type(made) or found.hasobject or found.itemsize > _MAX_ITEMSIZE:
        raise MalformedFile("a dtype with an invalid state")
    return found.newbyteorder(order).__reduce__()[2]


def _empty_array(kind: Any, shape: Any, code: Any) -> np.ndarray[Any, Any]:
    """Make an empty array; the pickle sets its contents next."""
    if _class_given(kind) is not np.ndarray or shape != (0,) or code not in (b"b", "b"):
        raise MalformedFile("an array with invalid arguments")
    return np.empty((0,), np.int8)


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(data) is not bytes or len(data) != dtype.itemsize:
        raise MalformedFile("a numpy scalar with invalid arguments")
    return np.ndarray((), dtype, data).copy()[()]
