"""State across ranks: from wrapper to wrapper, from rank 0 to all, pipeline stages, and failures on all ranks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from shardkeep.dcp.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardkeep.errors import CheckpointError
from shardkeep.state.names import ModuleTree, get_fqns, live_state, parameter_names
from tests.protocol.samples import quietly
from tests.support.rank_pool import RankPool
from tests.training.samples import DIM, Block, Net, Rows, adamw, differences, plain, train
from tests.training.wrappers import WRAPPERS

WHOLE = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def on_rank_0_only(*states: Any) -> tuple[Any, ...]:
    return states if dist.get_rank() == 0 else tuple({} for _ in states)


def through_all_wrappers() -> list[str]:
    torch.manual_seed(0)
    model = Net()
    optim = adamw(model.parameters())
    train(model, optim, range(2))
    expected = plain(get_state_dict(model, optim, options=WHOLE))
    state = copy.deepcopy(expected)
    found = []
    names = ["ddp", "fsdp1", "fsdp2", "compiled", "fsdp1_flat", "tp", "compiled_ddp", "checkpointed_fsdp2", "bare"]
    for number, wrapper in enumerate(names):
        torch.manual_seed(number + 1)
        model = WRAPPERS[wrapper](Net())
        optim = adamw(model.parameters())
        options = FROM_FIRST if number % 2 else WHOLE
        model_state, optim_state = on_rank_0_only(*state) if number % 2 else state
        quietly(set_model_state_dict, model, model_state, options=options)
        quietly(set_optimizer_state_dict, model, optim, optim_state, options=options)
        state = plain(quietly(get_state_dict, model, optim, options=WHOLE))
        found += [f"{wrapper}{line}" for line in differences(sorted_groups(state), sorted_groups(expected))]
    return found


def sorted_groups(state: Any) -> Any:
    """Put the names in groups in order: FSDP1 gives those of a flat parameter in its own."""
    model_state, optim_state = state
    groups = [group | {"params": sorted(group["params"])} for group in optim_state["param_groups"]]
    return [model_state, optim_state | {"param_groups": groups}]


def test_whole_state_goes_from_any_wrapper_to_any_other(rank_pool: RankPool):
    """State handed on through nine wrappers, from all ranks or from rank 0 alone, is the same to the bit at the end."""
    assert rank_pool.run(2, through_all_wrappers) == [[], []]


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as exc:
        return f"{isinstance(exc, CheckpointError) or dist.get_rank() == 0} {exc}"
    return "nothing"


def failures_of_rank_0() -> list[str]:
    model = WRAPPERS["ddp"](Net())
    optim = adamw(model.parameters())
    model_state, optim_state = get_state_dict(model, optim)
    short, groups = dict(model_state), optim_state
    del short["head.bias"]
    del groups["state"]["head.bias"]
    long = model_state | {"head.other": torch.ones(1)}
    sharded = WRAPPERS["fsdp2"](Net())
    before = plain(sharded.state_dict())
    found = [
        raised(lambda: set_model_state_dict(model, *on_rank_0_only(short), options=FROM_FIRST)),
        raised(lambda: set_model_state_dict(model, *on_rank_0_only(long), options=FROM_FIRST)),
        raised(lambda: set_optimizer_state_dict(model, optim, *on_rank_0_only(groups), options=FROM_FIRST)),
        raised(lambda: set_optimizer_state_dict(model, optim, *on_rank_0_only({"wrong": 1}), options=FROM_FIRST)),
    ]
    lenient = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    keys = set_model_state_dict(sharded, *on_rank_0_only(short | {"head.other": torch.ones(1)}), options=lenient)
    found.append(f"{keys.missing_keys} {keys.unexpected_keys}")
    kept = plain(sharded.state_dict())["head.bias"]
    found += differences(kept, before["head.bias"])
    return found


def test_what_rank_0_lacks_is_told_on_all_ranks(rank_pool: RankPool):
    """No rank waits for one that gave up: missing and unexpected keys are the same error, or the same answer, on all."""
    for said in rank_pool.run(2, failures_of_rank_0):
        assert said[0].startswith("True ")
        assert "Missing key: head.bias" in said[0]
        assert "head.other" in said[1]
        assert "'head.bias'" in said[2]
        assert "'wrong' is no key" in said[3]
        assert said[4:] == ["['head.bias'] ['head.other']"]


def whole_state_that_rank_0_alone_has() -> list[str]:
    """Set, without broadcast, what was read to rank 0 alone."""
    model = Net()
    optim = adamw(model.parameters())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optim_state = get_state_dict(model, optim, options=options)
    return [
        raised(lambda: set_model_state_dict(model, model_state, options=options)),
        raised(lambda: set_optimizer_state_dict(model, optim, optim_state, options=options)),
    ]


def test_ranks_that_have_no_state_do_not_pass_over_it(rank_pool: RankPool):
    """A rank with an empty state dict says so, and what to do, where torch goes on with what it has."""
    first, second = rank_pool.run(2, whole_state_that_rank_0_alone_has)
    assert first == ["nothing", "nothing"]
    assert all("empty on this rank" in said and "broadcast_from_rank0" in said for said in second)


def from_meta() -> list[str]:
    torch.manual_seed(0)
    whole = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for options in (WHOLE, FROM_FIRST):
        with torch.device("meta"):
            model = Net()
        for part in (model.first, model.second, model):
            fully_shard(part, mesh=mesh)
        held = dict(model.named_parameters())
        state = get_model_state_dict(whole)
        set_model_state_dict(model, *(on_rank_0_only(state) if options is FROM_FIRST else (state,)), options=options)
        found += [f"{name}: on meta" for name, value in model.state_dict().items() if value.is_meta]
        found += differences(plain(get_model_state_dict(model, options=WHOLE)), plain(whole.state_dict()))
        found += [f"{name}: not sharded" for name in held if not isinstance(model.state_dict()[name], DTensor)]
    return found


def test_sharded_models_on_meta_take_whole_state(rank_pool: RankPool):
    """Each rank gets memory for its own part, from its own copy of the state or from rank 0's."""
    assert rank_pool.run(2, from_meta) == [[], []]


