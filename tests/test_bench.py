"""The benchmarks still run: a tiny round of each part, whose report and samples hold every contender and target."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, BENCH / script, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("part", "targets"),
    [
        ("large", ["large warm: ours / raw", "large save: shardkeep.dcp / torch DCP"]),
        ("small", ["small cold: ours / torch DCP"]),
        ("reshard", ["resharded load: shardkeep.dcp / torch DCP", "one row: part of the tensor read"]),
    ],
)
def test_a_tiny_round(part, targets, tmp_path):
    """
    Every contender saves and loads the state, bit for bit, and the ratios are printed.
    """
    samples = tmp_path / "samples.json"
    sizes = ["--gb", 0.02, "--tensors", 30, "--rounds", 1]

    printed = run("run.py", "--only", part, *sizes, "--json", samples, "--dir", tmp_path)

    assert all(target in printed for target in targets)
    assert ("raw O_DIRECT x2" in printed) == (part != "reshard")
    assert json.loads(samples.read_text())


def test_planning_is_measured_with_what_the_engine_runs():
    """
    The simulated ranks' drafts are what `save` sends: they plan, and every shard is found again.
    """
    sys.path.insert(0, str(BENCH))
    try:
        import planning
    finally:
        sys.path.remove(str(BENCH))
    for replicas in (1, 2, 8):
        measured = planning.measure_plan(8, 3, replicas)
        assert measured["shards"] == 24
        assert measured["chunks"] == 24 // replicas
    assert planning.measure_index(shards=1000, tensors=10)["boxes_found"] == 100
