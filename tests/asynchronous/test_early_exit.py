"""A process that ends while its save is in flight, in order and without, and one that forks meanwhile."""

import ast
import os
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

import shardkeep as sk
from tests.asynchronous.scene import PATIENCE_S, full, says
from tests.faults.forks import Fork
from tests.faults.scene import files_of_checkpoint, names_in

BEGINNING = """
import atexit, ctypes, gc, logging, multiprocessing, os, signal, sys, threading, time, torch
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
    "lost": """
        def last_words():
            time.sleep(0.5)
            print("a thread")

        atexit.register(print, "a handler")
        notes = open(place + ".txt", "w")
        notes.write("a file")
        ctypes.CDLL(None).printf(b"a buffer in C, ")
        threading.Thread(target=last_words).start()
        sk.async_save(full(1), BrokenStore(sk.LocalStore(place)))
        atexit.register(print, "a later handler")
    """,
    "forks": """
        def leave():
            sk.async_save(full(1), BrokenStore(sk.LocalStore(place)))
            sys.exit(3)

        def fork():
            sk.async_save(full(1), BrokenStore(sk.LocalStore(place))).outcome()
            if (pid := os.fork()) > 0:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        def fail():
            handle = sk.async_save(full(1), BrokenStore(sk.LocalStore(place)))
            1 / 0

        def on_rank(rank):
            torch.distributed.init_process_group("gloo", init_method=f"file://{place}.meet", rank=rank, world_size=2)
            store = sk.LocalStore(f"{place}-of-ranks")
            sk.async_save({"w": sk.PerRank(torch.ones(2))}, BrokenStore(store) if rank == 1 else store)

        def broken(*_):
            raise OSError(5, "injected")

        def keep(how):
            kept = sk.Checkpointer(f"{place}-{len(pids)}", every_steps=1, on_error=how)
            sk.LocalStore.create = broken
            return kept, kept.step(1, full(1))

        def keep_and_ask():
            keep("raise")[1].exception()

        def keep_and_close():
            try:
                keep("raise")[0].close()
            except sk.EarlierSaveFailed:
                pass

        def like_torch():
            writer = dcp.FileSystemWriter(f"{place}-dcp")
            writer.write_data = broken
            return dcp.async_save(full(1), storage_writer=writer, no_dist=True)

        def like_torch_and_ask():
            like_torch().exception()

        def interrupt_when(due):
            # Sends a Ctrl-C as soon as something is so, and the end of the program waits for its saves.
            def send():
                while not (due() and waits(sys._current_frames()[threading.main_thread().ident])):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)
                sent.set()

            def waits(frame):
                return frame is not None and (frame.f_code.co_name == "_at_exit" or waits(frame.f_back))

            sent = threading.Event()
            threading.Thread(target=send, daemon=True).start()
            return sent

        class Waiting(FaultyStore):
            # Stands still at its first such operation until something has happened.
            verb, reached, until = "", False, None

            def begin(self, verb, name):
                if verb == self.verb and not self.reached:
                    self.reached = True
                    while not (self.until and self.until()):
                        time.sleep(0.01)
                return super().begin(verb, name)

        def interrupted(verb, name):
            store = Waiting(sk.LocalStore(f"{place}-{name}"))
            store.verb = verb
            handle = sk.async_save(full(1), store)
            sent = interrupt_when(lambda: store.reached)
            store.until = sent.is_set if name == "late" else lambda: not handle.wanted()

        def slowly_like_torch(name, go_on):
            writer = dcp.FileSystemWriter(f"{place}-{name}")
            writer.write_data = lambda *given: go_on.wait(60) and dcp.FileSystemWriter.write_data(writer, *given)
            dcp.async_save(full(1), storage_writer=writer, no_dist=True)

        def fork_like_torch():
            slowly_like_torch("fork", threading.Event())
            if (pid := os.fork()) > 0:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        def interrupted_like_torch(name):
            go_on = threading.Event()

            def hear(said):
                if said.msg.startswith("interrupted at exit: waiting"):
                    go_on.set() if name == "once" else os.kill(os.getpid(), signal.SIGINT)
                return True

            slowly_like_torch(name, go_on)
            logging.getLogger("shardkeep").addFilter(hear)
            interrupt_when(lambda: True)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        import shardkeep.dcp as dcp
        sk.save(full(1), sk.MemoryStore())  # loads what all of them need
        ways = [lambda: on_rank(0), lambda: on_rank(1), fail, leave, fork]
        ways += [lambda: keep("raise"), lambda: keep("warn"), keep_and_ask, keep_and_close, like_torch, like_torch_and_ask]
        ways += [lambda: interrupted("write_at", "early"), lambda: interrupted("delete", "late")]
        ways += [lambda: interrupted_like_torch("once"), lambda: interrupted_like_torch("twice")]
        ways += [fork_like_torch]
        gc.freeze()  # else each of them goes through all of torch when it ends
        pids = []
        for number, way in enumerate(ways):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.dup2(os.open(f"{place}.{number}", os.O_WRONLY | os.O_CREAT), 2)
                way()
                break
        else:
            print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
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
    with ExitStack() as inside:
        for _, process in processes.values():
            inside.enter_context(process)
            inside.callback(process.kill)
        for name, (place, process) in processes.items():
            out, err = process.communicate(timeout=PATIENCE_S)
            found[name] = place, process.returncode, out, err
    return found


