"""What can go wrong before there is anything to report."""

from __future__ import annotations

import importlib
from typing import Any

from shardkeep.errors import CheckpointError


class PackageMissing(CheckpointError, ImportError):
    """A report needs a package that is not installed."""


def need(module: str, *, package: str, wanted_by: str) -> Any:
    """
    Import a module of a package that shardkeep does not depend on.

    Raises:
        PackageMissing: it cannot be imported; says what to install.

    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise PackageMissing(
            f"{wanted_by} needs the package {package}: {exc}", hint=f"pip install {package}", package=package
        ) from exc
