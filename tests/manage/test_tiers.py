"""A Checkpointer that promotes to a second root: what is where, what is kept, what is restored."""

import errno
import logging
import shutil
from datetime import datetime, timezone

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import CheckpointNotFound, NotPromoted, StorageError
from shardkeep.events import Event, PromotionBegan, PromotionFinished, StepSkipped
from shardkeep.format.record import Blob, Record, Totals
from shardkeep.manage.entry import Entry
from shardkeep.manage.replicate import to_replicate
from shardkeep.manage.retention import KeepAll, KeepEvery, KeepLast
from shardkeep.storage.local import LocalStore
from tests.manage.scene import Broken, FarRoot, checkpointer, damage, empty_state, state_at, tear, train

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def committed(root):
    return sorted(entry.step for entry in sk.Catalog(root).entries() if entry.committed)


def files_of(place):
    return {file.name: file.read_bytes() for file in place.iterdir()}


def entry(step, save_id="a", *, timeline=0, pinned=False, **more):
    record = Record(
        save_id=save_id,
        step=step,
        saved_at="",
        writer="",
        world_size=1,
        totals=Totals(tensors=0, chunks=0, values=0, tensor_bytes=0),
        index=Blob(name="i", nbytes=0, checksum=""),
        files=[],
    )
    kept = {"status": "committed", "record": record, "timeline": timeline, "pinned": pinned, **more}
    return Entry(name=f"step-{step}", step=step, save_id=save_id if kept["record"] else "", **kept)


@pytest.mark.parametrize(
    ("near", "far", "more", "wanted"),
    [
        ([entry(1), entry(2)], [], {}, [2, 1]),
        ([entry(1), entry(2)], [entry(2)], {}, [1]),
        ([entry(1), entry(2), entry(3)], [], {"policy": KeepLast(2)}, [3, 2]),
        ([entry(1)], [entry(2), entry(3)], {"policy": KeepLast(2)}, []),
        ([entry(1)], [entry(2), entry(3)], {"policy": KeepEvery(1)}, [1]),
        ([entry(1), entry(10), entry(11, pinned=True), entry(12)], [], {"every": 10}, [11, 10]),
        ([entry(1), entry(10), entry(12)], [], {"every": 10, "newest": True}, [12, 10]),
        ([entry(1), entry(2)], [], {"left_out": {("step-2", "a")}}, [1]),
        ([entry(2, "b")], [entry(2, "a")], {}, [2]),  # saved again
        ([entry(2, "a")], [entry(2, "b")], {}, []),  # an old disk that came back
        ([entry(2, "a", timeline=1)], [entry(2, "b")], {}, [2]),  # gone back, whatever clocks say
        ([entry(2, status="damaged", record=None), entry(1, status="unfinished", record=None)], [], {}, []),
        ([entry(2)], [entry(2, status="damaged", record=None, problem=sk.DamagedCheckpoint("x"))], {}, [2]),
        ([entry(2)], [entry(2, status="damaged", record=None, problem=StorageError("x"))], {}, []),
        ([entry(2)], [entry(2, record=None, layout="torch")], {}, []),
        ([entry(2, record=None, layout="torch")], [], {}, []),
    ],
)
def test_what_is_to_be_promoted(near, far, more, wanted):
    """What is due, is not there as this save or a newer one, and would be kept."""
    found = to_replicate(near, far, **{"policy": KeepAll(), "now": NOW, **more})
    assert [each.step for each in found] == wanted


