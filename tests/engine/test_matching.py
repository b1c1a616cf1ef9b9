"""Strictness, filters, renames and what the errors say."""

import re
import traceback

import pytest
import torch

import shardkeep as sk
from shardkeep import dcp
from shardkeep.cli.main import main
from shardkeep.dcp import CheckpointException
from shardkeep.testing.faulty_store import FaultyStore
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
    report = sk.load(zeros(), saved)
    assert (report.step, report.meta, report.missing, report.unexpected) == (7, {"run": "a"}, [], [])
    assert (report.tensors, report.bytes_filled) == (3, 3 * 6 * 4)
    assert report.bytes_read > 0
    assert report.seconds > 0


def test_all_differences_come_in_one_error_before_anything_changes(saved):
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
    for word in ("model.layers.2.w", "optim.layers.0.w"):
        assert word in str(caught.value)
    assert not state["model"]["layers.0.w"].any()


def test_not_strict_loads_what_fits_and_reports_the_rest(saved):
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
    ("given", "said"),
    [
        ({"include": ["model", "optmi"]}, "include='optmi' (did you mean optim?)"),
        ({"exclude": "modle.*"}, "exclude='modle.*' (did you mean model?)"),
        ({"cast": "modle"}, "cast='modle' (did you mean model?)"),
        ({"rename": {"step": "step", "optmi": "x"}}, "rename='optmi' (did you mean optim?)"),
        (
            {"rename": (r"^modle\.layers", "x")},
            r"rename='^modle\\.layers' (did you mean model.layers or optim.layers?)",
        ),
        ({"rename": [("optim", "optim"), ("optmi", "x")]}, "rename='optmi' (did you mean optim?)"),
    ],
)
def test_a_pattern_that_matches_no_name_is_an_error_or_else_a_warning(saved, given, said, caplog):
    """Strict loads raise, with near names; others warn, once for all ranks, and the report has it. Rank 1 has no tensor."""

    def load(world, *, strict):
        state = zeros() if world.rank == 0 else {"step": 0}
        return sk.load(state, saved, group=world, strict=strict, **given)

    errors = thread_outcomes(2, lambda world: load(world, strict=True))
    assert all(isinstance(error, sk.StateMismatch) and said in str(error) for error in errors), errors
    assert errors[0].hint.startswith("strict=False only warns of them")
    assert ("a function may match nothing" in errors[0].hint) == ("rename" in given)
    reports = run_thread_ranks(2, lambda world: load(world, strict=False))
    pattern, hint = said.split(" ", 1)
    assert [report.unmatched for report in reports] == [[pattern]] * 2
    (warning,) = caplog.messages
    assert f"{pattern} matches no name" in warning
    assert warning.endswith(hint)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("state", "given", "said"),
    [
        (zeros(), {"include": "modle"}, "did you mean model"),
        (zeros(), {"include": ["modle", "step"]}, "did you mean model"),
        (zeros(), {"include": lambda name: name.startswith("net")}, "select none of 4 names"),
        (zeros(), {"exclude": "*"}, "select none of 4 names"),
        ({"module": zeros()["model"]}, {}, "missing from the checkpoint"),
        ({"model": {"module.layers.0.w": torch.zeros(2, 3)}}, {}, "pass rename="),
        ({"stepp": 0}, {}, "did you mean 'step'"),
    ],
)
def test_a_load_that_fills_no_tensor_is_an_error(saved, state, given, said, strict):
    """Nothing that was loaded is no success, whatever `strict` says; the error suggests what was meant."""
    with pytest.raises(sk.StateMismatch, match="it fills no tensor") as caught:
        sk.load(state, saved, strict=strict, **given)
    assert said in str(caught.value)


def test_values_alone_and_a_rank_without_tensors_are_loaded(saved):
    """Only plain values may be asked for; and the states of all ranks are judged as one."""
    state = zeros()
    report = sk.load(state, saved, include="step")
    assert (state["step"], report.tensors, report.bytes_filled) == (7, 0, 0)
    assert sk.load({"step": 0}, saved, strict=False).tensors == 0
    states = [zeros(), {"nothing": None}, {}]
    reports = run_thread_ranks(3, lambda world: sk.load(states[world.rank], saved, strict=False, group=world))
    assert [(report.tensors, report.bytes_filled, report.missing) for report in reports] == [(3, 72, ["nothing"])] * 3


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


@pytest.mark.parametrize(
    ("there", "here", "advice"),
    [
        ("app.model.", "model.", {"app.model": "model"}),
        ("model.", "app.model.", {"model": "app.model"}),
        ("app.model.", "", {"app.model": ""}),
        ("", "model.", [("^", "model.")]),
    ],
)
def test_a_tree_below_another_prefix_is_recognised(tmp_path, there, here, advice):
    """If one prefix explains most of the missing names, on either side, the hint is the rename that loads them."""
    names = [f"{part}.w" for part in "abcde"]
    sk.save({there + name: torch.ones(3) for name in names}, tmp_path / "ck")
    state = {here + name: torch.zeros(3) for name in names}
    with pytest.raises(sk.StateMismatch) as caught:
        sk.load(state, tmp_path / "ck")
    assert caught.value.hint.endswith(f": pass rename={advice!r}")
    sk.load(state, tmp_path / "ck", rename=advice)
    assert all(value.all() for value in state.values())


