"""
Plain values as data, never code: numbers, strings, containers, dates, paths, enum members, dtypes, as msgpack.

A value comes back with the same type and the same bits. Nothing is imported, called or unpickled because a file names it,
except for attributes of torch, enum classes that are already loaded, and the time zones of the system. `allow_pickle` is
the only way to run code from a file, and it is off by default. Bytes that are not valid raise `MalformedFile` and nothing
else, at a cost in proportion to their length.

`docs/format.md` specifies the encoding and lists the codes. A code never gets a second meaning. Items of a set are sorted
by their bytes, so that equal sets have equal bytes in every process.
"""

from __future__ import annotations

import math
import pickle
import re
import sys
import types
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import EnumMeta, Flag
from fractions import Fraction
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder, Ext

from shardkeep.errors import CheckpointError, InvalidShards, KeyCollision, MalformedFile, PickleRefused, UnsupportedLeaf

MAX_DEPTH: Final = 64
"""Containers inside containers, in what is written and in what is read."""

_BIG_INT, _SURROGATES, _BYTEARRAY, _ZONE, _ENUM, _PICKLE = 1, 2, 3, 18, 23, 127
_TORCH: Final = {"dtype": 24, "device": 25, "Size": 26, "layout": 27, "memory_format": 28}
_SCALAR, _TEXT, _DTYPE, _ARRAY = 29, 30, 31, 32

_encode: Final = Encoder().encode
_decode: Final = Decoder().decode
_decode_flat: Final = Decoder(list[bool | int | float | str | None]).decode
_decode_items: Final = Decoder(list[msgspec.Raw]).decode
_split_ext: Final = Decoder(ext_hook=lambda code, payload: (code, payload)).decode

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_SCALAR_BYTES: Final = frozenset(
    [*range(0x80), *range(0xA0, 0xC1), *range(0xC2, 0xC7), *range(0xCA, 0xD4), *range(0xD9, 0xDC), *range(0xE0, 0x100)]
)


class _Call(NamedTuple):
    key: str
    allow_pickle: bool
    like: Any = None


class _NotHereError(Exception):
    """A well-formed value that this machine cannot build: its text says what is missing."""


def encode_value(value: Any, *, key: str, allow_pickle: bool = False) -> bytes:
    """Encode one plain value; `UnsupportedLeaf` if it has no safe form, contains itself or is nested too deep."""
    return _pack(value, _Call(key, allow_pickle), 0)


def decode_value(data: bytes, *, key: str, allow_pickle: bool = False, like: Any = None) -> Any:
    """Decode what `encode_value` wrote; the class of `like` finds an enum member whose class sits in no module."""
    try:
        return _decode(data) if data[0] in _SCALAR_BYTES else _unpack(data, _Call(key, allow_pickle, like), 0)
    except CheckpointError:
        raise
    except _NotHereError as exc:
        raise UnsupportedLeaf(f"{key!r} cannot be rebuilt here: {exc}") from exc
    except Exception as exc:  # constructors of the standard library, numpy and torch raise anything, given nonsense
        raise MalformedFile(f"{key!r}: stored value is malformed: {exc!s:.200}") from exc


def _pack(value: Any, call: _Call, depth: int) -> bytes:
    kind = type(value)
    if kind in _SCALARS:
        try:
            return _encode(value)
        except (OverflowError, UnicodeEncodeError) as exc:
            if kind is int:
                return _ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), call)
            if kind is str:
                return _ext(_SURROGATES, value.encode("utf-8", "surrogatepass"), call)
            raise _too_large(call) from exc
    if depth >= MAX_DEPTH:
        raise UnsupportedLeaf(f"{call.key!r} is nested more than {MAX_DEPTH} levels deep, or contains itself")
    if kind is list:
        return _pack_array(value, call, depth)
    if kind is bytearray:
        return _ext(_BYTEARRAY, bytes(value), call)
    code, parts = _to_parts(value)
    if parts is None:
        return _ext(_PICKLE, _pickled(value, call), call)
    if code == _ENUM and parts[2] is not None:
        try:
            _pack(parts[3], call._replace(allow_pickle=False), depth + 1)
        except UnsupportedLeaf:  # members that stand for classes or functions: the name alone finds them again
            parts[3] = None
    return _ext(code, _pack_array(parts, call, depth, ordered=kind not in (set, frozenset)), call)


