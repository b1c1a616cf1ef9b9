"""The log line of each save and load, and the rank that it names as slowest."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep.display import format_seconds
from shardkeep.engine.report import SAVE_WORK, find_slowest, seconds_by_name
from shardkeep.events import RankPhases, Slowest, Span
from tests.reports import scene

NUMBER = r"[1-9]\d*(\.\d+)?"  # never 0.000
TIME, SIZE = rf"({NUMBER}) [µm]?s", rf"({NUMBER}) [kMG]?B"
MOVED = rf"\S+/ck: 1 tensor, {SIZE} in {TIME} \({SIZE}/s\)"
SLOWEST = rf"(; slowest: rank (?P<rank>\d+), (?P<phase>\w+) (?P<took>{TIME}) \(median (?P<median>{TIME})\))?"
SAVED = re.compile(rf"saved {MOVED}: blocked {TIME}, staged {TIME}, written {TIME}{SLOWEST}")
LOADED = re.compile(rf"loaded {MOVED}: open {TIME}, plan {TIME}, read {TIME}, place {TIME}{SLOWEST}")


def lines_of(where, slow, background):
    with scene.logged() as lines:
        for verb in ("create", "open"):
            store = scene.slow_store(where, verb) if scene.rank() == slow else sk.LocalStore(where)
            dist.barrier()  # a rank that comes late would be the one to blame
            if verb == "create":
                saved = sk.async_save(scene.state(), store).result() if background else sk.save(scene.state(), store)
            else:
                loaded = sk.load(scene.state(), store)
    return lines, saved.slowest, loaded.slowest


def late_rank(where, late):
    state = {"model": torch.nn.Linear(3, 3), "step": 1}
    dist.barrier()
    if scene.rank() == late:
        time.sleep(2)
    saved = sk.save(state, where)
    dist.barrier()
    if scene.rank() == late:
        time.sleep(2)
    return saved, sk.load(state, where)


def test_a_rank_that_comes_late_is_named(rank_pool, tmp_path):
    (saved, loaded), *_ = rank_pool.run(2, late_rank, str(tmp_path / "ck"), 1)
    for report in (saved, loaded):
        assert (report.slowest.rank, report.slowest.phase) == (1, "late")
        assert report.slowest.seconds > 0.5
        assert report.ranks[1].late_s > report.ranks[0].late_s


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("ranks", "slow"), [(2, 1), (3, 2), (3, 0)])
def test_the_line_names_the_rank_that_is_slow(rank_pool, tmp_path, ranks, slow, background):
    """A rank whose disk is slow is named, with the phase, what it took and what the others took; rank 0 alone logs."""
    outcomes = rank_pool.run(ranks, lines_of, str(tmp_path / "ck"), slow, background)
    assert [len(lines) for lines, _, _ in outcomes] == [2] + [0] * (ranks - 1)
    assert [saved for _, saved, _ in outcomes[1:]] == [None] * (ranks - 1)
    (saved_line, loaded_line), saved, loaded = outcomes[0]
    for pattern, line, found, phase in ((SAVED, saved_line, saved, "write"), (LOADED, loaded_line, loaded, None)):
        said = pattern.fullmatch(line)
        assert said, line
        assert int(said["rank"]) == found.rank == slow
        assert said["phase"] == found.phase
        assert found.phase in ((phase,) if phase else ("plan", "read"))
        assert (said["took"], said["median"]) == (format_seconds(found.seconds), format_seconds(found.median_s))
        assert found.seconds >= scene.SLOW_S


def test_a_single_rank_is_not_compared(tmp_path):
    with scene.logged() as lines:
        report = sk.save(scene.state(), tmp_path / "ck")
        sk.load(scene.state(), tmp_path / "ck")
    assert report.slowest is None
    assert [bool(SAVED.fullmatch(lines[0])), bool(LOADED.fullmatch(lines[1]))] == [True, True], lines
    assert "slowest" not in "".join(lines)


def test_a_call_that_waits_for_an_earlier_save_says_so(tmp_path):
    with scene.logged() as lines:
        first = sk.async_save(scene.state(), scene.slow_store(tmp_path / "first", "create"))
        second = sk.async_save(scene.state(), tmp_path / "second").result()
        first.result()
    queued = sum(span.seconds for span in second.phases if span.name == "queue")
    assert second.blocked_s >= queued > 0.1
    assert f"blocked {format_seconds(second.blocked_s)} ({format_seconds(queued)} by earlier saves), staged" in lines[1]
    assert "earlier" not in lines[0]


def ranks_that_took(*times):
    return [
        RankPhases(rank, [Span(name, 0.0, seconds) for name, seconds in each.items()])
        for rank, each in enumerate(times)
    ]


def test_a_rank_that_stages_late_is_not_blamed_for_writing_late():
    """What is written waits for what is staged: the first of the two is to blame if it explains most of the other."""
    quick, slow = {"describe": 0.1, "stage": 1.0, "write": 1.2}, {"describe": 0.1, "stage": 4.0, "write": 4.3}
    assert find_slowest(ranks_that_took(quick, quick, slow), SAVE_WORK) == Slowest(2, "stage", 4.0, 1.0)
    slow = {"describe": 0.1, "stage": 1.1, "write": 4.3}
    assert find_slowest(ranks_that_took(quick, quick, slow), SAVE_WORK) == Slowest(2, "write", 4.3, 1.2)


def test_waiting_for_others_does_not_count():
    """Phases in which ranks wait are not compared, parts of a phase are added up, and without work there is no slowest."""
    waits = [RankPhases(rank, [Span("plan", 0.0, 9.0 * rank)]) for rank in range(3)]
    assert find_slowest(waits, SAVE_WORK) is None
    parts = [
        RankPhases(0, [Span("stage", 0.0, 1.0), Span("stage", 2.0, 3.0)]),
        RankPhases(1, [Span("stage", 0.0, 1.5)]),
    ]
    assert find_slowest(parts, SAVE_WORK) == Slowest(0, "stage", 2.0, 1.5)


@given(st.lists(st.fixed_dictionaries({name: st.floats(0, 100) for name in SAVE_WORK}), min_size=2, max_size=9))
def test_no_rank_is_further_above_the_median_than_the_slowest(times):
    """By the definition itself, over all ranks and phases; but for staging that explains writing."""
    ranks = ranks_that_took(*times)
    found = find_slowest(ranks, SAVE_WORK)
    taken = [seconds_by_name(each.spans) for each in ranks]
    medians = {name: sorted(each[name] for each in taken)[(len(taken) - 1) // 2] for name in SAVE_WORK}
    most = max(each[name] - medians[name] for each in taken for name in SAVE_WORK)
    assert found.median_s == medians[found.phase]
    assert found.seconds == taken[found.rank][found.phase]
    excess = found.seconds - found.median_s
    write_excess = taken[found.rank]["write"] - medians["write"]
    assert excess == most or (found.phase == "stage" and write_excess == most and excess >= most / 2)


def shown(tmp_path):
    """What a user sees at a prompt, and a pattern of what it says."""
    state = {"model": {"w": torch.ones(16)}, "step": 1}
    yield sk.save(state, tmp_path / "ck", step=1), rf"saved {tmp_path}/ck: 1 tensor, 64 B in {TIME}"
    handle = sk.async_save(state, tmp_path / "run" / "step-1", step=1)
    handle.result()
    yield handle, r"SaveHandle\('.*/step-1', done\)"
    yield handle.progress, "done, 64 B staged and 64 B written of 64 B"
    yield handle.staged, r"Staged\(done\)"
    yield sk.load(state, tmp_path / "ck"), rf"loaded {tmp_path}/ck: 1 tensor, 64 B in {TIME}"
    loaded = sk.load({**state, "x": 1}, tmp_path / "ck", strict=False, exclude="step")
    yield loaded, rf"loaded {tmp_path}/ck: 1 tensor, 64 B in {TIME}, 1 missing"
    opened = sk.open(tmp_path / "ck")
    yield opened, rf"<Checkpoint {tmp_path}/ck: 1 tensor, 1 value, 64 B, saved \S+ by 1 rank>"
    yield opened["model.w"], r"<StoredTensor 'model.w': float32\(16,\)>"
    yield opened.verify(), rf"read all of 1 file, {SIZE} in {TIME}: no damage found"
    yield opened.verify(deep=False), rf"checked sizes and headers of 1 file, {SIZE} in {TIME}: no damage found"
    yield (
        sk.convert(tmp_path / "ck", tmp_path / "sf", "safetensors"),
        rf"wrote {tmp_path}/sf: 1 tensor, {SIZE} in {TIME}",
    )
    uncompared = rf"read all of 1 file, {SIZE} in {TIME}: no damage found; 1 file had nothing to compare with"
    yield sk.export(tmp_path / "ck", tmp_path / "hf"), rf"wrote {tmp_path}/hf: 1 tensor, {SIZE} in {TIME}"
    yield sk.open(tmp_path / "hf").verify(), uncompared
    with sk.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore_latest(state) == 1
        yield checkpointer, r"Checkpointer\('.*/run'\)"
        yield checkpointer.last_restore, rf"step 1: loaded {tmp_path}/run/step-1: 1 tensor, 64 B in {TIME}"
    catalog = sk.Catalog(tmp_path / "run")
    yield catalog, r"Catalog\('.*/run'\)"
    yield catalog.latest(), rf"step-1, committed, {SIZE}, saved \d+-\d+-\d+ \S+ UTC"
    yield sk.MemoryStore("memory://x"), r"MemoryStore\('memory://x'\)"


def test_what_one_sees_at_a_prompt_is_one_line(tmp_path):
    """Reports, handles and checkpoints are short, in units that fit; those with fields are tables in a notebook."""
    tables = 0
    for each, said in shown(tmp_path):
        assert re.fullmatch(said, str(each)), str(each)
        assert repr(each) in (str(each), f"<{type(each).__name__}: {each}>")
        if hasattr(each, "_repr_html_"):
            table = each._repr_html_()
            assert table.count("<tr>") > 0
            assert "Span(" not in table
            tables += 1
    assert tables == 13


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (0.00004, "40 µs"),
        (0.07, "70 ms"),
        (0.9996, "1.00 s"),
        (61.25, "61.2 s"),
        (750, "12.5 min"),
        (9e3, "2.50 h"),
    ],
)
def test_times_are_in_units_that_fit(seconds, text):
    assert format_seconds(seconds) == text
