"""The same scripts with torch's module and with ours, in all combinations of who writes and who reads."""

import ast
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.dcp.scripts import MISTAKES, PLAIN, SCRIPTS
from tests.dcp.sides import SIDES, causes_of, failure_of, quietly, side
from tests.engine.samples import all_dtypes, random_tensor
from tests.toolkit.samples import seen
from tests.warm.python import warm_python

RANKS = (1, 3, 4)
"""How many ranks a script runs on: alone, where nothing divides evenly, and where most does."""
FEWER = {
    **dict.fromkeys(["fsdp1", "fsdp1_full", "fsdp2", "tensor_parallel"], (2,)),
    **dict.fromkeys(["hsdp", "fsdp1_sharded_tensors"], (4,)),
    **dict.fromkeys(MISTAKES, (1, 3)),
    **dict.fromkeys(PLAIN, (1, 2)),
    "on_meta": (1, 2),
}
"""Those that say nothing more on other numbers of ranks, or take long."""


def _kinds(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def _outcome(name: str, writes: str, reads: str, folder: str) -> tuple[str, Any, Any]:
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    try:
        return "returned", SCRIPTS[name](side(writes), side(reads), folder), None
    except BaseException as error:  # noqa: BLE001 - what it is, and of whom, is what is compared
        causes = {rank: _kinds(each) for rank, each in causes_of(error).items()} if hasattr(error, "failures") else {}
        return "raised", (_kinds(error), causes), error


def _difference(ours: tuple[str, Any, Any], torchs: tuple[str, Any, Any]) -> str:
    if ours[0] != torchs[0]:
        return f"{ours[0]} where torch {torchs[0]}: {ours[2] or torchs[2]!r}"
    if ours[0] == "returned":
        return "; ".join(_unequal(ours[1], torchs[1], "")[:4])
    (kinds, causes), (expected, expected_causes) = ours[1], torchs[1]
    if expected[0] not in kinds or causes.keys() != expected_causes.keys():
        return f"{kinds} of {list(causes)} where torch raises {expected} of {list(expected_causes)}: {ours[2]}"
    wrong = [rank for rank, kinds in causes.items() if expected_causes[rank][0] not in kinds]
    return f"ranks {wrong}: {causes} where torch raises {expected_causes}: {ours[2]}" if wrong else ""


def _unequal(mine: Any, torchs: Any, where: str) -> list[str]:
    if type(mine) is type(torchs) and isinstance(mine, dict) and mine.keys() == torchs.keys():
        return [said for key in mine for said in _unequal(mine[key], torchs[key], f"{where}[{key!r}]")]
    if type(mine) is type(torchs) and isinstance(mine, (list, tuple)) and len(mine) == len(torchs):
        return [
            said for n, pair in enumerate(zip(mine, torchs, strict=True)) for said in _unequal(*pair, f"{where}[{n}]")
        ]
    return [] if mine == torchs else [f"{where} is {mine!r}, torch has {torchs!r}"]


def all_combinations(name: str, folder: str) -> list[str]:
    """On every rank: play a script with every combination; return how those with us in them differ from torch's."""
    outcomes = {
        (writes, reads): _outcome(name, writes, reads, os.path.join(folder, f"{writes}-{reads}", "ck"))
        for writes in SIDES
        for reads in SIDES
    }
    torchs = outcomes.pop(("torch", "torch"))
    found = {pair: _difference(each, torchs) for pair, each in outcomes.items()}
    return [f"{pair}: {said}" for pair, said in found.items() if said]


@pytest.fixture
def folder() -> Iterator[str]:
    """A place that all ranks see; in memory where the system has that, as nothing here is about the disk."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="shardkeep-scripts-", dir=base) as made:
        yield made


def _runs() -> Iterator[Any]:
    for name in SCRIPTS:
        for ranks in FEWER.get(name, RANKS):
            yield pytest.param(name, ranks, id=f"{name}-{ranks}")


@pytest.mark.parametrize(("name", "ranks"), list(_runs()))
def test_the_same_script(rank_pool: Any, folder: str, name: str, ranks: int) -> None:
    """A script gives what it gives with torch alone, whichever half is ours: values, metadata and errors."""
    assert rank_pool.run(ranks, all_combinations, name, folder) == [[]] * ranks


def round_trip_of_ours(name: str, folder: str) -> Any:
    """Play a script with our side alone; return what it returned."""
    return SCRIPTS[name](side("ours"), side("ours"), folder)


def torch_alone(name: str, folder: str) -> str:
    """Play a script with torch's side alone; return what kind of error it ends in."""
    return type(failure_of(SCRIPTS[name], side("torch"), side("torch"), folder)).__name__


def test_a_rank_without_a_shard(rank_pool: Any, folder: str) -> None:
    """FSDP1 on three ranks leaves one without a shard of a bias: torch cannot load what it saved, ours trains on."""
    assert rank_pool.run(3, torch_alone, "fsdp1", os.path.join(folder, "torch")) == ["CheckpointException"] * 3
    for _, same, _ in rank_pool.run(3, round_trip_of_ours, "fsdp1", os.path.join(folder, "ours")):
        assert same


def test_every_dtype_torch_knows(folder: str) -> None:
    """Tensors of every dtype come back bit for bit, those of a few bits too, whose size torch's planner cannot tell."""
    state = {str(d): random_tensor((5, 3), d, seed) for seed, d in enumerate(all_dtypes())}
    into = {
        key: torch.zeros(5, 3 * each.element_size(), dtype=torch.uint8).view(each.dtype) for key, each in state.items()
    }
    quietly(side("ours").save, state, checkpoint_id=os.path.join(folder, "ck"))
    quietly(side("ours").load, into, checkpoint_id=os.path.join(folder, "ck"))
    assert seen(into) == seen(state)
    assert len(state) > 25


def test_objects_under_numbers(folder: str) -> None:
    """An object under the key 1 replaces the one under 1, where torch puts it beside it, under "1"."""
    found = {}
    for name in SIDES:
        where = os.path.join(folder, name)
        quietly(side(name).save, {"groups": {0: {"lr": 0.5}, 1: "x"}}, checkpoint_id=where)
        into = {"groups": {0: {"lr": None}, 1: None}}
        quietly(side(name).load, into, checkpoint_id=where)
        found[name] = into["groups"]
    assert found["ours"] == {0: {"lr": 0.5}, 1: "x"}
    assert found["torch"] == {0: {"lr": None}, 1: None, "0": {"lr": 0.5}, "1": "x"}


def test_modules_are_reached_through_the_package() -> None:
    listed = "sorted(k for k, v in vars(dcp).items() if isinstance(v, types.ModuleType))"
    code = f"import types; import torch.distributed.checkpoint as dcp; print({listed})"
    names = ast.literal_eval(warm_python("-c", code).stdout)
    assert len(names) > 20
    code = f"import shardkeep.dcp as dcp; print([name for name in {names} if not hasattr(dcp, name)])"
    assert warm_python("-c", code).stdout.strip() == "[]"
