"""A state with the same tensors as before is described by a comparison, which notices every change that matters."""

import weakref
from collections import OrderedDict
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardkeep as sk
from shardkeep.state import describe
from shardkeep.state.leaves import describe_blocks, describe_ordinary
from tests.asynchronous.scene import PATIENCE_S
from tests.asynchronous.test_snapshots import many_shapes, tensors_of
from tests.engine.samples import all_dtypes, bits, random_tensor

SAVES = {"save": sk.save, "async_save": lambda state, where: sk.async_save(state, where).result(PATIENCE_S)}


def state():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.AdamW(net[:2].parameters())
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    return {
        "net": net,
        "optim": optimizer,
        "counts": {1: {"a": 1}, 2: {"b": 2}},
        "model": {"w": torch.arange(16.0).view(4, 4), "v": torch.arange(16.0, 32.0).view(4, 4), "z": torch.ones(6)},
        "complex": torch.arange(4.0) + 1j,
        "step": 1,
    }


def put(key, make):
    """A change that puts another tensor, made of the old one, in its place."""

    def change(state):
        state["model"][key] = make(state["model"][key])

    return change


def in_place(make):
    """A change of the tensor object itself."""
    return lambda state: make(state["model"]["w"])


def swapped(state):
    model = state["model"]
    model["w"], model["v"] = model["v"], model["w"]


def replaced(state):
    net, kept = state["net"], state["optim"].state
    before, net[1].bias = net[1].bias, torch.nn.Parameter(torch.ones(2))
    state["optim"].param_groups[0]["params"][-1], kept[net[1].bias] = net[1].bias, kept.pop(before)


CHANGES = {
    "a parameter was replaced": replaced,
    "a module was added": lambda state: state["net"].append(torch.nn.Linear(1, 1)),
    "a module was replaced": lambda state: state["net"].insert(1, torch.nn.LayerNorm(2, elementwise_affine=False)),
    "a buffer is not saved": lambda state: state["net"][1]._non_persistent_buffers_set.add("running_mean"),
    "a state_dict of its own": lambda state: setattr(state["net"][0], "_save_to_state_dict", lambda *_: None),
    "a hook": lambda state: state["net"].register_state_dict_post_hook(
        lambda _, found, *__: found.pop("0.bias") is None or None
    ),
    "optimizer state": lambda state: state["optim"].state[state["net"][0].bias].update(exp_avg=torch.ones(2)),
    "no optimizer state": lambda state: state["optim"].state.pop(state["net"][0].bias),
    "another group": lambda state: state["optim"].add_param_group({"params": [state["net"][2].weight]}),
    "another kind of key": lambda state: state.update(counts={True: {"a": 1}, 2: {"b": 2}}),
    "moved to the next": lambda state: state.update(counts={1: {"a": 1, "b": 2}, 2: {}}),
    "a hyper-parameter": lambda state: state["optim"].param_groups[0].update(betas=(0.5, 0.5)),
    "values": in_place(lambda w: w.neg_()),
    "another tensor": put("w", torch.clone),
    "another shape in place": in_place(lambda w: w.resize_(2, 8)),
    "fewer elements in place": in_place(lambda w: w.resize_(2, 4)),
    "strides in place": in_place(lambda w: w.t_()),
    "other memory in place": in_place(lambda w: w.set_(torch.full((4, 4), 7.0))),
    "data of another shape": in_place(lambda w: setattr(w, "data", w.data.view(16))),
    "data of other strides": in_place(lambda w: setattr(w, "data", w.data.t())),
    "other data": in_place(lambda w: setattr(w, "data", torch.full((4, 4), 7.0))),
    "requires gradients": in_place(lambda w: w.requires_grad_()),
    "same memory, another shape": put("w", lambda w: w.view(2, 8)),
    "same memory, other strides": put("w", torch.Tensor.t),
    "same memory, another dtype": put("w", lambda w: w.view(torch.int32)),
    "same memory, negative": put("w", torch._neg_view),
    "same memory, other offset": put("w", lambda w: w[1:]),
    "same memory, expanded": put("w", lambda w: w[0].expand(4, 4)),
    "same memory, an array": put("w", torch.Tensor.numpy),
    "same memory, a parameter": put("w", torch.nn.Parameter),
    "same memory, a shard": put("w", lambda w: sk.ShardedBox(w, offsets=(0, 0), shape=(4, 4))),
    "same memory, per rank": put("w", sk.PerRank),
    "no elements": put("w", lambda w: w[:0]),
    "a plain value": put("w", lambda w: 5),
    "conjugate": lambda state: state.update(complex=state["complex"].conj()),
    "tied": lambda state: state["model"].update(v=state["model"]["w"]),
    "swapped": swapped,
    "renamed": lambda state: state["model"].update(x=state["model"].pop("z")),
    "removed": lambda state: state["model"].pop("w"),
    "added": lambda state: state["model"].update(x=torch.zeros(3)),
    "another order": lambda state: state["model"].update(w=state["model"].pop("w")),
    "another container": lambda state: state.update(other={"z": state["model"].pop("z")}),
    "another kind of container": lambda state: state.update(model=OrderedDict(state["model"])),
    "an empty container": lambda state: state.update(empty={}),
    "another value": lambda state: state.update(step=2),
    "another kind of value": lambda state: state.update(step=1.0),
    "no tensors": lambda state: [state.pop("model"), state.pop("complex")],
}


