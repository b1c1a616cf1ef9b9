"""
Every exception shardkeep raises, and nothing else; a few are defined where they belong, as the tree says.

    CheckpointError
    ├── StateError                   the state handed to us cannot be saved or filled as it is
    │   ├── UnsupportedLeaf          (TypeError)   a leaf that has no safe stored form
    │   ├── KeyCollision             (ValueError)  two leaves with one flat name
    │   ├── InvalidShards            (ValueError)  boxes overlap, leave a hole, or disagree between ranks
    │   ├── ReplicasDiffer           (ValueError)  a replicated value is not the same on all ranks
    │   └── StateMismatch            (ValueError)  checkpoint and state differ in keys, shapes, dtypes or kinds
    ├── CheckpointNotFound           (FileNotFoundError)
    ├── CheckpointExists             (FileExistsError)
    ├── UnsupportedVersion           (ValueError)  written by a newer shardkeep
    ├── PickleRefused                (ValueError)  a pickled leaf, and allow_pickle was not given
    ├── DamagedCheckpoint            (ValueError)  what is stored is not what was saved
    │   ├── ChecksumMismatch
    │   ├── WrongSize
    │   └── MalformedFile            a file whose contents break the format's rules
    ├── StorageError                 (OSError)     the store failed; errno is set where there is one
    │   ├── BlobNotFound             (FileNotFoundError)
    │   └── StorageFull
    ├── EarlierSaveFailed            (RuntimeError) an asynchronous save failed, and nobody had asked for its result
    ├── SaveCancelled                a save was cancelled, or ended early, before it was committed
    ├── WriterDied                   (RuntimeError) the process that writes for this one ended before its work was done
    ├── RanksSilent                  (TimeoutError) ranks that did not answer within the deadline
    ├── RanksDisagree                (RuntimeError) ranks called different things, or with different arguments
    ├── RootInUse                    (RuntimeError) another job saves to this root (`manage.problems`)
    ├── LeaseLost                    (RuntimeError) another job has taken this root over (`manage.problems`)
    └── PackageMissing               (ImportError) a report needs a package that is not installed (`reports.problems`)

Each one says where, what was expected, what was found and what to do. An error can be rebuilt on another rank from
its class name, text and details alone, so nothing but plain data is ever kept in it.
"""

from __future__ import annotations

import importlib
import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank, as plain text that crosses ranks without pickle."""

    kind: str
    """Class name of the exception."""
    message: str
    trace: str = ""
    """The traceback as text; empty where there is none to show."""
    hint: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class CheckpointError(Exception):
    """Base of everything shardkeep raises on purpose."""

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details
        self.by_rank: dict[int, Failure] = {}

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class StateError(CheckpointError):
    """The state handed to us cannot be saved or filled as it is."""


class UnsupportedLeaf(StateError, TypeError):
    """A leaf of the state has no safe stored form."""


class KeyCollision(StateError, ValueError):
    """Two leaves of the state flatten to one name."""


class InvalidShards(StateError, ValueError):
    """The boxes of a tensor overlap, leave a hole, or disagree between ranks."""


class ReplicasDiffer(StateError, ValueError):
    """A value that should be the same on all ranks is not."""


class StateMismatch(StateError, ValueError):
    """The checkpoint and the state to fill differ; lists every difference at once."""

    @property
    def missing(self) -> list[str]:
        """Keys the state has and the checkpoint has not."""
        return list(self.details.get("missing", ()))

    @property
    def unexpected(self) -> list[str]:
        """Keys the checkpoint has and no rank's state asked for."""
        return list(self.details.get("unexpected", ()))

    @property
    def mismatched(self) -> list[str]:
        """One line for each key whose shape, dtype or kind differs."""
        return list(self.details.get("mismatched", ()))


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this place."""


class CheckpointExists(CheckpointError, FileExistsError):
    """A committed checkpoint is already there, and `overwrite=True` was not given."""


class UnsupportedVersion(CheckpointError, ValueError):
    """The checkpoint's format is newer than this shardkeep."""


class PickleRefused(CheckpointError, ValueError):
    """A pickled leaf was met and `allow_pickle=True` was not given."""


class DamagedCheckpoint(CheckpointError, ValueError):
    """What is stored is not what was saved."""


class ChecksumMismatch(DamagedCheckpoint):
    """Bytes read back have another checksum than those written."""


class WrongSize(DamagedCheckpoint):
    """A file is shorter or longer than the commit record says, or is missing."""


