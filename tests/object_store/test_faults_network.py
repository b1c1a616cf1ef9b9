"""A network and a service that go wrong, between the engine and a real S3 server."""

import errno
import time

import pytest

import shardkeep as sk
from shardkeep.format.record import RECORD_NAME
from shardkeep.testing.thread_ranks import thread_outcomes
from tests.object_store.jobs import OPTIONS, load_and_compare, state_of
from tests.object_store.proxy import Proxy, Rule
from tests.support.uploads import unfinished

QUICK = {"timeout_s": 5.0, "retries": 6, "retry_s": 20.0, "part_bytes": 5 << 20}
"""Quick, and yet not too quick for a server that shares two cores with three other tests."""
DEADLINE_S = 60.0
"""Far beyond what all tries of one request take: who is not done by then waits for ever."""


@pytest.fixture
def place(proxy, s3_place):
    proxy.rules = []
    place = s3_place(endpoint=proxy.endpoint, **QUICK)
    save(place, 1)
    yield place
    proxy.rules = []


def save(place, k):
    return sk.save(state_of(k), place, step=k, overwrite=True, options=OPTIONS)


def assert_whole(place, k):
    ck = sk.open(place)
    ck.verify()
    assert ck.step == k
    load_and_compare(place, k)
    assert {info.name for info in place.list()} == {RECORD_NAME, *ck.record.names}


@pytest.mark.parametrize(
    "fault", ["refuse", "cut_request", "lose_answer", "cut_answer", "end_answer", "slow_down", "broken"]
)
def test_every_request_fails_once(proxy, place, fault):
    proxy.rules = [Rule(fault, first=True)]
    save(place, 2)
    assert proxy.counts.faults[fault] >= 10
    proxy.rules = [Rule(fault, first=True)]
    load_and_compare(place, 2)
    assert proxy.counts.faults[fault] >= 4
    proxy.rules = []
    if unfinished(place):  # one whose beginning was not answered was begun twice
        assert fault in {"lose_answer", "cut_request", "cut_answer", "end_answer"}
    assert_whole(place, 2)


