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

import importlib
import sys
from typing import TYPE_CHECKING, Any

from shardkeep import errors
from shardkeep._version import __version__
from shardkeep.errors import *  # noqa: F403 - all public errors

if TYPE_CHECKING:  # with `as`, type checkers treat the names as public
    # isort: off
    from shardkeep.codecs.base import CodecConfig as CodecConfig
    from shardkeep.codecs.chain import register_codec as register_codec
    from shardkeep.codecs.keys import KeyRing as KeyRing, KeySource as KeySource, new_key as new_key
    from shardkeep.conversion.api import (
        ConvertReport as ConvertReport,
        ExportReport as ExportReport,
        convert as convert,
        export as export,
    )
    from shardkeep.conversion.rotate import rotate_keys as rotate_keys
    from shardkeep.engine.queue import SaveHandle as SaveHandle, SaveProgress as SaveProgress
    from shardkeep.engine.report import LoadReport as LoadReport, SaveReport as SaveReport
    from shardkeep.events import on_event as on_event
    from shardkeep.loading import load as load
    from shardkeep.manage.catalog import Catalog as Catalog
    from shardkeep.manage.checkpointer import Checkpointer as Checkpointer
    from shardkeep.manage.retention import (
        KeepAll as KeepAll,
        KeepBest as KeepBest,
        KeepEvery as KeepEvery,
        KeepLast as KeepLast,
        KeepYounger as KeepYounger,
    )
    from shardkeep.opening import (
        Checkpoint as Checkpoint,
        StoredTensor as StoredTensor,
        VerifyReport as VerifyReport,
        open as open,  # noqa: A004 - sk.open
        verify_stored as verify_stored,
    )
    from shardkeep.options import Options as Options
    from shardkeep.reports.progress import show_progress as show_progress
    from shardkeep.reports.trace import trace as trace
    from shardkeep.saving import async_save as async_save, finish_saves as finish_saves, save as save
    from shardkeep.state.leaves import PerRank as PerRank, ShardedBox as ShardedBox
    from shardkeep.state.stored import RNG as RNG
    from shardkeep.storage.local import LocalStore as LocalStore
    from shardkeep.storage.memory import MemoryStore as MemoryStore
    from shardkeep.storage.resolve import open_place as open_place
    # isort: on

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
"""The public names of each module, which is imported when one of them is first used."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME_OF, *errors.__all__]  # noqa: PLE0604 - all are strings


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shardkeep' has no attribute {name!r}")
    from shardkeep.options import collector_paused  # noqa: PLC0415 - when it is first needed

    # A full collection, which imports can trigger, scans all of torch and takes longer than they do.
    with collector_paused():
        value = getattr(importlib.import_module(f"shardkeep.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if "torch" in sys.modules:
    __getattr__("async_save")
