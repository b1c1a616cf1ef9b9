"""Optimizers straight in a state: by parameter name, into fresh ones, in other groups, with any state."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn

import shardkeep as sk
from shardkeep.dcp.state_dict import get_optimizer_state_dict
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes
from tests.engine.samples import bits
from tests.training.samples import PerParameter


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Odd(PerParameter):
    """State of every sort: factors, nested dicts, lists, flags, words, and something for no parameter."""

    hyper: ClassVar = {"lr": 0.1, "name": "odd", "betas": (0.9, 0.99), "schedule": {"warm": 3}}

    def update(self, p, kept, group):
        if not kept:
            kept.update(
                row=torch.zeros(p.shape[0]), nested={"gram": [torch.eye(p.shape[0]), 2]}, warm=True, word="a",
                codes=torch.zeros(5, dtype=torch.uint8), moment=torch.zeros_like(p), count=0,
            )  # fmt: skip
        kept["row"] += p.grad.reshape(p.shape[0], -1).sum(1)
        kept["nested"]["gram"][0] += 1
        kept["codes"] += 1
        kept["count"] += 1
        kept["moment"].mul_(0.9).add_(p.grad)
        p.sub_(group["lr"] * kept["moment"])
        self.state["global"] = self.state.get("global", 0) + 1


MAKERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "capturable": lambda ps: torch.optim.NAdam(ps, lr=1e-2, momentum_decay=0.01),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "plain sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2),
    "tensor lr": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(1e-2)),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.5, centered=True),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=2, history_size=3),
    "odd": Odd,
}


def train(model, optimizer, steps, seed):
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 4, generator=data)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else closure()
        if not isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step()
        losses.append(loss.item())
    return losses


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def parameters(model):
    return {name: bits(p) for name, p in model.named_parameters()}


def trained_and_saved(make, folder, steps=1):
    model = Net()
    optimizer = make(trainable(model))
    train(model, optimizer, steps, seed=0)
    sk.save({"model": model, "optim": optimizer}, folder / "c")
    return model, optimizer


@pytest.mark.parametrize("kind", MAKERS)
def test_a_fresh_optimizer_goes_on_as_the_saved_one(kind, tmp_path):
    """Train, save, load into a fresh model and optimizer, train on: bit for bit as without the break."""
    torch.manual_seed(1)
    model = Net()
    optimizer = MAKERS[kind](trainable(model))
    train(model, optimizer, 3, seed=1)
    sk.save({"model": model, "optim": optimizer}, tmp_path / "c")
    expected = train(model, optimizer, 3, seed=2)
    other = Net()
    fresh = MAKERS[kind](trainable(other))
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        report = sk.load({"model": other, "optim": fresh}, tmp_path / "c")
        assert torch.equal(torch.get_rng_state(), before)
    assert report.missing == report.unexpected == []
    assert train(other, fresh, 3, seed=2) == expected
    assert parameters(other) == parameters(model)


def test_groups_are_found_by_their_parameters(tmp_path):
    """Groups in another order, and one cut in two, get the hyper-parameters their parameters were saved with."""
    model = Net()
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.1, "tag": "a"},
        {"params": list(model.second.parameters()), "lr": 0.2, "tag": "b"},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    train(model, optimizer, 1, seed=0)
    sk.save({"model": model, "optim": optimizer}, tmp_path / "c")

    other = Net()
    cut = [
        {"params": [other.second.bias]},
        {"params": list(other.first.parameters())},
        {"params": [other.second.weight]},
    ]
    fresh = torch.optim.SGD(cut, lr=0.9, momentum=0.1)
    sk.load({"model": other, "optim": fresh}, tmp_path / "c")
    assert [group["lr"] for group in fresh.param_groups] == [0.2, 0.1, 0.2]
    assert [group["tag"] for group in fresh.param_groups] == ["b", "a", "b"]
    assert all(group["momentum"] == 0.9 for group in fresh.param_groups)
    for mine, its in zip(trainable(other), trainable(model), strict=True):
        assert torch.equal(fresh.state[mine]["momentum_buffer"], optimizer.state[its]["momentum_buffer"])


def test_one_group_of_two_different_ones_is_refused(tmp_path):
    model = Net()
    groups = [{"params": [model.first.weight], "lr": 0.1}, {"params": [model.second.weight], "lr": 0.2}]
    sk.save({"model": model, "optim": torch.optim.SGD(groups)}, tmp_path / "c")
    other = Net()
    before = parameters(other)
    fresh = torch.optim.SGD([other.first.weight, other.second.weight], lr=3.0)
    with pytest.raises(sk.StateMismatch, match=r"first\.weight.*second\.weight.*lr"):
        sk.load({"model": other, "optim": fresh}, tmp_path / "c")
    assert parameters(other) == before
    sk.load({"model": other, "optim": fresh}, tmp_path / "c", exclude="optim.param_groups")
    assert fresh.param_groups[0]["lr"] == 3.0


def test_what_this_machine_decides_stays(tmp_path):
    """`foreach` and its kin are how a step is done here; they are not taken from the checkpoint."""
    model = Net()
    sk.save({"model": model, "optim": torch.optim.Adam(trainable(model), foreach=True, lr=0.5)}, tmp_path / "c")
    fresh = torch.optim.Adam(trainable(model), foreach=False, lr=0.1)
    sk.load({"model": model, "optim": fresh}, tmp_path / "c")
    assert fresh.param_groups[0]["foreach"] is False
    assert fresh.param_groups[0]["lr"] == 0.5


def test_state_of_a_parameter_that_is_gone_is_unexpected(tmp_path):
    """Moments that nothing takes are an error, and not a silent reset."""
    model, _ = trained_and_saved(torch.optim.Adam, tmp_path)
    fewer = torch.optim.Adam(model.first.parameters())
    with pytest.raises(sk.StateMismatch, match=r"optim\.state\.second\.weight\.exp_avg"):
        sk.load({"model": model, "optim": fewer}, tmp_path / "c")
    report = sk.load({"model": model, "optim": fewer}, tmp_path / "c", strict=False)
    assert "optim.state.second.bias.step" in report.unexpected
    assert len(fewer.state) == 2


def test_a_parameter_that_was_not_optimized_is_missing(tmp_path):
    """A parameter the saved optimizer did not have is named; one it had no state for yet is fine."""
    model = Net()
    sk.save({"model": model, "optim": torch.optim.Adam(model.first.parameters())}, tmp_path / "c")
    more = torch.optim.Adam(trainable(model))
    with pytest.raises(sk.StateMismatch, match=r"optim\.state\.second\.weight"):
        sk.load({"model": model, "optim": more}, tmp_path / "c")


def test_an_optimizer_without_its_module_needs_names(tmp_path):
    model = Net()
    with pytest.raises(sk.StateError, match="no module in the state"):
        sk.save({"optim": torch.optim.SGD(model.parameters(), lr=0.1)}, tmp_path / "c")
    named = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    train(model, named, 1, seed=0)
    sk.save({"optim": named}, tmp_path / "c")
    fresh = torch.optim.SGD(copy.deepcopy(model).named_parameters(), lr=0.3, momentum=0.9)
    sk.load({"optim": fresh}, tmp_path / "c")
    assert fresh.param_groups[0]["lr"] == 0.1
    assert len(fresh.state) == 4


def test_several_optimizers_and_modules(tmp_path):
    one, two = Net(), Net()
    state = {
        "one": one,
        "two": two,
        "opts": [torch.optim.SGD(trainable(one), lr=0.1, momentum=0.9), torch.optim.Adam(trainable(two))],
        "both": torch.optim.SGD([one.first.weight, two.first.weight], lr=0.3, momentum=0.5),
    }
    for model, optimizer in zip((one, two), state["opts"], strict=True):
        train(model, optimizer, 1, seed=0)
    state["both"].step()
    sk.save(state, tmp_path / "c")
    assert "both.param_groups.one.first.weight.lr" in list(sk.open(tmp_path / "c").keys())

    a, b = Net(), Net()
    fresh = {
        "one": a,
        "two": b,
        "opts": [torch.optim.SGD(trainable(a), lr=9.0), torch.optim.Adam(trainable(b), lr=9.0)],
        "both": torch.optim.SGD([a.first.weight, b.first.weight], lr=9.0),
    }
    sk.load(fresh, tmp_path / "c")
    assert parameters(a) == parameters(one)
    assert fresh["opts"][0].param_groups[0]["lr"] == 0.1
    assert torch.equal(
        fresh["opts"][1].state[b.first.bias]["exp_avg"], state["opts"][1].state[two.first.bias]["exp_avg"]
    )
    for key in ("one.first.weight", "two.first.weight"):
        assert key in list(sk.open(tmp_path / "c")["both.param_groups.one.first.weight.params"])


def test_a_renamed_layer_takes_its_moments_along(tmp_path):
    model, optimizer = trained_and_saved(lambda ps: torch.optim.Adam(ps, lr=0.02), tmp_path)
    other = Net()
    other.start = other.first
    del other.first
    fresh = torch.optim.Adam(trainable(other))
    sk.load(
        {"model": other, "optim": fresh}, tmp_path / "c", rename=[(r"^(model|optim\.state)\.first\.", r"\1.start.")]
    )
    assert fresh.param_groups[0]["lr"] == 0.02
    assert torch.equal(other.start.weight, model.first.weight)
    assert torch.equal(fresh.state[other.start.weight]["exp_avg"], optimizer.state[model.first.weight]["exp_avg"])


def test_a_part_of_the_state_alone(tmp_path):
    """What `exclude` leaves out stays in the optimizer as it was; what is loaded takes its place."""
    model, optimizer = trained_and_saved(torch.optim.Adam, tmp_path, steps=2)
    saved = optimizer.state[model.first.weight]["exp_avg"].clone()
    train(model, optimizer, 1, seed=1)
    later = optimizer.state[model.first.weight]["exp_avg_sq"].clone()
    sk.load({"model": model, "optim": optimizer}, tmp_path / "c", exclude="*.exp_avg_sq")
    assert torch.equal(optimizer.state[model.first.weight]["exp_avg"], saved)
    assert torch.equal(optimizer.state[model.first.weight]["exp_avg_sq"], later)


def test_a_state_dict_by_names_is_loaded_into_the_object(tmp_path):
    model = Net()
    optimizer = torch.optim.Adam(trainable(model), lr=0.03)
    train(model, optimizer, 2, seed=0)
    sk.save({"model": model, "optim": get_optimizer_state_dict(model, optimizer)}, tmp_path / "c")
    fresh = torch.optim.Adam(trainable(model), lr=0.5)
    sk.load({"model": model, "optim": fresh}, tmp_path / "c")
    assert fresh.param_groups[0]["lr"] == 0.03
    assert torch.equal(fresh.state[model.first.bias]["exp_avg"], optimizer.state[model.first.bias]["exp_avg"])


def test_what_an_overridden_state_dict_returns_is_stored(tmp_path):
    class Own(torch.optim.SGD):
        def state_dict(self):
            return {"mine": torch.ones(2), "rate": self.param_groups[0]["lr"]}

        def load_state_dict(self, state):
            self.param_groups[0]["lr"] = state["rate"] + state["mine"].sum().item()

    model = Net()
    sk.save({"optim": Own(model.parameters(), lr=1.0)}, tmp_path / "c")
    fresh = Own(model.parameters(), lr=5.0)
    sk.load({"optim": fresh}, tmp_path / "c")
    assert fresh.param_groups[0]["lr"] == 3.0


def test_tensors_that_an_optimizer_keeps_for_no_parameter(tmp_path):
    model = Net()
    optimizer, fresh = (torch.optim.Adam(trainable(model)) for _ in range(2))
    train(model, optimizer, 1, seed=0)
    optimizer.state["history"] = torch.arange(4.0)
    sk.save({"model": model, "optim": optimizer}, tmp_path / "c")
    sk.load({"model": model, "optim": fresh}, tmp_path / "c")
    assert torch.equal(fresh.state["history"], torch.arange(4.0))


def step(model, optimizer, times=1):
    for _ in range(times):
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
        loss.backward()
        optimizer.step()


def test_going_back_to_before_the_first_step_clears_state(tmp_path):
    """A checkpoint of an optimizer without state takes the state of later steps away, of all parameters or some."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"m": model, "o": optimizer}
    sk.save(state, tmp_path / "a")
    step(model, optimizer, 3)
    sk.load(state, tmp_path / "a")
    assert not optimizer.state
    model[0].requires_grad_(False)
    step(model, optimizer)
    sk.save(state, tmp_path / "b")
    model[0].requires_grad_(True)
    step(model, optimizer, 2)
    optimizer.state["later"] = 1
    sk.load(state, tmp_path / "b")
    assert set(optimizer.state) == {model[1].weight, model[1].bias}


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_schedulers_go_on(rate, tmp_path):
    """Learning rates after a resume are those of the run without a break, also where schedulers show one tensor twice."""
    model = nn.Linear(2, 2)

    def build():
        optimizer = torch.optim.Adam(model.parameters(), lr=copy.copy(rate))
        parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    optimizer, scheduler = build()
    step(model, optimizer)
    scheduler.step()
    sk.save({"m": model, "o": optimizer, "s": scheduler}, tmp_path / "c")
    fresh, again = build()
    sk.load({"m": model, "o": fresh, "s": again}, tmp_path / "c")
    assert again.last_epoch == 1
    for _ in range(4):
        assert float(fresh.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])
        for one, its in ((optimizer, scheduler), (fresh, again)):
            one.step()
            its.step()


