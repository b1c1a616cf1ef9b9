"""
Objects in a state: modules, optimizers, and everything with `state_dict` and `load_state_dict`.

An adapter for each object returns the plain state that is saved in its place, and at load a template, which is filled like
any other part of a state before the object gets it. A module is filled in place, under canonical names; a parameter on
the meta device gets its memory from the load and stays the same object, so that optimizers keep holding it. An
optimizer is saved by parameter name, and needs no first step before a load:

    state.<parameter>.<key>            the optimizer's state for a parameter
    param_groups.<first parameter>     hyper-parameters, and `params`, the names of the group's parameters
    other.<key>                        state that belongs to no parameter
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shardkeep.errors import RanksDisagree, StateError, StateMismatch
from shardkeep.format.values import join
from shardkeep.state import optimizers
from shardkeep.state.flatten import KeptForms, flatten, leaves_of, map_leaves, state_items
from shardkeep.state.leaves import (
    EveryRank,
    PerRank,
    TreePath,
    describe_leaf,
    is_dtensor,
    is_tensor,
    materialize,
    needs_memory,
    path_name,
    with_attributes_of,
)
from shardkeep.state.modules import StateDictOptions, checked_options, model_state
from shardkeep.state.names import (
    EXTRA_STATE,
    ModuleTree,
    all_canonical,
    fsdp_modules,
    live_state,
    own_method,
    plain_state,
)
from shardkeep.state.state_dict import get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from shardkeep.state.stored import (
    NOTHING_STORED,
    UNFILLED,
    Adapter,
    Selected,
    StatefulObject,
    StoredLeaf,
    StoredState,
    Template,
    allocate_leaf,
    digest_of,
)

_TORCHS_METHODS = (Optimizer.state_dict, Optimizer.load_state_dict)
_RESHARDED_HINT = "load it on the same number of ranks and the same mesh, or exclude it"
_SINGLE_VALUES = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None)})


def is_object(value: Any) -> bool:
    cls: Any = type(value)
    return _is_stateful(cls)


@cache
def _is_stateful(cls: type) -> bool:
    stateful = callable(getattr(cls, "state_dict", None)) and callable(getattr(cls, "load_state_dict", None))
    return stateful and not issubclass(cls, (Mapping, torch.Tensor, type))


def is_tensor_or_object(value: Any) -> bool:
    """Return True for a leaf because of which `flatten` opens the list that contains it."""
    return is_tensor(value) or is_object(value)


class Objects:
    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
        kept: optimizers.KeptNames | None = None,
        forms: KeptForms | None = None,
    ) -> None:
        """Find the objects; none of their methods is called yet. `kept` and `forms` are of earlier saves."""
        self._rank = rank
        self._kept = optimizers.KeptNames() if kept is None else kept
        flat = flatten(state, rank=rank, is_tensor=is_tensor_or_object, kept=forms)
        kinds = set(filter(_is_stateful, flat.classes))
        found = {name: leaf for name, leaf in flat.by_name().items() if type(leaf) in kinds} if kinds else {}
        self.flattened = None if found else flat  # of a state without objects
        modules = {name: ModuleTree(leaf) for name, leaf in found.items() if isinstance(leaf, nn.Module)}
        self.modules = list(modules.values())
        self.optimizers = [leaf for leaf in found.values() if isinstance(leaf, Optimizer)]
        self._fsdp1 = {name: tree.root for name, tree in modules.items() if fsdp_modules(tree)}
        self._memory: dict[int, Any] = {}
        self._adapters: list[Adapter] = [self._adapter(name, leaf, modules, world_size) for name, leaf in found.items()]

    def _adapter(self, name: str, leaf: Any, modules: Mapping[str, ModuleTree], world_size: int) -> Adapter:
        if isinstance(leaf, nn.Module):
            return ModuleObject(name, modules[name], self._memory, communicates=name in self._fsdp1)
        # If an optimizer overrides `state_dict` or `load_state_dict`, we store exactly what it returns.
        cls: Any = type(leaf)
        if isinstance(leaf, Optimizer) and (cls.state_dict, cls.load_state_dict) == _TORCHS_METHODS:
            # The FSDP1 module whose parameters it has, if any.
            mine = {id(one) for group in leaf.param_groups for one in group["params"]} if self._fsdp1 else set()
            homes = (own for own, each in self._fsdp1.items() if any(id(one) in mine for one in each.parameters()))
            home = next(homes, None)
            if home is None:
                find_names = partial(optimizers.kept_names, self._kept, name, leaf, modules, self._rank)
                return OptimizerObject(name, leaf, self._rank, find_names)
            return FSDP1OptimizerObject(name, leaf, self._fsdp1[home], f"{home}." if len(modules) > 1 else "")
        return StatefulObject(name, leaf, rank=self._rank, world_size=world_size)

    def __bool__(self) -> bool:
        return bool(self._adapters)

    @property
    def communicates(self) -> bool:
        return any(adapter.communicates for adapter in self._adapters)

    @property
    def names(self) -> list[str]:
        """Flat names; those inside a `PerRank` are the same on all ranks."""
        own = f"@{self._rank}"
        parts = ([("@" if part == own else part) for part in adapter.name.split(".")] for adapter in self._adapters)
        return sorted(".".join(each) for each in parts)

    def digests(self, *, allow_pickle: bool) -> dict[str, bytes]:
        found = (adapter.digests(allow_pickle=allow_pickle) for adapter in self._adapters)
        return {name: digest for digests in found for name, digest in digests.items()}

    def states(self, differing: Collection[str], *, communicating: bool) -> dict[str, Any]:
        chosen = [adapter for adapter in self._adapters if adapter.communicates == communicating]
        return {adapter.name: adapter.state(differing) for adapter in chosen}

    def templates(self, stored: StoredState, selected: Selected, *, communicating: bool) -> dict[str, Template]:
        made = {}
        for adapter in (each for each in self._adapters if each.communicates == communicating):
            name = adapter.name
            if selected(name) or any(selected(leaf.name) for leaf in stored.below(name)):
                # Of a module, every tensor that the checkpoint lacks is reported.
                there = stored.has(name) or isinstance(adapter, ModuleObject)
                made[name] = adapter.template(stored, selected) if there else NOTHING_STORED
        return made

    def load(self, templates: Mapping[str, Template], filled: set[str]) -> None:
        # Objects that communicate come first: one that fails on a single rank must not leave the others waiting.
        for adapter in sorted(self._adapters, key=lambda adapter: not adapter.communicates):
            template = templates.get(adapter.name, NOTHING_STORED)
            kept = _filled_part(template.state, adapter.name, filled, self._rank)
            if kept is not UNFILLED:
                template.load(kept)


def _filled_part(value: Any, name: str, filled: set[str], rank: int) -> Any:
    """Return the container itself if all of it was filled, its filled part, or `UNFILLED` if nothing was."""
    if not isinstance(value, (PerRank, Mapping, list, tuple)) or (isinstance(value, (list, tuple)) and name in filled):
        return value if name in filled else UNFILLED
    kind = "ranks" if isinstance(value, PerRank) else "dict" if isinstance(value, Mapping) else "list"
    items = dict(state_items(value, kind, rank))
    parts = {key: _filled_part(child, join(name, kind, key), filled, rank) for key, child in items.items()}
    if all(parts[key] is child is not UNFILLED for key, child in items.items()):
        return value
    kept = {key: part for key, part in parts.items() if part is not UNFILLED}
    if not kept:
        return UNFILLED
    if isinstance(value, EveryRank):
        return EveryRank(kept)
    if isinstance(value, PerRank):
        return PerRank(kept[rank])
    if kind == "list":
        raise StateMismatch(
            f"only a part of the list {name!r} is to be loaded, and the object expects all of it",
            hint="include or exclude the list as a whole",
            key=name,
        )
    return kept


class ModuleObject(Adapter):
    def __init__(self, name: str, tree: ModuleTree, memory: dict[int, Any], *, communicates: bool) -> None:
        """Take the module, and the new memory of meta parameters by id, which all modules of a state share."""
        self.name = name
        self._tree = tree
        self._module = tree.root
        self._memory = memory
        self.communicates = communicates

    def state(self, differing: Collection[str]) -> dict[str, Any]:  # noqa: ARG002
        return module_state(self._tree, detached=False)

    def template(self, stored: StoredState, selected: Selected) -> Template:
        """Return the module's own state, which is filled in place; extra state is what was saved."""
        # What is on meta gets memory, one for each parameter, so that tied parameters stay tied.
        state = dict(module_state(self._tree))
        for item in live_state(self._tree):
            name = f"{self.name}.{item.name}"
            if item.name == EXTRA_STATE or item.name.endswith(f".{EXTRA_STATE}"):
                if stored.has(name):
                    state[item.name] = stored.nest(name, partial(allocate_leaf, stored))
            elif item.name in state and needs_memory(state[item.name]) and selected(name):
                view, observed = item.value._is_view(), weakref.getweakrefs(item.value)
                if view or observed:
                    why = "it is a view of another tensor" if view else "something holds a weak reference to it"
                    raise StateError(
                        f"{name!r} is on the meta device and cannot be given memory: {why}",
                        hint="give the module memory before the load: module.to_empty(device=...)",
                        key=name,
                    )
                if id(item.value) not in self._memory:
                    self._memory[id(item.value)] = materialize(item.name, state[item.name])
                state[item.name] = self._memory[id(item.value)]
        return Template(state, self._load)

    def _load(self, state: dict[str, Any]) -> None:
        """Set what was not filled in place: tensors that had no memory, extra state, and what hooks made."""
        if not self.communicates:
            own = {item.name: item.value for item in live_state(self._tree) if item.value is not None}
            customized = _customizes_state_dict(self._module)
            for name, tensor in own.items():
                if tensor.is_meta and (name in state or customized):
                    # The saved form or name may differ from the parameter's: then only memory comes from here.
                    _become(tensor, materialize(name, tensor) if customized else state[name])
            filled = all(name in own and is_tensor(leaf) and _same(own[name], leaf) for name, leaf in state.items())
            if filled and not customized:
                return
        # What state_dict() computed is loaded the same way, and load hooks run. The load has checked for missing keys.
        set_model_state_dict(self._module, state, options=StateDictOptions(strict=False))


