"""The checkpoints of a run, found by the names of its directories. Reads commit records only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from shardkeep.manage.catalog import Catalog
from shardkeep.manage.entries import Entry
from shardkeep.manage.naming import Naming
from shardkeep.options import Options
from shardkeep.store.place import open_root

DEFAULT = "step-{step}"
_NUMBERED = re.compile(r"(.*?)([0-9]+)")


@dataclass(frozen=True)
class Run:
    """A directory of checkpoints."""

    path: str
    """As it was written on the command line."""
    catalog: Catalog

    @cached_property
    def _entries(self) -> list[Entry]:
        return self.catalog.entries()

    def entries(self) -> list[Entry]:
        """Return all there is, the newest first."""
        return self._entries

    def path_of(self, entry: Entry) -> str:
        """Return the path of a checkpoint, as the run's was written."""
        return f"{self.path.rstrip('/')}/{entry.name}"


def open_run(path: str, template: str | None = None) -> Run:
    """Look at a directory of checkpoints; what they are called is found out unless a template is given."""
    root = open_root(path, direct=Options().direct_io)
    return Run(path, Catalog(root, template or template_of(root.places())))


def template_of(names: Iterable[str]) -> str:
    """
    Find the template that most names have: `step-{step}`, `checkpoint-{step}`, `iter_{step:07d}` or alike.

    The default, where a name fits it or none has a number at its end.
    """
    found = list(names)
    default = Naming(DEFAULT)
    if any(default.step(name) is not None for name in found):
        return DEFAULT
    numbered = [match for match in map(_NUMBERED.fullmatch, found) if match]
    if not numbered:
        return DEFAULT
    prefix = Counter(match[1] for match in numbered).most_common(1)[0][0]
    digits = [match[2] for match in numbered if match[1] == prefix]
    padded = any(number.startswith("0") and number != "0" for number in digits)
    return prefix + (f"{{step:0{min(map(len, digits))}d}}" if padded else "{step}")
