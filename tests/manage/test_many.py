"""A root with many checkpoints: what a job does there costs as much as with few, and relies on nothing that it only remembers."""

import shutil
import threading
from collections import Counter

import pytest

import shardkeep as sk
from shardkeep.errors import StorageError
from shardkeep.layouts import orphans
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from tests.manage.scene import Hooked, checkpointer, empty_state, state_at, tear, train

RECORD = "shardkeep.json"


def root_of(count):
    """Return a root with checkpoints of the steps 1 to `count`."""
    root = MemoryStore()
    with checkpointer(root) as ckpt:
        ckpt.save(1, state_at(1))
    blobs = {info.name: root.place("step-1").get(info.name, limit=1 << 20) for info in root.place("step-1").list()}
    for step in range(2, count + 1):
        for name, data in blobs.items():
            root.place(f"step-{step}").put(name, data)
    root.put("latest", f"step-{count}\n".encode(), replace=True)
    return root


def operations(count):
    """Return the operations on a root with so many checkpoints, by what a job does; the first listing is no part of it."""
    seen, found = Counter(), {}

    def before(_, verb, *args):
        thread = threading.current_thread().name.partition("_")[0]
        background = "once" if thread in ("shardkeep-prune", "shardkeep-catalog") else "now"
        seen[background, next((each for each in (RECORD, "lease.json") if each in args), verb)] += 1

    def done(what):
        found[what] = dict(seen)
        seen.clear()

    root = Hooked(root_of(count), before)
    with checkpointer(root, asynchronous=False, keep_last=count) as ckpt:
        assert ckpt.restore_latest(empty_state()) == count
        done("restore_latest")
        assert ckpt.latest_step() == count
        done("latest_step")
        ckpt.save(count + 1, state_at(0))
        first = {key: number for key, number in seen.items() if key[0] == "now"}
        ckpt.wait()
        first["leases"] = seen["once", "lease.json"]
        seen.clear()
        for save in ("second", "third"):
            ckpt.save(count + 2 + (save == "third"), state_at(0))
            ckpt.wait()
            done(save)
        assert len(ckpt.all_steps()) == count
    seen.clear()
    assert sk.Catalog(root).latest().step == count + 3
    done("Catalog.latest")
    return {**found, "first save": first}


def test_a_job_does_the_same_with_many_checkpoints_as_with_few():
    """Each save deletes the oldest checkpoint; the records are read once, in the background, after the first save."""
    few, many = operations(20), operations(120)
    assert many == few
    assert many["restore_latest"]["now", "places"] == 1
    assert many["restore_latest"]["now", RECORD] <= 5  # the load reads it, too
    assert sum(many["second"].get(("once", verb), 0) for verb in ("places", "list")) <= 5
    assert many["second"]["once", RECORD] <= 16 + 3


@pytest.mark.parametrize(
    ("policy", "lost", "kept"),
    [
        ({"keep_last": 2}, None, [3, 4]),
        ({"keep_last": 2}, 3, [2, 4]),
        ({"keep_best": "loss"}, None, [2, 4]),
        ({"keep_best": "loss"}, 2, [3, 4]),
        ({"keep_last": 1, "keep_every": 2}, 2, [4]),
    ],
)
def test_nothing_is_deleted_because_of_what_is_only_remembered(tmp_path, policy, lost, kept):
    """A record that was lost since it was read is no reason to delete another checkpoint, as it would be if it were there."""
    with checkpointer(tmp_path, **policy) as ckpt:
        for step, loss in ((2, 0.1), (3, 0.5)):
            ckpt.save(step, state_at(step), metrics={"loss": loss})
            ckpt.wait()
        if lost:
            tear(tmp_path / f"step-{lost}")
        ckpt.save(4, state_at(4), metrics={"loss": 9.0})
        ckpt.wait()
        assert ckpt.all_steps() == kept


