"""Stores that hold a save where a test wants it, and small things that several tests ask."""

import threading

import torch

import shardkeep as sk
from shardkeep.testing.faulty_store import FaultyStore
from tests.engine.samples import bits

PATIENCE_S = 150.0
"""Far longer than anything here takes; a test that waits so long has failed."""
OPTIONS = sk.Options(io_threads=2, host_budget_bytes=4 << 20, timeout_s=20)
"""Two threads and windows of 1 MiB: a small state has several."""


class HeldStore(FaultyStore):
    """Holds every operation whose verb is one of these until `release` is set; `reached` is set by the first."""

    def __init__(self, inner, *verbs):
        super().__init__(inner)
        self.held_verbs = verbs or ("create",)
        self.reached = threading.Event()
        self.release = threading.Event()

    def begin(self, verb, name):
        if verb in self.held_verbs:
            self.reached.set()
            if not self.release.wait(PATIENCE_S):
                raise AssertionError(f"{verb} {name} was held for ever")
        return super().begin(verb, name)


class BrokenStore(FaultyStore):
    def begin(self, verb, name):
        super().begin(verb, name)
        if verb == "create":
            raise self.broken(verb, name)


def held():
    return HeldStore(sk.MemoryStore())


def broken():
    return BrokenStore(sk.MemoryStore())


def saved_in(where):
    ck = sk.open(where)
    ck.verify()
    return ck.to_dict()


def same(found, wanted):
    return bool(bits(found) == bits(wanted))


def full(value, count=4):
    """A state that says one number in every element."""
    return {"w": torch.full((1000,), float(value)), "few": [torch.full((count,), float(value)) for _ in range(3)]}


def says(where):
    tree = saved_in(where)
    return {number for tensor in (tree["w"], *tree["few"]) for number in tensor.tolist()}