@pytest.mark.parametrize("codecs", [None, ["zstd"]])
def test_both_roots_are_ordinary_ones(tmp_path, codecs):
    """The copy has the very same bytes, is verified, and is reported by events."""
    near, far, heard = tmp_path / "near", tmp_path / "far", list[Event]()
    with checkpointer(near, promote_to=far, every_steps=1, on_event=heard.append, codecs=codecs) as ckpt:
        for step in (1, 2):  # of two that are due at the same time, the newer one would be first
            train(ckpt, range(step, step + 1))
            ckpt.wait()
        assert committed(near) == committed(far) == [1, 2]
        assert (far / "latest").read_text() == "step-2\n"
        assert (far / "lease.json").exists()
    for name in ("step-1", "step-2"):
        assert files_of(near / name) == files_of(far / name)
        assert sk.open(far / name).verify().files == 1
    assert {file.name for file in far.iterdir()} == {"latest", "step-1", "step-2"}
    began = [event for event in heard if isinstance(event, PromotionBegan)]
    ended = [event for event in heard if isinstance(event, PromotionFinished)]
    assert [event.step for event in ended] == [1, 2] == [event.step for event in began]
    assert ended[0].where == str(far / "step-1")
    assert ended[0].source == str(near / "step-1")
    assert (
        ended[0].bytes_copied
        == ended[0].bytes_total
        == sum(map(len, files_of(far / "step-1").values())) - len((far / "step-1/shardkeep.json").read_bytes())
    )
    state = empty_state()
    with checkpointer(far) as ckpt:  # it needs nothing of the other
        assert ckpt.restore_latest(state) == 2
    assert torch.equal(state["w"], state_at(2)["w"])


def test_each_root_has_its_own_retention(tmp_path):
    """The far one keeps more here; what is pinned is pinned in both, and is there for all who ask for steps."""
    near, far = tmp_path / "near", FarRoot()
    with checkpointer(near, promote_to=far, every_steps=1, keep_last=1, keep_promoted=KeepLast(3)) as ckpt:
        train(ckpt, range(1, 3))
        ckpt.wait()
        ckpt.pin(1)
        train(ckpt, range(3, 7), metrics={"loss": 1.0})
        ckpt.wait()
        assert committed(near) == [6]
        assert committed(far) == [1, 4, 5, 6] == ckpt.all_steps()
        assert ckpt.latest_step() == 6
        assert ckpt.best_step("loss") == 6
        assert (near / "pin.step-1").exists()
        ckpt.unpin(1)
        ckpt.save(7, state_at(7))
        ckpt.wait()
        assert committed(far) == [5, 6, 7]
        with pytest.raises(CheckpointNotFound, match="there is no checkpoint of step 1"):
            ckpt.pin(1)
    assert far.get("latest", limit=99) == b"step-7\n"


def test_some_steps_are_promoted_and_the_newest_at_the_end(tmp_path):
    near, far = tmp_path / "near", FarRoot()
    with checkpointer(near, promote_to=far, promote_every=4, every_steps=1) as ckpt:
        train(ckpt, range(1, 4))
        ckpt.wait()
        ckpt.pin(3)
        train(ckpt, range(4, 7))
        ckpt.wait()
        assert committed(far) == [3, 4]
        assert "pin.step-3" in {info.name for info in far.list()}
    assert committed(far) == [3, 4, 6]
    assert committed(near) == [1, 2, 3, 4, 5, 6]


def test_a_job_that_only_reads_takes_nothing(tmp_path):
    """No lease, no promotion: not even of what an earlier job left."""
    near, far = tmp_path / "near", FarRoot()
    with checkpointer(near) as ckpt:
        ckpt.save(1, state_at(1))
    with checkpointer(near, promote_to=far) as ckpt:
        assert ckpt.restore_latest(empty_state()) == 1
    assert not list(far.list())
    assert not list(far.places())


def test_two_jobs_do_not_promote_to_one_root(tmp_path):
    far = FarRoot()
    with checkpointer(tmp_path / "a", promote_to=far) as first, checkpointer(tmp_path / "b", promote_to=far) as second:
        first.save(1, state_at(1))
        with pytest.raises(sk.RootInUse, match="another Checkpointer saves here"):
            second.save(2, state_at(2))
    assert committed(far) == [1]
    assert not (tmp_path / "b" / "step-2").exists()
    with pytest.raises(sk.StateError, match="is the root itself"):
        checkpointer(tmp_path / "a", promote_to=tmp_path / "b" / ".." / "a")


