"""
What commands print: text, tables, sizes and ages for people, one JSON document for programs, errors with suggestions.

Results go to stdout, notes and errors to stderr. Colours are used only on a terminal, and not if NO_COLOR is set. Names
that come from a checkpoint are printed with control characters escaped, so that a hostile key cannot control the terminal.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO

from shardkeep.errors import CheckpointError
from shardkeep.state import patterns

if TYPE_CHECKING:
    from rich.progress import Progress

Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]
_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_MIN_COLUMN_WIDTH = 12
"""The least width of the column that a table shortens."""
_SHOW_AFTER_S = 0.5
"""Work that takes less gets no progress bar."""


class UsageError(CheckpointError, ValueError):
    """The command cannot do what its arguments ask for."""


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return a hint that names the known words that are spelt like `word`, or `otherwise` if there is none."""
    return patterns.did_you_mean(word, known) or otherwise


# -- streams


def is_terminal(stream: TextIO | None = None) -> bool:
    """Return whether a stream, stdout by default, is a terminal."""
    return (stream or sys.stdout).isatty()


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the columns of a terminal; None if it is not one, because programs such as grep need whole lines."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else None


def styled(text: str, style: Style, stream: TextIO | None = None) -> str:
    """Return a text in a colour if the stream is a terminal that wants colours."""
    if not text or not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def echo_err(text: str, style: Style | None = None) -> None:
    """Print to stderr, so that stdout holds only results."""
    print(styled(text, style, sys.stderr) if style else text, file=sys.stderr)


# -- JSON


def print_json(document: Any) -> None:
    """Print the one document of `--json`, indented on a terminal."""
    print(json.dumps(to_json(document), indent=2 if is_terminal() else None))


def to_json(value: Any) -> Any:
    """Return a value as JSON types: NaN and infinities as strings, and what JSON has no type for as its repr."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_json(item) for key, item in value.items()}
    return repr(value)


# -- text


def printable(text: str) -> str:
    """Return a name with control characters escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines with control characters escaped."""
    return "\n".join(map(printable, text.split("\n")))


def format_size(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit: 1.23 GB."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    for unit in units:
        if nbytes < 999.5 or unit == units[-1]:
            break
        nbytes /= 1000
    digits = 0 if unit == "B" or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {unit}"


def format_duration(seconds: float) -> str:
    """Return a time span in its largest unit: 3 h."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and unit != "d"):
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_number(value: complex | None) -> str:
    """Return a number with six digits, an integer with all of its digits, and a dash for None."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a count and its noun: 1 file, 2 files."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape as torch writes it: [1024, 4096]."""
    return f"[{', '.join(map(str, shape))}]"


def format_speed(seconds: float, gb_per_s: float, at_least_s: float) -> str:
    """Return time and throughput as the end of a sentence; empty below `at_least_s`, where both mean little."""
    return f" in {seconds:.1f} s, {gb_per_s:.2f} GB/s" if seconds >= at_least_s else ""


def format_bar(share: float, width: int) -> str:
    """Return a bar in eighths of a character; a share above 0 is always visible."""
    eighths = round(share * width * 8) or int(share > 0)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()


def shorten(text: str, width: int) -> str:
    """Cut the end off a text that is too long."""
    return text if len(text) <= width else text[: width - 1] + "…"


def shorten_middle(text: str, width: int) -> str:
    """Cut the middle out of a text that is too long, because both ends of a key say more than its middle."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    tail = width - 1 - head
    return text[:head] + "…" + text[len(text) - tail :] if tail > 0 else text[:width]


def wrap_lines(text: str, indent: str = "", stream: TextIO | None = None) -> str:
    """Indent all lines and, on a terminal, wrap those that are too long for it."""
    room = terminal_width(stream) or sys.maxsize
    lines = []
    for line in text.split("\n"):
        inner = line.lstrip(" ")
        begin = indent + line[: len(line) - len(inner)]
        lines.append(textwrap.fill(inner, room, initial_indent=begin, subsequent_indent=begin, break_on_hyphens=False))
    return "\n".join(lines)


# -- tables and progress


@dataclass
class Table:
    """
    Rows under headings. Columns that are empty in every row are left out.

    On a terminal, the column named `flexible` is shortened so that lines fit. Plain string formatting, not rich: a
    listing may have a hundred thousand rows, for which rich takes half a minute, and a pipe must get whole lines.
    """

    headings: Sequence[str]
    right: str = ""
    """Headings of the right-aligned columns, separated by spaces."""
    flexible: str = ""
    indent: str = ""
    show_headings: bool = True
    _rows: list[tuple[tuple[str, ...], Style | None, str]] = field(default_factory=list)

    def add(self, *cells: str, style: Style | None = None, note: str = "") -> None:
        """Add a row: one text per column, its colour, and a note for a line of its own below the row."""
        self._rows.append((cells, style, note))

    def print(self) -> None:
        """Print all rows."""
        if not self._rows:
            return
        columns = list(zip(*(cells for cells, _, _ in self._rows), strict=True))
        widths = {at: max(map(len, (self.headings[at], *cells))) for at, cells in enumerate(columns) if any(cells)}
        room = terminal_width()
        at = list(self.headings).index(self.flexible) if self.flexible else -1
        if room is not None and at in widths:
            others = len(self.indent) + sum(widths.values()) + 2 * (len(widths) - 1) - widths[at]
            widths[at] = min(widths[at], max(_MIN_COLUMN_WIDTH, room - others))
        if self.show_headings:
            print(styled(self._line(self.headings, widths), "dim"))
        for cells, style, note in self._rows:
            line = self._line(cells, widths)
            print(styled(line, style) if style else line)
            if note:
                print(wrap_lines(note, self.indent + "  "))

    def _line(self, cells: Sequence[str], widths: dict[int, int]) -> str:
        right = self.right.split()
        texts = (
            f"{shorten_middle(cells[at], width):{'>' if self.headings[at] in right else '<'}{width}}"
            for at, width in widths.items()
        )
        return self.indent + "  ".join(texts).rstrip()


class ReadProgress(ExitStack):
    """A progress bar on stderr, if that is a terminal and the work takes a while; otherwise rich is not imported."""

    def __init__(self, what: str, total_nbytes: int) -> None:
        super().__init__()
        self._what, self._total, self._done = what, total_nbytes, 0
        self._visible_s = time.monotonic() + _SHOW_AFTER_S if is_terminal(sys.stderr) else math.inf
        self._bar: Progress | None = None
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes as done. Threads may call it at the same time."""
        with self._lock:
            self._done += nbytes
            if time.monotonic() < self._visible_s:
                return
            if self._bar is None:
                from rich.console import Console  # noqa: PLC0415 - slow to import, and rarely needed

                from shardkeep.reports.progress import byte_progress  # noqa: PLC0415

                self._bar = self.enter_context(byte_progress(Console(stderr=True), auto_refresh=True))
                self._bar.add_task(self._what, total=self._total)
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def update(self, done: int, total: int) -> None:
        """Set what is done, and the total, which may not have been known at first."""
        self._total = total
        self.add(done - self._done)
