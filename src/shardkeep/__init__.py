"""
Checkpoints for PyTorch training that are exact, atomic and verified, on any number of ranks.

    import shardkeep as sk

    sk.save({"model": model.state_dict(), "step": 10}, "runs/a/step-10")
    sk.load(state, "runs/a/step-10")
    sk.open("runs/a/step-10")["model.layers.0.weight"][3:7]

Names are imported when they are first used, so that looking at a checkpoint does not import torch. In a process that has
torch already, what saves need is imported at once, so that the first save does not wait for it.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

from shardkeep._version import __version__

if TYPE_CHECKING:
    from shardkeep.codecs.base import CodecConfig
    from shardkeep.codecs.chain import register_codec
    from shardkeep.codecs.keys import KeyRing, KeySource, new_key
    from shardkeep.conversion.api import ConvertReport, ExportReport, convert, export
    from shardkeep.conversion.rotate import rotate_keys
    from shardkeep.engine.queue import SaveHandle, SaveProgress
    from shardkeep.engine.report import LoadReport, SaveReport
    from shardkeep.errors import (
        BlobNotFound,
        CheckpointError,
        CheckpointExists,
        CheckpointNotFound,
        ChecksumMismatch,
        DamagedCheckpoint,
        EarlierSaveFailed,
        Failure,
        InvalidShards,
        KeyCollision,
        KeyMissing,
        LeaseLost,
        MalformedFile,
        NotAuthentic,
        NotPromoted,
        PickleRefused,
        RanksDisagree,
        RanksSilent,
        ReplicasDiffer,
        RootInUse,
        SaveCancelled,
        StateError,
        StateMismatch,
        StorageError,
        StorageFull,
        UnsupportedLeaf,
        UnsupportedVersion,
        WriterDied,
        WrongKey,
        WrongSize,
    )
    from shardkeep.events import on_event
    from shardkeep.loading import load
    from shardkeep.manage.catalog import Catalog
    from shardkeep.manage.checkpointer import Checkpointer
    from shardkeep.manage.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepYounger
    from shardkeep.opening import Checkpoint, StoredTensor, VerifyReport, open, verify_stored  # noqa: A004 - sk.open
    from shardkeep.options import Options
    from shardkeep.reports.progress import show_progress
    from shardkeep.reports.trace import trace
    from shardkeep.saving import async_save, finish_saves, save
    from shardkeep.state.leaves import PerRank, ShardedBox
    from shardkeep.state.stored import RNG
    from shardkeep.storage.local import LocalStore
    from shardkeep.storage.memory import MemoryStore
    from shardkeep.storage.resolve import open_place

_HOMES = {
    "codecs.base": "CodecConfig",
    "codecs.keys": "KeyRing KeySource new_key",
    "codecs.chain": "register_codec",
    "conversion.api": "ConvertReport ExportReport convert export",
    "conversion.rotate": "rotate_keys",
    "engine.queue": "SaveHandle SaveProgress",
    "engine.report": "LoadReport SaveReport",
    "events": "on_event",
    "loading": "load",
    "manage.catalog": "Catalog",
    "manage.checkpointer": "Checkpointer",
    "manage.retention": "KeepAll KeepBest KeepEvery KeepLast KeepYounger",
    "opening": "Checkpoint StoredTensor VerifyReport open verify_stored",
    "options": "Options",
    "reports.progress": "show_progress",
    "reports.trace": "trace",
    "saving": "async_save finish_saves save",
    "state.leaves": "PerRank ShardedBox",
    "state.stored": "RNG",
    "storage.local": "LocalStore",
    "storage.memory": "MemoryStore",
    "storage.resolve": "open_place",
}
"""The module of each public name, which is imported when the name is first used; other names are those of errors."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "RNG",
    "BlobNotFound",
    "Catalog",
    "Checkpoint",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointNotFound",
    "Checkpointer",
    "ChecksumMismatch",
    "CodecConfig",
    "ConvertReport",
    "DamagedCheckpoint",
    "EarlierSaveFailed",
    "ExportReport",
    "Failure",
    "InvalidShards",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepYounger",
    "KeyCollision",
    "KeyMissing",
    "KeyRing",
    "KeySource",
    "LeaseLost",
    "LoadReport",
    "LocalStore",
    "MalformedFile",
    "MemoryStore",
    "NotAuthentic",
    "NotPromoted",
    "Options",
    "PerRank",
    "PickleRefused",
    "RanksDisagree",
    "RanksSilent",
    "ReplicasDiffer",
    "RootInUse",
    "SaveCancelled",
    "SaveHandle",
    "SaveProgress",
    "SaveReport",
    "ShardedBox",
    "StateError",
    "StateMismatch",
    "StorageError",
    "StorageFull",
    "StoredTensor",
    "UnsupportedLeaf",
    "UnsupportedVersion",
    "VerifyReport",
    "WriterDied",
    "WrongKey",
    "WrongSize",
    "__version__",
    "async_save",
    "convert",
    "export",
    "finish_saves",
    "load",
    "new_key",
    "on_event",
    "open",
    "open_place",
    "register_codec",
    "rotate_keys",
    "save",
    "show_progress",
    "trace",
    "verify_stored",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name, "errors")
    if name not in __all__:
        raise AttributeError(f"module 'shardkeep' has no attribute {name!r}")
    # Without the cycle collector: a full collection, which imports can trigger, scans all of torch and takes longer than they do.
    enabled = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(f"shardkeep.{home}"), name)
    finally:
        if enabled:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if "torch" in sys.modules:
    __getattr__("async_save")
