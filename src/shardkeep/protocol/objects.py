"""
Objects of a checkpoint that are no tensors: bytes that `torch.save` wrote, read without running anything they name.

Plain values of the standard library, numpy and torch are read, and what torch or its user hold for safe. Anything else
is refused, with the name of its class, unless the user says so: to torch for that class (`add_safe_globals`), or to us for all
(`SHARDKEEP_ALLOW_PICKLE=1`).
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import IO, Any, NamedTuple

import torch
from torch import _utils as rebuilding

from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.format.dtypes import known_to_torch
from shardkeep.format.plain_objects import plain_names
from shardkeep.format.safe_pickle import Names, end_of_pickle
from shardkeep.format.stand_ins import Call, Given
from shardkeep.format.torch_archive import is_archive
from shardkeep.options import Options
from shardkeep.protocol.safe_globals import safe_globals


def load_object(stream: IO[bytes], *, key: str) -> Any:
    """
    Read an object from the bytes that `torch.save` wrote for it.

    Args:
        stream: the bytes.
        key: the object's name, for errors.

    Raises:
        PickleRefused: it names a class that is not known to be safe.
        MalformedFile: these are no such bytes.

    """
    if Options().allow_pickle:
        return torch.load(stream, weights_only=False)
    data = stream.read()
    try:
        if not is_archive(data):  # torch would take it for a program of its own, or for the older form of its files
            raise PickleRefused("not an archive of plain values")
        return load_plain(io.BytesIO(data))
    except PickleRefused:
        pass
    except (MalformedFile, pickle.UnpicklingError) as exc:
        raise MalformedFile(f"{key!r}: the stored object cannot be read: {exc}", key=key) from exc
    except Exception as exc:  # of a forged pickle: whatever the constructors that it may call raise
        raise MalformedFile(f"{key!r}: the stored object cannot be read: {exc!r}", key=key) from exc
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as exc:
        said = next((line.strip() for line in str(exc).splitlines() if "GLOBAL" in line), str(exc).splitlines()[-1])
        raise PickleRefused(
            f"{key!r} is stored as a pickle that is not known to be safe: {said}",
            hint="if you trust the checkpoint: torch.serialization.add_safe_globals([that class]) before the load,"
            " or SHARDKEEP_ALLOW_PICKLE=1 in the environment for any",
            key=key,
        ) from exc
    except Exception as exc:  # of what is no archive: whatever torch raises
        raise MalformedFile(f"{key!r}: the stored object cannot be read: {exc!r}", key=key) from exc


def load_plain(file: Any, **how: Any) -> Any:
    """
    Read what `torch.save` wrote, if it is made of plain values and tensors; `how` is for `torch.load`.

    Classes that the user told torch to be safe may be among them.

    Raises:
        PickleRefused: it names anything else.

    """
    loads: list[Given] = []
    try:
        made = torch.load(file, weights_only=False, pickle_module=_Plain, loads=loads, **how)
    except RuntimeError as exc:
        if "pickle_module" not in str(exc):
            raise
        # The user told torch to take no reader of pickles but its own.
        raise PickleRefused("torch reads pickles itself") from exc
    for given in loads:
        name = given.left_behind()
        if name is not None:
            raise PickleRefused(f"the pickle has {name} itself as a value")
    return made


class _PlainReader(pickle.Unpickler):
    """Takes the place of the one in `pickle` when torch reads an archive."""

    def __init__(self, file: IO[bytes], *, loads: list[Given], **how: Any) -> None:
        raw = file.read()
        end = end_of_pickle(raw, "a stored object")
        super().__init__(io.BytesIO(raw[:end]), **how)
        self._given = Given(_plain(), end, safe_globals)
        loads.append(self._given)

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self._given.find(module, name)
        except KeyError:
            raise PickleRefused(f"the pickle names {module}.{name}") from None


def _load_plain(file: IO[bytes], **how: Any) -> Any:
    return _PlainReader(file, **how).load()


class _Plain:
    """What torch asks of a module for pickles."""

    Unpickler = _PlainReader
    load = staticmethod(_load_plain)
    UnpicklingError = pickle.UnpicklingError


class _Bytes(NamedTuple):
    """Stands for a storage without a type, of which torch's reader wants only this."""

    dtype: torch.dtype


@cache
def _plain() -> Names:
    """Return what pickles of plain values name, and what that is."""
    torchs: list[Any] = [
        *(torch.device, torch.serialization._get_layout),
        *(getattr(rebuilding, f"_rebuild_{what}") for what in ("tensor_v2", "tensor_v3", "parameter")),
    ]
    return {
        **plain_names(),
        **{(each.__module__, each.__qualname__): Call(each) for each in torchs},
        ("torch", "Size"): Call(_size),
        **{("torch", dtype.name): known for known, dtype in known_to_torch().items()},
        ("torch.storage", "UntypedStorage"): _Bytes(torch.uint8),
    }


def _size(numbers: Any = ()) -> torch.Size:
    if type(numbers) not in (tuple, list):  # a tensor without memory of its own may have any number
        raise MalformedFile("a size that is not made of numbers")
    return torch.Size(numbers)
