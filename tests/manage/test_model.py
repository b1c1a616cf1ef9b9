"""
A Checkpointer against a simple model of what must exist, through random sequences of saves, failures, crashes, damage,
restores, takeovers and wrong clocks.

The model knows which checkpoints there are, what is in them and how old they are. It is compared after every rule with
what is on disk, read without a Catalog: the commit records, and the values by `sk.open`.
"""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import shardkeep as sk
from shardkeep.manage.schedule import Clock
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import FaultyStore, InjectedCrash
from tests.manage.scene import OPTIONS, checkpointer

RECORD = "shardkeep.json"
AHEAD = st.integers(-1, 3)
"""Of where a job is."""
LOSSES = st.sampled_from([None, 0.0, 1.0, 2.0, 3.0, math.nan, math.inf])
CHANGES = ("create", "write_at", "finish", "put", "delete")


class View:
    """A root as one job sees it: its disk can fail in places, and the job can die, after which it does nothing more."""

    def __init__(self, inner):
        self.inner = inner
        self.url = inner.url
        self.fault = None
        """What strikes the next save, and in which of its operations."""
        self.dead = False
        self.struck = False
        self.commits = 0
        """Records that were put."""

    def place(self, name):
        return _Place(self, self.inner.place(name))

    def __getattr__(self, verb):
        if self.dead:
            raise InjectedCrash(verb)
        return getattr(self.inner, verb)


class _Place(FaultyStore):
    def __init__(self, view, inner):
        self._view = view
        kind, at = view.fault or ("error", None)
        # What cannot be deleted fails no save.
        super().__init__(inner, kind, at=at, verbs=CHANGES if kind == "crash" else CHANGES[:-1])

    def begin(self, verb, name):
        if self._view.dead:
            raise InjectedCrash(verb)
        try:
            fault = super().begin(verb, name)
        except BaseException:
            self._view.struck = True
            self._view.dead = self._view.dead or self.crashed
            raise
        self._view.struck = self._view.struck or fault is not None
        return fault

    def put(self, name, data, **how):
        super().put(name, data, **how)
        self._view.commits += name == RECORD


@dataclass
class Made:
    """A checkpoint that is committed."""

    step: int
    value: int
    loss: float | None
    timeline: int
    pinned: bool = False
    rotten: bool = False
    """Its data are damaged, which only who reads them finds out."""
    began: tuple[int, int] | None = None
    """After which timeline and step its own began."""

    @property
    def age(self):
        return self.timeline, self.step


@dataclass
class Job:
    """What the model knows of the Checkpointer at work."""

    ckpt: sk.Checkpointer
    view: View
    keep: dict[str, Any]
    now: list[timedelta]
    restored: Made | None = None
    timeline: int | None = None
    """Known after the first save."""
    began: tuple[int, int] | None = None
    highest: int | None = None
    """The step that it restored or tried to save last: steps go up."""
    last: int | None = None
    """The same, if that went well."""
    saved: set[int] = field(default_factory=set)
    distrusted: set[int] = field(default_factory=set)
    holds: bool = False
    """Whether it has the root: it has tried to save."""


def wanted(made, keep, off):
    """Say which steps are kept, by the words of the documentation."""
    order = newest_first(made)
    found = {each.step for each in order[:1]} | {each.step for each in made if each.pinned}
    if keep["keep_last"]:
        found |= {each.step for each in order[: keep["keep_last"]]}
    if keep["keep_every"]:
        found |= {each.step for each in made if each.step % keep["keep_every"] == 0}
    if keep["keep_best"]:
        _, count, mode = keep["keep_best"]
        best = ranked(made, mode)[:count]
        found |= {each.step for each in made if each.step in best or each.loss is None or not best}
    if keep["keep_hours"] and off < timedelta(hours=keep["keep_hours"]):
        found |= {each.step for each in made}
    if not any(keep.values()):
        found |= {each.step for each in made}
    return found


