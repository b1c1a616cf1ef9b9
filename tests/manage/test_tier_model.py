"""
Two roots against a simple model, through random sequences of saves, failures of either store, damage, lost disks, new
jobs and going back.

The model knows which save of which step was last seen to be whole in which root. What it insists on: whatever a root
says is committed is bit for bit what was saved; a restore gives the newest checkpoint of which there is a whole copy, from
the nearest root that has one; and once nothing fails, the far root has all that is to be there.
"""

import json
from contextlib import suppress

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import shardkeep as sk
from shardkeep.errors import NearCopyDamaged, NotPromoted
from shardkeep.manage.retention import KeepAll, KeepLast
from tests.manage.scene import Broken, FarRoot, checkpointer

RECORD = "shardkeep.json"
VERBS = st.sampled_from(["create", "write_at", "finish", "put", "list", "version", "open", "read_into"])
PICKS = st.integers(0, 99)
"""Of what is there then: which steps are promoted before they are deleted may depend on threads."""
ROOTS = st.sampled_from(["near", "far"])


def state_of(value):
    return {"a": {"w": torch.full((8,), float(value))}, "b": {"w": torch.full((5,), float(-value))}, "value": value}


class TwoRoots(RuleBasedStateMachine):
    """Jobs, one after the other, that save to a near root and promote to a far one."""

    def __init__(self):
        super().__init__()
        self.roots = {"near": FarRoot(), "far": FarRoot()}
        self.value = 0
        self.saved = {}
        """Values by the id of their save."""
        self.rotten = set()
        """Roots and saves in it that are damaged."""
        self.ckpt = None
        self.begun = False
        """Whether this job has saved since it restored: before, it has to see all that is in both roots."""
        self.at = 0

    @initialize(keep=st.sampled_from([None, 1, 2]), far_keep=st.sampled_from([None, 1, 3]), required=st.booleans())
    def first(self, keep, far_keep, required):
        far_policy = KeepLast(far_keep) if far_keep else KeepAll()
        self.how = {"keep_last": keep, "keep_promoted": far_policy, "promote_required": required}
        self.begin()

    def begin(self):
        """A new job restores the newest there is."""
        if self.ckpt is not None:
            with suppress(sk.CheckpointError):
                self.ckpt.close()
        far = self.roots["far"]
        self.ckpt = checkpointer(self.roots["near"], promote_to=far, asynchronous=False, retries=0, **self.how)
        self.begun = False
        self.restore()

    def wait(self):
        """Nothing fails but what is damaged."""
        said = None
        try:
            self.ckpt.wait()
        except NotPromoted as error:
            said = error.__cause__
        assert said is None or (isinstance(said, NearCopyDamaged) and any(root == "near" for root, _ in self.rotten))

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(by=st.integers(1, 2), waits=st.booleans())
    def save(self, by, waits):
        self.value += 1
        self.at += by
        with suppress(sk.EarlierSaveFailed):
            self.ckpt.save(self.at, state_of(self.value))
        self.begun = True
        self.saved[self.record("near", self.at)["save_id"]] = self.value
        if waits:
            self.wait()
            self.all_is_promoted()

    @rule(verb=VERBS, by=st.integers(1, 2), closes=st.booleans())
    def save_while_the_far_root_fails(self, verb, by, closes):
        """Whatever becomes of the promotion, the save is safe."""
        self.wait()
        self.roots["far"].before = Broken(verb)
        try:
            try:
                self.save(by, waits=False)
            except sk.StorageError:
                assert not self.begun
                self.at -= by
            with suppress(sk.EarlierSaveFailed):
                self.ckpt.wait()
            if closes:
                with suppress(sk.CheckpointError):
                    self.ckpt.close()
        finally:
            self.roots["far"].before = None
        if closes:
            self.begin()

    @rule()
    def next_job(self):
        self.begin()

    @rule(pick=PICKS, root=ROOTS)
    def rot(self, pick, root):
        self.wait()
        there = sorted(step for step, _ in self.records(root))
        if there:
            step = there[pick % len(there)]
            record = self.record(root, step)
            store = self.roots[root].inner.place(f"step-{step}")
            name = record["files"][pick % len(record["files"])]["name"]
            blob = bytearray(store.get(name, limit=1 << 20))
            if (root, record["save_id"]) not in self.rotten:
                blob[-3] ^= 1
                store.put(name, bytes(blob), replace=True)
                self.rotten.add((root, record["save_id"]))

    @rule()
    def the_near_disk_is_lost(self):
        with suppress(sk.CheckpointError):
            self.ckpt.close()
        self.roots["near"] = FarRoot()
        self.rotten = {each for each in self.rotten if each[0] == "far"}
        self.begin()

    @rule(pick=PICKS)
    def go_back(self, pick):
        """To any step of which there is a whole copy of the newest save."""
        self.wait()
        whole = sorted({step for step in self.steps() if self.copies(step)})
        if whole:
            step, state = whole[pick % len(whole)], state_of(0)
            self.ckpt.restore(step, state)
            self.check_restored(step, state)
            self.at, self.begun = step, False

    def restore(self):
        state, self.at = state_of(0), 0
        try:
            found = self.ckpt.restore_latest(state)
        except sk.DamagedCheckpoint:  # there are some, and all are damaged: people begin elsewhere
            assert not any(self.copies(step, any_save=True) for step in self.steps())
            self.ckpt.close()
            self.roots, self.rotten, self.ckpt = {"near": FarRoot(), "far": FarRoot()}, set(), None
            self.begin()
            return
        if found is None:
            assert not self.steps()
        else:
            self.check_restored(found, state)
            self.at = found

    # -- what must be ------------------------------------------------------------------------------------------------

    def check_restored(self, step, state):
        """It is what was saved, and from the nearest root that has a whole copy of it."""
        value = state["value"]
        assert all(torch.equal(state[key]["w"], state_of(value)[key]["w"]) for key in "ab")
        found = self.ckpt.last_restore
        holders = [
            root
            for root in ("near", "far")
            for at, record in self.records(root)
            if at == step and self.saved[record["save_id"]] == value and (root, record["save_id"]) not in self.rotten
        ]
        assert found.where == self.roots[holders[0]].url

    def all_is_promoted(self):
        """The newest near checkpoint is in the far root, as that save or a newer one, unless it is damaged."""
        near = dict(self.records("near"))
        record = near[self.at]
        if ("near", record["save_id"]) not in self.rotten:
            assert self.record("far", self.at)["save_id"] >= record["save_id"]
        for root in ("near", "far"):
            blobs = [name for step, _ in self.records(root) for name in self.roots[root].names(f"step-{step}")]
            assert not [name for name in blobs if name.startswith("claim-")]

    @invariant()
    def what_is_committed_is_what_was_saved(self):
        if self.ckpt is None:
            return
        for root in ("near", "far"):
            for step, _ in list(self.records(root)):
                # One may be deleted or replaced just now, as promotions go on.
                with suppress(sk.CheckpointNotFound, sk.WrongSize):
                    opened = sk.open(self.roots[root].inner.place(f"step-{step}"))
                    save_id = opened.record.save_id
                    if (root, save_id) in self.rotten:
                        continue
                    found = opened.to_dict()
                    assert found["value"] == self.saved[save_id]
                    assert all(torch.equal(found[key]["w"], state_of(found["value"])[key]["w"]) for key in "ab")

    # -- looking -----------------------------------------------------------------------------------------------------

    def records(self, root):
        inner = self.roots[root].inner
        for name in list(inner.places()):
            with suppress(sk.BlobNotFound):
                yield int(name.removeprefix("step-")), json.loads(inner.place(name).get(RECORD, limit=1 << 20))

    def record(self, root, step):
        return dict(self.records(root))[step]

    def steps(self):
        return {step for root in ("near", "far") for step, _ in self.records(root)}

    def copies(self, step, *, any_save=False):
        """Roots with a whole copy of the newest save of a step."""
        found = [(root, record) for root in ("near", "far") for at, record in self.records(root) if at == step]
        newest = max((record["meta"].get("timeline", 0), record["save_id"]) for _, record in found)[1]
        return [
            root
            for root, record in found
            if (any_save or record["save_id"] == newest) and (root, record["save_id"]) not in self.rotten
        ]

    def teardown(self):
        if self.ckpt is not None:
            with suppress(sk.CheckpointError):
                self.ckpt.close()


TestTwoRoots = TwoRoots.TestCase
TestTwoRoots.settings = settings(
    max_examples=15,
    stateful_step_count=15,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
