"""
Frameworks that know nothing of shardkeep, on `shardkeep.dcp.install()`: the programs of `examples/frameworks`.

Each program trains on CPU ranks under its framework and prints a line of what it saw: whose checkpoint code it was, each
loss, and digests of parameters and optimizer state. The frameworks are heavy and no dependency of this suite: what is
not installed is skipped. To run all:

    pip install accelerate==1.15.0 lightning==2.6.6 torchtitan==0.3.0
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

PROGRAMS = Path(__file__).parent.parent.parent / "examples" / "frameworks"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": None,
    "SHARDKEEP_DCP_INSTALL": None,
}
FRAMEWORKS = ["accelerate", "lightning", "torchtitan"]
OURS = ["-m", "shardkeep.dcp"]
AT_SAVE, AT_END = "state after step 2", "state after step 4"


def python(*words, check=True):
    environment = {key: value for key, value in {**os.environ, **ENVIRONMENT}.items() if value is not None}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if check:
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def run(framework, folder, *options, ours, ranks=2, check=True):
    """Run a framework's program on ranks, and return what it saw; or how it ended, if it may fail."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *(OURS if ours else [])]
    done = python(*launch, PROGRAMS / f"{framework}_fsdp2.py", folder, *options, check=check)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))) if check else done


@dataclass
class Trained:
    """The same program run once on torch's checkpoint code and once on ours."""

    framework: str
    folders: dict[str, Path]
    saw: dict[str, dict]

    def copy(self, side, tmp_path):
        return shutil.copytree(self.folders[side], tmp_path / side)

    @property
    def uninterrupted(self):
        return self.saw["torch"]


@pytest.fixture(scope="module", params=FRAMEWORKS)
def trained(request, tmp_path_factory):
    """Train 4 steps with each framework, on both sides, saving after step 2."""
    needed(request.param)
    folders = {side: tmp_path_factory.mktemp(request.param) / side for side in ("torch", "ours")}
    saw = {side: run(request.param, folder, ours=side == "ours") for side, folder in folders.items()}
    return Trained(request.param, folders, saw)


def needed(framework):
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


def after(step, losses):
    return {at: loss for at, loss in losses.items() if int(at) > step}


def test_framework_runs_on_ours_and_trains_the_same(trained):
    """Under install() our code writes, with its checksums, and training gives the bits that it gives on torch's."""
    torchs, ours = trained.saw["torch"], trained.saw["ours"]
    assert (torchs["dcp"], torchs["checksum files"]) == ("torch.distributed.checkpoint", 0)
    assert ("shardkeep.dcp", ours["data files"]) == (ours["dcp"], ours["checksum files"])
    assert ours["writer"].startswith("shardkeep.")
    assert 0 < torchs["data files"] == ours["data files"]
    assert list(ours["losses"]) == ["1", "2", "3", "4"]
    differing = {key for key in torchs if torchs[key] != ours[key]}
    assert {"dcp", "writer", "checksum files"} == differing - {"seconds blocked by each save"}
    assert [len(each["seconds blocked by each save"]) for each in (torchs, ours)] == [1, 1]
    assert ours.get("exported", True), "what torchtitan exported as safetensors is not what it had"


@pytest.mark.parametrize(
    ("saved", "resumed", "ranks"), [("torch", "ours", 1), ("ours", "torch", 2), ("ours", "ours", 4)], ids=str
)
def test_resumes_bit_for_bit(trained, tmp_path, saved, resumed, ranks):
    """What either side saved is resumed by the other, on more or fewer ranks, as in an unbroken run."""
    seen = run(trained.framework, trained.copy(saved, tmp_path), "--resume", ours=resumed == "ours", ranks=ranks)
    assert (resumed == "ours") == (seen["dcp"] == "shardkeep.dcp")
    assert ranks == seen["ranks"]
    assert trained.uninterrupted[AT_SAVE] == seen[AT_SAVE]
    assert after(2, trained.uninterrupted["losses"]) == seen["losses"]
    assert trained.uninterrupted[AT_END] == seen[AT_END]
    assert seen.get("exported", True), "what torchtitan exported as safetensors is not what it had"


def test_damage_is_found_by_our_reader(trained, tmp_path):
    """A flipped bit in a data file stops the framework's load, which names the file: so it is our reader that reads."""
    folder = trained.copy("ours", tmp_path)
    victim = max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = run(trained.framework, folder, "--resume", ours=True, ranks=1, check=False)
    assert done.returncode != 0
    assert victim.name in done.stderr
    assert "checksum" in done.stderr.lower()


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_torchtitan_saves_in_the_background(mode, tmp_path):
    """Torchtitan's asynchronous modes, by thread and by process, save what torch's own code resumes from."""
    needed("torchtitan")
    saw = run("torchtitan", tmp_path, "--mode", mode, ours=True)
    seen = run("torchtitan", tmp_path, "--resume", ours=False)
    assert (saw["data files"], saw["checksum files"]) == (2, 2)
    assert (saw[AT_SAVE], saw[AT_END]) == (seen[AT_SAVE], seen[AT_END])
    assert after(2, saw["losses"]) == seen["losses"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gain_is_printed(framework, tmp_path):
    """The comparison runs both sides, and prints what the first save took on each and what those after it took."""
    needed(framework)
    done = python(PROGRAMS / "gain.py", framework, "--megabytes", 20, "--saves", 2, "--rounds", 1, "--folder", tmp_path)
    rows = {row[0]: row[1:] for row in map(str.split, done.stdout.splitlines()) if row}
    assert {framework, "torch", "shardkeep"} <= rows.keys()
    for side in ("torch", "shardkeep"):
        assert [0 < float(rows[side][column]) < 60 for column in (0, 2)] == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_gain_needs_a_framework():
    if any(map(find_spec, FRAMEWORKS)):
        pytest.skip("there is one")
    done = python(PROGRAMS / "gain.py", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install" in done.stderr


MERGES = {
    "accelerate": (
        ["accelerate.commands.accelerate_cli", "merge-weights", "{folder}/pytorch_model_fsdp_0", "{out}"],
        "{out}/model.safetensors",
    ),
    "lightning": (["lightning.fabric.utilities.consolidate_checkpoint", "{folder}", "--output_file={out}"], "{out}"),
}
"""The commands by which frameworks make one file of a checkpoint, and that file."""


def test_frameworks_tool_merges_the_same(trained, tmp_path):
    """The framework's command that merges a checkpoint gives the same tensors: torch's of ours, ours of torch's."""
    if trained.framework not in MERGES:
        pytest.skip(f"{trained.framework} has no such command")
    words, made = MERGES[trained.framework]
    merged = []
    for saved, launch in {"ours": ["-m"], "torch": [*OURS, "-m"]}.items():
        names = {"folder": trained.folders[saved], "out": tmp_path / saved}
        python(*launch, *(word.format(**names) for word in words))
        merged.append(tensors_of(Path(made.format(**names))))
    assert merged[0].keys() == merged[1].keys()
    assert len(merged[0]) >= 4
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])


def tensors_of(path):
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return dict(_walk("", torch.load(path, weights_only=False)))


def _walk(name, value):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(f"{name}.{key}", each)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _walk(f"{name}.{number}", each)
