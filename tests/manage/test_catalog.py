"""What a root holds, by its commit records."""

import json
import subprocess
import sys
from datetime import datetime, timezone

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep.errors import MalformedFile, StateError, UnsupportedVersion
from shardkeep.layouts import orphans
from shardkeep.manage.catalog import Catalog, Naming
from shardkeep.manage.entry import build_meta, metrics_in
from shardkeep.storage.base import REMOVING_NAME
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore


def save(root, step, **meta):
    sk.save({"w": torch.arange(8.0)}, root / f"step-{step}", step=step, meta=meta, overwrite=True)


def test_a_root_that_does_not_exist_is_empty(tmp_path):
    catalog = Catalog(tmp_path / "nothing")
    assert catalog.entries() == []
    assert catalog.latest() is None
    assert catalog.find(3) is None


def test_entries_are_what_the_records_say(tmp_path):
    """Newest first, with sizes, times and metrics."""
    for step in (9, 10, 2):
        save(tmp_path, step, metrics={"loss": step / 2, "bad": "nan", "no": "x"})
    (tmp_path / "notes").mkdir()
    entries = Catalog(tmp_path).entries()
    assert [(e.step, e.name, e.status) for e in entries] == [
        (10, "step-10", "committed"), (9, "step-9", "committed"), (2, "step-2", "committed"),
    ]  # fmt: skip
    first = entries[0]
    files = [file for file in (tmp_path / "step-10").iterdir() if file.name != "shardkeep.json"]
    assert first.nbytes == sum(file.stat().st_size for file in files)
    assert first.metrics["loss"] == 5.0
    assert first.metrics["bad"] != first.metrics["bad"]
    assert set(first.metrics) == {"loss", "bad"}
    assert abs((datetime.now(timezone.utc) - first.saved_at).total_seconds()) < 100
    assert first.record is not None
    assert first.layout == "native"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_checkpoints_are_entries(tmp_path):
    torch_dcp.save({"w": torch.arange(8.0)}, checkpoint_id=tmp_path / "step-4", no_dist=True)
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "__0_0.distcp").write_bytes(b"xyz")
    (tmp_path / "step-6").mkdir()
    (tmp_path / "step-6" / ".metadata").touch()
    six, five, four = Catalog(tmp_path).entries()
    assert (four.status, four.layout, four.record) == ("committed", "torch", None)
    assert four.nbytes == sum(file.stat().st_size for file in (tmp_path / "step-4").iterdir())
    assert four.saved_at is not None
    assert (five.status, five.nbytes) == ("unfinished", 3)
    assert six.status == "damaged"


def test_what_is_not_committed_says_why(tmp_path):
    """A torn record, a newer format, a living and a dead writer, a removal that was cut short."""
    for step in range(1, 5):
        save(tmp_path, step)
    record = tmp_path / "step-1" / "shardkeep.json"
    record.write_bytes(record.read_bytes()[:-9])
    forged = tmp_path / "step-2" / "shardkeep.json"
    text = forged.read_text()
    from shardkeep.format.record import _tail

    head = text.replace('"version": 1', '"version": 99').rpartition(',\n  "checksum"')[0].encode()
    forged.write_bytes(head + _tail(head))
    (tmp_path / "step-3" / "shardkeep.json").unlink()
    (tmp_path / "step-4" / "shardkeep.json").unlink()
    (tmp_path / "step-4" / REMOVING_NAME).touch()
    root = LocalStore(tmp_path)
    dead, alive, away = "a" * 20, "b" * 20, "c" * 20
    script = "import sys; from shardkeep.layouts import orphans as l; from shardkeep.storage.local import LocalStore as S; l.make_claim(S(sys.argv[1]), sys.argv[2])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "step-5"), dead], check=True, timeout=60)
    root.place("step-7").put(f"claim-{away}.json", json.dumps({"host": "elsewhere", "pid": 1, "started": "1"}).encode())
    (tmp_path / "step-8").mkdir()
    with orphans.holding_claim(alive):
        orphans.make_claim(root.place("step-6"), alive)
        found = {entry.step: entry for entry in Catalog(tmp_path).entries()}
    assert [found[step].status for step in (1, 2, 3, 4, 5, 6, 7)] == ["damaged"] * 2 + ["unfinished"] * 5
    assert isinstance(found[1].problem, MalformedFile)
    assert isinstance(found[2].problem, UnsupportedVersion)
    assert found[3].reason == "it has no commit record"
    assert found[4].reason == "its removal was cut short"
    assert found[5].reason == "its writer is gone"
    assert "is writing it" in found[6].reason
    assert "another machine" in found[7].reason
    assert 8 not in found
    assert Catalog(tmp_path).latest() is None


