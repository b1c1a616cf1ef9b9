"""Shards made whole: against brute force, against torch, by the safetensors library's word, in little memory."""

import json
import logging
import os
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.checkpoint import _consolidate_hf_safetensors as theirs

from shardkeep.conversion import pipeline
from shardkeep.dcp._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from shardkeep.errors import CheckpointError, ChecksumMismatch
from tests.engine.samples import random_tensor
from tests.exchange.samples import lose_bits
from tests.hugging_face.samples import INDEX, by_library, full_state, load, memory_used, same, save, shard, spread_state
from tests.toolkit.samples import numbered, seen

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def random_boxes(shape, cuts, seed):
    """Cut a box along random axes again and again: what is left tiles it, and is no grid."""
    chooser = random.Random(seed)
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(cuts):
        offsets, sizes = boxes.pop(chooser.randrange(len(boxes)))
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        if not axes:
            boxes.append((offsets, sizes))
            continue
        axis = chooser.choice(axes)
        at = chooser.randrange(1, sizes[axis])
        right = [*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :]]
        boxes.append((offsets, [*sizes[:axis], at, *sizes[axis + 1 :]]))
        boxes.append((right, [*sizes[:axis], sizes[axis] - at, *sizes[axis + 1 :]]))
    return boxes


def part(tensor, offsets, sizes):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


@st.composite
def sharded_models(draw):
    """Some tensors, and how each is cut into shards."""
    models = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 9), max_size=4))
        models[f"t{number}"] = (
            tuple(shape),
            draw(st.sampled_from(DTYPES)),
            draw(st.integers(0, 6)),
            draw(st.integers(0, 10**6)),
        )
    return models, draw(st.integers(1, 3)), draw(st.sampled_from([64, 96, 256, 4096]))


@given(sharded_models())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shards_make_the_tensors_they_were_cut_from(tmp_path_factory, drawn):
    """Random dtypes, shapes, cuts and windows: each tensor is, in every bit, the one that was cut."""
    models, files, window = drawn
    folder = tmp_path_factory.mktemp("shards")
    full, shards = {}, {}
    for key, (shape, dtype, cuts, seed) in models.items():
        full[key] = random_tensor(shape, dtype, seed)
        for number, (offsets, sizes) in enumerate(random_boxes(shape, cuts, seed)):
            shards.setdefault(number, {})[key] = (part(full[key], offsets, sizes), offsets)
    for number, parts in shards.items():
        shard(folder, number + 1, parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "limits", lambda *_: (2, window))
        patch.setattr(pipeline, "block_nbytes_for", lambda _: window)
        consolidate_safetensors_files(folder, folder / "out", {k: i % files + 1 for i, k in enumerate(full)})
    assert same(by_library(folder / "out"), full) == []


