"""The checkpoints of a run as a table: what is there, what is good, and why the rest is not."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import Any

from shardkeep.cli.output import Style, Table, count_text, print_json, say, shown, size_text, span_text, styled
from shardkeep.cli.problems import NotUsable
from shardkeep.cli.roots import Run
from shardkeep.manage.entries import Entry

_STYLES: dict[str, Style] = {"damaged": "red", "unfinished": "yellow"}
_MOST_METRICS = 24


def list_run(run: Run, args: argparse.Namespace) -> int:
    """List the checkpoints of a run, the newest first."""
    if args.pattern or args.prefix or args.tree or args.long:
        raise NotUsable(
            f"{args.path} is a run, not a checkpoint: it has no keys",
            hint=f"`shardkeep ls {args.path}` lists its checkpoints; name one of them",
        )
    entries = run.entries()
    latest = next((entry for entry in entries if entry.committed), None)
    if args.json:
        listed = [entry_document(run, entry) | {"latest": entry is latest} for entry in entries]
        document = {"kind": "run", "path": args.path, "template": run.catalog.naming.template}
        print_json(document | {"latest": latest and run.path_of(latest), "checkpoints": listed})
        return 0
    if args.names:
        for entry in entries:
            if entry.committed:
                say(shown(entry.name))
        return 0
    table = Table(
        ("name", "step", "status", "size", "age", "ranks", "format", "metrics", "marks"),
        right="step size age ranks",
        gives_way="metrics",
    )
    for entry in entries:
        marks = [word for word, is_so in (("latest", entry is latest), ("pinned", entry.pinned)) if is_so]
        style = _STYLES.get(entry.status) or ("green" if entry is latest else None)
        table.add(*_cells(entry), ", ".join(marks), style=style, below=shown(entry.reason))
    table.print()
    counts = [count_text(sum(entry.committed for entry in entries), "checkpoint")]
    counts += [f"{many:,} {status}" for status in _STYLES if (many := sum(e.status == status for e in entries))]
    say(f"\n{styled(size_text(sum(entry.nbytes for entry in entries)), 'bold')} in {', '.join(counts)}")
    return 0


def _cells(entry: Entry) -> tuple[str, ...]:
    age = (datetime.now(timezone.utc) - entry.saved_at).total_seconds() if entry.saved_at else None
    return (
        shown(entry.name),
        str(entry.step),
        entry.status,
        size_text(entry.nbytes) if entry.nbytes else "",
        span_text(age) if age is not None else "",
        str(entry.record.world_size) if entry.record else "",
        entry.layout if entry.layout not in {"native", None} else "",
        _metrics_text(entry),
    )


def _metrics_text(entry: Entry) -> str:
    return "  ".join(f"{shown(name)} {value:.4g}" for name, value in entry.metrics.items())


def entry_document(run: Run, entry: Entry) -> dict[str, Any]:
    """Return a checkpoint of a run for programs."""
    return {
        "name": entry.name,
        "path": run.path_of(entry),
        "step": entry.step,
        "status": entry.status,
        "reason": entry.reason or None,
        "layout": entry.layout,
        "saved_at": entry.saved_at.isoformat() if entry.saved_at else None,
        "nbytes": entry.nbytes,
        "world_size": entry.record.world_size if entry.record else None,
        "metrics": dict(entry.metrics),
        "meta": entry.record.meta if entry.record else None,
        "pinned": entry.pinned,
    }
