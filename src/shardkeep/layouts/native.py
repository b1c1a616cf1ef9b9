"""
The proof, in a commit record of an encrypted checkpoint, that nobody changed it who has not the key.

What is encrypted proves itself, frame by frame. The record is plain, and says which files there are: the proof is a MAC of
all it says but of the wrapped data keys, so that keys can be rotated without the data.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from shardkeep._version import __version__
from shardkeep.codecs.base import without_keys
from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.coded_store import checksum_of, put_coded
from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    ChecksumMismatch,
    DamagedCheckpoint,
    MalformedFile,
    NotAuthentic,
    StateError,
    StorageError,
    WrongSize,
)
from shardkeep.format.boxes import Box, IntArray
from shardkeep.format.frames import FRAME_NBYTES
from shardkeep.format.index import Chunks, Index, Tensors, decode_index, encode_index
from shardkeep.format.record import (
    MAX_RECORD_NBYTES,
    RECORD_NAME,
    FileEntry,
    IndexEntry,
    Record,
    Totals,
    authenticated_bytes,
    decode_record,
    encode_record,
    versioned,
)
from shardkeep.layouts.torch import METADATA_NAME
from shardkeep.storage.base import Creates, Deletes, Gets, Lists, Opens, Puts, Version
from shardkeep.storage.reread import decode_or_reread, warn_reread_ok

_HINT = "somebody changed it who has not the key: do not trust this checkpoint"


def signed(record: Record, chain: CodecChain | None) -> Record:
    """Return the record with its MAC, if the chain of its index has a secret."""
    return replace(record, mac=None if chain is None else _mac(record, chain))


def check_signature(record: Record, chains: Sequence[CodecChain]) -> None:
    """
    Insist that a record is what was signed, if any of its chains, which are given opened, has a secret.

    Raises:
        NotAuthentic: it was changed, or its proof was taken away.

    """
    if not any(chain.is_secret for chain in chains):
        return
    # Or a forged index in the clear could stand before encrypted files.
    chain = None if record.index.chain is None else chains[record.index.chain]
    expected = None if chain is None else _mac(record, chain)
    if expected is None or record.mac is None or not hmac.compare_digest(expected, record.mac):
        raise NotAuthentic(f"{RECORD_NAME}: the commit record is not what was written", hint=_HINT, file=RECORD_NAME)


def _mac(record: Record, chain: CodecChain) -> str | None:
    code = chain.mac(authenticated_bytes(record, [without_keys(each) for each in record.chains]))
    return None if code is None else f"hmac_sha256:{code.hex()}"


# The native layout: which files a checkpoint is made of, what they are called, and in which order they become one.
#
#     shardkeep.json                                  the commit record, written last
#     index-<save id>.skindex
#     <group>-<rank>-of-<ranks>-<save id>.safetensors or, of a large group, several
#     <group>-<rank>-of-<ranks>-part<n>-<save id>.safetensors
#     claim-<save id>.json                            only while the save is under way
#
# Files that went through codecs end in .skframes instead. Where a store takes bytes only in order, the digests of a
# data
# file that did not are beside it, in a file of the same name that ends in .blocks.
#
# Every file but the record carries its save's id, so that overwriting never touches a file of the committed
# checkpoint.

MAX_INDEX_NBYTES = 4 << 30
"""A hundred million chunks. An index is held in memory, and a forged one of this size costs its writer nothing."""
FREE_INDEX_NBYTES = 64 << 20
MOST_INDEX_RATIO = 1200
"""A coded index that is larger than that may be so many times as large as its file: else 200 kB could make a reader
allocate gigabytes. Regular indexes, or values, do become as little, so large ones are written in small frames."""
_SMALL_FRAME_NBYTES = 64 << 10
"""Each has 56 bytes in the table of frames: what is in them is at most 1171 times as large, whatever codecs do."""
_CODED_SUFFIX = "skframes"
"""So that nobody takes them for safetensors files."""
_SAVE_ID = re.compile(r"(?:-|^)([0-9a-f]{20})\.(?:safetensors|skframes|blocks|skindex|json)$")


class _Commits(Creates, Deletes, Gets, Puts, Protocol):
    """What publishing needs of a store."""


class _Reads(Gets, Opens, Protocol):
    """What reading an index needs of a store."""


class _Looks(Gets, Lists, Protocol):
    """What opening needs of a store."""

    @property
    def url(self) -> str: ...


def new_save_id() -> str:
    """Make an id that sorts by time and is never used twice."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(4)}"


def save_id_of(name: str) -> str | None:
    """Tell which save a file belongs to, by its name; None for the record and for files that are not ours."""
    found = _SAVE_ID.search(name)
    return found.group(1) if found else None


def claim_name(save_id: str) -> str:
    """Name the file that says a save is under way."""
    return f"claim-{save_id}.json"


def is_claim(name: str) -> bool:
    """Tell whether a file says that a save is under way. It goes last: while it is there, the rest is not ownerless."""
    save_id = save_id_of(name)
    return save_id is not None and name == claim_name(save_id)


