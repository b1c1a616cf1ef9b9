"""
The values and interfaces of torch's checkpoint protocol: metadata, items, plans, planners and storages.

Fields, defaults, comparison and hashing are those of torch's classes of the same names. A `MetadataIndex` and the members of
the enums are also equal to torch's own, with the same hashes, so that either finds an entry that is stored under the other.
"""

from __future__ import annotations

import abc
import io
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch.futures import Future

from shardkeep.errors import BrokenProtocol, torch_module

if TYPE_CHECKING:
    from typing import TypeGuard


def is_torchs(obj: object, name: str) -> bool:
    kind = type(obj)
    return kind.__name__ == name and kind.__module__.startswith("torch.distributed.checkpoint.")


@dataclass
class ChunkStorageMetadata:
    """A box of a tensor that is stored in one piece."""

    offsets: torch.Size
    sizes: torch.Size


class _MEM_FORMAT_ENCODING(Enum):  # noqa: N801 - torch's name
    """A memory format in a form that can be pickled."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_FORMATS = {each.name: getattr(torch, each.name.removeprefix("TORCH_").lower()) for each in _MEM_FORMAT_ENCODING}
_HAS_STRIDES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)


@dataclass
class TensorProperties:
    """The properties of a tensor besides its size; only the dtype is still used."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False
    strides: tuple[int, ...] | None = None

    def __getstate__(self) -> tuple[Any, ...]:
        for name, memory_format in _FORMATS.items():
            if memory_format == self.memory_format:
                encoded = _MEM_FORMAT_ENCODING[name]
                strides = (self.strides,) if _HAS_STRIDES else ()
                return self.dtype, self.layout, self.requires_grad, encoded, self.pin_memory, *strides
        raise BrokenProtocol(f"{self.memory_format} is not a memory format that a checkpoint can hold")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, encoded, self.pin_memory, *more = state
        self.strides = more[0] if more else None
        # By name: the member may be that of torch's own enum.
        name = getattr(encoded, "name", None)
        if name not in _FORMATS:
            raise BrokenProtocol(f"{encoded!r} is not the encoding of a memory format")
        self.memory_format = _FORMATS[name]

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Describe a tensor."""
        strides = tensor.stride() if _HAS_STRIDES and tensor.layout is torch.strided else None
        form = tensor.dtype, tensor.layout, tensor.requires_grad
        return TensorProperties(*form, pin_memory=tensor.is_pinned(), strides=strides)


@dataclass
class TensorStorageMetadata:
    """A stored tensor and the chunks it is stored in."""

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    """A stored object that is not a tensor."""


STORAGE_TYPES = TensorStorageMetadata | BytesStorageMetadata
STATE_DICT_TYPE = dict[str, Any]


def is_tensor_entry(entry: Any) -> bool:
    """Return whether an entry of `Metadata.state_dict_metadata`, ours or torch's, describes a tensor."""
    return isinstance(entry, TensorStorageMetadata) or is_torchs(entry, "TensorStorageMetadata")


@dataclass
class StorageMeta:
    """The storage's description of itself and of the call."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class Metadata:
    """The description of a checkpoint, without its data."""

    state_dict_metadata: dict[str, STORAGE_TYPES]
    """What is stored, by flat name."""
    planner_data: Any = None
    """For the load planner, by the save planner. The default planners store the path of each flat name."""
    storage_data: Any = None
    """For the storage reader, by the writer: the location of each item."""
    storage_meta: StorageMeta | None = None
    version: str | None = None


@dataclass(frozen=True, init=False, eq=False)
class MetadataIndex:
    """Identifies an object of a checkpoint, or a chunk of a tensor by its offset."""

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)
    """A hint: the position in the list of chunks. It is not compared."""

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "index", index)
        if offset is not None:
            object.__setattr__(self, "offset", offset if type(offset) is torch.Size else torch.Size(offset))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.offset is not None and type(self.offset) is not torch.Size:
            object.__setattr__(self, "offset", torch.Size(self.offset))  # only of numbers: it is hashed

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MetadataIndex) and not is_torchs(other, "MetadataIndex"):
            return NotImplemented
        return (self.fqn, self.offset) == (other.fqn, other.offset)  # type: ignore[attr-defined]  # torch's has both

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))


# -- where an item lies among the files of torch's layout, for `WriteResult.storage_data` and `Metadata.storage_data` ----

DEFAULT_SUFFIX = ".distcp"
_metadata_fn = ".metadata"
CURRENT_DCP_VERSION = "1.0.0"


class SerializationFormat(Enum):
    """The format of a data file."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


