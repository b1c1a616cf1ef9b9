"""
What commands print: text, tables, sizes and ages for people, one JSON document for programs, errors with suggestions.

Results go to stdout, notes and errors to stderr. Colours and the pager are used only on a terminal, and colours not if
NO_COLOR is set. Names that come from a checkpoint are printed with control characters escaped, so that a hostile key cannot control the terminal.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, cast

from shardkeep import display
from shardkeep.errors import CheckpointError
from shardkeep.state import patterns

if TYPE_CHECKING:
    from rich.progress import Progress

Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]
_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_MIN_COLUMN_WIDTH = 12
"""The least width of the column that a table makes narrower."""
_SPILT_WIDTH = 24
"""The room for a text that extends over empty columns: every float fits."""
_SHOW_AFTER_S = 0.5
"""Work that takes less gets no progress bar."""

format_age, format_count, format_seconds = display.format_age, display.format_count, display.format_seconds
format_size = display.format_size


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


class _Pager(io.TextIOBase):
    """Writes to the user's pager. It starts with the first text, so that a progress bar can come before it."""

    def __init__(self, words: list[str], screen: TextIO) -> None:
        self._words, self._screen = words, screen
        self._process: subprocess.Popen[str] | None = None

    def isatty(self) -> bool:
        return True  # of what the pager writes to

    def write(self, text: str) -> int:
        if self._process is None:
            # As git does: less ends by itself if all fits on the screen, shows colours, and leaves its last screen.
            env = {"LESS": "FRX", "LV": "-c", **os.environ}
            how: dict[str, Any] = {"encoding": self._screen.encoding, "errors": "backslashreplace", "env": env}
            how |= {"stdin": subprocess.PIPE, "stdout": self._screen}
            self._process = subprocess.Popen(self._words, **how)  # noqa: S603 - the user's own
        return cast("IO[str]", self._process.stdin).write(text)

    def finish(self) -> None:
        """Wait until the user closes the pager. Ctrl-C is for the pager."""
        if self._process is None:
            return
        with suppress(BrokenPipeError):
            cast("IO[str]", self._process.stdin).close()
        while True:
            with suppress(KeyboardInterrupt):
                self._process.wait()
                return


@contextmanager
def paging() -> Iterator[None]:
    """Send what is printed inside to $PAGER, or less, if stdout is a terminal, as git does."""
    words: list[str] = []
    with suppress(ValueError):  # quotes that are not closed
        words = shlex.split(os.environ.get("PAGER", "less"))
    wanted = is_terminal() and os.environ.get("TERM") != "dumb" and words not in ([], ["cat"])
    if not wanted or shutil.which(words[0]) is None:
        yield
        return
    pager = _Pager(words, sys.stdout)
    try:
        with redirect_stdout(pager):
            yield
    finally:
        pager.finish()


def echo_err(text: str, style: Style | None = None) -> None:
    """Print to stderr, so that stdout holds only results; on a terminal, long lines are wrapped."""
    text = wrap_lines(text, stream=sys.stderr)
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


def natural_order(text: str) -> list[tuple[int, str]]:
    """Return the key that sorts numbers in names as numbers: layer 2 comes before layer 10."""
    # Not by `int`, which refuses thousands of digits. In the list, texts and numbers alternate, so like meets like.
    parts = re.split("([0-9]+)", text)
    return [(len(part.lstrip("0")), part.lstrip("0")) if at % 2 else (0, part) for at, part in enumerate(parts)]


def printable(text: str) -> str:
    """Return a name with control characters escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines with control characters escaped."""
    return "\n".join(map(printable, text.split("\n")))


def format_number(value: complex | None) -> str:
    """Return a number with six digits, an integer with all of its digits, and a dash for None."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape as torch writes it: [1024, 4096]."""
    return f"[{', '.join(map(str, shape))}]"


def format_speed(nbytes: int, seconds: float, at_least_s: float) -> str:
    """Return time and throughput as the end of a sentence; empty below `at_least_s`, where both mean little."""
    speed = display.format_rate(nbytes, seconds)
    return f" in {format_seconds(seconds)}, {speed}" if seconds >= at_least_s else ""


