"""Large groups are cut into several files: every chunk in one of them, balanced, none too small, names as the format says."""

import os
import re
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import shardkeep as sk
from shardkeep.engine.native_save import data_name, make_manifest, split_by_rank
from shardkeep.format.record import BLOB_NAME
from shardkeep.layouts import native
from shardkeep.plan import save_plan as parts
from shardkeep.plan.save_plan import plan_save
from shardkeep.state.describe import describe
from shardkeep.testing.thread_ranks import run_thread_ranks
from tests.engine.samples import bits, rich_state

MIB = 1 << 20
SAVE_ID = "0" * 20

tensor_sizes = st.one_of(st.integers(1, 8 * MIB), st.integers(1, 700 * MIB))
states = st.dictionaries(
    st.sampled_from(["model", "optim", "ema/x", "a.b"]), st.lists(tensor_sizes, min_size=1, max_size=20), min_size=1
)


def virtual(nbytes):
    """A tensor of so many bytes that takes up one."""
    return torch.zeros(1, dtype=torch.uint8).expand(nbytes)


def plan_of(ranks):
    """The plan of ranks that each hold tensors of their own: a dict of groups for each, of sizes."""
    drafts = []
    for rank, groups in enumerate(ranks):
        state = {
            group: {f"{rank}.{i}": virtual(nbytes) for i, nbytes in enumerate(sizes)} for group, sizes in groups.items()
        }
        drafts.append(make_manifest(describe(state, rank=rank), allow_pickle=False, check_replicas=False))
    return plan_save(drafts)


@settings(max_examples=120, deadline=None)
@given(st.lists(states, min_size=1, max_size=3))
@example([{"model": [3 << 30, 100 * MIB, 100 * MIB]}])
@example([{"model": [300 * MIB] * 17, "optim": [1] * 50}])
def test_every_chunk_is_in_one_file_and_files_are_as_the_rules_say(ranks):
    """
    Chunks fill their files without gaps; parts are numbered from 1, large enough, about equal, and not too many; names are
    valid, different, and tell their save, and each rank gets its own.
    """
    plan = plan_of(ranks)
    pieces = plan.pieces
    sizes = [nbytes for groups in ranks for group in groups.values() for nbytes in group]
    assert sorted(pieces.nbytes.tolist()) == sorted(sizes)
    for file, (rank, each) in enumerate(zip(plan.ranks.tolist(), plan.files, strict=True)):
        mine = pieces.take(np.flatnonzero(pieces.file == file))
        assert mine.start.tolist() == (np.cumsum(mine.nbytes) - mine.nbytes).tolist()
        assert int(mine.nbytes.sum()) == each.data_nbytes > 0
        assert set(mine.rank.tolist()) == {rank}

    together = defaultdict(list)
    for file, (rank, each) in enumerate(zip(plan.ranks.tolist(), plan.files, strict=True)):
        together[rank, each.group].append((each.part, each.data_nbytes, pieces.nbytes[pieces.file == file]))
    for found in together.values():
        if len(found) == 1:
            assert found[0][0] == 0
            continue
        assert [part for part, _, _ in found] == list(range(1, len(found) + 1))
        loads = [load for _, load, _ in found]
        assert min(loads) >= parts.PART_NBYTES
        assert max(loads) <= sum(loads) / len(loads) + max(int(nbytes.max()) for _, _, nbytes in found)
    for rank in range(len(ranks)):
        mine = [each for each, writer in zip(plan.files, plan.ranks.tolist(), strict=True) if writer == rank]
        assert sum(each.part > 0 for each in mine) <= parts.MOST_PARTS + len(ranks[rank])

    pairs = list(zip(plan.ranks.tolist(), plan.files, strict=True))
    names = [data_name(file, rank, len(ranks), SAVE_ID) for rank, file in pairs]
    assert len(set(names)) == len(names)
    for name, (rank, each) in zip(names, pairs, strict=True):
        assert BLOB_NAME.fullmatch(name)
        assert native.save_id_of(name) == SAVE_ID
        assert ("-part" in name, f"-{rank:05d}-of-" in name) == (each.part > 0, True)
    orders = enumerate(split_by_rank(plan, len(ranks)))
    assert [data_name(file, rank, len(ranks), SAVE_ID) for rank, each in orders for file in each.files] == names


