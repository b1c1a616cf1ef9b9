"""
`shardkeep.dcp.install()`: later imports of `torch.distributed.checkpoint` give `shardkeep.dcp`.

In this process, an import hook at the front of `sys.meta_path` returns the module of `shardkeep.dcp` that has the same
name, so that there is one module and one set of classes under both names. Modules that only torch has stay torch's. Child
processes are reached through two environment variables and `startup/sitecustomize.py`. This module is not part of the
package `dcp` because installing must not import torch.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import os
import pickle
import runpy
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from shardkeep.options import set_for_children, setting

PACKAGE = "torch.distributed.checkpoint"
ROOTS = {
    PACKAGE: "shardkeep.dcp",
    "torch.distributed._shard.checkpoint": "shardkeep.dcp",  # where it was before torch 2.0
    "torch.distributed._state_dict_utils": "shardkeep.dcp._state_dict_utils",
}


def root_of(name: str) -> str | None:
    return next((root for root in ROOTS if name == root or name.startswith(f"{root}.")), None)


def our_name(fullname: str) -> str | None:
    """Return the name of our module for a module of torch's; None if we have none."""
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
    return {name: module for name, module in list(sys.modules.items()) if root_of(name)}


class Finder(MetaPathFinder):
    """Answers for torch's tree. That it is in `sys.meta_path` is what being installed means."""

    def __init__(self) -> None:
        self.displaced: dict[str, ModuleType] = {}
        """Torch's modules that were loaded before the installation."""
        self.attributes: dict[str, ModuleType] = {}
        """The attributes of the parent packages that the installation replaced, by full name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module below `ROOTS`; None for any other, which the next finder looks up."""
        root = root_of(fullname)
        if root is None:
            return None
        name = our_name(fullname)
        if name is not None:
            ours = find_spec(name)
            origin = ours.origin if ours is not None else None
            return ModuleSpec(fullname, _Alias(name), origin=origin, is_package=name == "shardkeep.dcp")
        if fullname.count(".") == root.count(".") + 1:
            # Its parent is now our package, whose path does not contain torch's modules.
            parent, _, child = root.rpartition(".")
            path = [os.path.join(folder, child) for folder in sys.modules[parent].__path__]
        return PathFinder.find_spec(fullname, path)


def finder() -> Finder | None:
    return next((each for each in sys.meta_path if isinstance(each, Finder)), None)


class _Alias(Loader):
    """Loads a module that already exists under another name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec. The module was executed when it was imported under its own name."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        spec = find_spec(self._name)
        loader: Any = spec.loader if spec is not None else None
        return None if loader is None else loader.get_code(self._name)


# -- pickling instances of torch's classes after the installation ------------------------------------------------------
#
# Pickle refuses a class if another class is found under its name, and after the installation ours is. Instances that go to
# other processes are therefore reduced to a function that finds torch's class again. `.metadata` files, which torch's
# writer pickles and torch's reader unpickles, keep torch's names.

Modules = Mapping[str, ModuleType]
_FILES = f"{PACKAGE}.filesystem"


def keep_pickling(displaced: Modules) -> None:
    """Register reducers for the classes of these modules, so that they can be pickled while ours have their names."""
    for kind in classes_of(displaced):
        copyreg.pickle(kind, _reduced)
    if _FILES in displaced:
        own = {"dump": lambda value, file: _ByName(file).dump(value), "load": lambda file: _ToTorchs(file).load()}
        displaced[_FILES].pickle = SimpleNamespace(**{**vars(pickle), **own})  # type: ignore[attr-defined]


def classes_of(modules: Modules) -> set[type]:
    return {
        value
        for name, module in modules.items()
        for value in vars(module).values()
        if issubclass(type(value), type) and value.__module__ == name
    }


def torchs_own(module: str, name: str) -> Any:
    """Return torch's class, even while ours has its name, if torch's module was loaded before."""
    hook = finder()
    kept = hook.displaced.get(module) if hook is not None else None
    return getattr(kept or importlib.import_module(module), name)


def _made(module: str, name: str, new: bool, args: tuple[Any, ...]) -> Any:
    kind = torchs_own(module, name)
    return kind.__new__(kind, *args) if new else kind(*args)


def _reduced(value: Any) -> Any:
    """Reduce a value as its own `__reduce_ex__` does, with its class looked up by `torchs_own`."""
    kind = type(value)
    make, args, *rest = value.__reduce_ex__(2)
    new = make is copyreg.__newobj__  # type: ignore[attr-defined]  # absent from the stubs
    if not new and make is not kind:
        return (make, args, *rest)
    return (_made, (kind.__module__, kind.__qualname__, new, args[1:] if new else args), *rest)


_PythonPickler: Any = pickle._Pickler
"""The pickler in Python: the one in C checks that a class is found under its name."""


class _ByName(_PythonPickler):  # type: ignore[misc]  # untyped
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


def run_as_main(target: str, *, as_module: bool) -> None:
    """
    Run a module by its name, or a file by its path; exits with a message if it cannot be run.

    Unlike with `runpy.run_path`, the module stays in `sys.modules`, as with a script that Python itself runs: saves that
    outlive the last line still find its classes, and spawned processes find its file.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    if as_module:
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # as `python -m` does
    else:
        where = os.path.abspath(target)
        with io.open_code(where) as file:
            code = compile(file.read(), where, "exec")
        vars(main).update(__file__=where, __cached__=None, __loader__=SourceFileLoader("__main__", where))
        exec(code, vars(main))  # noqa: S102 - running the script is the purpose


ASKED = "SHARDKEEP_DCP_INSTALL"
"""Child processes install too if this variable is "1" in their environment."""

_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
_USAGE = "usage: python -m shardkeep.dcp (script.py | -m module) [args ...]"


