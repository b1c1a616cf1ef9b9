"""
Look at a checkpoint: one process, no process group, no template.

`open` reads the commit record and the index. A tensor is read when it is sliced, and then only the blocks its slice
touches.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkeep.errors import CheckpointError, DamagedCheckpoint, MalformedFile, UnsupportedLeaf
from shardkeep.format.dtypes import DType, to_torch
from shardkeep.format.index import Index
from shardkeep.format.picks import Item, Pick, parse_index
from shardkeep.format.record import Record
from shardkeep.format.region import Box
from shardkeep.format.tree import Node, decode_tree, leaf_keys, unflatten
from shardkeep.format.values import decode_value
from shardkeep.layout import native
from shardkeep.options import Options
from shardkeep.plan.loads import check_tensors
from shardkeep.plan.ranges import every_block
from shardkeep.run.read import Source, keys_at, open_checked, read_files
from shardkeep.run.workers import window_for
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What `Checkpoint.verify` read, all of it sound."""

    files: int
    bytes_read: int
    seconds: float


def open(where: str | os.PathLike[str] | Store, *, options: Options | None = None) -> Checkpoint:  # noqa: A001 - sk.open
    """
    Open a committed checkpoint to look at it or read parts of it.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> where = tempfile.mkdtemp() + "/step-1"
        >>> _ = sk.save({"w": torch.arange(12.).reshape(3, 4), "step": 1}, where)
        >>> ck = sk.open(where)
        >>> list(ck), ck["step"], ck["w"].shape
        (['step', 'w'], 1, (3, 4))
        >>> ck["w"][1:, ::2]
        tensor([[ 4.,  6.],
                [ 8., 10.]])

    """
    options = options or Options()
    return Checkpoint(open_store(where, direct=options.direct_io), options)


