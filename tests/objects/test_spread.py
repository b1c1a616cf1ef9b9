"""Objects on real ranks where the simple cases end: meta modules, state of one shard alone, odd layouts, failures."""

import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import shardkeep as sk
from shardkeep.testing.faulty_store import FaultyStore
from tests.engine.samples import bits
from tests.objects.wrappers import WIDTH, Net, fsdp2, one_step, tensor_parallel, trainable
from tests.training.samples import PerParameter, Rows


def sharded_net(seed=0, *, meta=False):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if not meta:
        return fsdp2(Net(), mesh)
    with torch.device("meta"):
        return fsdp2(Net(), mesh)


def whole(model):
    return {
        name: bits(p.full_tensor() if isinstance(p, DTensor) else p)
        for name, p in [*model.named_parameters(), *model.named_buffers()]
    }


def trained(model, optimizer, steps=2, seed=3):
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(one_step(model, torch.randn(6, WIDTH, generator=data)))
        optimizer.step()
    return losses


def save_net(where, build=sharded_net):
    model = build()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2, foreach=False)
    trained(model, optimizer)
    sk.save({"model": model, "optim": optimizer}, where)
    return whole(model), trained(model, optimizer, seed=4)


def load_on_meta(where):
    model = sharded_net(seed=9, meta=True)
    optimizer = torch.optim.AdamW(trainable(model), lr=0.5, foreach=False)
    first = next(iter(model.parameters()))
    report = sk.load({"model": model, "optim": optimizer}, where)
    same = first is next(iter(model.parameters())) and not any(p.is_meta for p in model.parameters())
    nothing_left = not report.missing and not report.unexpected
    return same and nothing_left, whole(model), trained(model, optimizer, seed=4)


@pytest.mark.parametrize(("writers", "readers"), [(2, 2), (4, 3), (1, 4)])
def test_a_sharded_module_on_meta_gets_its_memory_from_the_load(rank_pool, tmp_path, writers, readers):
    """Parameters stay the objects that the optimizer holds, on other numbers of ranks too, and training goes on."""
    expected, losses = rank_pool.run(writers, save_net, str(tmp_path / "c"))[0]
    for as_asked, loaded, went_on in rank_pool.run(readers, load_on_meta, str(tmp_path / "c")):
        assert as_asked
        assert loaded == expected
        assert went_on == (losses if readers == writers else pytest.approx(losses, rel=1e-5))


