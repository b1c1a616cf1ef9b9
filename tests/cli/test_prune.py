"""`shardkeep prune`: deletes only what no rule keeps, only after confirmation, and never what is being written."""

import os
import shutil

import msgspec
import pytest
import torch

import shardkeep as sk
from shardkeep.cli import output
from shardkeep.layouts import native
from shardkeep.layouts.native import claim_name, new_save_id
from shardkeep.layouts.orphans import Claim, holding_claim, make_claim
from shardkeep.storage.local import host_identity
from tests.cli.conftest import data_file


def steps(run_dir):
    return sorted(int(place.name.removeprefix("step-")) for place in run_dir.iterdir() if place.is_dir())


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (["--keep-last", "1"], [30]),
        (["--keep-last", "2"], [20, 30]),
        (["--keep-last", "9"], [10, 20, 30]),
        (["--keep-every", "20"], [20, 30]),
        (["--keep-best", "loss:1:max"], [10, 30]),
        (["--keep-best", "loss"], [30]),
        (["--keep-last", "1", "--keep-best", "loss:1:max", "--keep-every", "20"], [10, 20, 30]),
        (["--keep-hours", "1"], [10, 20, 30]),
        (["--keep-hours", "0.0000001"], [30]),
    ],
)
def test_rules(shardkeep, run_dir, rules, kept):
    tried = shardkeep("prune", run_dir, *rules, "--dry-run", "--json")
    assert (tried.code, steps(run_dir)) == (0, [10, 20, 30])
    done = shardkeep("prune", run_dir, *rules, "--yes", "--json")
    assert done.code == 0
    assert steps(run_dir) == kept
    assert {entry["step"] for entry in done.json["delete"]} == {10, 20, 30} - set(kept)
    assert tried.json["keep"] == done.json["keep"]
    assert tried.json["nbytes"] == done.json["nbytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a rule"),
        (["--keep-last", "0"], "KeepLast(0)\n  hint: the newest checkpoint is always kept: give 1 or more"),
        (["--keep-every", "0"], "KeepEvery(0)\n"),
        (["--keep-best", "loss:0"], "--keep-best 'loss:0'"),
        (["--keep-hours", "-1"], "KeepYounger(-3600.0)\n"),
        (["--keep-best", "loss:x"], "METRIC:K"),
        (["--keep-best", "loss:1:up"], "METRIC:K"),
        (["--keep-best", "odd:2"], "--keep-best odd:2:max, or :min"),
        (["--keep-hours", "nan"], "more than 0"),
        (["--keep-last", "1"], "no terminal to ask"),
        (["--keep-last", "1", "--json"], "no terminal to ask"),
    ],
)
def test_refusals(shardkeep, run_dir, words, said):
    answer = shardkeep("prune", run_dir, *words)
    assert answer.code == 2
    assert said in answer.err
    assert steps(run_dir) == [10, 20, 30]


@pytest.mark.parametrize(("typed", "kept"), [("y", [30]), ("n", [10, 20, 30]), ("", [10, 20, 30])])
def test_it_asks_on_a_terminal(shardkeep, run_dir, monkeypatch, typed, kept):
    monkeypatch.setattr(output, "is_terminal", lambda stream=None: True)
    monkeypatch.setattr("builtins.input", lambda prompt: typed)
    answer = shardkeep("prune", run_dir, "--keep-last", "1")
    assert (answer.code, steps(run_dir)) == (0, kept)
    assert "2 checkpoints to delete" in answer.out
    assert ("freed" in answer.out) == (typed == "y")


