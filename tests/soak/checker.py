"""Compares what is on disk with what the ranks of a soak were told, and with what shardkeep says is there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import shardkeep as sk
from tests.soak.contents import TENSORS, bits
from tests.soak.ledger import Ledger, Made, kept, made_by
from tests.soak.reader import Broken, Found, insist, read

_SLACK = 3
"""Places that a job may leave behind: what it was writing, and what it was removing."""


class Damage(Exception):
    """A promise was broken; says which."""


class Checker:
    """Looks at a root after each round."""

    def __init__(self, root: Path, ledger: Ledger) -> None:
        self._root = root
        self._ledger = ledger
        self._known: dict[tuple[object, ...], Found] = {}
        self.bytes_read = 0
        self.checkpoints_read = 0
        self.most_places = 0

    def check(self, *, tidy: bool, died_since_tidy: int = 0, afresh: bool = False) -> list[Made]:
        """
        Check everything, and return what is committed, the newest first.

        Args:
            tidy: the last job ended well: nothing is there but what is kept.
            died_since_tidy: jobs since then that may have left something behind.
            afresh: read again what was read before.

        Raises:
            Damage: something is wrong.

        """
        self._ledger.update()
        if afresh:
            self._known = {}
        places = sorted(path for path in self._root.glob("step-*") if path.is_dir()) if self._root.exists() else []
        filled = [place for place in places if any(place.iterdir())]  # a save that fails leaves an empty directory
        self.most_places = max(self.most_places, len(filled))
        found = {place: each for place in places if (each := self._exact(place)) is not None}
        on_disk = {each.save_id: _made(each) for each in found.values()}
        self._nothing_lost(on_disk)
        self._same_as_we_say(found)
        if afresh:
            self._same_as_the_command_says(found)
        ever = {**self._ledger.acked, **on_disk}
        wanted, allowed = kept(ever.values())
        if len(filled) > len(wanted) + _SLACK * (1 + died_since_tidy):
            raise Damage(f"{len(filled)} places are there, {len(wanted)} are wanted, {died_since_tidy} jobs died")
        if tidy:
            self._tidy(places, found, set(on_disk.values()), wanted, allowed)
        return sorted(on_disk.values(), key=lambda each: each.age, reverse=True)

    def _exact(self, place: Path) -> Found | None:
        """Read a checkpoint unless it was read before and nothing in its place has changed since."""
        try:
            marks = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in place.iterdir())
            key = (place, *marks)
            if key not in self._known:
                found = read(place)
                if found is None:
                    return None
                _insist_exact(place, found)
                self._known[key] = found
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

    def _same_as_we_say(self, found: dict[Path, Found]) -> None:
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

    def _same_as_the_command_says(self, found: dict[Path, Found]) -> None:
        command = [sys.executable, "-m", "shardkeep.cli.main", "ls", "--json", str(self._root)]
        said = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
        listed = (each["name"] for each in said["checkpoints"] if each["status"] == "committed")
        _same("shardkeep ls", listed, (place.name for place in found))

    def _tidy(
        self, places: list[Path], found: dict[Path, Found], on_disk: set[Made], wanted: set[Made], allowed: set[Made]
    ) -> None:
        """Insist that nothing is left of the dead, and of what no policy wants."""
        there = {each.step for each in on_disk}
        _same("checkpoints", there, there & {each.step for each in allowed})
        _same("checkpoints", there & {each.step for each in wanted}, {each.step for each in wanted})
        _same("places", (place.name for place in places), (place.name for place in found))
        for place, each in found.items():
            _same(f"files of {place.name}", (path.name for path in place.iterdir()), each.files)
        _same("files of the root", (path.name for path in self._root.iterdir() if not path.is_dir()), {"latest"})
        newest = max(on_disk, key=lambda each: each.age)
        _same("latest", {(self._root / "latest").read_text()}, {f"step-{newest.step}\n"})


def _same(what: str, there: Iterable[object], wanted: Iterable[object]) -> None:
    there, wanted = set(there), set(wanted)
    if there != wanted:
        raise Damage(
            f"{what}: too many: {sorted(map(str, there - wanted))}, missing: {sorted(map(str, wanted - there))}"
        )


def _made(found: Found) -> Made:
    meta = found.meta
    return made_by(meta["job"], found.step, found.save_id, meta.get("timeline", 0), meta.get("timeline_began_after"))


def _insist_exact(place: Path, found: Found) -> None:
    """Compare every bit with what was to be saved."""
    job, step = found.meta["job"], found.step
    insist(place.name == f"step-{step}", f"{place} holds step {step}")
    insist(found.values == {"job": job, "step": step}, f"{place}: the values are {found.values}, of job {job}")
    for key in TENSORS:
        insist(np.array_equal(found.tensors[key], bits(key, job, step)), f"{place}: {key} is not what job {job} saved")