def test_ranks_that_optimize_different_modules_keep_their_own_moments(tmp_path):
    """Rank 0 trains the encoder, rank 1 the decoder, whose parameters have the same names inside."""

    def state_of(world, fill):
        mine = nn.Linear(2, 2)
        modules = {"enc": mine, "dec": nn.Identity()} if world.rank == 0 else {"enc": nn.Identity(), "dec": mine}
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
        if fill:
            optimizer.state[mine.weight]["momentum_buffer"] = torch.full((2, 2), float(world.rank))
        return modules | {"o": optimizer}, mine

    def load(world):
        state, mine = state_of(world, fill=False)
        sk.load(state, tmp_path / "c", group=world)
        return state["o"].state[mine.weight]["momentum_buffer"][0, 0].item()

    run_thread_ranks(2, lambda world: sk.save(state_of(world, fill=True)[0], tmp_path / "c", group=world))
    assert run_thread_ranks(2, load) == [0.0, 1.0]


def test_names_do_not_depend_on_what_else_is_in_the_state(tmp_path):
    """An average in the state puts the module's name before the optimizer's; without it they are found, too."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    step(model, optimizer)
    sk.save({"m": model, "o": optimizer, "ema": nn.Linear(2, 2)}, tmp_path / "both")
    sk.save({"m": model, "o": optimizer}, tmp_path / "alone")
    for saved, extra in (("both", {}), ("alone", {"ema": nn.Linear(2, 2)})):
        fresh = torch.optim.Adam(model.parameters())
        sk.load({"m": model, "o": fresh, **extra}, tmp_path / saved, exclude="ema")
        assert fresh.param_groups[0]["lr"] == 0.3
        assert len(fresh.state) == 2


def test_hyper_parameters_follow_renamed_layers(tmp_path):
    """Layers that move up by one, and layers that change places, keep their learning rates."""

    def build(names, rates):
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        groups = [{"params": list(model[n].parameters()), "lr": r} for n, r in zip(names, rates, strict=True)]
        return model, torch.optim.SGD(groups)

    model, optimizer = build(["l0", "l1"], [0.1, 0.2])
    sk.save({"m": model, "o": optimizer}, tmp_path / "c")
    up = [(r"^(m|o\.state)\.l1\.", r"\1.l2."), (r"^(m|o\.state)\.l0\.", r"\1.l1.")]
    swap = {"m.l0": "m.l1", "m.l1": "m.l0", "o.state.l0": "o.state.l1", "o.state.l1": "o.state.l0"}
    everywhere = lambda name: name.replace("l1.", "z.").replace("l0.", "y.")  # noqa: E731
    for names, rename, rates in (
        (["l1", "l2"], up, [0.1, 0.2]),
        (["l0", "l1"], swap, [0.2, 0.1]),
        (["y", "z"], everywhere, [0.1, 0.2]),
    ):
        other, fresh = build(names, [9.0, 9.0])
        sk.load({"m": other, "o": fresh}, tmp_path / "c", rename=rename)
        assert [group["lr"] for group in fresh.param_groups] == rates


def test_learning_rates_that_are_tensors(tmp_path):
    """Groups that share one tensor get each its own; one group of two different ones is refused."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    groups = [
        {"params": part.parameters(), "lr": torch.tensor(rate)} for part, rate in zip(model, (0.3, 0.7), strict=True)
    ]
    sk.save({"m": model, "o": torch.optim.Adam(groups)}, tmp_path / "c")
    fresh = torch.optim.Adam([{"params": part.parameters()} for part in model], lr=torch.tensor(0.1))
    sk.load({"m": model, "o": fresh}, tmp_path / "c")
    assert [round(group["lr"].item(), 3) for group in fresh.param_groups] == [0.3, 0.7]
    with pytest.raises(sk.CheckpointError, match="different lr"):
        sk.load({"m": model, "o": torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))}, tmp_path / "c")


