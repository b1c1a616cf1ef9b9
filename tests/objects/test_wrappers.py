"""
Train under one wrapper, resume under any other, on another number of ranks: modules and optimizers straight in.

What was loaded is saved again and compared with the first checkpoint, name by name and bit for bit: the same names
under every wrapper, the same values, whatever the layout.
"""

import itertools

import pytest
import torch

import shardkeep as sk
from tests.engine.samples import bits
from tests.objects.wrappers import OPTIMIZERS, WORLDS, build, losses_from_here, mesh_for, train, trainable
from tests.support.rank_pool import RankPool


def state_of(kind, optimizer, mesh):
    model = build(kind, mesh)
    return {"model": model, "optim": OPTIMIZERS[optimizer](trainable(model)), "step": 0}


def first_part(folder, kind, optimizers):
    losses, mesh = {}, mesh_for(kind)
    for optimizer in optimizers:
        state = state_of(kind, optimizer, mesh)
        train(kind, state["model"], state["optim"], 2, seed=1)
        state["step"] = 2
        sk.save(state, f"{folder}/{kind}-{optimizer}")
        losses[optimizer] = losses_from_here(kind, state["model"], state["optim"], seed=2)
    return losses


def second_part(folder, kind, sources):
    losses, mesh = {}, mesh_for(kind)
    for source, optimizer in sources:
        state = state_of(kind, optimizer, mesh)
        report = sk.load(state, f"{folder}/{source}-{optimizer}")
        if report.missing or report.unexpected or state["step"] != 2:
            raise AssertionError((report, state["step"]))
        sk.save(state, f"{folder}/again/{source}-{optimizer}-{kind}")
        losses[source, optimizer] = losses_from_here(kind, state["model"], state["optim"], seed=2)
    return losses


def contents(path):
    """Every leaf of a checkpoint; tensors as bits, and groups as what they say of each parameter."""
    state = sk.open(path).to_dict()
    groups = state["optim"].pop("param_groups").values()
    state["optim"]["hyper"] = {name: group | {"params": None} for group in groups for name in group["params"]}
    return flat(state, "")


def flat(value, name):
    if isinstance(value, dict):
        return {key: leaf for part, child in value.items() for key, leaf in flat(child, f"{name}.{part}").items()}
    return {name: (tuple(value.shape), bits(value)) if isinstance(value, torch.Tensor) else value}


def can_hold(optimizer, kind):
    """Flat parameters lose the rows that a factored optimizer works on."""
    return optimizer != "factored" or not kind.startswith("fsdp1")


def optimizers_of(source, target):
    """All where a wrapper loads its own; else one, in turn: each is saved and is loaded under every wrapper it can."""
    both = [name for name in OPTIMIZERS if can_hold(name, source) and can_hold(name, target)]
    turn = list(WORLDS).index(source) + list(WORLDS).index(target)
    return both if source == target else [both[turn % len(both)]]


PAIRS = [
    (source, target, optimizer)
    for source, target in itertools.product(WORLDS, WORLDS)
    for optimizer in optimizers_of(source, target)
]


@pytest.fixture(scope="module")
def new_ranks():
    """Ranks that nothing else ran on: wrappers of torch keep what they know of meshes for the life of a process."""
    with RankPool(max(WORLDS.values())) as pool:
        yield pool


@pytest.fixture(scope="module")
def saved(new_ranks, tmp_path_factory):
    """What every wrapper saved, where it lies and what is in it, and how its losses went on."""
    folder = tmp_path_factory.mktemp("wrappers")
    losses, firsts = {}, {}
    for kind, world in WORLDS.items():
        optimizers = sorted({optimizer for source, _, optimizer in PAIRS if source == kind})
        losses[kind] = new_ranks.run(world, first_part, str(folder), kind, optimizers, timeout_s=150)[-1]
        firsts[kind] = {optimizer: contents(folder / f"{kind}-{optimizer}") for optimizer in optimizers}
    return folder, losses, firsts


@pytest.mark.timeout(400)  # the first of these saves with every wrapper
@pytest.mark.parametrize("target", WORLDS)
def test_every_wrapper_loads_what_every_wrapper_saved(target, saved, new_ranks):
    """Bit for bit the same state; and the losses go on as they did, exactly under the wrapper that saved them."""
    folder, expected, firsts = saved
    sources = [(source, optimizer) for source, kind, optimizer in PAIRS if kind == target]
    losses = new_ranks.run(WORLDS[target], second_part, str(folder), target, sources, timeout_s=150)[-1]
    for source, optimizer in sources:
        again = contents(folder / f"again/{source}-{optimizer}-{target}")
        assert again == firsts[source][optimizer], f"{source} -> {target}, {optimizer}"
        went_on = expected[source][optimizer]
        if source == target:
            assert losses[source, optimizer] == went_on
        else:
            assert losses[source, optimizer] == pytest.approx(went_on, rel=1e-5)
