"""What the checkpoint of a step is called, and which step a name is of."""

from __future__ import annotations

import re
import string

from shardkeep.errors import StateError
from shardkeep.store.protocol import is_name

_SPEC = re.compile(r"(0[1-9]\d*)?d?")
_HINT = (
    'a template has the step in it once, as in "step-{step}" or "step-{step:08d}", and otherwise letters, digits, ._-'
)
_LARGEST = (1 << 63) - 1


class Naming:
    """A template with the step in it, used both ways."""

    def __init__(self, template: str) -> None:
        """
        Take a template, like "step-{step}" or "ckpt_{step:08d}".

        Raises:
            StateError: it names no step, or names that no store takes.

        """
        self.template = template
        try:
            parts = list(string.Formatter().parse(template))
        except (ValueError, TypeError) as exc:
            raise StateError(f"template is {template!r}: {exc}", hint=_HINT) from exc
        fields = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
        if len(fields) != 1 or fields[0][0] != "step" or fields[0][2] or not _SPEC.fullmatch(fields[0][1] or ""):
            raise StateError(f"template is {template!r}", hint=_HINT)
        at = next(row for row, part in enumerate(parts) if part[1] is not None)
        before = "".join(text for text, *_ in parts[: at + 1])
        after = "".join(text for text, *_ in parts[at + 1 :])
        self._pattern = re.compile(f"{re.escape(before)}([0-9]{{1,251}}){re.escape(after)}")
        if not is_name(template.format(step=_LARGEST)):
            raise StateError(f"template is {template!r}", hint=_HINT)

    def __repr__(self) -> str:
        return f"Naming({self.template!r})"

    def name(self, step: int) -> str:
        """Name the checkpoint of a step."""
        return self.template.format(step=step)

    def step(self, name: str) -> int | None:
        """Tell which step a name is of; None for a name that no step has."""
        found = self._pattern.fullmatch(name)
        step = int(found[1]) if found else -1
        return step if 0 <= step <= _LARGEST and self.name(step) == name else None


def template_of(name: str) -> str | None:
    """Guess the template of a name, by its last number."""
    found = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", name)
    if found is None:
        return None
    before, digits, after = found.groups()
    width = f":0{len(digits)}d" if digits.startswith("0") and len(digits) > 1 else ""
    return f"{before}{{step{width}}}{after}"
