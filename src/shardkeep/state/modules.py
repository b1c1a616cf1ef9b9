"""
State of models by canonical names, with torch's options: from a module to a dict, and from a dict into the module.

Tensors that are read use the module's own memory if the module returns it. State dicts that are passed in are never
changed. `checked_options` looks up once per call what these functions and those for optimizers need to know of a model:
the names of its parameters, FSDP1 wrappers, prefixes of submodules.
"""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import current_world
from shardkeep.errors import BadState, BadValue, KeyCollision
from shardkeep.options import Options
from shardkeep.state.collectives import broadcast_state_dict, distribute_state_dict, gather_state_dict
from shardkeep.state.leaves import is_dtensor
from shardkeep.state.names import (
    FLAT_PARAM,
    FQN_MODIFIERS,
    LiveItem,
    ModuleTree,
    all_canonical,
    canonical_key,
    fsdp_modules,
    live_state,
    own_method,
    parameter_names,
    state_dict_key,
)
from shardkeep.state.offload import offload_state_dict_to_cpu

STATE = "state"
PARAM_GROUPS = "param_groups"
PARAMS = "params"
TAKES_ANY = object()
"""Stands for a local value that is replaced by any full one: extra state, flat parameters, tensors that are not sharded."""
T = TypeVar("T")


@dataclass
class StateDictOptions:
    """How state is read from a model and its optimizers, and how it is set. Names and defaults are torch's."""

    full_state_dict: bool = False
    """Every tensor is whole: gathered when read, cut to each rank's part when set."""
    cpu_offload: bool = False
    """Tensors that are read are on the CPU; with `full_state_dict`, only rank 0 gets them, the others get nothing."""
    ignore_frozen_params: bool = False
    """Parameters that require no gradient are left out of the model's state."""
    keep_submodule_prefixes: bool = True
    """Keep whole names when only `submodules` are read; False removes the name of the submodule."""
    strict: bool = True
    """A key too many or too few in the model's state, or a parameter without optimizer state, is an error."""
    broadcast_from_rank0: bool = False
    """Only rank 0 passes the full state; the others receive it. Needs `full_state_dict`."""
    flatten_optimizer_state_dict: bool = False
    """Optimizer state is one level deep: `state.<name>.<key>` and `param_groups.<name>.<key>`."""
    dsd_fqn_modifiers: str = FQN_MODIFIERS
    """The name of the method by which modules hide children from names."""


