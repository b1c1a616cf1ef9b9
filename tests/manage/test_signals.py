"""Signals under a real torchrun: what reaches one process, or all of them at different times, is one save of one step."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from tests.manage import torchrun_job as job
from tests.manage.scene import until


def lines(folder, rank):
    path = folder / f"rank-{rank}.log"
    return path.read_text().splitlines() if path.exists() else []


def said(folder, rank, word):
    """What a rank wrote down that begins with a word."""
    return [line for line in lines(folder, rank) if line.startswith(f"{word} ")]


@pytest.fixture
def torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.WORLD)]
    repository = Path(__file__).parents[2]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository), "GLOO_SOCKET_IFNAME": "lo"}
    with (
        open(tmp_path / "agent.log", "wb") as output,
        subprocess.Popen(
            [*command, job.__file__, str(tmp_path)], stdout=output, stderr=output, env=env, start_new_session=True
        ) as agent,
    ):
        try:
            yield agent
        finally:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)


def exact(place, step):
    found, wanted = sk.open(place), job.values_at(step)
    found.verify()
    state = found.to_dict()
    whole = torch.equal(state["w"], wanted) and torch.equal(state["r"], wanted)
    return whole and found.step == state["step"] == step


@pytest.mark.timeout(150)
def test_signals_under_torchrun(tmp_path, torchrun):
    """SIGUSR1 to one rank saves one step on all, which go on; SIGTERM to the agent saves one more, and ends the job."""
    ranks = range(job.WORLD)

    def going():
        if torchrun.poll() is not None:
            raise ChildProcessError((tmp_path / "agent.log").read_text())
        return all(said(tmp_path, rank, "step") for rank in ranks)

    until(going, 100)
    [_, pid] = said(tmp_path, 1, "pid")[0].split()
    os.kill(int(pid), signal.SIGUSR1)
    until(lambda: all(said(tmp_path, rank, "look") for rank in ranks), 60)
    until(lambda: len(said(tmp_path, 0, "step")) > 20 + int(said(tmp_path, 0, "look")[0].split()[1]), 60)

    done = max(len(said(tmp_path, rank, "step")) for rank in ranks)
    torchrun.send_signal(signal.SIGTERM)
    torchrun.wait(60)
    for name in ("look", "stop"):
        everywhere = [said(tmp_path, rank, name) for rank in ranks]
        assert all(each == everywhere[0] for each in everywhere), everywhere
        [[_, step, durable]] = [line.split() for line in everywhere[0]]
        assert durable == "durable=True"
        root = tmp_path / name
        assert [entry.name for entry in sk.Catalog(root).entries()] == [f"step-{step}"]
        assert exact(root / f"step-{step}", int(step))
        assert not (root / "lease.json").exists()
        if name == "stop":
            assert int(step) >= done
            assert [lines(tmp_path, rank)[-1] for rank in ranks] == [f"end {step} look=True"] * job.WORLD