def newest_first(made):
    """Order checkpoints: those that the newest one came from, then those that were gone back from."""
    origins = {each.timeline: each.began for each in made}
    path = []
    age = (max(origins, default=0), math.inf)
    while age is not None:
        path += [each for each in made if each.timeline == age[0] and each.step <= age[1]]
        origin = origins.get(age[0])
        age = None if origin is None else (origin[0], min(age[1], origin[1]))
    return sorted(made, key=lambda each: (each in path, each.step if each in path else 0, each.age), reverse=True)


def ranked(made, mode):
    known = [each for each in made if each.loss is not None and not math.isnan(each.loss)]
    known.sort(key=lambda each: each.age, reverse=True)
    known.sort(key=lambda each: each.loss or 0.0, reverse=mode == "max")
    return [each.step for each in known]


class Machine(RuleBasedStateMachine):
    """Jobs on one root, one after the other."""

    def __init__(self):
        super().__init__()
        self.root = MemoryStore()
        self.made = {}
        self.garbled = set()
        """Steps whose record is unreadable."""
        self.pointer = None
        self.goes_back = False
        """Whether a job has begun a timeline: until it has saved, the pointer may be gone."""
        self.count = 0
        self.read = {}
        self.job: Job

    # -- jobs --------------------------------------------------------------------------------------------------------

    @initialize(data=st.data())
    def first_job(self, data):
        self.job = self.begin(data)

    def begin(self, data, *, takeover=False):
        keep = {
            "keep_last": data.draw(st.sampled_from([None, 1, 2, 3]), "keep_last"),
            "keep_every": data.draw(st.sampled_from([None, None, 5]), "keep_every"),
            "keep_best": data.draw(st.sampled_from([None, ("loss", 1, "min"), ("loss", 2, "max")]), "keep_best"),
            "keep_hours": data.draw(st.sampled_from([None, None, 1.0]), "keep_hours"),
        }
        view, off = View(self.root), [timedelta(0)]
        ckpt = checkpointer(
            view,
            **keep,
            asynchronous=data.draw(st.booleans(), "asynchronous"),
            max_in_flight=data.draw(st.sampled_from([1, 2]), "max_in_flight"),
            takeover=takeover,
            retries=0,
            clock=Clock(sleep=lambda _: None, interval_s=0.0, now=lambda: datetime.now(timezone.utc) + off[0]),
        )
        return Job(ckpt, view, keep, off)

    @rule(data=st.data())
    def next_job(self, data):
        """The job ends, and another one begins."""
        self.job.ckpt.close()
        assert not (self.job.holds and self.is_held())
        self.job = self.begin(data)

    def ahead(self, by):
        """Name a step so far from where the job is, or from the newest where it is nowhere."""
        newest = max((each.age for each in self.made.values()), default=(0, -1))[1]
        return max(0, by + (newest if self.job.highest is None else self.job.highest))

    def any_step(self, data):
        return data.draw(st.sampled_from([*sorted({*self.made, *self.garbled}), 99]), "step")

    @rule(data=st.data(), by=AHEAD, at=st.integers(0, 14), resumes=st.booleans())
    def crash(self, data, by, at, resumes):
        """The process dies in a save, at some operation, or after it; another one goes on."""
        self.job.view.fault = "crash", at
        self.save(self.ahead(by), None)
        self.bury(self.job)
        self.job = self.begin(data)
        if resumes:
            self.restore_latest()

    def bury(self, job):
        """Make a job as dead as one whose process was killed."""
        job.view.dead = True
        with suppress(BaseException):
            job.ckpt.close()  # its threads end; nothing reaches the root
        with suppress(sk.BlobNotFound):
            holder = json.loads(self.root.get("lease.json", limit=4096))
            self.root.put("lease.json", json.dumps({**holder, "started": "long ago"}).encode(), replace=True)

    @rule(data=st.data(), by=AHEAD)
    def takeover(self, data, by):
        """Another job is refused the root, then takes it over; the first one saves and deletes no more."""
        old, step = self.job, self.ahead(by)
        if old.holds:
            second = sk.Checkpointer(View(self.root), options=OPTIONS)
            with pytest.raises(sk.RootInUse, match="this process itself"):
                second.save(99, state_of(0))
            second.close()
        self.job = self.begin(data, takeover=True)
        self.restore_latest()
        self.save(step, None)
        if not self.job.holds:  # the step was refused before anything was tried
            self.save(self.ahead(1), None)
        if old.holds:
            old_error = attempt(old, 99, state_of(0), {})
            assert isinstance(old_error, sk.LeaseLost), old_error
        old.ckpt.close()
        assert self.is_held()

    @rule(hours=st.sampled_from([0, 10, -10, 10_000]))
    def clock_jumps(self, hours):
        self.job.now[0] = timedelta(hours=hours)

    # -- saves -------------------------------------------------------------------------------------------------------

    @rule(by=AHEAD, loss=LOSSES, overwrite=st.booleans())
    def save_one(self, by, loss, overwrite):
        self.save(self.ahead(by), loss, overwrite=overwrite)

    @rule(by=st.integers(1, 3), loss=LOSSES)
    def save_next(self, by, loss):
        """As training does."""
        self.save(self.ahead(by), loss)

    @rule(data=st.data(), loss=LOSSES)
    def save_again(self, data, loss):
        """A step that is there: a job that has gone back from it overwrites it, unless it is pinned."""
        there = [step for step in {*self.made, *self.garbled} if step >= (self.job.highest or 0)]
        if there:
            self.save(data.draw(st.sampled_from(sorted(there)), "again"), loss)

    @rule(by=AHEAD, kind=st.sampled_from(["full", "short", "error"]), at=st.integers(0, 10))
    def save_on_a_bad_disk(self, by, kind, at):
        self.job.view.fault = kind, at
        self.save(self.ahead(by), 1.0)

    @rule(by=st.integers(0, 3), asked=st.booleans())
    def step_when_asked(self, by, asked):
        """A file in the root asks for a save of the next step, which is not made if it is there."""
        step = self.ahead(by)
        if asked:
            self.root.put("save-now", b"", replace=True)
        self.save(step, None, by_step=True, due=asked and step != self.job.last)
        assert "save-now" not in {info.name for info in self.root.list()}

    def save(self, step, loss, *, overwrite=False, by_step=False, due=True):
        job, self.count = self.job, self.count + 1
        refused = self.refused(step, overwrite=overwrite) if due else None
        metrics = {} if loss is None else {"loss": loss}
        how = {"metrics": metrics, **({} if by_step else {"overwrite": overwrite})}
        commits = job.view.commits
        error = attempt(job, step, state_of(self.count), how, by_step=by_step)
        struck, job.view.struck, job.view.fault = job.view.struck, False, None
        made = Made(step, self.count, loss, job.timeline or 0, self.is_pinned(step), began=job.began)
        assert job.view.commits - commits <= (due and refused is None)
        if struck:
            assert isinstance(error, (sk.StorageError, InjectedCrash)), error
            if job.view.commits > commits:  # the process died after that
                assert isinstance(error, InjectedCrash)
                self.made[step] = made
                self.garbled.discard(step)
        elif refused is not None:
            passed_by = by_step and self.is_pinned(step)  # with a warning: training goes on
            assert isinstance(error, refused) or (passed_by and error is None), error
        else:
            assert error is None, error
            if due:
                self.committed(made)

    def refused(self, step, *, overwrite):
        """Find out, as the first save does, where the job is; and how a save must be refused."""
        job = self.job
        if job.highest is not None and step < job.highest:
            return sk.StateError
        job.holds = True
        if job.timeline is None:
            newest = max((each.timeline for each in self.made.values()), default=0)
            origins = {each.timeline: each.began for each in self.made.values()}
            if job.restored is None:
                if step <= max({*self.made, *self.garbled}, default=-1):
                    return sk.CheckpointExists
                job.timeline, job.began = newest, origins.get(newest)
            else:
                # What cannot be read may be the newest.
                there = [each.age for each in self.made.values()] + [(newest, each) for each in self.garbled]
                job.timeline, job.began = job.restored.timeline, origins.get(job.restored.timeline)
                if any(age > job.restored.age for age in there):
                    job.timeline, job.began, self.goes_back = newest + 1, job.restored.age, True
        job.highest, job.last = step, None
        goes_back = job.restored is not None and step > job.restored.step and step not in job.saved
        may = overwrite or (goes_back and not self.is_pinned(step))
        return sk.CheckpointExists if (step in self.made or step in self.garbled) and not may else None

    def committed(self, made):
        """A save succeeded: it is pointed to, and what no policy wants is deleted."""
        job = self.job
        self.made[made.step] = made
        self.garbled.discard(made.step)
        job.saved.add(made.step)
        job.last = made.step
        job.distrusted.discard(made.step)
        self.pointer, self.goes_back = made.step, False
        trusted = [each for each in self.made.values() if each.step not in job.distrusted]
        kept = wanted(trusted, job.keep, job.now[0]) | {made.step} | job.distrusted
        self.made = {step: each for step, each in self.made.items() if step in kept}

    # -- restores ----------------------------------------------------------------------------------------------------

    @rule()
    def restore_latest(self):
        newest = max((each.timeline for each in self.made.values()), default=0)
        # One whose record is unreadable may be of any timeline, and counts as of the newest.
        origin = next((each.began for each in self.made.values() if each.timeline == newest), None)
        unread = [Made(step, -1, None, newest, began=origin) for step in self.garbled]
        order = newest_first([*self.made.values(), *unread])
        self.restore([(each.step, None if each in unread else each) for each in order], self.job.ckpt.restore_latest)

    @rule(mode=st.sampled_from(["min", "max"]))
    def restore_best(self, mode):
        order = [(step, self.made[step]) for step in ranked(list(self.made.values()), mode)]
        assert self.job.ckpt.best_step("loss", mode) == (order[0][0] if order else None)
        if self.made and not order:
            with pytest.raises(sk.CheckpointNotFound, match=r"no checkpoint has (the metric|a number for) 'loss'"):
                self.job.ckpt.restore_best(blank(), "loss", mode)
            return
        self.restore(order, lambda state: self.job.ckpt.restore_best(state, "loss", mode))

    @rule(data=st.data())
    def restore_step(self, data):
        step = self.any_step(data)
        if step not in self.made and step not in self.garbled:
            with pytest.raises(sk.CheckpointNotFound):
                self.job.ckpt.restore(step, blank())
            return
        self.restore([(step, self.made.get(step))], lambda state: self.job.ckpt.restore(step, state))

    def restore(self, order, restoring):
        state, job = blank(), self.job
        good = next((row for row, (_, each) in enumerate(order) if each is not None and not each.rotten), None)
        if not order:
            assert restoring(state) is None
        elif good is None:
            with pytest.raises(sk.DamagedCheckpoint):
                restoring(state)
        else:
            made = order[good][1]
            assert restoring(state) == made.step
            assert value_of(state) == made.value
            job.restored, job.timeline, job.saved = made, None, set()
            job.highest = job.last = made.step
            job.distrusted = {step for step, _ in order[:good]}
            assert [each.step for each in job.ckpt.last_restore.skipped] == [step for step, _ in order[:good]]

    # -- what happens to checkpoints ---------------------------------------------------------------------------------

    @rule(data=st.data())
    def pin(self, data):
        if (step := self.any_step(data)) in self.made:
            self.job.ckpt.pin(step)
            self.made[step].pinned = True
        else:
            with pytest.raises(sk.CheckpointNotFound):
                self.job.ckpt.pin(step)

    @rule(data=st.data())
    def unpin(self, data):
        step = self.any_step(data)
        self.job.ckpt.unpin(step)
        if step in self.made:
            self.made[step].pinned = False

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def tear(self, data):
        """A record is lost: there is no checkpoint any more."""
        step = data.draw(st.sampled_from(sorted(self.made)), "torn")
        self.root.place(f"step-{step}").delete(RECORD)
        del self.made[step]

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def rot(self, data):
        step = data.draw(st.sampled_from(sorted(self.made)), "rotten")
        if not self.made[step].rotten:
            self.flip(step, ".safetensors")
            self.made[step].rotten = True

    @precondition(lambda self: self.made)
    @rule(loss=LOSSES)
    def resume_from_the_one_before(self, loss):
        """The newest is found to be damaged, and is made again."""
        step = newest_first(list(self.made.values()))[0].step
        if not self.made[step].rotten:
            self.flip(step, ".safetensors")
            self.made[step].rotten = True
        self.restore_latest()
        self.save(max(step, self.job.highest or 0), loss)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def garble(self, data):
        step = data.draw(st.sampled_from(sorted(self.made)), "garbled")
        self.flip(step, RECORD)
        del self.made[step]
        self.garbled.add(step)

    def flip(self, step, ending):
        store = self.root.place(f"step-{step}")
        # A save that crashed may have left a file of its own, which is no part of the checkpoint.
        ours = dict(self.on_disk())[step]["save_id"] + ending if ending != RECORD else RECORD
        name = next(info.name for info in store.list() if info.name.endswith(ours))
        data = bytearray(store.get(name, limit=1 << 20))
        data[-9] ^= 1
        store.put(name, bytes(data), replace=True)

    # -- comparison --------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_there_is_what_must_be(self):
        found = dict(self.on_disk())
        assert {step: record["meta"].get("timeline", 0) for step, record in found.items()} == {
            step: made.timeline for step, made in self.made.items()
        }
        for step, record in found.items():
            made = self.made[step]
            loss = record["meta"].get("metrics", {}).get("loss")
            assert (None if loss is None else str(float(loss))) == (None if made.loss is None else str(made.loss))
            if not made.rotten:
                assert self.value_in(step, record["save_id"]) == made.value
        if hasattr(self, "job"):
            newest = max(self.made.values(), key=lambda each: each.age, default=None)
            assert self.job.ckpt.all_steps() == sorted(self.made)
            assert self.job.ckpt.latest_step() == (newest.step if newest else None)
        pointer = next((self.root.get("latest", limit=99) for info in self.root.list() if info.name == "latest"), b"")
        due = "" if self.pointer is None else f"step-{self.pointer}\n"
        assert pointer.decode() == due or (self.goes_back and not pointer)

    def on_disk(self):
        for name in self.root.places():
            blobs = {info.name for info in self.root.place(name).list()}
            if RECORD in blobs:
                data = self.root.place(name).get(RECORD, limit=1 << 20)
                body, _, rest = data.rpartition(b',\n  "checksum":')
                if rest == f' "xxh3_128:{xxhash.xxh3_128(body).hexdigest()}"\n}}\n'.encode():
                    yield int(name.removeprefix("step-")), json.loads(data)

    def value_in(self, step, save_id):
        if save_id not in self.read:
            self.read[save_id] = value_of(sk.open(self.root.place(f"step-{step}")).to_dict())
        return self.read[save_id]

    def is_held(self):
        there = "lease.json" in {info.name for info in self.root.list()}
        return there and not json.loads(self.root.get("lease.json", limit=4096))["released"]

    def is_pinned(self, step):
        return f"pin.step-{step}" in {info.name for info in self.root.list()}

    def teardown(self):
        if hasattr(self, "job"):
            with suppress(InjectedCrash):  # it may have died in the background since the last look
                self.job.ckpt.close()


def state_of(value):
    return {"w": torch.full((8,), float(value)), "value": value}


def blank():
    return {"w": torch.zeros(8), "value": 0}


def value_of(state):
    value = state["value"]
    assert torch.equal(state["w"], state_of(value)["w"])
    return value


def attempt(job, step, state, how, *, by_step=False):
    try:
        saved = job.ckpt.step(step, state, **how) if by_step else job.ckpt.save(step, state, **how)
        job.ckpt.wait()
    except sk.EarlierSaveFailed as error:
        return error.__cause__
    except (sk.CheckpointError, InjectedCrash) as error:
        return error
    if isinstance(saved, sk.SaveHandle):
        return saved.exception()
    return None


TestCheckpointerAgainstItsModel = Machine.TestCase
TestCheckpointerAgainstItsModel.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