class Checkpoint(Mapping[str, Any]):
    """
    A committed checkpoint, as a mapping from flat names to tensors (not read yet) and plain values.
    """

    def __init__(self, store: Store, options: Options) -> None:
        self._store = store
        self._options = options
        self.record: Record = native.read_record(store)
        self.index: Index = native.read_index(store, self.record)

    @property
    def meta(self) -> dict[str, Any]:
        """The user's own words in the commit record."""
        return self.record.meta

    @property
    def step(self) -> int | None:
        """The step given to `save`."""
        return self.record.step

    def __len__(self) -> int:
        return len(self.index.keys) + len(self.index.value_keys)

    def __iter__(self) -> Iterator[str]:
        names = [*self.index.keys.all(), *self.index.value_keys.all()]
        return iter([name.decode() for name in sorted(names)])

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and any(
            strings.find(key.encode()) is not None for strings in (self.index.keys, self.index.value_keys)
        )

    def __getitem__(self, key: str) -> Any:
        """Return a tensor, not read yet, or a plain value."""
        return self.get_item(key, allow_pickle=False)

    def get_item(self, key: str, *, allow_pickle: bool) -> Any:
        """Return an item, unpickling it if need be and allowed."""
        raw = key.encode()
        row = self.index.keys.find(raw)
        if row is not None:
            return StoredTensor(self, key, row)
        row = self.index.value_keys.find(raw)
        if row is None:
            if not self.index.is_sorted:
                raise MalformedFile(f"{self.record.index.name}: keys are not sorted, or not distinct")
            raise KeyError(key)
        return decode_value(self.index.value_data.raw(row), key=key, allow_pickle=allow_pickle)

    def __repr__(self) -> str:
        totals = self.record.totals
        return (
            f"<Checkpoint {self._store.url}: {totals.tensors} tensors, {totals.values} values,"
            f" {totals.tensor_bytes / 1e9:.3f} GB, saved {self.record.saved_at} by {self.record.world_size} ranks>"
        )

    def read(self, row: int, picks: tuple[Pick, ...]) -> torch.Tensor:
        """Read the picked part of a tensor; `StoredTensor` is the friendlier way."""
        from shardkeep.run.slicing import read_picks  # noqa: PLC0415 - only reading a tensor needs torch

        source = Source(self._store, self.record, self.index)
        return read_picks(source, row, picks, self._options)

    def to_dict(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """Read everything into the nesting it was saved from; tied tensors come back tied."""
        read: dict[int, Any] = {}

        def leaf(key: str) -> Any:
            item = self.get_item(key, allow_pickle=allow_pickle)
            if not isinstance(item, StoredTensor):
                return item
            owner = int(self.index.tensors.alias[item.row])
            if owner not in read:
                read[owner] = item.numpy() if item.is_numpy else item.tensor()
            return read[owner]

        return unflatten(self._tree(), leaf)

    def _tree(self) -> Node:
        """Return the skeleton, whose leaves are all that is stored, each once."""
        tree = decode_tree(self.index.tree)
        names = list(leaf_keys(tree))
        if len(names) != len(self) or len(set(names)) != len(names) or set(names) != set(self):
            raise MalformedFile(f"{self.record.index.name}: the tree and the keys name different leaves")
        return tree

    def verify(self) -> VerifyReport:
        """
        Read every byte of every file and check it.

        Raises:
            DamagedCheckpoint: lists everything that is wrong.

        """
        began = time.perf_counter()
        problems = [exc.message for exc in self._damage()]
        if problems:
            raise DamagedCheckpoint(
                f"{self._store.url}: {len(problems)} wrong:\n  " + "\n  ".join(problems), problems=problems
            )
        nbytes = sum(file.nbytes for file in self.record.files) + self.record.index.nbytes
        return VerifyReport(files=len(self.record.files), bytes_read=nbytes, seconds=time.perf_counter() - began)

    def _damage(self) -> Iterator[CheckpointError]:
        try:
            own = np.unique(np.asarray(self.index.tensors.alias, np.int64))
            check_tensors(self.index, own, native.data_sizes(self.record))
            if not self.index.is_sorted:
                raise MalformedFile(f"{self.record.index.name}: keys are not sorted, or not distinct")
            self._tree()
        except CheckpointError as exc:
            yield exc
        threads, window = window_for(self._options.io_threads, self._options.host_budget_bytes)
        key_at = keys_at(self.index, self.record)
        for number, file in enumerate(self.record.files):
            try:
                # The real size first: a plan is as long as the record says the file is.
                open_checked(self._store, file)[0].close()
                plan = every_block(number, file.nbytes - file.header_nbytes, window_nbytes=window)
                read_files(
                    self._store, self.record.files, [plan], {}, key_at=key_at, threads=threads, window_nbytes=window
                )
            except CheckpointError as exc:
                yield exc


class StoredTensor:
    """
    A tensor of a checkpoint, not read yet. Slicing reads what the slice needs.
    """

    def __init__(self, checkpoint: Checkpoint, key: str, row: int) -> None:
        self._checkpoint = checkpoint
        self.key = key
        self.row = row
        self.shape = checkpoint.index.shape(row)

    @property
    def stored_dtype(self) -> DType:
        """The element type, without importing torch."""
        return self._checkpoint.index.dtype(self.row)

    @property
    def dtype(self) -> torch.dtype:
        """The element type, as torch's."""
        return to_torch(self.stored_dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.stored_dtype.itemsize

    @property
    def is_numpy(self) -> bool:
        """True where a numpy array was saved."""
        return int(self._checkpoint.index.tensors.origin[self.row]) == 1

    @property
    def boxes(self) -> list[Box]:
        """The boxes it is stored as."""
        rows = self._checkpoint.index.chunk_rows(self.row)
        boxes = self._checkpoint.index.chunks.boxes
        return [boxes.box(row, self.ndim) for row in range(rows.start, rows.stop)]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __getitem__(self, item: Item | tuple[Item, ...]) -> torch.Tensor:
        """Read a part of it, as a tensor of its own."""
        return self._checkpoint.read(self.row, parse_index(self.key, self.shape, item))

    def tensor(self) -> torch.Tensor:
        """Read all of it."""
        return self[...]

    def numpy(self) -> np.ndarray[Any, Any]:
        """Read all of it as a numpy array; for element types that numpy has."""
        if self.stored_dtype.numpy is None:
            raise UnsupportedLeaf(
                f"{self.key!r} is {self.stored_dtype.name}, which numpy does not have",
                hint="use .tensor(), and .float() for a type numpy has",
            )
        array: np.ndarray[Any, Any] = self.tensor().numpy()
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"<StoredTensor {self.key!r}: {self.stored_dtype.name}{self.shape}>"