def test_parts_have_the_blocks_of_the_whole():
    [orders] = split_by_rank(plan_of([{"model": [300 * MIB] * 16, "other": [MIB]}]), 1)
    assert [file.block_nbytes for file in orders.files] == [MIB] * 8 + [64 << 10]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 64 * MIB), min_size=1, max_size=200), st.integers(1, 8))
def test_a_cut_is_no_worse_than_one_chunk(sizes, count):
    """The fullest part has at most the mean and one chunk; small chunks that stay together are neighbours."""
    nbytes = np.array(sizes, np.int64)
    part = parts.divide_chunks(nbytes, count)
    loads = np.bincount(part, weights=nbytes, minlength=count)
    assert len(loads) == count
    assert loads.max() <= nbytes.sum() / count + nbytes.max()
    small = part[nbytes < parts.SLICE_NBYTES]
    assert np.count_nonzero(np.diff(small)) < count


def test_a_small_state_and_a_lone_tensor_are_one_file():
    plan = plan_of([{"model": [100 * MIB] * 3}, {"model": [20 << 30]}])
    assert [plan.ranks.tolist(), [file.part for file in plan.files]] == [[0, 1], [0, 0]]


@pytest.mark.parametrize(("ranks", "count"), [(1, 8), (8, 8), (16, 4), (32, 2), (64, 1), (100, 1)])
def test_many_ranks_cut_less(ranks, count):
    """A rank alone writes eight files; ranks that are many enough write one each."""
    plan = plan_of([{"model": [300 * MIB] * 16}] * ranks)
    assert len(plan.files) == ranks * count


@pytest.fixture
def tiny_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART_NBYTES", 16 << 10)
    monkeypatch.setattr(parts, "SLICE_NBYTES", 1 << 10)


def data_files(place):
    return sorted(name for name in os.listdir(place) if name.endswith(".safetensors"))


def test_a_checkpoint_in_parts_is_read_like_any_other(tmp_path, tiny_parts):
    """What was saved in parts comes back bit for bit, is verified, and every part is a file that safetensors reads."""
    gen = torch.Generator().manual_seed(0)
    many = {f"{i:02}": torch.randn(64, i + 1, generator=gen) for i in range(60)}
    state = {**rich_state(), "many": many, "more": {"w": torch.randn(40, 512, generator=gen)}}
    sk.save(state, tmp_path)
    names = data_files(tmp_path)
    numbered = [re.fullmatch(r"many-00000-of-00001-part(\d)-[0-9a-f]{20}\.safetensors", name) for name in names]
    assert [int(found[1]) for found in numbered if found] == [1, 2, 3, 4, 5, 6, 7]

    opened = sk.open(tmp_path)
    opened.verify()
    target = {"many": {key: torch.zeros_like(value) for key, value in many.items()}}
    sk.load(target, tmp_path, strict=False)
    assert bits(target["many"]) == bits(many)
    keys = []
    for name in names:
        with safe_open(tmp_path / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                keys.append(key)
                if key.startswith("many."):
                    assert bits(file.get_tensor(key)) == bits(many[key.removeprefix("many.")])
    assert sorted(key for key in keys if key.startswith("many.")) == [f"many.{key}" for key in sorted(many)]


def test_ranks_with_parts_load_into_other_ranks(tmp_path, tiny_parts):
    """Shards written by two ranks in parts are loaded by three; a new save over them leaves no part behind."""
    full = {f"w{i}": torch.randn(12, 500) for i in range(8)}

    def shard(tensor, world):
        rows = len(tensor) // world.size
        return sk.ShardedBox(
            tensor[rows * world.rank : rows * (world.rank + 1)].clone(),
            offsets=(rows * world.rank, 0),
            shape=tuple(tensor.shape),
        )

    def save(world):
        sk.save({"m": {key: shard(value, world) for key, value in full.items()}}, tmp_path, group=world, overwrite=True)

    def load(world):
        state = {"m": {key: shard(torch.zeros_like(value), world) for key, value in full.items()}}
        sk.load(state, tmp_path, group=world)
        return state["m"]

    run_thread_ranks(2, save)
    first = data_files(tmp_path)
    assert sum("-part" in name for name in first) == len(first) > 2
    run_thread_ranks(2, save)
    second = data_files(tmp_path)
    assert len(second) == len(first)
    assert not set(first) & set(second)
    for rank, found in enumerate(run_thread_ranks(3, load)):
        for key, value in full.items():
            assert bits(found[key].pieces[0][0]) == bits(value[4 * rank : 4 * rank + 4])