def test_pinned_ones_stay(shardkeep, run_dir):
    """A pin keeps a checkpoint that no rule keeps, and is given as the reason; unpinned, it goes."""
    assert shardkeep("pin", run_dir / "step-10").out == f"{run_dir}/step-10: pinned\n"
    assert "already pinned" in shardkeep("pin", run_dir / "step-10").out
    assert [entry.pinned for entry in sk.Catalog(run_dir).entries()] == [False, False, True]
    answer = shardkeep("prune", run_dir, "--keep-last", "1", "--yes")
    assert steps(run_dir) == [10, 30]
    assert "pinned" in answer.out
    assert shardkeep("unpin", run_dir / "step-10", "--json").json["pinned"] is False
    assert shardkeep("prune", run_dir, "--keep-last", "1", "--yes").code == 0
    assert steps(run_dir) == [30]


def test_names_of_other_programs_are_not_pinned(shardkeep, run_dir):
    """A name that the file of a pin cannot have is refused in words of the user's, and is never listed as pinned."""
    shutil.copytree(run_dir / "step-10", other := run_dir / "epoch=3-step=300")
    answer = shardkeep("pin", other)
    assert answer.code == 2
    assert "'epoch=3-step=300' cannot be pinned" in answer.err
    assert "already not pinned" in shardkeep("unpin", other).out
    for every in ([], ["--last", "9"]):
        listed = shardkeep("ls", run_dir, *every, "--json").json["checkpoints"]
        assert [each["pinned"] for each in listed] == [False] * 4


def test_the_plan_says_what_was_saved_without_a_metric(shardkeep, run_dir):
    plan = shardkeep("prune", run_dir, "--keep-best", "accuracy", "--dry-run", "--json").json
    assert {each["why"] for each in plan["keep"]} == {"best accuracy (not saved with it)"}


def test_only_checkpoints_are_pinned(shardkeep, run_dir):
    assert "did you mean step-10" in shardkeep("pin", run_dir / "step-20", run_dir / "step-1O").err
    assert "it is a run; its latest checkpoint is" in shardkeep("pin", run_dir).err
    assert not any(entry.pinned for entry in sk.Catalog(run_dir).entries())


def test_other_names_are_left_alone(shardkeep, run_dir):
    """Checkpoints of other names and of other programs stay, whatever the rules say, and the plan lists them."""
    for name, step in (("best", 1), ("epoch=0-step=2", 2), ("iter_0000003", 3)):
        sk.save({"w": torch.ones(3)}, run_dir / name, step=step)
    sk.export(run_dir / "step-10", run_dir / "step-5")
    answer = shardkeep("prune", run_dir, "--keep-last", "1", "--yes", "--force")
    left = {place.name for place in run_dir.iterdir()}
    assert (answer.code, left) == (0, {"best", "epoch=0-step=2", "iter_0000003", "step-5", "step-30"})
    assert answer.out.count("not managed: not named step-{step}") == 3
    assert answer.out.count("not managed: of another program") == 1
    unmanaged = shardkeep("prune", run_dir, "--keep-last", "1", "--json").json["leave"]
    assert {each["name"] for each in unmanaged} == left - {"step-30"}


def test_a_checkpointer_deletes_only_its_own(run_dir):
    for name in ("best", "final", "epoch=0-step=2", "iter_0000003"):
        sk.save({"w": torch.ones(3)}, run_dir / name, step=99)
    with sk.Checkpointer(run_dir, every_steps=1, keep_last=1) as checkpointer:
        assert checkpointer.all_steps() == [10, 20, 30]
        checkpointer.step(31, {"w": torch.zeros(3)})
    left = {place.name for place in run_dir.iterdir() if place.is_dir()}
    assert left == {"best", "final", "epoch=0-step=2", "iter_0000003", "step-31"}


def test_a_damaged_newest_is_not_what_is_fallen_back_to(shardkeep, run_dir):
    """A checkpoint whose files are not all there counts for nothing: the newest good one stays beside it."""
    data_file(run_dir / "step-30").unlink()
    answer = shardkeep("prune", run_dir, "--keep-last", "1", "--yes")
    assert steps(run_dir) == [20, 30]
    assert "the file is missing" in answer.out


