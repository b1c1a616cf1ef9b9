"""
Plain values as data, never code: numbers, strings, containers, dates, paths, enum members, dtypes, as msgpack.

A value goes in and comes back with the same type and the same bits. Nothing is imported, called or unpickled because
a file says so; `allow_pickle` is the one door, and it is shut by default. Bytes that break the rules below raise
`MalformedFile` and nothing else, at a cost in proportion to their length.

    value   = nil | bool | int of 64 bits | float64 | str | bin | array of values | ext(code, payload)
    payload = an array of values; for codes 1 to 3 and 127, raw bytes

      1 int beyond 64 bits      9 complex      17 timezone     25 torch.device
      2 str with surrogates    10 range        18 ZoneInfo     26 torch.Size
      3 bytearray              11 slice        19 Decimal      27 torch.layout
      4 tuple                  12 Ellipsis     20 Fraction     28 torch.memory_format
      5 set                    13 datetime     21 UUID         29 numpy scalar
      6 frozenset              14 date         22 path         30 numpy str_ or bytes_
      7 dict                   15 time         23 enum member  31 numpy dtype
      8 OrderedDict            16 timedelta    24 torch.dtype  32 numpy array       127 pickle

Items of a set are sorted by their bytes, so that equal sets have equal bytes in every process.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.msgpack import Decoder, Encoder, Ext

from shardkeep.errors import CheckpointError, MalformedFile, PickleRefused, UnsupportedLeaf
from shardkeep.format.numpy_values import NotHereError
from shardkeep.format.value_kinds import ENUM, EnumRef, make, take

__all__ = ["MAX_DEPTH", "EnumRef", "decode_value", "encode_value", "is_plain"]

MAX_DEPTH: Final = 64
"""Containers inside containers, in what is written and in what is read."""

_BIG_INT, _SURROGATES, _BYTEARRAY, _PICKLE = 1, 2, 3, 127

_encode: Final = Encoder().encode
_decode: Final = Decoder().decode
_decode_flat: Final = Decoder(list[bool | int | float | str | None]).decode
_decode_items: Final = Decoder(list[msgspec.Raw]).decode
_split_ext: Final = Decoder(ext_hook=lambda code, payload: (code, payload)).decode

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_SCALAR_BYTES: Final = frozenset(
    [*range(0x80), *range(0xA0, 0xC1), *range(0xC2, 0xC7), *range(0xCA, 0xD4), *range(0xD9, 0xDC), *range(0xE0, 0x100)]
)
# What the constructors of the standard library, numpy and torch raise when their arguments are nonsense.
_NONSENSE: Final = (
    msgspec.MsgspecError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
)


@dataclass(frozen=True, slots=True)
class _Call:
    """What the caller said, for every level of one encode or decode."""

    key: str
    allow_pickle: bool
    like: Any = None


def encode_value(value: Any, *, key: str, allow_pickle: bool = False) -> bytes:
    """
    Encode one plain value; `decode_value` gives it back with the same type and bits.

    Raises:
        UnsupportedLeaf: The value, or one inside it, has no safe stored form and `allow_pickle` is False; or it
            contains itself or is nested too deep.

    """
    if type(value) in _SCALARS:
        try:
            return _encode(value)
        except (OverflowError, UnicodeEncodeError):
            pass
    call = _Call(key, allow_pickle)
    try:
        return _pack(value, call, 0)
    except RecursionError as exc:
        raise _too_deep(call) from exc


def decode_value(data: bytes, *, key: str, allow_pickle: bool = False, like: Any = None) -> Any:
    """
    Decode what `encode_value` wrote.

    Args:
        data: The whole encoded value.
        key: Name for errors.
        allow_pickle: Run the pickles inside; only for checkpoints you trust.
        like: The present value; its class decodes an enum member whose class sits in no module.

    Raises:
        MalformedFile: The bytes break the format's rules.
        PickleRefused: A pickled value was met and `allow_pickle` is False.

    """
    try:
        return _decode(data) if data[0] in _SCALAR_BYTES else _unpack(data, _Call(key, allow_pickle, like), 0)
    except CheckpointError:
        raise
    except NotHereError as exc:
        raise UnsupportedLeaf(f"{key!r} cannot be rebuilt here: {exc}") from exc
    except _NONSENSE as exc:
        raise MalformedFile(f"{key!r}: stored value is malformed: {exc!s:.200}") from exc


def is_plain(value: Any) -> bool:
    """Say whether `encode_value` takes the value without pickle."""
    try:
        encode_value(value, key="")
    except UnsupportedLeaf:
        return False
    return True


# Encoding


def _pack(value: Any, call: _Call, depth: int) -> bytes:
    kind = type(value)
    if kind in _SCALARS:
        try:
            return _encode(value)
        except (OverflowError, UnicodeEncodeError):
            return _pack_odd(value, call)
    if depth >= MAX_DEPTH:
        raise _too_deep(call)
    if kind is list:
        return _pack_array(value, call, depth)
    if kind is bytearray:
        return _ext(_BYTEARRAY, bytes(value), call)
    taken = take(value)
    if taken is None:
        return _pack_pickle(value, call)
    code, parts = taken
    if code == ENUM and parts[2] is not None and not is_plain(parts[3]):
        # Members that stand for classes or functions: the name alone finds them again.
        parts[3] = None
    return _ext(code, _pack_array(parts, call, depth, ordered=kind not in (set, frozenset)), call)


def _pack_array(items: list[Any], call: _Call, depth: int, *, ordered: bool = True) -> bytes:
    # The whole array in one call where msgpack has every item; a mixed one item by item.
    if ordered and _SCALARS.issuperset(map(type, items)):
        try:
            return _encode(items)
        except (OverflowError, UnicodeEncodeError):
            pass
    chunks = [_pack(item, call, depth + 1) for item in items]
    if not ordered:
        chunks.sort()
    count = len(chunks)
    if count < 16:
        head = bytes([0x90 | count])
    elif count < 1 << 16:
        head = b"\xdc" + count.to_bytes(2, "big")
    elif count < 1 << 32:
        head = b"\xdd" + count.to_bytes(4, "big")
    else:
        raise _too_large(call)
    return head + b"".join(chunks)


def _pack_odd(value: Any, call: _Call) -> bytes:
    if type(value) is int:
        return _ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), call)
    if type(value) is str:
        return _ext(_SURROGATES, value.encode("utf-8", "surrogatepass"), call)
    raise _too_large(call)


def _pack_pickle(value: Any, call: _Call) -> bytes:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if not call.allow_pickle:
        raise UnsupportedLeaf(
            f"{call.key!r} holds a {name}, which has no safe stored form",
            hint="turn it into plain data (numbers, strings, lists, dicts, tensors), or pass allow_pickle=True",
        )
    try:
        data = pickle.dumps(value, protocol=5)
    except Exception as exc:  # an object's own __reduce__ may raise anything
        raise UnsupportedLeaf(f"{call.key!r} holds a {name}, which cannot be pickled: {exc}") from exc
    return _ext(_PICKLE, data, call)


def _ext(code: int, payload: bytes, call: _Call) -> bytes:
    if len(payload) >= 1 << 32:
        raise _too_large(call)
    return _encode(Ext(code, payload))


def _too_deep(call: _Call) -> UnsupportedLeaf:
    return UnsupportedLeaf(f"{call.key!r} is nested more than {MAX_DEPTH} levels deep, or contains itself")


def _too_large(call: _Call) -> UnsupportedLeaf:
    return UnsupportedLeaf(f"{call.key!r} is too large for a plain value (4 GiB)", hint="store it as a tensor")


# Decoding


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
    return make(code, _unpack_array(payload, call, depth), call.like)


def _unpack_array(data: Any, call: _Call, depth: int) -> list[Any]:
    # msgspec made room for all declared items before it looked for them, once: never ask for more than can be there.
    first = data[0]
    width = 2 if first == 0xDC else 4 if first == 0xDD else 0
    count = int.from_bytes(data[1 : 1 + width], "big") if width else first & 0x0F
    if count > len(data):
        raise ValueError(f"array of {count} items in {len(data)} bytes")
    if not count:
        return _decode_flat(data)
    # One call for an array of scalars; where the first item is none, do not even try.
    if data[1 + width] in _SCALAR_BYTES:
        try:
            return _decode_flat(data)
        except msgspec.ValidationError:
            pass
    return [_unpack(memoryview(item), call, depth + 1) for item in _decode_items(data)]


def _unpickle(payload: memoryview, call: _Call) -> Any:
    if not call.allow_pickle:
        raise PickleRefused(
            f"{call.key!r} is stored as a pickle, which can run any code when it is read",
            hint="pass allow_pickle=True if you trust whoever wrote this checkpoint",
        )
    try:
        return pickle.loads(payload)
    except (ImportError, AttributeError) as exc:
        raise UnsupportedLeaf(f"{call.key!r} is a pickle that cannot be rebuilt here: {exc}") from exc
    except Exception as exc:  # a pickle runs code, and code may raise anything
        raise MalformedFile(f"{call.key!r}: stored pickle is malformed: {exc!s:.200}") from exc
