"""
Writes one file in the form of `torch.save`, which `torch.load` opens, in windows that several threads fill.

All sizes are known before the first byte is written, so every window has its place in the file. Only the checksums are
not: torch writes the CRC-32 of a storage behind it, and again in the directory at the end of the file. A window with
such bytes waits for the windows before it.

The file appears under its name when it is complete, durable and read back, in place of what was there, or not at all. On
a local disk it is written under a temporary name and renamed; the next write to the same directory removes what a killed
process left. A store cannot rename: a new blob appears there when it is complete, and is read back afterwards. To replace
another, an object store joins the uploaded parts in one request; other stores put the blob from memory in one request, and
refuse one that is too large for that. A blob that replaced another is never deleted, because then neither would be left.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import _utils as rebuilding

from shardkeep import errors
from shardkeep.conversion import pipeline
from shardkeep.conversion.select import Selection
from shardkeep.engine.reader import Source
from shardkeep.engine.workers import FollowUpError
from shardkeep.format.boxes import strides_of
from shardkeep.format.data_file import combine_crc32
from shardkeep.format.dtypes import to_torch
from shardkeep.format.torch_zip import _STORAGE_OF, ArchiveLayout
from shardkeep.format.values import decode_value, leaf_keys
from shardkeep.options import Options
from shardkeep.storage.base import BlobWriter, ReadableStore, Store, WritableStore, create_over, local_path, scheme_of
from shardkeep.storage.local import LocalStore, clear_temporaries, storage_errors, sync_directory, temporary_name
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.resolve import open_store


def write_torch_file(to: str, chosen: Selection, source: Source, how: pipeline.WriteArguments) -> pipeline.Written:
    """Write what was selected of a checkpoint as one file: a flat dict of tensors and plain values."""
    target = destination(to, make_directory=True)
    taken = errors.CheckpointExists(f"{to} is already there", hint="pass overwrite=True to replace it")
    if file_exists(*target) and not how.overwrite:
        raise taken
    index = source.index
    state: dict[str, Any] = {}
    for name in leaf_keys(chosen.tree):
        if name not in chosen.values:
            # The same object for names that are tied: torch.load gives one tensor under both.
            state[name] = chosen.tensors[chosen.ties.get(name, name)]
            continue
        key = chosen.values[name]
        raw = index.value_data.raw(index.value_rows[key])
        state[name] = decode_value(raw, key=key, allow_pickle=how.options.allow_pickle)
        if not _is_plain(state[name]):
            raise errors.UnsupportedLeaf(
                f"{key!r} is or holds what torch.load does not open with weights_only=True: "
                f"a {type(state[name]).__name__}",
                hint=f"leave it out: exclude={key!r}",
                key=key,
            )
    windows = pipeline.limits(how.options, source.store)
    reader = pipeline.PartReader(source, budget_nbytes=2 * windows[1])
    try:
        nbytes = write_archive(target, pickle_state(state), reader.fill, how, windows=windows)
    except errors.StorageError as exc:
        if exc.errno == errno.EEXIST:
            raise taken from exc
        raise
    return pipeline.Written([target[1]], nbytes, reader.infinite)


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, OrderedDict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def write_archive(
    target: tuple[Store, str],
    pickled: Pickled,
    fill: pipeline.Fill,
    how: pipeline.WriteArguments | None = None,
    *,
    windows: tuple[int, int] | None = None,
) -> int:
    """Write an archive to a `destination`, and return its size; EEXIST or EFBIG if it cannot replace what is there."""
    overwrite, options, progress = how[:3] if how else (True, Options(), None)
    layout = ArchiveLayout(pickled.data, [storage.nbytes for storage in pickled.storages])
    sums = _Checksums(layout, pickled.storages)
    parts: list[pipeline.Part] = []
    at = 0
    for number, (storage, start) in enumerate(zip(pickled.storages, layout.starts, strict=True)):
        parts += [pipeline.LatePart(start - at, partial(sums.before, number)), storage]
        at = start + storage.nbytes
    parts.append(pipeline.LatePart(layout.nbytes - at, partial(sums.before, len(layout.sizes))))
    file = pipeline.file_parts("", parts)
    digests: list[bytes] = []

    def fill_window(wanted: list[pipeline.Wanted]) -> None:
        try:
            fill(wanted)
            sums.add(wanted)
        except BaseException:
            sums.fail()
            raise

    def write(store: WritableStore, name: str) -> None:
        threads, window = windows or pipeline.limits(options, store)
        files = [replace(file, job=replace(file.job, name=name))]
        digests[:] = pipeline.write_filled(
            store, files, fill_window, threads=threads, window_nbytes=window, progress=progress
        )

    def check(store: ReadableStore, name: str) -> None:
        pipeline.verify_written(store, [replace(file, job=replace(file.job, name=name))], digests, options)

    if local_path(target[0]) is not None:
        _write_local(*target, write, check, replace=overwrite)
    else:
        most_held = min(_MOST_HELD_NBYTES, options.host_budget_bytes // 2)  # it is held twice for a moment
        _write_blob(*target, layout.nbytes, write, check, replace=overwrite, most_held=most_held)
    return layout.nbytes


class _Checksums:
    """The CRC-32 of every storage, combined from ranges that are filled in any order."""

    def __init__(self, layout: ArchiveLayout, storages: Sequence[pipeline.TensorPart | memoryview]) -> None:
        self._layout = layout
        self._number = {id(storage): number for number, storage in enumerate(storages)}
        in_memory = [isinstance(storage, memoryview) for storage in storages]
        self._left = [0 if held else size for held, size in zip(in_memory, layout.sizes, strict=True)]
        self._ranges: dict[int, dict[int, tuple[int, int]]] = {}
        self._crcs = [zlib.crc32(storage) if isinstance(storage, memoryview) else 0 for storage in storages]
        self._complete = 0
        """All storages before this one are complete."""
        self._failed = False
        self._changed = threading.Condition()
        self._advance()

    def add(self, filled: Sequence[pipeline.Wanted]) -> None:
        found = [(self._number[id(each.part)], each.start, len(each.into), zlib.crc32(each.into)) for each in filled]
        with self._changed:
            for number, start, nbytes, value in found:
                self._ranges.setdefault(number, {})[start] = value, nbytes
                self._left[number] -= nbytes
            self._advance()
            self._changed.notify_all()

    def _advance(self) -> None:
        while self._complete < len(self._left) and not self._left[self._complete]:
            for at, (value, nbytes) in sorted(self._ranges.pop(self._complete, {}).items()):
                whole = combine_crc32(self._crcs[self._complete], value, nbytes) if at else value
                self._crcs[self._complete] = whole
            self._complete += 1

    def fail(self) -> None:
        """Wake up threads that wait for a window that will never be filled."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def before(self, number: int) -> bytes:
        """Return the bytes between storage `number` and the one before it, once that one is complete."""
        with self._changed:
            # Windows are handed out in order: another thread has each of those that are missing.
            self._changed.wait_for(lambda: self._failed or self._complete >= number)
            if self._complete < number:
                raise FollowUpError("another window of the file could not be filled")
            return self._layout.before(number, self._crcs)


