"""What the ranks of all jobs wrote down, and what must be on disk if they are to be believed."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak.contents import loss
from tests.soak.job import KEEP_BEST, KEEP_EVERY, KEEP_LAST


@dataclass(frozen=True)
class Made:
    """A checkpoint that was committed at some time."""

    step: int
    job: int
    save_id: str
    timeline: int
    began: tuple[int, int] | None = None
    """After which timeline and step its own began."""

    @property
    def age(self) -> tuple[int, int]:
        """What they are ordered by, the newest last."""
        return self.timeline, self.step


def made_by(job: int, step: int, save_id: str, timeline: int, began: Sequence[int] | None) -> Made:
    """Say what a record, or a rank, says."""
    return Made(step, job, save_id, timeline, None if began is None else (began[0], began[1]))


class Ledger:
    """Reads what ranks write down, as far as they have come."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._read: Counter[Path] = Counter()
        self.acked: dict[str, Made] = {}
        """The saves that were acknowledged to any rank, by save id."""
        self.restored: dict[int, int] = {}
        """The step that each job went on from."""
        self.begun: set[tuple[int, int]] = set()
        """Jobs and steps."""
        self.faults: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        """One message of each kind of error."""

    def update(self) -> None:
        """Read what is new."""
        for path in sorted(self._logs.glob("job-*.jsonl")):
            data = path.read_bytes()[self._read[path] :]
            whole = data[: data.rfind(b"\n") + 1]  # the last line of one who was killed
            self._read[path] += len(whole)
            job = int(path.name.split("-")[1])
            for line in whole.splitlines():
                self._take(job, json.loads(line))

    def pids(self, job: int, steps: int = 0) -> dict[int, int]:
        """Say which processes are the ranks of a job that have begun so many steps."""
        found = {}
        for path in self._logs.glob(f"job-{job:05d}-rank-*.jsonl"):
            lines = path.read_bytes().split(b"\n")[:-1]
            if lines and sum(b'"what": "step"' in line for line in lines) >= steps:
                first = json.loads(lines[0])
                found[first["rank"]] = first["pid"]
        return found

    def _take(self, job: int, line: dict[str, Any]) -> None:
        what = line["what"]
        if what == "ack" and (line["timeline"] is not None or line["save_id"] not in self.acked):
            save_id = line["save_id"]
            self.acked[save_id] = made_by(job, line["step"], save_id, line["timeline"] or 0, line["began"])
        elif what == "restored":
            self.restored[job] = line["step"] or 0
        elif what == "step":
            self.begun.add((job, line["step"]))
        elif what == "fault":
            self.faults[line["kind"]] += 1
        elif what in ("failed", "ended") and line["error"]:
            self.errors[f"{what} {line['error']}"] += 1
            self.texts[line["error"]] = line["text"]

    def replaced(self, old: Made, new: Made) -> bool:
        """Say whether a job could rightly overwrite a checkpoint: a later job, that went on from an earlier step."""
        return new.job > old.job and new.step == old.step and self.restored.get(new.job, 0) < old.step


def kept(made: Iterable[Made]) -> tuple[set[Made], set[Made]]:
    """
    Say which checkpoints a root must keep, of those that it ever had; and which it may keep.

    What was gone back from is older than what the newest came from, as far as the records that are still there tell how
    it came about. Where they no longer do, it is as old as it looks. The best are those of all that ever were: one that
    was overwritten since may have had another removed before.
    """
    made = list(made)
    last: dict[int, Made] = {}
    for each in sorted(made, key=lambda each: each.age):
        last[each.step] = each  # one of an older timeline was overwritten
    by_age = sorted(last.values(), key=lambda each: each.age, reverse=True)
    by_descent = _newest_first(by_age)
    always = {each for each in by_age if each in best_of(made) or each.step % KEEP_EVERY == 0}
    newest, nearest = set(by_age[:KEEP_LAST]), set(by_descent[:KEEP_LAST])
    return always | (newest & nearest), always | newest | nearest


def best_of(made: Iterable[Made]) -> set[Made]:
    """Say which of these have the least loss."""
    return set(sorted(set(made), key=lambda each: loss(each.job, each.step))[:KEEP_BEST])


def _newest_first(by_age: list[Made]) -> list[Made]:
    """Put what the newest came from before what was gone back from."""
    origins = {each.timeline: each.began for each in by_age}
    ancestors: set[Made] = set()
    end: tuple[int, float] | None = (max(origins, default=0), math.inf)
    while end is not None:
        timeline, step = end
        ancestors |= {each for each in by_age if each.timeline == timeline and each.step <= step}
        origin = origins.get(timeline)
        end = None if origin is None else (origin[0], min(step, origin[1]))
    return sorted(by_age, key=lambda each: each not in ancestors)
