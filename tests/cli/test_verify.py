"""`shardkeep verify` and `shardkeep latest`: what is damaged is found, named, and never taken for good."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardkeep as sk
from shardkeep.cli.verify import CountingStore
from shardkeep.storage.local import LocalStore
from tests.cli.conftest import data_file, flip


def test_a_good_run_is_sound(shardkeep, run_dir):
    """All checkpoints of a run, and single ones, pass both checks; the quick one never says "ok" or "sound"."""
    for words in ([run_dir], [run_dir / "step-10", run_dir / "step-20"]):
        answer = shardkeep("verify", *words, "--json")
        assert (answer.code, answer.json["sound"], answer.json["deep"]) == (0, True, True)
        assert {found["status"] for found in answer.json["checkpoints"]} == {"sound"}
    whole, quick = shardkeep("verify", run_dir).out, shardkeep("verify", run_dir, "--quick").out
    assert "3 of 3 checkpoints sound" in whole
    assert "3 of 3 checkpoints with the right sizes and headers" in quick
    assert "no data was read: without --quick, every byte is compared" in quick
    assert not {"ok", "sound"} & set(quick.split())
    answer = shardkeep("verify", run_dir, "--quick", "--json")
    assert (answer.code, answer.json["sound"], answer.json["checkpoints"][0]["status"]) == (0, False, "not read")
    shutil.copytree(run_dir / "step-20", run_dir / "final")
    lines = [line for line in shardkeep("verify", run_dir).out.splitlines() if line.startswith("ok")]
    assert (len(lines), len({line.index(" files, ") for line in lines})) == (4, 1), lines


def test_every_byte_is_read(shardkeep, checkpoint):
    counted = []
    stored = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    sk.open(CountingStore(LocalStore(checkpoint), counted.append)).verify()
    assert sum(counted) >= stored
    assert shardkeep("verify", checkpoint, "--json").json["checkpoints"][0]["bytes_read"] >= stored


@pytest.mark.parametrize("offset", [4096, 9000, -1])
def test_a_flipped_bit_is_found(shardkeep, checkpoint, offset):
    file = data_file(checkpoint)
    flip(file, offset)
    assert shardkeep("verify", checkpoint, "--quick").code == 0
    answer = shardkeep("verify", checkpoint)
    assert answer.code == 1
    assert file.name in answer.out
    assert "they hold 'model." in answer.out
    document = shardkeep("verify", checkpoint, "--json")
    assert (document.code, document.json["sound"], len(document.json["checkpoints"][0]["problems"])) == (1, False, 1)


def damage(checkpoint, how):
    """Damage that needs no reading of data to be seen."""
    file = data_file(checkpoint)
    if how == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "gone":
        file.unlink()
    elif how == "header":
        flip(file, 100)
    elif how == "index":
        flip(next(checkpoint.glob("*.skindex")), 500)
    elif how == "record":
        flip(checkpoint / "shardkeep.json", 30)


@pytest.mark.parametrize("how", ["cut", "gone", "header", "index", "record"])
def test_damage_that_shows_without_reading(shardkeep, run_dir, checkpoint, how):
    """Cut, lost and changed files are found with --quick, too; `latest` skips such a checkpoint and says why."""
    damage(checkpoint, how)
    for words in ([], ["--quick"]):
        assert shardkeep("verify", checkpoint, *words).code == 1
    answer = shardkeep("verify", run_dir, "--json")
    assert [found["status"] for found in answer.json["checkpoints"]] == ["damaged", "sound", "sound"]
    latest = shardkeep("latest", run_dir)
    assert (latest.code, latest.out) == (0, f"{run_dir}/step-20\n")
    assert "skipped step-30" in latest.err


def test_unfinished_saves_are_no_damage(shardkeep, run_dir):
    (run_dir / "step-40").mkdir()
    shutil.copy(data_file(run_dir / "step-30"), run_dir / "step-40")
    answer = shardkeep("verify", run_dir)
    assert answer.code == 0
    assert "unfinished: it has no commit record" in answer.out
    assert shardkeep("latest", run_dir).out == f"{run_dir}/step-30\n"
    for command in ("ls", "verify"):
        alone = shardkeep(command, run_dir / "step-40")
        assert (alone.code, "step-40: unfinished: it has no commit record" in alone.err) == (2, True)


def test_a_store_that_fails_proves_nothing(shardkeep, checkpoint, monkeypatch):
    """A file that the disk refuses is neither sound nor damaged: exit code 2."""
    real = os.open

    def refuse(path, *rest, **more):
        if str(path).endswith(".safetensors"):
            raise OSError(errno.EIO, "the disk is tired")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    answer = shardkeep("verify", checkpoint, "--json")
    assert answer.code == 2
    assert answer.json["checkpoints"][0]["status"] == "unknown"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoints_are_compared_with_their_crc(shardkeep, tmp_path):
    """Files without digests are compared with the CRC-32 in torch's archives, which find a flipped bit; --quick does not."""
    dcp.save({"w": torch.randn(2000), "step": 1}, checkpoint_id=tmp_path / "dcp")
    answer = shardkeep("verify", tmp_path / "dcp")
    assert answer.code == 0
    assert "1 file has no digests: compared with the CRC-32 that torch stores" in answer.out
    [file] = (tmp_path / "dcp").glob("*.distcp")
    flip(file, file.stat().st_size // 2)
    assert shardkeep("verify", tmp_path / "dcp", "--quick").code == 0
    answer = shardkeep("verify", tmp_path / "dcp")
    assert (answer.code, "another CRC-32 than their archive says; they hold 'w'" in answer.out) == (1, True)
    os.truncate(file, file.stat().st_size // 2)
    assert shardkeep("verify", tmp_path / "dcp", "--quick").code == 1


def test_files_without_checksums_are_read_and_not_called_ok(shardkeep, tmp_path):
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.randn(20_000)}, tmp_path / "hf" / "model.safetensors")
    read = []
    report = sk.open(CountingStore(LocalStore(tmp_path / "hf"), read.append)).verify()
    assert (report.without_digests, report.without_checksums) == (1, 1)
    assert sum(read) > report.bytes_read >= 80_000
    answer = shardkeep("verify", tmp_path / "hf")
    assert answer.code == 0
    assert "1 file has no checksums: every byte was read, but there was nothing to compare it with" in answer.out
    assert "ok" not in answer.out.split()
    assert shardkeep("verify", tmp_path / "hf", "--json").json["checkpoints"][0]["status"] == "read"
    with (tmp_path / "hf" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert shardkeep("verify", tmp_path / "hf").code == 1


@pytest.mark.parametrize("there", ["nothing", "empty", "only bad"])
def test_no_latest(shardkeep, run_dir, tmp_path, there):
    """Without a good checkpoint nothing is printed and the exit code is 1, also where the run has not begun."""
    if there == "empty":
        (tmp_path / "empty").mkdir()
    if there == "only bad":
        for step in (10, 20, 30):
            damage(run_dir / f"step-{step}", "gone")
    root = {"nothing": tmp_path / "no-run", "empty": tmp_path / "empty", "only bad": run_dir}[there]
    answer = shardkeep("latest", root)
    assert (answer.code, answer.out) == (1, "")
    assert "no checkpoint" in answer.err
    assert shardkeep("latest", root, "--json").json["latest"] is None


def test_latest_in_a_script(run_dir):
    """`$(shardkeep latest RUN)` is a path and nothing else, as the real executable prints it."""
    script = f'cat "$({sys.executable} -m shardkeep latest {run_dir})/shardkeep.json"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["step"] == 30


def test_what_is_no_checkpoint_is_not_verified(shardkeep, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "step-5").mkdir(parents=True)
    (tmp_path / "run" / "step-5" / f"model-00000-of-00001-{'a' * 20}.safetensors").touch()
    for words in (["empty"], ["run"], ["run", "--quick"]):
        answer = shardkeep("verify", tmp_path / words[0], *words[1:])
        assert (answer.code, "nothing was verified" in answer.err) == (2, True)
        answer = shardkeep("verify", tmp_path / words[0], "--json")
        assert (answer.code, answer.json["sound"]) == (2, False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    assert shardkeep("verify", tmp_path / "missing").code == 2
    assert shardkeep("verify", tmp_path / "other").code == 2
    assert shardkeep("verify", f"file://{tmp_path}/other").code == 2
    assert shardkeep("verify", "s3://bucket/run").code == 2
