"""
The three ways into a checkpoint, tried on one that is damaged or forged: `load`, `open` + `to_dict`, `open` + `verify`.

Each answers with the error it raised, or with None where all it gave is exactly what was saved. Anything else fails
the test: another exception, or data that nobody saved.
"""

from dataclasses import dataclass

import pytest

import shardkeep as sk
from shardkeep.opening import StoredTensor
from tests.damage.subjects import QUICK, blank_for
from tests.engine.samples import bits

Answer = sk.CheckpointError | None

DAMAGE = (sk.DamagedCheckpoint, sk.UnsupportedVersion, sk.CheckpointNotFound)
"""What a damaged checkpoint may raise. Never the bare CheckpointError: that is what a foreign exception becomes."""
FORGED = (*DAMAGE, sk.StateMismatch, sk.PickleRefused, sk.UnsupportedLeaf)
"""What a forged one may raise: it can also be sound, and hold what was not asked for."""


def load(store, subject, may=DAMAGE):
    state = blank_for(subject)
    return _answer(may, lambda: sk.load(state, store, options=QUICK), lambda: bits(state) == subject.loaded)


def to_dict(store, subject, may=DAMAGE):
    read = []
    return _answer(
        may, lambda: read.append(sk.open(store, options=QUICK).to_dict()), lambda: bits(read[0]) == subject.tree
    )


def verify(store, subject, may=DAMAGE):
    return _answer(may, lambda: sk.open(store, options=QUICK).verify(), lambda: True)


def look(store, subject, may=DAMAGE):
    """Open, and look at everything there is to look at; one element is read of each tensor."""

    def everything():
        checkpoint = sk.open(store, options=QUICK)
        seen = [repr(checkpoint), checkpoint.step, checkpoint.meta, len(checkpoint)]
        for key in checkpoint:
            item = checkpoint[key]
            if isinstance(item, StoredTensor):
                seen += [repr(item), item.dtype, item.ndim, item.nbytes, item.boxes]
                seen += [item[(0,) * item.ndim]] if item.nbytes else []

    return _answer(may, everything, lambda: True)


def _answer(may, enter, is_exact):
    try:
        enter()
    except may as error:
        return error
    if not is_exact():
        raise OtherData("gave what nobody saved, and said nothing")
    return None


class OtherData(AssertionError):
    """A door gave something else than what was saved."""


@dataclass(frozen=True)
class Answers:
    load: Answer
    to_dict: Answer
    verify: Answer

    @property
    def all(self):
        return [self.load, self.to_dict, self.verify]


def try_all(store, subject, what, may=DAMAGE):
    """Try every door; `what` was done to the checkpoint is said where one misbehaves."""
    answers = []
    for door in (load, to_dict, verify):
        try:
            answers.append(door(store, subject, may))
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is not ours
            pytest.fail(f"{subject.name}, {what}: {door.__name__} raised {type(exc).__name__}: {exc}")
    return Answers(*answers)


def assert_refused(store, subject, what, *, naming, may=DAMAGE):
    """
    Insist that every door raises an error which names the file.

    But for the files of other ranks' own state, which one rank has no reason to read: without them it loads exactly.
    """
    answers = try_all(store, subject, what, may)
    for error in answers.all[1:] if is_of_other_ranks(naming) else answers.all:
        assert error is not None, f"{what}: not noticed"
        assert naming in str(error), f"{what}: {error} does not name {naming}"
    return answers


def is_of_other_ranks(name):
    """Say whether a file holds nothing but `PerRank` state of ranks other than 0."""
    return name.startswith("rng-") and not name.startswith("rng-00000-")
