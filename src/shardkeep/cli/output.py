"""What a command line can get wrong, and guesses at what was meant."""

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
from dataclasses import dataclass, field
from difflib import get_close_matches
from heapq import nlargest
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from shardkeep.errors import CheckpointError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from typing_extensions import Self


_MAX_CANDIDATES = 1000


class UsageError(CheckpointError, ValueError):
    """What was asked for cannot be done as it was asked."""


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """
    Return a hint that names what is spelt almost like a word, or `otherwise` where nothing is.

    Of many thousand names only those are looked at that have the most dotted parts in common with the word.
    """
    names = list(known)
    if len(names) > _MAX_CANDIDATES:
        parts = set(word.split("."))
        names = nlargest(_MAX_CANDIDATES, names, key=lambda name: len(parts.intersection(name.split("."))))
    close = get_close_matches(word, names, n=3, cutoff=0.6)
    if not close:
        return otherwise
    return f"did you mean {', '.join(close[:-1]) + ' or ' if close[:-1] else ''}{close[-1]}?"


# How commands speak: tables, sizes and ages for people, one JSON document for programs.
#
# Text goes to stdout, remarks to stderr. Colours only on a terminal, and not where NO_COLOR is set. Names that come
# from
# a checkpoint are shown with control characters spelt out: a hostile key cannot steer the terminal.

Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]
_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_MIN_COLUMN_WIDTH = 12
"""A column that gives way keeps this much."""


def is_terminal(stream: TextIO | None = None) -> bool:
    """Say whether somebody looks at it: stdout, unless another stream is given."""
    stream = stream or sys.stdout
    return stream.isatty()


def styled(text: str, style: Style, stream: TextIO | None = None) -> str:
    """Colour a text where that is welcome."""
    if not text or not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def terminal_width() -> int | None:
    """Return how many letters a line may have; None where nobody looks, and lines are for programs such as grep."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def echo(text: str = "") -> None:
    """Print to stdout."""
    print(text)


def echo_err(text: str, style: Style | None = None) -> None:
    """Print to stderr, where it is in no program's way."""
    print(styled(text, style, sys.stderr) if style else text, file=sys.stderr)


