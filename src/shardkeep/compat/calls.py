"""
How the functions of the protocol are called: old argument orders, profiling, and storages by their place.
"""

from __future__ import annotations

import cProfile
import functools
import inspect
import os
import pstats
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shardkeep.protocol.problems import BrokenProtocol, NoStorage
from shardkeep.storages.file_reader import FileSystemReader
from shardkeep.storages.file_writer import FileSystemWriter
from shardkeep.storages.fsspec_storage import FsspecReader, FsspecWriter

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S")

ENABLE_PROFILE = False
"""Set it to have the coordinator's saves and loads profiled."""


@contextmanager
def _profile() -> Iterator[None]:
    """Print where the time goes, on rank 0, if `ENABLE_PROFILE` is set."""
    dist = sys.modules.get("torch.distributed")
    spread = dist is not None and dist.is_available() and dist.is_initialized()
    if not ENABLE_PROFILE or (spread and dist is not None and dist.get_rank() != 0):
        yield
        return
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        yield
    finally:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("time").print_stats(10)


def _api_bc_check(func: F) -> F:
    """Let a storage be given as the second positional argument, as it once was, with a warning."""
    keywords = [p.name for p in inspect.signature(func).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2:
            return func(*args, **kwargs)
        name = next((each for each in ("storage_writer", "storage_reader") if each in keywords), None)
        if name is None:
            raise BrokenProtocol(f"{func.__name__} takes one positional argument, and two were given")
        warnings.warn(f"the second argument of {func.__name__} should be given as {name}=", stacklevel=2)
        if name in kwargs:
            raise BrokenProtocol(f"{name} was given twice to {func.__name__}")
        return func(args[0], **{name: args[1]}, **kwargs)

    return call  # type: ignore[return-value]  # same arguments, see `wraps`


def takes(function: Callable[..., Any], *names: str) -> bool:
    """Say whether a function can be called with these keywords."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return True
    return set(names) <= {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}


def _storage_setup(storage: S | None, checkpoint_id: str | os.PathLike[str] | None, reader: bool = False) -> S:
    """
    Return the storage to use, pointed to the checkpoint if an id was given.

    Without one, it is chosen by the id: files of this machine and object stores, else whatever fsspec opens.

    Raises:
        NoStorage: (a RuntimeError) there is no storage.

    """
    if storage is not None:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)  # type: ignore[attr-defined]  # every storage has it
        return storage
    kind = "storage_reader" if reader else "storage_writer"
    if not checkpoint_id:
        raise NoStorage(f"`checkpoint_id` must be specified if {kind} is None")
    kinds: tuple[type[Any], ...] = (FileSystemReader, FsspecReader) if reader else (FileSystemWriter, FsspecWriter)
    for each in kinds:
        if each.validate_checkpoint_id(checkpoint_id):
            chosen: S = each(checkpoint_id)
            return chosen
    raise NoStorage(
        f"Cannot detect which storage {os.fspath(checkpoint_id)!r} is in",
        hint=f"check that the directory can be made or read there, or give a {kind}",
    )


def without_ranks(no_dist: bool, verb: str) -> bool:
    """Say whether a call is this process's alone: because it was asked to be, or there are no other ranks."""
    dist = sys.modules.get("torch.distributed")
    alone = no_dist or dist is None or not dist.is_available() or not dist.is_initialized()
    if alone:
        # Three levels up: past the caller's own decorator, to the user.
        warnings.warn(f"torch.distributed is not in use: this process {verb} on its own", stacklevel=4)
    return alone


def is_stateful(value: object) -> bool:
    """Say whether an object gives and takes its own state."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _stateful_to_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the values that have a state of their own replaced by it."""
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state_dict.items()}
