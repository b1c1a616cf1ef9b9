"""
Python's forkserver, prepared for tests: processes that are forks of one process that has already imported torch.

Importing torch takes seconds, a fork milliseconds. Objects that forks inherit are frozen (`gc.freeze`), because a garbage
collection that visits them would copy their pages.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext


ROOT = str(Path(__file__).parents[2])


@functools.cache
def _preloaded() -> list[str]:
    return [
        "tests.support.rank_process", "shardkeep.saving", "shardkeep.loading", "shardkeep.opening",
        "torch.distributed.fsdp",
        "torch._dynamo",  # comes with the first optimizer
        "torch.distributed.tensor.debug",  # empties the caches of meshes
    ]  # fmt: skip


def preload(*modules: str) -> None:
    """Import these modules before the first fork. A call after the first fork has no effect."""
    _preloaded().extend(each for each in modules if each not in _preloaded())


def fork_context() -> ForkServerContext:
    """Start the forkserver if it does not run yet, and return its context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_preloaded(), "tests.support.inherited"])
    # The process that forks must have a single thread. It must also find the package `tests`, whatever the directory.
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    special = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
    before = {name: os.environ.get(name) for name in special}
    os.environ.update(special)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def caches_of_torch_distributed() -> list[Any]:
    """Return all live `lru_cache`s of torch.distributed."""
    return [
        one
        for one in gc.get_objects()
        if type(one) is functools._lru_cache_wrapper and str(one.__module__).startswith("torch.distributed")
    ]
