"""For the API reference: a docstring's section "Example:" is what griffe calls "Examples:"."""

# ruff: noqa: INP001 - mkdocs loads it by its path

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """Renames the section, in what griffe has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Look at one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)