def module_state(tree: ModuleTree, *, detached: bool = True) -> dict[str, Any]:
    """Return a module's state by canonical name; sharded tensors stay sharded, memory is the module's own."""
    module = tree.root
    if all_canonical(tree):  # then options need not be looked up, which takes longer
        # It may still change the state that it returns.
        if not detached and (plain := plain_state(tree)) is not None:
            return plain
        with torch.no_grad():
            return cast("dict[str, Any]", own_method(module, "state_dict")())
    return model_state(module, checked_options(module, (), optim_only=False))


_STATE_DICT_METHODS = ("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict")
_STATE_DICT_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def _customizes_state_dict(module: nn.Module) -> bool:
    for part in module.modules():
        methods = [part.__dict__.get(name, getattr(type(part), name)) for name in _STATE_DICT_METHODS]
        hooks = [hook for name in _STATE_DICT_HOOKS for hook in getattr(part, name).values()]
        for function in (*methods, *hooks):
            inner = getattr(function, "hook", function)  # of torch's wrapper around hooks
            inner = getattr(inner, "func", inner)  # of a partial
            if not str(getattr(inner, "__module__", "")).startswith("torch."):
                return True
    return False


def _become(target: torch.Tensor, filled: torch.Tensor) -> None:
    """Give a meta tensor the memory of another, keeping the object, its class, attributes and hooks."""
    fresh = with_attributes_of(target, filled.detach())
    hooks = list((target._backward_hooks or {}).values())
    after = list((getattr(target, "_post_accumulate_grad_hooks", None) or {}).values())
    torch.utils.swap_tensors(target, fresh)  # type: ignore[no-untyped-call]  # torch has no types for it
    # The swap keeps the hooks in Python but not in autograd, so they are registered again.
    target._backward_hooks = None
    target._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # as it is before the first hook
    for hook in hooks:
        target.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in after:
        target.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _same(one: Any, other: Any) -> bool:
    mine, its = (describe_leaf("", tensor, allow_meta=True) for tensor in (one, other))
    return (mine.alias, mine.shape, mine.dtype) == (its.alias, its.shape, its.dtype)


