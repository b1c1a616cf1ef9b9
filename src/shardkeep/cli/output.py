"""
What commands print: text, tables, sizes and ages for people, one JSON document for programs, errors with suggestions.

Results go to stdout, notes and errors to stderr. Colours and the pager need a terminal, and colours no NO_COLOR.
Control characters in names from a checkpoint are escaped, so that a hostile key cannot control the terminal.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, Literal, TextIO

from shardkeep import display
from shardkeep.errors import CheckpointError
from shardkeep.state import patterns

OnRead = Callable[[int], None]
Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]
_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_MIN_COLUMN_WIDTH = 12
"""The least width of the column that a table makes narrower."""
_MIN_TIMED_S = 0.2

did_you_mean = patterns.did_you_mean
format_age, format_count, format_seconds = display.format_age, display.format_count, display.format_seconds
format_size = display.format_size


class UsageError(CheckpointError, ValueError):
    """The command cannot do what its arguments ask for."""


# -- streams


def is_terminal(stream: TextIO | None = None) -> bool:
    return (stream or sys.stdout).isatty()


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the columns of a terminal; None if it is none, because programs such as grep need whole lines."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else None


def styled(text: str, style: Style, stream: TextIO | None = None) -> str:
    if not text or not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


class _Held(io.StringIO):
    """Holds what is printed until the pager shows it."""

    def isatty(self) -> bool:
        return True  # of what the pager writes to


@contextmanager
def paging() -> Iterator[None]:
    """Send what is printed inside to $PAGER, or less, if stdout is a terminal, as git does."""
    words = os.environ.get("PAGER", "less").split()
    wanted = is_terminal() and os.environ.get("TERM") != "dumb" and words not in ([], ["cat"])
    if not wanted or shutil.which(words[0]) is None:
        yield
        return
    held = _Held()
    try:
        with redirect_stdout(held):
            yield
    finally:
        if text := held.getvalue():
            # As git does: less ends by itself if all fits on the screen, shows colours, and leaves its last screen.
            env, encoding = {"LESS": "FRX", "LV": "-c", **os.environ}, sys.stdout.encoding
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
            subprocess.run(words, input=text.encode(encoding, "backslashreplace"), env=env, check=False)  # noqa: S603
            signal.signal(signal.SIGINT, before)


def echo_err(text: str, style: Style | None = None) -> None:
    """Print to stderr, so that stdout holds only results; on a terminal, long lines are wrapped."""
    text = wrap_lines(text, stream=sys.stderr)
    print(styled(text, style, sys.stderr) if style else text, file=sys.stderr)


# -- JSON


def print_json(document: Any, code: int = 0) -> int:
    """Print the one document of `--json`, indented on a terminal, and return the exit code of the command."""
    print(json.dumps(to_json(document), indent=2 if is_terminal() else None))
    return code


def to_json(value: Any) -> Any:
    """Return a value as JSON types: NaN and infinities as strings, and what JSON has no type for as its repr."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
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


