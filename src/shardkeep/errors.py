"""
Every exception that shardkeep raises on purpose. All derive from `CheckpointError`, and from the builtin a caller would expect:

    StateError          the state or an argument is invalid: UnsupportedLeaf, KeyCollision, InvalidShards, ReplicasDiffer,
                        StateMismatch, and those of helpers for state dicts
    DamagedCheckpoint   the stored bytes are not those that were saved: ChecksumMismatch, WrongSize, MalformedFile,
                        NearCopyDamaged, DamagedFrame, NotAuthentic
    StorageError        the store failed: BlobNotFound, StorageFull
    EarlierSaveFailed   an asynchronous save failed and its result was not retrieved: NotPromoted

Classes that torch's callers meet also derive from the builtin that torch raises in the same place. A message says where,
what was expected, what was found and what to do. An error is rebuilt on other ranks from its class name, text and details,
so it may only hold plain data.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from typing_extensions import Self

__all__ = [
    "BlobNotFound", "CheckpointError", "CheckpointExists", "CheckpointNotFound", "ChecksumMismatch",
    "DamagedCheckpoint", "EarlierSaveFailed", "Failure", "InvalidShards", "KeyCollision", "KeyMissing",
    "LeaseLost", "MalformedFile", "NotAuthentic", "NotPromoted", "PickleRefused", "RanksDisagree", "RanksSilent",
    "ReplicasDiffer", "RootInUse", "SaveCancelled", "StateError", "StateMismatch", "StorageError", "StorageFull",
    "UnsupportedLeaf", "UnsupportedVersion", "WriterDied", "WrongKey", "WrongSize",
]  # fmt: skip
"""What `shardkeep` exports. Type checkers need a literal."""


@dataclass(frozen=True)
class Failure:
    """A failure on one rank, as plain text that crosses ranks without pickle."""

    kind: str
    """Class name of the exception."""
    message: str
    trace: str = ""
    """The traceback as text; empty if there is none to show."""
    hint: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class CheckpointError(Exception):
    """Base class of all errors of shardkeep."""

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details
        self.by_rank: dict[int, Failure] = {}

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


# -- the state


class StateError(CheckpointError):
    """The state or an argument is invalid."""


class UnsupportedLeaf(StateError, TypeError):
    """A leaf of the state has no safe stored form."""


class KeyCollision(StateError, ValueError):
    """Two leaves of the state have the same flat name."""


class InvalidShards(StateError, ValueError):
    """The boxes of a tensor overlap, leave a hole, or disagree between ranks."""


class BadMapping(StateError, ValueError, KeyError):
    """`fqn_to_index_mapping` does not fit the tensors of a Hugging Face model."""


class ReplicasDiffer(StateError, ValueError):
    """A value that should be the same on all ranks is not."""


class StateMismatch(StateError, ValueError):
    """The checkpoint does not match the state to load into; lists every difference."""

    @property
    def missing(self) -> list[str]:
        """Keys of the state that the checkpoint does not have."""
        return list(self.details.get("missing", ()))

    @property
    def unexpected(self) -> list[str]:
        """Keys of the checkpoint that no rank's state has."""
        return list(self.details.get("unexpected", ()))

    @property
    def mismatched(self) -> list[str]:
        """One line for each key whose shape, dtype or kind differs."""
        return list(self.details.get("mismatched", ()))


class UnknownName(StateError, AttributeError):
    """A name does not exist in the module."""


class BadState(StateError, RuntimeError):
    """A state dict or a checkpoint is empty, incomplete, or does not belong to the model or optimizer."""


class MissingKey(BadState, KeyError):
    """A state dict or a checkpoint lacks a key."""


class UnsupportedValue(StateError, NotImplementedError):
    """The chosen form of a state dict cannot hold a value."""


class CompanionMismatch(StateError, ValueError):
    """A companion tree does not match the state dict; names the path where they differ."""


class BadValue(StateError, ValueError):
    """A value of the state, or an option, is missing, or not one that can be used here."""


class PinningRefused(StateError, RuntimeError):
    """Memory cannot be pinned as requested."""


# -- the checkpoint


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this path."""


class CheckpointExists(CheckpointError, FileExistsError):
    """A committed checkpoint already exists, and `overwrite=True` was not given."""


class UnsupportedVersion(CheckpointError, ValueError):
    """The checkpoint's format is newer than this shardkeep."""