_Names = tuple[dict[Any, optimizers.ParameterNames], dict[int, str]]


class OptimizerObject(Adapter):
    def __init__(self, name: str, optimizer: Optimizer, rank: int, find_names: Callable[[], _Names]) -> None:
        self.name = name
        self._optimizer = optimizer
        self._rank = rank
        self._find_names = find_names

    @cached_property
    def _found_names(self) -> _Names:
        return self._find_names()

    @property
    def _names(self) -> dict[Any, optimizers.ParameterNames]:
        return self._found_names[0]

    @property
    def _firsts(self) -> dict[int, str]:
        return self._found_names[1]

    def digests(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """Return digests of plain tensors kept for a sharded parameter: they may belong to this rank's shard alone."""
        found = {
            f"{self.name}.state.{self._firsts[id(parameter)]}.{path_name(path)}": value
            for parameter, kept in self._kept()
            for path, value in (leaves_of(kept) if is_dtensor(parameter) else ())
            if _may_belong_to_shard(value, parameter)
        }
        return {name: digest_of(name, value, allow_pickle=allow_pickle) for name, value in found.items()}

    def _kept(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        firsts = self._firsts
        for parameter, kept in self._optimizer.state.items():
            if id(parameter) in firsts and kept:
                yield parameter, kept

    def state(self, differing: Collection[str]) -> dict[str, Any]:
        firsts = self._firsts
        prefix = f"{self.name}.state."
        mine = {name for name in differing if name.startswith(prefix)}
        state = {firsts[id(parameter)]: kept for parameter, kept in self._kept()}
        plain = {*map(type, state.values())} <= {dict} and not mine
        if not plain or not _SINGLE_VALUES.issuperset(map(type, chain.from_iterable(map(dict.values, state.values())))):
            state = {
                (name := firsts[id(parameter)]): _portable(kept, prefix + name, parameter, mine)
                for parameter, kept in self._kept()
            }
        groups = (([firsts[id(each)] for each in group["params"]], group) for group in self._optimizer.param_groups)
        saved: dict[str, Any] = {"state": state, "param_groups": optimizers.groups_by_first(groups)}
        if other := {key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)}:
            saved["other"] = other
        return saved

    def template(self, stored: StoredState, selected: Selected) -> Template:
        optimizer = self._optimizer
        groups = optimizers.StoredGroups(self.name, stored, selected)
        saved_as = self._resolve(groups, stored)
        layouts = self._layouts()
        state: dict[str, Any] = {}
        cleared: list[Any] = []  # keys of optimizer.state that had no state when it was saved
        for group in optimizer.param_groups:
            groups.check(saved_as[p] for p in group["params"] if p in saved_as)
            for parameter in group["params"]:
                saved = saved_as.get(parameter)
                if saved is None:
                    state[self._names[parameter].first] = UNFILLED
                elif stored.has(f"{self.name}.state.{saved}"):
                    state[saved] = self._allocate(stored, saved, parameter, group, layouts[parameter])
                elif selected(f"{self.name}.state.{saved}.step") and not groups.had_state(saved, stored):
                    cleared.append(parameter)
        if selected(f"{self.name}.other"):
            cleared += [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
        template: dict[str, Any] = {"state": state, "param_groups": groups.places(stored)}
        if stored.below(f"{self.name}.other"):
            template["other"] = stored.nest(f"{self.name}.other", partial(allocate_leaf, stored))

        def load(filled: dict[str, Any]) -> None:
            """Set what was loaded. Parameters, and what was left out of the load, stay as they are."""
            by_name = {name: kept for name, kept in filled.get("state", {}).items() if kept is not UNFILLED}
            members = [[saved_as[p] for p in group["params"] if p in saved_as] for group in optimizer.param_groups]
            values = groups.hyper_parameters(members, filled.get("param_groups", {}))
            for key in cleared:
                optimizer.state.pop(key, None)
            for parameter, name in saved_as.items():
                if name in by_name:
                    # What was left out of the load stays; what the checkpoint never had is removed.
                    left = {} if by_name[name] is state[name] else optimizer.state.get(parameter, {})
                    optimizer.state[parameter] = {**left, **_local_form(by_name[name], layouts[parameter])}
            optimizers.set_hyper_parameters(optimizer.param_groups, values)
            optimizer.state.update(filled.get("other", {}))
            for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
                hook(optimizer)

        return Template(template, load)

    def _resolve(self, groups: optimizers.StoredGroups, stored: StoredState) -> dict[Any, str]:
        """Find the name under which each parameter was saved; parameters that were not saved are left out."""
        # One form of names is used for all: the one by which most are found, and of two the more specific.
        best: dict[Any, str] = {}
        for names_in_form in zip(*(names.forms for names in self._names.values()), strict=True):
            found: dict[Any, str] = {}
            taken: set[str] = set()
            for parameter, names in zip(self._names, names_in_form, strict=True):
                free = (name for name in names if name not in taken)
                known = (name for name in free if name in groups or stored.has(f"{self.name}.state.{name}"))
                if (name := next(known, None)) is not None:
                    found[parameter] = name
                    taken.add(name)
            if len(found) > len(best):
                best = found
        return best

    def _layouts(self) -> dict[Any, dict[str, Any]]:
        """Return each parameter's present state by dotted key, to be filled in place or to copy its layout."""
        # Torch's optimizers lay out state of the parameter's shape like the parameter. For others, if parameters are
        # sharded, a dry step shows the layout of state that does not exist yet.
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        layout = optimizers.StateLayout(self._optimizer)
        torchs = type(self._optimizer).__module__.startswith("torch.optim")
        present = layout.at_hand if torchs or not any(map(_shard_of, parameters)) else layout.of
        found = {parameter: leaves_of(present(parameter) or {}) for parameter in parameters}
        return {parameter: {path_name(path): value for path, value in leaves} for parameter, leaves in found.items()}

    def _allocate(
        self, stored: StoredState, saved: str, parameter: torch.Tensor, group: dict[str, Any], layout: dict[str, Any]
    ) -> Any:
        base = f"{self.name}.state.{saved}"
        itself = next((leaf for name in self._names[parameter].forms[0] if (leaf := stored.find(name))), None)
        memory = stored.nest(
            base,
            lambda leaf: _memory_for(stored, leaf, itself, parameter, group, layout.get(leaf.name[len(base) + 1 :])),
        )

        def own_shard(path: TreePath, value: Any) -> Any:
            """Select this rank's state from state that each rank stored for its shard, if the shard is the same."""
            if not isinstance(value, EveryRank):
                return value
            own = f"{base}.{path_name(path)}"
            boxes = stored.find(f"{own}.@{self._rank}.boxes")
            if boxes is None or stored.value(boxes) != _shard_of(parameter):
                raise StateMismatch(
                    f"{own!r} is state that each rank kept for its own shard of the parameter, in a form that cannot be"
                    f" resharded, and rank {self._rank} now holds another shard",
                    hint=_RESHARDED_HINT,
                    key=own,
                )
            return PerRank(value.values[self._rank])

        return map_leaves(memory, own_shard)


def _memory_for(
    stored: StoredState,
    leaf: StoredLeaf,
    itself: StoredLeaf | None,
    parameter: torch.Tensor,
    group: dict[str, Any],
    present: Any,
) -> Any:
    """Return memory for one value of optimizer state: the present one, or new, laid out like the parameter or plain."""
    # `itself` is the parameter in the checkpoint. State that had its shape and dtype is expected to have those of the live
    # parameter; if it does not fit, the load reports it.
    if not leaf.is_tensor:
        return UNFILLED
    shape, dtype = stored.shape(leaf), stored.dtype(leaf)
    counter = leaf.path[-1][1] == "step" and not shape
    like_it = not counter and shape == (tuple(parameter.shape) if itself is None else stored.shape(itself))
    if is_tensor(present) and not _shares_memory(present, parameter):
        here = describe_leaf(leaf.name, present, allow_meta=True).shape
        # A plain tensor of this rank's shard was saved as a part of the whole, and is loaded as one.
        if here == shape or (like_it and not _may_belong_to_shard(present, parameter)):
            return present  # if the shape or dtype differs, the load reports or casts it
        if not like_it and "@" not in leaf.name and _shard_of(parameter) is not None:
            raise StateMismatch(
                f"{leaf.name!r} was saved with shape {shape}, and this optimizer keeps {here} there: it was made for another"
                " sharding and cannot be resharded",
                hint=_RESHARDED_HINT,
                key=leaf.name,
            )
    if like_it:
        same = itself is not None and dtype == stored.dtype(itself)
        return torch.empty_like(parameter, dtype=parameter.dtype if same else dtype, requires_grad=False)
    # A step reads counters from the device if it is captured or fused.
    with_parameter = not counter or group.get("capturable") or group.get("fused")
    return torch.empty(shape, dtype=dtype, device=parameter.device if with_parameter else "cpu")


def _shares_memory(present: Any, parameter: torch.Tensor) -> bool:
    """Return True if state is the parameter's own memory, which must not be filled with optimizer state."""
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in (present, parameter)]
    if not all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors):
        return False
    one, other = (tensor.untyped_storage().data_ptr() for tensor in tensors)
    return one == other != 0


