"""Optimizer state in one process: what reading leaves alone, odd state, groups, forms, and what is refused."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint.state_dict as theirs
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardkeep.dcp.state_dict import (
    StateDictOptions,
    _init_optim_state,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardkeep.errors import CheckpointError
from tests.training.samples import DIM, Net, Odd, adamw, differences, plain, train

# Optimizers import torch.compile's machinery, which warns of other parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LENIENT = StateDictOptions(strict=False)


class Noisy(torch.optim.AdamW):
    """Draws random numbers and counts in its step, as optimizers that round at random do."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002 - the generator everybody uses
        self.steps += 1
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step(closure)


def generators() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), [str(one) for one in np.random.get_state()]]  # noqa: NPY002


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_reading_a_fresh_optimizer_leaves_no_trace(rate: Any):
    """Parameters to the sign of zero, gradients, rates, counters, hooks, schedulers and generators stay as they were."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(-0.0)
    adamw(model.parameters())  # torch runs hooks in the step of every class of which there was an optimizer
    optim = Noisy(model.parameters(), lr=rate)
    called: list[str] = []
    optim.register_step_pre_hook(lambda *_: called.append("hook"))
    everywhere = register_optimizer_step_post_hook(lambda *_: called.append("everywhere"))
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
    before = plain([model.state_dict(), optim.state_dict(), scheduler.state_dict(), generators()])

    state = get_optimizer_state_dict(model, optim)
    get_optimizer_state_dict(model, optim, options=FLAT)
    everywhere.remove()

    assert not differences(
        plain([model.state_dict(), optim.state_dict(), scheduler.state_dict(), generators()]), before
    )
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    assert optim.param_groups[0]["lr"] is rate
    assert (optim.steps, called, getattr(optim, "_opt_called", False)) == (0, [], False)
    assert state["state"]["weight"]["exp_avg"].shape == (2, 4)
    assert state["param_groups"][0]["k"] == 1


def test_setting_a_fresh_optimizer_makes_no_step():
    """State comes from what is passed: no step, no draw, no gradient, and parameters stay as they are."""
    trained = nn.Linear(4, 2)
    source = Noisy(trained.parameters(), lr=0.5)
    trained(torch.ones(1, 4)).sum().backward()
    source.step()
    state = get_optimizer_state_dict(trained, source)
    model = nn.Linear(4, 2)
    optim = Noisy(model.parameters(), lr=0.1)
    before = plain([model.state_dict(), generators()])
    set_optimizer_state_dict(model, optim, state)
    assert not differences(plain([model.state_dict(), generators()]), before)
    assert not differences(plain(optim.state_dict()), plain(source.state_dict()))
    assert (optim.steps, optim.param_groups[0]["lr"], optim.param_groups[0]["k"]) == (0, 0.5, 1)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_initialising_gives_the_state_torch_gives():
    model = Net()
    mine, its = adamw(model.parameters()), adamw(model.parameters())
    _init_optim_state(mine)
    theirs._init_optim_state(its)
    assert not differences(plain(mine.state_dict()), plain(its.state_dict()))
    train(model, mine, range(2))
    before = plain(mine.state_dict())
    _init_optim_state(mine)
    assert not differences(plain(mine.state_dict()), before)


class Choosy(torch.optim.Optimizer):
    """Keeps what a mark on the parameter says, as optimizers that treat some layers apart do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["rank"] = p.rank if isinstance(p, nn.Parameter) else None


def test_marks_on_parameters_are_seen():
    model = nn.Linear(2, 2)
    model.weight.rank, model.bias.rank = 4, 0
    state = get_optimizer_state_dict(model, Choosy(model.parameters()))["state"]
    assert state == {"weight": {"rank": 4}, "bias": {"rank": 0}}


