"""Loads in which ranks read for each other, over real ranks: the same bits, fewer reads, and every failure told to all."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardkeep as sk
from shardkeep.engine.shared_reads import Exchange
from shardkeep.errors import ChecksumMismatch, RanksSilent
from shardkeep.plan import save_plan, sharing
from tests.dcp.sides import quietly
from tests.engine.samples import bits, random_tensor

MESHES = {2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (4, 1)]}
SHAPES = [(), (5,), (700, 60), (30, 5, 400), (0, 3), (1, 9), (1, 1, 3000), (160, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def shared(**kwargs):
    """Options of a load whose messages are small, so that there are many."""
    return sk.Options(share_reads=True, host_budget_bytes=2 << 20, **kwargs)


@contextlib.contextmanager
def small_slices():
    """Cut tensors of a few kilobytes over ranks, as large ones are."""
    with mock.patch.object(save_plan, "SLICE_NBYTES", 5000), mock.patch.object(sharing, "SLICE_NBYTES", 5000):
        yield


@contextlib.contextmanager
def logged():
    """The lines that shardkeep logs."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardkeep").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("shardkeep").removeHandler(handler)


def full_tensors(seed):
    rng = random.Random(seed)
    return {
        f"t{n}": random_tensor(shape, rng.choice(DTYPES[:5] if len(shape) > 1 else DTYPES), seed + n)
        for n, shape in enumerate(SHAPES)
    }


def laid_out(full, rng):
    """A tensor as it might stand in a state: in any layout over all ranks, or whole, in memory of any order."""
    kind = rng.randrange(4)
    if kind == 0 or full.dim() == 0:
        return full.clone()
    if kind == 1:
        return full.transpose(0, -1).contiguous().transpose(0, -1)
    mesh = rng.choice(MESHES[dist.get_world_size()])
    placements = [rng.choice([Replicate(), Replicate(), *(Shard(d) for d in range(full.dim()))]) for _ in mesh]
    return distribute_tensor(full, init_device_mesh("cpu", mesh), placements, src_data_rank=None)