class PickleRefused(CheckpointError, ValueError):
    """A leaf is pickled, and `allow_pickle=True` was not given."""


class DamagedCheckpoint(CheckpointError, ValueError):
    """The stored bytes are not the bytes that were saved."""

    @classmethod
    def of(cls, file: str, why: str, *, hint: str = "", **details: Any) -> Self:
        """Make the error of a file, with whose name the message begins."""
        return cls(f"{file}: {why}", hint=hint, file=file, **details)


class ChecksumMismatch(DamagedCheckpoint):
    """The checksum of stored bytes is wrong."""


class WrongSize(DamagedCheckpoint):
    """A file is missing, or shorter or longer than the commit record says."""


class MalformedFile(DamagedCheckpoint):
    """A file breaks the rules of the format."""


class NearCopyDamaged(DamagedCheckpoint):
    """A checkpoint to be promoted is damaged, so it is not promoted."""


class StorageError(CheckpointError, OSError):
    """The store failed. `errno` is set if the system returned one."""

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message, hint=hint, **details)
        self.errno = details.get("errno")

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError keeps its errno where pickle does not look.
        return type(self), self.args, {**vars(self), "errno": self.errno}


class BlobNotFound(StorageError, FileNotFoundError):
    """The file does not exist in the store."""


class StorageFull(StorageError):
    """No space is left (ENOSPC or EDQUOT)."""


# -- saves and ranks


class EarlierSaveFailed(CheckpointError, RuntimeError):
    """An asynchronous save failed, and its result was not retrieved before the next save; the failure is `__cause__`."""

    response: Any = None
    """The result of the call that raises this: it has made or started its own save."""

    @property
    def by_rank(self) -> dict[int, Failure]:
        """The failure of each rank in the save that failed."""
        return self._by_rank or getattr(self.__cause__, "by_rank", {})

    @by_rank.setter
    def by_rank(self, failures: dict[int, Failure]) -> None:
        self._by_rank = failures


class NotPromoted(EarlierSaveFailed):
    """A checkpoint could not be copied to the second root, and stays in the first. This is retried; `__cause__` says why."""


class SaveCancelled(CheckpointError):
    """A save was cancelled, or ended early, before it was committed."""


class WriterDied(CheckpointError, RuntimeError):
    """The writer process could not be started, did not answer, or ended before its work was done."""


class RanksSilent(CheckpointError, TimeoutError):
    """Some ranks did not answer before the deadline."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that did not answer."""
        return list(self.details.get("ranks", ()))


class RanksDisagree(CheckpointError, RuntimeError):
    """The ranks made different calls, or with different arguments."""


class RootInUse(CheckpointError, RuntimeError):
    """Another job, named in the message, saves to this root."""


class LeaseLost(CheckpointError, RuntimeError):
    """Another job has taken over this root, so this one no longer saves or deletes."""


# -- codecs, keys and optional packages


class PackageMissing(CheckpointError, ImportError):
    """A report or a codec needs a package that is not installed."""


class UnknownExtension(CheckpointError, ValueError):
    """A stored descriptor names an extension, or a version of one, that is not registered, or not installed."""


class UnknownCodec(CheckpointError, ValueError):
    """No codec of this name and version is registered."""


class InvalidCodec(CheckpointError, ValueError):
    """The arguments of a codec are invalid, or its class does not follow the protocol."""


class CodecFailed(CheckpointError, RuntimeError):
    """A codec failed while writing, or returned more bytes than it announced."""


class DamagedFrame(DamagedCheckpoint):
    """A stored frame cannot be decoded, or would decode to more bytes than were written."""


class NotAuthentic(DamagedFrame):
    """Encrypted data, or its record, was changed, cut, moved or exchanged."""


class KeyMissing(CheckpointError, LookupError):
    """A checkpoint is encrypted, or should be, and no key was given."""


class WrongKey(CheckpointError, ValueError):
    """None of the given keys decrypts the checkpoint."""


class InvalidKey(CheckpointError, ValueError):
    """The text or bytes given are not a key."""


# -- shardkeep.dcp


class BrokenProtocol(StateError, AssertionError, RuntimeError):
    """A planner, a storage or a caller violated the protocol."""


