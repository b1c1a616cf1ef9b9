"""
Objects of a checkpoint that are no tensors: bytes that `torch.save` wrote, read without running anything they name.

Plain values of the standard library, numpy and torch are read, and what torch holds for safe. Anything else is refused,
with the name of its class, unless the user says so: to torch for that class (`add_safe_globals`), or to us for all
(`SHARDKEEP_ALLOW_PICKLE=1`).
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import IO, Any

import torch
from torch import _utils as rebuilding

from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.format.dtypes import known_to_torch
from shardkeep.format.plain_objects import plain_names
from shardkeep.format.safe_pickle import Names, end_of_pickle
from shardkeep.format.torch_archive import is_archive
from shardkeep.options import Options


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

    Raises:
        PickleRefused: it names anything else.

    """
    try:
        return torch.load(file, weights_only=False, pickle_module=_Plain, **how)
    except RuntimeError as exc:
        if "pickle_module" not in str(exc):
            raise
        # The user told torch to take no reader of pickles but its own.
        raise PickleRefused("torch reads pickles itself") from exc


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
    torchs: list[Any] = [
        *(torch.Size, torch.device, torch.nn.Parameter, torch.serialization._get_layout),
        *(getattr(rebuilding, f"_rebuild_{what}") for what in ("tensor_v2", "tensor_v3", "parameter")),
    ]
    return {
        **plain_names(),
        **{(each.__module__, each.__qualname__): each for each in torchs},
        **{("torch", dtype.name): known for known, dtype in known_to_torch().items()},
        ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    }
