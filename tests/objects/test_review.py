"""What a hostile reader of the objects code found, each with the case that showed it."""

from collections import Counter, defaultdict, namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import shardkeep as sk
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes
from tests.engine.samples import bits

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - the plain kind is meant


class Thing:
    """An object whose state is `shows`, and which keeps what it was given."""

    def __init__(self, shows=None):
        self.shows = {} if shows is None else shows
        self.got = None

    def state_dict(self):
        return self.shows() if callable(self.shows) else self.shows

    def load_state_dict(self, state):
        self.got = state


def step(model, optimizer, times=1):
    for _ in range(times):
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
        loss.backward()
        optimizer.step()


def test_going_back_to_before_the_first_step_clears_state(tmp_path):
    """
    A checkpoint of an optimizer without state takes the state of later steps away, of all parameters or some.
    """
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


def test_what_an_object_shows_is_never_written_to(tmp_path):
    """
    An average that shows the model's own tensors until its first update is given new ones; the model stays.
    """
    model = nn.Linear(2, 2)
    sk.save({"e": Thing({"w": torch.zeros(2, 2), "row": torch.full((2,), 7.0)}), "m": model}, tmp_path / "c")
    before = bits(model.weight)
    average = Thing({"w": model.weight.detach(), "row": model.weight.detach()[0]})
    sk.load({"e": average, "m": model}, tmp_path / "c", include="e")
    assert bits(model.weight) == before
    assert torch.equal(average.got["w"], torch.zeros(2, 2))
    assert torch.equal(average.got["row"], torch.full((2,), 7.0))


def test_an_object_that_cannot_show_its_state_yet_is_loaded(tmp_path):
    """
    `state_dict` is asked at load only for layouts; one that raises before a start is no hindrance.
    """

    def not_started():
        raise RuntimeError("not started")

    sk.save({"s": Thing({"a": 5})}, tmp_path / "c")
    fresh = Thing(not_started)
    sk.load({"s": fresh}, tmp_path / "c")
    assert fresh.got == {"a": 5}


def test_schedulers_with_tensor_learning_rates(tmp_path):
    """
    Schedulers that show one tensor under several names are loaded.
    """
    model = nn.Linear(2, 2)

    def build():
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
        parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    optimizer, scheduler = build()
    step(model, optimizer)
    scheduler.step()
    sk.save({"m": model, "o": optimizer, "s": scheduler}, tmp_path / "c")
    fresh, again = build()
    sk.load({"m": model, "o": fresh, "s": again}, tmp_path / "c")
    assert again.last_epoch == 1
    assert torch.equal(fresh.param_groups[0]["lr"], optimizer.param_groups[0]["lr"])


def test_ranks_that_optimize_different_modules_keep_their_own_moments(tmp_path):
    """
    Rank 0 trains the encoder, rank 1 the decoder, whose parameters have the same names inside.
    """

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
    """
    An average in the state puts the module's name before those of the optimizer; without it they are found all the same.
    """
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


def test_hooks_on_the_way_are_honoured_on_meta_too(tmp_path):
    """
    A module on meta whose hooks change the form of its state gets its parameter in the parameter's form.
    """
    sk.save({"m": Turned()}, tmp_path / "c")
    with torch.device("meta"):
        other = Turned()
    sk.load({"m": other}, tmp_path / "c")
    assert torch.equal(other.weight, Turned().weight)


def test_a_parameter_on_meta_keeps_class_attributes_and_hooks(tmp_path):
    """
    Given memory, it is still what frameworks made of it; one that is watched by a weak reference is refused by name.
    """

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
    """
    Saved tied, loaded untied: two memories. Saved untied, loaded tied: an error, as off meta.
    """

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


def test_hyper_parameters_follow_renamed_layers(tmp_path):
    """
    Layers that move up by one, and layers that change places, keep their learning rates.
    """

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
    """
    Groups that share one tensor get each its own; one group of two different ones is refused.
    """
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
    """
    A glob that reaches the learning rates, and nothing else, loads the learning rates.
    """
    model = nn.Linear(2, 2)
    sk.save({"m": model, "o": torch.optim.Adam(model.parameters(), lr=0.3)}, tmp_path / "c")
    fresh = torch.optim.Adam(model.parameters())
    sk.load({"m": model, "o": fresh}, tmp_path / "c", include="o.param_groups.*.lr")
    assert fresh.param_groups[0]["lr"] == 0.3


