"""
Archives of `torch.save`: zip files whose entries are not compressed, so that the bytes of a tensor are contiguous.

    archive/data.pkl    a pickle that rebuilds the tensor, with its storage stored separately
    archive/byteorder   "little"
    archive/version     "3"
    archive/data/0      the storage
    directory of the archive

`frame_tensor` makes the bytes around those of a tensor; `find_tensor` finds the bytes in an archive that torch wrote;
`read_state` reads an archive of any state, with an `ArchivedTensor` for each tensor. None of them needs torch.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.format.boxes import Box, Ints, strides_of, whole
from shardkeep.format.data_file import digest
from shardkeep.format.dtypes import DTYPES, DType, by_name
from shardkeep.format.pickles import Opaque, check_expanded, load_pickle, numbers_of, plain_names
from shardkeep.format.values import TorchRef

Get = Callable[[int, int], bytes]
"""Returns bytes of an archive, given offset and length."""

_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_STORAGE_OF = {dtype: storage for storage, dtype in _STORAGES.items()}

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_UTF8, _SIZES_FOLLOW = 0x800, 0x8
_END_NBYTES = _END64.size + _LOCATOR64.size + _END.size
_MAX_DIRECTORY_NBYTES = 1 << 26
_MAX_PICKLE_NBYTES = 1 << 30


def frame_tensor(dtype: DType, shape: tuple[int, ...], *, at: int, alignment: int) -> tuple[bytes, bytes]:
    """
    Return what stands before and behind the bytes of a dense row-major tensor whose archive begins at byte `at` of a file.

    They begin at a multiple of `alignment`. Their CRC-32 is 0, as with torch's `set_crc32_options(False)`: torch does not
    verify it, and computing it takes longer than writing the bytes.
    """
    before, directory = _before_tensor(dtype, shape)
    nbytes = math.prod(shape) * dtype.itemsize
    header, size = len(before), min(nbytes, _MAX32)
    wide = _wide(nbytes, nbytes) if size == _MAX32 else b""
    local = _local(_name(0), _UTF8, size, wide, at + header, alignment)
    listed = directory + _central(_name(0), _UTF8, 0, nbytes, header)
    return before + local, listed + _ends(1, header + len(local) + nbytes, len(listed))


def _wide(*sizes: int) -> bytes:
    return struct.pack(f"<2H{len(sizes)}Q", 1, 8 * len(sizes), *sizes)


def _local(name: bytes, flags: int, size: int, wide: bytes, at: int = 0, alignment: int = 1, *, crc: int = 0) -> bytes:
    """Make the header of an entry, from `at` of the file on, whose bytes begin at a multiple of `alignment`."""
    pad = -(at + _LOCAL.size + len(name) + len(wide)) % alignment
    pad += 0 if pad == 0 or pad >= 4 else alignment  # it is a field of 4 bytes and more
    extra = wide + (struct.pack("<2s1H", b"FB", pad - 4) + b"Z" * (pad - 4) if pad else b"")
    return _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, crc, size, size, len(name), len(extra)) + name + extra


def _before_storages(pickled: bytes) -> tuple[bytes, bytes]:
    entries, directory = bytearray(), b""
    for name, data in (("data.pkl", pickled), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
        raw, crc = f"archive/{name}".encode(), zlib.crc32(data)
        directory += _central(raw, _UTF8, crc, len(data), len(entries))
        wide = _wide(len(data), len(data)) if len(data) >= _MAX32 else b""
        entries += _local(raw, _UTF8, min(len(data), _MAX32), wide, crc=crc) + data
    return bytes(entries), directory


def _central(name: bytes, flags: int, crc: int, nbytes: int, at: int) -> bytes:
    large = (*((nbytes, nbytes) if nbytes >= _MAX32 else ()), *((at,) if at >= _MAX32 else ()))
    extra, size = _wide(*large) if large else b"", min(nbytes, _MAX32)
    fields = (b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, min(at, _MAX32))
    return _CENTRAL.pack(*fields) + name + extra


def _ends(storages: int, start: int, nbytes: int) -> bytes:
    entries = 3 + storages
    few = min(entries, _MAX16)
    return (
        _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, nbytes, start)
        + _LOCATOR64.pack(b"PK\6\7", 0, start + nbytes, 1)
        + _END.pack(b"PK\5\6", 0, 0, few, few, min(nbytes, _MAX32), min(start, _MAX32), 0)
    )


@lru_cache(maxsize=4096)
def _before_tensor(dtype: DType, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the entries before a row-major tensor, with the pickle that torch writes for it, and their directory entries."""
    elements = math.prod(shape)
    storage, rebuild, last = _STORAGE_OF.get(dtype.name), b"_rebuild_tensor_v2", b""
    if storage is None:
        rebuild, last = b"_rebuild_tensor_v3", b"ctorch\n" + dtype.name.encode() + b"\n"
    kind = f"ctorch\n{storage}\n" if storage else "ctorch.storage\nUntypedStorage\n"
    return _before_storages(
        b"\x80\x02ctorch._utils\n" + rebuild + b"\n((X\x07\0\0\0storage" + kind.encode()
        + b"X\x01\0\0\x000X\x03\0\0\0cpu" + _int(elements if storage else elements * dtype.itemsize) + b"tQK\0"
        + _tuple(shape) + _tuple(strides_of(shape)) + b"\x89ccollections\nOrderedDict\n)R" + last + b"tR."
    )  # fmt: skip


