"""Ranks that sleep, die, stop or do something else: the others learn of it in time, and which rank it was."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import shardkeep as sk
from shardkeep import dcp
from shardkeep.dist import kv as mailbox
from shardkeep.dist import rendezvous as rendezvous_module
from shardkeep.dist.kv import PIECE_BYTES
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import current_world
from shardkeep.errors import CheckpointError, CheckpointException, RanksSilent
from tests.ranks.outcome import ask, ask_once, echo, rank

TIMEOUT_S = 1.0
SOON_S = 10.0
"""Much less than the deadlines of the tests that use it, and enough for a machine that is busy with other things."""


def signs():
    """Where ranks of a test leave signs for each other, so that no test has to guess how long something takes."""
    return PrefixStore("signs", dist.distributed_c10d._get_default_store())


def oversleep(sleeper):
    """Sleep on one rank until the others have given up; return the outcome, and how long it took after the work."""
    done = 0.0

    def work():
        nonlocal done
        if rank() == sleeper:
            signs().wait([f"done {other}" for other in range(dist.get_world_size()) if other != sleeper])
        done = time.monotonic()
        if rank() == 1:
            raise OSError("also this")
        return b""

    outcome = ask_once(work, timeout_s=TIMEOUT_S)
    after_s = time.monotonic() - done
    signs().set(f"done {rank()}", "")
    return outcome, after_s


def test_a_sleeping_rank_is_named_and_learns_of_it_when_it_wakes(rank_pool):
    heard = rank_pool.run(4, oversleep, 2)
    for outcome, _ in heard:
        assert outcome.kind == "RanksSilent"
        assert outcome.details == {"ranks": [2]}
        assert outcome.message.startswith(
            f"rank 2: did not answer within {TIMEOUT_S:g} s; it was last seen in 'write'\n"
        )
        assert outcome.by_rank[1].message == "also this"
        assert set(outcome.by_rank) == {1, 2}
    assert TIMEOUT_S <= heard[0][1] < SOON_S
    assert heard[2][1] < TIMEOUT_S


def test_a_sleeping_rank_0_is_named(rank_pool):
    heard = rank_pool.run(3, oversleep, 0)
    for outcome, after_s in heard[1:]:
        assert outcome.kind == "RanksSilent"
        assert outcome.details == {"ranks": [0]}
        assert outcome.message.startswith(f"rank 0: did not answer within {2 * TIMEOUT_S:g} s; it was last seen in ")
        assert 2 * TIMEOUT_S <= after_s < SOON_S
    assert heard[1][0].by_rank[1].message == "also this"
    assert "rank 1: OSError: also this" in heard[1][0].message
    rank_0, after_s = heard[0]
    assert rank_0.message.startswith(f"ranks 1-2: waited {2 * TIMEOUT_S:g} s for rank 0 and gave up\n")
    assert after_s < TIMEOUT_S


def die(doomed, timeout_s):
    def work():
        if rank() == doomed:
            signs().wait([f"at work {other}" for other in range(dist.get_world_size()) if other != doomed])
            os.kill(os.getpid(), signal.SIGKILL)
        signs().set(f"at work {rank()}", "")
        return b""

    return ask_once(work, timeout_s=timeout_s)


@pytest.mark.parametrize("doomed", [0, 3])
def test_a_rank_killed_in_a_phase_is_named(rank_pool, doomed):
    outcomes = rank_pool.run(4, die, doomed, TIMEOUT_S, expect_death=[doomed])
    for number in {0, 1, 2, 3} - {doomed}:
        assert (outcomes[number].kind, outcomes[number].details) == ("RanksSilent", {"ranks": [doomed]})


def test_the_death_of_the_store_is_noticed_at_once(rank_pool):
    """The store lives in rank 0's process, as torchrun has it, so its connection breaks with it."""
    outcomes = rank_pool.run(3, die, 0, 5 * SOON_S, expect_death=[0], store_on="rank0")
    for one in outcomes[1:]:
        assert (one.kind, one.details) == ("RanksSilent", {"ranks": [0]})
        assert one.message.startswith("rank 0: cannot be reached: ")
        assert "frame #" not in one.message
        assert one.seconds < SOON_S


