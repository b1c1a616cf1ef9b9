"""Objects whose tensors are on an accelerator."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkeep as sk
from tests.engine.samples import bits

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator; CI has none")


def device():
    return torch.accelerator.current_accelerator()


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)).to(device())


def trained(model, optimizer, steps=2):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8, device=device())).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


MAKERS = {
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "capturable": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(1e-2, device=device()), capturable=True),
    "plain": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_training_goes_on_bit_for_bit_on_the_device(kind, tmp_path):
    """Dropout draws the same masks, a fresh optimizer gets its state where it keeps it, and losses are the same."""
    torch.manual_seed(0)
    model = net()
    optimizer = MAKERS[kind](model.parameters())
    trained(model, optimizer)
    sk.save({"model": model, "optim": optimizer, "rng": sk.RNG()}, tmp_path / "c")
    expected = trained(model, optimizer)
    other = net()
    fresh = MAKERS[kind](other.parameters())
    random.random()
    sk.load({"model": other, "optim": fresh, "rng": sk.RNG()}, tmp_path / "c")
    assert trained(other, fresh) == expected
    for mine, its in zip(other.parameters(), model.parameters(), strict=True):
        assert bits(mine) == bits(its)
        assert fresh.state[mine].keys() == optimizer.state[its].keys()
        for key, value in optimizer.state[its].items():
            assert fresh.state[mine][key].device == value.device


def test_a_module_on_meta_is_loaded_to_the_device(tmp_path):
    """Under a default device, memory for meta parameters is made there."""
    model = net()
    sk.save({"model": model}, tmp_path / "c")
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    with device():
        sk.load({"model": other}, tmp_path / "c")
    for mine, its in zip(other.parameters(), model.parameters(), strict=True):
        assert mine.device == its.device
        assert bits(mine) == bits(its)


def sharded(where):
    mesh = init_device_mesh(device().type, (1,))

    def build():
        model = fully_shard(net(), mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(0)
    model, optimizer = build()
    trained(model, optimizer)
    sk.save({"model": model, "optim": optimizer, "rng": sk.RNG()}, where)
    expected = trained(model, optimizer)
    other, fresh = build()
    sk.load({"model": other, "optim": fresh, "rng": sk.RNG()}, where)
    dist.barrier()
    return trained(other, fresh) == expected


def test_fsdp2_on_the_device(rank_pool, tmp_path):
    """Sharded parameters and moments on the device, with the device's own backend and none for the CPU."""
    backend = dist.get_default_backend_for_device(device())
    assert rank_pool.run(1, sharded, str(tmp_path / "c"), backend=backend) == [True]
