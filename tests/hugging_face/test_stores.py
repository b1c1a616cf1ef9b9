"""Hugging Face models by URL: our writer, reader and consolidation in stores, S3 for real."""

import json
import uuid
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load as load_safetensors

import shardkeep as sk
from shardkeep.dcp import CheckpointException
from shardkeep.dcp._consolidate_hf_safetensors import consolidate_safetensors_files
from shardkeep.dcp.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from shardkeep.layouts import safetensors_publish
from shardkeep.storage.fsspec import FsspecStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.resolve import open_place
from tests.exchange.test_stores import names_at
from tests.hugging_face.samples import INDEX, full_state, load, same, save, spread_state
from tests.protocol.samples import blank, holds, quietly
from tests.toolkit.samples import numbered

MAPPING = {"a": 1, "b": 2, "c": 3}


@pytest.fixture(params=["memory", "fsspec"])
def any_root(request, monkeypatch, tmp_path, recwarn):
    monkeypatch.setitem(FsspecStore.__init__.__kwdefaults__, "settle_s", 0.0)  # no other writer
    return f"local://{tmp_path}/place" if request.param == "fsspec" else f"memory://{uuid.uuid4().hex}"


def tensors_at(where):
    found = {}
    for name in names_at(where):
        if name.endswith(".safetensors"):
            found |= load_safetensors(open_place(where).get(name, limit=1 << 20))
    return found


def loaded(where, state):
    return load("ours", {key: torch.zeros_like(value) for key, value in state.items()}, where, no_dist=True)


def save_twice_and_load(url, environment):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        for _ in range(2):
            save("ours", spread_state(), url, save_distributed=True, enable_consolidation=True)
            dist.barrier()
        wrong = []
        for place in (url, f"{url}/sharded"):
            into, expected = blank(spread_state(1)), spread_state(1)
            load("ours", into, place)
            found, wanted = holds(into), holds(expected)
            wrong += [key for key in wanted if found[key] != wanted[key]]
        return wrong


def test_ranks_save_shards_and_a_model_to_s3(rank_pool, s3_root, s3_server):
    """Two ranks save shards and a model to S3, twice; both load as other cuts, and nothing of the first is left."""
    assert rank_pool.run(2, save_twice_and_load, s3_root, s3_server.environment) == [[], []]
    assert len([name for name in names_at(f"{s3_root}/sharded") if name.startswith("shard-")]) == 2
    [model, index] = names_at(s3_root)
    assert index == INDEX
    assert set(json.loads(open_place(s3_root).get(INDEX, limit=1 << 20))["weight_map"].values()) == {model}
    whole = {**full_state(), "chunks": numbered(10, 3)}
    assert same(tensors_at(s3_root), whole) == []
    opened = sk.open(s3_root).to_dict()
    assert same(opened, whole) == []


@pytest.mark.parametrize("shards", [False, True])
def test_a_save_replaces_another(any_root, shards):
    for turn in range(3):
        state = {key: numbered(5, 4) + 10 * turn for key in MAPPING}
        mapping = MAPPING if turn < 2 else None
        save("ours", state, any_root, no_dist=True, save_distributed=shards, fqn_to_index_mapping=mapping)
        assert same(loaded(any_root, state), state) == []
        assert same(tensors_at(any_root), state) == []
        assert len(names_at(any_root)) == (3 if turn < 2 else 1) + (not shards)


class Died(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("kind", ["shards", "whole", "consolidated"])
@pytest.mark.parametrize("place", ["memory", "directory"])
def test_a_death_anywhere_leaves_the_old_or_the_new(tmp_path, monkeypatch, place, kind):
    """Wherever a save dies, the old or the new model is read, never a mixture; the next save leaves no trace."""
    old = {"a": numbered(5, 4), "b": numbered(7), "c": numbered(2)}
    new = {key: value + 100 for key, value in old.items()}
    options = {"fqn_to_index_mapping": MAPPING, "save_distributed": kind != "whole"}
    options["enable_consolidation"] = kind == "consolidated"
    steps = [(MemoryStore, "create"), (MemoryStore, "put"), (MemoryStore, "delete")]
    if place == "directory":
        steps = [(safetensors_publish.os, "replace"), (safetensors_publish.os, "unlink")]
    seen_states = set()
    for after in range(0, 60, 1 if kind == "whole" or place == "directory" else 2):
        where = f"{tmp_path}/{after}" if place == "directory" else f"memory://{uuid.uuid4().hex}"
        save("ours", old, where, no_dist=True, **options)
        names = names_at(where)
        calls = []
        with monkeypatch.context() as patch:
            for owner, step in steps:
                strike(patch, owner, step, calls, after)
            with suppress(Died, CheckpointException):
                save("ours", new, where, no_dist=True, **options)
        for each in [where, f"{where}/sharded"] if kind == "consolidated" else [where]:
            found = loaded(each, old)
            assert same(found, new) == [] or same(found, old) == []
            seen_states.add(same(found, new) == [])
        save("ours", old, where, no_dist=True, **options)
        assert same(loaded(where, old), old) == []
        # What a store calls `.tmp` it removes once the process that made it is gone; this one lives.
        assert len([name for name in names_at(where) if not name.startswith(".tmp-")]) == len(names)
        if len(calls) <= after:
            break
    assert len(calls) <= after
    assert seen_states == {True, False}


def strike(patch, owner, name, calls, after):
    """Let the process die at its n-th change."""
    real = getattr(owner, name)

    def step(*args, **kwargs):
        calls.append(name)
        if len(calls) > after:
            raise Died
        return real(*args, **kwargs)

    patch.setattr(owner, name, step)


def test_consolidation_and_quantized_models(any_root, tmp_path):
    """Shards of a store become a model of a directory and back, and quantized models find their index in a store."""
    state = {"a": numbered(6, 4), "b": numbered(5)}
    save("ours", state, f"{any_root}/shards", no_dist=True, save_distributed=True)
    consolidate_safetensors_files(f"{any_root}/shards", str(tmp_path / "model"), {"a": 1, "b": 2})
    assert same(loaded(tmp_path / "model", state), state) == []
    save("ours", state, tmp_path / "shards", no_dist=True, save_distributed=True)
    for _ in range(2):
        consolidate_safetensors_files(str(tmp_path / "shards"), f"{any_root}/model", {"a": 1, "b": 2})
        assert same(tensors_at(f"{any_root}/model"), state) == []
        assert len(names_at(f"{any_root}/model")) == 3
    reader = QuantizedHuggingFaceStorageReader(f"{any_root}/model")
    assert set(quietly(reader.read_metadata).state_dict_metadata) == {"a", "b"}
