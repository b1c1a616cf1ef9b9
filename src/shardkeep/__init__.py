"""
Checkpoints for PyTorch training on any number of ranks: exact, atomic, verified, and as fast as the disk.

    import shardkeep as sk

    sk.save({"model": model.state_dict(), "step": 10}, "runs/a/step-10")
    sk.load(state, "runs/a/step-10")
    sk.open("runs/a/step-10")["model.layers.0.weight"][3:7]

Names load when they are first used: looking at files does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardkeep._version import __version__

if TYPE_CHECKING:
    from shardkeep.codec.codecs import CodecConfig
    from shardkeep.codec.keys import KeyRing, KeySource, new_key
    from shardkeep.codec.known import register_codec
    from shardkeep.codec.problems import KeyMissing, NotAuthentic, WrongKey
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
        MalformedFile,
        PickleRefused,
        RanksDisagree,
        RanksSilent,
        ReplicasDiffer,
        SaveCancelled,
        StateError,
        StateMismatch,
        StorageError,
        StorageFull,
        UnsupportedLeaf,
        UnsupportedVersion,
        WriterDied,
        WrongSize,
    )
    from shardkeep.events import on_event
    from shardkeep.exchange.converting import ConvertReport, convert
    from shardkeep.exchange.exporting import ExportReport, export
    from shardkeep.exchange.rotating import rotate_keys
    from shardkeep.loading import load
    from shardkeep.manage.catalog import Catalog
    from shardkeep.manage.checkpointer import Checkpointer
    from shardkeep.manage.problems import LeaseLost, NotPromoted, RootInUse
    from shardkeep.manage.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepYounger
    from shardkeep.opening import Checkpoint, StoredTensor, VerifyReport, open, verify_stored  # noqa: A004 - sk.open
    from shardkeep.options import Options
    from shardkeep.reports.progress import show_progress
    from shardkeep.reports.trace import trace
    from shardkeep.run.handles import SaveHandle, SaveProgress
    from shardkeep.run.reports import LoadReport, SaveReport
    from shardkeep.saving import async_save, finish_saves, save
    from shardkeep.state.kinds import PerRank, ShardedBox
    from shardkeep.state.objects.rng import RNG
    from shardkeep.store.local import LocalStore
    from shardkeep.store.memory import MemoryStore
    from shardkeep.store.place import open_place

_HOMES = {
    "codec.codecs": ("CodecConfig",),
    "codec.keys": ("KeyRing", "KeySource", "new_key"),
    "codec.known": ("register_codec",),
    "codec.problems": ("KeyMissing", "NotAuthentic", "WrongKey"),
    "errors": (
        "BlobNotFound",
        "CheckpointError",
        "CheckpointExists",
        "CheckpointNotFound",
        "ChecksumMismatch",
        "DamagedCheckpoint",
        "EarlierSaveFailed",
        "Failure",
        "InvalidShards",
        "KeyCollision",
        "MalformedFile",
        "PickleRefused",
        "RanksDisagree",
        "RanksSilent",
        "ReplicasDiffer",
        "SaveCancelled",
        "StateError",
        "StateMismatch",
        "StorageError",
        "StorageFull",
        "UnsupportedLeaf",
        "UnsupportedVersion",
        "WriterDied",
        "WrongSize",
    ),
    "events": ("on_event",),
    "exchange.converting": ("ConvertReport", "convert"),
    "exchange.exporting": ("ExportReport", "export"),
    "exchange.rotating": ("rotate_keys",),
    "loading": ("load",),
    "manage.catalog": ("Catalog",),
    "manage.checkpointer": ("Checkpointer",),
    "manage.problems": ("LeaseLost", "NotPromoted", "RootInUse"),
    "manage.retention": ("KeepAll", "KeepBest", "KeepEvery", "KeepLast", "KeepYounger"),
    "opening": ("Checkpoint", "StoredTensor", "VerifyReport", "open", "verify_stored"),
    "options": ("Options",),
    "reports.progress": ("show_progress",),
    "reports.trace": ("trace",),
    "run.handles": ("SaveHandle", "SaveProgress"),
    "run.reports": ("LoadReport", "SaveReport"),
    "saving": ("async_save", "finish_saves", "save"),
    "state.kinds": ("PerRank", "ShardedBox"),
    "state.objects.rng": ("RNG",),
    "store.local": ("LocalStore",),
    "store.memory": ("MemoryStore",),
    "store.place": ("open_place",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

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
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'shardkeep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardkeep.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
