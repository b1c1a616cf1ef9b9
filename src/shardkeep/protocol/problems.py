"""
Errors of the protocol: each is one of ours, and of the builtin type that callers of torch's checkpoint expect there.
"""

from __future__ import annotations

from shardkeep.errors import CheckpointError, StateError, UnsupportedLeaf


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
