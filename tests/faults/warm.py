"""Imported by the process that others are forked from: what the first save takes time to prepare, they inherit."""

import torch

import shardkeep as sk
from tests.faults.doomed import save_level

# Threads do not survive a fork, and a pool that believes it still has them waits for ever.
torch.set_num_threads(1)
save_level(sk.MemoryStore(), 0)
