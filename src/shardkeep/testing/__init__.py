"""Helpers for tests, imported when they are first used, because only the contract suite needs pytest."""

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
    from shardkeep.testing.store_contract import StoreContract

__all__ = ["Rot13Example", "StoreContract", "get_test_extension_registry", "with_checkpoint_logging", "with_temp_dir"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardkeep.testing' has no attribute {name!r}")
    module = "store_contract" if name == "StoreContract" else "checkpoint_utils"
    return getattr(importlib.import_module(f"shardkeep.testing.{module}"), name)
