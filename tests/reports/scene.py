"""Stores that are slow or broken on one rank, and what is said of saves through them."""

import contextlib
import logging
import time

import torch
import torch.distributed as dist

import shardkeep as sk
from tests.support.stores import BeforeStore

ROWS = 4
"""Of each rank's own tensor, 64 KiB a row."""
SLOW_S = 0.8


def slow_store(where, verb, delay_s=SLOW_S):
    return BeforeStore(sk.LocalStore(where), lambda each, _: time.sleep(delay_s * (each == verb)))


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def state():
    """Each rank has rows of one tensor, which are all its own numbers."""
    part = torch.full((ROWS, 1 << 14), float(rank()))
    return {"w": sk.ShardedBox(part, offsets=(ROWS * rank(), 0), shape=(ROWS * ranks(), 1 << 14)), "n": 3}


@contextlib.contextmanager
def heard(**kinds):
    events = []
    with sk.on_event(events.append, **kinds):
        yield events


@contextlib.contextmanager
def logged():
    lines = []

    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("shardkeep"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def names(events):
    return [type(event).__name__ for event in events]
