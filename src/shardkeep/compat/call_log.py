"""
A record of each call and each step of it, on the logger that torch's checkpoint logs to.

A step gives two messages, dicts, at level DEBUG: event "start" and "end", with the checkpoint, who takes part, the time
and, at the end, what was spent, in nanoseconds; where asked for, also "exception" at level ERROR. Nothing listens to
the logger unless somebody adds a handler to it. No failure of logging ever reaches a save or a load.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

from torch.distributed import c10d_logger
from torch.distributed.logging_handlers import _log_handlers

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
        if not _heard():
            return func(*args, **kwargs)
        began = time.time_ns()
        message = _message(name, log_exceptions, args, {**known, **kwargs})
        _tell(_dcp_logger.debug, message, event="start", time=began)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            if log_exceptions:
                _tell(_dcp_logger.error, message, event="exception", error=error, time=time.time_ns())
            raise
        ended = time.time_ns()
        _tell(_dcp_logger.debug, message, event="end", time=ended, times_spent=ended - began)
        return result

    return wrapper


def _heard() -> bool:
    """Say whether anybody listens: a state of ten thousand values is not worth twenty thousand messages to nobody."""
    handled = any(type(each) is not logging.NullHandler for each in _dcp_logger.handlers)
    return handled or bool(_dcp_logger.filters) or _dcp_logger.propagate


def of_storage(storage: object, group: object) -> dict[str, Any]:
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


def _tell(tell: Callable[[object], None], message: dict[str, Any], **fields: Any) -> None:
    try:
        # A dict of its own for each message: a handler may keep it.
        tell({**message, **{key: str(each) if key == "error" else each for key, each in fields.items()}})
    except Exception:
        _own_logger.debug("a handler of %s failed", _dcp_logger.name, exc_info=True)