class MalformedFile(DamagedCheckpoint):
    """A file breaks the rules of the format."""


class StorageError(CheckpointError, OSError):
    """The store failed. `errno` is set where the system gave one."""

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message, hint=hint, **details)
        self.errno = details.get("errno")

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError keeps its number where pickle does not look.
        return type(self), self.args, {**vars(self), "errno": self.errno}


class BlobNotFound(StorageError, FileNotFoundError):
    """The store has no blob of that name."""


class StorageFull(StorageError):
    """No space is left (ENOSPC or EDQUOT)."""


class EarlierSaveFailed(CheckpointError, RuntimeError):
    """
    An asynchronous save failed, and nobody had asked for its result by the time of the next one.

    What went wrong is the cause.
    """

    response: Any = None
    """What the call that raises this would have returned: it has made its save, or begun it, all the same."""

    @property
    def by_rank(self) -> dict[int, Failure]:
        """What each rank said of the save that failed."""
        return self._by_rank or getattr(self.__cause__, "by_rank", {})

    @by_rank.setter
    def by_rank(self, failures: dict[int, Failure]) -> None:
        self._by_rank = failures


class SaveCancelled(CheckpointError):
    """A save was cancelled, or ended early, before it was committed."""


class WriterDied(CheckpointError, RuntimeError):
    """The process that writes for this one could not be started, did not answer, or ended before its work was done."""


class RanksSilent(CheckpointError, TimeoutError):
    """Some ranks did not answer within the deadline."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that did not answer."""
        return list(self.details.get("ranks", ()))


class RanksDisagree(CheckpointError, RuntimeError):
    """The ranks called different things, or with different arguments."""


def failure_of(error: BaseException, trace: str = "") -> Failure:
    """Describe any exception as plain text."""
    if isinstance(error, CheckpointError):
        return Failure(type(error).__name__, error.message, trace, error.hint, error.details)
    return Failure(type(error).__name__, str(error) or repr(error), trace)


def error_class(kind: str) -> type[CheckpointError]:
    """Find the class a failure names; foreign exceptions become plain `CheckpointError`."""
    known = [CheckpointError]
    for cls in known:  # grows while it is gone through
        known += [below for below in cls.__subclasses__() if below.__module__.startswith("shardkeep.")]
    return next((cls for cls in known if cls.__name__ == kind), CheckpointError)


# What can go wrong before there is anything to report.


class PackageMissing(CheckpointError, ImportError):
    """A report needs a package that is not installed."""


def import_optional(module: str, *, package: str, wanted_by: str) -> Any:
    """
    Import a module of a package that shardkeep does not depend on.

    Raises:
        PackageMissing: it cannot be imported; says what to install.

    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise PackageMissing(
            f"{wanted_by} needs the package {package}: {exc}", hint=f"pip install {package}", package=package
        ) from exc


# Errors of the protocol: each is one of ours, and of the builtin type that callers of torch's checkpoint expect
# there.


class BrokenProtocol(StateError, AssertionError, RuntimeError):
    """A planner, a storage or a caller did not do what the protocol asks of it."""


class NoMetadata(CheckpointError, AssertionError):
    """Neither the checkpoint's metadata nor that of this rank could be read."""


class MissingKeys(StateError, RuntimeError):
    """The state asks for keys that the checkpoint does not have."""


class NoSuchValue(StateError, ValueError):
    """A plan asks for a value, or a shard of one, that the state does not have."""


class NotSavable(UnsupportedLeaf, RuntimeError):
    """A value of the state that would be lost, or could not be read again."""


class NoStorage(CheckpointError, RuntimeError):
    """No storage was given, and none could be chosen."""


# What went wrong on which rank, as callers of torch's checkpoint expect to be told.
#
# Exceptions cross ranks as they are, pickled; one that cannot be pickled crosses as its text.

WRAPPED_EXCEPTION = tuple[BaseException, traceback.StackSummary]


def _wrap_exception(exc: BaseException) -> WRAPPED_EXCEPTION:
    frames = traceback.extract_tb(exc.__traceback__)
    # Made anew: what a frame remembers besides (code objects, since Python 3.13) cannot be pickled.
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