def _pack_array(items: list[Any], call: _Call, depth: int, *, ordered: bool = True) -> bytes:
    # The whole array in one call where msgpack has every item; a mixed one item by item.
    if ordered and _SCALARS.issuperset(map(type, items)):
        with suppress(OverflowError, UnicodeEncodeError):
            return _encode(items)
    chunks = [_pack(item, call, depth + 1) for item in items]
    if not ordered:
        chunks.sort()
    return _encode(list(map(msgspec.Raw, chunks)))


def _pickled(value: Any, call: _Call) -> bytes:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if not call.allow_pickle:
        raise UnsupportedLeaf(
            f"{call.key!r} holds a {name}, which has no safe stored form",
            hint="turn it into plain data (numbers, strings, lists, dicts, tensors), or pass allow_pickle=True",
        )
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as exc:  # an object's own __reduce__ may raise anything
        raise UnsupportedLeaf(f"{call.key!r} holds a {name}, which cannot be pickled: {exc}") from exc


def _ext(code: int, payload: bytes, call: _Call) -> bytes:
    if len(payload) >= 1 << 32:
        raise _too_large(call)
    return _encode(Ext(code, payload))


def _too_large(call: _Call) -> UnsupportedLeaf:
    return UnsupportedLeaf(f"{call.key!r} is too large for a plain value (4 GiB)", hint="store it as a tensor")


def _unpack(data: Any, call: _Call, depth: int) -> Any:
    first = data[0]
    if first in _SCALAR_BYTES:
        return _decode(data)
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
        return _unpack_array(data, call, depth)
    found = _split_ext(data)
    if type(found) is not tuple:
        raise ValueError(f"byte 0x{first:02x} begins no value")
    code, payload = found
    if code == _BIG_INT:
        return int.from_bytes(payload, "little", signed=True)
    if code == _SURROGATES:
        return str(payload, "utf-8", "surrogatepass")
    if code == _BYTEARRAY:
        return bytearray(payload)
    if code == _PICKLE:
        return _unpickle(payload, call)
    parts = _unpack_array(payload, call, depth)
    if code == _ENUM:
        _check_types(parts, (str, str, object, object))
        return _make_enum(*parts, like=call.like)
    kind = _BY_CODE[code]
    if kind.types is not None:
        _check_types(parts, kind.types)
    return kind.make(parts)


def _unpack_array(data: Any, call: _Call, depth: int) -> list[Any]:
    # msgspec made room for all declared items before it looked for them, once: never ask for more than can be there.
    first = data[0]
    width = 2 if first == 0xDC else 4 if first == 0xDD else 0
    count = int.from_bytes(data[1 : 1 + width], "big") if width else first & 0x0F
    if count > len(data):
        raise ValueError(f"array of {count} items in {len(data)} bytes")
    # One call decodes an array of scalars. It is not tried if the first item is not a scalar.
    if not count or data[1 + width] in _SCALAR_BYTES:
        try:
            return _decode_flat(data)
        except msgspec.ValidationError:
            if not count:
                raise
    return [_unpack(memoryview(item), call, depth + 1) for item in _decode_items(data)]


def _unpickle(payload: memoryview, call: _Call) -> Any:
    if not call.allow_pickle:
        raise PickleRefused(
            f"{call.key!r} is stored as a pickle, which can run any code when it is read",
            hint="pass allow_pickle=True if you trust the source of this checkpoint",
        )
    try:
        return pickle.loads(payload)
    except (ImportError, AttributeError) as exc:
        raise UnsupportedLeaf(f"{call.key!r} is a pickle that cannot be rebuilt here: {exc}") from exc
    except Exception as exc:  # a pickle runs code, and code may raise anything
        raise MalformedFile(f"{call.key!r}: stored pickle is malformed: {exc!s:.200}") from exc


# -- kinds of values that msgpack lacks --------------------------------------------------------------------------------