class Twice(nn.Module):
    """One block under two names, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.same = self.block
        self.inp = nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.out.weight = self.inp.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.same(self.block(self.inp(x))))


def odd_layouts() -> list[str]:
    """State of other shapes than the parameter's, and things with two names, in sharded models."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for make in (adamw, Rows):
        models = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            models.append(fully_shard(Twice(), mesh=mesh))
        optims = [make(model.parameters()) for model in models]
        train(models[0], optims[0], range(2))
        for flat in (False, True):
            for options in (WHOLE, FROM_FIRST):
                reading = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
                state = copy.deepcopy(get_state_dict(models[0], optims[0], options=reading))
                given = on_rank_0_only(*state) if options is FROM_FIRST else state
                optims[1] = make(models[1].parameters())
                set_state_dict(
                    models[1], optims[1], model_state_dict=given[0], optim_state_dict=given[1], options=options
                )
                ours, expected = (
                    [model.state_dict(), optim.state_dict()]
                    for model, optim in zip(models[::-1], optims[::-1], strict=True)
                )
                found += [
                    f"{make.__name__} {flat} {options}{line}" for line in differences(plain(ours), plain(expected))
                ]
        train(models[0], optims[0], range(2, 4))
        train(models[1], optims[1], range(2, 4))
        found += differences(plain(models[1].state_dict()), plain(models[0].state_dict()))
    return found


def test_statistics_of_other_shapes_and_shared_modules_are_laid_out_as_they_were(rank_pool: RankPool):
    """Row and column statistics of a sharded parameter come back in the layout that the optimizer gives them."""
    assert rank_pool.run(2, odd_layouts) == [[], []]


