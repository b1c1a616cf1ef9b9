"""
Reads a checkpoint as docs/format.md says, with json, the safetensors library, xxhash and msgpack alone.

Nothing of shardkeep is used here: what reads its own mistakes back would find nothing wrong with them.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from safetensors import safe_open

from tests.soak.contents import TENSORS, Bits

RECORD = "shardkeep.json"
_SEAM = b',\n  "checksum":'
_NAMED = re.compile(r"(?P<key>[^\[\]]+)(?:\[(?P<box>[0-9:,]+)\])?")
_NUMBERS = {"|u1": "u1", "<u2": "<u2", "<u4": "<u4", "<u8": "<u8", "<i8": "<i8"}


class Broken(Exception):
    """A checkpoint is not what its format promises."""


@dataclass(frozen=True)
class Found:
    """A committed checkpoint, all of whose bytes were checked against the digests in it."""

    save_id: str
    step: int
    meta: dict[str, Any]
    files: frozenset[str]
    """All that belong to it, the record among them."""
    nbytes: int
    values: dict[str, Any]
    tensors: dict[str, Bits]


def digest(data: bytes | memoryview) -> str:
    """Write the digest of some bytes as the format does."""
    return f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"


def insist(fine: object, what: str) -> None:
    """Say what is broken, unless all is fine."""
    if not fine:
        raise Broken(what)


def record_in(place: Path) -> dict[str, Any] | None:
    """Read a commit record; None where there is none. Without one there is no checkpoint."""
    try:
        data = (place / RECORD).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    body, seam, rest = data.rpartition(_SEAM)
    insist(seam and rest == f' "{digest(body)}"\n}}\n'.encode(), f"{place}: the record's digest is wrong")
    record: dict[str, Any] = json.loads(data)
    insist(record["format"] == "shardkeep" and record["version"] == 1, f"{place}: what version?")
    return record


def read(place: Path) -> Found | None:
    """
    Read a checkpoint, and check every byte of it; None where there is none.

    Raises:
        Broken: there is one, and something is wrong with it.

    """
    record = record_in(place)
    if record is None:
        return None
    index = _blob(place, record["index"])
    insist(digest(index) == record["index"]["checksum"], f"{place}: the index's digest is wrong")
    pieces = [piece for entry in record["files"] for piece in _pieces(place, entry, record["save_id"])]
    return Found(
        save_id=record["save_id"],
        step=record["step"],
        meta=record["meta"],
        files=frozenset({RECORD, record["index"]["name"], *(entry["name"] for entry in record["files"])}),
        nbytes=len(index) + sum(entry["nbytes"] for entry in record["files"]),
        values=_values(index),
        tensors=_assembled(place, pieces),
    )


def _blob(place: Path, entry: dict[str, Any]) -> bytes:
    try:
        data = (place / entry["name"]).read_bytes()
    except FileNotFoundError:
        raise Broken(f"{place}: {entry['name']} is missing") from None
    insist(len(data) == entry["nbytes"], f"{place}: {entry['name']} has {len(data)} bytes, not {entry['nbytes']}")
    return data


def _pieces(place: Path, entry: dict[str, Any], save_id: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Check a data file, block by block, and give the tensors in it as the safetensors library reads them."""
    data, path = memoryview(_blob(place, entry)), place / entry["name"]
    start, size = entry["header_nbytes"], entry["block_nbytes"]
    insist(digest(data[:start]) == entry["checksum"], f"{path}: the header's digest is wrong")
    with safe_open(path, "pt") as file:
        about = file.metadata()
        insist(about["shardkeep.save_id"] == save_id, f"{path}: is of another save")
        blocks = b"".join(xxhash.xxh3_128(data[at : at + size]).digest() for at in range(start, len(data), size))
        insist(base64.b64decode(about["shardkeep.blocks"]) == blocks, f"{path}: a block's digest is wrong")
        for name in file.keys():  # noqa: SIM118 - no dict
            yield name, file.get_tensor(name)


def _assembled(place: Path, pieces: list[tuple[str, torch.Tensor]]) -> dict[str, Bits]:
    """Put parts together, and insist that they tile every tensor."""
    whole = {key: np.zeros((*kind.shape, kind.nbytes), np.uint8) for key, kind in TENSORS.items()}
    times = {key: np.zeros(kind.shape, np.int64) for key, kind in TENSORS.items()}
    for name, tensor in pieces:
        named = _NAMED.fullmatch(name)
        insist(named and named["key"] in TENSORS, f"{place}: there is a tensor {name!r}")
        assert named is not None
        kind = TENSORS[named["key"]]
        insist(str(tensor.dtype) == f"torch.{kind.dtype}", f"{place}: {name} is of {tensor.dtype}")
        box = named["box"] or ",".join(f"0:{n}" for n in kind.shape)
        at = tuple(slice(*map(int, each.split(":"))) for each in box.split(","))
        times[named["key"]][at] += 1
        whole[named["key"]][at] = tensor.contiguous().view(torch.uint8).numpy().reshape(*tensor.shape, kind.nbytes)
    for key, count in times.items():
        insist((count == 1).all(), f"{place}: the parts of {key} do not tile it")
    return whole


def _values(index: bytes) -> dict[str, Any]:
    """Read the plain values of an index."""
    insist(index[:8] == b"SKINDEX1", "the index does not begin as one")
    [length] = struct.unpack("<I", index[8:12])
    sections: dict[str, np.ndarray[Any, Any]] = {}
    first = -(-(12 + length) // 64) * 64
    for name, number, shape, offset, _ in msgspec.msgpack.decode(index[12 : 12 + length]):
        kind = np.dtype(_NUMBERS[number])
        sections[name] = np.frombuffer(index, kind, int(np.prod(shape)), first + offset)
    found = (
        _cut(sections[name], sections[ends])
        for name, ends in (("value_keys", "value_key_ends"), ("values", "value_ends"))
    )
    return {key.decode(): msgspec.msgpack.decode(value) for key, value in zip(*found, strict=True)}


def _cut(data: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> list[bytes]:
    starts = [0, *map(int, ends)]
    return [data[start:end].tobytes() for start, end in zip(starts, map(int, ends), strict=False)]