class Strange(torch.optim.Optimizer):
    """State of types that are not the parameter's: whole numbers, double precision, strings, pairs and lists."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["codes"] = torch.zeros(p.numel(), dtype=torch.uint8)
                state["master"] = p.double()
                state["scale"] = torch.ones((), dtype=torch.float64)
                state["mode"] = "rising"
                state["history"] = [torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=p.dtype)]
                state["pair"] = (1, 2.5)
                state["nothing"] = None
                state["a.b"] = {1: {"x.y": torch.zeros(1, dtype=torch.float64)}}
            state["codes"] += 7
            state["master"] -= 1 / 3
            state["scale"] /= 3
            state["history"][0] += 1
            state["a.b"][1]["x.y"] += 1 / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_state_of_any_type_comes_back_as_it_was(dtype: torch.dtype, fresh: bool, flat: bool):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = nn.Linear(3, 2).to(dtype)
    source, target = Strange(model.parameters()), Strange(model.parameters())
    for _ in range(3):
        source.step()
    if not fresh:
        target.step()
    state = copy.deepcopy(get_optimizer_state_dict(model, source, options=options))
    set_optimizer_state_dict(model, target, state, options=options)
    assert not differences(plain(target.state_dict()), plain(source.state_dict()))


def test_half_precision_models_keep_the_precision_of_their_statistics():
    """State in single precision beside half-precision parameters is not rounded unless the optimizer is half, too."""
    model = nn.Linear(3, 2).to(torch.bfloat16)
    source, target = torch.optim.NAdam(model.parameters()), torch.optim.NAdam(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    source.step()
    state = copy.deepcopy(get_optimizer_state_dict(model, source))
    for tree in state["state"].values():
        tree["exp_avg"] = tree["exp_avg"].float()
    set_optimizer_state_dict(model, target, state)
    assert target.state[model.weight]["mu_product"].dtype == torch.float32
    assert not differences(plain(target.state_dict()), plain(source.state_dict()))


def grouped(model: Net, *, swapped: bool = False) -> torch.optim.Optimizer:
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.1, "note": "first"},
        {"params": [*model.second.parameters(), *model.norm.parameters()], "lr": 0.2, "betas": (0.5, 0.6)},
        {"params": list(model.head.parameters()), "lr": torch.tensor(0.3)},
    ]
    return torch.optim.AdamW(groups[::-1] if swapped else groups)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_groups_are_found_by_the_names_in_them(flat: bool):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = Net()
    source = grouped(model)
    train(model, source, range(1))
    torch.optim.lr_scheduler.StepLR(source, 1)  # adds `initial_lr`
    state = get_optimizer_state_dict(model, source, options=options)
    target = grouped(model, swapped=True)
    for group in target.param_groups:
        group |= {"lr": torch.tensor(9.0) if isinstance(group["lr"], torch.Tensor) else 9.0, "added_later": True}
    set_optimizer_state_dict(model, target, state, options=options)
    kept = [{k: v for k, v in group.items() if k != "params"} for group in source.param_groups]
    found = [{k: v for k, v in group.items() if k != "params"} for group in target.param_groups[::-1]]
    assert not differences(plain(found), plain([group | {"added_later": True} for group in kept]))
    assert all(target.state[p].keys() == source.state[p].keys() for p in model.parameters() if p.requires_grad)


def test_groups_that_were_merged_are_refused():
    model = Net()
    source, target = grouped(model), torch.optim.AdamW(model.parameters())
    train(model, source, range(1))
    for options in (None, FLAT):
        state = get_optimizer_state_dict(model, source, options=options)
        with pytest.raises(RuntimeError, match=r"'first.up.weight' and .* different '(lr|betas|note)'"):
            set_optimizer_state_dict(model, target, state, options=options)
        assert not target.state
    set_optimizer_state_dict(model, target, state, options=StateDictOptions(strict=False))
    assert target.param_groups[0]["lr"] == 0.1


def test_a_rate_that_is_a_tensor_stays_one():
    """A number saved for a rate that is a tensor goes into a tensor; graphs that were captured need it."""
    model = nn.Linear(2, 2)
    state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), lr=0.25))
    target = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    set_optimizer_state_dict(model, target, state)
    assert torch.equal(target.param_groups[0]["lr"], torch.tensor(0.25))


def test_groups_without_parameters():
    """They get their values back where there is no doubt which is which; else it is an error."""
    model = nn.Linear(2, 2)

    def made() -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [], "lr": 0.5}, {"params": list(model.parameters())}], lr=0.1)

    state = get_optimizer_state_dict(model, made())
    target = made()
    target.param_groups[0]["lr"] = 9.0
    set_optimizer_state_dict(model, target, state)
    assert [group["lr"] for group in target.param_groups] == [0.5, 0.1]
    state["param_groups"].append({"params": [], "lr": 0.7})
    with pytest.raises(ValueError, match="without parameters"):
        set_optimizer_state_dict(model, target, state)
    without_any = torch.optim.SGD(model.parameters(), lr=9.0)
    set_optimizer_state_dict(model, without_any, state)
    assert without_any.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_several_optimizers(flat: bool):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    torch.manual_seed(0)
    model = Net()

    def made() -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW(model.first.parameters()),
            torch.optim.SGD(model.second.parameters(), lr=0.1),
            Odd(model.head.parameters()),
        ]

    source = made()
    model(torch.ones(2, DIM)).sum().backward()
    for optim in source:
        optim.step()
        optim.zero_grad()
    state = copy.deepcopy(get_optimizer_state_dict(model, source, options=options))
    assert flat or len(state["param_groups"]) == 3
    target = made()

    set_optimizer_state_dict(model, target[::-1], state, options=options)

    assert not differences(plain([one.state_dict() for one in target]), plain([one.state_dict() for one in source]))
    with pytest.raises(RuntimeError, match=r"two of the optimizers .* 'first.up.weight'"):
        get_optimizer_state_dict(model, [source[0], source[0]])


def test_state_of_parameters_frozen_since():
    """A parameter that was frozen after it was trained keeps its moments; torch drops them."""
    model = Net()
    source = adamw(model.parameters())
    train(model, source, range(2))
    for options in (None, FLAT):
        model.first.requires_grad_(requires_grad=False)
        state = copy.deepcopy(get_optimizer_state_dict(model, source, options=options))
        target = adamw(model.parameters())
        set_optimizer_state_dict(model, target, state, options=options)
        assert not differences(plain(target.state_dict()), plain(source.state_dict()))


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_tied_parameters_have_one_state_under_any_of_their_names(flat: bool):
    """State is saved under one name; a checkpoint that used the other name, or both, loads as well."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = TiedNet()
    source = adamw(model.parameters())
    model.head(model.emb(torch.arange(4))).sum().backward()
    source.step()
    state = get_optimizer_state_dict(model, source, options=options)
    assert not [key for key in (state if flat else state["state"]) if "head" in key]
    for name in ("emb.weight", "head.weight"):
        renamed: Any = {key.replace("emb.weight", name): value for key, value in state.items()}
        if not flat:
            groups = [group | {"params": [name]} for group in state["param_groups"]]
            renamed = {"state": {name: state["state"]["emb.weight"]}, "param_groups": groups}
        target = adamw(model.parameters())
        set_optimizer_state_dict(model, target, renamed, options=options)
        assert not differences(plain(target.state_dict()), plain(source.state_dict()))


