"""Model state in one process: names, options, extra state, modules on meta, and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as theirs
from torch import nn

from shardkeep.dcp.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from shardkeep.dcp.stateful import Stateful
from shardkeep.errors import CheckpointError, KeyCollision
from shardkeep.state.names import ModuleTree
from shardkeep.state.objects import module_state
from tests.training.samples import Net, adamw, differences, plain

# Importing torch.compile's machinery warns of parts of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")

WHOLE = StateDictOptions(full_state_dict=True)


class Extra(nn.Module):
    """A module with state that is no tensor, and a child that is used under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.again = self.layer
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.notes = {"epoch": 0}

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.notes)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.notes = dict(state)


@pytest.mark.parametrize("options", [None, WHOLE], ids=["as it is", "whole"])
@pytest.mark.parametrize("wrap", [lambda module: module, torch.compile], ids=["plain", "compiled"])
def test_everything_a_module_has_comes_back(options: Any, wrap: Any):
    """Parameters, buffers, extra state and both names of a child that is used twice; input is left as it was."""
    source, target = wrap(Extra()), wrap(Extra())
    source.notes["epoch"] = 3
    source.norm.num_batches_tracked += 5
    state = get_model_state_dict(source, options=options)
    before = plain(state)
    keys = set_model_state_dict(target, state, options=options)
    assert list(state) == list(Extra().state_dict())
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert not differences(plain(target.state_dict()), plain(source.state_dict()))
    assert not differences(plain(state), before)


def test_state_is_the_modules_own_memory():
    model = torch.compile(Net())
    state = module_state(ModuleTree(model))
    assert all(state[name].data_ptr() == tensor.data_ptr() for name, tensor in model._orig_mod.named_parameters())
    assert not any(value.requires_grad for value in state.values())


def test_frozen_parameters_and_submodules_can_be_chosen():
    model = Net()
    for options in ({"ignore_frozen_params": True}, {"keep_submodule_prefixes": False}, {}):
        with pytest.warns(FutureWarning):
            mine = get_model_state_dict(model, submodules={model.second}, options=StateDictOptions(**options))
        if options != {"ignore_frozen_params": True}:  # torch raises KeyError for these two together
            with pytest.warns(FutureWarning):
                its = theirs.get_model_state_dict(
                    model, submodules={model.second}, options=theirs.StateDictOptions(**options)
                )
            assert not differences(plain(mine), plain(its))
    with pytest.warns(FutureWarning), pytest.raises(KeyCollision, match=r"up\.weight"):
        get_model_state_dict(
            model, submodules={model.first, model.second}, options=StateDictOptions(keep_submodule_prefixes=False)
        )
    tied = Extra().requires_grad_(requires_grad=False)
    assert list(get_model_state_dict(tied, options=StateDictOptions(ignore_frozen_params=True))) == [
        "_extra_state",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("wrap", [lambda module: module, torch.compile], ids=["plain", "compiled"])
def test_missing_and_unexpected_keys(strict: bool, whole: bool, wrap: Any):
    model = wrap(Net())
    state = get_model_state_dict(model)
    state.pop("head.bias")
    state["head.other"] = torch.ones(1)
    options = StateDictOptions(strict=strict, full_state_dict=whole)
    if strict:
        with pytest.raises(RuntimeError, match=r"head\.bias"):
            set_model_state_dict(model, state, options=options)
    else:
        keys = set_model_state_dict(model, state, options=options)
        assert keys.missing_keys == ["head.bias"]
        assert keys.unexpected_keys == ["head.other"]


@pytest.mark.parametrize("options", [None, WHOLE], ids=["as it is", "whole"])
def test_other_shapes_are_refused_by_name(options: Any):
    state = get_model_state_dict(Net())
    state["head.bias"] = torch.ones(7)
    with pytest.raises((RuntimeError, ValueError), match=r"head\.bias"):
        set_model_state_dict(Net(), state, options=options)


def test_a_model_on_meta_takes_whole_state():
    source = Net()
    with torch.device("meta"):
        target = Net()
    target.head = nn.Linear(*source.head.weight.shape[::-1])
    held = target.head.weight
    set_model_state_dict(target, get_model_state_dict(source), options=WHOLE)
    assert target.head.weight is held
    assert not target.norm.weight.requires_grad
    assert not differences(plain(target.state_dict()), plain(source.state_dict()))


class Hooked(nn.Module):
    """Hides a child from its names, and adds a key that is no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self._register_state_dict_hook(self._hide)
        self.register_load_state_dict_pre_hook(self._show)

    def _hide(self, _module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}{name}"] = state.pop(f"{prefix}inner.{name}")
        state[f"{prefix}made.up"] = torch.ones(1)

    def _show(self, _module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}{name}")
        state.pop(f"{prefix}made.up", None)

    def my_names(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}


@pytest.mark.parametrize("whole", [True, False])
def test_modules_that_rename_their_own_state(whole: bool):
    """Names that hooks make are kept, for the model and its optimizer alike, and load back."""
    options = StateDictOptions(dsd_fqn_modifiers="my_names", full_state_dict=whole)
    source, target = nn.Sequential(Hooked()), nn.Sequential(Hooked())
    state, optim_state = get_state_dict(source, adamw(source.parameters()), options=options)
    set_model_state_dict(target, state, options=options)
    assert set(state) == {"0.weight", "0.bias", "0.made.up"}
    assert set(optim_state["state"]) == {"0.weight", "0.bias"}
    assert torch.equal(target[0].inner.weight, source[0].inner.weight)


def test_state_by_submodule_is_still_understood():
    source, target = Net(), Net()
    state = {getattr(target, name): getattr(source, name).state_dict() for name in ("first", "second")}
    with pytest.warns(FutureWarning):
        set_model_state_dict(target, state, options=StateDictOptions(strict=False))
    assert not differences(plain(target.second.state_dict()), plain(source.second.state_dict()))


def test_empty_state_is_refused():
    for call in (lambda: get_model_state_dict(nn.ReLU()), lambda: set_model_state_dict(Net(), {})):
        with pytest.raises(RuntimeError, match="empty") as caught:
            call()
        assert isinstance(caught.value, CheckpointError)
    lenient = StateDictOptions(strict=False, full_state_dict=True, cpu_offload=True)
    assert set_state_dict(Net(), [], model_state_dict={}, optim_state_dict={}, options=lenient) == ([], [])


def test_two_keys_that_become_one_are_refused():
    model = nn.Module()
    model.layer = torch.compile(nn.Linear(2, 2))
    model._register_state_dict_hook(lambda _m, state, prefix, _l: state.update({"layer.weight": torch.ones(1)}))
    with pytest.raises(KeyCollision, match=r"layer\.weight"):
        get_model_state_dict(model)


def test_the_stateful_protocol():
    assert isinstance(nn.Linear(1, 1), Stateful)
    assert not isinstance(object(), Stateful)
