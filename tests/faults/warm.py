"""
Imported by the process that others are forked from, before anything else: what the first save takes time to prepare,
they inherit.
"""

import os

# Before torch is imported. Threads do not survive a fork, and a pool that believes it still has them waits for ever.
os.environ["OMP_NUM_THREADS"] = "1"

import shardkeep as sk
from tests.faults.doomed import save_level

save_level(sk.MemoryStore(), 0)