@dataclass
class _StorageInfo:
    """The location of an item: a file, and a range of it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None
    """The extensions it was written through, in the order in which to undo them."""

    # What torch does not know is pickled with its fields, and torch carries it along unseen. Not annotated: no fields.

    shardkeep_data_start = cast("int | None", None)
    """The file offset of a tensor's bytes, which are row-major and as its metadata say; None if not known."""
    shardkeep_sums = cast("tuple[int, int, str] | None", None)
    """Sizes and checksum of the whole file, for the coordinator, which takes it off."""

    def __getstate__(self) -> dict[str, Any]:
        # Nothing where there is nothing to say, as before there were extensions.
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass
class _StoragePrefix:
    """The prefix of the names of a rank's files."""

    prefix: str


# -- what is written and read: items, and the plans of a rank that are made of them --------------------------------------


class _ItemType(Enum):
    """An enum whose members are equal to those of torch's enum of the same name, with which torch's code compares them."""

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self is other
        if isinstance(other, Enum) and is_torchs(other, type(self).__name__):
            return self.name == other.name
        return NotImplemented

    def __hash__(self) -> int:
        # As every enum's: hash-equal to torch's member.
        return hash(self._name_)


class WriteItemType(_ItemType):
    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(_ItemType):
    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True)
class BytesIOWriteData:
    """The size of an object, if it is known."""

    nbytes: int


@dataclass(frozen=True)
class TensorWriteData:
    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True)
class WriteItem:
    """A tensor, a shard or an object that is written in one piece."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Return the bytes of the *whole* tensor, as torch does; None for objects."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.size) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class ReadItem:
    """A box that is read from one stored item into one tensor."""

    type: LoadItemType
    dest_index: MetadataIndex
    """The value, or the shard of it, that is filled."""
    dest_offsets: torch.Size
    """Where the box begins there."""
    storage_index: MetadataIndex
    """The stored piece."""
    storage_offsets: torch.Size
    """Where the box begins in it."""
    lengths: torch.Size


@dataclass(frozen=True)
class SavePlan:
    """What a rank writes."""

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True
    """False if the plan of the previous save is still valid."""


@dataclass
class LoadPlan:
    """What a rank reads."""

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None


def chunk_nbytes(item: WriteItem) -> int | None:
    """Return the bytes that an item itself writes of its tensor; None for an object."""
    if item.tensor_data is None:
        return None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


# -- what users implement to decide which values are saved and loaded, mostly by extending the default planners ----------


class SavePlanner(abc.ABC):
    """Decides what each rank writes, and provides the data. Serves one save at a time, in the order of the methods."""

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a save of `state_dict`, and keep what later calls need. Called on all ranks."""

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write. Called on all ranks."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank is to write, and the metadata of the checkpoint. Called on the coordinator."""

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan to carry out, given this rank's part of the global one. Called on all ranks."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """
        Return the data to store for an item of the final plan.

        Called at least once for each item, from any thread, also concurrently. What needs memory should be allocated here
        and not earlier. A tensor may be on any device and have any strides.
        """


class LoadPlanner:
    """Decides what each rank reads, and where it goes. Serves one load at a time, in the order of the methods."""

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin to load into `state_dict`. Called on all ranks."""

    @abc.abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """Return what this rank needs. Called on all ranks."""

    @abc.abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return what each rank is to read, given what each needs. Called on the coordinator."""

    @abc.abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan to carry out, given this rank's part of the global one. Called on all ranks."""

    @abc.abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a stored object, an item of the final plan, into the state."""

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return the stream to fill for an item, if the planner has one."""
        raise NotImplementedError(f"{type(self).__qualname__} has no stream for {read_item.dest_index.fqn!r}")

    @abc.abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor to fill for another item: memory of the state, or a buffer that is copied later."""

    @abc.abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Accept `tensor`, which `resolve_tensor` returned for the item, and which has been filled."""