def call_after_death():
    if rank() == 0:
        signs().wait(["ready"])
        os.kill(os.getpid(), signal.SIGKILL)
    signs().set("ready", "")
    with contextlib.suppress(RuntimeError):
        while not signs().check(["never"]):
            time.sleep(0.05)
    try:
        with rendezvous(current_world(timeout_s=5 * SOON_S), "save to a"):
            return "met"
    except RanksSilent as error:
        return str(error)


def test_a_call_begun_after_the_death_of_the_store_fails(rank_pool):
    heard = rank_pool.run(2, call_after_death, expect_death=[0], store_on="rank0")
    assert heard[1].startswith("rank 0: cannot be reached: ")


def freeze():
    """Rank 0 stops as a machine does that loses its power: no connection breaks, and nothing answers."""
    signs().set(f"pid {rank()}", str(os.getpid()))
    frozen = int(signs().get("pid 0"))

    def work():
        if rank() == 0:
            signs().wait(["joined"])
            os.kill(os.getpid(), signal.SIGSTOP)
        signs().set("joined", "")
        return b""

    with mock.patch.object(mailbox, "GRACE_S", 0.5):
        outcome = ask_once(work, timeout_s=0.5)
    if rank() == 1:
        os.kill(frozen, signal.SIGCONT)
    return outcome


def test_a_frozen_store_does_not_hold_the_others_past_their_deadline(rank_pool):
    heard = rank_pool.run(2, freeze, store_on="rank0")
    assert (heard[1].kind, heard[1].details) == ("RanksSilent", {"ranks": [0]})
    assert "the store did not answer" in heard[1].message
    assert heard[1].seconds < SOON_S


def vanish_after(failing):
    def work():
        if rank() == 0:
            time.sleep(0.6)  # by now the others look at the store but ten times a second
        if rank() in failing:
            raise OSError("no space")
        return b""

    outcome = ask_once(work)
    if rank() == 0:
        os._exit(0)
    return outcome


@pytest.mark.parametrize("failing", [[], [1]])
def test_rank_0_stays_until_the_others_have_its_answer(rank_pool, failing):
    """A script may end right after its save, and on rank 0 that ends the store."""
    outcomes = rank_pool.run(3, vanish_after, failing, expect_death=[0], store_on="rank0")[1:]
    message = "rank 1: OSError: no space\n(during 'write' of save to a)" if failing else ""
    assert [one.message for one in outcomes] == [message] * 2
    assert [one.answer for one in outcomes] == ([None, None] if failing else [b",,>1", b",,>2"])


def vanish_when_others_pause():
    """Rank 0 ends right after its call, while the others, as if they were many, look for its answer seldom."""
    seldom = mock.patch.multiple(mailbox, CHECKS_PER_S=0.1, FIRST_CHECKS_PER_S=0.5)
    with seldom, mock.patch.multiple(rendezvous_module, LINGER_S=0.0):
        outcome = ask_once(lambda: time.sleep(0.6 * (rank() == 0)) or b"", timeout_s=2.0)
    if rank() == 0:
        os._exit(0)
    return outcome


def test_rank_0_stays_longer_than_the_longest_pause_of_the_others(rank_pool):
    outcomes = rank_pool.run(3, vanish_when_others_pause, expect_death=[0], store_on="rank0")[1:]
    assert [one.message for one in outcomes] == ["", ""]
    assert [one.answer for one in outcomes] == [b",,>1", b",,>2"]


def differ(what):
    odd = rank() == 1
    title = "load from b" if odd and what == "title" else "save to a"
    phase = "read" if odd and what == "phase" else "write"
    return ask_once(bytes, title=title, phase=phase), ask_once(bytes)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("title", "ranks 0, 2: called 'save to a'\nrank 1: called 'load from b'\n"),
        ("phase", "ranks 0, 2: called phase 'write' of save to a\nrank 1: called phase 'read' of save to a\n"),
    ],
)
def test_ranks_in_different_calls_learn_who_called_what(rank_pool, what, message):
    for outcome, next_outcome in rank_pool.run(3, differ, what):
        assert outcome.kind == "RanksDisagree"
        assert outcome.message.startswith(message)
        assert outcome.seconds < SOON_S
        assert next_outcome.kind == ""


