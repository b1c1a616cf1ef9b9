"""Compares what is on disk with what was acknowledged to the ranks of a soak, and with what shardkeep lists."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import shardkeep as sk
from tests.soak.contents import Kind, bits
from tests.soak.decoding import Broken, insist
from tests.soak.ledger import Ledger, Made, best_of, kept, made_by
from tests.soak.places import Ground, Look
from tests.soak.reader import Found, read

_SLACK = 3
"""Places that a job may leave behind: what it was writing, and what it was removing."""


class Damage(Exception):
    """A promise was broken; says which."""


_OF_A_SAVE = re.compile(r"-[0-9a-f]{20}\.")


class Checker:
    """Looks at a root after each round."""

    def __init__(
        self,
        ground: Ground,
        ledger: Ledger,
        kinds: dict[str, Kind],
        *,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Compare a root with what ranks wrote down."""
        self._ground = ground
        self._ledger = ledger
        self._kinds = kinds
        self._options = options or {}
        self._environment = environment or {}
        self._known: dict[tuple[object, ...], Found] = {}
        self.bytes_read = 0
        self.checkpoints_read = 0
        self.most_places = 0
        self.uploads_seen = 0

    def check(self, *, tidy: bool, died_since_tidy: int = 0, afresh: bool = False) -> list[Made]:
        """
        Check everything, what was read before only if `afresh`; return what is committed, the newest first.

        `tidy`: the last job ended well, so nothing is there but what is kept. Otherwise `died_since_tidy` jobs may have left
        something behind.
        """
        self._ledger.update()
        if afresh:
            self._known = {}
        look = self._ground.look()
        filled = [place for place, files in look.places.items() if files]  # a save that fails leaves an empty directory
        self.most_places = max(self.most_places, len(filled))
        self.uploads_seen += len(look.uploads)
        found = {place: each for place in look.places if (each := self._exact(place, look)) is not None}
        on_disk = {each.save_id: _made(each) for each in found.values()}
        self._nothing_lost(on_disk)
        self._same_as_we_say(found)
        if afresh:
            self._same_as_the_command_says(found)
        wanted, allowed = kept([*{**self._ledger.acked, **on_disk}.values()])
        if len(filled) > len(wanted) + _SLACK * (1 + died_since_tidy):
            raise Damage(f"{len(filled)} places are there, {len(wanted)} are wanted, {died_since_tidy} jobs died")
        if tidy:
            self._tidy(look, found, set(on_disk.values()), wanted, allowed)
        return sorted(on_disk.values(), key=lambda each: each.age, reverse=True)

    def note(self, path: Path) -> None:
        """Write down all that is there: a bucket goes with its server."""
        look = self._ground.look()
        about = {"url": self._ground.url, "files": sorted(look.files), "places": look.places, "uploads": look.uploads}
        path.write_text(json.dumps(about, indent=1, default=str))

    @property
    def _root(self) -> Any:
        return sk.open_place(self._ground.url, **self._options)

    def _exact(self, place: str, look: Look) -> Found | None:
        """Read a checkpoint unless it was read before and nothing in its place has changed since."""
        try:
            key = (place, *sorted(look.places[place].items()))
            if key not in self._known:
                found = read(self._ground, place, self._kinds)
                if found is None:
                    return None
                _insist_exact(place, found, self._kinds)
                self._known[key] = replace(found, tensors={})  # megabytes, for hours
                self.bytes_read += found.nbytes
                self.checkpoints_read += 1
        except Broken as broken:
            raise Damage(f"a committed checkpoint is not whole: {broken}") from broken
        return self._known[key]

    def _nothing_lost(self, on_disk: dict[str, Made]) -> None:
        """Insist that all is there that was acknowledged and is to be kept."""
        by_step = {each.step: each for each in on_disk.values()}
        wanted, _ = kept([*self._ledger.acked.values(), *on_disk.values()])
        for each in wanted:
            if each.save_id in on_disk:
                continue
            there = by_step.get(each.step)
            if there is None or not self._ledger.replaced(each, there):
                raise Damage(f"{each} was acknowledged, is to be kept, and is not there; its place has {there}")

    def _same_as_we_say(self, found: dict[str, Found]) -> None:
        """Insist that what is not committed is not seen, and what is committed is."""
        steps = sorted(each.step for each in found.values())
        catalog = [entry for entry in sk.Catalog(self._root).entries() if entry.committed]
        said = sorted(entry.step for entry in catalog), sk.Checkpointer(self._root).all_steps()
        if said != (steps, steps):
            raise Damage(f"steps {steps} are committed, and shardkeep sees {said}")
        newest = max(found.values(), key=lambda each: _made(each).age, default=None)
        latest = sk.Checkpointer(self._root).latest_step()
        if latest != (newest.step if newest else None):
            raise Damage(f"the newest is {newest and newest.step}, and shardkeep says {latest}")

    def _same_as_the_command_says(self, found: dict[str, Found]) -> None:
        command = [sys.executable, "-m", "shardkeep.cli.main", "ls", "--json", self._ground.url]
        environment = {**os.environ, **self._environment}
        done = subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
        listed = (each["name"] for each in json.loads(done.stdout)["checkpoints"] if each["status"] == "committed")
        _same("shardkeep ls", listed, found)

    def _tidy(
        self, look: Look, found: dict[str, Found], on_disk: set[Made], wanted: set[Made], allowed: set[Made]
    ) -> None:
        """Insist that nothing is left of the dead, and of what no policy wants."""
        there = {each.step for each in on_disk}
        _same("checkpoints", there, there & {each.step for each in allowed | best_of(on_disk)})
        _same("checkpoints", there & {each.step for each in wanted}, {each.step for each in wanted})
        _same("places", look.places, found)
        for place, each in found.items():
            _same(f"files of {place}", look.places[place], each.files)
        _same("files of the root", look.files - self._released(), {"latest"})
        # What a living save lost (it was begun twice, as an answer did not come, or its end did not arrive) stays for a
        # day, because it looks like a copy that another program makes.
        _same("abandoned uploads", [each for each in look.uploads if not _OF_A_SAVE.search(each)], ())
        newest = max(on_disk, key=lambda each: each.age)
        _same("latest", {(self._ground.get("latest") or b"").decode()}, {f"step-{newest.step}\n"})

    def _released(self) -> set[str]:
        """Name the lease, where it says that it is free: it stays for whom it was taken from, who may come back."""
        lease = self._ground.get("lease.json")
        return {"lease.json"} if lease and json.loads(lease)["released"] else set()


def _same(what: str, there: Iterable[object], wanted: Iterable[object]) -> None:
    there, wanted = set(there), set(wanted)
    if there != wanted:
        raise Damage(
            f"{what}: too many: {sorted(map(str, there - wanted))}, missing: {sorted(map(str, wanted - there))}"
        )


def _made(found: Found) -> Made:
    meta = found.meta
    return made_by(meta["job"], found.step, found.save_id, meta.get("timeline", 0), meta.get("timeline_began_after"))


def _insist_exact(place: str, found: Found, kinds: dict[str, Kind]) -> None:
    """Compare every bit with what was to be saved."""
    job, step = found.meta["job"], found.step
    insist(place == f"step-{step}", f"{place} holds step {step}")
    insist(found.values == {"job": job, "step": step}, f"{place}: the values are {found.values}, of job {job}")
    for key in kinds:
        insist(np.array_equal(found.tensors[key], bits(key, job, step)), f"{place}: {key} is not what job {job} saved")
