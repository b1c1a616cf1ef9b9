"""Formats the results of `async_gpu.py` as a markdown table and compares them with the targets. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from async_contenders import DEVICE, HOST, NO_SAVE, OURS, OVERLAP, TORCH, TORCH_PINNED

COLUMNS = (TORCH, TORCH_PINNED, OVERLAP, DEVICE, HOST)
PLACES = {"disk": "disk", "shm": "/dev/shm"}
Results = Mapping[str, Any]


def good(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "failed" not in row]


def _call_rows(results: Results) -> list[tuple[str, dict[str, str]]]:
    calls, nbytes = results.get("calls", {}), results["nbytes"]

    def each(show: Callable[[list[dict[str, Any]]], str]) -> dict[str, str]:
        return {name: show(rows) for name, rows in calls.items()}

    def first(show: Callable[[dict[str, Any]], str]) -> dict[str, str]:
        return each(lambda rows: show(rows[0]) if "failed" not in rows[0] else "fails")

    def later(show: Callable[[list[dict[str, Any]]], str]) -> dict[str, str]:
        return each(lambda rows: show(good(rows)[1:]) if len(good(rows)) > 1 else _why(rows))

    def peak(what: str, scale: float) -> dict[str, str]:
        return each(lambda rows: f"{max(row[what] for row in good(rows)) / scale:.2f}" if good(rows) else "fails")

    blocked = [
        ("blocked in the call, first save, ms", first(lambda row: _ms(row["blocked_s"]))),
        (
            "blocked in the call, from the second on: median (max), ms",
            later(lambda rows: f"{_ms(_mid(rows, 'blocked_s'))} ({_ms(max(r['blocked_s'] for r in rows))})"),
        ),
        ("call until durable on disk: first, s", first(lambda row: f"{row['durable_s']:.2f}")),
        ("call until durable on disk: later, median, s", later(lambda rows: f"{_mid(rows, 'durable_s'):.2f}")),
        ("call until the state may be changed: first, ms", first(lambda row: _ms(row["staged_s"]))),
        ("call until the state may be changed: later, median, ms", later(lambda rows: _ms(_mid(rows, "staged_s")))),
        ("while copies to the host go on: first, GB/s", first(lambda row: _rate(nbytes, row["copying_s"]))),
        (
            "while copies to the host go on: later, median, GB/s",
            later(lambda rows: _rate(nbytes, _mid(rows, "copying_s"))),
        ),
    ]
    memory = [
        ("host memory above before, at peak, GB", peak("rss", 1e9)),
        ("pinned memory above before, GB", peak("pinned", 1e9)),
        ("device memory above before, at peak, GB", peak("device", 1e9)),
    ]
    return blocked + memory if calls else []


def _drift(results: Results) -> float:
    """Return by how many percent training became slower without any save, in as much time."""
    rows = results.get("loop", {}).get(NO_SAVE)
    return 100 * _mid(rows, "slower_after") if rows else 0.0


def _loop_rows(results: Results) -> list[tuple[str, dict[str, str]]]:
    loops = results.get("loop", {})

    def each(show: Callable[[list[dict[str, Any]]], str]) -> dict[str, str]:
        return {name: show(rows) for name, rows in loops.items()}

    rows = [
        ("training step without saving, ms", each(lambda rows: _ms(_mid(rows, "before_s")))),
        (
            "training step with a save in flight, ms (steps)",
            each(lambda rows: f"{_ms(_mid(rows, 'during_s'))} ({rows[0]['during_steps']})"),
        ),
        ("slower while in flight, %", each(lambda rows: f"{100 * _mid(rows, 'slower'):+.1f}")),
        ("added to training by a save, s", each(lambda rows: f"{_mid(rows, 'added_s'):+.3f}")),
        (
            f"slower after it has ended, % (the same windows without any save: {_drift(results):+.1f})",
            each(lambda rows: f"{100 * _mid(rows, 'slower_after'):+.1f}"),
        ),
        ("blocked in the call, device busy, ms", each(lambda rows: _ms(_mid(rows, "blocked_s")))),
    ]
    return rows if loops else []


def _place_rows(results: Results) -> list[tuple[str, dict[str, str]]]:
    rows, nbytes = [], results["nbytes"]
    for key, name in PLACES.items():
        if found := results.get(key):
            ours = median(s["ours_s"] for s in found["saves"])
            raw = median(s["raw_s"] for s in found["saves"])
            rows.append(
                (
                    f"durable to {name}, GB/s (raw beside it: {_rate(nbytes, raw)}, {found['best']})",
                    {TORCH: _rate(nbytes, found["torch_save_s"]), DEVICE: _rate(nbytes, ours)},
                )
            )
            loads = found["loads"]
            both = {TORCH: _rate(nbytes, _mid(loads, "torch_s")), DEVICE: _rate(nbytes, _mid(loads, "ours_s"))}
            rows.append((f"load into the device from {name}, page cache warm, GB/s", both))
    return rows


def _soak_rows(results: Results) -> list[tuple[str, dict[str, str]]]:
    rows = []
    flat, exact = results.get("flat", {}), results.get("exact", {})
    if flat:
        after = next(iter(flat.values()))["after"]
        title = f"grown between {after[0]} and {after[1]} saves: RSS, pinned, device MB; threads; fds"
        rows.append((title, {name: _grown(flat[mode]["grown"]) for name, mode in OURS.items() if mode in flat}))
    if exact:
        shown = {mode: f"{len(one['wrong'])} of {one['saves']}" for mode, one in exact.items()}
        rows.append(("checkpoints not exact", {name: shown[mode] for name, mode in OURS.items() if mode in shown}))
    return rows


def table(results: Results) -> list[str]:
    """Lay everything out: a row for each figure, a column for each contender."""
    rows = _call_rows(results) + _few_rows(results) + _loop_rows(results) + _place_rows(results) + _soak_rows(results)
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    return lines + [
        f"| {title} | " + " | ".join(cells.get(name, "") for name in COLUMNS) + " |" for title, cells in rows
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f}"


def _mid(rows: list[dict[str, Any]], what: str) -> float:
    return float(median(row[what] for row in rows))


def _why(rows: list[dict[str, Any]]) -> str:
    return "fails: " + rows[-1]["failed"].split(":")[0] if "failed" in rows[-1] else ""


def _grown(grown: Mapping[str, int]) -> str:
    sizes = ", ".join(f"{grown[gauge] / 1e6:+.1f}" for gauge in ("rss", "pinned", "device"))
    return f"{sizes}; {grown['threads']:+d}; {grown['fds']:+d}"


def _few_rows(results: Results) -> list[tuple[str, dict[str, str]]]:
    """The same bytes in few large tensors: what is paid for each tensor shows in the difference."""
    shown = (
        "blocked in the call, from",
        "call until the state may be changed: later",
        "while copies to the host go on",
    )
    if "few" not in results:
        return []
    rows = _call_rows({"calls": results["few"], "nbytes": results["few_nbytes"]})
    return [(f"84 tensors: {title}", cells) for title, cells in rows if title.startswith(shown)]


def targets(results: Results) -> list[dict[str, Any]]:
    """Compare with what the issue wants reached, as far as it was measured."""
    found: list[dict[str, Any]] = []

    def judge(what: str, measured: float, unit: str, *, at_most: float | None = None, at_least: float = 0) -> None:
        ok = measured >= at_least if at_most is None else measured <= at_most
        goal = f">= {at_least:g}" if at_most is None else f"<= {at_most:g}"
        found.append({"what": what, "measured": measured, "unit": unit, "goal": goal, "ok": ok})

    for part, name in ((part, name) for part in ("few", "calls") for name in (OVERLAP, DEVICE)):
        rows, title = good(results.get(part, {}).get(name, [])), name + (", 84 tensors" if part == "few" else "")
        staged = results["few_nbytes" if part == "few" else "nbytes"] if rows else 0
        if len(rows) > 1:
            judge(f"{title}: blocked, first save", rows[0]["blocked_s"] * 1e3, "ms", at_most=100)
            judge(f"{title}: blocked, later, max", max(r["blocked_s"] for r in rows[1:]) * 1e3, "ms", at_most=10)
            if name == OVERLAP:  # the others wait for it; a copy on the device is emptied at leisure
                judge(f"{title}: staging, warm", staged / _mid(rows[1:], "copying_s") / 1e9, "GB/s", at_least=45)
        if (
            part == "calls" and name == OVERLAP and rows
        ):  # torch counts a device's memory in blocks; none may be asked for
            judge(f"{name}: extra device memory", max(r["device"] for r in rows) / 1e6, "MB", at_most=0)
    for name in (OVERLAP, DEVICE):
        if rows := results.get("loop", {}).get(name):
            judge(f"{name}: slower while in flight", 100 * _mid(rows, "slower"), "%", at_most=3)
            # No clock shows 0: within half a percent of what windows without any save differ by.
            after = 100 * _mid(rows, "slower_after") - _drift(results)
            judge(f"{name}: slower after it than without", after, "%", at_most=0.5)
    for key, place in PLACES.items():
        if one := results.get(key):
            ratio = median(s["raw_s"] / s["ours_s"] for s in one["saves"])
            judge(f"durable write to {place}, ours / raw", ratio, "x", at_least=0.9)
            ratio = median(s["torch_s"] / s["ours_s"] for s in one["loads"])
            judge(f"load into the device from {place}, ours / torch", ratio, "x", at_least=5)
    for mode, one in results.get("flat", {}).items():
        judge(f"{mode}: gauges that grew over {one['after'][1]} saves", float(not one["flat"]), "", at_most=0)
    for mode, one in results.get("exact", {}).items():
        judge(f"{mode}: wrong checkpoints of {one['saves']}", len(one["wrong"]), "", at_most=0)
    return found


def target_line(one: Mapping[str, Any]) -> str:
    verdict = "ok" if one["ok"] else "SHORT"
    return f"  {one['what']:<58} {one['measured']:10.2f} {one['unit']:<5} {one['goal']:<8} {verdict}"
