"""
Objects of torch's tree that were there before our tree took its place, and still have to be pickled.

Pickle refers to a class by its name, and refuses to if another class is found under that name: here ours. So what goes
to other processes is given a way of its own, that finds torch's class again; and the file of metadata, which torch's
writer pickles and its reader unpickles, has the names that it always had.
"""

from __future__ import annotations

import copyreg
import importlib
import pickle
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from shardkeep.compat.import_hook import PACKAGE, finder, root_of

Modules = Mapping[str, ModuleType]
_FILES = f"{PACKAGE}.filesystem"


def keep_pickling(displaced: Modules) -> None:
    """Have the classes of these modules be pickled although ours are found under their names."""
    for kind in classes_of(displaced):
        copyreg.pickle(kind, _reduced)
    if _FILES in displaced:
        own = {**vars(pickle), "dump": _dump, "load": _load}
        displaced[_FILES].pickle = SimpleNamespace(**own)  # type: ignore[attr-defined]


def pickle_as_before(displaced: Modules) -> None:
    """Undo it."""
    for kind in classes_of(displaced):
        copyreg.dispatch_table.pop(kind, None)
    if _FILES in displaced:
        displaced[_FILES].pickle = pickle  # type: ignore[attr-defined]


def classes_of(modules: Modules) -> set[type]:
    """Return the classes that these modules define."""
    return {
        value
        for name, module in modules.items()
        for value in vars(module).values()
        if issubclass(type(value), type) and value.__module__ == name
    }


def torchs_own(module: str, name: str) -> Any:
    """Return a class of torch's tree, also while ours is in its place, if torch's was loaded before."""
    hook = finder()
    kept = hook.displaced.get(module) if hook is not None else None
    return getattr(kept or importlib.import_module(module), name)


def _made(module: str, name: str, new: bool, args: tuple[Any, ...]) -> Any:
    kind = torchs_own(module, name)
    return kind.__new__(kind, *args) if new else kind(*args)


def _reduced(value: Any) -> Any:
    """Say how to make a value again, as it says itself, with its class found by `torchs_own`."""
    kind = type(value)
    make, args, *rest = value.__reduce_ex__(2)
    new = make is copyreg.__newobj__  # type: ignore[attr-defined]  # absent from the stubs
    if not new and make is not kind:
        return (make, args, *rest)
    return (_made, (kind.__module__, kind.__qualname__, new, args[1:] if new else args), *rest)


_PythonPickler: Any = pickle._Pickler
"""The pickler in Python: that in C asks whether names fit."""


class _ByName(_PythonPickler):  # type: ignore[misc]  # of no type
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        hook = finder()
        self._classes = classes_of(hook.displaced) if hook is not None else set()
        self.dispatch_table = {kind: how for kind, how in copyreg.dispatch_table.items() if kind not in self._classes}

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not isinstance(obj, type) or obj not in self._classes:
            super().save_global(obj, name)
            return
        self.save(obj.__module__)
        self.save(obj.__qualname__)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


class _ToTorchs(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return torchs_own(module, name) if root_of(module) else super().find_class(module, name)


def _dump(value: object, file: Any) -> None:
    _ByName(file).dump(value)


def _load(file: Any) -> Any:
    return _ToTorchs(file).load()
