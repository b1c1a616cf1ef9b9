"""Canonical names of wrapped modules."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import _get_fqns

from shardkeep.errors import CheckpointError
from shardkeep.state.names import ModuleTree, canonical_key, get_fqns, live_state, parameter_names, state_dict_key

# Importing torch.compile's machinery warns of parts of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.emb.weight


class Hiding(nn.Module):
    """A module whose child `inner` is no part of names, as its state-dict hook takes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.ones(2))

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}


def wrapped() -> nn.Module:
    model = Tied()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1])
    return torch.compile(model)


PLAIN = list(Tied().state_dict())


def test_wrappers_are_no_part_of_names():
    """Compiled and checkpointed parts give the names of the plain module, for keys of state_dict() and for others."""
    model = wrapped()
    assert [canonical_key(model, key) for key in model.state_dict()] == PLAIN
    assert {frozenset(get_fqns(model, name)) for name, _ in model.named_parameters()} == {
        frozenset({name}) for name, _ in Tied().named_parameters()
    }
    assert [get_fqns(model, name) for name in PLAIN] == [{name} for name in PLAIN]


@pytest.mark.parametrize("skip", [True, False])
def test_names_are_those_torch_gives(skip: bool):
    model = wrapped()
    names = [*model.state_dict(), *(name for name, _ in model.named_parameters())]
    for name in names:
        theirs = _get_fqns(model, name, skip_compiler_prefix=skip)
        assert get_fqns(model, name, skip_compiler_prefix=skip) == theirs


def test_the_way_back_to_keys():
    model = wrapped()
    assert [state_dict_key(model, name) for name in PLAIN] == list(model.state_dict())


def test_tied_parameters_have_all_their_names():
    """One parameter object has every name it is reachable by, also when a whole module is used twice."""
    model = wrapped()
    model._orig_mod.again = model._orig_mod.blocks[1]
    names = list(parameter_names(live_state(ModuleTree(model))).values())
    assert names[0] == ("emb.weight", "head.weight")
    assert ("blocks.1.0.weight", "again.0.weight") in names
    assert len(names) == len(list(model.parameters()))


def test_hidden_children_are_no_part_of_names():
    model = nn.Sequential(Hiding())
    assert get_fqns(model, "0.weight") == {"0.weight"} == _get_fqns(model, "0.weight")
    assert get_fqns(model, "0.inner.weight") == {"0.weight"}
    assert get_fqns(model, "0.inner.weight", dsd_fqn_modifiers="_others") == {"0.inner.weight"}
    assert list(parameter_names(live_state(ModuleTree(model))).values()) == [("0.own",), ("0.weight",), ("0.bias",)]


def test_names_that_lead_nowhere_are_refused():
    model = wrapped()
    for name, part in [("blocks.7.weight", "'7'"), ("head.weigh", "'weigh'")]:
        with pytest.raises(AttributeError, match=part) as caught:
            get_fqns(model, name)
        assert isinstance(caught.value, CheckpointError)
    assert canonical_key(model, "_orig_mod.blocks.made.up") == "blocks.made.up"
    assert get_fqns(model, "head._extra_state") == {"head._extra_state"}
