"""
The pickle of a state in an archive of `torch.save`, made without the values of its tensors.

Tensors that lie in a checkpoint stand in the state as `StandIn`s and are pickled as torch pickles tensors, whose bytes
it keeps apart as storages. Values that hold real tensors are pickled as they are.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import _utils as rebuilding

from shardkeep.format.dtypes import DType, to_torch
from shardkeep.format.region import Ints
from shardkeep.format.torch_archive import _STORAGE_OF

_PROTOCOL = 2  # torch's


@dataclass(frozen=True)
class StandIn:
    """A dense tensor that is not in memory."""

    key: str
    shape: Ints
    dtype: DType

    @property
    def nbytes(self) -> int:
        """What its values take."""
        return math.prod(self.shape) * self.dtype.itemsize


class Pickled(NamedTuple):
    """A state without the bytes of its tensors."""

    data: bytes
    storages: list[StandIn | torch.UntypedStorage]
    """Whose bytes belong to each storage that the pickle names by its number; those in memory are on the CPU."""


def pickle_state(state: Any) -> Pickled:
    """Pickle a state as `torch.save` does."""
    out = io.BytesIO()
    pickler = _StatePickler(out)
    pickler.dump(state)
    return Pickled(out.getvalue(), pickler.storages)


@dataclass(frozen=True)
class _Bytes:
    """The storage of a tensor that is not in memory."""

    tensor: StandIn


class _StatePickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, _PROTOCOL)
        self.storages: list[StandIn | torch.UntypedStorage] = []
        self._known: dict[int, tuple[str, torch.UntypedStorage]] = {}

    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, StandIn):
            return NotImplemented
        strides = tuple(math.prod(max(n, 1) for n in obj.shape[axis + 1 :]) for axis in range(len(obj.shape)))
        hooks: OrderedDict[Any, Any] = OrderedDict()
        form = (_Bytes(obj), 0, obj.shape, strides, False, hooks)
        if obj.dtype.name in _STORAGE_OF:
            return rebuilding._rebuild_tensor_v2, form
        return rebuilding._rebuild_tensor_v3, (*form, to_torch(obj.dtype))

    def persistent_id(self, obj: Any, /) -> Any:
        if isinstance(obj, _Bytes):
            number = self._add(obj.tensor)
            name = _STORAGE_OF.get(obj.tensor.dtype.name)
            if name is None:
                return "storage", torch.UntypedStorage, number, "cpu", obj.tensor.nbytes
            return "storage", getattr(torch, name), number, "cpu", math.prod(obj.tensor.shape)
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj
            return self._stored(typed._untyped_storage, getattr(torch, typed._pickle_storage_type()), typed._size())
        if isinstance(obj, torch.UntypedStorage):
            return self._stored(obj, torch.UntypedStorage, obj.nbytes())
        return None

    def _stored(self, storage: torch.UntypedStorage, kind: Any, elements: int) -> tuple[Any, ...]:
        # Tensors that share memory share it after they were loaded, too.
        known = self._known.get(storage._cdata)
        if known is None:
            number = self._add(storage.cpu())  # type: ignore[no-untyped-call]  # torch's
            # Kept as well: no other storage may come to have its address.
            known = self._known[storage._cdata] = number, storage
        return "storage", kind, known[0], torch.serialization.location_tag(storage), elements

    def _add(self, storage: StandIn | torch.UntypedStorage) -> str:
        self.storages.append(storage)
        return str(len(self.storages) - 1)
