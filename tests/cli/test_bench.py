"""`shardkeep bench`: real measurements of a small checkpoint, and that nothing is left of them."""

import os
import signal
import subprocess
import sys
import time

from shardkeep.cli import bench


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

    monkeypatch.setattr(bench, "measure", measured)
    from shardkeep.cli.main import main

    assert main(["bench", str(tmp_path), "--gb", "2"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["shardkeep", "1.00", "50%", "2.00", "50%"] in rows
    assert ["torch", "DCP", "0.25", "12%", "0.50", "12%"] in rows
    assert "saves 4.0x and loads 4.0x" in out


def test_too_large_a_checkpoint_is_refused(shardkeep, tmp_path):
    """More than the disk has, nothing, and no directory end with 2 before anything is written."""
    for words in ([tmp_path, "--gb", "1e9"], [tmp_path, "--gb", "0"], [tmp_path / "nothing"]):
        answer = shardkeep("bench", *words)
        assert answer.code == 2
    assert not list(tmp_path.iterdir())


def test_an_interrupted_measurement_leaves_nothing(tmp_path):
    words = [sys.executable, "-m", "shardkeep.cli.main", "bench", str(tmp_path), "--gb", "0.5", "--rounds", "1000"]
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not list(tmp_path.glob("shardkeep-bench-*/round/*")):
            assert job.poll() is None
            time.sleep(0.02)
        os.kill(job.pid, signal.SIGINT)
        assert job.wait(timeout=30) == 130
    finally:
        job.kill()
        job.wait()
    assert not list(tmp_path.iterdir())