def test_objects_that_decide_are_asked_even_if_ranks_agreed(tmp_path):
    """
    All positions equal, or saved on one rank: `load_rank_states` still hears that the number of ranks is another one.
    """

    class Loader(Thing):
        def load_rank_states(self, states, rank, world_size):
            self.got = (sorted(states), rank, world_size)

    def save(world):
        sk.save({"l": Loader({"position": 100})}, tmp_path / str(world.size), group=world)

    def load(world):
        thing = Loader()
        sk.load({"l": thing}, tmp_path / "4", group=world)
        return thing.got

    run_thread_ranks(4, save)
    assert run_thread_ranks(2, load) == [([0, 1, 2, 3], rank, 2) for rank in range(2)]


def test_what_differs_beside_spread_tensors_is_refused_or_wrapped(tmp_path):
    """
    An object with shards in it cannot be per rank as a whole: what differs in it is named, and PerRank is understood.
    """

    def shard(world):
        return sk.ShardedBox(torch.full((2,), float(world.rank)), offsets=(2 * world.rank,), shape=(4,))

    def save(wrap):
        def run(world):
            noise = torch.tensor([world.rank])
            sk.save({"s": Thing({"w": shard(world), "noise": wrap(noise)})}, tmp_path / "c", group=world)

        return run

    def load(world):
        thing = Thing({"w": shard(world), "noise": sk.PerRank(torch.zeros(1, dtype=torch.int64))})
        sk.load({"s": thing}, tmp_path / "c", group=world)
        return thing.got["noise"].value.item()

    for outcome in thread_outcomes(2, save(lambda noise: noise)):
        assert isinstance(outcome, sk.ReplicasDiffer)
        assert "'s.noise'" in str(outcome)
    run_thread_ranks(2, save(sk.PerRank))
    assert run_thread_ranks(2, load) == [0, 1]


def test_an_object_is_not_replaced_by_a_value(tmp_path):
    """
    A number or a tensor where an object stands is an error; the object stays.
    """
    for saved in (3, torch.ones(2)):
        sk.save({"s": saved}, tmp_path / "c", overwrite=True)
        state = {"s": Thing()}
        with pytest.raises(sk.StateMismatch, match="single value"):
            sk.load(state, tmp_path / "c")
        assert isinstance(state["s"], Thing)


def test_per_rank_inside_and_around_objects(tmp_path):
    """
    A state dict may hold PerRank; PerRank may hold objects, modules and RNG; an optimizer outside it is refused.
    """

    def save(world):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, world.rank)
        state = {"t": Thing({"p": sk.PerRank(world.rank)}), "r": sk.PerRank(sk.RNG()), "m": sk.PerRank(model)}
        sk.save(state, tmp_path / "c", group=world)
        sk.save({"m": sk.PerRank(model), "o": torch.optim.SGD(model.parameters())}, tmp_path / "d", group=world)

    def load(world):
        model, thing = nn.Linear(1, 1), Thing()
        sk.load({"t": thing, "r": sk.PerRank(sk.RNG()), "m": sk.PerRank(model)}, tmp_path / "c", group=world)
        return thing.got["p"].value, model.weight.item()

    for outcome in thread_outcomes(2, save):
        assert isinstance(outcome, sk.StateError)
        assert "put the optimizer into a PerRank too" in str(outcome)
    assert run_thread_ranks(2, load) == [(0, 0.0), (1, 1.0)]


def test_extra_state_that_grew_is_given_back(tmp_path):
    """
    Extra state of another nesting or size than the module has now goes through set_extra_state.
    """

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


def test_containers_keep_their_classes(tmp_path):
    """
    Counters, default dicts and named tuples come back as what the object holds now.
    """
    shows = {"c": Counter({3: 2}), "d": defaultdict(int, a=1), "t": Pair(torch.ones(1), 2)}
    sk.save({"s": Thing(shows)}, tmp_path / "c")
    fresh = Thing({"c": Counter(), "d": defaultdict(int), "t": Pair(0, 0)})
    sk.load({"s": fresh}, tmp_path / "c")
    assert [type(value) for value in fresh.got.values()] == [Counter, defaultdict, Pair]
    assert fresh.got["c"] == shows["c"]


def test_the_order_of_keys_is_no_difference(tmp_path):
    """
    Two ranks that list the same items in another order have the same state.
    """

    def save(world):
        items = [("a", 1), ("b", 2)]
        sk.save({"s": Thing(dict(items if world.rank else items[::-1]))}, tmp_path / "c", group=world)

    run_thread_ranks(2, save)
    assert sorted(sk.open(tmp_path / "c").keys()) == ["s.a", "s.b"]


