"""Errors of stream extensions: each is one of ours, and the ValueError that callers of torch's checkpoint expect."""

from __future__ import annotations

from shardkeep.errors import CheckpointError


class UnknownExtension(CheckpointError, ValueError):
    """A stored descriptor names an extension, or a version of one, that is not known here."""


class ExtensionUnavailable(CheckpointError, ValueError):
    """An extension needs a module that is not installed."""