def test_one_hyper_parameter_alone(tmp_path):
    model = nn.Linear(2, 2)
    sk.save({"m": model, "o": torch.optim.Adam(model.parameters(), lr=0.3)}, tmp_path / "c")
    fresh = torch.optim.Adam(model.parameters())
    sk.load({"m": model, "o": fresh}, tmp_path / "c", include="o.param_groups.*.lr")
    assert fresh.param_groups[0]["lr"] == 0.3


def test_a_parameter_takes_its_own_state_only(tmp_path):
    """A frozen head inside the model and a trained one beside it have their own state; a new module has none."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)

    model, head = Model(), nn.Linear(2, 2)
    model.requires_grad_(False)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.1)
    step(head, optimizer)
    state = {"model": model, "head": head, "o": optimizer}
    sk.save(state, tmp_path / "c")
    sk.load(state, tmp_path / "c")
    assert set(optimizer.state) == set(head.parameters())

    sk.save({"g": head, "o": torch.optim.Adam(head.parameters())}, tmp_path / "d")
    grown = {"g": head, "h": nn.Linear(2, 2)}
    both = torch.optim.Adam([*grown["g"].parameters(), *grown["h"].parameters()])
    with pytest.raises(sk.StateMismatch, match=r"o\.state\.h\.weight"):
        sk.load({**grown, "o": both}, tmp_path / "d", exclude="h")


def test_step_counters_are_not_shared_because_they_were(tmp_path):
    """Parameters that shared one counter when they were saved count for themselves."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    step(model, optimizer, 3)
    shared = optimizer.state[model.weight]["step"]
    optimizer.state[model.bias]["step"] = shared
    sk.save({"m": model, "o": optimizer}, tmp_path / "c")
    fresh = torch.optim.Adam(model.parameters(), foreach=False)
    sk.load({"m": model, "o": fresh}, tmp_path / "c")
    step(model, fresh)
    assert [kept["step"].item() for kept in fresh.state.values()] == [4.0, 4.0]


