"""Packages that only some codecs need, imported when they are used."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from shardkeep.codec.problems import CodecUnavailable


@cache
def need(module: str, *, extra: str, wanted_by: str) -> Any:
    """
    Import a module of a package that shardkeep does not depend on.

    Raises:
        CodecUnavailable: it cannot be imported; says what to install.

    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise CodecUnavailable(
            f"{wanted_by} needs a package that is not installed: {exc}", hint=f"pip install 'shardkeep[{extra}]'"
        ) from exc
