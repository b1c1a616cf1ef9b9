"""What a job tidies up in a bucket, and what that costs."""

import importlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep.layouts import orphans as leftovers
from shardkeep.layouts.native import new_save_id
from shardkeep.storage import uploads
from shardkeep.storage import uploads as uploads_client
from shardkeep.storage.object_store import ObjectRoot
from tests.support.s3_server import BUCKET

Opened = Callable[..., ObjectRoot]


def begin(boto: Any, key: str) -> None:
    """Begin an upload as a process that is gone did."""
    made = boto.create_multipart_upload(Bucket=BUCKET, Key=key)
    boto.upload_part(Bucket=BUCKET, Key=key, UploadId=made["UploadId"], PartNumber=1, Body=bytes(100))


def begun(boto: Any, root: ObjectRoot) -> list[str]:
    found = boto.list_multipart_uploads(Bucket=BUCKET, Prefix=root.prefix).get("Uploads", [])
    return sorted(each["Key"].removeprefix(root.prefix) for each in found)


def test_a_job_takes_back_uploads_that_nobody_goes_on_with(
    s3_place: Opened, boto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dead saves at once, what nobody claims when it is old; never those of other programs, nor of living saves."""
    root = s3_place()
    dead, lost, alive, elsewhere = (new_save_id() for _ in range(4))
    with leftovers.holding_claim(alive):
        for place, save_id in (("step-3", dead), ("step-7", alive)):
            leftovers.make_claim(root.place(place), save_id)
        root.place("step-8").put(f"claim-{elsewhere}.json", b'{"host": "node7", "pid": 1, "started": "1"}')
        names = [f"step-{n}/a-{each}.safetensors" for n, each in ((3, dead), (5, lost), (7, alive), (8, elsewhere))]
        others = ["a/b/c", "data.tar", f"deep/step-1/a-{lost}.safetensors", "step-9/model.bin"]
        for name in (*names, *others):
            begin(boto, root.prefix + name)
        with sk.Checkpointer(root, every_steps=1, asynchronous=False) as ckpt:
            ckpt.step(1, {"w": torch.ones(3)})
        assert begun(boto, root) == sorted([*names[1:], *others])

        a_day_on = time.time() + 25 * 3600.0
        monkeypatch.setattr(uploads.time, "time", lambda: a_day_on)
        assert leftovers.sweep_lost_uploads(root) == 2
        assert begun(boto, root) == sorted([names[2], *others])


def test_a_broken_package_fails_no_save(s3_place: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads are looked for by a package that saves do without; `prune` says what is wrong with it."""

    def broken(name: str, *more: Any) -> Any:
        if name == "boto3":
            raise ImportError("cannot import name 'x' from 'urllib3'")
        return real(name, *more)

    root, real = s3_place(), importlib.import_module
    monkeypatch.setattr(uploads_client.importlib, "import_module", broken)
    with sk.Checkpointer(root, every_steps=1, asynchronous=False) as ckpt:
        ckpt.step(1, {"w": torch.ones(3)})
    assert sk.Catalog(root).latest().step == 1
    with pytest.raises(sk.CheckpointError, match="urllib3"):
        leftovers.sweep_lost_uploads(root)


def test_places_that_are_gone_cost_nothing(s3_place: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads are looked for once a job, and a place that was found empty is not looked at again, though it is listed."""
    root, looked, swept = s3_place(), [], []
    with sk.Checkpointer(root, every_steps=1, keep_last=1, asynchronous=False) as ckpt:
        real_survey, real_sweep = leftovers.survey, uploads.sweep
        monkeypatch.setattr(
            leftovers, "survey", lambda store, *more: looked.append(store.url) or real_survey(store, *more)
        )
        monkeypatch.setattr(uploads, "sweep", lambda *args, **how: swept.append(args) or real_sweep(*args, **how))
        for step in range(1, 6):
            ckpt.step(step, {"w": torch.ones(3)})
            ckpt.wait()
        assert ckpt.all_steps() == [5]
    assert len(swept) == 1
    assert max(map(looked.count, looked)) == 3  # twice by its own save, and once when it was gone