@pytest.mark.parametrize("how", SAVES)
@pytest.mark.parametrize("kind", CHANGES)
def test_every_change_is_noticed(kind, how, monkeypatch):
    """After a save of a state that has changed since, the checkpoint is the one of a process that knows nothing."""
    monkeypatch.setattr("shardkeep.state.leaves.TENSORS_IN_CACHE", 3)
    changed, fresh, again = state(), sk.MemoryStore(), sk.MemoryStore()
    for _ in range(2):
        SAVES[how](changed, sk.MemoryStore())
    CHANGES[kind](changed)
    SAVES[how](changed, again)
    sk.finish_saves()
    SAVES[how](changed, fresh)
    found, wanted = sk.open(again), sk.open(fresh)
    assert bits(found.to_dict()) == bits(wanted.to_dict())
    assert found.to_dict().keys() == wanted.to_dict().keys()
    assert str(found.to_dict().get("counts")) == str(wanted.to_dict().get("counts"))  # 1 and True are different keys
    for store in (again, fresh):
        sk.open(store).verify()
    names = [sorted(info.name.split("-")[0] for info in store.list()) for store in (again, fresh)]
    assert names[0] == names[1]
    sizes = [
        sorted(info.nbytes for info in store.list() if info.name.endswith(".safetensors")) for store in (again, fresh)
    ]
    assert sizes[0] == sizes[1]


def test_what_cannot_be_saved_any_more_is_refused():
    """Memory that was freed, and a tensor without any, are errors of the second save as of the first."""
    for spoil in (lambda w: w.untyped_storage().resize_(0), lambda w: setattr(w, "data", w.data.to("meta"))):
        saved = state()
        sk.async_save(saved, sk.MemoryStore()).result(PATIENCE_S)
        try:
            spoil(saved["model"]["w"])
        except RuntimeError:  # torch does not allow this change in place
            saved["model"]["w"] = saved["model"]["w"].to("meta")
        with pytest.raises(sk.UnsupportedLeaf, match=r"model\.w"):
            sk.async_save(saved, sk.MemoryStore())


def test_the_second_save_compares():
    """Columns are made once, until `finish_saves`."""
    saved = state()
    with mock.patch.object(describe, "_rows", wraps=describe._rows) as made:
        for _ in range(3):
            sk.async_save(saved, sk.MemoryStore()).result(PATIENCE_S)
        assert made.call_count == 1
        sk.finish_saves()
        sk.async_save(saved, sk.MemoryStore()).result(PATIENCE_S)
        assert made.call_count == 2


def test_what_is_kept_holds_no_tensor():
    saved = state()
    sk.async_save(saved, sk.MemoryStore()).result(PATIENCE_S)
    watched = [weakref.ref(tensor) for tensor in saved["model"].values()]
    saved.clear()
    assert [ref() for ref in watched] == [None] * 3