def leave(place, claim):
    """What a save that did not finish leaves: data and a claim."""
    place.mkdir(exist_ok=True)
    save_id = new_save_id()
    (place / f"model-00000-of-00001-{save_id}.safetensors").write_bytes(bytes(1000))
    if claim is not None:
        (place / claim_name(save_id)).write_bytes(msgspec.json.encode(claim))
    return save_id


def test_leftovers_of_the_dead_are_swept(shardkeep, run_dir):
    dead = Claim(host=host_identity(), pid=2**22 + 1, started="1")
    leave(run_dir / "step-40", dead)
    leave(run_dir / "step-30", dead)
    answer = shardkeep("prune", run_dir, "--keep-last", "9", "--yes", "--json")
    assert answer.code == 0
    assert [litter["name"] for litter in answer.json["sweep"]] == ["step-40", "step-30"]
    assert steps(run_dir) == [10, 20, 30]
    assert len(list((run_dir / "step-30").glob("*.safetensors"))) == 2
    assert shardkeep("verify", run_dir).code == 0


def test_what_the_living_write_is_never_touched(shardkeep, run_dir):
    """A running save, one of another machine, and files without a claim are not touched."""
    save_id = leave(run_dir / "step-40", None)
    leave(run_dir / "step-50", Claim(host="elsewhere", pid=1, started="1"))
    leave(run_dir / "step-60", None)
    before = sorted(file.name for file in run_dir.rglob("*"))
    with holding_claim(save_id):
        make_claim(sk.Catalog(run_dir).root.place("step-40"), save_id)
        answer = shardkeep("prune", run_dir, "--keep-last", "9", "--yes")
    assert answer.code == 0
    (run_dir / "step-40" / claim_name(save_id)).unlink()
    assert sorted(file.name for file in run_dir.rglob("*")) == before


def test_a_step_that_is_saved_anew_is_not_deleted(shardkeep, run_dir):
    """A checkpoint that is being written again, here or perhaps elsewhere, is kept, and the plan says why."""
    save_id = leave(run_dir / "step-10", None)
    leave(run_dir / "step-20", Claim(host="elsewhere", pid=1, started="1"))
    before = sorted(file.name for file in run_dir.rglob("*"))
    with holding_claim(save_id):
        make_claim(sk.Catalog(run_dir).root.place("step-10"), save_id)
        answer = shardkeep("prune", run_dir, "--keep-last", "1", "--yes")
    assert answer.code == 0
    assert f"being written by process {os.getpid()}" in answer.out
    assert "another machine" in answer.out
    (run_dir / "step-10" / claim_name(save_id)).unlink()
    assert sorted(file.name for file in run_dir.rglob("*")) == before


def test_a_save_that_began_while_it_asked_is_left_alone(shardkeep, run_dir, monkeypatch):
    save_id = new_save_id()
    place = sk.Catalog(run_dir).root.place("step-10")
    monkeypatch.setattr(output, "is_terminal", lambda stream=None: True)
    monkeypatch.setattr("builtins.input", lambda prompt: make_claim(place, save_id) or "y")
    with holding_claim(save_id):
        answer = shardkeep("prune", run_dir, "--keep-last", "1")
    assert (answer.code, steps(run_dir)) == (2, [10, 30])
    assert "being written by process" in answer.err


def test_files_that_go_before_the_commit_fail_the_save(run_dir, monkeypatch):
    root = sk.Catalog(run_dir).root
    publish = native.publish

    def removed_first(*args, **kwargs):
        root.remove("step-10")
        return publish(*args, **kwargs)

    monkeypatch.setattr(native, "publish", removed_first)
    with pytest.raises(sk.errors.StorageError, match="deleted by another process"):
        sk.save({"w": torch.zeros(3)}, run_dir / "step-10", step=10, overwrite=True)
    assert sk.Catalog(run_dir).find(10) is None
    assert sk.Catalog(run_dir).latest().step == 30


