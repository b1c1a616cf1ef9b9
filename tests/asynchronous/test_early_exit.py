"""A process that ends while its save is in flight, in order and without, and one that forks meanwhile."""

import os
import subprocess
import sys
import textwrap

import pytest

import shardkeep as sk
from tests.asynchronous.scene import PATIENCE_S, full, says
from tests.faults.forks import Fork
from tests.faults.scene import files_of_checkpoint, names_in

BEGINNING = """
import multiprocessing, os, sys, torch
import shardkeep as sk
from shardkeep.testing.faulty_store import FaultyStore
from tests.asynchronous.scene import BrokenStore, full, held
place = sys.argv[1]

def slowly():
    return FaultyStore(sk.LocalStore(place), "slow", at=0, verbs=["write_at"], delay_s=0.3)
"""
ENDINGS = {
    "after the call": "sk.async_save(full(1), slowly())",
    "sys.exit": """
        def main():
            sk.async_save(full(1), slowly(), max_in_flight=2)
            where = held()
            kept = sk.async_save(full(2), where, max_in_flight=2)
            where.reached.wait()

            def ask():
                try:
                    kept.result()
                except sk.CheckpointError as error:
                    print("asked in a fork:", error, flush=True)

            fork = multiprocessing.get_context("fork").Process(target=ask)
            fork.start()
            fork.join(60)
            print("fork", fork.exitcode)
            where.release.set()
            sys.exit(3)
        main()
    """,
    "unasked": """
        handle = sk.async_save(full(1), BrokenStore(sk.LocalStore(place)))
        1 / 0
    """,
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How each of these programs ended: its place, exit code, output and errors."""
    processes = {}
    for name, ending in ENDINGS.items():
        place = str(tmp_path_factory.mktemp("exit") / "ck")
        program = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGINNING + textwrap.dedent(ending), place]
        processes[name] = place, subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = {}
    for name, (place, process) in processes.items():
        out, err = process.communicate(timeout=PATIENCE_S)
        found[name] = place, process.returncode, out, err
    return found


def test_a_program_that_ends_right_after_the_call(ended):
    """
    The interpreter waits for the save: the checkpoint is complete.
    """
    place, code, _, err = ended["after the call"]
    assert (code, err) == (0, "")
    assert says(place) == {1}
    assert names_in(place) == files_of_checkpoint(place)


def test_sys_exit_in_the_middle(ended):
    """
    The same when it leaves by `sys.exit`, which keeps its code.
    """
    place, code, _, err = ended["sys.exit"]
    assert (code, err) == (3, "")
    assert says(place) == {1}
    assert names_in(place) == files_of_checkpoint(place)


def test_a_fork_does_not_wait_for_saves_of_its_parent(ended):
    """
    A process forked while a save is in flight (as data loaders do) ends by itself: it has none of the threads.
    """
    assert "fork 0" in ended["sys.exit"][2]


def test_a_fork_that_asks_for_a_save_of_its_parent(ended):
    """
    It is told that it will never know, instead of waiting for ever.
    """
    assert "asked in a fork: a save of process" in ended["sys.exit"][2]


def test_a_failure_nobody_asked_for_is_told_at_exit(ended):
    """
    It is printed, with what it came from, beside the error that ended the program.
    """
    place, code, _, err = ended["unasked"]
    assert code == 1
    assert "ZeroDivisionError" in err
    assert "EarlierSaveFailed: an earlier asynchronous save" in err
    assert "raise self.broken(verb, name)" in err
    assert names_in(place) == set()


def vanish(pipe, place, at):
    """Begin a save over a checkpoint, and end without a word at its n-th operation on storage."""
    from shardkeep.testing.faulty_store import FaultyStore

    class Vanishing(FaultyStore):
        def begin(self, verb, name):
            super().begin(verb, name)
            if len(self.operations) == at:
                pipe.send(self.operations[-1])
                os._exit(0)

    handle = sk.async_save(full(2), Vanishing(sk.LocalStore(place)), overwrite=True)
    handle.result(PATIENCE_S)


@pytest.mark.parametrize("at", [3, 6, 8, 9])
def test_os_exit_in_the_middle(place, at):
    """
    A process that is gone leaves the checkpoint before as it was; the next save removes what it left.
    """
    sk.save(full(1), place)
    with Fork(vanish, place, at) as fork:
        said = fork.pipe.recv()
        assert fork.join() == 0, said
    assert says(place) == {1}
    assert names_in(place) != files_of_checkpoint(place) or at <= 3, said
    sk.async_save(full(3), place, overwrite=True).result(PATIENCE_S)
    assert says(place) == {3}
    assert names_in(place) == files_of_checkpoint(place)
