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