@dataclass
class StateDictInfo(StateDictOptions):
    submodule_prefixes: set[str] = field(default_factory=set)
    handle_model: bool = True
    handle_optim: bool = True
    fsdp_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Sets the form in which FSDP1 returns and takes state dicts."""
    fsdp_modules: list[nn.Module] = field(default_factory=list)
    param_names: dict[nn.Parameter, tuple[str, ...]] = field(default_factory=dict)
    """The usual name comes first."""
    live: list[LiveItem] = field(default_factory=list)
    canonical: bool = False
    """Whether nothing in the model wraps or hides anything, so that the keys of its state dict are canonical names."""


def checked_options(
    model: nn.Module,
    optims: Sequence[Optimizer],
    optim_only: bool,
    *,
    submodules: Iterable[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDictInfo:
    options = options or StateDictOptions()
    if submodules:
        why = "submodules= is deprecated: read the whole state and pick the keys that begin with the submodule's name"
        warnings.warn(why, FutureWarning, stacklevel=4)
    if optim_only and not optims:
        raise BadState("only optimizer state was requested, but no optimizer was passed")
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise BadValue(
            "broadcast_from_rank0 sends full tensors, and full_state_dict is False",
            hint="pass StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)",
        )
    modifiers = options.dsd_fqn_modifiers
    tree = ModuleTree(model)
    canonical = all_canonical(tree, fqn_modifiers=modifiers)
    live = list(live_state(tree, modifiers, canonical=canonical))
    wrappers = fsdp_modules(tree)
    chosen = set(submodules or ())
    named = model.named_modules(remove_duplicate=False) if chosen else ()
    inside = [canonical_key(model, name, fqn_modifiers=modifiers) for name, module in named if module in chosen]
    return StateDictInfo(
        **{one.name: getattr(options, one.name) for one in fields(StateDictOptions)},
        submodule_prefixes={f"{name}." if name else "" for name in inside},
        handle_model=not optim_only,
        handle_optim=len(optims) > 0,
        fsdp_context=_fsdp1_context(model, options) if wrappers else nullcontext,
        fsdp_modules=wrappers,
        param_names=parameter_names(live),
        live=live,
        canonical=canonical,
    )


def gathered_or_offloaded(state: dict[str, Any], info: StateDictInfo) -> dict[str, Any]:
    if info.full_state_dict:
        only = (0,) if info.cpu_offload and dist.is_initialized() else ()
        return gather_state_dict(state, cpu_offload=info.cpu_offload, ranks_only=only)
    if info.cpu_offload:
        return offload_state_dict_to_cpu(state)
    return state


def check_states(
    model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any], info: StateDictInfo, *, reading: bool = False
) -> None:
    """Refuse state dicts that are empty but must not be, or that hold flat parameters of FSDP1."""
    on_rank0 = info.full_state_dict and info.cpu_offload  # what is read with these options, rank 0 alone gets
    elsewhere = info.broadcast_from_rank0 or (reading and on_rank0)
    partial = bool(info.submodule_prefixes) or info.ignore_frozen_params
    no_model = info.handle_model and not model_state and info.strict and (on_rank0 or not partial)
    # FSDP1 broadcasts full optimizer state by itself if only one rank keeps it.
    no_optim = info.handle_optim and not optimizer_state and not (on_rank0 and info.fsdp_modules)
    if (no_model or no_optim) and not elsewhere:
        rank = f" ({dist.get_rank()})" if dist.is_initialized() else ""
        raise BadState(
            f"the {'model' if no_model else 'optimizer'} state dict is empty on this rank{rank}",
            hint="pass it on all ranks, or on rank 0 alone with broadcast_from_rank0=True",
        )
    for key in model_state:
        if FLAT_PARAM in key.split("."):
            raise BadState(
                f"{key!r} is a flat parameter of FSDP1, not a parameter of the model",
                hint="pass the root module that FSDP wraps, not a part of it",
            )


def from_rank0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0, and return its result on all ranks of the default group; if it fails, all ranks raise."""
    world = current_world(timeout_s=Options().timeout_s)
    if world.solo:
        return make()
    with rendezvous(world, "set a state dict") as meeting:
        # Pickled, like torch's own object collectives, within one job.
        made = meeting.agree(
            "read on rank 0",
            lambda: pickle.dumps(make()) if world.rank == 0 else b"",
            lambda said: [said[0]] * len(said),
        )
    result: T = pickle.loads(made)
    return result


@torch.no_grad()
def model_state(model: nn.Module, info: StateDictInfo) -> dict[str, Any]:
    if not info.handle_model:
        return {}
    with info.fsdp_context():
        state = own_method(model, "state_dict")()
    if not info.canonical:
        modifiers = info.dsd_fqn_modifiers
        names = {item.key: item.name for item in info.live}
        state = _renamed(state, lambda key: names.get(key) or canonical_key(model, key, fqn_modifiers=modifiers))
    if info.ignore_frozen_params:
        for parameter, found in info.param_names.items():
            if not parameter.requires_grad:
                for name in found:
                    state.pop(name, None)
    if info.submodule_prefixes:
        chosen = {}
        for prefix, name in itertools.product(info.submodule_prefixes, state):
            kept = name if info.keep_submodule_prefixes else name.removeprefix(prefix)
            if name.startswith(prefix):
                if kept in chosen and not info.keep_submodule_prefixes:
                    raise KeyCollision(
                        f"two submodules have a {kept!r}, and keep_submodule_prefixes is False",
                        hint="read one submodule at a time, or keep the prefixes",
                    )
                chosen[kept] = state[name]
        state = chosen
    return gathered_or_offloaded(state, info)


