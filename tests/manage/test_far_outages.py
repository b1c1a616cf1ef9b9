"""Roots that are far away: what killed jobs left there, stores that do not answer, and keys that change meanwhile."""

import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shardkeep as sk
from shardkeep.cli.main import main
from shardkeep.layouts.native import claim_name, new_save_id
from shardkeep.layouts.orphans import Claim
from shardkeep.storage import uploads
from shardkeep.storage.resolve import open_root
from shardkeep.storage.system import host_identity
from tests.manage.far import Broken, far_root
from tests.manage.scene import QUICK, checkpointer, empty_state, state_at, until
from tests.support.s3_server import BUCKET, S3Server


@pytest.fixture
def server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server, as one that the environment names."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


class Killed:
    """Leaves what a job leaves in a bucket that is killed while it sends a file: a claim, and an upload."""

    def __init__(self, boto: Any) -> None:
        self._boto = boto

    def __call__(self, root: Any, place: str, save_id: str | None, file: str = "") -> None:
        if save_id is not None:
            claim = Claim(host=host_identity(), pid=2**22 + 1, started="long ago")
            root.place(place).put(claim_name(save_id), msgspec.json.encode(claim))
        key = f"{root.prefix}{place}/{file or f'state-00000-of-00001-{save_id}.safetensors'}"
        made = self._boto.create_multipart_upload(Bucket=BUCKET, Key=key)
        self._boto.upload_part(Bucket=BUCKET, Key=key, UploadId=made["UploadId"], PartNumber=1, Body=bytes(100))


@pytest.fixture
def killed(boto: Any) -> Killed:
    return Killed(boto)


def left(root: Any) -> list[str]:
    return sorted(each.name.split("/")[0] for each in uploads.unfinished(root))


def steps(root: Any) -> list[int]:
    return sorted(entry.step for entry in sk.Catalog(root).entries() if entry.committed)


def test_the_next_job_takes_back_uploads_of_a_killed_one(server: S3Server, killed: Killed) -> None:
    """Where a save had no commit yet, and beside a checkpoint; with its claim gone nobody could say whose they are."""
    url = server.url("killed-saves")
    root = open_root(url, direct=False)
    with checkpointer(url, asynchronous=False) as ckpt:
        ckpt.save(1, state_at(1))
    killed(root, "step-1", new_save_id())
    killed(root, "step-2", new_save_id())
    assert left(root) == ["step-1", "step-2"]
    with checkpointer(url, asynchronous=False) as ckpt:
        ckpt.restore_latest(empty_state())
        ckpt.save(3, state_at(3))
    assert left(root) == []
    assert steps(url) == [1, 3]


def test_a_promotion_takes_back_uploads_of_the_one_it_goes_on_with(
    server: S3Server, killed: Killed, tmp_path: Path
) -> None:
    """They have its own save's name, so that no later sweep would ever take them for those of a dead one."""
    url = server.url("killed-promotion")
    root = open_root(url, direct=False)
    with checkpointer(tmp_path, asynchronous=False) as ckpt:
        ckpt.save(1, state_at(1))
    [entry] = sk.Catalog(tmp_path).entries()
    assert entry.record is not None
    killed(root, "step-1", entry.record.save_id)
    with checkpointer(tmp_path, asynchronous=False, promote_to=url) as ckpt:
        ckpt.restore_latest(empty_state())
        ckpt.save(2, state_at(2))
    assert left(root) == []
    assert steps(url) == [1, 2]


def test_prune_takes_back_old_uploads_where_nothing_else_goes(
    server: S3Server, killed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What saves began and nobody claims; a dry run leaves it, and what other programs send is always left."""
    url = server.url("killed-prune")
    root = open_root(url, direct=False)
    with checkpointer(url, asynchronous=False) as ckpt:
        ckpt.save(1, state_at(1))
    killed(root, "step-1", None, f"state-00000-of-00001-{new_save_id()}.safetensors")
    killed(root, "step-2", None, "model.bin")
    monkeypatch.setattr("shardkeep.layouts.orphans.STALE_AFTER_S", -60.0)
    assert main(["prune", url, "--keep-last", "9", "--dry-run"]) == 0
    assert left(root) == ["step-1", "step-2"]
    assert main(["prune", url, "--keep-last", "9", "--yes"]) == 0
    assert left(root) == ["step-2"]


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
    until(lambda: not {"shardkeep-promote", "shardkeep-aside"} & {each.name for each in threading.enumerate()})
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
