"""Conversions and broadcasts where tensors are on an accelerator."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp import format_utils as ours
from shardkeep.dcp.state_dict_loader import load
from shardkeep.dcp.state_dict_saver import save
from tests.protocol.samples import quietly
from tests.toolkit.samples import numbered, seen, spread_out

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine")


def here():
    return torch.accelerator.current_accelerator()


def test_a_checkpoint_of_device_tensors_becomes_a_file(tmp_path):
    """Also of those inside objects, which torch puts back where they were."""
    state = {"w": numbered(300, 7).to(here()), "pair": (numbered(3).to(here()), 2)}
    quietly(save, state, checkpoint_id=tmp_path / "ck")
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", map_location="cpu")
    assert seen(loaded) == seen({"w": numbered(300, 7), "pair": (numbered(3), 2)})
    assert torch.load(tmp_path / "file.pt")["pair"][0].device.type == here().type


def test_a_file_of_device_tensors_becomes_a_checkpoint(tmp_path):
    """It is mapped and not put on the device."""
    torch.save({"w": numbered(300, 7).to(here())}, tmp_path / "file.pt")
    quietly(ours.torch_save_to_dcp, tmp_path / "file.pt", tmp_path / "ck")
    into = {"w": torch.zeros(300, 7, device=here())}
    quietly(load, into, checkpoint_id=tmp_path / "ck")
    assert torch.equal(into["w"].cpu(), numbered(300, 7))


def loaded_on_device(path):
    into = {"plain": torch.zeros(300, 7, device=here()), "meta": torch.zeros(300, 7, device="meta")}
    ranks = dist.get_world_size()
    if ranks <= torch.accelerator.device_count():  # a mesh wants a device for each rank
        into["rows"] = spread_out(torch.zeros(301, 7, device=here()), init_device_mesh(here().type, (ranks,)), Cut(0))
    reader, planner = ours.BroadcastingTorchSaveReader(path), ours.DynamicMetaLoadPlanner()
    quietly(load, into, storage_reader=reader, planner=planner)
    if "rows" in into:
        start, local = -(-301 // ranks) * dist.get_rank(), into.pop("rows")._local_tensor
        if not torch.equal(local.cpu(), numbered(301, 7)[start : start + local.shape[0]]):
            return False
    return all(torch.equal(value.cpu(), numbered(300, 7)) for value in into.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_device_tensors_are_filled_on_every_rank(rank_pool, tmp_path, ranks):
    """Whole ones, those on meta, and DTensors where there are enough devices."""
    state = {"plain": numbered(300, 7), "meta": numbered(300, 7), "rows": numbered(301, 7)}
    torch.save(state, tmp_path / "file.pt")
    assert rank_pool.run(ranks, loaded_on_device, str(tmp_path / "file.pt")) == [True] * ranks
