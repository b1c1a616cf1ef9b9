"""Checkpoints for PyTorch training on any number of ranks."""

from shardkeep._version import __version__

__all__ = ["__version__"]
