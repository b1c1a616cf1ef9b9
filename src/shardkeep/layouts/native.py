"""
The native layout: the files of a checkpoint (`docs/format.md`), their names, and the order in which they are written.

Every file except the record carries the id of its save: overwriting touches no file of the committed checkpoint.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, TypeVar

from msgspec.structs import replace

from shardkeep import errors
from shardkeep._version import __version__
from shardkeep.codecs.base import without_keys
from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.coded_store import put_coded
from shardkeep.display import format_count
from shardkeep.dist.world import collision_hint
from shardkeep.format import record as record_format
from shardkeep.format.boxes import Box
from shardkeep.format.data_file import checksum_text, digest
from shardkeep.format.frames import FRAME_NBYTES
from shardkeep.format.index import Index, IndexParts, PartialIndex, decode_index, encode_index, head_nbytes
from shardkeep.format.record import MAX_RECORD_NBYTES, RECORD_NAME, Blob, FileEntry, Record, Totals
from shardkeep.layouts.torch import METADATA_NAME
from shardkeep.storage import base

T = TypeVar("T")

MAX_INDEX_NBYTES = 4 << 30
"""Room for a hundred million chunks. An index is held in memory, so a forged size must not make a reader allocate more."""
FREE_INDEX_NBYTES = 64 << 20
MOST_INDEX_RATIO = 1200
"""A coded index above `FREE_INDEX_NBYTES` may be at most this many times as large as its file, so that a file of 200 kB
cannot make a reader allocate gigabytes. Very regular indexes do compress that well, so large ones use small frames."""
_SMALL_FRAME_NBYTES = 64 << 10
"""Each frame takes 56 bytes in the table of frames, so its contents are at most 1171 times as large, whatever the codec."""
_CODED_SUFFIX = "skframes"
"""A suffix of its own, so that no program takes the file for a safetensors file."""
_SAVE_ID = re.compile(r"(?:-|^)([0-9a-f]{20})\.(?:safetensors|skframes|blocks|skindex|json)$")
_FORGED_HINT = "it was changed by a writer without the key: do not trust this checkpoint"


def new_save_id() -> str:
    """Return a new unique id. Ids sort by time."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(4)}"


def save_id_of(name: str) -> str | None:
    """Return the id of the save that a file belongs to, by its name; None for the record and for foreign files."""
    found = _SAVE_ID.search(name)
    return found.group(1) if found else None


def claim_name(save_id: str) -> str:
    """Return the name of the claim file, which exists while a save is running."""
    return f"claim-{save_id}.json"


def is_claim(name: str) -> bool:
    save_id = save_id_of(name)
    return save_id is not None and name == claim_name(save_id)


def index_name(save_id: str, *, coded: bool = False) -> str:
    return f"index-{save_id}.{_CODED_SUFFIX if coded else 'skindex'}"


def data_name(group: str, rank: int, world_size: int, save_id: str, *, part: int = 0, coded: bool = False) -> str:
    """Return the name of a rank's data file; `part` is its number if there are several, from 1, or 0 for a single one."""
    of_several = f"-part{part}" if part else ""
    suffix = _CODED_SUFFIX if coded else "safetensors"
    return f"{group}-{rank:05d}-of-{world_size:05d}{of_several}-{save_id}.{suffix}"


def blocks_name(data_file: str) -> str:
    """Return the name of the sidecar with the digests of a data file, for data files that do not hold them."""
    return data_file.removesuffix(".safetensors") + ".blocks"


def chunk_name(key: str, box: Box | None) -> str:
    """Return the name of a chunk in a data file: the tensor's key, and the box unless it is the whole tensor."""
    if box is None:
        return f"{key}[]" if key == "__metadata__" else key  # safetensors reserves that name
    return f"{key}{box}"


def read_record(store: base.Store) -> Record:
    """Read and check the commit record; raise `CheckpointNotFound`, which says what is there instead, if there is none."""
    try:
        return record_in(store)
    except errors.BlobNotFound as exc:
        raise not_found(store) from exc


def not_found(store: base.Store) -> errors.CheckpointNotFound:
    below, broken = _checkpoint_below(store.url), base.broken_path(store, inside=True)
    what = " itself, only below it" if below else f" here ({broken or _other_files(store)})"
    hint = "" if broken else f"a checkpoint has {RECORD_NAME} in it"
    hint = f"there are checkpoints below it, such as {below}" if below else hint
    return errors.CheckpointNotFound(f"{store.url}: no committed checkpoint{what}", hint=hint)


def record_in(store: base.Store) -> Record:
    """Read and check the commit record; read it again if it arrives damaged. `BlobNotFound` if there is none."""
    return record_and_bytes_in(store)[0]


def record_and_bytes_in(store: base.Store) -> tuple[Record, bytes]:
    """Read the commit record as `record_in` does, and return its bytes, too."""
    where = f"{store.url}/{RECORD_NAME}"

    def read() -> bytes:
        return store.get(RECORD_NAME, limit=MAX_RECORD_NBYTES)

    def decode(data: bytes) -> tuple[Record, bytes]:
        return record_format.decode_record(data, where), data

    return base.decode_or_reread(read(), decode, read, name=where, same=_perhaps_same)