def install() -> None:
    """
    Replace `torch.distributed.checkpoint` by `shardkeep.dcp` for all later imports. Calling it again does nothing.

    This includes its submodules, `torch.distributed._state_dict_utils`, and processes started from here by
    `multiprocessing`, `subprocess` or `torchrun`. Modules that only torch has (`_experimental`) stay torch's.

    Names that were imported before stay torch's, and a warning lists them. They keep working on plain tensors, but may
    fail on DTensors, which describe themselves in our classes from now on, and with `AsyncCheckpointerType.PROCESS`.
    Therefore call this first.

    Child processes learn of the installation from PYTHONPATH and SHARDKEEP_DCP_INSTALL. It does not reach processes with
    another environment, from a fork server that was started before, or of a Python that ignores both (`-E`, `-I`).
    """
    if finder() is not None:
        return
    _stop_waiting()
    hook = Finder()
    hook.displaced = loaded()
    parents = {name: sys.modules.get(name.rpartition(".")[0]) for name in ROOTS}
    held = {name: getattr(parents[name], name.rpartition(".")[2], None) for name in ROOTS}
    hook.attributes = {name: module for name, module in held.items() if module is not None}
    for name in hook.displaced:
        del sys.modules[name]
    sys.meta_path.insert(0, hook)
    try:
        keep_pickling(hook.displaced)
        # Load our modules where torch's were loaded, so that attribute access without an import finds ours.
        for name in filter(our_name, hook.displaced):
            importlib.import_module(name)
    except BaseException:
        uninstall()
        raise
    _set_children_environment()
    users = sorted(_held_by_users(hook.displaced)) if hook.displaced else []
    if users:
        warnings.warn(
            f"these names were imported before shardkeep.dcp.install(), and stay torch's: {', '.join(users)}; "
            "call it before they are imported",
            stacklevel=2,
        )


def uninstall() -> None:
    """
    Undo `install`: imports give torch's modules again, here and in processes started from now on.

    Names that were imported in the meantime stay ours, except in modules of torch.
    """
    _set_children_environment(no_more=True)
    _stop_waiting()
    hook = finder()
    if hook is None:
        return
    sys.meta_path.remove(hook)
    ours = loaded()
    for name, module in ours.items():
        del sys.modules[name]
        _forget(name, module)
    sys.modules.update(hook.displaced)
    for kind in classes_of(hook.displaced):
        copyreg.dispatch_table.pop(kind, None)
    if _FILES in hook.displaced:
        hook.displaced[_FILES].pickle = pickle  # type: ignore[attr-defined]
    for name, module in hook.attributes.items():
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    _give_back(ours)


def install_if_asked() -> Finder | None:
    """Install if the parent process had, and return the finder."""
    if setting(ASKED) == "1":
        install()
    return finder()


def run(argv: Sequence[str]) -> None:
    """Install, then run a script or a module as Python would: `[script, *args]` or `["-m", module, *args]`."""
    args = list(argv)
    as_module = args[:1] == ["-m"]
    if as_module:
        del args[0]
    if not args or args[0].startswith("-"):
        raise SystemExit(_USAGE)
    install()
    sys.argv[:] = args
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11: the script's folder is left out then
        sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(args[0]))
    run_as_main(args[0], as_module=as_module)


def _stop_waiting() -> None:
    sys.meta_path[:] = [each for each in sys.meta_path if not hasattr(each, "awaits")]


def _forget(name: str, module: ModuleType) -> None:
    """Delete the attribute that importing a module set on its parent: ours on torch's package, or torch's on ours."""
    parent, _, child = name.rpartition(".")
    root = root_of(name)
    holder = sys.modules.get(parent if name == root else ROOTS.get(parent, ""))
    is_ours = module.__name__.startswith("shardkeep.")
    if holder is not None and getattr(holder, child, None) is module and is_ours == (name == root):
        delattr(holder, child)


def _give_back(ours: Mapping[str, ModuleType]) -> None:
    """In modules of torch that were loaded while ours was installed, replace our objects by torch's."""
    homes = {
        id(value): (name, key)
        for name, module in ours.items()
        for key, value in vars(module).items()
        if _defined_by_us(value)
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and not root_of(name):
            for key, value in list(getattr(module, "__dict__", {}).items()):
                if _defined_by_us(value) and id(value) in homes:
                    home, attribute = homes[id(value)]
                    setattr(module, key, getattr(importlib.import_module(home), attribute, value))


def _defined_by_us(value: object) -> bool:
    return _is_definition(value) and str(getattr(value, "__module__", "")).startswith("shardkeep.")


def _is_definition(value: object) -> bool:
    # Not `isinstance`: a module may hold a lazy proxy that raises when an attribute of it is read.
    return issubclass(type(value), (type, FunctionType))


def _held_by_users(displaced: Mapping[str, ModuleType]) -> Iterator[str]:
    """Find names outside of torch that are bound to modules, classes and functions of torch's checkpoint package."""
    modules = {id(module) for module in displaced.values()}
    for name, module in {id(each): (name, each) for name, each in reversed(list(sys.modules.items()))}.values():
        if name.partition(".")[0] in ("torch", "shardkeep"):
            continue
        for key, value in list((getattr(module, "__dict__", None) or {}).items()):
            if id(value) in modules or (_is_definition(value) and getattr(value, "__module__", None) in displaced):
                yield f"{name}.{key}"


def _set_children_environment(*, no_more: bool = False) -> None:
    before = setting("PYTHONPATH")
    folders = [each for each in before.split(os.pathsep) if each != _STARTUP] if before else []
    if not no_more:
        folders.insert(0, _STARTUP)
    set_for_children("PYTHONPATH", os.pathsep.join(folders) or None)
    set_for_children(ASKED, None if no_more else "1")