# A value is split into its code and simpler values, its parts, by its exact type, and built of them again. Parts that are
# invalid raise the natural builtin error.

_MAX_FRACTION_BITS: Final = 1 << 16
"""Bits of numerator and denominator: building a Fraction takes a gcd, which is quadratic."""
_MAX_SAME_HASH: Final = 256
"""Keys of one hash: a set of many is quadratic to build, and only a forged file has them."""
_ZONE_KEY: Final = re.compile(r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,3}").fullmatch


@dataclass(frozen=True, slots=True)
class EnumRef:
    """An enum member whose class is not loaded in this process. Saving it again writes the same bytes."""

    module: str
    qualname: str
    name: str | None
    """None for a nameless combination of flags."""
    value: Any = field(hash=False)
    """None if the value of a named member is not plain data."""


class TorchRef(NamedTuple):
    """A value of torch's that is encoded without torch: one of the kinds below, and its parts."""

    kind: str
    parts: tuple[Any, ...]


class _Kind(NamedTuple):
    code: int
    take: Callable[[Any], list[Any] | None]
    """Returns the parts; None for a value that has no plain form."""
    make: Callable[[list[Any]], Any]
    types: tuple[type, ...] | None = None
    """Exact types of the parts, `object` for any; None where number and types are free."""


def _to_parts(value: Any) -> tuple[int, list[Any] | None]:
    """Split a value into code and parts; None for parts where it has no plain form."""
    kind = type(value)
    known = _KINDS.get(kind)
    if known is not None:
        return known.code, known.take(value)
    if isinstance(kind, EnumMeta):
        return _ENUM, [kind.__module__, kind.__qualname__, value.name, value.value]
    if kind is EnumRef:
        return _ENUM, [value.module, value.qualname, value.name, value.value]
    if kind is TorchRef:
        return _TORCH[value.kind], list(value.parts)
    if isinstance(value, np.dtype):
        described = _described(value)
        return _DTYPE, None if described is None else [described]
    if isinstance(value, np.generic):
        described = _described(value.dtype) if kind is value.dtype.type else None
        return _SCALAR, None if described is None else [described, _raw(np.asarray(value), "C")]
    zoneinfo, torch, name = sys.modules.get("zoneinfo"), sys.modules.get("torch"), kind.__name__
    if zoneinfo is not None and kind is zoneinfo.ZoneInfo and _ZONE_KEY(value.key or ""):
        return _ZONE, [value.key]
    if torch is not None and name in _TORCH and getattr(torch, name, None) is kind:
        return _TORCH[name], list(value) if name == "Size" else [str(value).removeprefix("torch.")]
    return _PICKLE, None


def _check_types(parts: list[Any], expected: tuple[type, ...]) -> None:
    sound = (want is object or type(part) is want for part, want in zip(parts, expected, strict=False))
    if len(parts) != len(expected) or not all(sound):
        raise TypeError(f"expected parts {[t.__name__ for t in expected]}, found {[type(p).__name__ for p in parts]}")


def _distinct(keys: list[Any]) -> list[Any]:
    """Return the keys if a dict or set can hold them all; raise where two are equal or the hashes are forged."""
    if len(keys) > _MAX_SAME_HASH and max(Counter(map(hash, keys)).values()) > _MAX_SAME_HASH:
        raise ValueError(f"more than {_MAX_SAME_HASH} keys share one hash")
    if len(set(keys)) != len(keys):
        raise ValueError("equal keys")
    return keys


def _take_items(value: dict[Any, Any]) -> list[Any]:
    return [part for pair in value.items() for part in pair]


def _pairs(parts: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(_distinct(parts[::2]), parts[1::2], strict=True))


def _take_fraction(value: Fraction) -> list[Any] | None:
    parts = [value.numerator, value.denominator]
    return parts if max(map(int.bit_length, parts)) <= _MAX_FRACTION_BITS else None


def _make_fraction(parts: list[Any]) -> Fraction:
    if max(map(int.bit_length, parts)) > _MAX_FRACTION_BITS:
        raise ValueError("fraction too large")
    return Fraction(*parts)