def print_json(document: Any) -> None:
    """Print the one document of `--json`: indented on a terminal, a line elsewhere; NaN and infinities as text."""
    print(json.dumps(_finite(document), indent=2 if is_terminal() else None, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_json(value: Any) -> Any:
    """Return a value as JSON has it, or its repr where JSON has nothing like it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_json(item) for key, item in value.items()}
    return repr(value)


def printable(text: str) -> str:
    """Return a name as it may be printed: what would move the cursor is spelt out."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines as it may be printed."""
    return "\n".join(map(printable, text.split("\n")))


def format_size(nbytes: float) -> str:
    """Return a number of bytes with three digits, in powers of ten, as disks are sold: 1.23 GB."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    for unit in units:
        if nbytes < 999.5 or unit == units[-1]:
            break
        nbytes /= 1000
    digits = 0 if unit == "B" or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {unit}"


def format_duration(seconds: float) -> str:
    """Return a length of time in its largest unit: 3 h."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and unit != "d"):
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_number(value: complex | None) -> str:
    """Return a number with six digits, whole ones with all they have; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a count and its noun: 1 file, 2 files."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape as torch writes it: [1024, 4096]."""
    return f"[{', '.join(map(str, shape))}]"


def shorten_middle(text: str, width: int) -> str:
    """Cut the middle out of a text that is too long: both ends of a key tell more than its middle."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    tail = width - 1 - head
    return text[:head] + "…" + text[len(text) - tail :] if tail > 0 else text[:width]


def wrap_lines(text: str, indent: str = "", stream: TextIO | None = None) -> str:
    """Break lines that are too long for a terminal at words, and indent all; elsewhere lines stay whole."""
    room = shutil.get_terminal_size().columns if is_terminal(stream) else sys.maxsize
    lines = []
    for line in text.split("\n"):
        inner = line.lstrip(" ")
        begin = indent + line[: len(line) - len(inner)]
        lines.append(textwrap.fill(inner, room, initial_indent=begin, subsequent_indent=begin, break_on_hyphens=False))
    return "\n".join(lines)


@dataclass
class Table:
    """
    Rows under headings. On a terminal the column that `gives_way` is shortened so that lines fit; elsewhere nothing is.
    """

    headings: Sequence[str]
    right: str = ""
    """Headings of the columns that are aligned to the right, separated by spaces."""
    gives_way: str = ""
    indent: str = ""
    headless: bool = False
    rows: list[tuple[str, ...]] = field(default_factory=list)
    styles: list[Style | None] = field(default_factory=list)
    below: dict[int, str] = field(default_factory=dict)
    tails: dict[int, tuple[int, str]] = field(default_factory=dict)

    def add(self, *cells: str, style: Style | None = None, below: str = "", tail: str = "") -> None:
        """
        Add a row, and a remark that stands on a line below it.

        A row of fewer cells may have a tail: a text over all columns that are left, whose widths do not depend on it.
        """
        if below:
            self.below[len(self.rows)] = below
        if tail:
            self.tails[len(self.rows)] = (len(cells), tail)
        self.rows.append((*cells, *("" for _ in self.headings[len(cells) :])))
        self.styles.append(style)

    def print(self) -> None:
        """Print all of it; columns that are empty in every row are left out."""
        used = [at for at in range(len(self.headings)) if any(row[at] for row in self.rows)]
        widths = {at: max(len(self.headings[at]), *(len(row[at]) for row in self.rows)) for at in used}
        room = terminal_width()
        if room is not None and self.gives_way:
            at = list(self.headings).index(self.gives_way)
            others = len(self.indent) + sum(widths.values()) + 2 * (len(used) - 1) - widths.get(at, 0)
            widths[at] = min(widths.get(at, 0), max(_MIN_COLUMN_WIDTH, room - others))
        if not self.rows:
            return
        if not self.headless:
            print(styled(self._line(tuple(self.headings), used, widths), "dim"))
        for at, (row, style) in enumerate(zip(self.rows, self.styles, strict=True)):
            line = self._line(row, used, widths)
            if at in self.tails:
                line = self._with_tail(row, used, widths, *self.tails[at])
            print(styled(line, style) if style else line)
            if at in self.below:
                print(wrap_lines(self.below[at], self.indent + "  "))

    def _with_tail(
        self, cells: tuple[str, ...], used: Sequence[int], widths: dict[int, int], many: int, tail: str
    ) -> str:
        before = [at for at in used if at < many]
        begin = self._line(cells, before, widths).ljust(len(self.indent) + sum(widths[at] + 2 for at in before))
        room = terminal_width()
        most = len(tail) if room is None else max(_MIN_COLUMN_WIDTH, room - len(begin))
        return begin + (tail if len(tail) <= most else tail[: most - 1] + "…")

    def _line(self, cells: tuple[str, ...], used: Sequence[int], widths: dict[int, int]) -> str:
        right = self.right.split()
        texts = (shorten_middle(cells[at], widths[at]) for at in used)
        aligned = (
            text.rjust(widths[at]) if self.headings[at] in right else text.ljust(widths[at])
            for at, text in zip(used, texts, strict=True)
        )
        return self.indent + "  ".join(aligned).rstrip()


# A bar on stderr while bytes are read, where somebody looks at it and it takes long enough to wonder.

_SHOW_AFTER_S = 0.5
"""What is over by then needs no bar."""


class ReadProgress:
    """How much of a number of bytes is done. Nothing is drawn, and rich not imported, unless stderr is a terminal."""

    def __init__(self, what: str, total_nbytes: int) -> None:
        self._what = what
        self._total = total_nbytes
        self._done = 0
        self._began = time.monotonic()
        self._looked_at = is_terminal(sys.stderr)
        self._bar: Bar | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, nbytes: int) -> None:
        """Say that so many more bytes are done; from any thread."""
        with self._lock:
            self._done += nbytes
            if not self._looked_at:
                return
            if self._bar is None:
                if time.monotonic() - self._began < _SHOW_AFTER_S:
                    return
                self._bar = self._start()
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def _start(self) -> Bar:
        from rich import progress  # noqa: PLC0415 - heavy, and rarely drawn
        from rich.console import Console  # noqa: PLC0415

        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        bar.add_task(self._what, total=self._total)
        bar.start()
        return bar