def test_names_that_are_dropped_leave_state_alone(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    state = {"m": model, "o": optimizer}
    sk.save(state, tmp_path / "c")
    sk.load(state, tmp_path / "c", rename=lambda name: None if ".state." in name else name)
    assert len(optimizer.state) == 2


def test_moments_follow_the_dtype_and_shape_of_their_parameter(tmp_path):
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    sk.save({"m": model, "o": optimizer}, tmp_path / "c")
    wide = nn.Linear(2, 2)
    fresh = torch.optim.Adam(wide.parameters())
    with pytest.raises(sk.StateMismatch, match=r"o\.state\.weight\.exp_avg"):
        sk.load({"m": wide, "o": fresh}, tmp_path / "c")
    sk.load({"m": wide, "o": fresh}, tmp_path / "c", cast=True)
    assert fresh.state[wide.weight]["exp_avg"].dtype is torch.float32
    large = nn.Linear(3, 3, dtype=torch.bfloat16)
    with pytest.raises(sk.StateMismatch, match=r"exp_avg.*shape"):
        sk.load({"m": large, "o": torch.optim.Adam(large.parameters())}, tmp_path / "c", include="o")


def test_ranks_with_other_objects_are_refused_at_save(tmp_path):
    """Modules under different keys on different ranks: an error on all, before their moments are mixed up."""

    def save(world):
        model = nn.Linear(2, 2)
        state = {f"stage{world.rank}": model, "o": torch.optim.SGD(model.parameters())}
        sk.save(state, tmp_path / "c", group=world)

    for outcome in thread_outcomes(2, save):
        assert isinstance(outcome, sk.RanksDisagree)
        assert "'stage0'" in str(outcome)
