"""
Processes that are forks of a single one, which has imported torch: Python's forkserver, prepared for tests.

Importing torch takes seconds, a fork milliseconds. What the forks inherit is kept from their garbage collectors: it is no
garbage, and to look at it copies all of it.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext


@functools.cache
def _preloaded() -> list[str]:
    return [
        "tests.support.rank_process", "shardkeep.saving", "shardkeep.loading", "shardkeep.opening",
        "torch.distributed.fsdp",
        "torch._dynamo",  # comes with the first optimizer
        "torch.distributed.tensor.debug",  # empties the caches of meshes
    ]  # fmt: skip


def preload(*modules: str) -> None:
    """Let every fork have imported these when it starts. Before the first one: later it changes nothing."""
    _preloaded().extend(each for each in modules if each not in _preloaded())


def fork_context() -> ForkServerContext:
    """Return the context that makes such processes, and start the one that they are forks of, if it is not there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_preloaded(), "tests.support.inherited"])
    # The one process that forks must have a single thread, and none of its forks needs more on a small machine.
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in single}
    os.environ.update(single)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def caches_of_torch_distributed() -> list[Any]:
    """Return the `lru_cache`s of torch.distributed among what the garbage collector looks at."""
    return [
        one
        for one in gc.get_objects()
        if type(one) is functools._lru_cache_wrapper and str(one.__module__).startswith("torch.distributed")
    ]