def _take_path(path: PurePath) -> list[Any]:
    return [isinstance(path, PureWindowsPath), isinstance(path, Path), str(path)]


def _make_path(parts: list[Any]) -> PurePath:
    windows, concrete, text = parts
    pure = PureWindowsPath(text) if windows else PurePosixPath(text)
    # A concrete path of the other system cannot be built here; its pure form can.
    return Path(text) if concrete and isinstance(Path(), type(pure)) else pure


def _make_zone(parts: list[Any]) -> Any:
    import zoneinfo  # noqa: PLC0415 (needed by few values, and it reads the disk)

    if not _ZONE_KEY(parts[0]):
        raise ValueError(f"not a time zone: {parts[0][:80]!r}")
    try:
        return zoneinfo.ZoneInfo(parts[0])
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as exc:
        raise _NotHereError(f"time zone {parts[0]!r} is not known on this machine (pip install tzdata)") from exc


def _make_torch(kind: str, parts: list[Any]) -> Any:
    try:
        import torch  # noqa: PLC0415 (tools that read other values start without it)
    except ImportError as exc:
        raise _NotHereError("it needs torch, which is not installed here") from exc
    if kind == "device":
        return torch.device(parts[0])
    if kind == "Size":
        _check_types(parts, (int,) * len(parts))
        return torch.Size(parts)
    found = vars(torch).get(parts[0])
    if type(found) is not getattr(torch, kind):
        raise ValueError(f"not a torch.{kind}: {parts[0][:80]!r}")
    return found


def _make_enum(module: str, qualname: str, name: Any, value: Any, *, like: Any) -> Any:
    kind: Any = type(like)
    if not issubclass(type(kind), EnumMeta) or (kind.__module__, kind.__qualname__) != (module, qualname):
        kind = _loaded_class(module, qualname)
    if issubclass(type(kind), EnumMeta):
        members: Mapping[str, Any] = kind.__members__
        if type(name) is str and name in members:
            return members[name]
        if issubclass(kind, Flag) and type(value) is int:
            with suppress(ValueError):
                return kind(value)
    if name is not None and type(name) is not str:
        raise TypeError("the name of an enum member is not a str")
    return EnumRef(module, qualname, name, value)


def _loaded_class(module: str, qualname: str) -> Any:
    # Straight from each __dict__: a module's own __getattr__ may import, and this must never import.
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not issubclass(type(found), (types.ModuleType, type)):
            return None
        owner = type if issubclass(type(found), type) else object
        found = owner.__getattribute__(found, "__dict__").get(part)
    return found


# A dtype comes back equal, with the same C type and byte order. Its description is checked before numpy sees it. Objects,
# numpy's variable-width strings, and dtypes of other packages have no plain form.

_MAX_ITEMSIZE: Final = 1 << 20
"""Bytes of one item of a dtype: numpy allocates one item even for an empty array."""
_MAX_EMPTY_ITEMS: Final = 1 << 16
"""Items of an array whose items have no bytes, so that no file can declare a size it does not pay for."""
_X87_MANTISSA_BITS: Final = 63


def _take_array(value: np.ndarray[Any, Any]) -> list[Any] | None:
    described = _described(value.dtype)
    if described is None or (value.dtype.itemsize == 0 and value.size > _MAX_EMPTY_ITEMS):
        return None
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    return [described, list(value.shape), fortran, _raw(value, "F" if fortran else "C")]


def _raw(array: np.ndarray[Any, Any], order: Any) -> bytes:
    data = array.tobytes(order=order)
    if array.dtype.char not in "gG" or np.finfo(np.longdouble).nmant != _X87_MANTISSA_BITS:
        return data
    # Ten bytes carry the 80-bit long double; the rest is noise, and equal values must have equal bytes.
    items = np.frombuffer(bytearray(data), np.uint8).reshape(-1, np.dtype("g").itemsize)
    items[:, slice(-10) if array.dtype.byteorder == ">" else slice(10, None)] = 0
    return items.tobytes()