class NoMetadata(CheckpointError, AssertionError):
    """Neither the checkpoint's metadata nor that of this rank could be read."""


class NotSavable(UnsupportedLeaf, RuntimeError):
    """A value of the state would be lost, or could not be read again."""


class NoStorage(CheckpointError, RuntimeError):
    """No storage was given, and none could be chosen."""


# -- torch's exception for failures of ranks. Exceptions cross ranks pickled; one that cannot be pickled crosses as text.

WRAPPED_EXCEPTION = tuple[BaseException, traceback.StackSummary]


def _wrap_exception(exc: BaseException) -> WRAPPED_EXCEPTION:
    frames = traceback.extract_tb(exc.__traceback__)
    # A new summary, because since Python 3.13 frames hold code objects, which cannot be pickled.
    summary = traceback.StackSummary.from_list([(f.filename, f.lineno or 0, f.name, f.line) for f in frames])
    return exc, summary


def _is_wrapped_exception(obj: Any) -> bool:
    return (
        isinstance(obj, tuple)
        and len(obj) == 2
        and isinstance(obj[0], BaseException)
        and isinstance(obj[1], traceback.StackSummary)
    )


def _get_failure_dict(results: list[Any]) -> dict[int, WRAPPED_EXCEPTION]:
    return {rank: result for rank, result in enumerate(results) if _is_wrapped_exception(result)}


def torch_module(name: str) -> ModuleType | None:
    """Return a module of torch's own if it is loaded, also where `dcp.install()` has put ours in its place."""
    # The import hook of `dcp.install()` keeps what it replaced.
    kept: Mapping[str, ModuleType] = next((each.displaced for each in sys.meta_path if hasattr(each, "displaced")), {})
    return kept.get(name) or sys.modules.get(name)


class CheckpointException(BaseException):
    """
    One or more ranks failed in a step of a save or a load. Raised on all ranks.

    It is a BaseException, as in torch, so `except Exception` does not catch it. Where torch's own class of this name is
    loaded, each instance is one of that class too, so that code which catches torch's catches this one.
    """

    def __new__(cls, *args: Any) -> CheckpointException:  # noqa: PYI034 - Self needs Python 3.11
        theirs = getattr(torch_module("torch.distributed.checkpoint.api"), "CheckpointException", cls)
        kind = cls if issubclass(theirs, cls) else type(cls.__name__, (cls, theirs), {"__module__": cls.__module__})
        made: CheckpointException = super().__new__(kind, *args)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointException, self.args  # another process may not have loaded torch's class

    def __init__(self, msg: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        super().__init__(msg, failures)
        self._failures = failures

    @property
    def failures(self) -> dict[int, WRAPPED_EXCEPTION]:
        """The exception of each rank that failed, and where it was raised."""
        return self._failures

    def __str__(self) -> str:
        ranks = ", ".join(map(str, sorted(self._failures)))
        lines = [f"CheckpointException ranks: {ranks} (step {self.args[0]!r})\n"]
        for rank, (error, stack) in sorted(self._failures.items()):
            lines.append(f"Traceback (most recent call last): (RANK {rank})\n")
            lines += traceback.format_list(stack or [])
            lines += traceback.format_exception_only(type(error), error)
        return "".join(lines)


def picklable_failure(wrapped: WRAPPED_EXCEPTION) -> WRAPPED_EXCEPTION:
    """Return a failure that can be sent to another rank: the same, or its text if it cannot be pickled."""
    error, stack = wrapped
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a foreign class may raise anything when it is pickled or rebuilt
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        return CheckpointError(f"{text} (an exception that cannot be sent between ranks)"), stack
    return wrapped


def failure_of(error: BaseException, trace: str = "") -> Failure:
    """Describe any exception as plain text."""
    if isinstance(error, CheckpointError):
        return Failure(type(error).__name__, error.message, trace, error.hint, error.details)
    return Failure(type(error).__name__, str(error) or repr(error), trace)


def error_class(kind: str) -> type[CheckpointError]:
    """Return the class that a failure names; foreign exceptions become `CheckpointError`."""
    known = [CheckpointError]
    for cls in known:  # grows during the loop
        known += [below for below in cls.__subclasses__() if below.__module__.startswith("shardkeep.")]
    return next((cls for cls in known if cls.__name__ == kind), CheckpointError)
