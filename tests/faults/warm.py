"""Imported by the process that others are forked from: what the first save takes time to prepare, they inherit."""

import shardkeep as sk
from tests.faults.doomed import save_level

save_level(sk.MemoryStore(), 0)