def test_what_else_lies_beside_a_checkpoint_is_not_deleted_with_it(shardkeep, run_dir):
    """A place that holds other files or folders stays and they are named; --force deletes them, and says so before."""
    (run_dir / "step-10" / "my notes.txt").write_text("mine")
    (run_dir / "step-20" / "samples").mkdir()
    careful = shardkeep("prune", f"file://{run_dir}", "--keep-last", "1", "--yes")
    assert (careful.code, steps(run_dir)) == (0, [10, 20, 30])
    assert "it also holds my notes.txt" in careful.out
    assert "it also holds samples/" in careful.out
    tried = shardkeep("prune", run_dir, "--keep-last", "1", "--force", "--dry-run")
    assert "it also holds my notes.txt" in tried.out
    assert shardkeep("prune", run_dir, "--keep-last", "1", "--force", "--yes").code == 0
    assert steps(run_dir) == [30]


def test_checkpoints_of_torch_are_pruned(shardkeep, run_dir):
    sk.convert(run_dir / "step-10", run_dir / "step-5", "dcp")
    assert shardkeep("prune", run_dir, "--keep-every", "10", "--yes").code == 0
    assert steps(run_dir) == [10, 20, 30]


def test_the_job_that_holds_the_run_is_named(shardkeep, run_dir):
    with sk.Checkpointer(run_dir, every_steps=1) as checkpointer:
        checkpointer.step(31, {"w": torch.zeros(3)})
        during = shardkeep("prune", run_dir, "--keep-last", "9", "--json")
    assert f"process {os.getpid()}" in during.err
    assert shardkeep("prune", run_dir, "--keep-last", "9").err == ""


def test_what_changed_while_it_asked_stays(shardkeep, run_dir, monkeypatch):
    monkeypatch.setattr(output, "is_terminal", lambda stream=None: True)

    def answer_late(prompt):
        sk.save({"w": torch.zeros(3)}, run_dir / "step-10", step=10, overwrite=True)
        return "y"

    monkeypatch.setattr("builtins.input", answer_late)
    answer = shardkeep("prune", run_dir, "--keep-last", "1")
    assert answer.code == 2
    assert steps(run_dir) == [10, 30]
    assert "since" in answer.err


def test_a_failed_delete_is_told(shardkeep, run_dir, monkeypatch):
    def refuse(path, *rest, **more):
        if "step-10" in str(path):
            raise PermissionError(13, "not allowed")
        return unlink(path, *rest, **more)

    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", refuse)
    answer = shardkeep("prune", run_dir, "--keep-last", "1", "--yes")
    assert answer.code == 2
    assert "could not delete step-10" in answer.err
    assert steps(run_dir) == [10, 30]


def test_an_empty_run_has_nothing_to_prune(shardkeep, tmp_path):
    (tmp_path / "empty").mkdir()
    answer = shardkeep("prune", tmp_path / "empty", "--keep-last", "1")
    assert (answer.code, answer.out.strip()) == (0, "nothing to delete")
    assert shardkeep("prune", tmp_path / "none", "--keep-last", "1").code == 2


def test_a_removal_cut_short_is_ended(shardkeep, run_dir):
    shutil.copytree(run_dir / "step-30", run_dir / "step-40")
    (run_dir / "step-40" / "shardkeep.json").unlink()
    (run_dir / "step-40" / "shardkeep.removing").touch()
    answer = shardkeep("prune", run_dir, "--keep-last", "9", "--yes", "--json")
    assert answer.json["sweep"][0]["why"] == "its deletion was interrupted"
    assert steps(run_dir) == [10, 20, 30]


def test_a_checkpoint_is_no_run(shardkeep, run_dir):
    """prune and latest of a checkpoint say what it is, and what to give."""
    for words in (["prune", run_dir / "step-30", "--keep-last", "1"], ["latest", run_dir / "step-30"]):
        answer = shardkeep(*words)
        assert (answer.code, "is a checkpoint, not a run" in answer.err, f"{run_dir}\n" in answer.err) == (
            2,
            True,
            True,
        )
