"""The short form of the long run, and proof that its checker finds what is wrong."""

import json
import shutil

import pytest
import torch

import shardkeep as sk
from tests.soak.checker import Checker, Damage
from tests.soak.contents import TENSORS, bits
from tests.soak.driver import Soak
from tests.soak.job import Plan, run_job
from tests.soak.ledger import Ledger
from tests.soak.places import Folder
from tests.soak.rounds import KINDS, S3_KINDS, SHORT_CALM_EVERY, bucket_round_of, round_of

SEED = 2
"""Of which the first rounds have every kind of trouble."""
ROUNDS = 4 * SHORT_CALM_EVERY
KILLS = 8


@pytest.mark.timeout(400)
def test_a_short_soak(tmp_path, capsys):
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


@pytest.mark.parametrize(
    ("decide", "short", "kinds", "count"), [(round_of, True, KINDS, ROUNDS + 1), (bucket_round_of, False, S3_KINDS, 40)]
)
def test_rounds_are_decided_by_the_seed(decide, short, kinds, count):
    """A round can be done again; and every kind of trouble comes up."""
    rounds, again, others = ([decide(seed, n, short=short) for n in range(count)] for seed in (SEED, SEED, SEED + 1))
    assert rounds == again != others
    assert {each.chaos for each in rounds} == {*kinds, "calm"}


def newest(root):
    return max(root.glob("step-*"), key=lambda place: int(place.name.removeprefix("step-")))


def one(root, pattern):
    return next(newest(root).glob(pattern))


def flip_data(root):
    file = one(root, "model*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def garble_the_index(root):
    file = one(root, "*.skindex")
    file.write_bytes(file.read_bytes()[::-1])


def save_something_else(root):
    """A perfect checkpoint, of another step's numbers."""
    place = newest(root)
    record = json.loads((place / "shardkeep.json").read_bytes())
    state = sk.open(place).to_dict()
    state["model"]["b"] = torch.from_numpy(bits("model.b", 1, 1).copy()).view(torch.float64).reshape(-1)
    sk.save(state, place, step=record["step"], meta=record["meta"], overwrite=True)


def leave_too_many(root):
    for number in range(90001, 90010):
        (root / f"step-{number}").mkdir()
        (root / f"step-{number}" / "something").touch()


def keep_what_is_not_wanted(root):
    """An old checkpoint that should have been deleted."""
    step, state = 1, sk.open(newest(root)).to_dict()
    for key in TENSORS:
        first, second = key.split(".")
        tensor = state[first][second]
        state[first][second] = torch.from_numpy(bits(key, 9, step).copy()).view(tensor.dtype).reshape(tensor.shape)
    state.update(job=9, step=step)
    sk.save(state, root / f"step-{step}", step=step, meta={"job": 9}, overwrite=True)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
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
def test_the_checker_finds(tmp_path, healthy, do, said):
    """Whatever is broken, lost or left over is found; before that, all is well."""
    root = shutil.copytree(healthy / "root", tmp_path / "root")
    checker = Checker(Folder(root), Ledger(healthy / "logs"), TENSORS)
    assert checker.check(tidy=True)[0].step == 8
    do(root)
    with pytest.raises(Damage, match=said):
        checker.check(tidy=True)
