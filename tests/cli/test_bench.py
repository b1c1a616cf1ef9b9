"""`shardkeep bench`: real measurements of a small checkpoint, and that nothing is left of them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from shardkeep.cli import bench
from shardkeep.cli.bench import measure, raw_disk, saved_state


def test_all_contenders_are_measured(shardkeep, tmp_path):
    """The disk, shardkeep and torch are each written and read, and the directory is empty afterwards."""
    answer = shardkeep("bench", tmp_path, "--gb", "0.02", "--rounds", "1", "--json")
    assert answer.code == 0
    results = answer.json["results"]
    assert [each["name"] for each in results] == ["raw", "shardkeep", "torch.distributed.checkpoint"]
    assert all(each["write_gb_per_s"] > 0 and each["read_gb_per_s"] > 0 for each in results)
    assert all(len(each["read_s"]) == 1 for each in results)
    assert not list(tmp_path.iterdir())


def test_the_table_says_how_much_of_the_disk_was_used(monkeypatch, capsys, tmp_path):
    """Speeds, shares of the disk's own and the ratio to torch are those of the seconds that were measured."""
    made = {"raw": (1.0, 0.5), "shardkeep": (2.0, 1.0), "torch.distributed.checkpoint": (8.0, 4.0)}

    def measured(name, where, nbytes, rounds):
        write, read = made[name]
        return bench.Result(name, nbytes, [write] * rounds, [read] * rounds)

    monkeypatch.setattr(bench, "_measure", measured)
    from shardkeep.cli.main import main

    assert main(["bench", str(tmp_path), "--gb", "2"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["shardkeep", "1.00", "50%", "2.00", "50%"] in rows
    assert ["torch", "DCP", "0.25", "12%", "0.50", "12%"] in rows
    assert "saves 4.0x and loads 4.0x" in out


def test_a_contender_that_reads_something_else_is_not_measured(tmp_path):
    """What was read is compared with what was written, so that no speed is printed for wrong bytes."""

    good = saved_state("shardkeep", 1 << 20)

    def read_wrong(path):
        good.read(path)
        good.tensors[0][3] = good.tensors[0][3] == 0

    assert len(measure(raw_disk(1 << 24), str(tmp_path), 2)[0]) == 2
    with pytest.raises(SystemExit, match="not the one that was written"):
        measure(good._replace(read=read_wrong), str(tmp_path), 1)


def test_too_large_a_checkpoint_is_refused(shardkeep, tmp_path):
    """More than the disk has, nothing, no directory, and memory of one process end with 2 before anything is written."""
    for words in ([tmp_path, "--gb", "1e9"], [tmp_path, "--gb", "0"], [tmp_path / "nothing"], ["memory://here"]):
        answer = shardkeep("bench", *words)
        assert answer.code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_measurement_leaves_nothing(tmp_path, number):
    """Ctrl-C and SIGTERM end the command and its contender, and the files go."""
    words = [sys.executable, "-m", "shardkeep.cli.main", "bench", str(tmp_path), "--gb", "0.5", "--rounds", "1000"]
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not list(tmp_path.glob("shardkeep-bench-*/round-*/*")):
            assert job.poll() is None
            time.sleep(0.02)
        os.kill(job.pid, number)
        assert job.wait(timeout=30) in {130, 128 + signal.SIGTERM}
    finally:
        job.kill()
        job.wait()
    assert not list(tmp_path.iterdir())
