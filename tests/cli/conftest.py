"""Checkpoints to look at, made once; tests that change them take a copy."""

import json
import shutil

import pytest
import torch

import shardkeep as sk
from shardkeep.cli.main import main


def state_of(step):
    gen = torch.Generator().manual_seed(step)
    embedding = torch.randn(64, 32, generator=gen)
    return {
        "model": {
            "embed.weight": embedding,
            "head.weight": embedding,
            "layers.0.weight": torch.randn(32, 32, generator=gen).bfloat16(),
            "layers.10.weight": torch.randn(32, 32, generator=gen),
            "layers.10.bias": torch.zeros(32),
        },
        "optim": {"exp_avg": torch.randn(64, 32, generator=gen), "mask": torch.randn(100, generator=gen) > 0},
        "step": step,
        "name": "tiny",
        "betas": (0.9, 0.95),
    }


@pytest.fixture(scope="session")
def _made(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli") / "run"
    for step in (10, 20, 30):
        meta = {"metrics": {"loss": 3.0 - step / 20}}
        sk.save(state_of(step), root / f"step-{step}", step=step, meta=meta)
    return root


@pytest.fixture
def run_dir(_made, tmp_path):
    """A run of three checkpoints, steps 10, 20 and 30, to do with as one likes."""
    shutil.copytree(_made, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def checkpoint(run_dir):
    return run_dir / "step-30"


class Answer:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        """The one document on stdout."""
        return json.loads(self.out)


@pytest.fixture
def shardkeep(capsys):
    def call(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call


def flip(file, offset):
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(bytes(data))


def data_file(checkpoint, group="model"):
    [file] = checkpoint.glob(f"{group}-*.safetensors")
    return file
