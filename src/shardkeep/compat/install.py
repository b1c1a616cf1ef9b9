"""
`shardkeep.dcp.install()`: later imports of `torch.distributed.checkpoint` give `shardkeep.dcp`.

In this process by a finder (`import_hook.py`), in those it starts by two variables of their environment (`startup/`).
Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType

from shardkeep.compat.displaced import keep_pickling, pickle_as_before
from shardkeep.compat.import_hook import ROOTS, Finder, finder, loaded, our_name, root_of
from shardkeep.compat.main_module import run_as_main
from shardkeep.options import set_for_children, setting

ASKED = "SHARDKEEP_DCP_INSTALL"
"""The variable that has processes started from this one install too; "0" for one of them keeps it from that."""

_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
_USAGE = "usage: python -m shardkeep.dcp (script.py | -m module) [args ...]"


def install() -> None:
    """
    Have `torch.distributed.checkpoint` be `shardkeep.dcp`, for all imports from now on.

    That holds for its submodules, for `torch.distributed._state_dict_utils`, and for processes started from here, by
    `multiprocessing`, `subprocess` or `torchrun`. What shardkeep does not have (`_experimental`) stays torch's. Calling
    it again does nothing.

    Names that were imported before keep what they had, which is torch's; a warning lists them. They go on to work on
    plain tensors, but may not on DTensors, which describe themselves to ours from now on, nor for saves in a process of
    their own. So call it first.

    Processes learn of it by PYTHONPATH and SHARDKEEP_DCP_INSTALL: not if they are started with another environment, by
    a fork server that was started before, or by a Python that ignores both (`-E`, `-I`).
    """
    if finder() is not None:
        return
    _stop_waiting()
    hook = Finder()
    hook.displaced = loaded()
    hook.attributes = {name: held for name in ROOTS if (held := _attribute(name)) is not None}
    for name in hook.displaced:
        del sys.modules[name]
    sys.meta_path.insert(0, hook)
    try:
        keep_pickling(hook.displaced)
        _take_places(hook)
    except BaseException:
        uninstall()
        raise
    _tell_children()
    users = sorted(_held_by_users(hook.displaced)) if hook.displaced else []
    if users:
        warnings.warn(
            f"these names were imported before shardkeep.dcp.install(), and stay torch's: {', '.join(users)}; "
            "call it before they are imported",
            stacklevel=2,
        )


def uninstall() -> None:
    """
    Undo `install`: imports give torch's own again, here and in processes started from now on.

    Names that were imported meanwhile keep what they have, which is ours, except in modules of torch.
    """
    _tell_children(no_more=True)
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
    pickle_as_before(hook.displaced)
    for name, module in hook.attributes.items():
        _set_attribute(name, module)
    _give_back(ours)


def install_if_asked() -> Finder | None:
    """Install if the process that started this one had, and return the finder."""
    if setting(ASKED) == "1":
        install()
    return finder()


def run(argv: Sequence[str]) -> None:
    """
    Install, then run a script or a module as Python would: `[script, *args]` or `["-m", module, *args]`.

    Raises:
        SystemExit: there is nothing to run.

    """
    args = list(argv)
    as_module = args[:1] == ["-m"]
    if as_module:
        del args[0]
    if not args or args[0].startswith("-"):
        raise SystemExit(_USAGE)
    install()
    sys.argv[:] = args
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11: no folder of the script's then
        sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(args[0]))
    run_as_main(args[0], as_module=as_module)


def _take_places(hook: Finder) -> None:
    """Load ours where torch's was loaded: who reaches it by attributes, without importing it again, gets ours."""
    for name in hook.displaced:
        if our_name(name) is not None:
            importlib.import_module(name)


def _stop_waiting() -> None:
    """Take away the finder that a process started from here begins with; see `startup/`."""
    sys.meta_path[:] = [each for each in sys.meta_path if not hasattr(each, "awaits")]


def _attribute(name: str) -> ModuleType | None:
    parent, _, child = name.rpartition(".")
    return getattr(sys.modules.get(parent), child, None)


def _set_attribute(name: str, module: ModuleType) -> None:
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


def _forget(name: str, module: ModuleType) -> None:
    """Take a module away from the parent that imports gave it to: a root from torch, torch's own modules from ours."""
    parent, _, child = name.rpartition(".")
    root = root_of(name)
    holder = sys.modules.get(parent if name == root else ROOTS.get(parent, ""))
    is_ours = module.__name__.startswith("shardkeep.")
    if holder is not None and getattr(holder, child, None) is module and is_ours == (name == root):
        delattr(holder, child)


def _give_back(ours: Mapping[str, ModuleType]) -> None:
    """Give modules of torch that were loaded meanwhile, and have names of our tree, torch's own."""
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
    # By its type, and not `isinstance`: what stands in a module may be a proxy that raises when it is looked at.
    return issubclass(type(value), (type, FunctionType))


def _held_by_users(displaced: Mapping[str, ModuleType]) -> Iterator[str]:
    """Find the names outside of torch that are bound to modules, classes and functions of torch's tree."""
    modules = {id(module) for module in displaced.values()}
    for name, module in {id(each): (name, each) for name, each in reversed(list(sys.modules.items()))}.values():
        if name.partition(".")[0] in ("torch", "shardkeep"):
            continue
        for key, value in list((getattr(module, "__dict__", None) or {}).items()):
            if id(value) in modules or (_is_definition(value) and getattr(value, "__module__", None) in displaced):
                yield f"{name}.{key}"


def _tell_children(*, no_more: bool = False) -> None:
    before = setting("PYTHONPATH")
    folders = [each for each in before.split(os.pathsep) if each != _STARTUP] if before else []
    if not no_more:
        folders.insert(0, _STARTUP)
    set_for_children("PYTHONPATH", os.pathsep.join(folders) or None)
    set_for_children(ASKED, None if no_more else "1")