def test_what_another_process_does_between_two_calls_is_seen(tmp_path):
    """Also where listings are kept: what was deleted, added, replaced, or lost its record is not what it was."""
    with checkpointer(tmp_path) as ckpt:
        for step in (99, 100):
            ckpt.save(step, state_at(step))
    for step in range(1, 99):
        shutil.copytree(tmp_path / "step-99", tmp_path / f"step-{step}")
    newest, root = tmp_path / "step-300", LocalStore(tmp_path)

    def add(saved):
        with checkpointer(tmp_path / f"other-{saved}") as other:
            other.save(300, state_at(saved))
        (tmp_path / f"other-{saved}" / "step-300").rename(newest)

    changes = [
        (lambda: None, 100, 100),
        (lambda: shutil.rmtree(tmp_path / "step-100"), 99, 99),
        (lambda: add(300), 300, 300),
        (lambda: [shutil.rmtree(newest), add(302)], 300, 302),
        (lambda: tear(newest), 99, 99),
        (lambda: shutil.rmtree(newest), 99, 99),
    ]
    with checkpointer(tmp_path) as ckpt:
        for change, step, saved in changes:
            while root.all_names() is not root.all_names():  # until the listing is kept
                pass
            assert ckpt.latest_step() is not None
            change()
            state = empty_state()
            assert [ckpt.latest_step(), sk.Catalog(tmp_path).latest().step] == [step, step]
            assert (ckpt.restore_latest(state), state["step"]) == (step, saved)


@pytest.mark.parametrize("latest", [b"step-1\n", b"step-9\n", b"../x", b"\xff", None])
def test_the_newest_is_found_whatever_latest_says(tmp_path, latest):
    """It may be old, name nothing, be unreadable or be gone."""
    with checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_at(step))
    (tmp_path / "latest").unlink() if latest is None else (tmp_path / "latest").write_bytes(latest)
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.latest_step() == 3
        assert ckpt.restore_latest(empty_state()) == 3
    assert sk.Catalog(tmp_path).latest().step == 3


@pytest.mark.parametrize("far", [False, True])
def test_the_newest_is_found_where_a_job_died_before_it_pointed_to_it(tmp_path, far):
    """It had gone back to an older step, so what it saved has a lower step than what `latest` named."""
    near, dying = tmp_path / "near", tmp_path / ("far" if far else "near")
    how = {"promote_to": tmp_path / "far"} if far else {}
    with checkpointer(near, **how) as ckpt:
        train(ckpt, (1, 2, 3, 4), force=True)

    def before(where, verb, *args):
        if verb == "put" and args[0] == "latest" and where == dying.name:
            raise StorageError("injected")

    roots = Hooked(LocalStore(near), before), Hooked(LocalStore(tmp_path / "far"), before)
    with checkpointer(roots[0], retries=0, on_error="warn", **({"promote_to": roots[1]} if far else {})) as ckpt:
        ckpt.restore(1, empty_state())
        ckpt.save(2, state_at(20))
    assert sk.Catalog(dying).latest().timeline == 1
    with checkpointer(dying) as ckpt:
        state = empty_state()
        assert ckpt.restore_latest(state) == 2
        assert state["step"] == 20


def test_what_a_dead_save_left_makes_room_for_the_next_save(tmp_path, monkeypatch):
    with checkpointer(tmp_path) as ckpt:
        train(ckpt, (1, 2, 3), force=True)
    orphans.make_claim(LocalStore(tmp_path / "step-3"), sk.open(tmp_path / "step-3").record.save_id)
    tear(tmp_path / "step-3")
    full = lambda _: 0 if (tmp_path / "step-3").exists() else 1 << 30  # noqa: E731
    monkeypatch.setattr(LocalStore, "free_nbytes", full)
    with checkpointer(tmp_path, asynchronous=False) as ckpt:
        assert ckpt.restore_latest(empty_state()) == 2
        ckpt.save(4, state_at(4))
        assert ckpt.all_steps() == [1, 2, 4]
