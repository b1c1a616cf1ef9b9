"""Imported last by the process that others are forked from: `forking`."""

from __future__ import annotations

import gc

from tests.support.forking import caches_of_torch_distributed

CACHES = caches_of_torch_distributed()
"""Looked for here, once for all forks."""
gc.freeze()
