"""
Errors of this package that are also the builtin which torch's helpers raise in the same place.

Code written for torch catches `RuntimeError` or `ValueError`; code written for shardkeep catches `CheckpointError`.
"""

from __future__ import annotations

from shardkeep.errors import StateError


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
