"""The two sides that are compared: torch's module and ours, by name, so that ranks can be told which to use."""

import importlib
from types import ModuleType
from typing import Any

from tests.protocol.samples import quietly

__all__ = ["SIDES", "causes_of", "failure_of", "part", "quietly", "side"]

SIDES = ("torch", "ours")
_MODULES = {"torch": "torch.distributed.checkpoint", "ours": "shardkeep.dcp"}


def side(name: str) -> Any:
    """Return a side's package, with the submodules that scripts reach through it."""
    for module in ("state_dict", "planner_helpers"):
        part(name, module)
    return importlib.import_module(_MODULES[name])


def part(name: str, module: str) -> ModuleType:
    return importlib.import_module(f"{_MODULES[name]}.{module}")


def failure_of(function: Any, *args: Any, **kwargs: Any) -> BaseException:
    """Return what a call raises; one that raises nothing is an error."""
    try:
        quietly(function, *args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is looked at
        return error
    raise AssertionError(f"{function} raised nothing")


def causes_of(error: BaseException) -> dict[int, BaseException]:
    return {rank: cause for rank, (cause, _) in error.failures.items()}  # type: ignore[attr-defined]
