"""Helpers for tests. The contract suite is imported when it is first used, because it needs pytest."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardkeep.testing.checkpoint_utils import (
    Rot13Example,
    get_test_extension_registry,
    with_checkpoint_logging,
    with_temp_dir,
)

if TYPE_CHECKING:
    from shardkeep.testing.store_contract import StoreContract

__all__ = ["Rot13Example", "StoreContract", "get_test_extension_registry", "with_checkpoint_logging", "with_temp_dir"]


def __getattr__(name: str) -> Any:
    if name != "StoreContract":
        raise AttributeError(f"module 'shardkeep.testing' has no attribute {name!r}")
    return importlib.import_module("shardkeep.testing.store_contract").StoreContract