_PROTOCOL = 2  # torch's


class Pickled(NamedTuple):
    data: bytes
    storages: Sequence[pipeline.TensorPart | memoryview]
    """The bytes of each storage, in a checkpoint or in memory, by the number that the pickle gives it."""


def pickle_state(state: Any) -> Pickled:
    """Pickle a state as `torch.save` does; a `TensorPart` in it stands for a tensor that is not in memory."""
    out = io.BytesIO()
    pickler = _StatePickler(out)
    pickler.dump(state)
    return Pickled(out.getvalue(), pickler.storages)


@dataclass(frozen=True)
class _Bytes:
    tensor: pipeline.TensorPart


class _StatePickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, _PROTOCOL)
        self.storages: list[pipeline.TensorPart | memoryview] = []
        self._known: dict[int, tuple[str, torch.UntypedStorage]] = {}

    def reducer_override(self, obj: Any, /) -> Any:
        if not isinstance(obj, pipeline.TensorPart):
            return NotImplemented
        hooks: OrderedDict[Any, Any] = OrderedDict()
        # A tuple of its own: one that comes again would be a reference in the pickle, and torch writes none.
        form = (_Bytes(obj), 0, obj.box.sizes, (*strides_of(obj.box.sizes),), False, hooks)
        if obj.dtype.name in _STORAGE_OF:
            return rebuilding._rebuild_tensor_v2, form
        return rebuilding._rebuild_tensor_v3, (*form, to_torch(obj.dtype))

    def persistent_id(self, obj: Any, /) -> Any:
        if isinstance(obj, _Bytes):
            number = str(len(self.storages))
            self.storages.append(obj.tensor)
            name = _STORAGE_OF.get(obj.tensor.dtype.name)
            if name is None:
                return "storage", torch.UntypedStorage, number, "cpu", obj.tensor.nbytes
            return "storage", getattr(torch, name), number, "cpu", obj.tensor.box.volume
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
            number = str(len(self.storages))
            in_memory: Any = storage.cpu()  # type: ignore[no-untyped-call]  # torch's
            self.storages.append(torch.empty(0, dtype=torch.uint8).set_(in_memory).numpy().data)
            # Kept as well: no other storage may come to have its address.
            known = self._known[storage._cdata] = number, storage
        return "storage", kind, known[0], torch.serialization.location_tag(storage), elements


