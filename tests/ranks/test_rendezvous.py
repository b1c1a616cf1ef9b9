"""A step on all ranks, and what becomes of each failure."""

import contextlib
import hashlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from shardkeep.dist import rendezvous as rendezvous_module
from shardkeep.dist.kv import PIECE_BYTES
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.errors import CheckpointError, StorageFull
from tests.ranks.outcome import ask, ask_once, echo, rank


def ask_for_rank():
    return ask_once(lambda: b"%d" % rank())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_rank_gets_its_answer(rank_pool, size):
    """Contributions reach `decide` in the order of ranks, and each rank gets the answer meant for it."""
    everyone = b",".join(b"%d" % number for number in range(size))
    answers = [outcome.answer for outcome in rank_pool.run(size, ask_for_rank)]
    assert answers == [everyone + b">%d" % number for number in range(size)]


def many_phases():
    with rendezvous(current_world(timeout_s=50), "save to a") as meeting:
        return [meeting.agree("again", lambda n=n: b"%d" % (n * rank()), echo) for n in range(5)]


def test_phases_of_one_name_follow_each_other(rank_pool):
    expected = [[b"0,%d,%d>%d" % (n, 2 * n, number) for n in range(5)] for number in range(3)]
    assert rank_pool.run(3, many_phases) == expected


def long_texts(nbytes, shared):
    def decide(payloads):
        digests = b",".join(hashlib.md5(payload).hexdigest().encode() for payload in payloads)
        body = digests + b"z" * nbytes
        return [body if shared else body + b"%d" % number for number in range(len(payloads))]

    with rendezvous(current_world(timeout_s=20), "save to a") as meeting:
        answer = meeting.agree("plan", lambda: b"%d" % rank() * nbytes, decide)
    tail = answer.rsplit(b"z", 1)[-1]
    return answer.split(b"z", 1)[0].decode(), tail.decode()


@pytest.mark.parametrize("shared", [True, False], ids=["same answer", "own answers"])
def test_long_contributions_and_answers_arrive_whole(rank_pool, shared):
    """A TCPStore cuts off a client that sends more than 8 MiB at once."""
    nbytes = 2 * PIECE_BYTES + 3
    digests = ",".join(hashlib.md5(b"%d" % number * nbytes).hexdigest() for number in range(3))
    heard = rank_pool.run(3, long_texts, nbytes, shared)
    assert heard == [(digests, "" if shared else str(number)) for number in range(3)]


def fail_on(failing):
    def work():
        if rank() in failing:
            raise StorageFull(f"no space for part {rank()}", hint="free some", errno=28, unsendable=object())
        return b""

    return ask_once(work)


@pytest.mark.parametrize("failing", [[0], [1], [2], [1, 3]])
def test_failures_reach_every_rank(rank_pool, failing):
    lines = [f"rank {number}: no space for part {number}" for number in failing]
    for number, one in enumerate(rank_pool.run(4, fail_on, failing)):
        assert one.kind == "StorageFull"
        assert one.message == "\n".join([*lines, "(during 'write' of save to a)"])
        assert one.hint == "free some"
        assert one.details == {"errno": 28}
        assert set(one.by_rank) == set(failing)
        assert all("raise StorageFull" in failure.trace for failure in one.by_rank.values())
        assert one.cause.startswith("StorageFull") == (number in failing)


def fail_deciding(wrong):
    def decide(payloads):
        if wrong == "count":
            return payloads[:-1]
        raise ZeroDivisionError("cannot balance")

    return ask_once(lambda: b"", decide)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [("raise", "ZeroDivisionError: cannot balance"), ("count", "ValueError: 2 answers were decided on for 3 ranks")],
)
def test_a_failing_decision_reaches_every_rank(rank_pool, wrong, text):
    outcomes = rank_pool.run(3, fail_deciding, wrong)
    assert {one.kind for one in outcomes} == {"CheckpointError"}
    assert {one.message for one in outcomes} == {f"rank 0: {text}\n(during 'write' of save to a)"}
    assert [bool(one.cause) for one in outcomes] == [True, False, False]