def _described(dtype: np.dtype[Any]) -> Any:
    """Describe a dtype as plain data; None where `_make_dtype` would not give it back."""
    if dtype.hasobject or dtype.itemsize > _MAX_ITEMSIZE:
        return None
    described = _dtype_parts(dtype)
    try:
        again = _make_dtype(described)
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
    # Two C types can share one numpy string (long, long long); the character distinguishes them.
    same = np.dtype(dtype.str).char == dtype.char
    return dtype.str if same else dtype.str[0] + dtype.char


def _make_dtype(described: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any]
    if type(described) is str:
        if not re.fullmatch(r"[<>|=]?[biufcSUVMmhIlLqQ][0-9]{0,9}(\[[0-9]{0,9}[a-zA-Z]{1,7}\])?", described):
            raise ValueError(f"not a dtype: {described[:80]!r}")
        dtype = np.dtype(described)
    elif described[0] == "array":
        _check_types(described, (str, object, list))
        dtype = np.dtype((_make_dtype(described[1]), tuple(map(_size, described[2]))))
    elif described[0] == "struct":
        _check_types(described, (str, int, bool, list))
        dtype = _make_struct(*described[1:])
    elif described[0] == "long double":
        _check_types(described, (str, int, str))
        _, mantissa_bits, text = described
        if not re.fullmatch(r"[<>|=]?[fc][0-9]{1,2}", text):
            raise ValueError(f"not a dtype: {text[:80]!r}")
        if mantissa_bits != np.finfo(np.longdouble).nmant:
            raise _NotHereError(f"its long double has {mantissa_bits} bits of mantissa, which this machine lacks")
        dtype = np.dtype(text[0] + ("G" if "c" in text else "g"))
    else:
        raise ValueError("not a dtype")
    if dtype.hasobject or dtype.itemsize > _MAX_ITEMSIZE:
        raise ValueError(f"dtype refused: {described!r:.80}")
    return dtype


def _make_struct(itemsize: int, aligned: bool, fields: list[Any]) -> np.dtype[Any]:
    for each in fields:
        _check_types(each, (str, object, int, object))
        if each[3] is not None and type(each[3]) is not str:
            raise TypeError("a field's title is not a str")
    names, formats, offsets, titles = map(list, zip(*fields, strict=True)) if fields else ([], [], [], [])
    layout: Any = {"names": names, "formats": [_make_dtype(part) for part in formats], "offsets": offsets}
    if any(title is not None for title in titles):
        layout["titles"] = titles
    layout |= {"itemsize": itemsize, "aligned": aligned}
    dtype: np.dtype[Any] = np.dtype(layout)
    return dtype


def _size(part: Any) -> int:
    if type(part) is not int or part < 0:
        raise ValueError("a size is not an int of 0 or more")
    return part


def _make_array(parts: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape = _make_dtype(parts[0]), tuple(map(_size, parts[1]))
    count = math.prod(shape)
    if count * dtype.itemsize != len(parts[3]) or (dtype.itemsize == 0 and count > _MAX_EMPTY_ITEMS):
        raise ValueError(f"array of {len(parts[3])} bytes does not fit its shape and dtype")
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, parts[3], order="F" if parts[2] else "C").copy(order="K")
    return array


def _make_text(parts: list[Any]) -> Any:
    kinds: dict[type, Any] = {str: np.str_, bytes: np.bytes_}
    return kinds[type(parts[0])](parts[0])