class CheckpointException(BaseException):
    """
    One or more ranks failed in a step of a save or a load; raised on all of them.

    A BaseException, as torch's is: `except Exception` does not catch it.
    """

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
    """Return a failure that another rank can read: the same, or one with its text where it cannot be pickled."""
    error, stack = wrapped
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a foreign class may raise anything when it is pickled or rebuilt
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        return CheckpointError(f"{text} (an exception that cannot be sent between ranks)"), stack
    return wrapped


# What goes wrong between jobs that share a root, and events of a root that engines know nothing of.


class RootInUse(CheckpointError, RuntimeError):
    """Another job saves to this root; says which."""


class LeaseLost(CheckpointError, RuntimeError):
    """Another job has taken this root over: this one saves and deletes no more."""


class NotPromoted(EarlierSaveFailed):
    """
    A checkpoint could not be copied to the far root. It is as safe as before in the near one, and is tried again.

    What went wrong is the cause.
    """


class NearCopyDamaged(DamagedCheckpoint):
    """A checkpoint that was to be promoted is not what was saved: it is left alone, and not promoted."""


# Errors of this package that are also the builtin which torch's helpers raise in the same place.
#
# Code written for torch catches `RuntimeError` or `ValueError`; code written for shardkeep catches `CheckpointError`.


class UnknownName(StateError, AttributeError):
    """A name leads to nothing in the module."""


class BadOptions(StateError, ValueError):
    """Options that exclude each other, or that do not fit what they are used on."""


class BadState(StateError, RuntimeError):
    """A state dict that is empty, incomplete, or does not belong to the model or optimizer it is set to."""


class MissingKey(BadState, KeyError):
    """A state dict lacks a key that is needed."""


class UnsupportedValue(StateError, NotImplementedError):
    """A value that the chosen form of a state dict cannot hold."""


class CompanionMismatch(StateError, ValueError):
    """A companion tree does not fit the state dict; names the path at which they differ."""


class UnexpectedValue(StateError, ValueError):
    """A value that is neither a tensor nor of a plain type, in a state dict that may hold only those."""


class PinningRefused(StateError, RuntimeError):
    """Memory cannot be pinned as requested."""


# Errors of stream extensions, codecs and keys.
#
# Those of extensions are also the ValueError that callers of torch's checkpoint expect.
#
#     UnknownExtension        (ValueError)    a stored descriptor names an extension that is not known here
#     ExtensionUnavailable    (ValueError)    an extension needs a module that is not installed
#     UnknownCodec            (ValueError)    no codec of this name, or none of this version, is known here
#     InvalidCodec            (ValueError)    a codec was asked for in a way that makes no sense
#     CodecUnavailable        (ImportError)   a codec needs a package that is not installed
#     CodecFailed             (RuntimeError)  a codec broke its contract, or failed, while writing
#     DamagedFrame            (DamagedCheckpoint)  a stored frame cannot be turned back into what was written
#     ├── NotAuthentic        an encrypted frame, or what was recorded with it, was changed, moved or exchanged
#     └── OversizedFrame      a frame that would become larger than what was written: a bomb, or damage
#     KeyMissing              (LookupError)   it is encrypted, and no key was given
#     WrongKey                (ValueError)    it is encrypted, and none of the keys given opens it
#     InvalidKey              (ValueError)    what was given as a key is none


class UnknownExtension(CheckpointError, ValueError):
    """A stored descriptor names an extension, or a version of one, that is not known here."""


class ExtensionUnavailable(CheckpointError, ValueError):
    """An extension needs a module that is not installed."""


class UnknownCodec(CheckpointError, ValueError):
    """No codec of this name, or none of this version, is known here."""


class InvalidCodec(CheckpointError, ValueError):
    """A codec was asked for in a way that makes no sense, or its class cannot be one."""


class CodecUnavailable(CheckpointError, ImportError):
    """A codec needs a package that is not installed."""


class CodecFailed(CheckpointError, RuntimeError):
    """A codec failed while writing, or gave more than it said it would."""


class DamagedFrame(DamagedCheckpoint):
    """A stored frame cannot be turned back into what was written."""


class NotAuthentic(DamagedFrame):
    """What is encrypted, or was recorded with it, was changed, cut, moved or exchanged."""


class OversizedFrame(DamagedFrame):
    """A stored frame stands for more bytes than were written."""


class KeyMissing(CheckpointError, LookupError):
    """It is encrypted, or is to be, and no key was given."""


class WrongKey(CheckpointError, ValueError):
    """It is encrypted, and none of the keys that were given opens it."""


class InvalidKey(CheckpointError, ValueError):
    """What was given as a key is none."""