@pytest.mark.filterwarnings("ignore:(The PyTorch API of nested tensors|Sparse CSR)")
def test_many_leaves_are_described_as_one_is():
    """Lists of leaves are ordinary if each leaf is, and say the same of it."""
    leaves = [*tensors_of(many_shapes()), torch.eye(3).to_sparse(), torch.empty(2, device="meta")]
    leaves += [torch.eye(3).to_sparse_csr(), torch.eye(3).to_mkldnn(), torch.ones(3)[:0], torch.ones(3, 0)]
    leaves += [torch.ones(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(2)), np.ones(3), 5]
    leaves += [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))]
    leaves += [
        torch.nested.nested_tensor([torch.ones(2)]),
        torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
    ]
    leaves += [random_tensor((3, 2), dtype) for dtype in all_dtypes()]
    ordinary = []
    for leaf in leaves:
        one, (many,) = describe_ordinary(leaf), describe_blocks([leaf])
        assert (one is None) == (many is None), leaf
        if one is not None and many is not None:
            dtype, shape, start, piece = one
            assert many[0] == ([start], [shape], [dtype], [], [])
            assert (piece is leaf, piece.requires_grad) == (many[1][0] is leaf, many[1][0].requires_grad)
            ordinary.append(leaf)
    assert len(ordinary) >= 10
    assert None not in list(describe_blocks(ordinary))


def placements_change(folder):
    """Save one local tensor as parts of different DTensors, then each again in a process that knows nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh, grid = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (size, 1))
    local = torch.arange(16.0).view(4, 4) + 100 * rank
    same = torch.arange(16.0).view(4, 4)

    def of(local, mesh, *placements, shape=None):
        stride = None if shape is None else (shape[1], 1)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    versions = {
        "rows": lambda: of(local, mesh, Shard(0)),
        "columns": lambda: of(local, mesh, Shard(1)),
        "replicas": lambda: of(same, mesh, Replicate()),
        "rows of a grid": lambda: of(local, grid, Shard(0), Shard(1)),
        "uneven rows": lambda: of(local[: 4 - rank], mesh, Shard(0), shape=(4 * size - sum(range(size)), 4)),
        "plain": lambda: sk.PerRank(local),
        "no rows": lambda: of(local[: int(rank == 0)], mesh, Shard(0), shape=(1, 4)),
    }
    found = {}
    for known in ("kept", "fresh"):
        for name, make in versions.items():
            if known == "fresh":
                sk.finish_saves()
            sk.async_save({"w": make()}, f"{folder}/{known}-{name}").result(PATIENCE_S)
            found[known, name] = bits(sk.open(f"{folder}/{known}-{name}").to_dict())
    return [name for name in versions if found["kept", name] != found["fresh", name]], len(
        set(map(str, found.values()))
    )


def test_another_placement_of_the_same_memory_is_noticed(rank_pool, tmp_path):
    assert rank_pool.run(2, placements_change, str(tmp_path)) == [([], 6)] * 2  # rows of a grid of one column are rows


def shards_again(folder):
    """Save DTensors several times; return how often their columns were made."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = torch.nn.Parameter(distribute_tensor(torch.arange(80.0).view(8, 10), mesh, [Shard(0)]))
    with mock.patch.object(describe, "_rows", wraps=describe._rows) as made:
        for step in range(3):
            with torch.no_grad():
                weights.add_(1)
            sk.async_save({"w": weights}, f"{folder}/{step}").result(PATIENCE_S)
    wanted = [torch.equal(sk.open(f"{folder}/{n}")["w"][:], torch.arange(80.0).view(8, 10) + n + 1) for n in range(3)]
    return made.call_count, wanted


def test_the_second_save_of_shards_compares(rank_pool, tmp_path):
    """DTensors of the same layout in the same memory are described once, and saved with the values of each call."""
    assert rank_pool.run(2, shards_again, str(tmp_path)) == [(1, [True] * 3)] * 2