# -- what users implement to move the data of a checkpoint, and what a writer reports -----------------------------------


@dataclass(frozen=True)
class WriteResult:
    """Where an item was written."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


class StorageWriter(abc.ABC):
    """Writes what a save planner hands over. Serves one save at a time, in the order of the methods."""

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous save; the next one goes to `checkpoint_id`. Called on all ranks, if there is an id."""

    def storage_meta(self) -> StorageMeta | None:
        """Return the storage's description of itself, for the planner and the metadata. Called on all ranks."""
        return None

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. Those that take keywords get `rank` and `use_collectives`. Called on all ranks."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's plan with what the storage adds to it, best in `storage_data`. Called on all ranks."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans of all ranks with what the storage adds to them. Called on the coordinator."""

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write every item of the plan, as `planner.resolve_data` returns it. Called on all ranks."""

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, given what all ranks wrote. Called on the coordinator."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this storage can hold a checkpoint of this id."""


class StorageReader(abc.ABC):
    """Reads what a load planner asks for. Serves one load at a time, in the order of the methods."""

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous load; the next one is from `checkpoint_id`. Called on all ranks, if there is an id."""

    @abc.abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata; with `rank`, those that this rank alone wrote."""

    @abc.abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load. Those that take keywords get `rank` and `use_collectives`. Called on all ranks."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan with what the storage adds to it, best in `storage_data`. Called on all ranks."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks with what the storage adds to them. Called on the coordinator."""

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan: objects to `planner.load_bytes`, tensors into `planner.resolve_tensor`."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this storage can hold a checkpoint of this id."""


