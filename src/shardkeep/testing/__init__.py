"""Shipped helpers for tests: rank pools, faulty stores, contract suites, and those of torch's `checkpoint_utils`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkeep.testing.checkpoint_utils import (
        Rot13Example,
        get_test_extension_registry,
        with_checkpoint_logging,
        with_temp_dir,
    )

__all__ = ["Rot13Example", "get_test_extension_registry", "with_checkpoint_logging", "with_temp_dir"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardkeep.testing' has no attribute {name!r}")
    return getattr(importlib.import_module("shardkeep.testing.checkpoint_utils"), name)
