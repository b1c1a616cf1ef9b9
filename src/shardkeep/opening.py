"""
Look at a checkpoint: one process, no process group, no template.

`open` reads the commit record and the index; slicing a tensor reads only the blocks that the slice touches.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkeep import errors
from shardkeep.display import OneLine, format_count, format_seconds, format_size, html_table
from shardkeep.dist.team import team_of
from shardkeep.engine.reader import Source, damage_of_file, explain_missing, open_checked, stored_damage
from shardkeep.engine.sources import find
from shardkeep.engine.workers import limits_for_reads
from shardkeep.format.boxes import AxisSlice, Box, IndexItem, IntArray, parse_index
from shardkeep.format.dtypes import DType, to_torch
from shardkeep.format.index import Index
from shardkeep.format.record import FileEntry, Record
from shardkeep.format.values import Node, decode_tree, decode_value, leaf_keys, unflatten
from shardkeep.options import Options
from shardkeep.state.patterns import did_you_mean_pattern
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_store

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from shardkeep.dist.world import World

_MOST_IN_NOTEBOOK = 20


@dataclass(frozen=True, kw_only=True, repr=False)
class VerifyReport(OneLine):
    """What `Checkpoint.verify` read without finding damage."""

    files: int
    bytes_read: int
    """Without `deep`, the bytes of the files, whose sizes were checked."""
    seconds: float
    without_digests: int = 0
    """Number of files without digests of ours. Files that torch wrote are compared with the checksums in their archives."""
    without_checksums: int = 0
    """Number of files among them that have no checksums at all, such as safetensors files of other programs: headers and
    sizes were verified, and every byte was read, but there was nothing to compare it with."""
    undecoded: int = 0
    """Number of files without a key: their stored bytes match their digests, which are not signed."""
    deep: bool = True
    """Whether every byte was read; otherwise only sizes and headers were checked."""

    def __str__(self) -> str:
        files = format_count(self.files, "file")
        done = f"read all of {files}" if self.deep else f"checked sizes and headers of {files}"
        lacking = {"nothing to compare with": self.without_checksums, "no key to decrypt": self.undecoded}
        notes = "".join(f"; {format_count(count, 'file')} had {what}" for what, count in lacking.items() if count)
        return f"{done}, {format_size(self.bytes_read)} in {format_seconds(self.seconds)}: no damage found{notes}"


def open(where: str | os.PathLike[str] | Store, *, options: Options | None = None) -> Checkpoint:  # noqa: A001 - sk.open
    """
    Open a checkpoint to look at it or to read parts of it: a native one, one of torch's layout, a directory of
    safetensors files (or a single file) as Hugging Face writes them, or a file of `torch.save`.

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


def verify_stored(
    where: str | os.PathLike[str] | Store, *, deep: bool = True, options: Options | None = None
) -> VerifyReport:
    """
    Verify the stored bytes of an encrypted native checkpoint without its key.

    Args:
        where: a path, a URL, or a store.
        deep: read every byte; otherwise check only sizes, tables of frames and headers.
        options: threads and memory.

    Raises:
        DamagedCheckpoint: lists everything that is wrong.

    """
    began = time.perf_counter()
    options = options or Options()
    store = open_store(where, direct=options.direct_io)
    record = find(store).record
    threads, window = limits_for_reads(store, options, coded=any(file.chain is not None for file in record.files))
    found = stored_damage(store, record, deep=deep, threads=threads, window_nbytes=window)
    _raise_if_any(store, [exc.message for exc in found])
    return VerifyReport(
        files=len(record.files),
        bytes_read=record.stored_nbytes,
        seconds=time.perf_counter() - began,
        undecoded=sum(file.chain is not None for file in record.files),
        deep=deep,
    )


def _raise_if_any(store: Store, problems: list[str]) -> None:
    if problems:
        text = "\n  ".join(problems)
        raise errors.DamagedCheckpoint(f"{store.url}: {len(problems)} wrong:\n  {text}", problems=problems)


