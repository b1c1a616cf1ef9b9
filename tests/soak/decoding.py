"""
Undoes codecs as docs/format.md and docs/codecs.md say, with cryptography, zstandard and xxhash alone.

As in `reader`, nothing of shardkeep is used.
"""

import hashlib
import hmac
import json
import struct
from typing import Any

import numpy as np
import xxhash
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap

from tests.soak.contents import KEY

_MAGIC = b"SKFRAME1"
_COLUMNS = 5
_SIGNED = {
    "format", "version", "save_id", "step", "saved_at", "writer", "world_size", "meta", "totals", "index", "files", "chains",
}  # fmt: skip
"""Members of a record that its signature covers."""


class Broken(Exception):
    """A checkpoint is not what its format promises."""


def insist(fine: object, what: str) -> None:
    """Say what is broken, unless all is fine."""
    if not fine:
        raise Broken(what)


def digest(data: bytes | memoryview) -> str:
    """Write the digest of some bytes as the format does."""
    return f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"


class Chain:
    """The codecs that a file went through."""

    def __init__(self, recorded: list[dict[str, Any]]) -> None:
        self._codecs = recorded
        self._root: bytes | None = None
        for codec in recorded:
            insist(codec["version"] == 1, f"what version of {codec['name']}?")
            if codec["name"] == "aes":
                data_key = aes_key_unwrap(bytes.fromhex(KEY), bytes.fromhex(codec["wrapped"]["key"]))
                self._root = hmac.digest(bytes.fromhex(codec["salt"]), data_key, hashlib.sha256)

    def checksum(self, data: bytes | memoryview) -> str:
        """Write the digest of plain bytes as the record has it: of one's MAC, if the chain has a secret."""
        return digest(data if self._root is None else self.mac(bytes(data)))

    def mac(self, data: bytes) -> bytes:
        """Sign, by a chain that has a secret."""
        return hmac.digest(self._derived(b"mac"), data, hashlib.sha256)

    @property
    def is_secret(self) -> bool:
        """Whether it encrypts."""
        return self._root is not None

    def plain(self, stored: bytes, entry: dict[str, Any]) -> bytes:
        """Check a coded file as it is stored, and return the plain one."""
        name = entry["name"]
        insist(len(stored) == entry["stored_nbytes"], f"{name}: {len(stored)} bytes, not {entry['stored_nbytes']}")
        insist(stored[:8] == _MAGIC == stored[-8:], f"{name}: is no coded file")
        count, total = struct.unpack("<QQ", stored[-24:-8])
        table = len(stored) - 24 - count * (8 * _COLUMNS + 16)
        insist(digest(stored[table:]) == entry["table_checksum"], f"{name}: the digest of the table is wrong")
        columns = np.frombuffer(stored, "<i8", _COLUMNS * count, table).reshape(_COLUMNS, count)
        digests = stored[table + 8 * _COLUMNS * count : -24]
        insist(total == entry["nbytes"] == columns[1].sum(), f"{name}: stands for {total} bytes, not {entry['nbytes']}")
        insist(8 + columns[3].sum() == table, f"{name}: frames do not tile it")
        insist(len({*columns[4].tolist()}) == count, f"{name}: two frames have one number")
        made = bytearray()
        for row, (start, nbytes, at, length, number) in enumerate(columns.T.tolist()):
            frame = stored[at : at + length]
            insist(
                digests[16 * row : 16 * row + 16] == xxhash.xxh3_128(frame).digest(), f"{name}: frame {row} is wrong"
            )
            insist(start == len(made), f"{name}: frame {row} does not begin where the last one ended")
            for codec in reversed(self._codecs):
                frame = self._undone(codec["name"], frame, (number, start, nbytes, name))
            insist(len(frame) == nbytes, f"{name}: frame {row} has {len(frame)} bytes, not {nbytes}")
            made += frame
        return bytes(made)

    def _undone(self, codec: str, frame: bytes, place: tuple[int, int, int, str]) -> bytes:
        if codec == "aes":
            number, start, nbytes, name = place
            bound = struct.pack("<QQQQ", number, start, nbytes, len(frame) - 28) + name.encode()
            return AESGCM(self._derived(b"file\0" + name.encode())).decrypt(frame[:12], frame[12:], bound)
        if codec == "zstd":
            return _unzipped(frame[1:]) if frame[0] else frame[1:]
        insist(codec == "float", f"what is {codec}?")
        return _numbers(frame)

    def _derived(self, purpose: bytes) -> bytes:
        if self._root is None:
            raise Broken("a chain without a secret has no keys")
        return hmac.digest(self._root, b"shardkeep aes/1 " + purpose + b"\1", hashlib.sha256)


def insist_signed(record: dict[str, Any], chains: list[Chain], where: str) -> None:
    """Check the signature of a record, if one of its chains has a secret."""
    if not any(chain.is_secret for chain in chains):
        return
    chain = chains[record["index"]["chain"]]
    covered = {key: value for key, value in record.items() if key in _SIGNED}
    covered["chains"] = [
        [{key: value for key, value in codec.items() if key != "wrapped"} for codec in each]
        for each in record["chains"]
    ]
    signed = json.dumps(covered, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    said = f"hmac_sha256:{chain.mac(signed).hex()}"
    insist(chain.is_secret and record.get("mac") == said, f"{where}: the record's signature is wrong")


def _unzipped(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def _numbers(frame: bytes) -> bytes:
    """Undo the codec `float`."""
    if frame[0] == 0:
        return frame[1:]
    [nbytes] = struct.unpack("<Q", frame[1:9])
    if frame[0] == 1:
        word = frame[9:]
        return (word * (nbytes // len(word) + 1))[:nbytes]
    width, turn, parts = frame[9:12]
    at = 12 + 10 * parts
    count = nbytes // width
    columns: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    for part in range(parts):
        size, coder, stored = struct.unpack_from("<BBQ", frame, 12 + 10 * part)
        body = frame[at : at + stored]
        at += stored
        columns.append(np.frombuffer(_unzipped(body) if coder else body, np.uint8).reshape(count, size))
    words = np.ascontiguousarray(np.concatenate(columns, axis=1)).view(f"<u{width}").reshape(-1)
    if turn:
        kind, top = words.dtype.type, 8 * width - 1
        low = words & kind((1 << (top - 8)) - 1)
        sign = (words >> kind(top - 8)) & kind(1)
        words = (sign << kind(top)) | ((words >> kind(top - 7)) << kind(top - 8)) | low
    return words.tobytes() + frame[at:]