def fail_and_go_on():
    def work():
        if rank() == 1:
            raise OSError("no")
        return b""

    with rendezvous(current_world(timeout_s=50), "save to a") as meeting:
        failed = ask(meeting, "write", work)
        after = ask(meeting, "undo", lambda: b"%d" % rank())
    return failed.message.splitlines()[0], after.answer, ask_for_rank().answer


def test_ranks_can_go_on_after_a_failure(rank_pool):
    """A failed phase leaves all ranks in step, for the next phase and for the next call."""
    heard = rank_pool.run(3, fail_and_go_on)
    assert heard == [("rank 1: OSError: no", b"0,1,2>%d" % number, b"0,1,2>%d" % number) for number in range(3)]


class Stop(BaseException):
    pass


def be_stopped(kind, stopped, where):
    def stop():
        if rank() == stopped:
            raise kind("stop")
        return b""

    def decide(payloads):
        if where == "decide":
            raise kind("stop")
        return payloads

    try:
        return ask_once(stop if where == "work" else bytes, decide)
    except kind as error:
        return repr(error)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Stop])
@pytest.mark.parametrize(("stopped", "where"), [(0, "work"), (1, "work"), (0, "decide")])
def test_an_interrupt_goes_on_and_reaches_the_others(rank_pool, kind, stopped, where):
    outcomes = rank_pool.run(3, be_stopped, kind, stopped, where)
    assert outcomes.pop(stopped) == f"{kind.__name__}('stop')"
    for one in outcomes:
        assert one.message.startswith(f"rank {stopped}: {kind.__name__}: stop\n")
        assert one.seconds < 30


def stay_when_stopped(stopped):
    """Catch the interrupt within the call, and stay there until the others know and have tried to go on."""
    signs = dist.distributed_c10d._get_default_store()

    def work():
        if rank() == stopped:
            raise KeyboardInterrupt
        return b""

    with rendezvous(current_world(timeout_s=50), "save to a") as meeting:
        try:
            outcome = ask(meeting, "write", work)
        except KeyboardInterrupt:
            signs.wait([f"done {other}" for other in range(3) if other != stopped], timedelta(seconds=60))
            return []
        after = ask(meeting, "undo", bytes) if stopped > 0 else outcome
        signs.set(f"done {rank()}", "")
        return [outcome.message.splitlines()[0], after.message.splitlines()[0]]


@pytest.mark.parametrize("stopped", [0, 1])
def test_an_interrupt_reaches_the_others_before_the_call_ends(rank_pool, stopped):
    heard = rank_pool.run(3, stay_when_stopped, stopped)
    assert heard.pop(stopped) == []
    assert heard == [[f"rank {stopped}: KeyboardInterrupt"] * 2] * 2


def leave_early(leaving):
    began = time.monotonic()
    text = "nothing"
    try:
        with rendezvous(current_world(timeout_s=100), "save to a") as meeting:
            meeting.agree("plan", bytes, echo)
            if rank() == leaving:
                raise OSError("lost my disk")
            meeting.agree("write", bytes, echo)
    except (CheckpointError, OSError) as error:
        text = str(error)
    return time.monotonic() - began, text, ask_for_rank().answer


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_leaves_between_phases_is_not_waited_for(rank_pool, leaving):
    heard = rank_pool.run(3, leave_early, leaving)
    assert max(seconds for seconds, _, _ in heard) < 30
    assert [answer for _, _, answer in heard] == [b"0,1,2>0", b"0,1,2>1", b"0,1,2>2"]
    texts = [text for _, text, _ in heard]
    assert texts.pop(leaving) == "lost my disk"
    assert all(text.startswith(f"rank {leaving}: OSError: lost my disk\n") for text in texts)


