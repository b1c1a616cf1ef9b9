"""The short form of the long run, and proof that its checker finds what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from tests.soak.checker import Checker, Damage
from tests.soak.contents import TENSORS, bits
from tests.soak.driver import Soak
from tests.soak.job import Plan, run_job
from tests.soak.ledger import Ledger
from tests.soak.places import Folder
from tests.soak.rounds import KINDS, SHORT_CALM_EVERY, round_of

SEED = 2
"""Of which the first rounds have every kind of trouble."""
ROUNDS = 4 * SHORT_CALM_EVERY
KILLS = 8


@pytest.mark.timeout(400)
def test_a_short_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After many kills of ranks, writers and machines, and disk errors, all that was acknowledged is there, and exact."""
    with Soak(tmp_path, SEED, short=True) as soak:
        for number in range(ROUNDS + 1):
            soak.round(number)
        soak.check_all()
        with capsys.disabled():
            print(f"\n{soak.summary()}")
        assert sum(soak.kills.values()) >= KILLS
        assert soak.kills["writer"]
        assert soak.ledger.faults
        assert len(soak.ledger.acked) > 30


def test_rounds_are_decided_by_the_seed() -> None:
    """A round can be done again; and every kind of trouble comes up."""
    rounds = [round_of(SEED, number, short=True) for number in range(ROUNDS + 1)]
    assert rounds == [round_of(SEED, number, short=True) for number in range(ROUNDS + 1)]
    assert rounds != [round_of(SEED + 1, number, short=True) for number in range(ROUNDS + 1)]
    assert {each.chaos for each in rounds} == {*KINDS, "calm"}


# -- the checker


def newest(root: Path) -> Path:
    return max(root.glob("step-*"), key=lambda place: int(place.name.removeprefix("step-")))


def one(root: Path, pattern: str) -> Path:
    return next(newest(root).glob(pattern))


def flip_data(root: Path) -> None:
    file = one(root, "model*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def garble_the_index(root: Path) -> None:
    file = one(root, "*.skindex")
    file.write_bytes(file.read_bytes()[::-1])


def save_something_else(root: Path) -> None:
    """A perfect checkpoint, of another step's numbers."""
    place = newest(root)
    record = json.loads((place / "shardkeep.json").read_bytes())
    state = sk.open(place).to_dict()
    state["model"]["b"] = torch.from_numpy(bits("model.b", 1, 1).copy()).view(torch.float64).reshape(-1)
    sk.save(state, place, step=record["step"], meta=record["meta"], overwrite=True)


def leave_too_many(root: Path) -> None:
    for number in range(90001, 90010):
        (root / f"step-{number}").mkdir()
        (root / f"step-{number}" / "something").touch()


def keep_what_is_not_wanted(root: Path) -> None:
    """An old checkpoint that should have been deleted."""
    step, state = 1, sk.open(newest(root)).to_dict()
    for key in TENSORS:
        first, second = key.split(".")
        tensor = state[first][second]
        state[first][second] = torch.from_numpy(bits(key, 9, step).copy()).view(tensor.dtype).reshape(tensor.shape)
    state.update(job=9, step=step)
    sk.save(state, root / f"step-{step}", step=step, meta={"job": 9}, overwrite=True)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job leaves that nothing has happened to: its root, and what it wrote down."""
    folder = tmp_path_factory.mktemp("healthy")
    (folder / "logs").mkdir()
    plan = Plan(job=1, seed="", root=str(folder / "root"), logs=str(folder / "logs"), steps=8)
    assert run_job(plan) == "done"
    return folder


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (flip_data, "a block's digest is wrong"),
        (lambda root: shutil.rmtree(newest(root)), "acknowledged"),
        (lambda root: one(root, "shardkeep.json").unlink(), "acknowledged"),
        (lambda root: one(root, "optim*.safetensors").unlink(), "is missing"),
        (garble_the_index, "the index's digest is wrong"),
        (save_something_else, "is not what job"),
        (lambda root: (newest(root) / f"model-00000-of-00001-{'a' * 20}.safetensors").touch(), "files of step"),
        (lambda root: (root / "step-77777").mkdir(), "places: too many"),
        (lambda root: (root / "lease.json").touch(), "files of the root"),
        (leave_too_many, "places are there"),
        (keep_what_is_not_wanted, "checkpoints: too many"),
    ],
)
def test_the_checker_finds(tmp_path: Path, healthy: Path, do: Callable[[Path], None], said: str) -> None:
    """Whatever is broken, lost or left over is found; before that, all is well."""
    root = shutil.copytree(healthy / "root", tmp_path / "root")
    checker = Checker(Folder(root), Ledger(healthy / "logs"), TENSORS)
    assert checker.check(tidy=True)[0].step == 8
    do(root)
    with pytest.raises(Damage, match=said):
        checker.check(tidy=True)