def test_a_thousand_steps_are_listed_in_order():
    root = MemoryStore()
    sk.save({"w": torch.ones(2)}, root.place("step-0"), step=0)
    record = root.place("step-0").get("shardkeep.json", limit=1 << 20)
    for step in range(1, 1000):
        root.place(f"step-{step}").put("shardkeep.json", record)
    assert [entry.step for entry in Catalog(root, "step-{step}").entries()] == list(range(999, -1, -1))
    assert next(iter(Catalog(root, "step-{step}"))).step == 999


def test_metrics_are_numbers_and_meta_is_the_users_own():
    """Tensors become numbers, what is not finite survives, and our keys are refused in meta."""
    stored = build_meta({"note": 1}, {"loss": torch.tensor(0.5), "worst": float("inf"), "n": 3}, 2)
    assert stored == {"note": 1, "metrics": {"loss": 0.5, "worst": "inf", "n": 3.0}, "timeline": 2}
    assert metrics_in(stored) == {"loss": 0.5, "worst": float("inf"), "n": 3.0}
    for key in ("metrics", "timeline"):
        with pytest.raises(sk.StateError, match=key):
            build_meta({key: 1}, None, 0)
    for wrong in ("high", None, torch.ones(2), [1]):
        with pytest.raises(sk.StateError, match="loss"):
            build_meta(None, {"loss": wrong}, 0)


# Names of steps, both ways.

STEPS = st.integers(0, (1 << 63) - 1)
TEMPLATES = st.sampled_from(["step-{step}", "step-{step:08d}", "ckpt_{step}", "{step}", "run2{step}3", "a{step:03}"])


@given(STEPS, TEMPLATES)
def test_a_name_leads_back_to_its_step(step, template):
    naming = Naming(template)
    assert naming.step(naming.name(step)) == step


@given(st.text("step-0123456789 _", max_size=14), TEMPLATES)
def test_only_names_of_steps_are_taken(name, template):
    naming = Naming(template)
    step = naming.step(name)
    assert step is None or naming.name(step) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [("step-{step}", "step-007"), ("step-{step:08d}", "step-7"), ("step-{step}", "step--1"), ("step-{step}", "Step-1"),
     ("step-{step}", "step-1x"), ("step-{step}", "step-" + "9" * 30), ("step-{step}", "step-٣"), ("step-{step}", "step-")],
)  # fmt: skip
def test_names_of_others_are_left_alone(template, name):
    assert Naming(template).step(name) is None


@pytest.mark.parametrize(
    "template",
    ["", "step", "step-{}", "{step}-{step}", "{step}{epoch}", "a/{step}", "../{step}", "{step!r}", "{step:x}", "{step:,}",
     "{step:5.1f}", "{", "{step:300d}", "-{step}", ".tmp-{step}", "s {step}", "{step.real}", "{step:5d}", None],
)  # fmt: skip
def test_a_template_that_names_no_step_is_refused(template):
    with pytest.raises(StateError, match="template") as caught:
        Naming(template)
    assert "step-{step}" in str(caught.value)
