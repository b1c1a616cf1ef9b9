"""Promotions of several ranks, and to a real S3 server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import NotPromoted
from shardkeep.events import Event, PromotionFinished
from shardkeep.storage.local import LocalStore
from shardkeep.storage.resolve import open_place
from shardkeep.testing.faulty_store import FaultyStore
from tests.manage.far import Broken
from tests.manage.scene import checkpointer, damage, empty_state, state_at, train
from tests.manage.test_tiers import committed
from tests.support.rank_pool import RankPool
from tests.support.s3_server import S3Server


def rank() -> int:
    return torch.distributed.get_rank()


def groups(step: int) -> dict[str, Any]:
    return {f"part{number}": {"w": torch.arange(5000.0) + step + number} for number in range(6)}


class Noting(LocalStore):
    """Notes which files this rank made, and fails where it is told to."""

    made: list[str]
    broken: Any = None

    def place(self, name: str) -> Any:
        root, inner = self, super().place(name)

        class Place(FaultyStore):
            def begin(self, verb: str, name: str) -> Any:
                if root.broken is not None:
                    root.broken(verb, name)
                if verb == "create":
                    root.made.append(name.split("-", maxsplit=1)[0])
                return super().begin(verb, name)

        return Place(inner)


def job(near: Path, far: Path, fails: int) -> dict[str, Any]:
    """Save, with one rank that fails to copy the second time."""
    root, heard = Noting(far), list[Event]()
    root.made = []
    said: list[str] = []
    with checkpointer(near, promote_to=root, keep_last=2, on_event=heard.append, retries=0) as ckpt:
        ckpt.save(1, groups(1))
        ckpt.wait()
        made, root.made = root.made, []
        if rank() == fails:
            root.broken = Broken("create")
        ckpt.save(2, groups(2))
        try:
            ckpt.wait()
        except NotPromoted as error:
            said.append(type(error.__cause__).__name__)
        root.broken = None
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


def test_ranks_share_the_files_and_fail_together(tmp_path: Path, rank_pool: RankPool) -> None:
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


def test_promoted_to_an_object_store(tmp_path: Path, s3_server: S3Server) -> None:
    """Real S3: committed there last, verified, pruned, and restored from when the disk is gone."""
    far = open_place(s3_server.url(f"tiers/{os.getpid()}"), **s3_server.options)
    state = empty_state()
    with checkpointer(tmp_path, promote_to=far, every_steps=1, keep_last=2) as ckpt:
        train(ckpt, range(1, 4))
        ckpt.wait()
        assert committed(far) == committed(tmp_path) == [2, 3]
        with checkpointer(tmp_path / "other", promote_to=far) as second, pytest.raises(sk.RootInUse):
            second.save(9, state_at(9))
        assert far.get("latest", limit=99) == b"step-3\n"
    damage(tmp_path / "step-3")
    with checkpointer(tmp_path, promote_to=far) as ckpt:
        assert ckpt.restore_latest(state) == 3
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.where == far.url
    assert torch.equal(state["w"], state_at(3)["w"])
    assert [info.name for info in far.list()] == ["latest"]
    sk.open(far.place("step-2")).verify()
