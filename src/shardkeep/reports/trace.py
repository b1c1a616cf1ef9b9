"""
A timeline of saves, loads and promotions in a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The file is a JSON array in the trace event format, with one process per rank and one thread per phase. Each call is written
when it ends, so memory is bounded and the file of a killed job is readable: viewers do not need the closing bracket.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, TypeAlias, get_args

import msgspec

from shardkeep import events
from shardkeep.errors import StorageError
from shardkeep.reports.metrics import from_rank_zero, is_rank_zero

_LANES = {
    "save": ("save", "queue", "describe", "plan", "stage", "write", "wait", "commit"),
    "load": ("load", "open", "plan", "read", "place"),
    "promote": ("promote", "choose", "copy", "wait", "commit"),
}
"""The rows of a rank, from top to bottom."""
_ROWS = 100
"""Most rows of one phase. Calls that overlap in time get a row each."""
_Ended: TypeAlias = (
    events.SaveCommitted | events.SaveFailed | events.LoadFinished | events.LoadFailed | events.PromotionFinished
)


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """
    Write a timeline of all saves, loads and promotions that end inside this block, with the phases of every rank.

    Enter it on all ranks or only on rank 0, which writes the file. Leaving the block waits for asynchronous saves that began
    inside, unless an exception is raised, but not for promotions. An existing file is replaced.

    Args:
        path: The file; open it at ui.perfetto.dev.

    Raises:
        StorageError: the file cannot be created because its folder does not exist. Later failures are only logged, so
            that they affect neither a save nor the code after this block.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> with sk.trace(folder + "/trace.json"):
        ...     report = sk.save({"w": torch.ones(4)}, folder + "/step-1")

    """
    tracing = _Tracing(os.fspath(path))
    with events.on_event(tracing.hear, kinds=(events.SaveBegan, events.LoadBegan, *get_args(_Ended))):
        wait = False
        try:
            yield
            wait = True
        finally:
            tracing.close(wait=wait)


class _Tracing:
    def __init__(self, path: str) -> None:
        if not os.path.isdir(os.path.dirname(path) or ".") or os.path.isdir(path):
            raise StorageError(f"the trace {path} cannot be created", hint="give a file in an existing folder")
        self._path = path
        self._changed = threading.Condition()
        self._under_way: list[str] = []
        self._file: IO[bytes] | None = None
        self._failure: OSError | None = None
        self._ended = False
        # A rank other than 0 writes no file, even if the process group is gone at the end.
        self._first = is_rank_zero()
        self._ends_us: dict[tuple[int, int], int] = {}

    def hear(self, event: events.Event) -> None:
        with self._changed:
            if isinstance(event, (events.SaveBegan, events.LoadBegan)):
                self._under_way.append(event.where)
                return
            if event.where in self._under_way:  # otherwise it began before the trace, or is a promotion
                self._under_way.remove(event.where)
                self._changed.notify_all()
            self._first = self._first and is_rank_zero()
            if self._first and from_rank_zero(event) and not self._ended and isinstance(event, get_args(_Ended)):
                self._write(self._entries(event))

    def close(self, *, wait: bool) -> None:
        with self._changed:
            while wait and self._under_way:
                self._changed.wait()
            self._ended = True
            if self._first and is_rank_zero():
                self._write([])
            if self._file is not None:
                try:
                    self._file.write(b"\n]\n")
                    self._file.close()
                except OSError as exc:
                    self._failure = exc
            if self._failure is not None:
                events.log_safely(
                    logging.WARNING,
                    "the trace %s could not be written: %s; the saves and loads in it are not affected",
                    self._path,
                    self._failure,
                )

    def _write(self, entries: list[dict[str, Any]]) -> None:
        try:
            if self._file is None and self._failure is None:
                self._file = open(self._path, "wb")  # noqa: SIM115 - closed by `close`
                self._file.write(b"[\n" + msgspec.json.encode(_named("process_labels", 0, 0, labels="shardkeep")))
            if self._file is not None:
                self._file.writelines(b",\n" + msgspec.json.encode(entry) for entry in entries)
                self._file.flush()
        except OSError as exc:  # logged by `close`; a save must not fail because of it
            self._failure = self._failure or exc

    def _entries(self, event: _Ended) -> list[dict[str, Any]]:
        """Return the entries of a call: of the whole, and of each phase, on every rank."""
        is_save = isinstance(event, (events.SaveCommitted, events.SaveFailed))
        call = "save" if is_save else "promote" if isinstance(event, events.PromotionFinished) else "load"
        ranks = getattr(event, "ranks", None) or [events.RankPhases(event.rank, getattr(event, "phases", []))]
        lanes = [f"{call} {name}" for call, names in _LANES.items() for name in names]
        return [
            entry
            for each in ranks
            for span in _with_whole(call, each, event)
            for entry in self._complete(each.rank, span, lanes.index(f"{call} {span.name}"), event)
        ]

    def _complete(self, rank: int, span: events.Span, lane: int, event: _Ended) -> Iterator[dict[str, Any]]:
        """Yield the entry of a span, after the entries that name its rank and row if they are new."""
        # Integers, so that rounding does not make consecutive spans overlap.
        begin_us, end_us = (round((event.called_s + at_s) * 1e6) for at_s in (span.begin_s, span.end_s))
        first = lane * _ROWS
        rows = range(first, first + _ROWS)
        row = next((row for row in rows if self._ends_us.get((rank, row), 0) <= begin_us), rows[-1])
        if rank not in {known for known, _ in self._ends_us}:
            yield _named("process_name", rank, 0, name=f"rank {rank}")
            yield _named("process_sort_index", rank, 0, sort_index=rank)
        if (rank, row) not in self._ends_us:
            yield _named("thread_name", rank, row, name=span.name if row == first else f"{span.name} {row - first + 1}")
            yield _named("thread_sort_index", rank, row, sort_index=row)
        self._ends_us[rank, row] = end_us
        more: dict[str, Any] = {}
        if isinstance(event, (events.SaveFailed, events.LoadFailed)):
            more = {"kind": event.kind, "message": event.message}
        elif isinstance(event, events.PromotionFinished):
            more = {"source": event.source, "files": event.files_copied, "files_total": event.files_total}
        yield {
            "name": span.name,
            "cat": "shardkeep",
            "ph": "X",
            "ts": begin_us,
            "dur": end_us - begin_us,
            "pid": rank,
            "tid": row,
            "args": {"where": event.where, "step": event.step, "bytes": span.nbytes, **more},
        }


def _with_whole(name: str, did: events.RankPhases, event: _Ended) -> list[events.Span]:
    """Return a span for the whole call of a rank, as far as it is known here, and the spans of its phases."""
    begins, ends = [span.begin_s for span in did.spans], [span.end_s for span in did.spans]
    # The seconds of a promotion do not include choosing the source.
    if did.rank == event.rank and not isinstance(event, events.PromotionFinished):
        begins, ends = [*begins, 0.0], [*ends, event.seconds]
    if not ends:
        return []
    moved = sum(span.nbytes for span in did.spans if span.name in ("write", "read", "copy"))
    return [events.Span(name, min(begins), max(ends), moved), *did.spans]


def _named(what: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": args}
