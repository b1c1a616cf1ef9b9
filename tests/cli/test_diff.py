"""`shardkeep diff`: keys, kinds, values; exact, tolerant, by digests, across layouts and numbers of ranks."""

import math
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardkeep as sk
from shardkeep.cli import tensors
from tests.cli.conftest import data_file, flip, state_of
from tests.engine.samples import all_dtypes, random_tensor


def pair(tmp_path, one, other):
    for name, state in (("a", one), ("b", other)):
        sk.save(state, tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that every tensor has many."""
    monkeypatch.setattr(tensors, "BLOCK_ELEMENTS", 7)


def test_a_copy_is_equal_without_reading(shardkeep, run_dir, checkpoint):
    """A checkpoint and its copy are equal, and no tensor is read."""
    shutil.copytree(checkpoint, run_dir / "copy")
    answer = shardkeep("diff", checkpoint, run_dir / "copy", "--json")
    assert answer.code == 0
    assert answer.json["equal"]
    assert answer.json["equal_by_digests"] == 7
    assert "no difference" in shardkeep("diff", checkpoint, run_dir / "copy").out


def test_a_run_alone_compares_its_last_two_steps(shardkeep, run_dir):
    """diff RUN compares the last two steps, diff RUN PATTERN only some keys of them, diff RUN RUN the last of each."""
    shutil.copytree(run_dir / "step-30", run_dir / "best")
    whole = shardkeep("diff", run_dir, "--json").json
    assert {whole["a"], whole["b"]} <= {f"{run_dir}/{name}" for name in ("step-20", "step-30", "best")}
    assert whole == shardkeep("diff", run_dir / "step-20", whole["b"], "--json").json
    some = shardkeep("diff", run_dir, "model.layers", "--json").json
    assert set(some["other_elements"]) == {"model.layers.0.weight", "model.layers.10.weight"}
    answer = shardkeep("diff", run_dir, run_dir, "--json")
    assert (answer.code, answer.json["a"]) == (0, whole["b"])
    assert "needs B" in shardkeep("diff", run_dir / "step-20").err
    shutil.rmtree(run_dir / "step-20")
    shutil.rmtree(run_dir / "step-10")
    assert "has 1 checkpoint, and 2 are needed" in shardkeep("diff", run_dir).err
    assert f"it is a folder of runs, such as {run_dir}" in shardkeep("diff", run_dir.parent).err


def test_digests_are_trusted_and_damage_is_no_difference(shardkeep, run_dir, checkpoint):
    """Damage is found by `verify`; where values are read, it is an error that names the file, not a difference."""
    shutil.copytree(checkpoint, run_dir / "copy")
    flip(data_file(run_dir / "copy"), 5000)
    assert shardkeep("diff", checkpoint, run_dir / "copy").code == 0
    answer = shardkeep("diff", run_dir / "step-20", run_dir / "copy")
    assert answer.code == 2
    assert "are not what was saved" in answer.err


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_a_single_changed_value_is_found(shardkeep, tmp_path, dtype):
    """Of every dtype, one flipped bit of one element is found, counted and located."""
    before = random_tensor((9, 8), dtype, seed=3)
    after = before.clone() if "int" not in str(dtype) or dtype.itemsize > 1 else random_tensor((9, 8), dtype, seed=3)
    raw = after.view(torch.uint8).reshape(9, 8, -1)
    raw[4, 5, 0] ^= 1
    same = torch.empty(0, 4)
    one, other = {"t": before, "u": before, "v": same}, {"t": after, "u": before, "v": same}
    answer = shardkeep("diff", *pair(tmp_path, one, other), "--json")
    assert answer.code == 1
    [(key, found)] = answer.json["other_elements"].items()
    assert (key, found["changed"], found["first"]["index"]) == ("t", 1, [4, 5])
    text = shardkeep("diff", tmp_path / "a", tmp_path / "b").out
    assert "at [4, 5]:" in text
    assert "1 differ; 2 keys equal" in text


@pytest.mark.usefixtures("small_blocks")
def test_norms_are_numpys(shardkeep, tmp_path):
    """Count, greatest distance, norm and relative norm are what numpy says of the whole tensors."""
    one, other = torch.randn(30, 7), torch.randn(30, 7)
    other[3:20] = one[3:20]
    answer = shardkeep("diff", *pair(tmp_path, {"t": one}, {"t": other}), "--json")
    [found] = answer.json["other_elements"].values()
    change = (one - other).double().numpy()
    assert found["changed"] == (change != 0).sum()
    assert found["max_abs"] == pytest.approx(np.abs(change).max())
    assert found["norm"] == pytest.approx(np.linalg.norm(change))
    assert found["base_norm"] == pytest.approx(np.linalg.norm(one.double().numpy()))


@pytest.mark.parametrize(("rtol", "atol"), [(0.0, 0.0), (0.0, 1e-3), (1e-2, 0.0), (1e-3, 1e-4), (1e-6, 1e-6)])
def test_tolerances_are_torchs(shardkeep, tmp_path, rtol, atol):
    one = torch.tensor([0.0, -0.0, 1.0, 1.0, 1e-4, math.nan, math.inf, math.inf, -math.inf, math.nan, 5.0])
    other = torch.tensor([0.0, 0.0, 1.0005, 1.02, 0.0, math.nan, math.inf, -math.inf, 1.0, 1.0, 5.0])
    exact = ~torch.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True)
    if not rtol and not atol:
        exact[1] = True  # -0.0
    tolerances = [f"--rtol={rtol}", f"--atol={atol}"]
    answer = shardkeep("diff", *pair(tmp_path, {"t": one}, {"t": other}), *tolerances, "--json")
    [found] = answer.json["other_elements"].values()
    assert (found["changed"], found["max_abs"]) == (exact.sum(), "NaN")


@pytest.mark.parametrize(
    ("dtype", "one", "other", "changed", "distance"),
    [
        (torch.int64, [2**60, -(2**63), 7], [2**60 + 1, 2**63 - 1, 7], 2, 2.0**64),
        (torch.uint64, [2**64 - 1, 5], [2**64 - 2, 5], 1, 1.0),
    ],
)
def test_whole_numbers_are_exact(shardkeep, tmp_path, dtype, one, other, changed, distance):
    """Integers that are equal as float64 differ, and the distance of the extremes does not overflow."""
    a, b = pair(tmp_path, {"t": torch.tensor(one, dtype=dtype)}, {"t": torch.tensor(other, dtype=dtype)})
    [found] = shardkeep("diff", a, b, "--json").json["other_elements"].values()
    assert (found["changed"], found["max_abs"]) == (changed, distance)
    assert (found["first"]["a"], found["first"]["b"]) == (one[0], other[0])
    assert f"{one[0]} → {other[0]}" in shardkeep("diff", a, b).out


def test_keys_shapes_dtypes_and_values(shardkeep, tmp_path):
    one = {"gone": torch.ones(2), "shape": torch.ones(2, 3), "type": torch.ones(4), "kind": 5, "step": 1, "same": "x"}
    other = {
        "new": torch.ones(2),
        "shape": torch.ones(3, 2),
        "type": torch.ones(4).bfloat16(),
        "kind": torch.tensor(5),
        "step": 2,
        "same": "x",
    }
    answer = shardkeep("diff", *pair(tmp_path, one, other), "--json")
    found = answer.json
    assert answer.code == 1
    assert (list(found["only_in_a"]), list(found["only_in_b"])) == (["gone"], ["new"])
    assert list(found["other_kind"]) == ["kind", "shape", "type"]
    assert found["other_values"] == {"step": [1, 2]}
    assert (found["different_keys"], found["equal_keys"]) == (6, 1)
    text = shardkeep("diff", tmp_path / "a", tmp_path / "b").out
    assert "float32 [2, 3]  float32 [3, 2]" in text
    assert shardkeep("diff", tmp_path / "a", tmp_path / "b", "same").code == 0
    close = shardkeep("diff", tmp_path / "a", tmp_path / "b", "type", "step", "--ignore-dtype", "--atol", "1")
    assert close.code == 0
    keys_only = shardkeep("diff", tmp_path / "a", tmp_path / "b", "--keys-only", "--json").json
    assert (keys_only["different_keys"], keys_only["equal_keys"]) == (5, 2)


@pytest.mark.parametrize(
    "words", [["--rtol", "-1"], ["--atol", "nan"], ["--atol", "inf"], ["nothing.like.this"]], ids=lambda words: words[0]
)
def test_nonsense_is_refused(shardkeep, run_dir, words):
    assert shardkeep("diff", run_dir / "step-10", run_dir / "step-20", *words).code == 2


def test_steps_of_a_run_differ(shardkeep, run_dir):
    """What stayed the same between steps is known by its digests or read; the rest is listed, up to the limit."""
    answer = shardkeep("diff", run_dir / "step-10", run_dir / "step-20", "--limit", "2")
    assert answer.code == 1
    assert "and 4 more (--limit 0 lists them)" in answer.out
    found = shardkeep("diff", run_dir / "step-10", run_dir / "step-20", "--json").json
    assert set(found["other_elements"]) == {
        "model.embed.weight",
        "model.head.weight",
        "model.layers.0.weight",
        "model.layers.10.weight",
        "optim.exp_avg",
        "optim.mask",
    }
    assert found["equal_keys"] == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_across_layouts(shardkeep, tmp_path):
    """A native checkpoint and torch's own of the same state do not differ, and one changed element is found."""
    state = {key: value for key, value in state_of(1).items() if key != "betas"}  # torch takes tuples apart
    sk.save(state, tmp_path / "a")
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    answer = shardkeep("diff", tmp_path / "a", tmp_path / "dcp", "--json")
    assert (answer.code, answer.json["equal_by_digests"]) == (0, 0)
    state["optim"]["exp_avg"][5, 6] += 1
    dcp.save(state, checkpoint_id=tmp_path / "other")
    answer = shardkeep("diff", tmp_path / "a", tmp_path / "other", "--json")
    [(key, found)] = answer.json["other_elements"].items()
    assert (key, found["changed"], found["first"]["index"]) == ("optim.exp_avg", 1, [5, 6])


def save_sharded(path, changed):
    mesh = init_device_mesh("cpu", (4,))
    weight = torch.arange(40.0 * 6).reshape(40, 6)
    if changed:
        weight[33, 2] = -1.0
    sk.save({"w": distribute_tensor(weight, mesh, [Shard(0)]), "step": 1}, path)


def test_across_numbers_of_ranks(rank_pool, shardkeep, tmp_path):
    rank_pool.run(4, save_sharded, str(tmp_path / "four"), changed=False)
    rank_pool.run(4, save_sharded, str(tmp_path / "changed"), changed=True)
    sk.save({"w": torch.arange(40.0 * 6).reshape(40, 6), "step": 1}, tmp_path / "one")
    assert shardkeep("diff", tmp_path / "four", tmp_path / "one").code == 0
    assert shardkeep("diff", tmp_path / "one", tmp_path / "four").code == 0
    [found] = shardkeep("diff", tmp_path / "changed", tmp_path / "four", "--json").json["other_elements"].values()
    assert (found["changed"], found["first"]) == (1, {"index": [33, 2], "a": -1.0, "b": 200.0})
    shown = shardkeep("show", tmp_path / "four", "w", "--json").json
    assert [chunk["box"] for chunk in shown["chunks"]] == [
        {"offsets": [start, 0], "sizes": [10, 6]} for start in (0, 10, 20, 30)
    ]
    assert shown["statistics"]["max"] == 239.0


def test_pickled_values_are_compared_unopened(shardkeep, tmp_path):
    """Pickled values are compared by their bytes, and never unpickled."""
    options = {"allow_pickle": True}
    for name, value in (("a", complex), ("b", complex), ("c", dict)):
        sk.save({"v": value, "t": torch.ones(1)}, tmp_path / name, **options)
    assert shardkeep("diff", tmp_path / "a", tmp_path / "b").code == 0
    answer = shardkeep("diff", tmp_path / "a", tmp_path / "c")
    assert answer.code == 1
    assert "v" in answer.out


def test_an_export_lines_up_with_its_checkpoint(shardkeep, checkpoint, tmp_path):
    """--strip-prefix compares names of A without what the export took off; patterns are of A's names."""
    sk.export(checkpoint, tmp_path / "hf")
    same = shardkeep("diff", checkpoint, tmp_path / "hf", "--strip-prefix", "model.", "model.layers")
    assert (same.code, "3 keys equal" in same.out) == (0, True), same.out
    assert "without 'model.': --strip-prefix model." in shardkeep("diff", checkpoint, tmp_path / "hf").out
    assert "--strip-prefix" not in shardkeep("diff", tmp_path / "hf", checkpoint).out
    exported = dict(load_file(tmp_path / "hf" / "model.safetensors"))
    exported["layers.10.bias"][3] = 1.0
    save_file(exported, tmp_path / "hf" / "model.safetensors")
    other = shardkeep("diff", checkpoint, tmp_path / "hf", "--strip-prefix", "model.", "--json")
    assert list(other.json["other_elements"]) == ["model.layers.10.bias"]
    assert list(other.json["only_in_a"]) == ["model.head.weight"]  # tied: stored once
    wrong = shardkeep("diff", checkpoint, tmp_path / "hf", "--strip-prefix", "modle.")
    assert (wrong.code, "begins with 'modle.'" in wrong.err) == (2, True)