@pytest.mark.parametrize(("way", "wanted"), [("after the call", 0), ("sys.exit", 3)])
def test_a_program_that_ends_with_a_save_in_flight(ended, way, wanted):
    """The interpreter waits for the save: the checkpoint is complete; `sys.exit` keeps its code."""
    place, code, _, err = ended[way]
    assert (code, err) == (wanted, "")
    assert says(place) == {1}
    assert names_in(place) == files_of_checkpoint(place)


def test_a_fork_does_not_wait_for_saves_of_its_parent(ended):
    """A process forked while a save is in flight (as data loaders do) ends by itself, and is told if it asks for one."""
    assert "fork 0" in ended["sys.exit"][2]
    assert "asked in a fork: this handle belongs to a save of process" in ended["sys.exit"][2]
    assert ast.literal_eval(ended["forks"][2])[15:] == [0]  # of `dcp.async_save`


def test_a_failure_nobody_asked_for_is_told_beside_another(ended):
    """It is printed, with what it came from, beside the error that ended the program, whose code stays."""
    place, _, out, _ = ended["forks"]
    assert ast.literal_eval(out)[2] == 1
    err = Path(f"{place}.2").read_text()
    assert "ZeroDivisionError" in err
    assert "its result was never retrieved" in err
    assert err.count("raise self.broken(verb, name)") == 1
    assert names_in(place) == set()


def test_a_program_that_ends_well_but_for_its_save(ended):
    """The failure is printed once, and the exit code stays; handlers, threads and buffers did their work."""
    place, code, out, err = ended["lost"]
    assert code == 0
    assert err.count(f"the save to {place} failed, and its result was never retrieved") == 1
    assert (err.count("Traceback"), err.count("raise self.broken(verb, name)")) == (1, 1), err
    assert out.count("a buffer in C, ") == 1
    assert out.replace("a buffer in C, ", "").splitlines() == ["a thread", "a later handler", "a handler"]
    assert Path(f"{place}.txt").read_text() == "a file"


def test_the_exit_code_after_a_lost_save(ended):
    """What the program gave to `sys.exit` stays, and a fork of it is not to blame."""
    *_, left, fork = ast.literal_eval(ended["forks"][2])[:5]
    assert (left, fork) == (3, 0)


def test_failures_of_a_checkpointer_and_of_dcp_are_logged_at_exit(ended):
    """Of a Checkpointer that was never closed (`on_error="raise"`) and of dcp: only what was not retrieved."""
    place, _, out, _ = ended["forks"]
    assert ast.literal_eval(out)[5:11] == [0] * 6
    logged = ["its result was never retrieved" in Path(f"{place}.{number}").read_text() for number in range(5, 11)]
    assert logged == [True, False, False, False, True, False]
    printed = [Path(f"{place}.{number}").read_text() for number in (5, 9)]
    assert [text.count("an asynchronous save, to") for text in printed] == [1, 1]
    assert printed[0].count(", in broken\n") == 1


def test_ctrl_c_while_the_end_of_a_program_waits(ended):
    """It cancels the save, which is logged; a save that is committed by then is not lost."""
    place, _, out, _ = ended["forks"]
    assert ast.literal_eval(out)[11:13] == [0, 0]
    assert f"abandoned before they were complete: saves to {place}-early" in Path(f"{place}.11").read_text()
    assert names_in(f"{place}-early") == set()
    assert Path(f"{place}.12").read_text() == ""
    assert says(f"{place}-late") == {1}


def test_ctrl_c_while_the_end_of_a_program_waits_for_dcp(ended):
    """The first logs which saves are waited for, the second ends the process at once."""
    place, _, out, _ = ended["forks"]
    assert ast.literal_eval(out)[13:15] == [0, 0]
    assert f"waiting for saves to '{place}-once'" in Path(f"{place}.13").read_text()
    assert Path(f"{place}-once/.metadata").exists()
    assert f"abandoned before they were complete: saves to '{place}-twice'" in Path(f"{place}.14").read_text()
    assert not Path(f"{place}-twice/.metadata").exists()


def test_a_failure_of_one_rank_is_told_at_exit_of_all(ended):
    """The rank that did not fail also logs the lines where the other did, once."""
    place, _, out, _ = ended["forks"]
    assert ast.literal_eval(out)[:2] == [0, 0]
    for rank in range(2):
        logged = Path(f"{place}.{rank}").read_text()
        assert logged.count("raise self.broken(verb, name)") == 1
        assert ("RemoteTraceback: on rank 1:" in logged) == (rank == 0)


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
    """A process that is gone leaves the checkpoint before as it was; the next save removes what it left."""
    sk.save(full(1), place)
    with Fork(vanish, place, at) as fork:
        said = fork.pipe.recv()
        assert fork.join() == 0, said
    assert says(place) == {1}
    assert names_in(place) != files_of_checkpoint(place) or at <= 3, said
    sk.async_save(full(3), place, overwrite=True).result(PATIENCE_S)
    assert says(place) == {3}
    assert names_in(place) == files_of_checkpoint(place)
