"""Strictness, filters, renames and what the errors say."""

import re

import pytest
import torch

import shardkeep as sk
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes

WRAPPERS = ["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]


@pytest.fixture
def saved(tmp_path):
    state = {
        "model": {"layers.0.w": torch.arange(6.0).reshape(2, 3), "layers.1.w": torch.ones(2, 3)},
        "optim": {"layers.0.w": torch.full((2, 3), 5.0)},
        "step": 7,
    }
    sk.save(state, tmp_path / "ck", step=7, meta={"run": "a"})
    return tmp_path / "ck"


def zeros():
    return {
        "model": {"layers.0.w": torch.zeros(2, 3), "layers.1.w": torch.zeros(2, 3)},
        "optim": {"layers.0.w": torch.zeros(2, 3)},
        "step": 0,
    }


def test_report_says_what_was_loaded(saved):
    """The report carries the record's step and meta."""
    report = sk.load(zeros(), saved)
    assert (report.step, report.meta, report.missing, report.unexpected) == (7, {"run": "a"}, [], [])
    assert report.bytes_read > 0
    assert report.seconds > 0


def test_all_differences_come_in_one_error_before_anything_changes(saved):
    """Missing, unexpected, wrongly shaped and wrongly kinded keys are listed together, and the state is untouched."""
    state = zeros()
    state["model"]["layers.2.w"] = torch.zeros(1)
    state["model"]["layers.1.w"] = torch.zeros(3, 2)
    state["step"] = torch.tensor(0)
    del state["optim"]

    with pytest.raises(sk.StateMismatch) as caught:
        sk.load(state, saved)

    assert caught.value.missing == ["model.layers.2.w"]
    assert caught.value.unexpected == ["optim.layers.0.w"]
    assert caught.value.mismatched == [
        "step: a tensor in the state, a plain value in the checkpoint",
        "model.layers.1.w: shape (3, 2) in the state, (2, 3) in the checkpoint",
    ]
    for word in ("model.layers.2.w", "optim.layers.0.w", "did you mean"):
        assert word in str(caught.value)
    assert not state["model"]["layers.0.w"].any()


def test_not_strict_loads_what_fits_and_reports_the_rest(saved):
    """What the checkpoint lacks stays as it was; what nothing asked for is listed."""
    state = {"model": {"layers.0.w": torch.zeros(2, 3), "extra": torch.full((2,), 9.0)}}

    report = sk.load(state, saved, strict=False)

    assert report.missing == ["model.extra"]
    assert report.unexpected == ["model.layers.1.w", "optim.layers.0.w", "step"]
    assert torch.equal(state["model"]["layers.0.w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(state["model"]["extra"], torch.full((2,), 9.0))
    with pytest.raises(sk.StateMismatch, match="shape"):  # a tensor that does not fit is never forgiven
        sk.load({"model": {"layers.0.w": torch.zeros(4, 3)}}, saved, strict=False)


@pytest.mark.parametrize(
    "include", ["model", "model.*", ["model.layers.0.w", "model.layers.1*"], lambda key: key.startswith("model")]
)
def test_include_limits_what_is_loaded_and_what_is_expected(saved, include):
    """Names outside the selection are neither loaded nor missed, in any spelling of it."""
    state = zeros()
    report = sk.load(state, saved, include=include)

    assert report.unexpected == []
    assert state["model"]["layers.1.w"].all()
    assert not state["optim"]["layers.0.w"].any()
    assert state["step"] == 0


def test_exclude_wins_over_include(saved):
    """What is excluded stays as it was."""
    state = zeros()
    sk.load(state, saved, include="model", exclude="model.layers.0.w")
    assert not state["model"]["layers.0.w"].any()
    assert state["model"]["layers.1.w"].all()


@pytest.mark.parametrize(
    "rename",
    [
        {"model": "net"},
        {"model.layers.0.w": "net.layers.0.w", "model.layers.1.w": "net.layers.1.w"},
        {re.compile(r"^model\."): "net."},
        (r"^model\.", "net."),
        [(r"^model", "nut"), (r"^nut", "net")],
        lambda key: key.replace("model.", "net."),
    ],
)
def test_rename_maps_checkpoint_names_to_state_names(saved, rename):
    """A map of names or prefixes, regular expressions, or a callable."""
    state = zeros()
    state["net"] = state.pop("model")
    report = sk.load(state, saved, rename=rename)
    assert report.missing == report.unexpected == []
    assert state["net"]["layers.1.w"].all()


def test_rename_can_drop_names_but_not_join_them(saved):
    """A callable that returns None drops the name, so that it is not unexpected. Two tensors cannot become one."""
    state = {"model": zeros()["model"]}
    sk.load(state, saved, rename=lambda key: key if key.startswith("model") else None)
    assert state["model"]["layers.1.w"].all()
    with pytest.raises(sk.StateMismatch, match="one name"):
        sk.load(zeros(), saved, rename=lambda _: "x")


@pytest.mark.parametrize(
    ("there", "here"),
    [
        *[(f"model.{wrapper}.layers.0.w", "model.layers.0.w") for wrapper in WRAPPERS],
        ("model.layers.0.w", "model._orig_mod.layers.0.w"),
        ("layers.0.w", "_orig_mod.layers.0.w"),
        ("module.layers.0.w", "_orig_mod.layers.0.w"),
        ("layers.0.w", "module._orig_mod.layers.0._checkpoint_wrapped_module.w"),
    ],
)
def test_wrapper_prefixes_are_recognised(tmp_path, there, here):
    """Keys that differ by a wrapper's prefix, on either side, are suggested, with the rename that loads them; and it does."""
    sk.save({there: torch.ones(3), "step": 1}, tmp_path / "ck")
    state = {here: torch.zeros(3), "step": 0}

    with pytest.raises(sk.StateMismatch) as caught:
        sk.load(state, tmp_path / "ck")

    text = str(caught.value)
    assert f"did you mean {there!r}?" in text
    advice = re.search(r"pass rename=([\[{].*[\]}])", text).group(1)
    sk.load(state, tmp_path / "ck", rename=eval(advice))
    assert state[here].all()


def test_near_misses_are_suggested(saved):
    """A misspelt key is answered with the closest one."""
    state = zeros()
    state["model"]["layer.0.w"] = state["model"].pop("layers.0.w")
    with pytest.raises(sk.StateMismatch, match=r"model\.layer\.0\.w \(did you mean 'model\.layers\.0\.w'\?\)"):
        sk.load(state, saved)


def test_suggestions_are_of_the_same_kind_and_depth(tmp_path):
    """A tensor is suggested for a tensor, a value for a value, and neither one that lies deeper."""
    sk.save({"rates": torch.ones(1), "rate": 1, "in": {"rates.x": torch.ones(1)}}, tmp_path / "ck")
    with pytest.raises(sk.StateMismatch) as caught:
        sk.load({"ratess": 0, "ratez": torch.ones(1), "in": {"ratesx": torch.ones(1)}}, tmp_path / "ck")
    found = dict(re.findall(r"(\S+) \(did you mean '(.*)'\?\)", str(caught.value)))
    assert found == {"ratess": "rate", "ratez": "rates"}


def test_one_memory_cannot_take_two_tensors(saved):
    """A state that ties what the checkpoint has as two different tensors is an error that says how to choose."""
    one = torch.zeros(2, 3)
    state = zeros()
    state["model"] = {"layers.0.w": one, "layers.1.w": one}
    with pytest.raises(sk.StateMismatch, match=r"exclude='model\.layers\.1\.w'"):
        sk.load(state, saved)
    sk.load(state, saved, exclude="model.layers.1.w")
    assert torch.equal(one, torch.arange(6.0).reshape(2, 3))


def test_nothing_there_says_so(tmp_path):
    """An empty place, and one with only other files, are not checkpoints, and no file is made by asking."""
    with pytest.raises(sk.CheckpointNotFound, match="does not exist"):
        sk.load({}, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match="1 other files"):
        sk.open(tmp_path / "some")


def test_overwriting_is_an_opt_in(saved):
    """A committed checkpoint is replaced only when asked, and then nothing of it is left."""
    before = sk.open(saved).record.save_id
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sk.save({"x": torch.ones(1)}, saved)
    assert sk.open(saved).record.save_id == before

    sk.save({"x": torch.ones(1)}, saved, overwrite=True)

    assert list(sk.open(saved)) == ["x"]
    assert not [path.name for path in saved.iterdir() if before in path.name]


def test_more_ranks_than_saved_per_rank_state_is_a_clear_error(tmp_path):
    """Per-rank state of a rank that never saved is missing, and the hint says why."""
    run_thread_ranks(2, lambda w: sk.save({"r": sk.PerRank(w.rank * 10)}, tmp_path / "ck", group=w))

    def load(world):
        state = {"r": sk.PerRank(None)}
        sk.load(state, tmp_path / "ck", group=world)
        return state["r"].value

    assert run_thread_ranks(2, load) == [0, 10]
    assert run_thread_ranks(1, load) == [0]
    errors = thread_outcomes(3, load)
    assert all(isinstance(error, sk.StateMismatch) and "per-rank" in str(error) for error in errors)
    assert errors[0].missing == ["r.@2"]
