"""The protocol with an accelerator, in one process: values on it, memory for what is on meta, optimizer state."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed.checkpoint import optimizer as their_optimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp import optimizer as our_optimizer
from shardkeep.dcp.state_dict_loader import load
from shardkeep.dcp.state_dict_saver import save
from tests.protocol.samples import quietly
from tests.toolkit.samples import numbered, seen

pytestmark = [
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def device():
    """The accelerator, with this process as the only rank of a group that talks from it alone."""
    accelerator = torch.accelerator.current_accelerator()
    backend = dist.get_default_backend_for_device(accelerator)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device(accelerator.type, torch.accelerator.current_device_index())
    dist.destroy_process_group()


def test_values_on_the_accelerator_come_back(device, tmp_path):
    """Plain tensors and DTensors are saved from the accelerator and loaded into it; those on meta get memory there."""
    mesh = init_device_mesh(device.type, (1,))
    state = {
        "w": numbered(64, 32).to(device),
        "half": numbered(7, 3, dtype=torch.bfloat16).to(device),
        "cut": distribute_tensor(numbered(9, 2).to(device), mesh, [Cut(0)]),
        "n": {"step": 4},
    }
    quietly(save, state, storage_writer=theirs.FileSystemWriter(tmp_path))
    for where in (device, torch.device("meta")):
        cut = DTensor.from_local(
            torch.zeros(9, 2, device=where), mesh, [Cut(0)], run_check=False, shape=(9, 2), stride=(2, 1)
        )
        into = {
            "w": torch.zeros(64, 32, device=where),
            "half": torch.zeros(7, 3, dtype=torch.bfloat16, device=where),
            "cut": cut,
            "n": {"step": 0},
        }
        quietly(load, into, storage_reader=theirs.FileSystemReader(tmp_path))
        assert {into["w"].device, into["half"].device, into["cut"]._local_tensor.device} == {device}
        assert seen(into) == seen(state)


def test_optimizer_state_is_allocated_on_the_accelerator(device, tmp_path):
    """The shards are on the accelerator, with torch's placements and values."""
    saved = {"state": {"w": {"exp_avg": numbered(5, 6).to(device), "step": torch.tensor(7.0)}}, "groups": [{"lr": 0.5}]}
    quietly(save, {"optim": saved}, storage_writer=theirs.FileSystemWriter(tmp_path))
    mine, other = (
        quietly(module.load_sharded_optimizer_state_dict, {}, "optim", theirs.FileSystemReader(tmp_path))
        for module in (our_optimizer, their_optimizer)
    )
    assert seen(mine) == seen(other)
    [shard] = mine["optim"]["state"]["w"]["exp_avg"].local_shards()
    [expected] = other["optim"]["state"]["w"]["exp_avg"].local_shards()
    assert shard.tensor.device == device
    assert str(shard.metadata.placement) == str(expected.metadata.placement)
    assert our_optimizer._gen_rank_device(0, device.type) == their_optimizer._gen_rank_device(0, device.type)