def blank_of(seed):
    """An empty state of a random layout, the same on every rank but for what each rank has for itself."""
    rng = random.Random(seed)
    state = {key: laid_out(torch.zeros_like(full), rng) for key, full in full_tensors(seed // 10).items()}
    return {**state, "own": sk.PerRank({"rng": torch.zeros(3)}), "step": 0}


def local(state):
    """Everything that this rank holds, bit for bit."""
    return bits({key: each.to_local() if hasattr(each, "to_local") else each for key, each in state.items()})


def load_layouts(folder, seeds):
    received = 0
    for seed in seeds:
        full = full_tensors(seed // 10)
        where = f"{folder}/{seed}"
        own = {"rng": torch.full((3,), float(dist.get_rank()))}
        rng = random.Random(seed)
        saved = {key: laid_out(each, rng) for key, each in full.items()}
        sk.save({**saved, "own": sk.PerRank(own), "step": seed}, where)
        plain, together = blank_of(seed + 1), blank_of(seed + 1)
        sk.load(plain, where)
        with small_slices():
            received += sk.load(together, where, options=shared()).bytes_received
        assert local(together) == local(plain)
        assert together["step"] == seed
        assert together["own"].value["rng"].tolist() == own["rng"].tolist()
    return received


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_layout_loads_as_without_sharing(rank_pool, tmp_path, ranks):
    """
    Random meshes, placements, strides and dtypes: what ranks get from each other is bit for bit what they would read.
    """
    received = rank_pool.run(ranks, load_layouts, str(tmp_path), range(ranks * 100, ranks * 100 + 40, 10))
    assert min(received) > 0


def load_replicas(where, options, group_of=None):
    group = dist.new_group(group_of) if group_of else None
    if group_of and dist.get_rank() not in group_of:
        return None
    state = {"w": torch.zeros(6 << 20), **{f"t{n}": torch.zeros(1000) for n in range(200)}}
    report = sk.load(state, where, options=options, group=group)
    assert all(each.eq(n + 1).all() for n, each in enumerate(state.values()))
    return report.bytes_read, report.bytes_received


def replicas(where):
    state = {"w": torch.ones(6 << 20), **{f"t{n}": torch.full((1000,), n + 2.0) for n in range(200)}}
    sk.save(state, where)
    return sum(each.nbytes for each in state.values())


def test_replicas_are_read_once(rank_pool, tmp_path):
    """
    Four replicas read a quarter each, of large tensors and of small ones, and get the rest from each other; without
    the option each reads all.
    """
    nbytes = replicas(tmp_path / "ck")
    read = rank_pool.run(4, load_replicas, tmp_path / "ck", sk.Options(share_reads=True))
    assert sum(each for each, _ in read) < 1.2 * nbytes
    assert max(each for each, _ in read) < 0.4 * nbytes
    # 24 MB over four ranks are cut; the rest comes from the others, and every byte has one reader.
    assert sum(got for _, got in read) == 3 * nbytes
    alone = rank_pool.run(2, load_replicas, tmp_path / "ck", sk.Options())
    assert all(each >= nbytes and got == 0 for each, got in alone)


def test_a_subgroup_shares_by_its_own_ranks(rank_pool, tmp_path):
    """Ranks 3 and 1 of four load together: messages go by their numbers in the group."""
    nbytes = replicas(tmp_path / "ck")
    heard = rank_pool.run(4, load_replicas, tmp_path / "ck", shared(), group_of=[1, 3])
    assert heard[0] is None
    assert heard[2] is None
    assert sum(heard[rank][1] for rank in (1, 3)) == nbytes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(300, 400)
        self.down = nn.Linear(400, 300)
        self.down.weight = nn.Parameter(self.up.weight.detach().t().contiguous())


def load_objects(where):
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        wanted = nn.Linear(300, 400)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    tied = net.up.weight
    state = {"net": net, "opt": optimizer, "lazy": wanted.weight.detach(), "tied": tied}
    saw = tied._version
    with small_slices():
        report = sk.load(state, where, options=shared())
    assert tied._version > saw
    return report.bytes_received > 0, bits({**net.state_dict(), "lazy": state["lazy"]}), str(optimizer.state_dict())


def test_modules_optimizers_and_meta_tensors(rank_pool, tmp_path):
    """What stands in a state for objects, and tensors that had no memory, are there before objects are given theirs."""
    torch.manual_seed(9)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    sum(p.square().sum() for p in net.parameters()).backward()
    optimizer.step()
    sk.save({"net": net, "opt": optimizer, "lazy": torch.ones(400, 300), "tied": net.up.weight}, tmp_path / "ck")
    expected = (True, bits({**net.state_dict(), "lazy": torch.ones(400, 300)}), str(optimizer.state_dict()))
    assert rank_pool.run(3, load_objects, tmp_path / "ck") == [expected] * 3


def load_unlike(where):
    rank = dist.get_rank()
    one = torch.zeros(40, 50)
    # Rank 0 has views of one memory for two tensors, rank 1 another dtype, the others nothing of the kind.
    state = {"a": one, "b": one[:20] if rank == 0 else torch.zeros(20, 50)}
    state["c"] = torch.zeros(3000, dtype=torch.float64 if rank == 1 else torch.float32)
    with torch.inference_mode():
        state["d"] = torch.zeros(3000)
    state["e"] = torch.zeros(3000, requires_grad=rank == 2)
    report = sk.load(state, where, cast=True, options=shared())
    assert report.cast == ({"c": "float32 -> float64"} if rank == 1 else {})
    return [state[key].double().mean().item() for key in "abcde"], report.bytes_received


def test_ranks_whose_tensors_are_of_another_kind_read_for_themselves(rank_pool, tmp_path):
    """Memory that is filled twice on one rank never reaches another, and what is converted is not sent."""
    values = {"a": torch.full((40, 50), 1.0), "b": torch.full((20, 50), 2.0)}
    sk.save({**values, **{key: torch.full((3000,), n + 3.0) for n, key in enumerate("cde")}}, tmp_path / "ck")
    heard = rank_pool.run(4, load_unlike, tmp_path / "ck")
    for rank, (means, received) in enumerate(heard):
        assert means[2:] == [3.0, 4.0, 5.0]
        assert rank == 0 or means[:2] == [1.0, 2.0]
        assert received > 0 or rank < 2


def load_torchs(where):
    state = {"w": torch.zeros(3000, 100), "b": torch.zeros(7), "step": 0}
    with small_slices():
        report = sk.load(state, where, options=shared())
    return bits(state), report.bytes_received


def test_checkpoints_of_torchs_layout(rank_pool, tmp_path):
    """What torch saved is shared as what we saved."""
    state = {"w": torch.randn(3000, 100), "b": torch.randn(7), "step": 3}
    quietly(theirs.save, state, checkpoint_id=tmp_path / "ck", no_dist=True)
    heard = rank_pool.run(3, load_torchs, tmp_path / "ck")
    assert [each for each, _ in heard] == [bits(state)] * 3
    assert sum(received for _, received in heard) == 2 * (3000 * 100 + 7) * 4


# Failures


def load_damaged(where):
    state = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20), "c": torch.zeros(1 << 20)}
    with pytest.raises(ChecksumMismatch) as told:
        sk.load(state, where, options=shared())
    return sorted(told.value.by_rank), str(told.value)


def test_damage_that_one_rank_finds_is_told_to_all(rank_pool, tmp_path):
    """A broken block is read by one rank alone: all fail, before any of them waits for bytes that will not come."""
    sk.save({key: torch.full((1 << 20,), n + 1.0) for n, key in enumerate("abc")}, tmp_path / "ck")
    [file] = (tmp_path / "ck").glob("*.safetensors")
    with open(file, "r+b") as data:
        data.seek(-3_000_000, os.SEEK_END)
        data.write(b"\x7f")
    heard = rank_pool.run(3, load_damaged, tmp_path / "ck")
    assert {len(ranks) for ranks, _ in heard} == {1}
    assert len({text for _, text in heard}) == 1


def signs():
    """Where ranks of a test leave signs for each other."""
    return dist.PrefixStore("signs", dist.distributed_c10d._get_default_store())


def lose_a_rank(where, how):
    state = {f"t{n}": torch.zeros(100_000) for n in range(9)}
    if dist.get_rank() == 2:
        begin, left = Exchange._begin, [3]

        def fail(self, step):
            left[0] -= 1
            if left[0] == 0:
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                signs().wait(["told 0", "told 1"])
            return begin(self, step)

        with mock.patch.object(Exchange, "_begin", fail), contextlib.suppress(sk.CheckpointError):
            sk.load(state, where, options=shared(timeout_s=2))
        return None
    with pytest.raises(RanksSilent) as told:
        sk.load(state, where, options=shared(timeout_s=2))
    signs().set(f"told {dist.get_rank()}", "")
    return told.value.ranks, str(told.value)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_is_lost_in_the_exchange_is_named(rank_pool, tmp_path, how):
    """A rank dies, or hangs, while ranks send each other what they read: all others raise, and name it."""
    sk.save({f"t{n}": torch.full((100_000,), n + 1.0) for n in range(9)}, tmp_path / "ck")
    outcomes = rank_pool.outcomes(3, lose_a_rank, tmp_path / "ck", how)
    assert bool(outcomes[2].died) == (how == "dies")
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        ranks, text = outcome.value
        assert 2 in ranks
        assert "rank 2" in text


def fail_to_copy(where):
    state = {"a": torch.zeros(500, 400).t(), "b": torch.zeros(300)}
    failing = mock.patch.object(Exchange, "_copy", side_effect=RuntimeError("no room on the device"))
    with failing if dist.get_rank() == 1 else contextlib.nullcontext(), pytest.raises(Exception) as told:  # noqa: PT011
        sk.load(state, where, options=shared())
    return type(told.value).__name__, list(told.value.by_rank), "no room on the device" in str(told.value)


def test_a_rank_that_cannot_copy_keeps_nobody_waiting(rank_pool, tmp_path):
    """One rank fails on its own in the middle of the exchange: it goes on for the others, and then all fail."""
    sk.save({"a": torch.ones(400, 500), "b": torch.ones(300)}, tmp_path / "ck")
    heard = rank_pool.run(3, fail_to_copy, tmp_path / "ck")
    assert [each[1:] for each in heard] == [([1], True)] * 3


# Where nothing is shared


def load_with_log(where, on_ranks):
    options = shared() if dist.get_rank() in on_ranks else sk.Options()
    state = {"w": torch.zeros(1000)}
    with logged() as lines:
        report = sk.load(state, where, options=options)
    assert state["w"].eq(1).all()
    return report.bytes_received, [line for line in lines if "not shared" in line]


@pytest.mark.parametrize(
    ("backend", "on_ranks", "said"),
    [
        ("gloo", [0], "rank 1: share_reads is not set"),
        ("gloo", [1], "rank 0: share_reads is not set"),
        ("fake", [0, 1], "rank 0: the process group's backend for the CPU is fake, not gloo"),
        ("cuda:gloo", [0, 1], "rank 0: the process group (cuda:gloo) has no backend for the CPU"),
        ("gloo", [], ""),
    ],
)
def test_one_line_says_why_nothing_is_shared(rank_pool, tmp_path, backend, on_ranks, said):
    """
    Where some ranks were not asked to share, or have nothing to send through, each reads for itself, and rank 0 says so.
    """
    sk.save({"w": torch.ones(1000)}, tmp_path / "ck")
    heard = rank_pool.run(2, load_with_log, tmp_path / "ck", on_ranks, backend=backend)
    assert [received for received, _ in heard] == [0, 0]
    assert heard[0][1] == ([f"reads are not shared: {said}"] if said else [])
    assert heard[1][1] == []


def test_a_process_alone_shares_nothing(tmp_path):
    """Without a process group the option only makes for a line in the log."""
    sk.save({"w": torch.ones(10)}, tmp_path / "ck")
    state = {"w": torch.zeros(10)}
    with logged() as lines:
        assert sk.load(state, tmp_path / "ck", options=shared()).bytes_received == 0
    assert "reads are not shared: rank 0: there is only one rank" in lines
    assert state["w"].eq(1).all()


# On an accelerator


def load_on_device(where):
    state = {"w": torch.zeros(700, 900, device=DEVICE), "b": torch.zeros(9, device=DEVICE), "c": torch.zeros(40)}
    report = sk.load(state, where, options=shared())
    return report.bytes_received > 0, bits({key: each.cpu() for key, each in state.items()})


@pytest.mark.skipif(DEVICE is None, reason="needs an accelerator")
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_tensors_on_an_accelerator(rank_pool, tmp_path, backend):
    """What is on a device goes through host memory, over gloo; ranks on one device could not use nccl."""
    state = {"w": torch.randn(700, 900), "b": torch.randn(9), "c": torch.randn(40)}
    sk.save(state, tmp_path / "ck")
    heard = rank_pool.run(3, load_on_device, tmp_path / "ck", backend=backend)
    assert heard == [(True, bits(state))] * 3