def in_the_background():
    """Begin a save, do a whole load, and finish the save on another thread."""
    world = current_world(timeout_s=50)
    late = []
    save = contextlib.ExitStack()
    meeting = save.enter_context(rendezvous(world, "save to a"))

    def finish():
        with save:
            time.sleep(0.02 * rank())
            late.append(meeting.agree("write", lambda: b"s%d" % rank(), echo))

    thread = threading.Thread(target=finish)
    thread.start()
    with rendezvous(world, "load from b") as other:
        first = other.agree("read", lambda: b"l%d" % rank(), echo)
    thread.join()
    return first, late[0]


def test_a_call_may_go_on_in_the_background(rank_pool):
    assert rank_pool.run(3, in_the_background) == [(b"l0,l1,l2>%d" % n, b"s0,s1,s2>%d" % n) for n in range(3)]


def count_keys(sizes, times):
    world = current_world(timeout_s=20)
    counts = []
    for turn, nbytes in enumerate(sizes):
        for _ in range(times if turn else 1):
            with rendezvous(world, "save to a") as meeting:
                meeting.agree("plan", lambda n=nbytes: b"x" * n, lambda payloads: [payloads[0]] * len(payloads))
                with contextlib.suppress(CheckpointError):
                    meeting.agree("write", lambda: 1 / 0, echo)
        dist.barrier()
        counts.append(world.store.num_keys())
        dist.barrier()
    return counts


@pytest.mark.parametrize(("sizes", "times"), [([0, 5000, 0], 100), ([0, 2 * PIECE_BYTES], 1)], ids=["many", "long"])
def test_calls_leave_no_keys(rank_pool, sizes, times):
    assert len(set(rank_pool.run(3, count_keys, sizes, times)[0])) == 1


def on_all_ranks(stores, work):
    """Run `work` on a thread for each store, which is a rank's own."""
    worlds = [World(number, len(stores), store, timeout_s=30) for number, store in enumerate(stores)]
    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(work, worlds))


@pytest.fixture(params=["tcp", "file", "hash"])
def stores(request, tmp_path):
    """Five connections to one store of each of torch's kinds, which differ in what they can do."""
    if request.param == "hash":
        return [PrefixStore("a", HashStore())] * 5
    if request.param == "file":
        return [PrefixStore("a", FileStore(str(tmp_path / "store"), 5)) for _ in range(5)]
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [PrefixStore("a", TCPStore("127.0.0.1", server.port, is_master=False)) for _ in range(4)] + [server]


def save_in_three_phases(world):
    with rendezvous(world, "save to a") as meeting:
        planned = meeting.agree("plan", lambda: b"%d" % world.rank * 200, echo)
        written = meeting.agree("write", lambda: b"%d" % world.rank, lambda said: [b"".join(said)] * len(said))
        return planned[-2:], written, meeting.agree("commit", bytes, lambda said: [b"c"] * len(said))


@pytest.mark.parametrize("ranks_per_log", [2, 32])
def test_ranks_meet_through_each_kind_of_store(stores, monkeypatch, ranks_per_log):
    """Many saves leave no more keys than the first: 200 calls of five ranks here."""
    monkeypatch.setattr(rendezvous_module, "LOG_RANKS", ranks_per_log)
    stores[-1] = stores[-1] if isinstance(stores[-1], PrefixStore) else PrefixStore("a", stores[-1])
    saved = [(b">%d" % number, b"01234", b"c") for number in range(5)]
    assert on_all_ranks(stores, save_in_three_phases) == saved
    before = stores[0].num_keys()
    assert on_all_ranks(stores, lambda world: [save_in_three_phases(world) for _ in range(200)][-1]) == saved
    assert stores[0].num_keys() == before


LOOKS = {"compare_set", "check", "multi_get", "has_extended_api"}
"""Requests by which a rank looks whether something is there, and how often it does depends on time."""


