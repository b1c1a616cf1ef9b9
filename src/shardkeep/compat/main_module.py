"""
A script or a module run as the main one, in the process that is running already.

Its `__main__` stays, as that of a script that Python runs itself: saves that go on after its last line still find its
classes there, and processes that are spawned find the file. (What `runpy` runs is gone when it has ended.)
"""

from __future__ import annotations

import importlib.util
import io
import os
import pkgutil
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any


def run_as_main(target: str, *, as_module: bool) -> None:
    """
    Run a module by its name, or a file, a folder or a zip archive by its path.

    Raises:
        ImportError: there is no such module, or nothing in it to run.
        OSError: the file cannot be read.

    """
    module, code = _module_named(target) if as_module else _found_in(target) or _file(target)
    sys.modules["__main__"] = module
    exec(code, vars(module))  # noqa: S102 - what was asked for


def _module_named(name: str) -> tuple[ModuleType, CodeType]:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"No module named {name}")
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None:
            raise ImportError(f"No module named {name}.__main__; {name!r} is a package and cannot be run")
    sys.argv[0] = spec.origin or name
    return _of_spec(spec)


def _found_in(path: str) -> tuple[ModuleType, CodeType] | None:
    """Look for the main module of a folder or an archive; None for a file."""
    finder: Any = pkgutil.get_importer(path)
    if finder is None:
        return None
    spec = finder.find_spec("__main__")
    if spec is None:
        raise ImportError(f"there is no __main__ module in {path!r}")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = path
    else:
        sys.path.insert(0, path)
    return _of_spec(spec)


def _of_spec(spec: ModuleSpec) -> tuple[ModuleType, CodeType]:
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise ImportError(f"{spec.name} has no code to run")
    module = ModuleType("__main__")
    found = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": loader}
    vars(module).update(found, __package__=spec.parent or "", __spec__=spec)
    return module, code


def _file(path: str) -> tuple[ModuleType, CodeType]:
    where = os.path.abspath(path)
    with io.open_code(where) as file:
        code: CodeType | None = pkgutil.read_code(file)  # None if it is not compiled
    if code is None:
        with io.open_code(where) as file:
            code = compile(file.read(), where, "exec")
    module = ModuleType("__main__")
    vars(module).update(__file__=where, __cached__=None, __loader__=SourceFileLoader("__main__", where))
    return module, code
