"""A job that promotes from a disk to S3 is killed in the middle of an upload: the far copy does not exist, and comes to be."""

import time

import shardkeep as sk
from shardkeep.storage.resolve import open_place
from tests.faults.forks import Fork
from tests.object_store.jobs import OPTIONS, load_and_compare, state_of
from tests.object_store.proxy import Proxy, Rule
from tests.support.uploads import unfinished


def train(near, far, steps):
    """Go on from what there is; returns the step that this was."""
    with sk.Checkpointer(near, every_steps=1, asynchronous=False, promote_to=far, options=OPTIONS) as ckpt:
        restored = ckpt.restore_latest(state_of(0))
        for step in steps:
            ckpt.step(step, state_of(step))
    return restored


def doomed(pipe, near, url, options):
    pipe.send("ready")
    train(near, open_place(url, **options), range(1, 2))


def test_a_promotion_is_killed_in_mid_upload(tmp_path, s3_server, s3_place):
    """The near checkpoint is there, the far one is not; the next job goes on from the near one, and promotes both."""
    near, far = str(tmp_path / "near"), s3_place(part_bytes=5 << 20)
    with Proxy(s3_server.port) as proxy:
        proxy.rules = [Rule("stall", path="partNumber=2")]
        options = {**s3_server.options, "endpoint": proxy.endpoint, "part_bytes": 5 << 20}
        with Fork(doomed, near, far.url, options) as fork:
            assert fork.pipe.recv() == "ready"
            end = time.monotonic() + 60
            while not proxy.counts.faults:
                assert time.monotonic() < end
                time.sleep(0.002)
            fork.kill()
    assert sk.Checkpointer(near).all_steps() == [1]
    assert sk.Checkpointer(far).all_steps() == []
    assert [name.startswith("step-1/") for name in unfinished(far)] == [True]

    assert train(near, far, range(2, 3)) == 1
    assert sorted(info.name for info in far.list()) == ["latest"]
    for step in (1, 2):
        place = far.place(f"step-{step}")
        load_and_compare(place, step)
        assert {info.name for info in place.list()} == {"shardkeep.json", *sk.open(place).record.names}