class CountingStore:
    def __init__(self, store):
        self.requests = Counter()
        self._store = store

    def __getattr__(self, name):
        self.requests[name] += 1
        return getattr(self._store, name)


def test_a_rank_makes_few_requests_and_rank_0_not_many_more(monkeypatch):
    """Apart from looks at what is awaited, a rank makes a few requests in each phase, and rank 0 one for each log."""
    monkeypatch.setattr(rendezvous_module, "NOTE_S", 60)  # however busy the machine is
    store = HashStore()
    stores = [CountingStore(store) for _ in range(48)]

    def save(world):
        with rendezvous(world, "save to a") as meeting:
            for phase in ("plan", "write", "commit"):
                meeting.agree(phase, lambda: b"%d" % world.rank, lambda said: [b"ok"] * len(said))

    on_all_ranks([store] * 48, save)  # in its first call a rank makes a request more
    on_all_ranks(stores, save)
    rank_0, *others = ({kind: n for kind, n in one.requests.items() if kind not in LOOKS} for one in stores)
    others.remove({"add": 2, "append": 3, "delete_key": 3})  # the last to leave
    assert others == [{"add": 2, "append": 3}] * 46
    notes, replies, logs, replies_read = 3, 3, 2 * 3, 2
    assert rank_0 == {"add": 1, "set": notes + replies, "delete_key": logs + replies_read}


def test_many_logs_are_read_some_at_a_time(monkeypatch):
    """What ranks say arrives in their order, whichever log is complete first, and nothing stays behind."""
    monkeypatch.setattr(rendezvous_module, "LOG_RANKS", 1)
    store = HashStore()
    keys, heard = [], []

    def save(world):
        with rendezvous(world, "save to a") as meeting:
            for phase in ("plan", "write", "commit"):
                meeting.agree(phase, lambda: b"%d" % world.rank, lambda said: heard.append(said) or said)

    for _ in range(2):
        on_all_ranks([store] * 40, save)
        keys.append(store.num_keys())
    assert heard == [[b"%d" % rank for rank in range(40)]] * 6
    assert keys[0] == keys[1]


def repeat_first(payloads):
    return [payloads[0]] * len(payloads)


def count_keys_when_leaving(leaving, nbytes, decide):
    """Count the keys that remain when a rank leaves between two phases, and then all make a call again."""
    counts = []
    for who in (None, leaving):
        with (
            contextlib.suppress(CheckpointError, OSError),
            rendezvous(current_world(timeout_s=50), "save to a") as meeting,
        ):
            meeting.agree("plan", lambda: b"x" * nbytes, decide)
            if rank() == who:
                raise OSError("lost my disk")
            meeting.agree("write", lambda: b"x" * 50, echo)
        ask_for_rank()
        dist.barrier()
        counts.append(current_world(timeout_s=50).store.num_keys())
        dist.barrier()
    return counts[1] - counts[0]


@pytest.mark.parametrize(
    ("leaving", "nbytes", "decide"), [(0, 5000, echo), (1, 5000, echo), (0, 5 << 20, repeat_first)]
)
def test_a_rank_that_leaves_leaves_no_keys(rank_pool, leaving, nbytes, decide):
    assert rank_pool.run(3, count_keys_when_leaving, leaving, nbytes, decide) == [0] * 3


def test_a_single_rank_sees_its_own_exceptions():
    class OwnError(Exception):
        pass

    def fail(*args):
        raise OwnError("mine")

    with rendezvous(World(0, 1), "save to a") as meeting:
        assert meeting.agree("plan", lambda: b"p", lambda payloads: [payloads[0] + b"!"]) == b"p!"
        with pytest.raises(OwnError, match=r"^mine$"):
            meeting.agree("write", fail, echo)
        with pytest.raises(OwnError, match=r"^mine$"):
            meeting.agree("write", bytes, fail)
