"""From one bucket to another, on a real S3 server: as it is stored, bit for bit, and nothing that is damaged."""

import os

import pytest
import torch

import shardkeep as sk
from shardkeep.codecs.keys import KeyRing
from shardkeep.errors import NearCopyDamaged, NotPromoted
from shardkeep.layouts.native import read_record
from shardkeep.storage.resolve import open_place
from tests.manage.scene import checkpointer
from tests.manage.test_tiers import committed

KEYS = KeyRing([bytes(range(32))])
CODECS = {"plain": None, "compressed": ["zstd"], "encrypted": ["zstd", "aes"], "some": {"optim": ["aes"]}}


def state_of(step):
    torch.manual_seed(step)
    return {
        "model": {"w": torch.randn(2_500_000), "b": torch.randn(9)},
        "optim": {"m": torch.randn(70_000)},
        "at": step,
    }


def roots(server, name):
    """Two buckets' worth of root, with parts that are small enough for several of a file."""
    where = f"promotions/{os.getpid()}/{name}"
    near, far = (
        open_place(server.url(f"{where}/{side}"), part_bytes=5 << 20, **server.options) for side in ("near", "far")
    )
    return near, far


def job(roots, kind, **more):
    near, far = roots
    options = sk.Options(io_threads=2, host_budget_bytes=64 << 20, keys=KEYS)
    return checkpointer(near, promote_to=far, codecs=CODECS[kind], options=options, **more)


@pytest.mark.parametrize("kind", CODECS)
def test_from_bucket_to_bucket(s3_server, kind):
    """The same bytes under the same names and nothing else, restored bit for bit when the near bucket is empty."""
    near, far = roots(s3_server, kind)
    with job((near, far), kind) as ckpt:
        ckpt.save(1, state_of(1))
    record = read_record(near.place("step-1"))
    assert [bool(file.blocks) for file in record.files] == [file.chain is None for file in record.files]
    assert {info.name for info in far.place("step-1").list()} == {"shardkeep.json", *record.names}
    for name in ("shardkeep.json", *record.names):
        one, other = (root.place("step-1").get(name, limit=1 << 30) for root in (near, far))
        assert one == other
    near.remove("step-1")
    meant = state_of(1)
    found = {"model": {"w": torch.zeros(2_500_000), "b": torch.zeros(9)}, "optim": {"m": torch.zeros(70_000)}, "at": 0}
    with job((near, far), kind) as ckpt:
        assert ckpt.restore_latest(found) == found["at"] == 1
    assert all(
        torch.equal(found[group][key].view(torch.int32), meant[group][key].view(torch.int32))
        for group, key in (("model", "w"), ("model", "b"), ("optim", "m"))
    )


@pytest.mark.parametrize(
    ("kind", "what", "at"),
    [("plain", "model", -3), ("plain", "blocks", 20), ("encrypted", "model", 4000), ("encrypted", "model", -30)],
    ids=["data", "digests", "frame", "table"],
)
def test_damage_at_the_source(s3_server, kind, what, at):
    """It is reported with the file's name, nothing of it stays in the far bucket, and the rest is promoted."""
    near, far = roots(s3_server, f"damage-{what}{at}")
    small = {"model": {"w": torch.arange(3000.0)}}
    with checkpointer(near, codecs=CODECS[kind], options=sk.Options(keys=KEYS)) as ckpt:
        for step in (1, 2):
            ckpt.save(step, small)
    place = near.place("step-1")
    [file] = read_record(place).files
    name = file.blocks if what == "blocks" else file.name
    data = bytearray(place.get(name, limit=1 << 30))
    data[at] ^= 1
    place.put(name, bytes(data), replace=True)
    with job((near, far), kind) as ckpt:
        ckpt.restore_latest({"model": {"w": torch.zeros(3000)}})
        ckpt.save(3, small)
        with pytest.raises(NotPromoted, match=name) as caught:
            ckpt.wait()
        assert isinstance(caught.value.__cause__, NearCopyDamaged)
    assert committed(far) == [2, 3]
    assert not list(far.place("step-1").list())
