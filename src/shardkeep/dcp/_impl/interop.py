"""
Torch's own values of the protocol turned into ours, and ours into torch's.

torch's DTensors describe themselves in torch's classes, and a torch planner, reader or writer asks of each value
whether it is one of torch's. So what comes from tensors becomes ours, and what is handed to a party of torch's becomes
torch's; the two sets of classes have the same names and fields. Torch's are looked up where they are loaded already:
whoever has an instance of one has loaded them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from types import FrameType, ModuleType
from typing import Any

from shardkeep.layouts import (
    torch_values as metadata,
)
from shardkeep.layouts import (
    torch_values as plans,
)
from shardkeep.layouts import (
    torch_values as storage,
)

Classes = Mapping[str, type]

_MODULES = {
    "metadata": (
        "ChunkStorageMetadata",
        "TensorProperties",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "Metadata",
        "MetadataIndex",
    ),
    "planner": (
        "WriteItemType",
        "LoadItemType",
        "BytesIOWriteData",
        "TensorWriteData",
        "WriteItem",
        "ReadItem",
        "SavePlan",
        "LoadPlan",
    ),
    "storage": ("WriteResult",),
}
_HOMES = {"metadata": metadata, "planner": plans, "storage": storage}
_PARTIES = {"SavePlanner", "LoadPlanner", "StorageWriter", "StorageReader", "StorageMeta"}
_LEAVES = {"ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "BytesIOWriteData"}
"""Classes whose fields hold nothing that needs to be translated."""
_COMPLETE = _LEAVES | {"Metadata"}
"""Classes whose values, where they are in the right classes themselves, hold no others."""
_OPAQUE = {"planner_data", "storage_data", "storage_meta", "modules"}
"""Fields whose contents belong to a planner or a storage."""

_DRIVERS = {"torch.distributed.checkpoint.state_dict_loader", "torch.distributed.checkpoint.optimizer"}
"""The modules of torch whose loads call readers."""

OURS: Classes = {name: getattr(_HOMES[module], name) for module, names in _MODULES.items() for name in names}


def to_ours(value: Any) -> Any:
    """Return a value of the protocol, or a list or dict of them, in our classes; anything else as it is."""
    return _translated(value, OURS)


def protocol_classes_of(party: object) -> Classes:
    """
    Return the classes that a planner or a storage expects: torch's if it derives from torch's, else ours.

    A `StorageMeta` speaks for the storage it is from.
    """
    for kind in type(party).__mro__:
        if kind.__name__ in _PARTIES and kind.__module__.startswith("torch.distributed.checkpoint."):
            return _torchs_classes()
    return OURS


def _torchs_classes() -> Classes:
    return {
        name: getattr(_torchs_own(f"torch.distributed.checkpoint.{module}"), name)
        for module, names in _MODULES.items()
        for name in names
    }


def _torchs_own(name: str) -> ModuleType:
    # Where our tree is installed in the place of torch's, the finder that gives it keeps what was there before.
    kept: Mapping[str, ModuleType] = next((each.displaced for each in sys.meta_path if hasattr(each, "displaced")), {})
    return kept.get(name) or sys.modules[name]


def translator(source: object, target: object) -> Callable[[Any], Any]:
    """Return what turns values from one party into what another expects; it does nothing where they are of one kind."""
    from_classes, to_classes = protocol_classes_of(source), protocol_classes_of(target)
    if from_classes["Metadata"] is to_classes["Metadata"]:
        return lambda value: value
    return lambda value: _translated(value, to_classes)


def to_classes_of(party: object, value: Any) -> Any:
    """Return a value, that may be of either side, in the classes that a party expects."""
    return _translated(value, protocol_classes_of(party))


def to_classes_of_caller(value: metadata.Metadata) -> metadata.Metadata:
    """
    Return what a reader has read in the classes of the load that is under way: torch's if that is torch's own `load`.

    It hands a reader's metadata to its planner as they are, which asks for torch's classes: of ours it refuses objects,
    and does not compare the sizes of tensors. A reader is not told who calls it, so this looks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in _DRIVERS:
            made: metadata.Metadata = _translated(value, _torchs_classes())
            return made
        if name.startswith("shardkeep.dcp._impl.driver"):
            break
        frame = frame.f_back
    return value


def translator_to(party: object) -> Callable[[Any], Any]:
    """Return what turns values of ours into what a party expects; it does nothing where that is ours."""
    classes = protocol_classes_of(party)
    return (lambda value: value) if classes is OURS else (lambda value: _translated(value, classes))


def _translated(value: Any, classes: Classes) -> Any:
    kind = type(value)
    if kind is list:
        return [_translated(each, classes) for each in value]
    if isinstance(value, Mapping):
        return {_translated(key, classes): _translated(each, classes) for key, each in value.items()}
    name = kind.__name__
    target = classes.get(name)
    # A user's subclass of a plan has its own name, or its own module, and is left alone.
    if target is None or not (kind is target or kind is OURS[name] or metadata.is_torchs(value, name)):
        return value
    if issubclass(target, Enum):
        return target[value.name]
    if kind is target and name in _COMPLETE:
        return value
    names = [each.name for each in fields(target)]  # type: ignore[arg-type]  # all are dataclasses
    held = {key: getattr(value, key, None) for key in names}
    if name not in _LEAVES:
        held = {key: each if _opaque(name, key) else _translated(each, classes) for key, each in held.items()}
    made = target(**held)
    for key in vars(value).keys() - held.keys():  # of another version of torch
        object.__setattr__(made, key, getattr(value, key))
    return made


def _opaque(name: str, key: str) -> bool:
    # The storage's table is keyed by the protocol's own indices.
    return key in _OPAQUE and (name, key) not in {("Metadata", "storage_data"), ("Metadata", "storage_meta")}
