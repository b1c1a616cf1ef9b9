"""The same calls on torch's functions and on ours, under every wrapper, for all options, and training goes on."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as theirs
from torch import nn

import shardkeep.dcp.state_dict as ours
from tests.protocol.samples import quietly
from tests.support.rank_pool import RankPool
from tests.training.samples import OPTIMIZERS, Net, differences, plain, train
from tests.training.wrappers import FOR_FOUR, WRAPPERS

FEWER = (*FOR_FOUR, "checkpointed_fsdp2")
"""Those that are not read and set with every option: they take long, or are two of the others in one."""
FULL_ON_CPU = {"full_state_dict": True, "cpu_offload": True}
GET_OPTIONS: list[dict[str, bool]] = [
    {},
    {"full_state_dict": True},
    {"cpu_offload": True},
    FULL_ON_CPU,
    {"ignore_frozen_params": True},
    {"flatten_optimizer_state_dict": True},
    {"flatten_optimizer_state_dict": True, "full_state_dict": True},
]


def made(wrapper: str, optimizer: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = WRAPPERS[wrapper](Net())
    return model, OPTIMIZERS[optimizer](model.parameters())


def read(functions: Any, model: nn.Module, optim: torch.optim.Optimizer, options: dict[str, bool]) -> Any:
    return plain(quietly(functions.get_state_dict, model, optim, options=functions.StateDictOptions(**options)))


def reference(wrapper: str, model: nn.Module, optim: torch.optim.Optimizer, options: dict[str, bool]) -> Any:
    if wrapper.startswith("fsdp1") and options == FULL_ON_CPU:
        # Torch crashes here on CPUs: FSDP1 hands out memory that it has freed. Rank 0 gets what all would get.
        whole = read(theirs, model, optim, {"full_state_dict": True})
        return whole if dist.get_rank() == 0 else ({}, {})
    return read(theirs, model, optim, options)


def read_options(wrapper: str, optimizer: str, steps: int) -> list[dict[str, bool]]:
    """
    Choose the options to read with: all where that is cheap, on two ranks from an optimizer that has state.

    State that was just made is read as any other, and meshes of more dimensions are gathered and named in one way
    whatever else is asked for: there it is every kind of option, and not each combination.
    """
    if optimizer != "adamw":
        return [GET_OPTIONS[1], GET_OPTIONS[5]]
    if steps == 0:
        return GET_OPTIONS[::3]
    return GET_OPTIONS[::2] if wrapper in FEWER else GET_OPTIONS


def same_when_read(
    wrapper: str, optimizer: str, steps: int, model: nn.Module, optim: torch.optim.Optimizer
) -> list[str]:
    """Read the state of an optimizer that made some steps by both, and list what differs."""
    chosen = read_options(wrapper, optimizer, steps)
    mine = [read(ours, model, optim, options) for options in chosen]
    found = []
    if bool(optim.state) != bool(steps):
        found.append(f"{wrapper} {optimizer}: the optimizer was changed by reading")
    for options, one in zip(chosen, mine, strict=True):
        its = reference(wrapper, model, optim, options)
        found += [f"{wrapper} {optimizer} {steps} steps {options}{line}" for line in differences(one, its)]
    return found


SET_OPTIONS: list[dict[str, bool]] = [
    {},
    {"flatten_optimizer_state_dict": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
]


def set_options(wrapper: str, optimizer: str) -> list[dict[str, bool]]:
    if optimizer != "adamw":
        return SET_OPTIONS[-2:]
    return SET_OPTIONS[::2] if wrapper in FEWER else SET_OPTIONS


def same_when_set(wrapper: str, optimizer: str, model: nn.Module, optim: torch.optim.Optimizer) -> list[str]:
    """
    Set state to fresh models and optimizers, train on, and list what differs from a run that went through.

    One step more is enough: it is made from all that was set, and all that it made is compared, to the last bit.
    """
    found, saved = [], []
    chosen = set_options(wrapper, optimizer)
    for options in chosen:
        state = quietly(ours.get_state_dict, model, optim, options=ours.StateDictOptions(**options))
        if options.get("broadcast_from_rank0") and dist.get_rank() > 0:
            state = ({}, {})
        saved.append(copy.deepcopy(state))
    train(model, optim, range(2, 3))
    expected = plain([model.state_dict(), optim.state_dict()])
    for options, (model_state, optim_state) in zip(chosen, saved, strict=True):
        before = plain([model_state, optim_state])
        fresh, optim = made(wrapper, optimizer, 2)
        keys = quietly(
            ours.set_state_dict,
            fresh,
            optim,
            model_state_dict=model_state,
            optim_state_dict=optim_state,
            options=ours.StateDictOptions(**options),
        )
        label = f"{wrapper} {optimizer} {options}"
        found += [f"{label}: {keys}"] * bool(keys.missing_keys or keys.unexpected_keys)
        found += [f"{label}: input changed{line}" for line in differences(plain([model_state, optim_state]), before)]
        # Torch turns whole numbers in state into others, and loses names where FSDP1 and checkpointing meet.
        if not options and optimizer != "odd" and wrapper != "fsdp1_checkpointed":
            its_model, its_optim = made(wrapper, optimizer, 3)
            quietly(
                theirs.set_state_dict,
                its_model,
                its_optim,
                model_state_dict=dict(model_state),
                optim_state_dict=copy.deepcopy(optim_state),
            )
            its = plain([its_model.state_dict(), its_optim.state_dict()])
            found += [
                f"{label} set{line}" for line in differences(plain([fresh.state_dict(), optim.state_dict()]), its)
            ]
        train(fresh, optim, range(2, 3))
        found += [f"{label}{line}" for line in differences(plain([fresh.state_dict(), optim.state_dict()]), expected)]
    return found


def chosen_optimizers(wrapper: str) -> list[str]:
    if wrapper.startswith("fsdp1"):  # it flattens all state as it does parameters, and cannot hold other shapes
        return ["adamw", "sgd"] if wrapper not in FOR_FOUR else ["adamw"]
    if wrapper in FEWER:  # three dimensions take long, and other shapes are no other matter there than on two
        return ["adamw", "odd"] if wrapper != "hsdp_tp" else ["adamw"]
    return list(OPTIMIZERS)


def on_a_rank(wrapper: str) -> list[str]:
    found: list[str] = []
    with torch.compiler.set_stance("force_eager"):
        for optimizer in chosen_optimizers(wrapper):
            found += same_when_read(wrapper, optimizer, 0, *made(wrapper, optimizer, 1))
            model, optim = made(wrapper, optimizer, 1)
            train(model, optim, range(2))
            found += same_when_read(wrapper, optimizer, 2, model, optim)
            found += same_when_set(wrapper, optimizer, model, optim)
    return found


@pytest.mark.parametrize(("wrapper", "size"), [(wrapper, 4 if wrapper in FOR_FOUR else 2) for wrapper in WRAPPERS])
def test_state_is_that_of_torch_and_training_goes_on(rank_pool: RankPool, wrapper: str, size: int):
    """Names, kinds and bits of what is read equal torch's; what is set trains on as if it had never stopped."""
    found: list[Any] = rank_pool.run(size, on_a_rank, wrapper, timeout_s=60)
    assert found == [[]] * size