_MOST_HELD_NBYTES = 1 << 30
"""A larger blob is not put from memory."""

Write = Callable[[WritableStore, str], None]
"""Writes the file to a store under a name, durable on return."""
Check = Callable[[ReadableStore, str], None]
"""Reads the file back and raises `DamagedCheckpoint` where it is not what was meant to be written."""


def file_at(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the directory or the store of a file, given by its path or URL, and its name there."""
    if not isinstance(path, str) or scheme_of(path) in (None, "file"):
        folder, name = os.path.split(os.path.abspath(open_store(path, direct=False).url))
        return LocalStore(folder, direct=Options().direct_io, foreign=True), name
    above, _, name = path.rpartition("/")
    if not name or above.endswith(":/"):
        raise errors.CheckpointError(f"{path}: no file", hint="give the name of the file: s3://bucket/folder/model.pt")
    return open_store(above, direct=Options().direct_io), name


def file_exists(store: Store, name: str) -> bool:
    folder = local_path(store)
    return store.version(name) is not None if folder is None else os.path.isfile(os.path.join(folder, name))


def destination(path: str | os.PathLike[str], *, make_directory: bool = False) -> tuple[Store, str]:
    """Return where a file goes, links resolved; unless `make_directory`, its directory must be there, as for torch.save."""
    store, name = file_at(path)
    if (folder := local_path(store)) is None:
        return store, name
    where = os.path.realpath(os.path.join(folder, name))
    if not make_directory and not os.path.isdir(os.path.dirname(where)):
        raise errors.NoStorage(f"Parent directory {os.path.dirname(where)} does not exist.", hint="make it first")
    if os.path.isdir(where):
        raise errors.NoStorage(f"{where} is a directory", hint="give the name of the file to write")
    return file_at(where)


def _write_local(store: Store, name: str, write: Write, check: Check, *, replace: bool) -> None:
    folder = store.url
    clear_temporaries(folder)  # first: the disk may have no room for both
    temporary = temporary_name("converting")  # no name of a store's own temporary files
    written, path = (os.path.join(folder, each) for each in (temporary, name))
    try:
        write(store, temporary)
        check(store, temporary)
        with storage_errors("cannot replace", folder, name):
            if replace:
                os.replace(written, path)
            else:
                os.link(written, path)
                os.unlink(written)
            sync_directory(folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(written)
        raise


def _write_blob(
    store: Store, name: str, nbytes: int, write: Write, check: Check, *, replace: bool, most_held: int
) -> None:
    replaces = replace and store.version(name) is not None
    over = create_over(store, name, nbytes) if replaces else None
    if over is not None:
        write(_Kept(lambda *_: over), name)
    elif not replaces:
        write(_Kept(store.create), name)
    elif nbytes <= most_held:
        held = MemoryStore()
        write(held, name)
        check(held, name)
        store.put(name, held.get(name, limit=nbytes), replace=True)
    else:
        raise errors.StorageError(
            f"{store.url}/{name}: {nbytes} bytes cannot replace what is there in one step: too many for memory",
            hint="give more memory (host_budget_bytes), write to another name, or delete what is there first",
            name=name,
            errno=errno.EFBIG,
        )
    try:
        check(store, name)
    except errors.DamagedCheckpoint:
        if not replaces:
            with suppress(errors.CheckpointError):
                store.delete(name)
        raise


class _Kept:
    """A store to write one blob to. A failed write deletes nothing: the name may be that of another blob."""

    def __init__(self, create: Callable[[str, int], BlobWriter]) -> None:
        self.create = create

    def delete(self, name: str) -> None:
        """Do nothing."""
