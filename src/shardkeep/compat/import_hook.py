"""
Our tree in the place of torch's, for imports.

A finder in front of all others answers for `torch.distributed.checkpoint` and everything below it: with the very module
of `shardkeep.dcp` that has the same name, so that there is one module and one set of classes under both names. What our
tree does not have is torch's own. Nothing is imported before somebody asks for it, not even torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "torch.distributed.checkpoint"
ROOTS = {
    PACKAGE: "shardkeep.dcp",
    "torch.distributed._shard.checkpoint": "shardkeep.dcp",  # where it was before torch 2.0
    "torch.distributed._state_dict_utils": "shardkeep.dcp._state_dict_utils",
}


def root_of(name: str) -> str | None:
    """Return the root that a module is, or is below of; None for any other module."""
    return next((root for root in ROOTS if name == root or name.startswith(f"{root}.")), None)


def our_name(fullname: str) -> str | None:
    """Return which module of ours stands for one of torch's tree; None if there is none."""
    root = root_of(fullname)
    if root is None or fullname == root:
        return ROOTS.get(fullname)
    below = fullname[len(root) + 1 :]
    if "." in below or below == "__main__":
        return None
    package = importlib.import_module(ROOTS[root])
    name = f"{package.__name__}.{below}"
    return name if PathFinder.find_spec(name, package.__path__) is not None else None


def loaded() -> dict[str, ModuleType]:
    """Return the modules that are loaded under torch's names, ours or torch's own."""
    return {name: module for name, module in list(sys.modules.items()) if root_of(name)}


class Finder(MetaPathFinder):
    """Answers for torch's tree. That it is in `sys.meta_path` is what being installed means."""

    def __init__(self) -> None:
        self.displaced: dict[str, ModuleType] = {}
        """Torch's own modules that were loaded before, by name."""
        self.attributes: dict[str, ModuleType] = {}
        """What the parents of the roots had under their names before, by full name."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002 - Python's arguments
    ) -> ModuleSpec | None:
        """Return where a module of torch's tree is; None for any other, which is left to the finders after this one."""
        root = root_of(fullname)
        if root is None:
            return None
        name = our_name(fullname)
        return _torchs_own(fullname, root, path) if name is None else _alias(fullname, name)


def finder() -> Finder | None:
    """Return the finder that is at work, or None."""
    return next((each for each in sys.meta_path if isinstance(each, Finder)), None)


def _alias(fullname: str, name: str) -> ModuleSpec:
    spec = ModuleSpec(fullname, _Alias(name), is_package=name == "shardkeep.dcp")
    ours = find_spec(name)
    spec.origin = ours.origin if ours is not None else None
    return spec


def _torchs_own(fullname: str, root: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if fullname.count(".") == root.count(".") + 1:
        # Its parent is our package now, whose folder is not torch's.
        parent = sys.modules[root.rpartition(".")[0]]
        path = [os.path.join(folder, root.rpartition(".")[2]) for folder in parent.__path__]
    return PathFinder.find_spec(fullname, path)


class _Alias(Loader):
    """Gives a module that has another name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - Python's arguments
        """Return the module, imported under its own name."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing but give the module its own spec back: it runs only once, under its own name."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:  # noqa: ARG002 - Python's arguments
        """Return the module's code, for `python -m`."""
        spec = find_spec(self._name)
        loader: Any = spec.loader if spec is not None else None
        return None if loader is None else loader.get_code(self._name)
