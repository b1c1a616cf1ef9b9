"""
Reading pickles that other programs wrote, without running anything they name.

A pickle may name classes and functions, and calls them. Here each name is looked up in a table that the caller gives,
and what the table lacks is refused; nothing is ever imported, and nothing that a name gives can be changed
(`stand_ins`). A pickle is also looked through before it is read, since a few bytes of a forged one can ask the
interpreter for all the memory there is.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable, Mapping
from typing import Any

from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.format.collector import collector_paused
from shardkeep.format.stand_ins import Given, Names

__all__ = ["Names", "end_of_pickle", "load_pickle", "load_trusted"]

_FIXED = {"u1": 1, "u2": 2, "u4": 4, "u8": 8, "i4": 4, "f8": 8}
_COUNTED = {"BINSTRING": 4, "SHORT_BINSTRING": 1, "BINUNICODE": 4, "SHORT_BINUNICODE": 1, "BINUNICODE8": 8,
            "BINBYTES": 4, "SHORT_BINBYTES": 1, "BINBYTES8": 8, "BYTEARRAY8": 8, "LONG1": 1, "LONG4": 4}  # fmt: skip
_LINES = {"INT": 1, "LONG": 1, "STRING": 1, "UNICODE": 1, "FLOAT": 1, "GET": 1, "PUT": 1, "GLOBAL": 2}
# Programs write none of them; by the last, tuples in tuples take ever longer to hash.
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
        data: the pickle, and nothing behind it.
        names: what it may name, and what that stands for.
        where: the file, for errors.
        others: gives more of them, and is asked for what `names` lack.
        persistent: gives the object for an id that the pickle's writer stored apart; without it such ids are refused.

    Raises:
        PickleRefused: it names what is not in either, or has a class as a value.
        MalformedFile: it is no pickle, or no pickle that any program writes.

    """
    end = end_of_pickle(data, where)
    if end != len(data):
        raise MalformedFile(f"{where}: {len(data) - end} bytes behind the end of the pickle", file=where, offset=end)
    given = Given(names, len(data), others)
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
    Read a pickle of a file that the user trusts: names that are not in `names` are imported.

    Raises:
        MalformedFile: it is no pickle, or names what is not there.

    """
    try:
        with collector_paused():
            return _TrustingReader(data, names).load()
    except Exception as exc:  # whatever the classes that it names raise
        raise MalformedFile(f"{where}: not a readable pickle: {exc!r}", file=where) from exc


class _TrustingReader(pickle.Unpickler):
    def __init__(self, raw: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._names = names

    def find_class(self, module: str, name: str, /) -> Any:
        known = self._names.get((module, name))
        return super().find_class(module, name) if known is None else known


class _Reader(pickle.Unpickler):
    def __init__(self, raw: bytes, given: Given, where: str, persistent: Callable[[Any], Any] | None) -> None:
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
    """Make, for each byte, how an operation that begins with it goes on: a way, and a number of bytes or lines."""
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
    """Make what finds operations in a row that go on for a fixed number of bytes: most are such."""
    by_number: dict[int, bytes] = {}
    for byte, (way, number) in enumerate(_TABLE):
        if way == "fixed":
            by_number[number] = by_number.get(number, b"") + re.escape(bytes([byte]))
    ways = [b"[%b]+" % each if number == 0 else b"[%b].{%d}" % (each, number) for number, each in by_number.items()]
    # Not all at once: each needs memory until the last is found.
    return re.compile(b"(?:%b){1,500}" % b"|".join(ways), re.DOTALL)


_TABLE = _table()
_RUN = _runs().match


def end_of_pickle(raw: bytes, where: str) -> int:
    """Go through a pickle's operations and return where it ends; raise `MalformedFile` for what no writer writes."""
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
    # As text, a number costs the square of its length, and one for the memo asks for that much memory.
    if raw[at : at + 1] in (b"I", b"L", b"p", b"g") and end - at > _MAX_INT_TEXT:
        raise MalformedFile(f"{where}: a number of {end - at} digits in the pickle", file=where, offset=at)
    memo = raw[at + 1 : end]
    if raw[at : at + 1] == b"p" and not (memo.isdigit() and int(memo) < len(raw)):
        raise MalformedFile(f"{where}: the pickle's memo is larger than itself", file=where, offset=at)
    return end + 1