def _may_belong_to_shard(value: Any, parameter: torch.Tensor) -> bool:
    return type(value) is torch.Tensor and value.dim() > 0 and _shard_of(parameter) is not None


def _portable(kept: Any, name: str, parameter: Any, differing: Collection[str]) -> Any:
    """Return state in which plain tensors that differ between ranks carry the shard to which they belong."""

    def change(path: TreePath, value: Any) -> Any:
        if f"{name}.{path_name(path)}" not in differing:
            return value
        if value.shape == parameter.to_local().shape:
            # Importing the class takes long; it is loaded already, as there is a DTensor.
            make = sys.modules["torch.distributed.tensor"].DTensor.from_local
            placed = parameter.device_mesh, parameter.placements
            return make(value, *placed, run_check=False, shape=parameter.shape, stride=parameter.stride())
        return PerRank({"boxes": _shard_of(parameter), "tensor": value})

    return map_leaves(kept, change)


def _local_form(kept: Any, layout: Mapping[str, Any]) -> Any:
    """Undo `_portable`; a shard becomes a plain tensor again if the optimizer keeps a plain one."""

    def change(path: TreePath, value: Any) -> Any:
        if isinstance(value, PerRank):
            return value.value["tensor"]
        plain = type(layout.get(path_name(path))) is torch.Tensor
        return value.to_local() if plain and is_dtensor(value) else value

    return map_leaves(kept, change)


