"""Roots that are far away: what killed jobs left there, stores that do not answer, and keys that change meanwhile."""

import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardkeep as sk
from tests.manage.far import Broken, far_root
from tests.manage.scene import QUICK, checkpointer, empty_state, state_at, until


def steps(root: Any) -> list[int]:
    return sorted(entry.step for entry in sk.Catalog(root).entries() if entry.committed)


class Silent:
    """Lets nothing through, from when it is closed to when it is opened: a far store that does not answer."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Event()

    def __call__(self, verb: str, name: str) -> None:
        self.asked.set()
        self.open.wait(60)


def silent_root() -> tuple[Any, Silent]:
    """Make a root that can fall silent, with all of its places."""
    silent = Silent()
    root = far_root(silent)
    for verb in ("get", "put", "delete", "version", "list", "places", "open"):
        setattr(root, verb, _waiting(silent, verb, getattr(root.inner, verb)))
    return root, silent


def _waiting(silent: Silent, verb: str, work: Any) -> Any:
    def wait(*args: Any, **more: Any) -> Any:
        silent(verb, "")
        return work(*args, **more)

    return wait


def test_close_does_not_wait_for_a_far_root_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The near root is free when it returns, what was under way commits nothing later, and the next job goes on."""
    monkeypatch.setattr("shardkeep.manage.replicate.replicator.GRACE_S", 0.2)
    far, silent = silent_root()
    ckpt = checkpointer(tmp_path, asynchronous=False, promote_to=far, keep_last=1, promote_required=False)
    ckpt.save(1, state_at(1))
    ckpt.wait()
    silent.open.clear()
    silent.asked.clear()
    ckpt.save(2, state_at(2))
    assert silent.asked.wait(30)
    ckpt.close(timeout_s=0.1)
    assert not silent.open.is_set()
    assert not (tmp_path / "lease.json").exists()
    silent.open.set()
    until(lambda: not {"shardkeep-promote", "shardkeep-release"} & {each.name for each in threading.enumerate()})
    assert "shardkeep.json" not in far.names("step-2")
    with checkpointer(tmp_path, asynchronous=False, promote_to=far) as ckpt:
        ckpt.restore_latest(empty_state())
        ckpt.save(3, state_at(3))
    assert steps(far.inner) == [1, 2, 3]


def test_what_is_cancelled_is_not_tried_again(tmp_path: Path) -> None:
    """A promotion whose far root fails in passing ends between two attempts, as cancelled and not as failed."""
    broken, seen, waited = Broken("create", "", errno.EIO), list[sk.events.Event](), list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        ckpt.cancel_promotions()

    ckpt = checkpointer(
        tmp_path,
        asynchronous=False,
        promote_to=far_root(broken),
        retries=1000,
        seams=replace(QUICK, sleep=sleep),
        on_event=seen.append,
    )
    ckpt.save(1, state_at(1))
    ckpt.wait()
    assert len(waited) == 1
    assert [each.cancelled for each in seen if isinstance(each, sk.events.PromotionFailed)] == [True]
    broken.verb = ""
    ckpt.close()


def test_keys_that_are_rotated_while_it_is_copied_are_promoted(tmp_path: Path) -> None:
    """The far checkpoint opens with the new key alone, as the near one does."""
    old, new = sk.new_key(), sk.new_key()
    near, far = tmp_path / "near", tmp_path / "far"

    def rotate(event: sk.events.Event) -> None:
        if isinstance(event, sk.events.PromotionBegan):
            assert sk.rotate_keys(near / "step-1", options=sk.Options(keys=sk.KeyRing.from_text(f"{new}\n{old}")))

    keys = sk.Options(keys=sk.KeyRing.from_text(old))
    with checkpointer(near, asynchronous=False, promote_to=far, codecs=["aes"], options=keys, on_event=rotate) as ckpt:
        ckpt.save(1, state_at(1))
    for root in (near, far):
        assert sk.open(root / "step-1", options=sk.Options(keys=sk.KeyRing.from_text(new)))["step"] == 1