def _tuple(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, numbers)) + b"t"


def _int(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + number.to_bytes(4, "little")
    return b"\x8a\x08" + number.to_bytes(8, "little", signed=True)


class ArchivedTensor(NamedTuple):
    """A strided tensor in an archive: where it lies, its dtype and shape."""

    dtype: DType
    shape: Ints
    strides: Ints
    """The distance between neighbours along each axis, in elements."""
    start: int
    """Where its first element begins: in the archive, or, of what `read_state` returns, in its storage."""
    storage: str = ""
    """The entry that holds its elements."""
    swapped: bool = False
    """Whether its elements are in the byte order of another machine."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        """Whether its elements lie end to end in row-major order, as this machine has them."""
        steps = zip(self.shape, self.strides, strides_of(self.shape), strict=True)
        return 0 in self.shape or (not self.swapped and all(step == dense for n, step, dense in steps if n > 1))

    @property
    def span(self) -> int:
        return self.span_of(whole(self.shape))[1]

    def span_of(self, box: Box) -> tuple[int, int]:
        """Return where a box begins, counted from the first element of the tensor, and what it spans, in bytes."""
        size, axes = self.dtype.itemsize, list(zip(box.offsets, box.sizes, self.strides, strict=True))
        span = 1 + sum((n - 1) * step for _, n, step in axes) if box.volume else 0
        return sum(at * step for at, _, step in axes) * size, span * size

    def embedding(self) -> tuple[Ints, Ints] | None:
        """
        Describe the tensor as a box, at the origin, of a dense row-major array: its axes in the order of their strides, and
        the sizes of that array, with one more axis if there are gaps between elements. None if that is not possible.
        """
        axes = sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis] if self.shape[axis] > 1 else 0)
        long = [axis for axis in axes if self.shape[axis] > 1]
        sizes = [1] * len(axes)
        for at, (axis, inner) in enumerate(pairwise(long)):
            step, below = self.strides[axis], self.strides[inner]
            if not below or step % below or step < below * self.shape[inner]:
                return None
            sizes[at + 1] = step // below
        gap = self.strides[long[-1]] if long else 1
        if self.swapped or not gap:
            return None
        sizes[:1] = [self.shape[axis] for axis in long[:1]] or sizes[:1]
        return tuple(axes), (*sizes, gap) if gap > 1 else tuple(sizes)


class ArchiveEntry(NamedTuple):
    name: str
    start: int
    nbytes: int
    crc: int


class _Archive:
    """The directory of an archive of `torch.save`; raises `MalformedFile` for other bytes."""

    def __init__(self, get: Get, nbytes: int, where: str) -> None:
        self._get = get
        self._where = where
        self.entries = _entries(get, nbytes, where)
        self.root = next(iter(self.entries), "/").partition("/")[0]
        if f"{self.root}/constants.pkl" in self.entries:  # which torch would load with another loader
            raise MalformedFile.of(where, "a compiled program of torch.jit, not an archive of torch.save")

    def find(self, name: str) -> ArchiveEntry | None:
        key = f"{self.root}/{name}"
        return self.entry(key) if key in self.entries else None

    def entry(self, key: str) -> ArchiveEntry:
        at, nbytes, crc = self.entries[key]
        return ArchiveEntry(key, data_start(self._get, at, key, where=self._where), nbytes, crc)

    def pickled(self) -> bytes:
        found = self.find("data.pkl")
        if found is None:
            raise MalformedFile.of(self._where, "not an archive of torch.save")
        if found.nbytes > _MAX_PICKLE_NBYTES:
            why = f"a pickle of {found.nbytes} bytes, more than {_MAX_PICKLE_NBYTES}"
            raise MalformedFile.of(self._where, why, hint="load it with torch")
        return self._get(found.start, found.nbytes)

    def load(self, pickled: bytes, unknown: dict[str, None] | None = None) -> Any:
        """Load the pickle, with an `ArchivedTensor` for each tensor; see `load_pickle` for `unknown`."""
        order = self.find("byteorder")
        big = order is not None and order.nbytes == 3 and self._get(order.start, 3) == b"big"

        def storage(pid: Any) -> _Storage:
            kind, named, key, _, _ = pid
            known = f"{self.root}/data/{key}"
            if kind != "storage" or known not in self.entries:
                raise MalformedFile(f"there is no storage {key!r} in the archive")
            name = named.name if type(named) is _ClassRef else ""
            return _Storage(name, known, self.entries[known][1], big == (sys.byteorder == "little"))

        names = {**plain_names(), **_NAMES}
        return load_pickle(pickled, names, where=self._where, persistent=storage, unknown=unknown)


def _archive_in(data: bytes, where: str) -> _Archive:
    return _Archive(lambda at, nbytes: data[at : at + nbytes], len(data), where)


def find_tensor(get: Get, nbytes: int, *, where: str) -> ArchivedTensor | None:
    """Find the tensor in an archive; None for what only torch can read."""
    archive = _Archive(get, nbytes, where)
    try:
        found = archive.load(archive.pickled())
    except (PickleRefused, MalformedFile):
        return None  # a tensor subclass, or a tensor with attributes
    if not isinstance(found, ArchivedTensor) or found.embedding() is None:
        return None
    start = archive.entry(found.storage).start + found.start
    return found._replace(start=start) if start + found.span <= nbytes else None


class ArchivedState(NamedTuple):
    """What an archive holds, without the bytes of its tensors."""

    value: Any
    """Plain values, an `ArchivedTensor` for each tensor, and an `Opaque` for anything that only its class can rebuild."""
    entries: dict[str, tuple[int, int, int]]
    """The offset of the header, size and CRC-32 of each entry."""
    digest: bytes
    """Of the directory and the pickle."""
    unknown: list[str]
    """The classes and functions that an `Opaque` stands for, in their order in the pickle."""


def read_state(get: Get, nbytes: int, *, where: str) -> ArchivedState:
    """Read an archive of any state; the bytes of its tensors are not read."""
    archive = _Archive(get, nbytes, where)
    unknown: dict[str, None] = {}
    value = archive.load(pickled := archive.pickled(), unknown)
    check_expanded(value, len(pickled), where=where, leaf=ArchivedTensor)
    known = digest(repr(sorted(archive.entries.items())).encode() + pickled)
    return ArchivedState(value, archive.entries, known, list(unknown))


def data_start(get: Get, at: int, name: str, *, where: str) -> int:
    header = get(at, _LOCAL.size + len(name.encode()))
    if header[:4] != b"PK\3\4" or header[_LOCAL.size :].decode(errors="replace") != name:
        raise MalformedFile.of(where, "the archive's directory points at something that is not an entry", offset=at)
    *_, name_nbytes, extra_nbytes = _LOCAL.unpack(header[: _LOCAL.size])
    return at + _LOCAL.size + int(name_nbytes) + int(extra_nbytes)


def read_object(data: bytes, *, where: str) -> Any:
    """Rebuild an object of plain values; raise `PickleRefused` or `MalformedFile` for anything else."""
    pickled = _archive_in(data, where).pickled()
    value = load_pickle(pickled, {**plain_names(), **_VALUES}, where=where)
    check_expanded(value, len(pickled), where=where)
    return value


def is_archive(data: bytes) -> bool:
    """Return whether these bytes are an archive of `torch.save`, and not a compiled program."""
    try:
        archive = _archive_in(data, "an object")
    except MalformedFile:
        return False
    return f"{archive.root}/data.pkl" in archive.entries


def stored_parts(get: Get, nbytes: int, *, where: str) -> list[ArchiveEntry]:
    archive = _Archive(get, nbytes, where)
    return [archive.entry(key) for key in archive.entries]


def _entries(get: Get, nbytes: int, where: str) -> dict[str, tuple[int, int, int]]:
    """Read the directory of an uncompressed archive: offset, size and CRC-32 of each entry."""
    problem = MalformedFile(f"{where}: not an archive of torch.save, or one that was cut short", file=where)
    if nbytes < _END.size:
        raise problem
    ends = get(max(0, nbytes - _END_NBYTES), min(nbytes, _END_NBYTES))
    mark, _, _, _, count, size, start, comment = _END.unpack(ends[-_END.size :])
    if mark != b"PK\5\6" or comment:
        raise problem
    if len(ends) == _END_NBYTES and ends[:4] == b"PK\6\6":
        _, _, _, _, _, _, _, count, size, start = _END64.unpack(ends[: _END64.size])
    if start + size > nbytes or size > _MAX_DIRECTORY_NBYTES or count * _CENTRAL.size > size:
        raise problem
    directory, at = get(start, size), 0
    entries: dict[str, tuple[int, int, int]] = {}
    for _ in range(count):
        if at + _CENTRAL.size > size:
            raise problem
        fields = _CENTRAL.unpack_from(directory, at)
        mark, _, _, _, method, _, _, crc, packed, plain, name, extra, note, _, _, _, offset = fields
        at += _CENTRAL.size
        if mark != b"PK\1\2" or method or packed != plain:
            raise problem
        key = directory[at : at + name].decode(errors="replace")
        wide = _wide_sizes(directory[at + name : at + name + extra])
        if plain == _MAX32 and len(wide) >= 2:
            plain, wide = wide[0], wide[2:]
        if offset == _MAX32 and wide:
            offset = wide[0]
        entries[key] = (offset, plain, crc)
        at += name + extra + note
    if len(entries) < count:  # two entries of one name
        raise problem
    return entries


def _wide_sizes(extra: bytes) -> tuple[int, ...]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            held = extra[at + 4 : at + 4 + length]
            return struct.unpack(f"<{len(held) // 8}Q", held[: len(held) // 8 * 8])
        at += 4 + length
    return ()


class _ClassRef(NamedTuple):
    """Stands for a class of torch's that is an argument of a call."""

    name: str


class _Storage(NamedTuple):
    name: str
    """Of its class; empty for one that is not known."""
    key: str
    nbytes: int
    swapped: bool


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    """Stand for torch's functions; the rest is (requires_grad, hooks[, dtype][, state])."""
    if type(storage) is not _Storage or not storage.name:
        return Opaque()
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise MalformedFile(f"a tensor of {shape} elements at {offset}, with strides {strides}")
    dtype: Any = TorchRef("dtype", (_STORAGES.get(storage.name, ""),))
    if storage.name == "UntypedStorage":
        dtype, rest = rest[2], rest[:2] + rest[3:]
    if any(rest[2:]) or type(dtype) is not TorchRef:  # a conjugated or negated view, or a dtype that is not known
        return Opaque()
    kind = by_name(str(dtype.parts[0]))
    found = ArchivedTensor(
        kind, tuple(shape), tuple(strides), offset * kind.itemsize, storage.key, storage.swapped and kind.itemsize > 1
    )
    if found.nbytes and found.start + found.span > storage.nbytes:
        raise MalformedFile(f"a tensor of {shape} elements does not fit the {storage.nbytes} bytes of {storage.key}")
    return found


def _rebuild_from_type(rebuild: Any, kind: Any, args: Any, _attributes: Any) -> Any:
    """Stand for torch's function for subclasses, and for tensors with attributes, which are not kept."""
    return rebuild(*args) if type(kind) is _ClassRef else Opaque()


_VALUES: dict[tuple[str, str], Any] = {
    **{("torch", row.name): TorchRef("dtype", (row.name,)) for row in DTYPES},
    ("torch", "Size"): lambda *numbers: TorchRef("Size", numbers_of(*numbers)),
    ("torch", "device"): lambda *parts: TorchRef("device", (":".join(map(str, parts)),)),
    ("torch.serialization", "_get_layout"): lambda name: TorchRef("layout", (str(name).removeprefix("torch."),)),
}
_NAMES: dict[tuple[str, str], Any] = {
    **_VALUES,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, *_: tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch", "Tensor"): _ClassRef("Tensor"),
    ("torch.nn.parameter", "Parameter"): _ClassRef("Parameter"),
    ("torch.storage", "UntypedStorage"): _ClassRef("UntypedStorage"),
    **{("torch", storage): _ClassRef(storage) for storage in _STORAGES},
}


# -- archives with any number of storages ------------------------------------------------------------------------------

# As above, with the storages as the entries archive/data/0, archive/data/1 and so on. Sizes are known beforehand, so every
# byte has its place before the first storage is read. The checksum of a storage is known once it has been written: it
# follows the storage, and is repeated in the directory. So an archive is written in order.

STORAGE_ALIGNMENT = 64
"""Every storage begins at a multiple of this, as in torch's files: no element of one lies across such a multiple."""


class ArchiveLayout:
    """Where everything goes in an archive of a pickle and storages of known sizes."""

    def __init__(self, pickled: bytes, sizes: Sequence[int]) -> None:
        """Lay out an archive of `data.pkl` and of storages of these sizes, which the pickle calls by number."""
        self.sizes = list(sizes)
        self.starts: list[int] = []
        self._entries, self._listed = _before_storages(pickled)
        self._headers: list[int] = []
        at = len(self._entries)
        for number, nbytes in enumerate(self.sizes):
            self._headers.append(at)
            at += len(_header(number, nbytes, at))
            self.starts.append(at)
            at += nbytes + len(_descriptor(nbytes, 0))
        self._directory_at = at
        self.nbytes = at + len(self._directory([0] * len(self.sizes)))

    def before(self, number: int, crcs: Sequence[int]) -> bytes:
        """Return what stands before storage `number`, or ends the archive, given the CRC-32 of all storages before it."""
        parts = [self._entries] if number == 0 else [_descriptor(self.sizes[number - 1], crcs[number - 1])]
        if number < len(self.sizes):
            parts.append(_header(number, self.sizes[number], self._headers[number]))
        else:
            parts.append(self._directory(crcs))
        return b"".join(parts)

    def _directory(self, crcs: Sequence[int]) -> bytes:
        rows = zip(self.sizes, self._headers, crcs, strict=True)
        listed = self._listed + b"".join(
            _central(_name(n), _UTF8 | _SIZES_FOLLOW, crc, nbytes, at) for n, (nbytes, at, crc) in enumerate(rows)
        )
        return listed + _ends(len(self.sizes), self._directory_at, len(listed))


def _name(number: int) -> bytes:
    return b"archive/data/%d" % number


def _header(number: int, nbytes: int, at: int) -> bytes:
    # The reader must know that 8 bytes hold each size that follows.
    wide = _wide(0, 0) if nbytes >= _MAX32 else b""
    return _local(_name(number), _UTF8 | _SIZES_FOLLOW, _MAX32 if wide else 0, wide, at, STORAGE_ALIGNMENT)


def _descriptor(nbytes: int, crc: int) -> bytes:
    return b"PK\7\x08" + struct.pack("<I2Q" if nbytes >= _MAX32 else "<3I", crc, nbytes, nbytes)