def index_name(save_id: str, *, coded: bool = False) -> str:
    """Name a save's index."""
    return f"index-{save_id}.{_CODED_SUFFIX if coded else 'skindex'}"


def data_name(group: str, rank: int, world_size: int, save_id: str, *, part: int = 0, coded: bool = False) -> str:
    """Name a rank's data file; `part` is which of several it is, from 1, or 0 for the only one."""
    of_several = f"-part{part}" if part else ""
    suffix = _CODED_SUFFIX if coded else "safetensors"
    return f"{group}-{rank:05d}-of-{world_size:05d}{of_several}-{save_id}.{suffix}"


def blocks_name(data_file: str) -> str:
    """Name the file that holds the digests of a data file, where that does not hold them itself."""
    return data_file.removesuffix(".safetensors") + ".blocks"


def chunk_name(key: str, box: Box | None) -> str:
    """Name a tensor in a data file: its key, and its box where that is not the whole."""
    if box is None:
        return f"{key}[]" if key == "__metadata__" else key  # safetensors keeps that name for itself
    return f"{key}{box}"


def read_record(store: _Looks) -> Record:
    """
    Read and check the commit record: the one proof that a checkpoint exists.

    Raises:
        CheckpointNotFound: there is none; says what is there.

    """
    try:
        return record_in(store)
    except BlobNotFound as exc:
        below = _checkpoint_below(store.url)
        what = " itself, only below it" if below else f" here{_leftovers(store)}"
        hint = f"there are checkpoints below it, such as {below}" if below else f"a checkpoint has {RECORD_NAME} in it"
        raise CheckpointNotFound(f"{store.url}: no committed checkpoint{what}", hint=hint) from exc


def record_in(store: _Looks) -> Record:
    """
    Read and check the commit record; one that comes damaged is read again.

    Raises:
        BlobNotFound: there is none.

    """
    where = f"{store.url}/{RECORD_NAME}"

    def read() -> bytes:
        return store.get(RECORD_NAME, limit=MAX_RECORD_NBYTES)

    return decode_or_reread(read(), lambda data: decode_record(data, where), read, name=where, same=_perhaps_same)


def _perhaps_same(first: bytes | bytearray, second: bytes | bytearray) -> bool | None:
    """Compare two reads; equal ones say little, as the second may have come from a cache."""
    return None if first == second else False


def _checkpoint_below(place: str) -> str:
    """Return one of the checkpoints in a directory of them; nothing where there are none."""
    with suppress(OSError, ValueError), os.scandir(place) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name, reverse=True):
            if any(os.path.isfile(os.path.join(entry.path, name)) for name in (RECORD_NAME, METADATA_NAME)):
                return entry.path
    return ""


def _leftovers(store: Lists) -> str:
    names = [info.name for info in store.list()]
    if any(save_id_of(name) for name in names):
        return " (only files of a save that did not finish)"
    return f" ({len(names)} other files)" if names else " (the place is empty or does not exist)"


def read_index(store: _Reads, record: Record, chain: CodecChain | None = None) -> Index:
    """
    Read and check the index a record names; one that comes damaged is read again.

    `chain` is what it went through, if it did; `store` then is one that undoes that.
    """
    entry = record.index
    if entry.chain is not None and chain is None:
        raise CheckpointError(f"{entry.name}: the index went through codecs, which were not opened", file=entry.name)
    if entry.nbytes > (most := _most_index_nbytes(entry.stored_nbytes)):
        raise MalformedFile(
            f"{entry.name}: an index of {entry.nbytes:,} bytes; at most {most:,} are read of one of its size in the store",
            hint="do not trust this checkpoint",
            file=entry.name,
        )

    def read() -> bytes | bytearray:
        try:
            return store.get(entry.name, limit=entry.nbytes) if chain is None else _plain(store, entry.name)
        except BlobNotFound as exc:
            raise WrongSize(f"{entry.name}: the index is missing", file=entry.name) from exc

    check = partial(_decoded_index, entry, chain)
    return decode_or_reread(read(), check, read, name=entry.name, same=_perhaps_same)  # type: ignore[type-var]  # one or the other


def _decoded_index(entry: IndexEntry, chain: CodecChain | None, data: bytes | bytearray) -> Index:
    if len(data) != entry.nbytes:
        raise WrongSize(f"{entry.name}: {len(data)} bytes, the commit record says {entry.nbytes}", file=entry.name)
    if checksum_of(data, chain) != entry.checksum:
        raise ChecksumMismatch(f"{entry.name}: the index is not what was saved", file=entry.name, offset=0)
    return decode_index(memoryview(data).toreadonly(), where=entry.name)


def _most_index_nbytes(stored_nbytes: int | None) -> int:
    """Return how large an index may be; one that went through codecs, by what is stored of it."""
    if stored_nbytes is None:
        return MAX_INDEX_NBYTES
    return min(MAX_INDEX_NBYTES, max(FREE_INDEX_NBYTES, MOST_INDEX_RATIO * stored_nbytes))