def format_bar(share: float, width: int) -> str:
    """Return a bar in eighths of a character."""
    whole, rest = divmod(round(share * width * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest].strip()


def shorten(text: str, width: int) -> str:
    """Leave out the last words of a text that is too long; a number or a word is cut only if it is the first."""
    if len(text) <= width:
        return text
    begin = text[: width - 1].rpartition(" ")[0]
    return f"{begin} …" if begin else text[: width - 1] + "…"


def shorten_middle(text: str, width: int) -> str:
    """Leave words out of the middle of a name that is too long, because both ends say more."""
    if len(text) <= width:
        return text
    words = re.findall(r"\w+|\W+", text)

    def fitting(words: Iterable[str], room: int) -> list[str]:
        ends = accumulate(map(len, words))
        return [word for word, end in zip(words, ends, strict=True) if end <= room]

    head = fitting(words, (width - 1) // 2)
    tail = fitting(words[::-1], width - 1 - len("".join(head)))[::-1]
    head = fitting(words, width - 1 - len("".join(tail)))
    return "".join([*head, "…", *tail]) if head or tail else text[: width - 1] + "…"


def wrap_lines(text: str, indent: str = "", stream: TextIO | None = None) -> str:
    """Indent all lines and, on a terminal, wrap those that are too long for it."""
    room = terminal_width(stream) or sys.maxsize
    lines = []
    for line in text.split("\n"):
        inner = line.lstrip(" ")
        begin = indent + line[: len(line) - len(inner)]
        wrapper = _Wrapper(room, initial_indent=begin, subsequent_indent=begin, break_on_hyphens=False)
        lines.append(wrapper.fill(inner))
    return "\n".join(lines)


def titled(title: str, text: str, style: Style, stream: TextIO | None = None) -> str:
    """Return a title in a colour and the text after it, wrapped together."""
    whole = wrap_lines(title + text, stream=stream)
    return styled(title, style, stream) + whole[len(title) :] if whole.startswith(title) else whole


class _Wrapper(textwrap.TextWrapper):
    def _handle_long_word(
        self, reversed_chunks: list[str], cur_line: list[str], cur_len: int, width: int
    ) -> None:  # a key or a path that is longer than a line continues after a dot, a slash or a dash
        chunk = reversed_chunks[-1]
        if (cut := 1 + max(chunk.rfind(end, 0, width - cur_len) for end in "./-_")) > 0:
            cur_line.append(chunk[:cut])
            reversed_chunks[-1] = chunk[cut:]
        else:
            super()._handle_long_word(reversed_chunks, cur_line, cur_len, width)


# -- tables and progress


@dataclass
class Table:
    """
    Rows under headings. Columns that are empty in every row are left out.

    On a terminal, lines are made to fit without cutting words or numbers. Plain string formatting, not rich: a listing
    may have a hundred thousand rows, for which rich takes half a minute, and a pipe must get whole lines.
    """

    headings: Sequence[str]
    right: Collection[str] = ()
    """Headings of the right-aligned columns."""
    flexible: str = ""
    """The column that becomes narrower. A text that does not fit is wrapped if this is the last column; otherwise it gets a
    line of its own."""
    optional: Sequence[str] = ()
    """Columns that are left out before that, in this order; a line below the table names them."""
    spills: str = ""
    """A column whose texts may extend over the columns after it, where those are empty."""
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
        at_of = {heading: at for at, heading in enumerate(self.headings)}
        spills, flexible = at_of.get(self.spills, -1), at_of.get(self.flexible, -1)
        found: dict[int, int] = {}
        spilt = 0
        for cells, _, _ in self._rows:
            alone = spills >= 0 and not any(cells[spills + 1 :])
            spilt = max(spilt, len(cells[spills]) if alone else 0)
            for at, cell in enumerate(cells):
                if cell:
                    found[at] = max(found.get(at, len(self.headings[at])), 0 if alone and at == spills else len(cell))
        widths = dict(sorted(found.items()))
        room = terminal_width() or sys.maxsize

        def excess() -> int:
            after = [width for at, width in widths.items() if at >= spills]
            lacking = max(0, min(spilt, _SPILT_WIDTH) - sum(after) - 2 * len(after) + 2)
            return len(self.indent) + sum(widths.values()) + 2 * (len(widths) - 1) + lacking - room

        left_out = [name for name in self.optional if excess() > 0 and widths.pop(at_of[name], None) is not None]
        if flexible in widths and excess() > 0:
            widths[flexible] = max(_MIN_COLUMN_WIDTH, widths[flexible] - excess())
        if self.show_headings:
            print(styled(self._line(self.headings, widths), "dim"))
        for cells, style, note in self._rows:
            for line in self._lines(list(cells), widths, flexible, spills, room):
                print(styled(line, style) if style else line)
            if note:
                print(wrap_lines(note, self.indent + "  "))
        if any(left_out):
            print(styled(wrap_lines(f"not shown, for lack of room: {', '.join(left_out)}", self.indent), "dim"))

    def _lines(self, cells: list[str], widths: dict[int, int], flexible: int, spills: int, room: int) -> Iterator[str]:
        more: list[str] = []

        def start_of(column: int) -> int:
            return len(self.indent) + sum(width + 2 for at, width in widths.items() if at < column)

        if flexible in widths and len(cells[flexible]) > widths[flexible]:
            if flexible == max(widths):
                cells[flexible], *more = textwrap.wrap(cells[flexible], widths[flexible], break_on_hyphens=False)
            else:
                yield wrap_lines(cells[flexible], self.indent)
                cells[flexible] = ""
        if spills in widths and not any(cells[spills + 1 :]):
            cells[spills] = shorten(cells[spills], max(_MIN_COLUMN_WIDTH, room - start_of(spills)))
        yield self._line(cells, widths)
        yield from (" " * start_of(flexible) + line for line in more)

    def _line(self, cells: Sequence[str], widths: dict[int, int]) -> str:
        signs = {at: ">" if self.headings[at] in self.right else "<" for at in widths}
        return self.indent + "  ".join(f"{cells[at]:{signs[at]}{width}}" for at, width in widths.items()).rstrip()


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
