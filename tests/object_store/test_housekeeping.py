"""What a job tidies up in a bucket, and what that costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep.layout import leftovers
from shardkeep.layout.native import new_save_id
from shardkeep.store import uploads
from shardkeep.store.object_root import ObjectRoot
from shardkeep.testing.s3_server import BUCKET

Opened = Callable[..., ObjectRoot]


def begin(boto: Any, key: str) -> None:
    """Begin an upload as a process that is gone did."""
    made = boto.create_multipart_upload(Bucket=BUCKET, Key=key)
    boto.upload_part(Bucket=BUCKET, Key=key, UploadId=made["UploadId"], PartNumber=1, Body=bytes(100))


def begun(boto: Any, root: ObjectRoot) -> list[str]:
    found = boto.list_multipart_uploads(Bucket=BUCKET, Prefix=root.prefix).get("Uploads", [])
    return sorted(each["Key"].removeprefix(root.prefix) for each in found)


def test_a_job_takes_back_uploads_that_nobody_goes_on_with(s3_place: Opened, boto: Any) -> None:
    """Whose save is over, and whose place is gone; not those of a save that is under way, nor of other programs."""
    root = s3_place()
    over, alive, elsewhere = (new_save_id() for _ in range(3))
    with leftovers.claiming(alive):
        leftovers.make_claim(root.place("step-7"), alive)
        root.place("step-8").put(f"claim-{elsewhere}.json", b'{"host": "node7", "pid": 1, "started": "1"}')
        names = [f"step-7/a-{alive}.safetensors", f"step-8/a-{elsewhere}.safetensors", "step-9/model.bin", "a/b/c"]
        for name in (f"step-3/a-{over}.safetensors", *names):
            begin(boto, root.prefix + name)
        with sk.Checkpointer(root, every_steps=1, asynchronous=False) as ckpt:
            ckpt.step(1, {"w": torch.ones(3)})
        assert begun(boto, root) == sorted(names)
    assert leftovers.sweep_lost_uploads(root, gone=["node7"]) == 2
    assert begun(boto, root) == ["a/b/c", "step-9/model.bin"]


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
