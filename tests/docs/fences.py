"""
The fenced blocks of a page, and what each of them promises.

    ```python                       runs in the test's process; all of a page share their names
    ```python title="train.py"      is written to a file of this name
    ```text title="prints"          is what the block before it printed
    ```console                      lines with "$ " run, the others are what they printed
    ```text                         is no code: a tree of folders, a formula
    ```console title="install"      does not run: it may only install something, which a test looks into
"""

import re
from dataclasses import dataclass

_FENCE = re.compile(r"^```(?P<language>\w*)(?P<options>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_OPTION = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Fence:
    language: str
    options: dict[str, str]
    body: str
    line: int
    """Of its first line of code, from 1."""
    begin: int
    """Where its body begins in the page."""

    @property
    def title(self) -> str:
        return self.options.get("title", "")

    @property
    def skipped(self) -> bool:
        return self.language == "console" and self.title == "install"

    @property
    def is_output(self) -> bool:
        """Whether it shows what the block before it printed."""
        return self.language == "text" and self.title == "prints"


def fences_of(page: str) -> list[Fence]:
    return [
        Fence(
            found["language"],
            dict(_OPTION.findall(found["options"])),
            found["body"],
            page.count("\n", 0, found.start("body")) + 1,
            found.start("body"),
        )
        for found in _FENCE.finditer(page)
    ]


@dataclass(frozen=True)
class Command:
    """One command of a console block, and what it is said to print."""

    words: str
    """As typed."""
    printed: str


def commands_of(fence: Fence) -> list[Command]:
    parts = re.split(r"^\$ ", fence.body, flags=re.MULTILINE)
    if parts[0].strip():
        raise ValueError(f"line {fence.line}: a console block begins with a command")
    found = []
    for part in parts[1:]:
        typed = re.match(r"(?:[^\n]*\\\n)*[^\n]*\n", part)
        words = typed.group() if typed else part
        found.append(Command(words.rstrip("\n"), part[len(words) :]))
    return found