_PATH: Final = _Kind(22, _take_path, _make_path, (bool, bool, str))
_KINDS: Final[dict[type, _Kind]] = {
    tuple: _Kind(4, list, tuple),
    set: _Kind(5, list, lambda p: set(_distinct(p))),
    frozenset: _Kind(6, list, lambda p: frozenset(_distinct(p))),
    dict: _Kind(7, _take_items, lambda p: dict(_pairs(p))),
    OrderedDict: _Kind(8, _take_items, lambda p: OrderedDict(_pairs(p))),
    complex: _Kind(9, lambda c: [c.real, c.imag], lambda p: complex(*p), (float, float)),
    range: _Kind(10, lambda r: [r.start, r.stop, r.step], lambda p: range(*p), (int, int, int)),
    slice: _Kind(11, lambda s: [s.start, s.stop, s.step], lambda p: slice(*p), (object, object, object)),
    type(...): _Kind(12, lambda _: [], lambda _: ..., ()),
    datetime: _Kind(
        13,
        lambda d: [d.year, d.month, d.day, d.hour, d.minute, d.second, d.microsecond, d.fold, d.tzinfo],
        lambda p: datetime(*p[:7]).replace(fold=p[7], tzinfo=p[8]),  # noqa: DTZ001 - it is set next
        (*[int] * 8, object),
    ),
    date: _Kind(14, lambda d: [d.year, d.month, d.day], lambda p: date(*p), (int, int, int)),
    time: _Kind(
        15,
        lambda t: [t.hour, t.minute, t.second, t.microsecond, t.fold, t.tzinfo],
        lambda p: time(*p[:4]).replace(fold=p[4], tzinfo=p[5]),
        (*[int] * 5, object),
    ),
    timedelta: _Kind(16, lambda d: [d.days, d.seconds, d.microseconds], lambda p: timedelta(*p), (int, int, int)),
    timezone: _Kind(17, lambda z: list(z.__getinitargs__()), lambda p: timezone(*p)),
    Decimal: _Kind(19, lambda d: [str(d)], lambda p: Decimal(p[0]), (str,)),
    Fraction: _Kind(20, _take_fraction, _make_fraction, (int, int)),
    uuid.UUID: _Kind(21, lambda u: [u.bytes], lambda p: uuid.UUID(bytes=p[0]), (bytes,)),
    type(Path()): _PATH,
    PurePosixPath: _PATH,
    PureWindowsPath: _PATH,
    # numpy's own str() would drop trailing zeros.
    np.str_: _Kind(_TEXT, lambda t: [str.__str__(t)], _make_text, (object,)),
    np.bytes_: _Kind(_TEXT, lambda t: [bytes(t)], _make_text, (object,)),
    np.ndarray: _Kind(_ARRAY, _take_array, _make_array, (object, list, bool, bytes)),
}
_BY_CODE: Final[dict[int, _Kind]] = {
    **{kind.code: kind for kind in _KINDS.values()},
    # Those that `_to_parts` splits.
    _ZONE: _Kind(_ZONE, list, _make_zone, (str,)),
    _SCALAR: _Kind(_SCALAR, list, lambda p: _make_array([p[0], [], False, p[1]])[()], (object, bytes)),
    _DTYPE: _Kind(_DTYPE, list, lambda p: _make_dtype(p[0]), (object,)),
    **{
        code: _Kind(code, list, partial(_make_torch, name), None if name == "Size" else (str,))
        for name, code in _TORCH.items()
    },
}


# -- the skeleton of a state: its containers with their exact keys and order, without the leaves -------------------------
#
# A node is None (a leaf) or a `Container`. The flat name of a leaf is its path joined by dots. A skeleton is stored as
# columns, level by level, so that the children of a container are one slice of each column. Decoding checks kinds,
# counts, distinct keys and depth. `docs/format.md` specifies the columns: marks, counts and parts.

MAX_TREE_DEPTH: Final = 100
"""The deepest nesting of containers."""
KINDS: Final = ("dict", "odict", "list", "tuple", "ranks")
"""`ranks` has one child for each rank number."""

Part: TypeAlias = Any
"""A key: str, int of 64 bits, bool, float, None, bytes, or a tuple of those."""
_INDEXED: Final = frozenset({"list", "tuple"})
_SIMPLE: Final = frozenset({str, int, bool, float, type(None), bytes})


@dataclass(frozen=True, slots=True)
class Container:
    """A mapping, list or tuple: its kind, and its children in order."""

    kind: str
    children: tuple[tuple[Part, Node], ...]

    def __eq__(self, other: object) -> bool:
        """Compare keys by type, too: 1, 1.0 and True are the same key of a dict, but different keys in a file."""
        if not isinstance(other, Container) or (self.kind, self.children) != (other.kind, other.children):
            return False
        return [_type_of(part) for part, _ in self.children] == [_type_of(part) for part, _ in other.children]

    def __hash__(self) -> int:
        return hash((self.kind, self.children))