def test_a_storm(proxy, place):
    """Three ranks save and load while a third of all requests fail; every reported outcome is true."""
    kinds = ["slow_down", "refuse", "cut_answer", "cut_request", "lose_answer", "broken", "delay", "trickle"]
    storm = [Rule(kind, chance=0.05, delay_s=0.02) for kind in kinds]

    def main(world):
        for k in (2, 3, 4):  # names of blobs, and so the faults, differ from run to run: one round may be lucky
            sk.save(state_of(k, world.rank, 3), place, step=k, overwrite=True, group=world, options=OPTIONS)
            load_and_compare(place, k, world.rank, 3, world)

    proxy.rules = storm
    began = time.monotonic()
    outcomes = thread_outcomes(3, main, timeout_s=DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S
    failed = [outcome for outcome in outcomes if outcome is not None]
    assert failed or sum(proxy.counts.faults.values()) > 10
    proxy.rules = []
    assert all(isinstance(outcome, sk.StorageError) for outcome in failed), failed
    assert sk.open(place).step in ((1, 2, 3, 4) if failed else (4,))
    save(place, 5)
    assert_whole(place, 5)


@pytest.mark.parametrize(
    ("fault", "after", "number"),
    [
        ("slow_down", 0, errno.EBUSY),
        ("slow_down", 13, errno.EBUSY),
        ("stall", 9, errno.ETIMEDOUT),
        ("refuse", 11, errno.ECONNRESET),
        ("refuse", 15, errno.ECONNRESET),
    ],
)
def test_an_outage(proxy, s3_place, place, fault, after, number):
    """A save ends in time; the checkpoint that was there is whole, and the next save removes what is left."""
    hasty = s3_place(
        path=place.prefix.strip("/"), endpoint=proxy.endpoint, timeout_s=0.3, retries=1, retry_s=1.0, part_bytes=5 << 20
    )
    proxy.rules = [Rule(fault, after=after)]
    began = time.monotonic()
    with pytest.raises(sk.StorageError) as caught:
        save(hasty, 2)
    assert time.monotonic() - began < DEADLINE_S
    assert caught.value.errno in {number, errno.ECANCELED}
    assert place.url in str(caught.value)
    proxy.rules = []
    ck = sk.open(place)
    ck.verify()
    assert ck.step == 1
    save(place, 3)
    assert_whole(place, 3)


def test_a_stalled_request_is_cut_and_made_again(proxy, s3_place, place):
    cutting = s3_place(path=place.prefix.strip("/"), endpoint=proxy.endpoint, **{**QUICK, "timeout_s": 1.0})
    proxy.rules = [Rule("stall", path="partNumber=1", times=1), Rule("stall", method="HEAD", times=1)]
    save(cutting, 2)
    assert proxy.counts.faults["stall"] == 2
    proxy.rules = [Rule("stall", path="safetensors", after=1, times=1)]
    load_and_compare(cutting, 2)
    assert proxy.counts.faults["stall"] == 1


@pytest.mark.parametrize("what", ["skindex", "blocks", "safetensors", RECORD_NAME])
def test_what_changes_on_the_way_down_is_noticed(proxy, place, what):
    """A flipped bit or a missing half of any answer is an error that names the file, or is asked for again."""
    proxy.rules = [Rule("flip_answer", method="GET", path=what, after=what == "safetensors")]
    with pytest.raises(sk.DamagedCheckpoint) as caught:
        load_and_compare(place, 1)
    assert what in str(caught.value)
    proxy.rules = [Rule("shorten_answer", method="GET", path=what, first=True)]
    try:
        load_and_compare(place, 1)
    except sk.DamagedCheckpoint as exc:
        assert what in str(exc)  # noqa: PT017 - it need not be raised
    assert proxy.counts.faults["shorten_answer"] == 1


def test_what_changes_on_the_way_up_is_noticed_by_the_server(proxy, place):
    """A small blob is sent again; a part of an upload fails the save, and nothing of it stays."""
    proxy.rules = [Rule("flip_request", method="PUT", path="claim|skindex|blocks|shardkeep.json", first=True)]
    save(place, 2)
    assert proxy.counts.faults["flip_request"] == 4
    proxy.rules = []
    assert_whole(place, 2)
    proxy.rules = [Rule("flip_request", method="PUT", path="partNumber=2")]
    with pytest.raises(sk.StorageError, match="the service received other bytes than were sent: 400 BadDigest"):
        save(place, 3)
    proxy.rules = []
    assert_whole(place, 2)


def test_without_checksums_on_the_way_up_it_is_noticed_by_a_load(proxy, s3_place, place):
    """If a service accepts no checksums, bytes changed on the way up are found when they are read."""
    trusting = s3_place(path=place.prefix.strip("/"), endpoint=proxy.endpoint, checksum_algorithm="none", **QUICK)
    proxy.rules = [Rule("flip_request", method="PUT", path="partNumber=2")]
    save(trusting, 2)
    with pytest.raises(sk.ChecksumMismatch):
        load_and_compare(trusting, 2)


def test_a_run_does_not_go_back_for_a_flipped_bit(s3_server, s3_place):
    """The newest checkpoint is restored though its record comes damaged once, wherever records are read."""
    with Proxy(s3_server.port) as proxy:
        root = s3_place(endpoint=proxy.endpoint)
        for step in (1, 2):
            sk.save(state_of(step), root.place(f"step-{step}"), step=step, options=OPTIONS)
        proxy.rules = [Rule("flip_answer", method="GET", path="step-2/shardkeep.json", times=1)]
        with sk.Checkpointer(root, options=OPTIONS) as ckpt:
            assert ckpt.restore_latest(state_of(0)) == 2
        assert proxy.counts.faults["flip_answer"] == 1
