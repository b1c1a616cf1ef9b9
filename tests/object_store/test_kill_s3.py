"""kill -9 of a process that saves to S3, at every stage of a save: nothing is lost, and what it leaves is swept."""

import functools
import random
import time

import shardkeep as sk
from shardkeep.cli.main import main
from shardkeep.format.record import RECORD_NAME
from tests.faults.forks import Fork
from tests.object_store.jobs import OPTIONS, load_and_compare, save_for_ever, state_of
from tests.object_store.proxy import Proxy, Rule
from tests.support.uploads import unfinished

KILLS = 6
A_SAVE = 28
"""About as many requests as one save makes."""


def litter(place):
    return {info.name for info in place.list()} - {RECORD_NAME, *sk.open(place).record.names}


def until(what):
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_killed_at_any_request(s3_server, s3_place, monkeypatch):
    rng = random.Random(0)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    root = s3_place(part_bytes=5 << 20)
    place = root.place("step-1")
    sk.save(state_of(0), place, step=0, options=OPTIONS)
    latest = torn = 0
    with Proxy(s3_server.port) as proxy:
        options = {**s3_server.options, "endpoint": proxy.endpoint, "part_bytes": 5 << 20}
        for kill in range(KILLS):
            # Some while the parts of an upload are under way, which last longest elsewhere and are too quick here.
            at_parts = kill % 2
            proxy.rules = [Rule("stall", path="partNumber=2", after=kill // 2)] if at_parts else []
            with Fork(save_for_ever, place.url, options, latest + 1) as fork:
                assert fork.pipe.recv() == "ready"
                if at_parts:
                    until(lambda: bool(proxy.counts.faults))
                else:
                    until(functools.partial(proxy.has_seen, rng.randrange(A_SAVE * 2)))
                fork.kill()
                reported = fork.said()
            ck = sk.open(place)
            ck.verify()
            latest = max([latest, *reported])
            assert ck.step in (latest, latest + 1)
            latest = ck.step
            load_and_compare(place, latest)
            torn += bool(litter(place))
            assert unfinished(place) or not at_parts
            if kill == KILLS - 1:
                assert main(["prune", root.url, "--keep-last", "1", "--yes"]) == 0
            else:
                latest += 1
                sk.save(state_of(latest), place, step=latest, overwrite=True, options=OPTIONS)
            assert litter(place) == set()
    assert torn >= KILLS // 2, "the kills missed the saves"
    load_and_compare(place, latest)