def load_a_share(where):
    with torch.device("meta"):
        model = nn.Linear(1024, 1024, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.Adam(model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = sk.load({"model": model, "optim": optimizer}, where)
    local = next(model.parameters()).to_local().nbytes
    return report.bytes_read, local, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_a_sharded_module_reads_its_shards_and_no_more(rank_pool, tmp_path):
    """Each of four ranks reads about a quarter of the model and of both moments: no full copy anywhere."""
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    total = sk.save({"model": model, "optim": optimizer}, tmp_path / "c").bytes_total
    for bytes_read, local, peak in rank_pool.run(4, load_a_share, str(tmp_path / "c")):
        assert local == 1 << 20
        assert bytes_read < total / 4 + (1 << 20)
        assert peak < 80 << 20


class Blockwise(PerParameter):
    """As 8-bit optimizers do: codes and scales of this rank's shard, in blocks, as plain tensors."""

    def update(self, p, kept, group):
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        blocks = -(-grad.numel() // 4)
        if not kept:
            kept.update(codes=torch.zeros(blocks * 4, dtype=torch.uint8), scales=torch.zeros(blocks))
            kept["parts"] = [torch.full((3,), float(dist.get_rank())), "plain"]
        kept["codes"][: grad.numel()] += (grad.reshape(-1) > 0).to(torch.uint8)
        kept["scales"] += 1.5 + dist.get_rank()
        local = p.to_local() if isinstance(p, DTensor) else p
        local.sub_(0.1 * grad)


def one_layer(where, model, make, *, save):
    """Shard a layer, and save it after a step of an optimizer, or load it."""
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = make(model.parameters())
    if save:
        model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
        optimizer.step()
    (sk.save if save else sk.load)({"model": model, "optim": optimizer}, where)
    return model, optimizer


def blockwise(where, *, save):
    _, optimizer = one_layer(where, nn.Linear(4, 6), Blockwise, save=save)
    return [
        (bits(kept["codes"]), bits(kept["scales"]), bits(kept["parts"][0]), kept["parts"][1])
        for kept in optimizer.state.values()
    ]


def test_state_of_one_shard_alone_goes_back_to_that_shard(rank_pool, tmp_path):
    """Codes that cannot be resharded come back on the same sharding bit for bit; another one is an error."""
    where = str(tmp_path / "c")
    saved = rank_pool.run(2, blockwise, where, save=True)
    assert saved[0] != saved[1]
    assert rank_pool.run(2, blockwise, where, save=False) == saved
    for outcome in rank_pool.outcomes(3, blockwise, where, save=False):
        assert isinstance(outcome.error, sk.StateMismatch)
        assert "optim.state.weight" in str(outcome.error)
        assert "cannot be resharded" in str(outcome.error)


ODD = {
    "rows": lambda ps: Rows([p for p in ps if p.dim() == 2], lr=0.01),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01, foreach=False),
}


def odd(where, kind, *, save):
    model = sharded_net(seed=0 if save else 5)
    optimizer = ODD[kind](trainable(model))
    if save:
        trained(model, optimizer)
    (sk.save if save else sk.load)({"model": model, "optim": optimizer}, where)
    return trained(model, optimizer, seed=4), whole(model)


@pytest.mark.parametrize("kind", ODD)
def test_odd_state_of_sharded_parameters(rank_pool, tmp_path, kind):
    """Optimizers whose state is not all shaped like the parameter go on bit for bit, fresh ones too."""
    expected = rank_pool.run(2, odd, str(tmp_path / "c"), kind, save=True)
    assert rank_pool.run(2, odd, str(tmp_path / "c"), kind, save=False) == expected


def load_with_fault(where):
    model = sharded_net(seed=5)
    optimizer = torch.optim.AdamW(trainable(model), lr=0.5)
    store = sk.LocalStore(where)
    if dist.get_rank() == 1:
        store = FaultyStore(store, "error", at=0, verbs=["read_into"])
    try:
        sk.load({"model": model, "optim": optimizer}, store)
    except sk.CheckpointError as exc:
        return len(optimizer.state), optimizer.param_groups[0]["lr"], str(exc)
    return None


def test_no_object_takes_anything_if_a_rank_fails_to_read(rank_pool, tmp_path):
    rank_pool.run(2, save_net, str(tmp_path / "c"))
    for outcome in rank_pool.run(2, load_with_fault, str(tmp_path / "c")):
        count, lr, message = outcome
        assert (count, lr) == (0, 0.5)
        assert "rank 1" in message


def three_ways():
    """Two replicas of two shards of two tensor-parallel halves."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    torch.manual_seed(0)
    return fsdp2(tensor_parallel(Net(), mesh["tp"]), mesh["replicate", "shard"])


def load_three_ways(where):
    model = three_ways()
    optimizer = torch.optim.AdamW(trainable(model), lr=0.5, foreach=False)
    sk.load({"model": model, "optim": optimizer}, where)
    return whole(model), trained(model, optimizer, seed=4)


def test_a_mesh_of_three_dimensions(rank_pool, tmp_path):
    """Eight ranks as 2x2x2: back onto the same mesh bit for bit, and onto three ranks of one dimension."""
    saved = rank_pool.run(8, save_net, str(tmp_path / "c"), three_ways, timeout_s=120)
    assert rank_pool.run(8, load_three_ways, str(tmp_path / "c"), timeout_s=120) == saved
    for as_asked, loaded, went_on in rank_pool.run(3, load_on_meta, str(tmp_path / "c")):
        assert as_asked
        assert loaded == saved[0][0]
        assert went_on == pytest.approx(saved[0][1], rel=1e-5)


class Gram(PerParameter):
    """Keeps a factor of the whole parameter, the same on all ranks, which may have the shape of a shard."""

    def update(self, p, kept, group):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        kept["gram"] = kept.get("gram", 0) + grad.t() @ grad


def gram(where, *, save):
    torch.manual_seed(0)
    model, optimizer = one_layer(where, nn.Linear(4, 8, bias=False), Gram, save=save)
    return bits(optimizer.state[next(model.parameters())]["gram"])


def test_a_factor_that_looks_like_a_shard_is_none(rank_pool, tmp_path):
    """A 4x4 factor of an 8x4 parameter on two ranks has the shape of a shard, and is loaded as it is on one."""
    saved = rank_pool.run(2, gram, str(tmp_path / "c"), save=True)
    assert rank_pool.run(2, gram, str(tmp_path / "c"), save=False) == saved
    assert rank_pool.run(1, gram, str(tmp_path / "c"), save=False) == saved[:1]


class FailsOnOne:
    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        if dist.get_rank() == 1:
            raise ValueError("not on this rank")


def fsdp1_state():
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    return {"m": model, "o": torch.optim.AdamW(model.parameters())}


def fsdp1_fails_alone(where):
    """Return what happened to a load and to a save in which one rank fails by itself."""
    options = sk.Options(timeout_s=20)
    fresh = fsdp1_state()
    sk.save({"first": FailsOnOne(), **fresh}, where, options=options)
    said = []
    for call in (
        lambda: sk.load({"first": FailsOnOne(), **fsdp1_state()}, where, options=options),
        lambda: sk.save(fsdp1_state(), f"{where}-2", meta={1, 2} if dist.get_rank() else None, options=options),
    ):
        try:
            call()
        except sk.CheckpointError as exc:
            said.append(str(exc).splitlines()[0])
    other = fsdp1_state()
    sk.load(other, where, exclude="first", options=options)
    return said, len(other["o"].state)


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_does_not_wait_for_a_rank_that_failed(rank_pool, tmp_path):
    """What can fail on a rank alone comes before FSDP1 talks; and an optimizer that never stepped stays fresh."""
    for said, count in rank_pool.run(2, fsdp1_fails_alone, str(tmp_path / "c")):
        assert len(said) == 2
        assert "not on this rank" in said[0]
        assert "meta" in said[1]
        assert count == 0
