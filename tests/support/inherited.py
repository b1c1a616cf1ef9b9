"""Imported last by the forkserver (`forking`), to freeze what its forks inherit."""

from __future__ import annotations

import gc

from tests.support.forking import caches_of_torch_distributed

CACHES = caches_of_torch_distributed()
"""Searched once, for all forks."""
gc.freeze()
