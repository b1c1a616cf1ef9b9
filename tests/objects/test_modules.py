"""Modules straight in a state: filled where they are, given memory where they have none."""

import pytest
import torch
from torch import nn

import shardkeep as sk
from tests.engine.samples import bits


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.notes = {"seen": 0}

    def get_extra_state(self):
        return dict(self.notes)

    def set_extra_state(self, state):
        self.notes = state


def contents(module):
    return {name: bits(value) for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def test_a_module_is_filled_where_it_is(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    model.notes["seen"] = 7
    model.norm.running_mean.fill_(3)
    sk.save({"model": model}, tmp_path / "c")
    other = Tied()
    before = [(p, p.data_ptr()) for p in other.parameters()]
    report = sk.load({"model": other}, tmp_path / "c")
    assert report.missing == report.unexpected == []
    assert contents(other) == contents(model)
    assert other.notes == {"seen": 7}
    assert all(p is q and q.data_ptr() == at for (p, at), q in zip(before, other.parameters(), strict=True))


def test_a_module_on_meta_gets_its_memory_from_the_load(tmp_path):
    """Parameters stay the same objects, tied ones tied, and the optimizer that holds them holds the filled ones."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.head(model.embed(torch.arange(3))).sum().backward()
    optimizer.step()
    sk.save({"model": model, "optim": optimizer}, tmp_path / "c")

    with torch.device("meta"):
        other = Tied()
        fresh = torch.optim.Adam(other.parameters(), lr=0.5)
    weight = other.embed.weight
    sk.load({"model": other, "optim": fresh}, tmp_path / "c")
    assert other.embed.weight is weight is other.head.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.device.type == "cpu"
    assert contents(other) == contents(model)
    assert bits(fresh.state[weight]["exp_avg"]) == bits(optimizer.state[model.embed.weight]["exp_avg"])
    for one, optim in ((model, optimizer), (other, fresh)):
        optim.zero_grad()
        one.head(one.embed(torch.arange(4))).square().sum().backward()
        optim.step()
    assert bits(other.embed.weight) == bits(model.embed.weight)


def test_names_inside_a_module_are_checked(tmp_path):
    sk.save({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))}, tmp_path / "c")
    with pytest.raises(sk.StateMismatch, match=r"(?s)model\.2\.weight.*model\.1\.weight"):
        sk.load({"model": nn.ModuleDict({"0": nn.Linear(2, 2), "2": nn.Linear(2, 3)})}, tmp_path / "c")


def test_a_module_and_its_state_dict_are_one_thing(tmp_path):
    model = nn.Linear(3, 3)
    sk.save({"model": model}, tmp_path / "a")
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    sk.load(state, tmp_path / "a")
    assert bits(state["model"]["weight"]) == bits(model.weight)
    sk.save({"model": model.state_dict()}, tmp_path / "b")
    other = nn.Linear(3, 3)
    sk.load({"model": other}, tmp_path / "b")
    assert contents(other) == contents(model)


def test_hooks_that_wait_for_a_load_are_called(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    sk.save({"model": model, "optim": optimizer}, tmp_path / "c")
    seen = []
    other = nn.Sequential(nn.Linear(2, 2))[0]
    other.register_load_state_dict_post_hook(lambda module, _keys: seen.append(bits(module.weight)))
    fresh = torch.optim.SGD(other.parameters(), lr=1.0)
    fresh.register_load_state_dict_post_hook(lambda optim: seen.append(optim.param_groups[0]["lr"]))
    sk.load({"model": other, "optim": fresh}, tmp_path / "c")
    assert seen == [bits(model.weight), 0.25]


class Turned(nn.Module):
    """Saves its weight the other way round, and turns it back at load."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.register_state_dict_post_hook(self._turn)
        self.register_load_state_dict_pre_hook(self._turn)

    @staticmethod
    def _turn(_module, state, prefix, *_):
        state[prefix + "weight"] = state[prefix + "weight"].t()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hooks_that_change_the_form_of_state_are_honoured(device, tmp_path):
    sk.save({"m": Turned()}, tmp_path / "c")
    with torch.device(device):
        other = Turned()
        nn.init.zeros_(other.weight)
    sk.load({"m": other}, tmp_path / "c")
    assert torch.equal(other.weight, Turned().weight)


def test_a_parameter_on_meta_keeps_class_attributes_and_hooks(tmp_path):
    """With memory it is still what frameworks made of it; one with a weak reference to it is refused by name."""

    class Special(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    sk.save({"m": model}, tmp_path / "c")
    with torch.device("meta"):
        other = nn.Linear(2, 2)
        other.weight = Special(torch.empty(2, 2))
    seen = []
    other.weight.tag = "mine"
    other.weight.register_hook(lambda _: seen.append("grad"))
    other.bias.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    sk.load({"m": other}, tmp_path / "c")
    assert type(other.weight) is Special
    assert other.weight.tag == "mine"
    other(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == ["after", "grad"]


def test_ties_on_meta_are_those_of_the_module(tmp_path):
    """Saved tied, loaded untied: two memories. Saved untied, loaded tied: an error, as off meta."""

    def pair(*, tied):
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        if tied:
            model["b"].weight = model["a"].weight
        return model

    for tied in (True, False):
        sk.save({"m": pair(tied=tied)}, tmp_path / str(tied))
    with torch.device("meta"):
        apart, together = pair(tied=False), pair(tied=True)
    sk.load({"m": apart}, tmp_path / "True")
    assert apart["a"].weight.data_ptr() != apart["b"].weight.data_ptr()
    assert torch.equal(apart["a"].weight, apart["b"].weight)
    with pytest.raises(sk.StateMismatch, match="same memory"):
        sk.load({"m": together}, tmp_path / "False")


def test_extra_state_that_grew_is_given_back(tmp_path):
    """Extra state of another nesting or size than the module has now goes through set_extra_state."""

    class Noted(nn.Linear):
        notes = None

        def get_extra_state(self):
            return self.notes

        def set_extra_state(self, state):
            self.notes = state

    for notes in ({"a": {"b": [1, 2]}}, torch.arange(7), {}):
        model = Noted(1, 1)
        model.notes = notes
        sk.save({"m": model}, tmp_path / "c", overwrite=True)
        other = Noted(1, 1)
        other.notes = torch.zeros(3) if isinstance(notes, torch.Tensor) else {"a": {}}
        sk.load({"m": other}, tmp_path / "c")
        assert bits(other.notes) == bits(notes)


def test_a_modules_own_ways_are_gone(tmp_path):
    """Overridden methods, pre-hooks and renaming hooks have their part in a load, in memory and on meta."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            self.ready = False

        def state_dict(self, *args, **kwargs):
            return {key: value.float() * 2 for key, value in super().state_dict(*args, **kwargs).items()}

        def load_state_dict(self, state_dict, **kwargs):
            self.ready = True
            return super().load_state_dict({key: value / 2 for key, value in state_dict.items()}, **kwargs)

    sk.save({"m": Own()}, tmp_path / "c")
    with torch.device("meta"):
        on_meta = Own()
    for other in (Own(), on_meta):
        sk.load({"m": other}, tmp_path / "c")
        assert other.ready
        assert torch.equal(other.w, torch.ones(2, dtype=torch.bfloat16))