def test_state_by_number_is_refused():
    model = Net()
    optimizer = adamw(model.parameters())
    with pytest.raises(RuntimeError, match="by numbers"):
        set_optimizer_state_dict(model, optimizer, {"state": {0: {}}, **optimizer.state_dict()})


def test_names_of_parameters_in_groups_stay_those_of_the_optimizer():
    model = nn.Linear(2, 2)
    state = get_optimizer_state_dict(model, torch.optim.SGD(model.named_parameters(), lr=0.1))
    assert state["param_groups"][0]["param_names"] == ["weight", "bias"]
    state["param_groups"][0]["param_names"] = ["other", "names"]
    target = torch.optim.SGD(model.named_parameters(), lr=0.1)
    set_optimizer_state_dict(model, target, state)
    assert target.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
def test_missing_state_is_refused_by_name(flat: bool):
    """A parameter that is trained and has no saved state is an error before anything changes; or the others load."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = Net()
    source, target = adamw(model.parameters()), adamw(model.parameters())
    train(model, source, range(2))
    state = get_optimizer_state_dict(model, source, options=options)
    if flat:
        state = {key: value for key, value in state.items() if not key.startswith("state.head.bias")}
    else:
        del state["state"]["head.bias"]
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'head\.bias'") as caught:
        set_optimizer_state_dict(model, target, state, options=options)
    assert isinstance(caught.value, CheckpointError)
    assert not target.state
    set_optimizer_state_dict(model, target, state, options=LENIENT)
    assert set(target.state) == set(source.state) - {model.head.bias}


def test_moments_are_never_dropped_because_another_optimizer_has_some():
    """State for none of an optimizer's parameters is an error, unless the optimizer keeps no state."""
    model = Net()
    source = adamw(model.first.parameters())
    train(model, source, range(1))
    state = get_optimizer_state_dict(model, source)
    state["param_groups"].append({"params": ["head.weight", "head.bias"], "lr": 0.5})
    fine, bad = adamw(model.first.parameters()), adamw(model.head.parameters())
    with pytest.raises(RuntimeError, match=r"'head\.weight'"):
        set_optimizer_state_dict(model, [fine, bad], state)
    assert not fine.state  # nothing is changed where one of them cannot be set
    stateless = torch.optim.SGD(model.head.parameters(), lr=0.1)
    set_optimizer_state_dict(model, stateless, state)
    assert stateless.param_groups[0]["lr"] == 0.5


