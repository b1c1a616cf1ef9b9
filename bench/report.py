"""Formats samples as the table of a workload and compares them with the targets. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

OPS = {"save": "save (fresh directory)", "again": "load after the save", "cold": "load, page cache dropped"}
RAW = ("raw x1", "raw x2")
DCP = ("torch DCP x1", "torch DCP x2")
OURS = "shardkeep"
DROP_IN = "shardkeep.dcp"
BY_OURS = "load by shardkeep"


@dataclass(frozen=True)
class Sample:
    workload: str
    round: int
    contender: str
    op: str
    seconds: float
    cpu_s: float
    peak_extra_bytes: int
    resident: float
    """Part of the checkpoint that was in the page cache when the load began."""


@dataclass(frozen=True)
class Target:
    workload: str
    op: str
    against: tuple[str, ...]
    """Ours is compared with the fastest of these, round by round."""
    at_least: float
    ours: str = OURS


TARGETS = (
    Target("large", "save", RAW, 0.85),
    Target("large", "again", RAW, 0.6),
    Target("large", "cold", RAW, 0.85),
    Target("large", "save", DCP, 1.8),
    Target("large", "again", DCP, 3.5),
    Target("large", "cold", DCP, 2.5),
    Target("large", "save", DCP, 1.6, DROP_IN),
    Target("large", "again", DCP, 3, DROP_IN),
    Target("small", "save", DCP, 10),
    Target("small", "again", DCP, 10),
    Target("small", "cold", DCP, 10),
)


@dataclass(frozen=True)
class Verdict:
    what: str
    measured: float
    target: float
    unit: str
    ok: bool
    spread: tuple[float, float] | None = None

    def line(self) -> str:
        sign = ">=" if self.unit == "x" else "<="
        spread = f"({self.spread[0]:.2f} to {self.spread[1]:.2f})" if self.spread else ""
        numbers = f"{self.measured:8.2f} {self.unit:<3}  {spread}"
        return f"  {self.what:<38} {numbers:<34} {sign} {self.target:<4g}  {'ok' if self.ok else 'SHORT'}"


def judge(samples: Sequence[Sample], budget_bytes: int) -> list[Verdict]:
    """Compare with every target that these samples can answer."""
    verdicts = []
    for target in TARGETS:
        chosen = [s for s in samples if (s.workload, s.op) == (target.workload, target.op)]
        if ratios := _ratios(chosen, target.ours, target.against):
            ours = "ours" if target.ours == OURS else target.ours
            what = f"{target.workload} {target.op}: {ours} / {target.against[0].rsplit(' ', 1)[0]}"
            value = median(ratios)
            spread = (min(ratios), max(ratios))
            verdicts.append(Verdict(what, value, target.at_least, "x", value >= target.at_least, spread))
    for workload in ("large", "small"):
        for op in ("save", "load"):
            peaks = [
                s.peak_extra_bytes / 2**20
                for s in samples
                if (s.contender, s.workload) == (OURS, workload) and (s.op == "save") == (op == "save")
            ]
            if peaks:
                limit = budget_bytes / 2**20
                spread = (min(peaks), max(peaks))
                verdicts.append(
                    Verdict(f"{workload} {op}: peak memory", max(peaks), limit, "MiB", max(peaks) <= limit, spread)
                )
    return verdicts


def _ratios(samples: Iterable[Sample], name: str, against: tuple[str, ...]) -> list[float]:
    """How many times as fast as the best of `against` we were, one number a round."""
    theirs: dict[int, float] = {}
    ours: dict[int, float] = {}
    for sample in samples:
        if sample.contender in against:
            theirs[sample.round] = min(sample.seconds, theirs.get(sample.round, sample.seconds))
        elif sample.contender == name:
            ours[sample.round] = sample.seconds
    return [theirs[number] / ours[number] for number in sorted(theirs.keys() & ours.keys())]


def table(samples: Sequence[Sample], nbytes: int, not_durable: frozenset[str]) -> list[str]:
    """Lay one workload out, an operation at a time, in the order the contenders were given."""
    lines = []
    for op, title in OPS.items():
        lines.append(f"  {title:<28}   best    median   spread      GB/s   CPU s   peak MiB")
        for name in dict.fromkeys(s.contender for s in samples):
            runs = [s for s in samples if s.op == op and s.contender == name]
            if not runs:
                continue
            times = sorted(s.seconds for s in runs)
            mark = " (no fsync)" if op == "save" and name in not_durable else ""
            lines.append(
                f"    {name + mark:<26} {times[0]:7.3f}  {median(times):7.3f}   x{times[-1] / times[0]:<5.2f}"
                f"  {nbytes / times[0] / 1e9:7.2f}  {median(s.cpu_s for s in runs):6.2f}"
                f"  {max(s.peak_extra_bytes for s in runs) / 2**20:9.0f}"
            )
        lines.append("")
    return lines


def planning_lines(results: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = ["  1,024 ranks x 500 tensors     shards    chunks   rank 0: plan s   index s   total s   each rank s"]
    for name, row in results.items():
        if name != "index":
            lines.append(
                f"    {name:<24} {row['shards']:9,} {row['chunks']:9,} {row['plan_s']:16.2f} {row['index_s']:9.2f}"
                f" {row['coordinator_s']:9.2f} {row['a_rank_s']:13.3f}"
            )
    row = results["index"]
    lines.append(
        f"  index of {row['shards']:,} shards: {row['mb']:.1f} MB, written in {row['encode_s']:.3f} s,"
        f" opened in {row['open_s']:.3f} s, a tensor found in {row['lookup_ms']:.2f} ms"
    )
    return lines


def judge_planning(results: Mapping[str, Mapping[str, float]]) -> list[Verdict]:
    """Compare with the limits for 1,024 ranks x 500 sharded tensors, and for an index of a million shards."""
    index = results["index"]
    limits = [
        ("planning: rank 0, 512,000 shards", results["fsdp"]["coordinator_s"], 3.0, "s"),
        ("planning: rank 0, each held twice", results["hsdp"]["coordinator_s"], 3.0, "s"),
        ("planning: each rank", results["fsdp"]["a_rank_s"], 0.2, "s"),
        ("index of a million: write and open", index["encode_s"] + index["open_s"], 1.0, "s"),
        ("index of a million: find a tensor", index["lookup_ms"], 5.0, "ms"),
    ]
    return [Verdict(what, measured, limit, unit, measured <= limit) for what, measured, limit, unit in limits]


def reshard_lines(results: Mapping[str, Any]) -> list[str]:
    lines = [f"  {results['nbytes'] / 1e9:.2f} GB: rows saved by 4 ranks, columns loaded by 2 after the save"]
    lines.append("                                        best    median   spread")
    rows = (("torch", "save"), ("shardkeep", "save"), ("torch", "load"), ("shardkeep", "load"), ("torch", BY_OURS))
    for kind, op in rows:
        times = sorted(s[op] for s in results["samples"] if s["kind"] == kind)
        name = f"torch's files, {op}" if op == BY_OURS else f"{kind}: {op}"
        lines.append(f"    {name:<34} {times[0]:7.3f}  {median(times):7.3f}   x{times[-1] / times[0]:.2f}")
    row = results["row"]
    lines.append(
        f"  one row of {row['wanted']:,} bytes of a tensor of {row['of'] / 1e9:.2f} GB: {row['read']:,.0f} bytes read,"
        f" {row['seconds'] * 1e3:.1f} ms"
    )
    return lines


def judge_reshard(results: Mapping[str, Any]) -> list[Verdict]:
    """Compare with torch, round by round."""
    by = {(s["kind"], s["round"]): s for s in results["samples"]}
    rounds = sorted({number for _, number in by})
    verdicts = []
    for what, kind, op, at_least in (
        ("resharded load: shardkeep.dcp / torch DCP", "shardkeep", "load", 3.0),
        ("resharded load of torch's files", "torch", BY_OURS, 3.0),
    ):
        ratios = [by["torch", n]["load"] / by[kind, n][op] for n in rounds]
        value = median(ratios)
        verdicts.append(Verdict(what, value, at_least, "x", value >= at_least, (min(ratios), max(ratios))))
    part = results["row"]["read"] / results["row"]["of"] * 100
    verdicts.append(Verdict("one row: part of the tensor read", part, 1.0, "%", part <= 1.0))
    return verdicts


def as_json(samples: Sequence[Sample], verdicts: Sequence[Verdict]) -> dict[str, object]:
    return {"samples": [asdict(s) for s in samples], "targets": [asdict(v) for v in verdicts]}