class Stage(nn.Module):
    """What one rank of a pipeline holds: its blocks, under the names of the whole model."""

    def __init__(self, whole: nn.ModuleDict, number: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): whole[str(number)]})


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(2)})


def step_alone(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optim.step()
    optim.zero_grad()


def pipeline() -> list[str]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    stage = Stage(Whole().blocks, rank)
    optim = torch.optim.AdamW(stage.parameters(), lr=0.1 * (rank + 1))
    step_alone(stage, optim)
    mine = plain(get_state_dict(stage, optim, options=FLAT))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    model_state = {key: value for part in parts for key, value in part[0].items()}
    optim_state = {key: value for part in parts for key, value in part[1].items()}
    found = [f"shared key {key}" for key in parts[0][1].keys() & parts[1][1].keys()]
    # Into stages again, each taking its own; into a model that holds both; and nested, from rank 0 to all stages.
    fresh = Stage(Whole().blocks, rank)
    target = adamw(fresh.parameters())
    set_optimizer_state_dict(fresh, target, optim_state, options=FLAT)
    found += differences(plain(target.state_dict()), plain(optim.state_dict()))
    whole = Whole()
    groups = [{"params": list(block.parameters())} for block in whole.blocks.values()]
    together = torch.optim.AdamW(groups)
    set_state_dict(whole, together, model_state_dict=model_state, optim_state_dict=optim_state, options=FLAT)
    found += differences([group["lr"] for group in together.param_groups], [0.1, 0.2])
    nested = get_optimizer_state_dict(whole, together)
    again = adamw(fresh.parameters())
    set_optimizer_state_dict(fresh, again, *on_rank_0_only(nested), options=FROM_FIRST)
    found += differences(plain(again.state_dict()), plain(optim.state_dict()))
    return found


def test_pipeline_stages(rank_pool: RankPool):
    """Flat state of stages has no key in common, adds up to that of the whole model, and each takes its own from it."""
    assert rank_pool.run(2, pipeline) == [[], []]


def compiled_inside_fsdp1() -> list[str]:
    found = []
    plain_names = [name for name, _ in Net().named_parameters()]
    for use_orig_params in (True, False):
        states = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            inner = Net()
            inner.norm = nn.Identity()
            inner.first = torch.compile(inner.first, backend="eager")
            model = quietly(
                FullyShardedDataParallel,
                torch.compile(inner, backend="eager"),
                use_orig_params=use_orig_params,
                device_id=torch.device("cpu"),
            )
            optim = adamw(model.parameters())
            if seed == 1:
                with torch.compiler.set_stance("force_eager"):
                    train(model, optim, range(2))
                names = {name for found in parameter_names(live_state(ModuleTree(model))).values() for name in found}
                found += [f"name {name}" for name in names.symmetric_difference(plain_names) if "norm" not in name]
            else:
                model_state, optim_state = states[0]
                quietly(set_state_dict, model, optim, model_state_dict=model_state, optim_state_dict=optim_state)
            states.append(copy.deepcopy(quietly(get_state_dict, model, optim)))
        found += differences(plain(states[1]), plain(states[0]))
        found += [key for key in (*states[0][0], *states[0][1]["state"]) if "_orig_mod" in key]
    flat = next(name for name, _ in model.named_parameters())
    found += [] if len(get_fqns(model, flat)) == 10 else [f"{flat}: {get_fqns(model, flat)}"]
    return found


def test_models_compiled_inside_fsdp1_have_canonical_names(rank_pool: RankPool):
    """Neither the model's nor the optimizer's names show the compiler, and state loads back; torch keeps its prefix."""
    assert rank_pool.run(2, compiled_inside_fsdp1) == [[], []]


@pytest.mark.parametrize("options", [WHOLE, StateDictOptions(cpu_offload=True)], ids=["whole", "cpu"])
def test_options_need_no_process_group(options: StateDictOptions):
    model = Net()
    state, _ = get_state_dict(model, adamw(model.parameters()), options=options)
    assert not differences(plain(state), plain(model.state_dict()))
