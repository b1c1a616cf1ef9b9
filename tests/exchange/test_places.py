"""Places that are written in two ways are one, and are treated so."""

import os
import uuid

import pytest
import torch

from shardkeep.dcp._consolidate_hf_safetensors import consolidate_safetensors_files
from shardkeep.storage.base import same_place
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.resolve import open_place
from shardkeep.storage.retry import RetryingStore, RetryPolicy
from tests.hugging_face.samples import load, same, save


def test_directories_are_compared_by_what_they_are(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("there", "not-yet"):
        place = open_place(tmp_path / name)
        for _ in range(2):
            ways = [name, f"./{name}/", f"link/{name}", f"file://{tmp_path}/{name}", f"{tmp_path}/x/../{name}"]
            assert [way for way in ways if not same_place(open_place(way), place)] == []
            assert same_place(RetryingStore(place, RetryPolicy(1)), LocalStore(name))
            assert not same_place(place, open_place(f"{name}-other"))
            os.makedirs(name, exist_ok=True)


def test_stores_in_memory_are_the_same_only_if_they_are_one():
    one = MemoryStore()
    assert same_place(one, one)
    assert not same_place(one, MemoryStore())
    name = uuid.uuid4().hex
    assert same_place(open_place(f"memory://{name}/a"), open_place(f"memory://{name}/a/"))
    assert not same_place(open_place(f"memory://{name}/a"), open_place(f"memory://{name}/b"))


@pytest.mark.parametrize("spelled", ["s3://", "s3a://", "s3://…/"])
def test_a_model_made_twice_in_the_place_of_its_shards(s3_root, spelled):
    """The model of an earlier call is not taken for a shard, however the place is written."""
    to = f"{s3_root}/" if spelled.endswith("…/") else s3_root.replace("s3://", spelled)
    state = {"a": torch.arange(6.0)}
    save("ours", state, s3_root, no_dist=True, save_distributed=True)
    for _ in range(2):
        consolidate_safetensors_files(s3_root, to, {"a": 1})
    assert same(load("ours", {"a": torch.zeros(6)}, s3_root, no_dist=True), state) == []
