"""
Write what commands really print, and the table of variables, into the pages: `python -m tests.docs.refresh docs/cli.md`.

Only blocks whose output is not what it should be are changed. Read the difference before you commit it.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

from tests.docs.fences import fences_of
from tests.docs.masks import masked
from tests.docs.running import Reader
from tests.docs.troubles import TROUBLES, text_of
from tests.docs.variables import HEAD, table
from tests.support.rank_pool import RankPool


def refresh(page: Path, pool: RankPool) -> int:
    """Put real output into a page, and return how many blocks have changed."""
    os.chdir(tempfile.mkdtemp())
    real = list(Reader(page, pool).follow())
    for fence in fences_of(page.read_text()):
        if fence.language == "text" and fence.title in TROUBLES:
            os.chdir(tempfile.mkdtemp())
            real.append((fence, text_of(fence.title)))
    text = page.read_text()
    changed = [(fence, printed) for fence, printed in real if masked(fence.body) != masked(printed)]
    for fence, printed in sorted(changed, key=lambda each: -each[0].begin):
        lines = "\n".join(line.rstrip() for line in printed.strip("\n").split("\n")) + "\n"
        text = text[: fence.begin] + lines + text[fence.begin + len(fence.body) :]
    text = re.sub(rf"{re.escape(HEAD)}(\|.*\n)*", lambda _: table(), text)
    page.write_text(text)
    return len(changed)


if __name__ == "__main__":
    paths = [Path(word).resolve() for word in sys.argv[1:]]
    with RankPool(4) as ranks:
        for path in paths:
            print(f"{path.name}: {refresh(path, ranks)} blocks changed")