Node: TypeAlias = "Container | None"
PathStep: TypeAlias = tuple[str, Part]
"""A kind of container, and the key in it."""
KeyPath: TypeAlias = tuple[PathStep, ...]


def is_part(value: Any) -> bool:
    """Return whether a dict key can be stored, by its exact type."""
    kind = type(value)
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 64)
    return kind in _SIMPLE or (kind is tuple and all(map(is_part, value)))


def _type_of(part: Part) -> Any:
    return tuple(map(_type_of, part)) if type(part) is tuple else type(part)


def part_name(kind: str, part: Part) -> str:
    if kind == "ranks":
        return f"@{part}"
    # For all other kinds repr equals str, and python -bb refuses the str of bytes.
    return part if type(part) is str else repr(part)


def encode_tree(node: Node) -> bytes:
    marks, counts, parts = bytearray([_mark(node)]), list[int](), list[Part]()
    level, depth = [] if node is None else [node], 0
    while level:
        depth += 1
        if depth > MAX_TREE_DEPTH:
            raise UnsupportedLeaf(f"the state is nested more than {MAX_TREE_DEPTH} levels deep")
        below: list[Container] = []
        for container in level:
            counts.append(len(container.children))
            if container.kind not in _INDEXED:
                parts.extend([part for part, _ in container.children])
            inner = [child for _, child in container.children if child is not None]
            marks.extend(map(_mark, [child for _, child in container.children]) if inner else bytes(counts[-1]))
            below += inner
        level = below
    return encode_value([bytes(marks), counts, parts], key="tree")


def _mark(node: Node) -> int:
    return 0 if node is None else 1 + KINDS.index(node.kind)


def decode_tree(data: bytes) -> Node:
    """Decode and check a skeleton; raise `MalformedFile` for other bytes."""
    columns = decode_value(data, key="tree")
    try:
        return _build(columns)
    except (TypeError, ValueError) as exc:
        raise MalformedFile(f"tree: malformed skeleton: {exc}") from exc


def _build(columns: Any) -> Node:
    if type(columns) is not list:
        raise TypeError("not a list of columns")
    _check_types(columns, (bytes, list, list))
    marks, counts, parts = columns
    if not marks or max(marks) > len(KINDS):
        raise ValueError("no root, or an unknown kind of container")
    if len(marks) - marks.count(0) != len(counts):
        raise ValueError(f"{len(marks) - marks.count(0)} containers, {len(counts)} counts")
    if any(type(count) is not int or count < 0 for count in counts) or sum(counts) != len(marks) - 1:
        raise ValueError("counts do not add up to the children")
    if not all(is_part(part) for part in parts if type(part) is not str):
        raise ValueError("a key of a type that cannot be a key")
    kinds = [KINDS[mark - 1] for mark in marks if mark]
    key_counts = [0 if kind in _INDEXED else count for kind, count in zip(kinds, counts, strict=True)]
    if sum(key_counts) != len(parts):
        raise ValueError(f"{len(parts)} keys for {sum(key_counts)} children")
    # Where the children of each container begin among the marks, and their keys among the parts.
    begins, key_begins = list(accumulate(counts, initial=1)), list(accumulate(key_counts, initial=0))
    number_of = {at: number for number, at in enumerate(at for at, mark in enumerate(marks) if mark)}
    if any(first <= at for at, first in zip(number_of, begins, strict=False)):
        raise ValueError("a container inside itself")

    def build(at: int, level: int) -> Container:
        number = number_of[at]
        kind, first, count = kinds[number], begins[number], counts[number]
        if level > MAX_TREE_DEPTH:
            raise ValueError(f"more than {MAX_TREE_DEPTH} levels")
        nodes: list[Node] = [None] * count
        if any(marks[first : first + count]):
            nodes = [build(child, level + 1) if marks[child] else None for child in range(first, first + count)]
        keys = range(count) if kind in _INDEXED else _distinct(parts[key_begins[number] : key_begins[number + 1]])
        if kind == "ranks" and any(type(rank) is not int or rank < 0 for rank in keys):
            raise ValueError("a rank that is not a number")
        return Container(kind, tuple(zip(keys, nodes, strict=True)))

    return build(0, 1) if marks[0] else None