def natural_order(text: str) -> list[tuple[int, str]]:
    """Return the key that sorts numbers in names as numbers: layer 2 comes before layer 10."""
    # Not by `int`, which refuses thousands of digits. In the list, texts and numbers alternate, so like meets like.
    parts = re.split("([0-9]+)", text)
    return [(len(part.lstrip("0")), part.lstrip("0")) if at % 2 else (0, part) for at, part in enumerate(parts)]


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def format_number(value: complex | None) -> str:
    """Return a number with six digits, an integer with all of its digits, and a dash for None."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)


def format_shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def format_speed(nbytes: int, seconds: float) -> str:
    """Return time and throughput as the end of a sentence; empty for what took so little time that both mean little."""
    speed = display.format_rate(nbytes, seconds)
    return f" in {format_seconds(seconds)}, {speed}" if seconds >= _MIN_TIMED_S else ""


def format_bar(share: float, width: int) -> str:
    whole, rest = divmod(round(share * width * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()


def shorten(text: str, width: int) -> str:
    """Leave out the last words of a text that is too long; a number or a word is cut only if it is the first."""
    if len(text) <= width:
        return text
    begin = text[: width - 1].rpartition(" ")[0]
    return f"{begin} …" if begin else text[: width - 1] + "…"


def shorten_name(text: str, width: int) -> str:
    """Leave the longest words out of a name that is too long: the ids of files, which say least."""
    while len(text) > width and (words := re.findall(r"\w+", text)):
        text = text.replace(max(words, key=len), "…", 1)
    return text


def wrap_lines(text: str, indent: str = "", stream: TextIO | None = None) -> str:
    """Indent all lines and, on a terminal, wrap those that are too long for it, but never inside a path or a key."""
    room = terminal_width(stream) or sys.maxsize
    lines = []
    for line in text.split("\n"):
        inner = line.lstrip(" ")
        begin = indent + line[: len(line) - len(inner)]
        wrapper = textwrap.TextWrapper(room, begin, begin, break_long_words=False, break_on_hyphens=False)
        lines.append(wrapper.fill(inner))
    return "\n".join(lines)


def titled(title: str, text: str, style: Style, stream: TextIO | None = None) -> str:
    whole = wrap_lines(title + text, stream=stream)
    return styled(title, style, stream) + whole[len(title) :] if whole.startswith(title) else whole


# -- tables and progress


@dataclass
class Table:
    """
    Rows under headings, with control characters escaped. Columns that are empty in every row are left out.

    On a terminal, lines are made to fit without cutting words or numbers. Plain string formatting, not rich: a listing
    may have a hundred thousand rows, for which rich takes half a minute, and a pipe must get whole lines.
    """

    headings: Sequence[str]
    right: Collection[str] = ()
    flexible: str = ""
    """The column that becomes narrower. A text that does not fit is wrapped if this is the last column; otherwise it gets a
    line of its own."""
    optional: Sequence[str] = ()
    """Columns that are left out before that, in this order; a line below the table names them."""
    indent: str = ""
    show_headings: bool = True
    _rows: list[tuple[tuple[str, ...], Style | None, str]] = field(default_factory=list)

    def add(self, *cells: str, style: Style | None = None, note: str = "") -> None:
        """Add a row: one text per column, its colour, and a note for a line of its own below the row."""
        self._rows.append((tuple(map(printable, cells)), style, printable(note)))

    def print(self) -> None:
        if not self._rows:
            return
        at_of = {heading: at for at, heading in enumerate(self.headings)}
        columns = list(zip(*(cells for cells, _, _ in self._rows), strict=True))
        widths = {
            at: max(len(self.headings[at]), *map(len, column)) for at, column in enumerate(columns) if any(column)
        }
        room = terminal_width() or sys.maxsize

        def excess() -> int:
            return len(self.indent) + sum(widths.values()) + 2 * (len(widths) - 1) - room

        left_out = [name for name in self.optional if excess() > 0 and widths.pop(at_of[name], None) is not None]
        flexible = at_of.get(self.flexible, -1)
        if flexible in widths and excess() > 0:
            widths[flexible] = max(_MIN_COLUMN_WIDTH, widths[flexible] - excess())
        if self.show_headings:
            print(styled(self._line(self.headings, widths), "dim"))
        for cells, style, note in self._rows:
            for line in self._lines(list(cells), widths, flexible):
                print(styled(line, style) if style else line)
            if note:
                print(wrap_lines(note, self.indent + "  "))
        if any(left_out):
            print(styled(wrap_lines(f"not shown, for lack of room: {', '.join(left_out)}", self.indent), "dim"))

    def _lines(self, cells: list[str], widths: dict[int, int], flexible: int) -> Iterator[str]:
        more: list[str] = []
        if flexible in widths and len(cells[flexible]) > widths[flexible]:
            if flexible == max(widths):
                cells[flexible], *more = textwrap.wrap(cells[flexible], widths[flexible], break_on_hyphens=False)
            else:
                yield wrap_lines(cells[flexible], self.indent)
                cells[flexible] = ""
        yield self._line(cells, widths)
        start = len(self.indent) + sum(width + 2 for at, width in widths.items() if at < flexible)
        yield from (" " * start + line for line in more)

    def _line(self, cells: Sequence[str], widths: dict[int, int]) -> str:
        signs = {at: ">" if self.headings[at] in self.right else "<" for at in widths}
        return self.indent + "  ".join(f"{cells[at]:{signs[at]}{width}}" for at, width in widths.items()).rstrip()


@contextmanager
def byte_bar(what: str, total_nbytes: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, if that is a terminal; yield the function that updates it, from any thread."""
    if not is_terminal(sys.stderr):
        yield lambda **_: None
        return
    from rich.console import Console  # noqa: PLC0415 - only if needed

    from shardkeep.reports.progress import byte_progress  # noqa: PLC0415

    with byte_progress(Console(stderr=True), auto_refresh=True) as bars:
        yield partial(bars.update, bars.add_task(what, total=total_nbytes))