@pytest.mark.parametrize(("there", "here"), [("app", ""), ("", "app")])
def test_a_tree_of_objects_below_another_prefix_is_recognised(tmp_path, there, here):
    """The rename of the hint loads modules and optimizers, whose own names are not known before they are found."""

    def trained():
        model = torch.nn.Linear(2, 1)
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(2)).backward()
        optim.step()
        return {"model": model, "optim": optim}

    sk.save({there: trained()} if there else trained(), tmp_path / "ck")
    state = {here: trained()} if here else trained()
    with pytest.raises(sk.StateMismatch) as caught:
        sk.load(state, tmp_path / "ck")
    advice = eval(caught.value.hint.partition("pass rename=")[2])
    assert sk.load(state, tmp_path / "ck", rename=advice).missing == []


def test_a_name_that_is_loaded_is_not_suggested_for_another(tmp_path):
    """A rename of names that are in the state, too, would only move the gap."""
    sk.save({"model": {"w": torch.ones(3)}}, tmp_path / "ck")
    with pytest.raises(sk.StateMismatch) as caught:
        sk.load({"model": {"w": torch.zeros(3)}, "ema": {"model": {"w": torch.zeros(3)}}}, tmp_path / "ck")
    assert "did you mean" not in str(caught.value)
    assert caught.value.hint == "strict=False loads what fits"


def test_suggestions_are_of_the_same_kind_and_depth(tmp_path):
    sk.save({"rates": torch.ones(1), "rate": 1, "in": {"rates.x": torch.ones(1)}}, tmp_path / "ck")
    with pytest.raises(sk.StateMismatch) as caught:
        sk.load({"ratess": 0, "ratez": torch.ones(1), "in": {"ratesx": torch.ones(1)}}, tmp_path / "ck")
    found = dict(re.findall(r"(\S+) \(did you mean '(.*)'\?\)", str(caught.value)))
    assert found == {"ratess": "rate", "ratez": "rates"}


def test_an_optimizer_stored_by_number_says_how_to_load_it(tmp_path):
    """A checkpoint of optimizer.state_dict() names no parameter: the hint is not strict=False, which would drop it."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    sk.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "ck")
    with pytest.raises(sk.StateMismatch) as caught:
        sk.load({"model": model, "optim": optimizer}, tmp_path / "ck")
    assert "'optim' was stored by number" in caught.value.hint
    sk.load({"model": model, "optim": optimizer}, tmp_path / "ck", exclude="optim")
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(sk.open(tmp_path / "ck").to_dict()["optim"])
    assert str(fresh.state_dict()) == str(optimizer.state_dict())


def test_one_memory_cannot_take_two_tensors(saved):
    one = torch.zeros(2, 3)
    state = zeros()
    state["model"] = {"layers.0.w": one, "layers.1.w": one}
    with pytest.raises(sk.StateMismatch, match=r"exclude='model\.layers\.1\.w'"):
        sk.load(state, saved)
    sk.load(state, saved, exclude="model.layers.1.w")
    assert torch.equal(one, torch.arange(6.0).reshape(2, 3))


def test_nothing_there_says_so(tmp_path):
    with pytest.raises(sk.CheckpointNotFound, match="does not exist"):
        sk.load({}, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match="1 other file"):
        sk.open(tmp_path / "some")


@pytest.mark.parametrize("there", ["link", "link/below", "file/below", "empty"])
@pytest.mark.filterwarnings("ignore:torch.distributed is not in use")
def test_a_path_that_leads_nowhere_is_named(tmp_path, there, capsys):
    """A link to nothing, or a file in the middle of a path, is what errors speak of; never of our own files."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".metadata").symlink_to(tmp_path / "gone")
    named = {"file/below": "file is a file", "empty": "empty/.metadata is a symbolic link"}
    says = f"{tmp_path}/" + named.get(there, f"link is a symbolic link to {tmp_path}/gone, which does not exist")
    state, place = {"w": torch.zeros(1)}, tmp_path / there
    calls = [lambda: sk.load(state, place), lambda: sk.open(place)]
    calls += [lambda: dcp.load(state, checkpoint_id=place, no_dist=True)]
    assert main(["ls", str(place)]) == 2
    assert says in capsys.readouterr().err
    if there != "empty":
        calls += [lambda: sk.save(state, place), lambda: sk.Checkpointer(place).save(1, state)]
        calls += [lambda: dcp.save(state, checkpoint_id=place, no_dist=True)]
    for call in calls:
        with pytest.raises((sk.CheckpointError, CheckpointException)) as caught:
            call()
        assert says in str(caught.value), caught.value
        shown = "".join(traceback.format_exception(caught.value))
        assert "claim-" not in shown
        assert ".tmp-" not in shown
        assert not isinstance(caught.value, sk.BlobNotFound)


def test_a_place_that_refuses_the_first_file_is_named(tmp_path):
    for at in range(8):
        with pytest.raises(sk.StorageFull) as caught:
            sk.save({"w": torch.zeros(1)}, FaultyStore(sk.MemoryStore("memory://m"), "full", at=at))
        assert "claim-" not in str(caught.value)


def test_overwriting_is_an_opt_in(saved):
    before = sk.open(saved).record.save_id
    with pytest.raises(FileExistsError, match="overwrite=True"):
        sk.save({"x": torch.ones(1)}, saved)
    assert sk.open(saved).record.save_id == before
    sk.save({"x": torch.ones(1)}, saved, overwrite=True)
    assert list(sk.open(saved)) == ["x"]
    assert not [path.name for path in saved.iterdir() if before in path.name]


def test_more_ranks_than_saved_per_rank_state_is_a_clear_error(tmp_path):
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