def two_roots(tmp_path, steps=2):
    near, far = tmp_path / "near", tmp_path / "far"
    with checkpointer(near, promote_to=far, every_steps=1) as ckpt:
        train(ckpt, range(1, steps + 1))
    return near, far


REASONS = {
    "none": "",
    "damaged": "ChecksumMismatch",
    "record": "the commit record is damaged",
    "torn": "has no whole copy of it",
    "gone": "has no whole copy of it",
    "disk": "StorageError: ",
}


@pytest.mark.parametrize(
    ("how", "mishap"),
    [
        *(("latest", mishap) for mishap in REASONS),
        *(("step", mishap) for mishap in ("damaged", "record", "gone", "disk")),
        *(("best", mishap) for mishap in ("damaged", "record")),
    ],
)
def test_the_nearest_valid_copy_is_restored(tmp_path, how, mishap, caplog):
    """The near one, or the far one of the same step where the near one is missing or damaged; it says which, and why."""
    near, far = tmp_path / "near", tmp_path / "far"
    with checkpointer(near, promote_to=far, every_steps=1) as ckpt:
        train(ckpt, range(1, 3), metrics={"loss": 1.0})
    heard, reason = list[Event](), REASONS[mishap]
    root = FarRoot(Broken("open", "state-", errno.EIO), LocalStore(near)) if mishap == "disk" else near
    if mishap == "damaged":
        damage(near / "step-2")
    if mishap == "record":
        (near / "step-2/shardkeep.json").write_bytes(b"{}")
    if mishap == "torn":
        tear(near / "step-2")
    if mishap == "gone":
        shutil.rmtree(near)
    state = empty_state()
    with checkpointer(root, promote_to=far, retries=0, on_event=heard.append) as ckpt, caplog.at_level(logging.INFO):
        assert ckpt.latest_step() == ckpt.best_step("loss") == 2
        assert ckpt.all_steps() == [1, 2]
        if how == "latest":
            ckpt.restore_latest(state)
        elif how == "step":
            ckpt.restore(2, state)
        else:
            ckpt.restore_best(state, "loss")
        found = ckpt.last_restore
    assert torch.equal(state["w"], state_at(2)["w"])
    assert (found.step, found.where) == (2, str(far if reason else near))
    if (mishap, how) == ("record", "best"):  # what it says of a metric cannot be read
        reason = "has no whole copy of it"
    assert reason in found.why
    passed = reason not in ("", "has no whole copy of it")
    assert [each.where for each in found.skipped] == ([str(near)] if passed else [])
    assert len([event for event in heard if isinstance(event, StepSkipped)]) == len(found.skipped)
    assert f"step 2 is restored from {found.where}" in caplog.text


def test_a_step_that_is_only_far_is_newer_than_older_near_ones(tmp_path):
    """Another machine went on from here, and its disk is gone; what is saved next goes on from there."""
    near, far = two_roots(tmp_path)
    with checkpointer(tmp_path / "other", promote_to=far) as ckpt:
        assert ckpt.restore_latest(empty_state()) == 2
        ckpt.save(3, state_at(3))
    with checkpointer(near, promote_to=far) as ckpt:
        with pytest.raises(sk.CheckpointExists, match="has checkpoints up to step 3"):
            ckpt.save(3, state_at(3))
        assert ckpt.restore_latest(empty_state()) == 3
        with pytest.raises(sk.CheckpointExists, match="a committed checkpoint is already there"):
            ckpt.save(3, state_at(3))
        ckpt.save(4, state_at(4))
        ckpt.wait()
    assert committed(near) == [1, 2, 4]
    assert committed(far) == [1, 2, 3, 4]