def wait_without_blocking_the_store():
    while not signs().check(["done"]):
        time.sleep(0.02)
    return b""


def last_seen(absent):
    if absent != "from the start":
        ask_once(bytes, title="load from b")
    if rank() == 1:
        if absent == "in the call":
            with rendezvous(current_world(timeout_s=TIMEOUT_S), "save to a"):
                signs().wait(["done"])
        if absent == "in a later phase":
            with rendezvous(current_world(timeout_s=TIMEOUT_S), "save to a") as meeting:
                ask(meeting, "plan", bytes)
                ask(meeting, "write", wait_without_blocking_the_store)
        return ""
    if absent == "in a later phase":
        with rendezvous(current_world(timeout_s=TIMEOUT_S), "save to a") as meeting:
            ask(meeting, "plan", bytes)
            outcome = ask(meeting, "write", bytes)
            signs().set("done", "")
        return outcome.message.splitlines()[0]
    outcome = ask_once(bytes, timeout_s=TIMEOUT_S)
    signs().set("done", "")
    return outcome.message.splitlines()[0]


@pytest.mark.parametrize(
    ("absent", "what"),
    [
        ("from the start", "it has made no call yet"),
        ("since a call", "it has not made call 2; its last was call 1, 'load from b'"),
        ("in the call", "it has begun this call, but no phase of it"),
        ("in a later phase", "it was last seen in 'write'"),
    ],
)
def test_of_a_silent_rank_is_said_what_it_did_last(rank_pool, absent, what):
    assert rank_pool.run(2, last_seen, absent)[0] == f"rank 1: did not answer within {TIMEOUT_S:g} s; {what}"


def skip_one(skipping):
    """Some ranks do something else while the others make the first call and give up; then all are there."""
    heard = []
    for step in (1, 2, 3):
        if step == 1 and rank() in skipping:
            signs().wait([f"done {other}" for other in range(dist.get_world_size()) if other not in skipping])
            continue
        outcome = ask_once(lambda: b"%d" % rank(), timeout_s=TIMEOUT_S, title=f"save to {step}")
        signs().set(f"done {rank()}", "")
        heard.append(outcome.kind or outcome.answer.decode())
    return heard


@pytest.mark.parametrize("skipping", [[2], [0], [0, 2], [1, 2]])
def test_a_missed_call_spoils_no_later_one(rank_pool, skipping):
    heard = rank_pool.run(3, skip_one, skipping)
    for number, said in enumerate(heard):
        fine = [f"0,1,2>{number}"] * 2
        assert said == (fine if number in skipping else ["RanksSilent", *fine])


CALLS = {
    "save": lambda state, where: sk.save(state, where, options=sk.Options(timeout_s=TIMEOUT_S)),
    "async_save": lambda state, where: sk.async_save(state, where, options=sk.Options(timeout_s=TIMEOUT_S)).result(),
    "load": lambda state, where: sk.load(state, where, options=sk.Options(timeout_s=TIMEOUT_S)),
    "dcp.save": lambda state, where: dcp.save(state, checkpoint_id=where),
    "step": lambda state, where: sk.Checkpointer(where, options=sk.Options(timeout_s=TIMEOUT_S)).step(1, state),
}


def call_on_one_rank(caller, call, where):
    lines, log, error_text = [], logging.getLogger("shardkeep"), ""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    try:
        with mock.patch.object(mailbox, "LATE_S", 0.2), mock.patch.dict(os.environ, SHARDKEEP_TIMEOUT_S="1"):
            if rank() == caller:
                try:
                    CALLS[call]({"w": torch.ones(4)}, where)
                except CheckpointException as error:
                    error_text = str(next(iter(error.failures.values()))[0])
                except CheckpointError as error:
                    error_text = str(error)
                signs().set("done", "")
            signs().wait(["done"])
    finally:
        log.removeHandler(handler)
    return [line for line in lines if "still waiting" in line], error_text