def _perhaps_same(first: bytes, second: bytes) -> bool | None:
    """Compare two reads. Equal reads prove little, because the second may have come from a cache."""
    return None if first == second else False


def _checkpoint_below(place: str) -> str:
    with suppress(OSError, ValueError), os.scandir(place) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name, reverse=True):
            if any(os.path.isfile(os.path.join(entry.path, name)) for name in (RECORD_NAME, METADATA_NAME)):
                return entry.path
    return ""


def _other_files(store: base.Store) -> str:
    names = [info.name for info in store.list()]
    if any(save_id_of(name) for name in names):
        return "only files of a save that did not finish"
    return format_count(len(names), "other file") if names else "the place is empty or does not exist"


def checksum_of(data: bytes | bytearray, chain: CodecChain | None) -> str:
    """Return the checksum of plain bytes for the commit record; of secret bytes, that of their MAC, which reveals nothing."""
    code = chain.mac(bytes(data)) if chain is not None and chain.is_secret else None
    return checksum_text(digest(data if code is None else code))


def read_index(store: base.ReadableStore, record: Record, chain: CodecChain | None = None) -> Index:
    """Read and check an index, twice if it arrives damaged; with a `chain`, `store` is one that decodes."""
    entry = record.index
    if entry.nbytes > (most := _most_index_nbytes(entry.stored_nbytes)):
        why = f"an index of {entry.nbytes:,} bytes; at most {most:,} are read of one of its size in the store"
        raise errors.MalformedFile.of(entry.name, why, hint="do not trust this checkpoint")

    def read() -> bytes:
        try:
            return store.get(entry.name, limit=entry.nbytes)
        except errors.BlobNotFound as exc:
            raise errors.WrongSize.of(entry.name, "the index is missing") from exc

    def decode(data: bytes) -> Index:
        if len(data) != entry.nbytes:
            raise errors.WrongSize.of(entry.name, f"{len(data)} bytes, the commit record says {entry.nbytes}")
        if checksum_of(data, chain) != entry.checksum:
            raise errors.ChecksumMismatch.of(entry.name, "the index is not what was saved", offset=0)
        return decode_index(memoryview(data).toreadonly(), where=entry.name)

    try:
        data = read()
    except errors.DamagedCheckpoint:
        data = read()  # by another reader, because the first may have cached what it read
        base.warn_reread_ok(entry.name, 0, len(data))
    return base.decode_or_reread(data, decode, read, name=entry.name, same=_perhaps_same)


def open_index(store: base.ReadableStore, record: Record, chain: CodecChain | None = None) -> Index:
    """Open an index that has parts, to read of it what is needed; read and check any other."""
    entry, expected = record.index, record.index.head_checksum
    if expected is None or entry.chain is not None:
        return read_index(store, record, chain)
    reader = base.open_sized(store, entry.name, entry.nbytes)

    def load(offset: int, nbytes: int, decode: Callable[[memoryview], T]) -> T:
        if not 0 <= offset <= offset + nbytes <= entry.nbytes:  # before memory is allocated for it
            raise errors.MalformedFile.of(entry.name, "the index has sections beyond its end")
        return base.decode_or_reread(
            base.read_range(reader, offset, nbytes),
            lambda data: decode(memoryview(data).toreadonly()),
            lambda: base.read_again(store, entry.name, offset, nbytes),
            name=entry.name,
            offset=offset,
        )

    def decode_head(head: memoryview) -> PartialIndex:
        if checksum_text(digest(head)) != expected:
            raise errors.ChecksumMismatch.of(entry.name, "the index is not what was saved", offset=0)
        return PartialIndex(head, entry.nbytes, load, lambda: read_index(store, record), where=entry.name)

    try:
        index = load(0, entry.head_nbytes or 0, decode_head)
    except BaseException:
        reader.close()
        raise
    weakref.finalize(index, reader.close)
    return index


def _most_index_nbytes(stored_nbytes: int | None) -> int:
    """Return how large an index may be; for a coded one, given its stored size."""
    if stored_nbytes is None:
        return MAX_INDEX_NBYTES
    return min(MAX_INDEX_NBYTES, max(FREE_INDEX_NBYTES, MOST_INDEX_RATIO * stored_nbytes))