class Checkpoint(Mapping[str, Any]):
    """A committed checkpoint: a mapping from flat names to tensors, which are read when sliced, and plain values."""

    def __init__(self, store: Store, options: Options) -> None:
        self._store = store
        self._options = options
        found = find(store)
        try:
            self.source: Source = found.open(options)
            """What it is read from, for tools that look at files and offsets."""
        except errors.WrongSize as exc:
            name = found.record.index.name
            if isinstance(exc.__cause__, errors.BlobNotFound) and exc.details.get("file") == name:
                raise explain_missing(store, name) from exc
            raise
        self.record: Record = self.source.record
        self.index: Index = self.source.index

    @property
    def meta(self) -> dict[str, Any]:
        """The `meta` given to `save`."""
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
        return self._rows(key) != (None, None)

    def _rows(self, key: object) -> tuple[int | None, int | None]:
        try:
            raw = key.encode() if isinstance(key, str) else None
        except UnicodeEncodeError:
            raw = None
        if raw is None or (tensor := self.index.keys.find(raw)) is not None:
            return None if raw is None else tensor, None  # without a look at the values, which may have to be read
        return None, self.index.value_keys.find(raw)

    def __getitem__(self, key: str) -> Any:
        """Return a tensor, which is read when sliced, or a plain value."""
        return self.get_item(key, allow_pickle=False)

    def get_item(self, key: str, *, allow_pickle: bool) -> Any:
        """Return an item; unpickle it if it is a pickle and that is allowed."""
        tensor, value = self._rows(key)
        if tensor is not None:
            return StoredTensor(self, key, tensor)
        if value is None:
            self._check_sorted()
            raise self.missing_key(key)
        return decode_value(self.index.value_data.raw(value), key=key, allow_pickle=allow_pickle)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a tensor or a value, or `default` if there is none."""
        return self[key] if key in self else default  # noqa: SIM401 - that is what this does

    def missing_key(self, key: object) -> errors.MissingKey:
        """Say that there is no item of this name, and which are below it or spelt like it."""
        below = [name for name in self if name.startswith(f"{key}.")]
        if below:
            some = ", ".join(below[:3]) + (", …" if len(below) > 3 else "")
            return errors.MissingKey(f"{key!r} is not a key, but a prefix of {format_count(len(below), 'key')}: {some}")
        hint = did_you_mean_pattern(str(key), self)
        return errors.MissingKey(f"the checkpoint has no key {key!r}", hint=hint, key=str(key))

    def __repr__(self) -> str:
        totals, ranks = self.record.totals, format_count(self.record.world_size, "rank")
        holds = f"{format_count(totals.tensors, 'tensor')}, {format_count(totals.values, 'value')}"
        size = format_size(totals.tensor_bytes)
        return f"<Checkpoint {self._store.url}: {holds}, {size}, saved {self.record.saved_at} by {ranks}>"

    def _repr_html_(self) -> str:
        rows = [(name, self[name]) for name in islice(self.index.tensor_rows, _MOST_IN_NOTEBOOK)]
        shown = [(name, each.stored_dtype.name, each.shape, format_size(each.nbytes)) for name, each in rows]
        more = len(self) - len(shown)
        return html_table(repr(self)[1:-1], shown + ([(f"and {format_count(more, 'more name')}",)] if more else []))

    def read(self, row: int, picks: tuple[AxisSlice, ...]) -> torch.Tensor:
        """Slicing a `StoredTensor` is easier."""
        from shardkeep.engine.fill import read_picks  # noqa: PLC0415 - only reading a tensor needs torch

        return read_picks(self.source, row, picks, self._options)

    def to_dict(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """Read everything into the nested dict that was saved; tied tensors come back tied."""
        tree = self._tree()
        leaves = {key: self.get_item(key, allow_pickle=allow_pickle) for key in self.index.value_rows}
        leaves.update(self._tensors())
        return unflatten(tree, leaves.__getitem__)

    def _tensors(self) -> dict[str, Any]:
        """Read all tensors at once; those that are tied share memory."""
        rows = self.index.tensor_rows
        if not rows:
            return {}
        from shardkeep.engine.fill import read_whole  # noqa: PLC0415 - only reading a tensor needs torch

        owners = self._owners()
        tensors = dict(zip(owners.tolist(), read_whole(self.source, owners, self._options), strict=True))
        arrays: dict[int, np.ndarray[Any, Any]] = {}
        leaves: dict[str, Any] = {}
        columns = (self.index.tensors.alias.tolist(), self.index.tensors.origin.tolist())
        for (key, row), owner, origin in zip(rows.items(), *columns, strict=True):
            if origin == 1 and owner not in arrays:
                arrays[owner] = _to_array(key, self.index.dtype(row), tensors[owner])
            leaves[key] = arrays[owner] if origin == 1 else tensors[owner]
        return leaves

    def _owners(self) -> IntArray:
        return np.unique(np.asarray(self.index.tensors.alias, np.int64))

    def _tree(self) -> Node:
        """Return the skeleton, whose leaves must be exactly the stored keys."""
        self._check_sorted()
        tree = decode_tree(self.index.tree)
        names = list(leaf_keys(tree))
        if len(names) != len(self) or len(set(names)) != len(names) or set(names) != set(self):
            raise errors.MalformedFile(f"{self.record.index.name}: the tree and the keys name different leaves")
        return tree

    def verify(self, *, deep: bool = True, group: ProcessGroup | World | None = None) -> VerifyReport:
        """
        Read and verify every byte of every file, and read the commit record and the index again.

        Args:
            deep: read every byte; otherwise check only the index, sizes and headers.
            group: the ranks that have opened the checkpoint and make this call; each reads some of the files, and all raise
                what any of them found. None: this process reads all of it, also under torchrun.

        Raises:
            DamagedCheckpoint: lists everything that is wrong.
            StorageError: the store failed; the stored bytes may be intact.

        """
        began = time.perf_counter()
        files, nbytes = self.record.files, self.record.stored_nbytes
        with team_of(group, f"verify {self._store.url}", timeout_s=self._options.timeout_s, nbytes=nbytes) as team:
            team.alike("open", lambda: self.record.index.checksum, lambda checksum: checksum)
            mine = team.share(range(len(files)), lambda number: files[number].nbytes)

            def check() -> tuple[list[str], set[int]]:
                uncompared: set[int] = set()
                look = partial(self._damage, uncompared) if deep else self._visible_damage
                return [exc.message for exc in look(mine, index=team.leads)], uncompared

            found = team.gather("verify", check, tuple[list[str], set[int]])

            def report() -> int:
                _raise_if_any(self._store, [problem for problems, _ in found for problem in problems])
                return sum(len(uncompared) for _, uncompared in found)

            without_checksums = team.on_rank_0("report", report, int)
        return VerifyReport(
            files=len(files),
            bytes_read=nbytes,
            seconds=time.perf_counter() - began,
            without_digests=sum(not file.block_nbytes for file in files),
            without_checksums=without_checksums,
            deep=deep,
        )

    def _damage(self, uncompared: set[int], numbers: Sequence[int], *, index: bool) -> Iterator[errors.CheckpointError]:
        """Yield the damage of files, by number; with `index`, also that of record, index and plain values."""
        for check in (self._check_unchanged, self._check_index) if index else ():
            try:
                check()
            except (errors.DamagedCheckpoint, errors.CheckpointNotFound) as exc:
                yield exc
        for row, key in enumerate(self.index.value_keys.all() if index else ()):
            try:
                decode_value(self.index.value_data.raw(row), key=key.decode(), allow_pickle=False)
            except errors.DamagedCheckpoint as exc:
                yield exc
            except (errors.PickleRefused, errors.UnsupportedLeaf):
                pass  # intact, but not to be rebuilt here
        for number in numbers:
            try:
                yield from self._damage_of_file(number, uncompared)
            except errors.DamagedCheckpoint as exc:
                yield exc

    def _visible_damage(self, numbers: Sequence[int], *, index: bool) -> Iterator[errors.CheckpointError]:
        source = self.source

        def check(file: FileEntry | None) -> errors.CheckpointError | None:
            try:
                if file is None:
                    source.check_index(self._owners())
                else:
                    open_checked(source.store, file, None if file.header_nbytes else source.digests)[0].close()
            except errors.DamagedCheckpoint as exc:
                return exc
            return None

        with ThreadPoolExecutor(self._options.io_threads, thread_name_prefix="shardkeep-verify") as pool:
            checked = [*([None] if index else []), *(self.record.files[number] for number in numbers)]
            yield from filter(None, pool.map(check, checked))

    def _check_unchanged(self) -> None:
        """Check that the store still has the record and the index that were opened."""
        found = find(self._store)
        if found.record.save_id != self.record.save_id:
            raise explain_missing(self._store, self.record.index.name)
        opened = found.open(self._options).record
        if opened != self.record:
            raise errors.MalformedFile(f"{self._store.url}: the commit record is not the one that was opened")

    def _check_sorted(self) -> None:
        if not self.index.is_sorted:
            raise errors.MalformedFile(f"{self.record.index.name}: keys are not sorted, or not distinct")

    def _check_index(self) -> None:
        self.source.check_index(self._owners())
        self._tree()

    def _damage_of_file(self, number: int, uncompared: set[int]) -> Iterator[errors.CheckpointError]:
        """Read a file, and yield what is damaged; add its number to `uncompared` if there was nothing to compare with."""
        file = self.record.files[number]
        if not file.block_nbytes and (damage := self.source.damage_by_form(number, uncompared)) is not None:
            yield from damage
            return
        threads, window = limits_for_reads(self._store, self._options, coded=file.chain is not None)
        # Headers are read and verified again; digests beside a file without a header were read when it was opened.
        files = self.source.data_files
        files = files._replace(digests={}) if file.header_nbytes else files
        yield from damage_of_file(files, number, threads=threads, window_nbytes=window)


class StoredTensor:
    """A tensor of a checkpoint. Slicing reads only what the slice needs."""

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
    def boxes(self) -> list[Box]:
        """The boxes in which the tensor is stored."""
        boxes = self._checkpoint.index.chunks.take(self._checkpoint.index.chunk_rows(self.row)).boxes
        return [boxes.box(row, self.ndim) for row in range(len(boxes))]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __getitem__(self, item: IndexItem | tuple[IndexItem, ...]) -> torch.Tensor:
        """Read a part into a new tensor."""
        return self._checkpoint.read(self.row, parse_index(self.key, self.shape, item))

    def tensor(self) -> torch.Tensor:
        """Read all of it."""
        return self[...]

    def numpy(self) -> np.ndarray[Any, Any]:
        """Read all of it as a numpy array, for element types that numpy has."""
        return _to_array(self.key, self.stored_dtype, self.tensor())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(f"{self.key!r} is not in memory: an array of it is always a copy")
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"<StoredTensor {self.key!r}: {self.stored_dtype.name}{self.shape}>"


def _to_array(key: str, dtype: DType, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    if dtype.numpy is None:
        raise errors.UnsupportedLeaf(
            f"{key!r} is {dtype.name}, which numpy does not have",
            hint="use .tensor(), and .float() for a type numpy has",
        )
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array