@torch.no_grad()
def set_model_state(model: nn.Module, state: Mapping[str, Any], info: StateDictInfo) -> _IncompatibleKeys:
    """Load state by canonical names into the model; return missing and unexpected names."""
    if not info.handle_model or not (state or info.broadcast_from_rank0):
        return _IncompatibleKeys([], [])
    modifiers = info.dsd_fqn_modifiers
    keys = {item.name: item.key for item in info.live}
    # Keys get the wrappers' names; keys that have them already are understood too.
    given = _renamed(state, lambda name: keys.get(name) or state_dict_key(model, name, fqn_modifiers=modifiers))
    present = from_rank0(lambda: _present(given, info)) if info.broadcast_from_rank0 else _present(given, info)
    assign = False
    if info.full_state_dict:
        given, assign = _distribute(given, present, info)
    with info.fsdp_context():
        result = own_method(model, "load_state_dict")(state_dict=given, strict=info.strict, assign=assign)
    missing, unexpected = ([canonical_key(model, key, fqn_modifiers=modifiers) for key in keys] for keys in result)
    return _IncompatibleKeys(missing, unexpected)


def by_submodule(model: nn.Module, state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Turn state keyed by submodules, each with a state dict of its own, into one dict; return other state as it is."""
    if not isinstance(next(iter(state), None), nn.Module):
        return state
    why = "state dicts keyed by modules are deprecated: put the module's name before the keys of its state dict"
    warnings.warn(why, FutureWarning, stacklevel=4)
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if module in state:
            prefix = canonical_key(model, name)
            found.update({f"{prefix}.{key}" if prefix else key: value for key, value in state[module].items()})
    return found


def _renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Rename keys, also those of the module versions that `state_dict()` adds."""
    result: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        name = rename(key)
        if name in result:
            raise KeyCollision(
                f"two keys of the model's state are both {name!r} without the names of wrappers; one is {key!r}",
                hint="give one of the two modules another name",
            )
        result[name] = value
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renamed = {rename(name) if name else name: value for name, value in versions.items()}
        result._metadata = OrderedDict(renamed)  # type: ignore[attr-defined]  # where nn.Module looks for it
    return result


def _present(given: Mapping[str, Any], info: StateDictInfo) -> list[str]:
    """Return the keys that are given; raise if one is missing that the wrapped module would not report by its name."""
    missing = [item.name for item in info.live if item.key != item.name and item.key not in given]
    if missing and info.strict:
        raise BadState(
            f"Missing key{'s' if len(missing) > 1 else ''}: {', '.join(missing)}.",
            hint="the model has them and the state dict does not; StateDictOptions(strict=False) loads the others",
            missing=missing,
        )
    return list(given)


def _distribute(given: dict[str, Any], present: list[str], info: StateDictInfo) -> tuple[dict[str, Any], bool]:
    """Cut full tensors to this rank's part; also return whether the module must be assigned the tensors themselves."""
    live = {item.key: item.value for item in info.live}
    tensors = {key: value for key, value in live.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
    on_meta = any(value.is_meta for value in tensors.values())
    device = single_device({key: value for key, value in tensors.items() if not value.is_meta})
    device = device or _device_for_meta(live, given)
    local: dict[str, Any] = {}
    for key, value in live.items():
        flattened = info.fsdp_modules and not is_dtensor(value)
        local[key] = TAKES_ANY if value is None or flattened else value
    if info.broadcast_from_rank0:
        broadcast_state_dict(given, local, device=device, strict=info.strict, cpu_offload=info.cpu_offload)
    else:
        distribute_state_dict(given, local, device=device)
    result: OrderedDict[str, Any] = OrderedDict()
    # Only given keys are passed on: the module reports what is missing, and must not be given its own values.
    for key in present:
        # The module also reports unexpected keys; on ranks without a value for one, any stand-in will do.
        value = local[key] if key in local else given.get(key, torch.empty(0))
        held = live.get(key)
        if on_meta and isinstance(held, torch.Tensor) and held is not value:
            # The module is assigned the tensors, so scalars, which arrive on the CPU, must move to its device. Tensors
            # that had memory stay the same objects, because optimizers hold them.
            value = value.to(device) if held.is_meta else held.copy_(value)
        result[key] = value
    if hasattr(given, "_metadata"):
        result._metadata = given._metadata  # type: ignore[attr-defined]  # where nn.Module looks for it
    return result, on_meta


def single_device(tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
    """Return the device of tensors, to which full state can be set only if they are on one; None if there are none."""
    devices = {value.device: key for key, value in tensors.items()}
    if len(devices) > 1:
        found = ", ".join(f"{key!r} on {device}" for device, key in devices.items())
        raise BadValue(
            f"Multiple devices found in the model: {found}",
            hint="full state can be set to a model on one device only; load its parts one by one, or sharded state",
        )
    return next(iter(devices), None)


def _device_for_meta(local: Mapping[str, Any], given: Mapping[str, Any]) -> torch.device:
    """Choose the device for a model on meta: that of its mesh, of the process group, or of the given state."""
    kinds = {value.device_mesh.device_type for value in local.values() if is_dtensor(value)}
    if not kinds and not dist.is_initialized():
        found = (value.device for value in given.values() if isinstance(value, torch.Tensor))
        return next(found, torch.device("cpu"))
    if not kinds:
        kinds = {one.type for one in dist.group.WORLD._device_types}  # type: ignore[union-attr]  # it is initialised
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Like torch, use the CPU if the group supports it.
    if accelerator is None or "cpu" in kinds or accelerator.type not in kinds:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


# FSDP1 flattens parameters, so only its own methods can return and take their state. It is imported only if a module of
# its class exists.


def _fsdp1_context(model: nn.Module, options: StateDictOptions) -> Callable[[], AbstractContextManager[None]]:
    from torch.distributed import fsdp  # noqa: PLC0415 - slow, and needed only here

    # On the CPU there is nothing to offload, and if asked to, FSDP1 returns memory that it frees at once.
    offload = options.cpu_offload and any(parameter.device.type != "cpu" for parameter in model.parameters())
    kinds = fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig
    form: tuple[Any, ...] = (fsdp.StateDictType.SHARDED_STATE_DICT, *(kind(offload_to_cpu=offload) for kind in kinds))
    if options.full_state_dict:
        rank0_only = options.cpu_offload or options.broadcast_from_rank0
        of_model = fsdp.FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload)
        of_optimizers = fsdp.FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
        form = fsdp.StateDictType.FULL_STATE_DICT, of_model, of_optimizers

    @contextmanager
    def context() -> Iterator[None]:
        with warnings.catch_warnings():
            # Only the name of this method is deprecated.
            warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
            with fsdp.FullyShardedDataParallel.state_dict_type(model, *form):
                yield

    return context


def fsdp1_optimizer_state(model: nn.Module, optimizer: Optimizer, state: Any, *, to_load: bool) -> dict[str, Any]:
    """Convert an optimizer's state dict to FSDP1's names of parameters, or (`to_load`) back; empty on ranks that get none."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy  # noqa: PLC0415 - slow

    outermost = cast("Any", fsdp_modules(ModuleTree(model))[0])
    hybrid = outermost.sharding_strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    # None, all ranks, if the outermost wrapper also replicates.
    group = None if hybrid or isinstance(outermost.process_group, tuple) else outermost.process_group
    if to_load:
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state, group=group)
    return FullyShardedDataParallel.optim_state_dict(model, optimizer, state, group=group)
