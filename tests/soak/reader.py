"""
Reads a checkpoint as docs/format.md says, with json, the safetensors library, xxhash and msgpack alone; what is coded by
way of `decoding`.

Nothing of shardkeep is used here: what reads its own mistakes back would find nothing wrong with them.
"""

import base64
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch
import xxhash

from tests.soak.contents import Bits, Kind
from tests.soak.decoding import Chain, digest, insist, insist_signed
from tests.soak.places import Ground

RECORD = "shardkeep.json"
_SEAM = b',\n  "checksum":'
_NAMED = re.compile(r"(?P<key>[^\[\]]+)(?:\[(?P<box>[0-9:,]+)\])?")
_NUMBERS = {"|u1": "u1", "<u2": "<u2", "<u4": "<u4", "<u8": "<u8", "<i8": "<i8"}


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


class _Place:
    """Where a checkpoint is."""

    def __init__(self, ground: Ground, name: str) -> None:
        self._ground = ground
        self._name = name

    def __str__(self) -> str:
        return f"{self._ground.url}/{self._name}"

    def get(self, name: str) -> bytes:
        data = self._ground.get(self._name, name)
        insist(data is not None, f"{self}: {name} is missing")
        return data or b""

    def plain(self, entry: dict[str, Any], chains: list[Chain]) -> bytes:
        """Read a file that the record names, and undo its codecs."""
        data, chain = self.get(entry["name"]), entry.get("chain")
        if chain is not None:
            return chains[chain].plain(data, entry)
        insist(len(data) == entry["nbytes"], f"{self}: {entry['name']} has {len(data)} bytes, not {entry['nbytes']}")
        return data


def _record_of(data: bytes, name: str) -> dict[str, Any]:
    """Check a commit record, and read it."""
    body, seam, rest = data.rpartition(_SEAM)
    insist(seam and rest == f' "{digest(body)}"\n}}\n'.encode(), f"{name}: the record's digest is wrong")
    record: dict[str, Any] = json.loads(data)
    coded = record.get("chains") or any("blocks" in entry for entry in record["files"])
    insist(record["format"] == "shardkeep" and record["version"] == (2 if coded else 1), f"{name}: what version?")
    return record


def read(ground: Ground, name: str, kinds: dict[str, Kind]) -> Found | None:
    """Read the checkpoint of a place, which must have these tensors, and check every byte of it; None where there is none."""
    data, place = ground.get(name, RECORD), _Place(ground, name)
    if data is None:
        return None
    record = _record_of(data, str(place))
    chains = [Chain(each) for each in record.get("chains", ())]
    insist_signed(record, chains, str(place))
    index = place.plain(record["index"], chains)
    insist(
        _checksum(index, record["index"], chains) == record["index"]["checksum"],
        f"{place}: the index's digest is wrong",
    )
    pieces = [piece for entry in record["files"] for piece in _pieces(place, entry, record["save_id"], chains)]
    entries = [record["index"], *record["files"]]
    return Found(
        save_id=record["save_id"],
        step=record["step"],
        meta=record["meta"],
        files=frozenset({RECORD, *(e["name"] for e in entries), *(e["blocks"] for e in entries if "blocks" in e)}),
        nbytes=sum(entry["nbytes"] for entry in entries),
        values=_values(index),
        tensors=_assembled(place, pieces, kinds),
    )


def _checksum(data: bytes | memoryview, entry: dict[str, Any], chains: list[Chain]) -> str:
    chain = entry.get("chain")
    return digest(data) if chain is None else chains[chain].checksum(data)


def _pieces(
    place: _Place, entry: dict[str, Any], save_id: str, chains: list[Chain]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Check a data file, block by block, and give the tensors in it as the safetensors library reads them."""
    whole = place.plain(entry, chains)
    data, path = memoryview(whole), f"{place}/{entry['name']}"
    start, size = entry["header_nbytes"], entry["block_nbytes"]
    blocks = b"".join(xxhash.xxh3_128(data[at : at + size]).digest() for at in range(start, len(data), size))
    about = json.loads(whole[8:start])["__metadata__"]
    insist(about["shardkeep.save_id"] == save_id, f"{path}: is of another save")
    if "blocks" in entry:
        apart = place.get(entry["blocks"])
        insist(digest(apart) == entry["checksum"], f"{path}: the digest of its digests is wrong")
        head = xxhash.xxh3_128(data[:start]).digest()
        insist(apart[:8] == b"SKBLOCK1" and apart[8:24] == head, f"{path}: the header's digest is wrong")
        said = apart[24:]
    else:
        insist(_checksum(data[:start], entry, chains) == entry["checksum"], f"{path}: the header's digest is wrong")
        said = base64.b64decode(about["shardkeep.blocks"])
    insist(said == blocks, f"{path}: a block's digest is wrong")
    yield from safetensors.torch.load(whole).items()


def _assembled(place: _Place, pieces: list[tuple[str, torch.Tensor]], kinds: dict[str, Kind]) -> dict[str, Bits]:
    """Put parts together, and insist that they tile every tensor."""
    whole = {key: np.zeros((*kind.shape, kind.nbytes), np.uint8) for key, kind in kinds.items()}
    times = {key: np.zeros(kind.shape, np.int64) for key, kind in kinds.items()}
    for name, tensor in pieces:
        named = _NAMED.fullmatch(name)
        insist(named and named["key"] in kinds, f"{place}: there is a tensor {name!r}")
        assert named is not None
        kind = kinds[named["key"]]
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
