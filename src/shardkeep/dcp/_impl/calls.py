"""
A record of each call and each step of it, on the logger that torch's checkpoint logs to.

A step gives two messages, dicts, at level DEBUG: event "start" and "end", with the checkpoint, who takes part, the time
and, at the end, what was spent, in nanoseconds; where asked for, also "exception" at level ERROR. Nothing listens to
the logger unless somebody adds a handler to it. No failure of logging ever reaches a save or a load.
"""

from __future__ import annotations

import cProfile
import functools
import inspect
import logging
import os
import pstats
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

from torch.distributed import c10d_logger
from torch.distributed.logging_handlers import _log_handlers

from shardkeep.dcp._impl.file_reader import FileSystemReader, FsspecReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter, FsspecWriter
from shardkeep.errors import BrokenProtocol, NoStorage

P = ParamSpec("P")
T = TypeVar("T")

DCP_LOGGER_NAME = "dcp_logger"
_PARTIES = ("storage_writer", "storage_reader", "planner")

logger = logging.getLogger()
_own_logger = logging.getLogger("shardkeep")


def _make_logger() -> logging.Logger:
    """Return the logger; a handler that somebody has put in torch's table for it is the one it gets."""
    _log_handlers.setdefault(DCP_LOGGER_NAME, logging.NullHandler())
    made: logging.Logger = c10d_logger._get_or_create_logger(DCP_LOGGER_NAME)
    return made


_dcp_logger = _make_logger()


def _dcp_method_logger(
    log_exceptions: bool = False, **wrapper_kwargs: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """
    Log each call of a function.

    Args:
        log_exceptions: Log what it raises, too.
        **wrapper_kwargs: What the messages are made from, besides the keywords of the call itself.

    """

    def decorator(func: Callable[P, T]) -> Callable[P, T]:
        return functools.wraps(func)(logged(func, func.__name__, log_exceptions=log_exceptions, **wrapper_kwargs))

    return decorator


def logged(func: Callable[P, T], name: str, *, log_exceptions: bool = False, **known: Any) -> Callable[P, T]:
    """Return a function that logs each call under a name."""

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _has_listeners():
            return func(*args, **kwargs)
        began = time.time_ns()
        message = _message(name, log_exceptions, args, {**known, **kwargs})
        _emit(_dcp_logger.debug, message, event="start", time=began)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            if log_exceptions:
                _emit(_dcp_logger.error, message, event="exception", error=error, time=time.time_ns())
            raise
        ended = time.time_ns()
        _emit(_dcp_logger.debug, message, event="end", time=ended, times_spent=ended - began)
        return result

    return wrapper


def _has_listeners() -> bool:
    """Say whether anybody listens: a state of ten thousand values is not worth twenty thousand messages to nobody."""
    handled = any(type(each) is not logging.NullHandler for each in _dcp_logger.handlers)
    return handled or bool(_dcp_logger.filters) or _dcp_logger.propagate


def log_fields_of(storage: object, group: object) -> dict[str, Any]:
    """Return what the messages of each step are made from: the checkpoint and the ranks, if the storage says where."""
    try:
        checkpoint_id = getattr(storage, "checkpoint_id", None)
    except Exception:
        _own_logger.debug("a storage could not say its checkpoint_id", exc_info=True)
        checkpoint_id = None
    return {} if checkpoint_id is None else {"checkpoint_id": checkpoint_id, "process_group": group}


def _msg_dict_from_dcp_method_args(*args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ARG001 - torch's arguments
    """Return what the arguments of a call say: the checkpoint, and who writes, reads and plans."""
    storage = kwargs.get("storage_writer") or kwargs.get("storage_reader")
    checkpoint_id = kwargs.get("checkpoint_id")
    if not checkpoint_id and storage:
        checkpoint_id = getattr(storage, "checkpoint_id", None)
    message = {"checkpoint_id": None if checkpoint_id is None else str(checkpoint_id), "uuid": str(uuid4().int)}
    return message | {name: type(kwargs[name]).__name__ for name in _PARTIES if kwargs.get(name)}


def _get_msg_dict(func_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what is said about a call in each of its messages."""
    return _msg_dict_from_dcp_method_args(*args, **kwargs) | c10d_logger._get_msg_dict(func_name, *args, **kwargs)


def _init_logger(rank: int) -> None:
    """Have the root logger print, with the rank in front; for processes that only save."""
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter(f"[{rank}] %(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logger.addHandler(handler)


def _message(name: str, log_exceptions: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        message = _get_msg_dict(name, *args, **kwargs)
    except Exception:
        # For instance a group that this rank is not in. The call itself will say what is wrong with it.
        _own_logger.debug("what %s was called with could not be logged", name, exc_info=True)
        message = {"func_name": name}
    return {**message, "log_exceptions": log_exceptions}


def _emit(tell: Callable[[object], None], message: dict[str, Any], **fields: Any) -> None:
    try:
        # A dict of its own for each message: a handler may keep it.
        tell({**message, **{key: str(each) if key == "error" else each for key, each in fields.items()}})
    except Exception:
        _own_logger.debug("a handler of %s failed", _dcp_logger.name, exc_info=True)


# How the functions of the protocol are called: old argument orders, profiling, and storages by their place.

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