def merge_trees(nodes: Sequence[Node]) -> Node:
    """Merge the skeletons of all ranks, in the order of the first; `InvalidShards` or `KeyCollision` where they disagree."""
    different = list(dict.fromkeys(nodes))
    if len(different) < 2:
        return different[0] if different else Container("dict", ())
    merged = _merge(different, None)
    refuse_collisions(merged)
    return merged


def _merge(nodes: list[Node], name: str | None) -> Node:
    # Most subtrees are equal on all ranks; only different ones are compared in detail.
    nodes = list(dict.fromkeys(nodes))
    if len(nodes) == 1:
        return nodes[0]
    where = "the state" if name is None else repr(name)
    kinds = sorted({"leaf" if node is None else node.kind for node in nodes})
    if len(kinds) > 1:
        raise InvalidShards(
            f"{where} is not the same kind of thing on all ranks: {' and '.join(kinds)}",
            hint="give every rank the same structure, or wrap what differs in PerRank",
        )
    by_part: dict[tuple[Part, Any], list[Node]] = {}
    for node in nodes:
        for part, child in () if node is None else node.children:
            by_part.setdefault((part, _type_of(part)), []).append(child)
    seen: dict[Part, Part] = {}
    for part, _ in by_part:
        if seen.setdefault(part, part) is not part:
            raise InvalidShards(
                f"{where} has the key {seen[part]!r} on one rank and {part!r} on another, which are equal",
                hint="give every rank keys of the same type",
            )
    kind = kinds[0]
    return Container(kind, tuple((part, _merge(same, join(name, kind, part))) for (part, _), same in by_part.items()))


def join(name: str | None, kind: str, part: Part) -> str:
    """Return the flat name of a child; `name` is that of its container, None for the root."""
    own = part_name(kind, part)
    return own if name is None else f"{name}.{own}"


def unflatten(node: Node, leaf: Callable[[str], Any]) -> dict[Any, Any]:
    """Build the nested state; `leaf` returns the value of each flat name. Ranks become `{rank: value}`."""
    if node is None or node.kind in _INDEXED:
        raise MalformedFile("tree: the root is not a mapping")
    state: dict[Any, Any] = _filled(node, None, leaf)
    return state


def _filled(node: Container, name: str | None, leaf: Callable[[str], Any]) -> Any:
    pairs = []
    for part, child in node.children:
        own = join(name, node.kind, part)
        pairs.append((part, leaf(own) if child is None else _filled(child, own, leaf)))
    if node.kind in _INDEXED:
        values = [value for _, value in pairs]
        return values if node.kind == "list" else tuple(values)
    return OrderedDict(pairs) if node.kind == "odict" else dict(pairs)


def leaf_keys(node: Node) -> Iterator[str]:
    return (name for name, _, empty in tree_leaves(node) if not empty)


def refuse_collisions(node: Node) -> None:
    """Raise `KeyCollision`, naming both paths, if two leaves have the same flat name."""
    seen: dict[str, KeyPath] = {}
    for name, path, empty in tree_leaves(node):
        if not empty and seen.setdefault(name, path) is not path:
            one, other = ([part for _, part in each] for each in (seen[name], path))
            raise KeyCollision(
                f"two leaves have the flat name {name!r}: {one!r} and {other!r}", hint="rename one of these keys"
            )


def tree_leaves(node: Node, name: str | None = None, path: KeyPath = ()) -> Iterator[tuple[str, KeyPath, str]]:
    """Yield the name and path of each leaf, with "", and of each empty container below the root, with its kind."""
    if node is None:
        yield "", (), ""
        return
    for part, child in node.children:
        own, steps = join(name, node.kind, part), (*path, (node.kind, part))
        if child is None or not child.children:
            yield own, steps, "" if child is None else child.kind
        else:
            yield from tree_leaves(child, own, steps)
