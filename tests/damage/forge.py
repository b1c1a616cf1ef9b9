"""
Take a checkpoint apart, change anything in it, and put it together again with every checksum right.

What comes out could have been written by somebody who knows the format and means harm: only the rules of the format
stand between it and the reader.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from shardkeep.format.data_file import checksum_text, digest
from shardkeep.format.index import MAGIC
from shardkeep.format.record import RECORD_NAME
from tests.damage.subjects import Blobs

ALIGN = 64
U64_MAX = 2**64 - 1


@dataclass
class Section:
    code: str
    shape: tuple[int, ...]
    raw: bytes
    offset: int | None = None
    """Declared place; None for the right one."""
    digest: bytes | None = None
    """Declared digest; None for the right one."""

    @property
    def column(self):
        return np.frombuffer(self.raw, self.code).reshape(self.shape)


@dataclass
class Forgery:
    """A checkpoint in parts. Change them, then `blobs()`."""

    record: dict[str, Any]
    sections: dict[str, Section]
    data: Blobs
    header: bytes | None = None
    """The whole msgpack header of the index, in the place of the right one."""
    index: bytes | None = None
    """The whole index, in the place of one made of the sections."""
    record_text: bytes | None = None
    """The record's JSON without its end, in the place of one made of `record`."""
    rows: dict[str, int] = field(default_factory=dict)
    """Row of each tensor, by key."""

    def get(self, name):
        """Return a section's numbers, to change; `set` puts them back."""
        return self.sections[name].column.astype(object)

    def set(self, name, column, code="<u8"):
        """Store numbers as a section, in any type; they wrap as two's complement does."""
        array = np.asarray(column, object)
        raw = b"".join(int(n % 2**64).to_bytes(8, "little")[: np.dtype(code).itemsize] for n in array.reshape(-1))
        self.sections[name] = Section(code, array.shape, raw)

    def put(self, name, at, value, code="<u8"):
        column = self.get(name)
        column[at] = value
        self.set(name, column, code)

    def set_strings(self, name, ends, strings):
        self.sections[name] = Section("|u1", (len(b"".join(strings)),), b"".join(strings))
        self.set(ends, np.cumsum([len(string) for string in strings], dtype=np.int64))

    def strings(self, name, ends):
        stops = self.get(ends).tolist()
        return [self.sections[name].raw[a:b] for a, b in zip([0, *stops], stops, strict=False)]

    def set_tree(self, data):
        self.sections["tree"] = Section("|u1", (len(data),), data)

    def set_value(self, key, data):
        keys = self.strings("value_keys", "value_key_ends")
        values = self.strings("values", "value_ends")
        values[keys.index(key.encode())] = data
        self.set_strings("values", "value_ends", values)

    def chunk(self, key):
        row = self.rows[key]
        return int(self.get("chunk_ends")[row - 1]) if row else 0

    def file(self, group):
        return next(file for file in self.record["files"] if file["name"].startswith(group))

    def keep_index(self, subject):
        """Say of the index what is right, where only the record is written anew."""
        entry = subject.record.index
        self.record["index"] |= {"nbytes": entry.nbytes, "checksum": entry.checksum}

    def blobs(self):
        """Put it together, with every checksum right."""
        index = self.index if self.index is not None else encode_sections(self.sections, self.header)
        entry = {"nbytes": len(index), "checksum": checksum_text(digest(index))}
        record = {**self.record}
        if isinstance(record.get("index"), dict):
            record["index"] = {**entry, **record["index"]}
        text = self.record_text if self.record_text is not None else json_text(record)
        blobs = {**self.data, RECORD_NAME: seal_record(text)}
        name = record["index"].get("name") if isinstance(record.get("index"), dict) else None
        blobs[name if isinstance(name, str) else self.index_name] = index
        return blobs

    index_name: str = ""


def take_apart(subject):
    """Read a sound checkpoint into its parts. The index's size and checksum are left out, to be made anew."""
    record = json.loads(subject.blobs[RECORD_NAME])
    name = record["index"].pop("name")
    data = {key: value for key, value in subject.blobs.items() if key not in (RECORD_NAME, name)}
    sections = decode_sections(subject.blobs[name])
    record.pop("checksum")
    record["index"] = {"name": name}
    forgery = Forgery(record, sections, data, index_name=name)
    forgery.rows = {key.decode(): row for row, key in enumerate(forgery.strings("keys", "key_ends"))}
    return forgery


def seal_header(forgery, group, data):
    """Put a changed data file in, its size and its header's checksum right in the record."""
    entry = forgery.file(group)
    forgery.data[entry["name"]] = data
    entry["nbytes"] = len(data)
    entry["checksum"] = checksum_text(digest(data[: entry["header_nbytes"]]))


def json_text(record):
    """The record as JSON, up to where its checksum begins."""
    return json.dumps(record, indent=2).encode().removesuffix(b"}").rstrip()


def seal_record(text):
    return text + b',\n  "checksum": "' + checksum_text(digest(text)).encode() + b'"\n}\n'


def decode_sections(index):
    begin = len(MAGIC) + 4
    length = int.from_bytes(index[len(MAGIC) : begin], "little")
    body = begin + length + -(begin + length) % ALIGN
    sections = {}
    for name, code, shape, offset, _ in msgspec.msgpack.decode(index[begin : begin + length]):
        nbytes = int(np.prod(shape)) * np.dtype(code).itemsize
        sections[name] = Section(code, tuple(shape), index[body + offset : body + offset + nbytes])
    return sections


def encode_sections(sections, header=None):
    table = []
    body = bytearray()
    for name, section in sections.items():
        offset = len(body) if section.offset is None else section.offset
        expected = digest(section.raw) if section.digest is None else section.digest
        table.append((name, section.code, section.shape, offset, expected))
        body += section.raw
        body += bytes(-len(body) % ALIGN)
    header = msgspec.msgpack.encode(table) if header is None else header
    start = len(MAGIC) + 4 + len(header)
    return b"".join((MAGIC, len(header).to_bytes(4, "little"), header, bytes(-start % ALIGN), body))


def change(thing, **attributes):
    """Set attributes, in an expression."""
    for name, value in attributes.items():
        setattr(thing, name, value)