@pytest.mark.parametrize(
    ("caller", "call"), [(0, "async_save"), (0, "load"), (0, "dcp.save"), (0, "step"), (1, "save")]
)
def test_a_call_that_not_all_ranks_make_is_logged_while_it_waits(rank_pool, tmp_path, caller, call):
    """The log names the ranks that have not called, seldom, and the error says that all of them must."""
    lines, error = rank_pool.run(3, call_on_one_rank, caller, call, str(tmp_path / "a"))[caller]
    assert 1 <= len(lines) <= 3  # at first, and after three times as long
    away = "ranks 1-2" if caller == 0 else "rank 0"
    waits_s = 1 if caller == 0 else 2
    assert re.search(rf"still waiting for {away} after \d+ s, this rank gives up after {waits_s} s", lines[0])
    assert "all ranks must make this call, not only some of them" in lines[0]
    assert "hint: all ranks must make this call, not only some of them" in error


def slow_part():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardkeep").addHandler(handler)
    with mock.patch.object(mailbox, "LATE_S", 0.1):
        ask_once(lambda: time.sleep(0.6 * (rank() == 1)) or b"", timeout_s=SOON_S)
    logging.getLogger("shardkeep").removeHandler(handler)
    return lines


def test_a_slow_rank_that_has_called_is_no_news(rank_pool):
    assert rank_pool.run(3, slow_part) == [[]] * 3


def ask_on_after_silence():
    def work():
        if rank() == 1:
            signs().wait(["done 0", "done 2"])
        return b""

    with rendezvous(current_world(timeout_s=TIMEOUT_S), "save to a") as meeting:
        heard = [ask(meeting, "write", work), ask(meeting, "undo", bytes)]
        signs().set(f"done {rank()}", "")
    return heard


def test_a_silent_rank_is_not_waited_for_twice(rank_pool):
    for first, second in rank_pool.run(3, ask_on_after_silence):
        assert (first.kind, first.details) == ("RanksSilent", {"ranks": [1]})
        assert (second.kind, second.details) == ("RanksSilent", {"ranks": [1]})
        assert second.seconds < TIMEOUT_S


def count_keys_when_late(late):
    """Make a call of two phases, in the second of which some ranks come late."""

    def work():
        if rank() in late:
            signs().wait(["done 0"])
        return b"x" * (PIECE_BYTES + 1)

    dist.barrier()
    before = current_world(timeout_s=TIMEOUT_S).store.num_keys()
    dist.barrier()
    with rendezvous(current_world(timeout_s=TIMEOUT_S), "save to a") as meeting:
        ask(meeting, "plan", bytes)
        outcome = ask(meeting, "write", work, lambda said: [b""] * len(said))
    signs().set(f"done {rank()}", "")
    dist.barrier()
    return outcome.kind, current_world(timeout_s=TIMEOUT_S).store.num_keys() - before


@pytest.mark.parametrize("late", [[1], [1, 3], [1, 2, 3]])
def test_late_ranks_remove_their_keys(rank_pool, late):
    kind, in_time = rank_pool.run(4, count_keys_when_late, [])[0]
    late_kind, left = rank_pool.run(4, count_keys_when_late, late)[0]
    assert (kind, late_kind) == ("", "RanksSilent")
    assert left == in_time


def interrupted_while_waiting():
    """A real Ctrl-C, while rank 0 waits for rank 1."""
    began = time.monotonic()

    def work():
        if rank() == 0:
            subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -INT {os.getpid()}"])
        else:
            signs().wait(["interrupted"])
        return b""

    try:
        with rendezvous(current_world(timeout_s=5 * SOON_S), "save to a") as meeting:
            meeting.agree("write", work, echo)
    except (KeyboardInterrupt, CheckpointError) as error:
        signs().set("interrupted", "")
        return repr(error), time.monotonic() - began
    return "", 0.0


def test_ctrl_c_ends_the_wait_of_rank_0_and_the_others_hear_of_it(rank_pool):
    (zero, zero_s), (one, one_s) = rank_pool.run(2, interrupted_while_waiting)
    assert zero == "KeyboardInterrupt()"
    assert "rank 0: KeyboardInterrupt" in one
    assert max(zero_s, one_s) < SOON_S