def save_shards(folder, side):
    save(side, spread_state(), folder, save_distributed=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_what_either_saves_is_made_whole_as_torch_does(rank_pool, tmp_path, ranks, side):
    """Line 11 of torch's defects: shards of either writer give whole tensors; torch fails on the integers."""
    shards, ours, other = tmp_path / "shards", tmp_path / "ours", tmp_path / "theirs"
    rank_pool.run(ranks, save_shards, str(shards), side)
    floats = {"rows": 1, "columns": 2, "deep": 2, "eight": 1, "alone": 2, "chunks": 1}
    other.mkdir()
    others_too = {"ints": 2, "bytes": 1, "flags": 1, "step": 2, "nothing": 1}
    consolidate_safetensors_files(str(shards), str(ours), {**floats, **others_too}, num_threads=3)
    assert same(by_library(ours), {**full_state(), "chunks": numbered(10, 3)}) == []
    with pytest.raises(TypeError, match=r"torch\.finfo\(\) requires a floating point"):
        theirs.consolidate_safetensors_files(str(shards), str(other), {**floats, "ints": 1})


def test_the_same_files_as_torch(tmp_path):
    full = {"a": numbered(6, 8), "b": numbered(4, 3, dtype=torch.bfloat16)}
    shard(tmp_path, 1, {"a": (full["a"][:, :3], [0, 0]), "b": (full["b"][:1], [0, 0])})
    shard(tmp_path, 2, {"a": (full["a"][:, 3:], [0, 3]), "b": (full["b"][1:], [1, 0])})
    mapping = {"a": 1, "b": 2}
    (tmp_path / "theirs").mkdir()
    theirs.consolidate_safetensors_files(str(tmp_path), str(tmp_path / "theirs"), mapping)
    consolidate_safetensors_files(str(tmp_path), str(tmp_path / "ours"), mapping)
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    assert json.loads((tmp_path / "ours" / INDEX).read_text()) == json.loads((tmp_path / "theirs" / INDEX).read_text())
    assert same(by_library(tmp_path / "ours"), by_library(tmp_path / "theirs")) == []


def test_headers_are_plain_and_aligned(tmp_path):
    """A file of ours says nothing but format=pt, and every tensor begins where its elements may lie in memory."""
    full = {"odd": numbered(5, dtype=torch.uint8), "wide": numbered(3, dtype=torch.float64), "page": numbered(2048)}
    shard(tmp_path, 1, {key: (value, [0]) for key, value in full.items()})
    consolidate_safetensors_files(tmp_path, tmp_path / "out", dict.fromkeys(full, 1))
    path = tmp_path / "out" / "model-00001-of-00001.safetensors"
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 4096 == 0
    assert {key: header[key]["data_offsets"][0] % full[key].element_size() for key in full} == dict.fromkeys(full, 0)
    assert header["page"]["data_offsets"][0] == 0


def save_and_consolidate(folder, mapping, num_threads):
    save("ours", spread_state(), folder, save_distributed=True)
    dist.barrier()
    consolidate_safetensors_files_on_every_rank(folder, folder + "/out", mapping, num_threads)
    return sorted(os.listdir(folder + "/out"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_files(rank_pool, tmp_path, ranks):
    """Each rank makes some of three files; all see the whole model when the call returns."""
    keys = [*full_state(), "chunks"]
    mapping = {key: number % 3 + 1 for number, key in enumerate(keys)}
    names = [*(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), INDEX]
    assert rank_pool.run(ranks, save_and_consolidate, str(tmp_path), mapping, 2) == [names] * ranks
    found = by_library(tmp_path / "out")
    assert same(found, {**full_state(), "chunks": numbered(10, 3)}) == []
    weights = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert weights == {key: names[number - 1] for key, number in mapping.items()}


def consolidate_with_a_failure(folder):
    if dist.get_rank() == 1:

        def fail(*args, **kwargs):
            raise OSError(28, "no space")

        before, pipeline.write_parts = pipeline.write_parts, fail
    try:
        consolidate_safetensors_files_on_every_rank(folder, folder + "/out", {"a": 1, "b": 2})
    except CheckpointError as error:
        return type(error).__name__, "no space" in str(error), sorted(os.listdir(folder + "/out"))
    finally:
        if dist.get_rank() == 1:
            pipeline.write_parts = before
    return None


def test_a_rank_that_fails_fails_all_and_the_old_model_stays(rank_pool, tmp_path):
    shard(tmp_path, 1, {"a": (numbered(4), [0]), "b": (numbered(3), [0])})
    consolidate_safetensors_files(tmp_path, tmp_path / "out", {"a": 1})
    before = by_library(tmp_path / "out")
    outcome = rank_pool.run(2, consolidate_with_a_failure, str(tmp_path))
    assert [(kind, said) for kind, said, _ in outcome] == [("CheckpointError", True)] * 2
    assert sorted(os.listdir(tmp_path / "out")) == ["model-00001-of-00001.safetensors", INDEX]
    assert same(by_library(tmp_path / "out"), before) == []


def test_bits_that_a_disk_loses_are_found_by_reading_back(tmp_path, monkeypatch):
    """Files are compared with what was written before they get their names; nothing is published."""
    shard(tmp_path / "in", 1, {"a": (numbered(300, 300), [0, 0])})
    lose_bits(monkeypatch)
    with pytest.raises(ChecksumMismatch, match="'a'"):
        consolidate_safetensors_files(tmp_path / "in", tmp_path / "out", {"a": 1})
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_the_tensors(tmp_path, monkeypatch):
    full = torch.arange(15 << 20, dtype=torch.int32).reshape(1024, -1)
    halves = full.shape[1] // 2
    shard(tmp_path, 1, {"rows": (full[:300], [0, 0]), "columns": (full[:, :halves], [0, 0])})
    shard(tmp_path, 2, {"rows": (full[300:], [300, 0]), "columns": (full[:, halves:], [0, halves])})
    monkeypatch.setenv("SHARDKEEP_HOST_BUDGET_BYTES", str(4 << 20))
    with memory_used() as used:
        consolidate_safetensors_files(tmp_path, tmp_path / "out", {"rows": 1, "columns": 1}, 2)
    python, everything = used
    assert python < 1 << 20
    assert everything < 16 << 20
    assert seen(by_library(tmp_path / "out")["columns"]) == seen(full)


def test_types_of_less_than_a_byte(tmp_path):
    raw = torch.arange(60, dtype=torch.uint8).reshape(5, 12)
    full = {"four": raw.view(torch.float4_e2m1fn_x2), "eight": raw.view(torch.float8_e8m0fnu)}
    save("ours", full, tmp_path, no_dist=True, save_distributed=True)
    consolidate_safetensors_files(tmp_path, tmp_path / "out", None)
    for found in (
        by_library(tmp_path / "out"),
        load(
            "ours", {key: raw.clone().zero_().view(value.dtype) for key, value in full.items()}, tmp_path, no_dist=True
        ),
    ):
        assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in full.items()}
        assert all(torch.equal(value.view(torch.uint8), raw) for value in found.values())


def test_tensors_left_out_of_the_mapping_are_named(tmp_path, caplog):
    """A mapping may choose tensors, as in torch; those it leaves out are logged."""
    shard(tmp_path, 1, {"a": (numbered(4), [0]), "b": (numbered(3), [0])})
    with caplog.at_level(logging.WARNING, logger="shardkeep"):
        consolidate_safetensors_files(tmp_path, tmp_path / "out", {"a": 1})
    assert "leaves out 1 tensor of" in caplog.text
    assert list(by_library(tmp_path / "out")) == ["a"]


def test_shards_and_model_may_share_a_directory(tmp_path):
    for turn in range(2):
        path = shard(tmp_path, 1, {"a": (numbered(4) + turn, [0])})
        consolidate_safetensors_files(tmp_path, tmp_path, {"a": 1})
        assert os.path.exists(path)
        with safe_open(tmp_path / "model-00001-of-00001.safetensors", framework="pt") as file:
            assert seen(file.get_tensor("a")) == seen(numbered(4) + turn)
