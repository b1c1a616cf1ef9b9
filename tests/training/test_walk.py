"""Going through a module gives what torch's own generators give, in their order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardkeep.state.names import ModuleTree, all_canonical, fsdp_modules
from tests.training.test_names import Hiding, Tied


class Shared(nn.Module):
    """Modules and parameters under several names, and names without any."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first
        self.register_module("gone", None)
        self.register_parameter("none", None)
        self.inner = nn.ModuleDict({"x": nn.Sequential(self.first, nn.BatchNorm1d(2)), "y": nn.Identity()})
        self.tied = self.first.weight


class OwnModules(nn.Module):
    """Shows one of its modules only, and under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = nn.Sequential(nn.Linear(2, 2))
        self.hidden = nn.Linear(2, 2)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self
        yield from self.shown.named_modules(memo, f"{prefix}.seen" if prefix else "seen", remove_duplicate)


def _by_instance() -> nn.Module:
    """A module that was given another way to be gone through, alone of its class."""
    module = Shared()
    module.inner.named_modules = lambda *_, **__: iter([("odd", module.first)])  # type: ignore[method-assign]
    return module


def _inside(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), module, module)


OUTER = [Shared, Tied, Hiding, OwnModules, _by_instance]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", OUTER)
def test_as_torch_goes_through_it(make: Any, inside: bool) -> None:
    """Modules come by the same names, in the same order, as often, also where a module has its own ways."""
    torch.manual_seed(0)
    module = _inside(make()) if inside else make()
    tree = ModuleTree(module)
    assert _ids(tree.named) == _ids(module.named_modules(remove_duplicate=False))
    assert list(map(id, tree.modules)) == list(dict.fromkeys(map(id, module.modules())))


def _ids(named: Any) -> list[tuple[str, int]]:
    return [(name, id(each)) for name, each in named]


def test_what_is_added_is_seen_at_once() -> None:
    """Nothing is remembered of a module: what wraps or hides a part of it counts from the moment it is there."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert all_canonical(ModuleTree(module))
    assert fsdp_modules(ModuleTree(module)) == []
    module[1].add_module("_checkpoint_wrapped_module", nn.Linear(2, 2))
    assert not all_canonical(ModuleTree(module))
    del module[1]._checkpoint_wrapped_module
    assert all_canonical(ModuleTree(module))
    module[0]._fqn_modifiers = dict
    assert not all_canonical(ModuleTree(module))