def _plain(store: Opens, name: str) -> bytearray:
    """Read a blob through its codecs; one that comes damaged once more, opened anew, as a reader may keep what it read."""
    try:
        return _plain_once(store, name)
    except DamagedCheckpoint:
        data = _plain_once(store, name)
    warn_reread_ok(name, 0, len(data))
    return data


def _plain_once(store: Opens, name: str) -> bytearray:
    """Read it into the only copy: it may be large."""
    with closing(store.open(name)) as reader:
        data = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(data))
    return data


def data_sizes(record: Record) -> IntArray:
    """Return how many bytes of tensor data each file holds."""
    return np.array([file.nbytes - file.header_nbytes for file in record.files], np.int64)


def publish(
    store: _Commits,
    *,
    save_id: str,
    keys: list[str],
    tensors: Tensors,
    chunk_ends: IntArray,
    chunks: Chunks,
    values: list[tuple[str, bytes]],
    tree: bytes,
    files: list[FileEntry],
    tensor_bytes: int,
    world_size: int,
    step: int | None,
    meta: dict[str, Any],
    over: Version | None = None,
    chains: Sequence[CodecChain] = (),
    index_chain: int | None = None,
) -> Record:
    """
    Write the index, then the commit record; the checkpoint exists when this returns, and not before.

    `over` is the version of the record that is replaced; without, there must be none. `index_chain` says which of the
    chains the index goes through; it is one that has a secret, if any has.
    """
    index = encode_index(keys=keys, tensors=tensors, chunk_ends=chunk_ends, chunks=chunks, values=values, tree=tree)
    _check_size("index", index, MAX_INDEX_NBYTES)
    chain = None if index_chain is None else chains[index_chain]
    name = index_name(save_id, coded=chain is not None)
    record = Record(
        save_id=save_id,
        step=step,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        writer=f"shardkeep {__version__}",
        world_size=world_size,
        meta=meta,
        totals=Totals(tensors=len(keys), chunks=len(chunks), values=len(values), tensor_bytes=tensor_bytes),
        index=IndexEntry(name=name, nbytes=len(index), checksum=checksum_of(index, chain)),
        files=files,
        chains=[each.recorded for each in chains],
    )
    _check_readable(lambda: decode_index(index, where="the index"))
    if chain is None:
        store.put(name, index)
    else:
        large = len(index) > FREE_INDEX_NBYTES
        seal = put_coded(store, name, index, chain, frame_nbytes=_SMALL_FRAME_NBYTES if large else FRAME_NBYTES)
        _check_size("index", index, _most_index_nbytes(seal.stored_nbytes))
        coded = replace(
            record.index, chain=index_chain, stored_nbytes=seal.stored_nbytes, table_checksum=seal.table_checksum
        )
        record = replace(record, index=coded)
    record = signed(versioned(record), chain)
    _commit(store, record, over)
    return record


def _commit(store: _Commits, record: Record, over: Version | None) -> None:
    encoded = encode_record(record)
    _check_size("commit record", encoded, MAX_RECORD_NBYTES)
    _check_readable(lambda: decode_record(encoded, "the commit record"))
    try:
        # Record last: a reader that sees it may trust every file it names.
        store.put(RECORD_NAME, encoded, over=over)
    except StorageError as exc:
        if exc.errno != errno.EEXIST:
            raise
        raise _beaten(store) from exc


def _beaten(store: Gets) -> CheckpointError:
    """Say why the record in place is not the one that was to be replaced, as far as that can be found out."""
    winner = ""
    try:
        record = decode_record(store.get(RECORD_NAME, limit=MAX_RECORD_NBYTES), RECORD_NAME)
        step = "" if record.step is None else f"step {record.step}, "
        winner = f": save {record.save_id}, {step}{record.saved_at}, by {record.world_size} ranks of {record.writer}"
    except BlobNotFound:
        return StorageError(
            "the checkpoint that was to be replaced was deleted by somebody else while this save was under way",
            hint="save it again; let nobody delete checkpoints by hand in a place that a job saves to",
            name=RECORD_NAME,
        )
    except CheckpointError:
        pass
    return CheckpointExists(
        f"a checkpoint was committed here by another save meanwhile{winner}",
        hint="it stands, and this one was not committed; save to another place, or once more with overwrite=True",
    )


def _check_size(what: str, data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise StateError(
            f"the {what} would have {len(data):,} bytes, more than a reader takes ({limit:,})",
            hint="store large values as tensors, and little in meta",
        )


def _check_readable(read: Callable[[], object]) -> None:
    """Read back what is about to be written: nothing may replace a checkpoint that no reader takes."""
    try:
        read()
    except DamagedCheckpoint as exc:
        raise StateError(
            f"this state would make a checkpoint that cannot be read: {exc.message}",
            hint="nothing was committed; please report this",
        ) from exc
