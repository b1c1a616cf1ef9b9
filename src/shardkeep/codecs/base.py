"""
What a codec is: bytes of a frame to other bytes, and back.

A file is cut into frames, and each frame is coded by itself, so that a part of a file is read by decoding only the
frames it touches, on any number of threads. A *config* says what is wanted ("zstd, level 3"). Once for each checkpoint
it becomes what is *recorded*: its name, version and parameters, as JSON, without secrets. From that every rank, and
every later reader, opens the *codec* that does the work.

To write one, subclass `CodecConfig` and register it (`shardkeep.codecs.registry`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec

from shardkeep.errors import CodecUnavailable, DamagedFrame, InvalidCodec, OversizedFrame, UnknownCodec

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

    from shardkeep.codecs.keys import KeySource


FRAME_NBYTES = 1 << 20
"""Plain bytes of a frame, where nothing speaks for another size: it stays in a core's cache from codec to codec."""

WRAPPED = "wrapped"
"""The one entry of a codec's record that changes when keys are rotated: a data key, encrypted by the user's key."""

CodecRecord = dict[str, Any]
"""What a checkpoint keeps of one codec: "name", "version" and its parameters; JSON values only, no secrets."""


class FramePlace(NamedTuple):
    """Which frame of which file. Codecs that authenticate bind a frame to its place."""

    file: str
    """Name of the blob. It carries the id of the save, so that no two saves have files of one name."""
    number: int
    """The how-manieth frame of the file this is, in the order of writing; no two frames of a file have one number."""
    offset: int
    """Where its plain bytes begin in the plain file."""
    nbytes: int
    """How many plain bytes it has."""

    @property
    def named(self) -> str:
        """What it is called in messages."""
        return f"frame {self.number} of {self.file} (bytes {self.offset} to {self.offset + self.nbytes})"


class Codec(Protocol):
    """Turns frames into other bytes and back. Used by many threads at once; releases the GIL where it works hard."""

    def bound(self, nbytes: int) -> int:
        """Return the most bytes that `encode` makes of so many."""
        ...

    def encode(self, data: memoryview, place: FramePlace) -> Buffer:
        """Return what is stored for these bytes. It may be `data` itself, but nothing that is used again."""
        ...

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> Buffer:
        """
        Return the bytes that `encode` was given.

        Never makes more than `most_nbytes` of them, whatever `data` says: what is read may come from an enemy.
        What it raises other than a `CheckpointError` is taken to mean that `data` is damaged.
        """
        ...


@runtime_checkable
class EncodesMany(Codec, Protocol):
    """
    A codec that would rather be given several frames at once, and room for what it makes of them.

    Only the first codec of a chain is asked for this.
    """

    def room_nbytes(self, nbytes: int) -> int:
        """Return how much room it wants for a frame of so many bytes."""
        ...

    def encode_many(self, data: memoryview, places: Sequence[FramePlace], room: memoryview) -> Iterator[Buffer]:
        """
        Give what `encode` would return for each of some frames, one when it is asked for.

        What was given must stay as it is until all frames are written, which is also how long `room` can be used.

        Args:
            data: the frames, one behind the other.
            places: of each. They have one size; the last may have less.
            room: as many equal parts as there are frames, each of at least `room_nbytes` and beginning at a multiple of 8.

        """
        ...


@runtime_checkable
class EncodesInto(Protocol):
    """A codec that can encode straight into memory that is given, which saves new memory for every frame."""

    def encode_into(self, data: memoryview, place: FramePlace, into: memoryview) -> int:
        """Fill `into`, of at least `bound` bytes, from its beginning, and return how much of it was filled."""
        ...


@runtime_checkable
class DecodesInto(Protocol):
    """A codec that can decode straight into memory that is given, which saves a copy."""

    def decode_into(self, data: memoryview, place: FramePlace, into: memoryview) -> int:
        """Fill `into` from its beginning, and return how much of it was filled; more than it holds is an error."""
        ...


@runtime_checkable
class Authenticates(Protocol):
    """A codec that has a secret, and can prove with it that other data of the checkpoint were not changed."""

    def mac(self, data: bytes) -> bytes:
        """Return a code that only those who have the key can make for `data`."""
        ...


class CodecConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What a user asks for: a codec and its parameters, as fields.

    A subclass sets `name` and `version`, and says how to `open` it. Where parameters are all there is to it, nothing
    else is needed.
    """

    name: ClassVar[str] = ""
    """As in `codecs=["zstd"]` and in the checkpoint."""
    version: ClassVar[int] = 1
    """Of the bytes it makes: to be raised when an older version could not read them."""

    @classmethod
    def from_text(cls, argument: str) -> Self:
        """Make the config that "name:argument" stands for, and "name" with an empty argument."""
        if argument:
            raise InvalidCodec(f"the codec {cls.name!r} takes nothing after a colon, and was given {argument!r}")
        return cls()

    @classmethod
    def from_recorded(cls, recorded: CodecRecord) -> Self:
        """
        Read the parameters back from what was recorded.

        Raises:
            InvalidCodec: they are not those of this codec.

        """
        fields = {key: value for key, value in recorded.items() if key not in ("name", "version")}
        try:
            return msgspec.convert(fields, cls)
        except (msgspec.ValidationError, TypeError, ValueError) as exc:
            raise InvalidCodec(
                f"the checkpoint's record of its codec {cls.name!r} makes no sense: {exc}",
                hint="the commit record was edited or damaged: use another checkpoint",
            ) from exc

    @classmethod
    def check_version(cls, recorded: CodecRecord) -> None:
        """
        Refuse what another version of this codec recorded. A codec that reads several versions overrides this.

        Raises:
            UnknownCodec: it cannot be read here.

        """
        if recorded.get("version") != cls.version:
            raise UnknownCodec(
                f"the codec {cls.name!r} was written in version {recorded.get('version')!r}; known here is {cls.version}",
                hint="install the version of shardkeep, or of the package of this codec, that wrote the checkpoint",
            )

    def begin(self, keys: KeySource | None) -> CodecRecord:  # noqa: ARG002 - for codecs that encrypt
        """Return what a new checkpoint records of this codec. Called on one rank, once for each checkpoint."""
        fields: CodecRecord = msgspec.to_builtins(self)
        return {"name": self.name, "version": self.version, **fields}

    @classmethod
    def open(cls, recorded: CodecRecord, keys: KeySource | None) -> Codec:
        """Return what codes and decodes for a checkpoint with this record. Called on every rank."""
        raise NotImplementedError(f"{cls.__name__} does not say how to open its codec")

    @classmethod
    def rewrap(cls, recorded: CodecRecord, keys: KeySource) -> CodecRecord:  # noqa: ARG003 - for codecs that encrypt
        """
        Return the record with its data key wrapped by the key that `keys` wraps with now.

        Nothing but the entry `WRAPPED` may differ: data are not touched. A codec without keys has nothing to do.
        """
        return recorded


def without_keys(recorded: list[CodecRecord]) -> list[CodecRecord]:
    """Return what is recorded of a chain without what rotation of keys changes: what a MAC of a checkpoint covers."""
    return [{key: value for key, value in each.items() if key != WRAPPED} for each in recorded]


# Packages that only some codecs need, imported when they are used.


@cache
def require_module(module: str, *, extra: str, wanted_by: str) -> Any:
    """
    Import a module of a package that shardkeep does not depend on.

    Raises:
        CodecUnavailable: it cannot be imported; says what to install.

    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise CodecUnavailable(
            f"{wanted_by} needs a package that is not installed: {exc}", hint=f"pip install 'shardkeep[{extra}]'"
        ) from exc


# Frames that did not shrink are stored as they are: one byte before the frame says which it is.

_RAW, _CODED = 0, 1


def marked_bound(nbytes: int) -> int:
    """Return the most bytes that `marked` makes of so many."""
    return nbytes + 1


def add_marker(data: memoryview, coded: bytes) -> bytes:
    """Return the smaller of the two, with a byte before it that says which it is."""
    if len(coded) < data.nbytes:
        return b"".join((bytes((_CODED,)), coded))
    return b"".join((bytes((_RAW,)), data))


def strip_marker(stored: memoryview, place: FramePlace, most_nbytes: int) -> tuple[memoryview, bool]:
    """
    Return what stands behind the byte, and whether it is raw.

    Raises:
        DamagedFrame: the byte is neither.
        OversizedFrame: raw bytes are more than were written.

    """
    if not stored.nbytes or stored[0] not in (_RAW, _CODED):
        raise DamagedFrame(f"frame {place.number} of {place.file} does not say how it is stored", file=place.file)
    rest, is_raw = stored[1:], stored[0] == _RAW
    if is_raw and rest.nbytes > most_nbytes:
        raise OversizedFrame(
            f"frame {place.number} of {place.file} holds {rest.nbytes} bytes, and {most_nbytes} are the most it may",
            file=place.file,
        )
    return rest, is_raw