def test_going_back_replaces_far_steps_too(tmp_path):
    """A new save of a step takes the place of the old one, also where only the far root has that; a pinned one stays."""
    near, far = two_roots(tmp_path, 4)
    shutil.rmtree(near / "step-3")
    with checkpointer(near, promote_to=far) as ckpt:
        ckpt.pin(4)
        ckpt.restore(1, empty_state())
        for step in (2, 3):
            ckpt.save(step, state_at(10 * step))
        assert ckpt.step(4, state_at(40), force=True) is None
        ckpt.wait()
        assert ckpt.latest_step() == 3
        shutil.rmtree(near / "step-3")
        state = empty_state()
        assert ckpt.restore_latest(state) == 3
    assert state["step"] == 30
    for step in (2, 3):
        found = sk.Catalog(far).find(step)
        assert found.timeline == 1
        assert len(files_of(far / f"step-{step}")) == 3  # nothing of the old one is left
    assert sk.open(far / "step-4")["step"] == 4


def test_where_a_root_cannot_be_reached_nothing_is_begun_anew(tmp_path):
    """What it has may be newer: a restore and the first save are refused."""
    near, far = two_roots(tmp_path)

    class Away(LocalStore):
        def places(self):
            raise StorageError("no route to host", errno=113)

    with checkpointer(near, promote_to=Away(far), retries=0) as ckpt:
        with pytest.raises(StorageError, match="no route to host"):
            ckpt.restore_latest(empty_state())
        with pytest.raises(StorageError, match="no route to host"):
            ckpt.save(9, state_at(9))


# Promotions of several ranks, and to a real S3 server.


def rank():
    return torch.distributed.get_rank()


def groups(step):
    return {f"part{number}": {"w": torch.arange(5000.0) + step + number} for number in range(6)}


def job(near, far, fails):
    root, heard = FarRoot(inner=LocalStore(far)), list[Event]()
    said = []
    with checkpointer(near, promote_to=root, keep_last=2, on_event=heard.append, retries=0) as ckpt:
        ckpt.save(1, groups(1))
        ckpt.wait()
        made = [each.removeprefix("create ").split("-")[0] for each in root.seen if each.startswith("create ")]
        if rank() == fails:
            root.before = Broken("create")
        ckpt.save(2, groups(2))
        try:
            ckpt.wait()
        except NotPromoted as error:
            said.append(type(error.__cause__).__name__)
        root.before = None
        ckpt.save(3, groups(3))
        ckpt.wait()
    state = groups(0)
    with checkpointer(near, promote_to=far) as ckpt:
        if rank() == 0:
            for file in (near / "step-3").glob("part*"):
                file.unlink()
        torch.distributed.barrier()
        step = ckpt.restore_latest(state)
        found = ckpt.last_restore
    done = {event.step: event.bytes_copied for event in heard if isinstance(event, PromotionFinished)}
    return {
        "made": made,
        "said": said,
        "done": done,
        "restored": (step, found.where if found else ""),
        "right": all(torch.equal(state[key]["w"], groups(3)[key]["w"]) for key in state),
    }


def test_ranks_share_the_files_and_fail_together(tmp_path, rank_pool):
    """Each file is copied by one rank; what one cannot copy fails on all, and is taken up together."""
    near, far = tmp_path / "near", tmp_path / "far"
    results = rank_pool.run(3, job, near, far, 1)
    made = sorted(name for result in results for name in result["made"])
    assert len(made) == len(list((far / "step-2").iterdir())) - 1  # all but the record, each once
    assert all(result["made"] for result in results)
    for result in results:
        assert {key: result[key] for key in ("said", "done", "restored", "right")} == {
            "said": ["StorageError"],
            "done": results[0]["done"],
            "restored": (3, str(far)),
            "right": True,
        }
    assert sorted(results[0]["done"]) == [1, 2, 3]
    assert committed(near) == committed(far) == [2, 3]
    for name in ("step-2", "step-3"):
        sk.open(far / name).verify()