def test_objects_on_some_ranks_only_are_told_at_once(tmp_path):
    """
    A rank without the object of another: both hear of it, by name, and nothing has changed.
    """
    sk.save({"s": Thing({"a": 1}), "w": torch.ones(2)}, tmp_path / "c")
    tensors = [torch.zeros(2), torch.zeros(2)]

    def load(world):
        sk.load({"w": tensors[world.rank]} | ({} if world.rank else {"s": Thing()}), tmp_path / "c", group=world)

    for outcome in thread_outcomes(2, load):
        assert isinstance(outcome, sk.RanksDisagree)
        assert "'s'" in str(outcome)
    assert not any(tensor.any() for tensor in tensors)


class Gram(torch.optim.Optimizer):
    """Keeps a factor of the whole parameter, the same on all ranks, which may have the shape of a shard."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            self.state[p]["gram"] = self.state[p].get("gram", 0) + grad.t() @ grad


def gram(where, *, save):
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 8, bias=False), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Gram(model.parameters())
    if save:
        model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
        optimizer.step()
        sk.save({"m": model, "o": optimizer}, where)
    else:
        sk.load({"m": model, "o": optimizer}, where)
    return bits(optimizer.state[next(model.parameters())]["gram"])


def test_a_factor_that_looks_like_a_shard_is_none(rank_pool, tmp_path):
    """
    A 4x4 factor of an 8x4 parameter on two ranks has the shape of a shard, and is loaded as it is on one.
    """
    saved = rank_pool.run(2, gram, str(tmp_path / "c"), save=True)
    assert rank_pool.run(2, gram, str(tmp_path / "c"), save=False) == saved
    assert rank_pool.run(1, gram, str(tmp_path / "c"), save=False) == saved[:1]


class FailsOnOne(Thing):
    def load_state_dict(self, state):
        if dist.get_rank() == 1:
            raise ValueError("not on this rank")


def fsdp1_state():
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    return {"m": model, "o": torch.optim.AdamW(model.parameters())}


def fsdp1_fails_alone(where):
    """Return what happened to a load and to a save in which one rank fails by itself."""
    options = sk.Options(timeout_s=20)
    fresh = fsdp1_state()
    sk.save({"first": FailsOnOne({"a": 1}), **fresh}, where, options=options)
    told = []
    for call in (
        lambda: sk.load({"first": FailsOnOne({"a": 1}), **fsdp1_state()}, where, options=options),
        lambda: sk.save(fsdp1_state(), f"{where}-2", meta={1, 2} if dist.get_rank() else None, options=options),
    ):
        try:
            call()
        except sk.CheckpointError as exc:
            told.append(str(exc).splitlines()[0])
    other = fsdp1_state()
    sk.load(other, where, exclude="first", options=options)
    return told, len(other["o"].state)


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_does_not_wait_for_a_rank_that_failed(rank_pool, tmp_path):
    """
    What can fail on a rank alone comes before FSDP1 talks; and an optimizer that never stepped stays fresh.
    """
    for told, count in rank_pool.run(2, fsdp1_fails_alone, str(tmp_path / "c")):
        assert len(told) == 2
        assert "not on this rank" in told[0]
        assert "meta" in told[1]
        assert count == 0


def test_a_parameter_takes_nobody_elses_state(tmp_path):
    """
    A frozen head inside the model, a trained head beside it: each has what is its own, and a new module has nothing.
    """

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
    """
    Parameters that shared one counter when they were saved count for themselves.
    """
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


def test_a_modules_own_ways_are_gone(tmp_path):
    """
    Overridden methods, pre-hooks and renaming hooks have their part in a load, in memory and on meta.
    """

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


def test_names_that_are_dropped_leave_state_alone(tmp_path):
    """
    `rename` to None is as good as `exclude`: live state stays.
    """
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    state = {"m": model, "o": optimizer}
    sk.save(state, tmp_path / "c")
    sk.load(state, tmp_path / "c", rename=lambda name: None if ".state." in name else name)
    assert len(optimizer.state) == 2


def test_moments_follow_the_dtype_and_shape_of_their_parameter(tmp_path):
    """
    Into another dtype: an error, or cast with the parameter. Into another shape: an error, also without the module.
    """
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
    """
    Modules under different keys on different ranks: told to all, before their moments could be mixed up.
    """

    def save(world):
        model = nn.Linear(2, 2)
        state = {f"stage{world.rank}": model, "o": torch.optim.SGD(model.parameters())}
        sk.save(state, tmp_path / "c", group=world)

    for outcome in thread_outcomes(2, save):
        assert isinstance(outcome, sk.RanksDisagree)
        assert "'stage0'" in str(outcome)