def publish(
    store: base.Store,
    index: Index,
    parts: IndexParts,
    *,
    save_id: str,
    files: list[FileEntry],
    tensor_bytes: int,
    world_size: int,
    step: int | None,
    meta: dict[str, Any],
    over: base.Version | None = None,
    chains: Sequence[CodecChain] = (),
    index_chain: int | None = None,
) -> Record:
    """
    Write the index with its parts, then the commit record. The checkpoint exists when this returns, and not before.

    `over` is the version of the record to replace; without it, there must be none. `index_chain` is the number of the
    chain that the index goes through: one with a secret, if any chain has one.
    """
    chain = None if index_chain is None else chains[index_chain]
    data = encode_index(index, parts=parts)
    head = head_nbytes(data) if parts else None
    _check_size("index", data, MAX_INDEX_NBYTES)
    name = index_name(save_id, coded=chain is not None)
    record = Record(
        save_id=save_id,
        step=step,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        writer=f"shardkeep {__version__}",
        world_size=world_size,
        meta=meta,
        totals=Totals(
            tensors=len(index.keys),
            chunks=len(index.chunks),
            values=len(index.value_keys),
            tensor_bytes=tensor_bytes,
        ),
        index=Blob(
            name=name,
            nbytes=len(data),
            checksum=checksum_of(data, chain),
            head_nbytes=head,
            head_checksum=None if head is None else checksum_of(data[:head], None),
        ),
        files=files,
        chains=[each.recorded for each in chains],
    )
    _check_readable(lambda: decode_index(data, where="the index"))
    if chain is None:
        store.put(name, data)
    else:
        large = len(data) > FREE_INDEX_NBYTES
        seal = put_coded(store, name, data, chain, frame_nbytes=_SMALL_FRAME_NBYTES if large else FRAME_NBYTES)
        _check_size("index", data, _most_index_nbytes(seal.stored_nbytes))
        coded = replace(
            record.index, chain=index_chain, stored_nbytes=seal.stored_nbytes, table_checksum=seal.table_checksum
        )
        record = replace(record, index=coded)
    record = signed(record_format.versioned(record), chain)
    encoded = record_format.encode_record(record)
    _check_size("commit record", encoded, MAX_RECORD_NBYTES)
    _check_readable(lambda: record_format.decode_record(encoded, "the commit record"))
    # The record must be written last, because a reader that sees it trusts every file it names.
    if not base.put_if_unchanged(store, RECORD_NAME, encoded, over):
        raise _beaten(store)
    return record


def _beaten(store: base.ReadableStore) -> errors.CheckpointError:
    """Explain, as far as possible, why the record in place is not the one that this save was to replace."""
    winner = ""
    try:
        record = record_format.decode_record(store.get(RECORD_NAME, limit=MAX_RECORD_NBYTES), RECORD_NAME)
        step = "" if record.step is None else f"step {record.step}, "
        ranks = format_count(record.world_size, "rank")
        winner = f": save {record.save_id}, {step}{record.saved_at}, by {ranks} of {record.writer}"
    except errors.BlobNotFound:
        return errors.StorageError(
            "the checkpoint that this save was to replace was deleted by another process during the save",
            hint="save again, and do not delete checkpoints by hand in a place that a job saves to",
            name=RECORD_NAME,
        )
    except errors.CheckpointError:
        pass
    hint = "that one stays, and this one was not committed; save to another place, or again with overwrite=True"
    return errors.CheckpointExists(
        f"another save committed a checkpoint here meanwhile{winner}", hint=collision_hint(hint)
    )


def _check_size(what: str, data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise errors.StateError(
            f"the {what} would have {len(data):,} bytes, more than a reader takes ({limit:,})",
            hint="store large values as tensors, and little in meta",
        )


def _check_readable(read: Callable[[], object]) -> None:
    """Decode what is about to be written, so that an unreadable checkpoint never replaces a good one."""
    try:
        read()
    except errors.DamagedCheckpoint as exc:
        raise errors.StateError(
            f"this state would make a checkpoint that cannot be read: {exc.message}",
            hint="nothing was committed; please report this",
        ) from exc


# -- the signature of encrypted checkpoints ----------------------------------------------------------------------------

# Encrypted files are authenticated frame by frame. The commit record is plain text that lists the files, so it has a MAC of
# its own: of everything it says except the wrapped data keys, so that keys can be rotated without rewriting the data.


def signed(record: Record, chain: CodecChain | None) -> Record:
    """Return the record with its MAC, if the chain of its index has a secret."""
    return replace(record, mac=None if chain is None else _mac(record, chain))


def check_signature(record: Record, chains: Sequence[CodecChain]) -> None:
    """Check that a record is what was signed, if any of its chains (given opened) has a secret."""
    if not any(chain.is_secret for chain in chains):
        return
    # The index itself must be encrypted, or a forged plain index could be put in front of encrypted files.
    chain = None if record.index.chain is None else chains[record.index.chain]
    expected = None if chain is None else _mac(record, chain)
    if expected is None or record.mac is None or not hmac.compare_digest(expected, record.mac):
        raise errors.NotAuthentic.of(RECORD_NAME, "the commit record is not what was written", hint=_FORGED_HINT)


def _mac(record: Record, chain: CodecChain) -> str | None:
    code = chain.mac(record_format.authenticated_bytes(record, [without_keys(each) for each in record.chains]))
    return None if code is None else f"hmac_sha256:{code.hex()}"