def _shard_of(parameter: Any) -> list[list[list[int]]] | None:
    """Return the boxes of a parameter that this rank holds; None if it is not sharded."""
    if not is_dtensor(parameter) or all(placement.is_replicate() for placement in parameter.placements):
        return None
    pieces = describe_leaf("", parameter, allow_meta=True).pieces
    return [[list(piece.offsets), list(piece.tensor.shape)] for piece in pieces]


class FSDP1OptimizerObject(Adapter):
    """How an optimizer of an FSDP1 module is handled: only FSDP1 can split the state of flat parameters by parameter."""

    communicates = True

    def __init__(self, name: str, optimizer: Optimizer, module: nn.Module, prefix: str) -> None:
        """`prefix` precedes names if the state has several modules."""
        self.name = name
        self._prefix = prefix
        self._optimizer = optimizer
        self._module = module

    def state(self, differing: Collection[str]) -> dict[str, Any]:  # noqa: ARG002
        """Return its state by parameter name; no state if it has made no step."""
        fresh = optimizers.is_fresh(self._optimizer)
        state, live = self._present()
        groups = (([self._prefix + name for name in group["params"]], group) for group in live)
        kept = {self._prefix + name: values for name, values in state.items()}
        return {"state": {} if fresh else kept, "param_groups": optimizers.groups_by_first(groups)}

    def template(self, stored: StoredState, selected: Selected) -> Template:
        optimizer, prefix = self._optimizer, self._prefix
        present, live = self._present()
        groups = optimizers.StoredGroups(self.name, stored, selected)
        names = [name for group in live for name in group["params"]]
        # It may have been saved from a state with another number of modules.
        if not any(prefix + name in groups for name in names) and any(name in groups for name in names):
            prefix = ""
        for group in live:
            groups.check(prefix + name for name in group["params"])
        named = {prefix + name: kept for name, kept in present.items()}
        base = f"{self.name}.state"
        state = {name: kept for name, kept in named.items() if stored.has(f"{base}.{name}") or name not in groups}
        clear = not state and selected(base)

        def load(filled: dict[str, Any]) -> None:
            members = [[prefix + name for name in group["params"]] for group in live]
            values = groups.hyper_parameters(members, filled.get("param_groups", {}))
            if filled.get("state"):
                optimizers.set_hyper_parameters(live, values)
                kept = {name[len(prefix) :]: own for name, own in filled["state"].items()}
                loaded: Any = {"state": kept, "param_groups": live}
                set_optimizer_state_dict(self._module, optimizer, loaded, options=StateDictOptions(strict=False))
                return
            if clear:
                optimizer.state.clear()
            optimizers.set_hyper_parameters(optimizer.param_groups, values)

        return Template({"state": state, "param_groups": groups.places(stored)}, load)

    def _present(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        mine = {id(parameter) for parameter in self._module.parameters()}
        groups = self._optimizer.param_groups
        if any(id(each) not in mine for group in groups for each in group["params"]):
            raise StateError(
                f"{self.name!r} optimizes parameters of an FSDP1 module and others, and FSDP1 handles only its own",
                hint="use an optimizer for each, or FSDP2 (fully_shard)",
                key=self.name,
            )
        present: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        for kept in present["state"].values():
            # Parameters in one flat parameter share their step counter: each gets its own.
            kept |= {k: v.clone() for k, v in kept.items() if type(v) is torch.Tensor and not v.dim()}
        return present["state"], present["param_groups"]


def check_same_objects(names: list[list[str]]) -> None:
    """Raise if ranks have different objects: names inside them, and the order of their collectives, would differ."""
    for rank, own in enumerate(names):
        if odd := sorted({*own} ^ {*names[0]}):
            raise RanksDisagree(
                f"ranks 0 and {rank} do not have the same objects in the state: {', '.join(map(repr, odd))}",
                hint="pass modules, optimizers and other objects under the same keys on every rank",
            )
