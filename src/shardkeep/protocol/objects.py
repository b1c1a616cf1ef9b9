"""
Objects of a checkpoint that are no tensors: bytes that `torch.save` wrote, read without running anything they name.

Plain values of the standard library, numpy and torch are read, and what torch holds for safe. Anything else is refused,
with the name of its class, unless the user says so: to torch for that class (`add_safe_globals`), or to us for all
(`SHARDKEEP_ALLOW_PICKLE=1`).
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import io
import pathlib
import pickle
import re
import types
import uuid
from functools import cache
from typing import IO, Any

import numpy as np
import torch
from torch import _utils as rebuilding

from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.format.dtypes import known_to_torch
from shardkeep.format.safe_pickle import Names, end_of_pickle
from shardkeep.options import Options

_MOST_ITEMS = 1 << 24
_FRACTION = re.compile(r"-?[0-9]{1,20000}(/[0-9]{1,20000})?").fullmatch


def load_object(stream: IO[bytes], *, key: str) -> Any:
    """
    Read an object from the bytes that `torch.save` wrote for it.

    Args:
        stream: the bytes; it must be able to go back.
        key: the object's name, for errors.

    Raises:
        PickleRefused: it names a class that is not known to be safe.
        MalformedFile: these are no such bytes.

    """
    if Options().allow_pickle:
        return torch.load(stream, weights_only=False)
    begin = stream.tell()
    try:
        return torch.load(stream, weights_only=False, pickle_module=_Plain)
    except PickleRefused:
        stream.seek(begin)
    except (MalformedFile, pickle.UnpicklingError) as exc:
        raise MalformedFile(f"{key!r}: the stored object cannot be read: {exc}", key=key) from exc
    except Exception as exc:  # of a forged pickle: whatever the constructors that it may call raise
        raise MalformedFile(f"{key!r}: the stored object cannot be read: {exc!r}", key=key) from exc
    try:
        return torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as exc:
        said = next((line.strip() for line in str(exc).splitlines() if "GLOBAL" in line), str(exc).splitlines()[-1])
        raise PickleRefused(
            f"{key!r} is stored as a pickle that is not known to be safe: {said}",
            hint="if you trust the checkpoint: torch.serialization.add_safe_globals([that class]) before the load,"
            " or SHARDKEEP_ALLOW_PICKLE=1 in the environment for any",
            key=key,
        ) from exc


class _PlainReader(pickle.Unpickler):
    """Takes the place of the one in `pickle` when torch reads an archive."""

    def __init__(self, file: IO[bytes], **how: Any) -> None:
        raw = file.read()
        super().__init__(io.BytesIO(raw[: end_of_pickle(raw, "a stored object")]), **how)

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return _plain()[module, name]
        except KeyError:
            raise PickleRefused(f"the pickle names {module}.{name}") from None


def _load_plain(file: IO[bytes], **how: Any) -> Any:
    return _PlainReader(file, **how).load()


class _Plain:
    """What torch asks of a module for pickles."""

    Unpickler = _PlainReader
    load = staticmethod(_load_plain)
    UnpicklingError = pickle.UnpicklingError


@cache
def _plain() -> Names:
    """Return what pickles of plain values name, and what that is."""
    plain: list[Any] = [
        *(set, frozenset, complex, slice, dict, list, tuple, int, float, str, bool),
        *(collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter),
        *(dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone),
        *(decimal.Decimal, uuid.UUID, uuid.SafeUUID, types.SimpleNamespace, argparse.Namespace),
        *(pathlib.PurePosixPath, pathlib.PureWindowsPath, torch.Size, torch.device),
        *(torch.nn.Parameter, torch.serialization._get_layout),
        *(np.ndarray, np.dtype, np.random.bit_generator.SeedSequence),
        *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type)),
        *(getattr(rebuilding, f"_rebuild_{what}") for what in ("tensor_v2", "tensor_v3", "parameter")),
    ]
    names: dict[tuple[str, str], Any] = {(each.__module__, each.__qualname__): each for each in plain}
    names.update({("__builtin__", name): each for (module, name), each in names.items() if module == "builtins"})
    names.update({("torch", dtype.name): known for known, dtype in known_to_torch().items()})
    names["torch.storage", "UntypedStorage"] = torch.UntypedStorage
    names["_codecs", "encode"] = _encode
    names["fractions", "Fraction"] = _fraction
    for module, name in (("builtins", "range"), ("__builtin__", "xrange")):
        names[module, name] = _range
    for module in ("builtins", "__builtin__"):
        names[module, "bytearray"] = _bytearray
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


# Constructors that make much out of little are given only what pickles of small values give them.


def _range(*numbers: Any) -> range:
    made = range(*numbers)
    if len(made) > _MOST_ITEMS:
        raise MalformedFile(f"a range of {len(made)} numbers")
    return made


def _bytearray(*data: Any) -> bytearray:
    if data and not isinstance(data[0], (bytes, str)):
        raise MalformedFile("a bytearray that is not made of bytes")
    return bytearray(*data)


def _fraction(*parts: Any) -> fractions.Fraction:
    if not all(type(part) is int or (type(part) is str and _FRACTION(part)) for part in parts):
        raise MalformedFile("a fraction that no program writes")
    return fractions.Fraction(*parts)
