"""Training state on an accelerator: the device of each value, generators, and the flags of fused optimizers."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import shardkeep.dcp.state_dict as ours
from tests.protocol.samples import quietly
from tests.support.rank_pool import RankPool
from tests.training.samples import Net, differences, plain, train

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")

GET_OPTIONS: list[dict[str, bool]] = [
    {},
    {"full_state_dict": True},
    {"cpu_offload": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
]
SET_OPTIONS: list[dict[str, bool]] = [
    {},
    {"full_state_dict": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
]
FLAGS: list[dict[str, Any]] = [{}, {"fused": True}, {"capturable": True, "foreach": True}, {"lr": "tensor"}]


def made(wrapper: str, flags: dict[str, Any], seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    device = torch.accelerator.current_accelerator()
    model: Any = Net().to(device)
    if wrapper == "fsdp2":
        fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    if wrapper == "fsdp1":
        model.norm = quietly(FullyShardedDataParallel, model.norm, use_orig_params=True)
        model = quietly(FullyShardedDataParallel, model, use_orig_params=True)
    if "lr" in flags:
        flags = {"lr": torch.tensor(0.01, device=device), "capturable": True}
    return model, torch.optim.AdamW(model.parameters(), **flags)


def on_one_rank(wrapper: str) -> list[str]:
    found = []
    for flags in FLAGS:
        for steps in (0, 2):
            model, optim = made(wrapper, flags, 1)
            train(model, optim, range(steps))
            before = plain([torch.get_rng_state(), torch.get_device_module().get_rng_state(), optim.state_dict()])
            mine = [
                plain(quietly(ours.get_state_dict, model, optim, options=ours.StateDictOptions(**options)))
                for options in GET_OPTIONS
            ]
            after = plain([torch.get_rng_state(), torch.get_device_module().get_rng_state(), optim.state_dict()])
            found += [f"{flags} touched{line}" for line in differences(after, before)]
            for options, one in zip(GET_OPTIONS, mine, strict=True):
                its = quietly(theirs.get_state_dict, model, optim, options=theirs.StateDictOptions(**options))
                found += [f"{flags} {steps} {options}{line}" for line in differences(one, plain(its))]
        saved = [
            copy.deepcopy(quietly(ours.get_state_dict, model, optim, options=ours.StateDictOptions(**options)))
            for options in SET_OPTIONS
        ]
        train(model, optim, range(2, 4))
        expected = plain([model.state_dict(), optim.state_dict()])
        for options, (model_state, optim_state) in zip(SET_OPTIONS, saved, strict=True):
            fresh, optim = made(wrapper, flags, 2)
            quietly(
                ours.set_state_dict,
                fresh,
                optim,
                model_state_dict=model_state,
                optim_state_dict=optim_state,
                options=ours.StateDictOptions(**options),
            )
            train(fresh, optim, range(2, 4))
            lines = differences(plain([fresh.state_dict(), optim.state_dict()]), expected)
            found += [f"set {flags} {options}{line}" for line in lines]
    return found


@pytest.mark.parametrize("wrapper", ["bare", "fsdp1", "fsdp2"])
def test_state_on_an_accelerator(rank_pool: RankPool, wrapper: str):
    """What is read equals torch's, values and devices; reading draws no number; what is set trains on to the bit."""
    backend = torch.distributed.get_default_backend_for_device(torch.accelerator.current_accelerator())
    assert rank_pool.run(1, on_one_rank, wrapper, backend=f"cpu:gloo,cuda:{backend}") == [[]]
