"""`--jobs`: several processes share the work of a command, and end together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep.cli.jobs import jobs_for
from tests.exchange.samples import files_in, in_any_order

WAIT_S = 150.0


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint that takes long enough to export that a test can interfere."""
    where = tmp_path_factory.mktemp("jobs") / "from"
    sk.save({"model": {f"w{at}": torch.full((1 << 20,), float(at)) for at in range(40)}, "step": 1}, where)
    return where


def start(*words, **more):
    command = [sys.executable, "-m", "shardkeep", *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **more
    )


def run(*words, **more):
    process = start(*words, **more)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")
    return out


def children_of(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stopped_in_the_middle(large, to, temporary):
    """An export on three processes, all of which are stopped while they write; return it with its children."""
    env = os.environ | {"TMPDIR": str(temporary)}
    process = start("export", large, to, "--shard-size", "20MB", "--jobs", "3", env=env)
    deadline = time.monotonic() + WAIT_S
    while not list(to.glob("*.new-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGSTOP)
    children = children_of(process)
    assert len(children) == 2
    return process, children


@pytest.mark.parametrize(
    "words",
    [("export", "--dtype", "bf16", "--shard-size", "10MB"), ("convert", "--to", "safetensors", "--shard-size", "30MB")],
)
def test_files_do_not_depend_on_the_processes(shardkeep, large, tmp_path, words):
    """Two processes write, bit for bit, what one writes, and the command says the same."""
    command, *more = words
    alone = shardkeep(command, large, tmp_path / "alone", *more, "--json", "--jobs", "1").json
    out = run(command, large, tmp_path / "shared", *more, "--jobs", "2")
    assert f"{alone['tensors']} tensors" in out
    assert files_in(tmp_path / "shared") == files_in(tmp_path / "alone")


@pytest.mark.parametrize("layout", ["native", "dcp"])
def test_layouts_of_ranks_hold_the_same(large, tmp_path, layout):
    run("convert", large, tmp_path / "to", "--to", layout, "--jobs", "3")
    assert in_any_order(sk.open(tmp_path / "to").to_dict()) == in_any_order(sk.open(large).to_dict())
    assert sk.open(tmp_path / "to").verify().files >= 1


def test_a_bucket_is_written_by_several_processes(large, s3_root):
    """Where processes cannot be forks, because of the object store's client, they are new ones."""
    run("export", large, f"{s3_root}/to", "--shard-size", "50MB", "--jobs", "2")
    found = sk.open(f"{s3_root}/to")
    assert len(found.record.files) == 4
    assert torch.equal(found["w7"].tensor(), torch.full((1 << 20,), 7.0))


def test_an_error_of_any_process_is_that_of_the_command(large, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name, data in files_in(large).items():
        (damaged / name).write_bytes(data)
    for file in damaged.glob("model-*"):
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    process = start("export", damaged, tmp_path / "to", "--shard-size", "20MB", "--jobs", "4", "--json")
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert '"ChecksumMismatch"' in out
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("whom", ["all", "one", "another"])
def test_what_ends_one_ends_all_and_leaves_nothing(large, tmp_path, whom):
    """
    Ctrl-C in a terminal reaches all processes, `kill -INT` only the first, and another may be killed, which the error
    says: all end at once, and what they wrote is removed.
    """
    (tmp_path / "tmp").mkdir()
    process, children = stopped_in_the_middle(large, tmp_path / "to", tmp_path / "tmp")
    if whom == "another":
        os.kill(children[1], signal.SIGKILL)
    else:
        (os.killpg if whom == "all" else os.kill)(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGCONT)
    out, err = process.communicate(timeout=WAIT_S)
    if whom == "another":
        assert (process.returncode, f"process 3 of 3 (pid {children[1]}) was killed by SIGKILL" in err) == (2, True)
    else:
        assert (process.returncode, out, err) == (130, "", "")
    assert not (tmp_path / "to").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not any(map(is_running, children))


def test_processes_end_with_the_command(large, tmp_path):
    (tmp_path / "tmp").mkdir()
    process, children = stopped_in_the_middle(large, tmp_path / "to", tmp_path / "tmp")
    process.kill()
    os.killpg(process.pid, signal.SIGCONT)
    process.communicate(timeout=WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while any(map(is_running, children)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list((tmp_path / "to").glob("*.safetensors")) == []
    sk.export(large, tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["model.safetensors"]


def test_the_number_of_processes(shardkeep, large, tmp_path):
    """A small checkpoint has one process, whatever the machine; fewer than one is refused."""
    assert jobs_for(None, str(large)) == 1
    assert jobs_for(3, str(large)) == 3
    refused = shardkeep("export", large, tmp_path / "to", "--jobs", "0")
    assert (refused.code, "--jobs 0" in refused.err) == (2, True)
