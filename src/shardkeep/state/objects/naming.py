"""What the parameters of an optimizer are called: by their modules in the state, or as the optimizer was told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from shardkeep.errors import StateError
from shardkeep.state.objects.stored import is_each_ranks_own
from shardkeep.state.training.names import parameter_names


class Names(NamedTuple):
    """All names of a parameter, in each of the forms in which optimizers are saved."""

    homes: list[tuple[str, tuple[str, ...]]]
    """The modules in the state that have it, each with its names there."""
    given: tuple[str, ...]
    """Those the optimizer was built with."""
    several: bool
    """Whether there are several modules in the state."""

    @property
    def in_state(self) -> tuple[str, ...]:
        """Its flat names in the state, as a part of its modules."""
        return tuple(f"{home}.{one}" for home, found in self.homes for one in found)

    @property
    def in_modules(self) -> tuple[str, ...]:
        """Its names in its modules."""
        return tuple(dict.fromkeys(one for _, found in self.homes for one in found))

    @property
    def usual(self) -> tuple[str, ...]:
        """Those of which the first is the one it is saved under, if it has a module."""
        return self.in_state if self.several else self.in_modules

    @property
    def other(self) -> tuple[str, ...]:
        """Those it would be saved under with another number of modules in the state."""
        return self.in_modules if self.several else self.in_state

    @property
    def first(self) -> str:
        """The one it is saved under."""
        if not self.homes:
            return self.given[0]
        home, found = self.homes[0]
        return f"{home}.{found[0]}" if self.several else found[0]


def names_of(name: str, optimizer: Optimizer, modules: Mapping[str, nn.Module], rank: int) -> dict[Any, Names]:
    """
    Name every parameter.

    As its module does, if that is the only one in the state; with the module's own name in front if there are several,
    on every rank alike: which of them a rank's optimizer has parameters of is that rank's affair.
    """
    tables = {own: parameter_names(module) for own, module in modules.items()}
    given = _given_names(optimizer)
    several = len(modules) > 1
    closed = set() if is_each_ranks_own(name, rank) else {own for own in modules if is_each_ranks_own(own, rank)}
    names: dict[Any, Names] = {}
    for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
        homes = [(own, found) for own, table in tables.items() if (found := table.get(parameter))]
        if closed and not closed.isdisjoint([home for home, _ in homes]):
            raise StateError(
                f"{name!r} optimizes parameters of {homes[0][0]!r}, which is inside a PerRank, and is not itself",
                hint="put the optimizer into a PerRank too",
                key=name,
            )
        own = (given[parameter],) if given and parameter in given else ()
        if not homes and not own:
            raise StateError(
                f"{name!r} optimizes a parameter of shape {tuple(parameter.shape)} that no module in the state has, so it"
                " has no name to be saved under",
                hint="put the module into the same state, or build the optimizer from named_parameters()",
                key=name,
            )
        names[parameter] = Names(homes, own, several)
    _refuse_equal_names(name, names)
    return names


def _given_names(optimizer: Optimizer) -> dict[Any, str]:
    """Return the names an optimizer was built with."""
    return {
        parameter: str(own)
        for group in optimizer.param_groups
        for parameter, own in zip(group["params"], group.get("param_names", ()), strict=False)
    }


def _refuse_equal_names(name: str, names: Mapping[Any, Names]) -> None:
    seen: set[str] = set()
    for own in names.values():
        if own.first in seen:
            raise StateError(f"{name!r} optimizes two parameters that are both called {own.first!r}", key=name)
        seen.add(own.first)
