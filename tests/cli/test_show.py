"""`shardkeep show`: statistics next to numpy's and torch's, slices, values, every dtype, bounded memory."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep.cli import tensors
from shardkeep.cli.output import format_bar
from shardkeep.cli.show import parse_slice
from tests.cli.conftest import state_of
from tests.engine.samples import all_dtypes, random_tensor

NO_NUMBERS = ("bits", "float4", "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7")
NO_NUMBERS += ("int1", "int2", "int3", "int4", "int5", "int6", "int7")


def is_number(dtype):
    name = str(dtype).removeprefix("torch.")
    return not (name in NO_NUMBERS or name.startswith(("bits", "float4")))


def as_numpy(tensor):
    if tensor.dtype in {torch.bfloat16, torch.float16} or "float8" in str(tensor.dtype):
        return tensor.float().double().numpy()
    if tensor.is_complex():
        return np.abs(tensor.to(torch.complex128).numpy())
    return tensor.numpy()


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_statistics_are_numpys(shardkeep, tmp_path, monkeypatch, dtype):
    """Of every dtype, with NaNs and infinities, in many blocks: counts exact, mean and deviation to rounding."""
    tensor = random_tensor((7, 11), dtype)
    sk.save({"t": tensor}, tmp_path / "ck")
    monkeypatch.setattr(tensors, "BLOCK_ELEMENTS", 10)
    document = shardkeep("show", tmp_path / "ck", "t", "--json").json
    found = document["statistics"]
    assert shardkeep("show", tmp_path / "ck", "t").code == 0
    if not is_number(dtype):
        assert found is None
        return
    array = as_numpy(tensor)
    finite = array[np.isfinite(array)]
    assert found["count"] == 77
    assert found["nan"] == np.isnan(array).sum()
    assert found["inf"] == np.isinf(array).sum()
    assert found["zeros"] == (array == 0).sum()
    for bound, expected in (("min", finite.min()), ("max", finite.max())):
        assert found[bound] == (pytest.approx(float(expected)) if dtype.is_complex else expected)
    with np.errstate(over="ignore"):
        mean, std = finite.astype(np.float64).mean(), finite.astype(np.float64).std()
    if np.isfinite(std) and np.isfinite(mean):
        scale = max(abs(float(finite.min())), abs(float(finite.max())))
        assert math.isclose(found["mean"], mean, rel_tol=1e-9, abs_tol=1e-12 * scale)
        assert math.isclose(found["std"], std, rel_tol=1e-9)
    if document["histogram"]:
        assert sum(document["histogram"]["counts"]) == len(finite)


def test_histogram_is_numpys(shardkeep, checkpoint):
    values = state_of(30)["optim"]["exp_avg"].double().numpy()
    found = shardkeep("show", checkpoint, "optim.exp_avg", "--json").json["histogram"]
    expected, _ = np.histogram(values, bins=12, range=(found["low"], found["high"]))
    assert found["counts"] == expected.tolist()


def test_few_whole_numbers_have_a_bar_each(shardkeep, checkpoint):
    mask = state_of(30)["optim"]["mask"]
    found = shardkeep("show", checkpoint, "optim.mask", "--json").json["histogram"]
    assert found["counts"] == [int((~mask).sum()), int(mask.sum())]


@pytest.mark.parametrize("index", ["3:7, ::2", "-1", "...", "[0, 5:9]", "..., -3:", "2:2", ":, 4", "62:, 30:"])
def test_slices_are_torchs(shardkeep, checkpoint, index):
    values = state_of(30)["optim"]["exp_avg"]
    inner = index.strip("[]")
    expected = eval(f"values[{inner}]", {"values": values})
    document = shardkeep("show", checkpoint, "optim.exp_avg", "--slice", index, "--json").json
    assert document["values"] == expected.tolist()
    assert shardkeep("show", checkpoint, "optim.exp_avg", f"--slice={index}").code == 0


@pytest.mark.parametrize("index", ["1:2:3:4", "a", "1,", "1,,2", "100", "::-1", "0,0,0", "1.5", "__import__('os')"])
def test_bad_slices_are_refused(shardkeep, checkpoint, index):
    """What is no index, or out of range, is an error that says so; nothing is evaluated."""
    answer = shardkeep("show", checkpoint, "optim.exp_avg", f"--slice={index}")
    assert (answer.code, answer.out) == (2, "")
    assert "hint" in answer.err


@given(st.lists(st.one_of(st.integers(-9, 9), st.slices(9)), max_size=4))
def test_written_slices_are_read_back(parts):
    text = ", ".join(
        f"{part.start or ''}:{part.stop if part.stop is not None else ''}:{part.step or ''}"
        if isinstance(part, slice)
        else str(part)
        for part in parts
    )
    expected = [
        slice(part.start or None, part.stop, part.step or None) if isinstance(part, slice) else part for part in parts
    ]
    assert list(parse_slice(text)) == expected


def test_values_are_printed_as_they_are(shardkeep, checkpoint):
    """Plain values come out as Python writes them, text as it is, and as JSON where JSON has them."""
    assert shardkeep("show", checkpoint, "step").out == "30\n"
    assert shardkeep("show", checkpoint, "name").out == "tiny\n"
    assert shardkeep("show", checkpoint, "betas").out == "(0.9, 0.95)\n"
    document = shardkeep("show", checkpoint, "betas", "--json").json
    assert (document["type"], document["value"]) == ("tuple", [0.9, 0.95])
    assert shardkeep("show", checkpoint, "step", "--slice", "0").code == 2


def test_people_see_where_and_what(shardkeep, checkpoint):
    """The text names dtype, shape, chunk, file, first values and alarms for NaN."""
    answer = shardkeep("show", checkpoint, "model.head.weight")
    assert "float32 [64, 32], 8.19 kB, shared with model.embed.weight" in answer.out
    assert "[0:64,0:32]" in answer.out
    assert "NaN 0" in answer.out
    assert "█" in answer.out


def test_a_key_that_is_not_there(shardkeep, checkpoint):
    assert "did you mean model.embed.weight" in shardkeep("show", checkpoint, "model.embd.weight").err
    assert "did you mean model.layers, model.head" in shardkeep("show", checkpoint, "model.layer").err


def test_a_prefix_shows_all_below_it(shardkeep, checkpoint):
    """One line for each key below a prefix, with the statistics that the key alone has; values too."""
    answer = shardkeep("show", checkpoint, "model.layers", "--json")
    keys = [f"model.layers.{each}" for each in ("0.weight", "10.bias", "10.weight")]
    assert [item["key"] for item in answer.json["items"]] == keys
    for item in answer.json["items"]:
        assert item["statistics"] == shardkeep("show", checkpoint, item["key"], "--json").json["statistics"]
    text = shardkeep("show", checkpoint, "model.layers").out.splitlines()
    assert [line.split()[0] for line in text] == ["model.layers", "key", "0.weight", "10.bias", "10.weight"]
    assert text[3].split()[1:] == ["float32", "[32]", "0", "0", "0", "0"]
    assert "is a prefix of 3 keys" in shardkeep("show", checkpoint, "model.layers", "--slice", "0").err


def test_a_prefix_shows_alarms(shardkeep, tmp_path):
    sk.save({"m": {"a": torch.tensor([1.0, math.nan, math.inf]), "lr": 0.5}}, tmp_path / "ck")
    lines = shardkeep("show", tmp_path / "ck", "m").out.splitlines()
    assert lines[1].split() == ["key", "dtype", "shape", "min", "max", "mean", "std", "NaN", "Inf"]
    assert lines[2].split() == ["a", "float32", "[3]", "1", "1", "1", "0", "1", "1"]
    assert lines[3].split() == ["lr", "value", "0.5"]


@pytest.mark.parametrize("tensor", [torch.empty(0, 3), torch.tensor(2.5), torch.full((3,), math.nan)], ids=repr)
def test_odd_tensors(shardkeep, tmp_path, tensor):
    sk.save({"t": tensor}, tmp_path / "ck")
    document = shardkeep("show", tmp_path / "ck", "t", "--json").json
    assert document["statistics"]["count"] == tensor.numel()
    assert document["histogram"] is None
    assert shardkeep("show", tmp_path / "ck", "t").code == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_of_torchs_checkpoints(shardkeep, tmp_path):
    dcp.save({"w": torch.arange(6.0), "step": 3}, checkpoint_id=tmp_path / "dcp")
    found = shardkeep("show", tmp_path / "dcp", "w", "--json").json["statistics"]
    assert (found["min"], found["max"], found["mean"]) == (0, 5, 2.5)
    assert shardkeep("show", tmp_path / "dcp", "step").out == "3\n"


def test_memory_is_bounded(tmp_path):
    """Statistics of a tensor hold a few blocks of it, not all of it as float64."""
    sk.save({"t": torch.ones(24 << 20, dtype=torch.int8)}, tmp_path / "ck")
    script = (
        "import resource, sys, torch\n"
        "from shardkeep.cli.main import main\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "torch.ones(1000).double().mean(); before = peak()\n"
        f"code = main(['show', {str(tmp_path / 'ck')!r}, 't', '--json'])\n"
        "sys.exit(code or (f'{peak() - before} kB' if peak() - before > 130_000 else 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_bars_show_what_is_not_nothing(shardkeep, tmp_path):
    """A bar is as long as its share, in eighths; a single number in a histogram is visible."""
    assert [format_bar(share, 4) for share in (0, 1e-9, 0.3, 0.5, 1)] == ["", "", "█▎", "██", "████"]
    sk.save({"t": torch.cat([torch.zeros(10_000), torch.ones(1)])}, tmp_path / "ck")
    assert "┤▏" in shardkeep("show", tmp_path / "ck", "t").out