@runtime_checkable
class CheckpointableTensor(Protocol):
    """A plain tensor that holds shards of a larger one, as torch has them since 2.14."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    """Where each shard begins in the whole tensor."""
    local_offsets: tuple[tuple[int, ...], ...]
    """Where each shard begins in this tensor."""
    local_sizes: tuple[tuple[int, ...], ...]
    """The shape of each shard."""


def _is_checkpointable_tensor(obj: object) -> TypeGuard[CheckpointableTensor]:
    # The first attribute alone decides for almost all tensors: to compare with the protocol is slow.
    return isinstance(obj, torch.Tensor) and hasattr(obj, "global_shape") and isinstance(obj, CheckpointableTensor)


def _copy_checkpointable_tensor_metadata(src: CheckpointableTensor, dst: torch.Tensor) -> None:
    for name in CheckpointableTensor.__annotations__:
        setattr(dst, name, getattr(src, name))


# -- translation between torch's classes and ours ----------------------------------------------------------------------
#
# DTensors describe themselves in torch's classes, and a planner, reader or writer of torch's checks that a value is of
# torch's class. Therefore values from tensors are translated to our classes, and values for an object of torch's to torch's.
# Both sets of classes have the same names and fields. If there is an instance of torch's, its module is in `sys.modules`.

Classes = Mapping[str, type]

_MODULES = {
    **dict.fromkeys((ChunkStorageMetadata, TensorProperties, TensorStorageMetadata), "metadata"),
    **dict.fromkeys((BytesStorageMetadata, StorageMeta, Metadata, MetadataIndex), "metadata"),
    **dict.fromkeys((WriteItemType, LoadItemType, BytesIOWriteData, TensorWriteData), "planner"),
    **dict.fromkeys((WriteItem, ReadItem, SavePlan, LoadPlan), "planner"),
    WriteResult: "storage",
}
"""The module of `torch.distributed.checkpoint` that has the class of each one's name."""
OURS: Classes = {kind.__name__: kind for kind in _MODULES}
_PARTIES = {"SavePlanner", "LoadPlanner", "StorageWriter", "StorageReader", "StorageMeta"}
_LEAVES = {"ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "BytesIOWriteData"}
"""Classes whose fields never need translation."""
_COMPLETE = _LEAVES | {"Metadata"}
"""Classes whose instances, if of the right class themselves, contain only instances of the right classes."""
_OPAQUE = {(name, key) for name in OURS for key in ("planner_data", "storage_data", "storage_meta", "modules")} - {
    ("Metadata", "storage_data"),  # its keys are indices of the protocol
    ("Metadata", "storage_meta"),
}
"""Classes and fields whose contents belong to a planner or a storage."""
_DRIVERS = {"torch.distributed.checkpoint.state_dict_loader", "torch.distributed.checkpoint.optimizer"}
"""The modules of torch that call readers."""


def to_ours(value: Any) -> Any:
    """Return a value, or a list or dict of values, translated to our classes; anything else unchanged."""
    return _translated(value, OURS)


def protocol_classes_of(party: object) -> Classes:
    """Return the classes that a planner, a storage or its `StorageMeta` expects: torch's if it derives from torch's."""
    for kind in type(party).__mro__:
        if kind.__name__ in _PARTIES and kind.__module__.startswith("torch.distributed.checkpoint."):
            return _torchs_classes()
    return OURS


def _torchs_classes() -> Classes:
    return {
        kind.__name__: getattr(torch_module(f"torch.distributed.checkpoint.{module}"), kind.__name__)
        for kind, module in _MODULES.items()
    }


def translator(source: object, target: object) -> Callable[[Any], Any]:
    """Return a function that translates values of one object's classes to another's; None stands for our classes."""
    from_classes, to_classes = protocol_classes_of(source), protocol_classes_of(target)
    if from_classes["Metadata"] is to_classes["Metadata"]:
        return lambda value: value
    return lambda value: _translated(value, to_classes)


def to_classes_of(party: object, value: Any) -> Any:
    return _translated(value, protocol_classes_of(party))


def to_classes_of_caller(value: Metadata) -> Metadata:
    """Return metadata that a reader has read in the classes of its caller: torch's if the caller is torch's own `load`."""
    # Torch's `load` passes the metadata to its planner, which compares classes: with ours it would refuse objects and skip
    # the comparison of tensor sizes. A reader does not know its caller, so this looks at the stack.
    for frame, _ in walk_stack(sys._getframe(1)):
        name = frame.f_globals.get("__name__", "")
        if name in _DRIVERS:
            return cast("Metadata", _translated(value, _torchs_classes()))
        if name.startswith("shardkeep.dcp._impl.driver"):
            break
    return value


def _translated(value: Any, classes: Classes) -> Any:
    kind = type(value)
    if kind is list:
        return [_translated(each, classes) for each in value]
    if isinstance(value, Mapping):
        return {_translated(key, classes): _translated(each, classes) for key, each in value.items()}
    name = kind.__name__
    target = classes.get(name)
    # A user's subclass of a plan has another name or another module, and is not translated.
    if target is None or not (kind is target or kind is OURS[name] or is_torchs(value, name)):
        return value
    if issubclass(target, Enum):
        return target[value.name]
    if kind is target and name in _COMPLETE:
        return value
    names = [each.name for each in fields(target)]  # type: ignore[arg-type]  # all are dataclasses
    held = {key: getattr(value, key, None) for key in names}
    if name not in _LEAVES:
        held = {key: each if (name, key) in _OPAQUE else _translated(each, classes) for key, each in held.items()}
    made = target(**held)
    for key in vars(value).keys() - held.keys():  # of another version of torch
        object.__setattr__(made, key, getattr(value, key))
    return made