def test_bad_input_is_refused():
    model, other = Net(), nn.Linear(2, 2)
    optim = adamw(model.parameters())
    state = get_optimizer_state_dict(model, optim)
    cases: list[tuple[type[Exception], str, Any]] = [
        (RuntimeError, "empty", lambda: set_optimizer_state_dict(model, optim, {})),
        (RuntimeError, "no optimizer", lambda: get_optimizer_state_dict(model, [])),
        (RuntimeError, "empty", lambda: set_state_dict(model, [], model_state_dict={}, optim_state_dict={})),
        (KeyError, "not in the model", lambda: get_optimizer_state_dict(other, optim)),
        (KeyError, "not in the model", lambda: set_optimizer_state_dict(other, optim, state)),
        (KeyError, "param_groups", lambda: set_optimizer_state_dict(model, optim, {"state": {}})),
        (RuntimeError, "'model.x' is no key", lambda: set_optimizer_state_dict(model, optim, {"model.x": 1})),
        (RuntimeError, "head.weight", lambda: set_optimizer_state_dict(model, optim, without(state, "head.weight"))),
        (
            ValueError,
            "full_state_dict",
            lambda: get_state_dict(model, optim, options=StateDictOptions(broadcast_from_rank0=True)),
        ),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text) as caught:
            call()
        assert isinstance(caught.value, CheckpointError)
    assert not optim.state


def without(state: Any, name: str) -> Any:
    groups = [g | {"params": [one for one in g["params"] if one != name]} for g in state["param_groups"]]
    return {"state": {key: tree for key, tree in state["state"].items() if key != name}, "param_groups": groups}


def test_what_the_flat_form_cannot_hold_is_named():
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.state[model.weight]["thing"] = object()
    with pytest.raises(NotImplementedError, match=r"'state.weight.thing' is a object"):
        get_optimizer_state_dict(model, optim, options=FLAT)


def test_an_optimizer_that_needs_a_closure():
    """Reading it before its first step is an error; afterwards its state is read and set like any other."""
    model = nn.Linear(2, 2)
    source, target = torch.optim.LBFGS(model.parameters()), torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match="after the first step"):
        get_optimizer_state_dict(model, source)

    def closure() -> torch.Tensor:
        source.zero_grad()
        loss = model(torch.ones(1, 2)).pow(2).sum()
        loss.backward()
        return loss

    source.step(closure)
    set_optimizer_state_dict(model, target, get_optimizer_state_dict(model, source), options=LENIENT)
    assert not differences(plain(target.state_dict()), plain(source.state_dict()))


def test_reading_gives_new_containers():
    model = Net()
    optim = Odd(model.parameters())
    train(model, optim, range(1))
    before = plain(optim.state_dict())
    state = get_optimizer_state_dict(model, optim)
    for tree in state["state"].values():
        tree["factors"].clear()
        tree.clear()
    state["param_groups"][0]["lr"] = 9
    assert not differences(plain(optim.state_dict()), before)


def test_objects_can_be_given_these_functions_as_methods():
    model, other = torch.compile(Net()), Net()
    optim, fresh = adamw(model.parameters()), adamw(other.parameters())
    train(model._orig_mod, optim, range(2))
    _patch_model_state_dict(model)
    _patch_optimizer_state_dict(model, optimizers=(optim,), options=FLAT)
    _patch_model_state_dict(other)
    _patch_optimizer_state_dict(other, optimizers=fresh)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optim.state_dict()))
    for each, its in ((model._orig_mod, optim), (other, fresh)):
        train(each, its, range(2, 4))
    assert not differences(plain(other.state_dict()), plain(model.state_dict()))
