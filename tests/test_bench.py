"""The benchmarks still run: a tiny round of each part, whose report and samples hold every contender and target."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.warm.python import WarmPopen, warm_python

BENCH = Path(__file__).parent.parent / "bench"


def run(script, *arguments):
    done = warm_python(BENCH / script, *arguments, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Popen(subprocess.Popen):
    """Closes its pipe when it has ended, which in a script may be left to the end of the script."""

    def wait(self, timeout=None):
        code = super().wait(timeout)
        self.stdout.close()
        return code


def popen(command, **how):
    """Start a worker: the first kind as it is, the others without the time that torch takes to be imported."""
    return (Popen if command[2] == "raw" else WarmPopen)(command, **how)


SIZES = ["--gb", 0.02, "--tensors", 30, "--rounds", 1]


@pytest.mark.timeout(400)
def test_a_tiny_round(tmp_path, monkeypatch, capsys):
    """Every contender saves and loads the state bit for bit in a process of its own, and the ratios are printed."""
    monkeypatch.syspath_prepend(BENCH)
    import run as bench

    samples = tmp_path / "samples.json"
    words = ["run.py", "--only", "large", *SIZES, "--json", samples, "--dir", tmp_path]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))
    # As for those who are not root: without it, every process of the machine would have to read torch again.
    monkeypatch.setattr(bench.pagecache, "DROP", "/proc/nothing")
    monkeypatch.setattr(bench, "RESTART_S", 0)

    bench.main()

    printed = capsys.readouterr().out
    assert "large again: ours / raw" in printed
    assert "large save: shardkeep.dcp / torch DCP" in printed
    assert "raw O_DIRECT x2" in printed
    assert {each["contender"] for each in json.loads(samples.read_text())["samples"]} == set(bench.CONTENDERS)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.json"]


def test_a_tiny_round_of_loads_that_reshard(tmp_path):
    """Both sides load the state into another layout, bit for bit, and the ratios are printed."""
    samples = tmp_path / "samples.json"
    printed = run("run.py", "--only", "reshard", *SIZES, "--json", samples, "--dir", tmp_path)
    assert "resharded load: shardkeep.dcp / torch DCP" in printed
    assert "one row: part of the tensor read" in printed
    assert "raw O_DIRECT x2" not in printed
    assert json.loads(samples.read_text())


def test_planning_is_measured_with_what_the_engine_runs(monkeypatch):
    """The simulated ranks' drafts are what `save` sends: they plan, and every shard is found again."""
    monkeypatch.syspath_prepend(BENCH)
    import planning

    for replicas in (1, 2, 8):
        measured = planning.measure_plan(8, 3, replicas)
        assert measured["shards"] == 24
        assert measured["chunks"] == 24 // replicas
    assert planning.measure_index(shards=1000, tensors=10)["boxes_found"] == 100
    rank = planning.measure_rank(1000, 100)
    assert (rank["runs"], rank["reads"]) == (100, 2)


def test_a_long_run_is_measured_at_scale():
    """Steps of real and of simulated ranks, and what a root with some checkpoints costs."""
    printed = run("scale_runs.py", "--ranks", 20, "--steps", 30, "--step-ms", 10, "--checkpoints", 3)
    assert "| longest_ms |" in printed
    assert "| prune half |" in printed
    assert [line.split("|")[1].strip() for line in printed.splitlines() if line[2:3].isdecimal()] == ["20", "3"]


def test_asynchronous_saves_are_measured_part_by_part(tmp_path, monkeypatch):
    """Every part of the accelerator's benchmark runs, here on CPU tensors, and no checkpoint differs from its call."""
    monkeypatch.setenv("OUT", str(tmp_path))
    sizes = ["--gb", 0.0005, "--small-gb", 0.0005, "--exact-gb", 0.0005, "--tokens", 16]
    counts = ["--saves", 2, "--steps", 1, "--rounds", 1, "--soak", 4, "--exact", 6]
    printed = run("async_gpu.py", "--cpu", *sizes, *counts, "--dir", tmp_path, "--shm", tmp_path)
    results = json.loads((tmp_path / "async_gpu.json").read_text())
    assert {mode: one["wrong"] for mode, one in results["exact"].items()} == {"overlap": [], "device": [], "host": []}
    judged = {one["what"] for one in results["targets"]}
    assert {"shardkeep overlap: blocked, first save", "load into the device from /dev/shm, ours / torch"} <= judged
    assert all(line.count("|") == 7 for line in printed.splitlines() if line.startswith("|"))
    assert [path.name for path in tmp_path.iterdir()] == ["async_gpu.json"]


def test_without_an_accelerator_every_part_says_that_it_is_skipped(monkeypatch):
    """The accelerator's benchmark ends well where there is none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    printed = run("async_gpu.py", "--only", "calls", "--only", "exact")
    assert [line.split(",")[0] for line in printed.splitlines()] == ["calls: skipped", "exact: skipped"]


def test_a_busy_loop_is_measured_beside_asynchronous_saves(tmp_path):
    """Threads, a writer process and torch all save beside the loop, and its speed is judged."""
    samples = tmp_path / "samples.json"
    printed = run("async_cpu.py", "--gb", 0.02, "--rounds", 1, "--seconds", 0.05, "--dir", tmp_path, "--json", samples)
    assert "fails" not in printed
    assert "shardkeep, process: loop's speed" in printed
    assert json.loads(samples.read_text())["shardkeep, thread"]["rounds"][0]["speed"] > 0


def test_codecs_are_measured(tmp_path):
    """Every chain codes every kind of bytes, and gives them back; whole saves are timed for each number of threads."""
    samples = tmp_path / "samples.json"
    printed = run("codecs.py", "--mb", 1, "--rounds", 1, "--json", samples)
    assert "encryption: GB/s a core" in printed
    results = json.loads(samples.read_text())["results"]
    assert {"bf16 weights", "fp32 second moments", "int64 counters", "zeros"} <= results.keys()
    assert all({"float", "zstd", "lz4", "aes", "float, aes"} == contenders.keys() for contenders in results.values())
    samples.unlink()
    assert "2 threads: save" in run("codecs.py", "--mb", 1, "--rounds", 1, "--save", tmp_path)
    assert not [*tmp_path.iterdir()]


def test_plans_of_many_ranks_are_measured(monkeypatch):
    """Rank 0 plans and commits both saves; of the second, whose plan is kept, it is sent less."""
    monkeypatch.syspath_prepend(BENCH)
    import scale_plans

    for replicas in (1, 2):
        measured = scale_plans.measure(64, 200, replicas)
        assert 0 < measured["its MB"] < measured["through the store MB"]
    assert scale_plans.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_the_curve_over_ranks():
    """Simulated ranks make as many requests as real ones, and no key is left in the store."""
    out = run("scale.py", "--only", "meetings", "--ranks", 12, "--real", 12, "--calls", 2)
    real, simulated = (line.split() for line in out.splitlines() if line.split()[:1] == ["12"])
    assert (real[1], simulated[1]) == ("real", "simulated")
    assert real[-1] == simulated[-1] == "0"
