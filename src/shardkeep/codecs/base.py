"""
The codec protocol: codecs turn the bytes of a frame into other bytes, and back.

A file is cut into frames, and each frame is coded on its own. So a range of a file is read by decoding only the frames
it touches, on any number of threads. A *config* is what the user asks for ("zstd, level 3"). Once per checkpoint it
becomes a *record*: its name, version and parameters, as JSON, without secrets. From the record every rank, and every
later reader, opens the *codec* that does the work.

To write a codec, subclass `CodecConfig` and register it (`shardkeep.codecs.chain`).
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec
from typing_extensions import Buffer, Self

from shardkeep.errors import DamagedFrame, InvalidCodec, PackageMissing, UnknownCodec

if TYPE_CHECKING:
    from shardkeep.codecs.keys import KeySource


WRAPPED = "wrapped"
"""The only entry of a codec's record that changes when keys are rotated: a data key, encrypted by the user's key."""

CodecRecord = dict[str, Any]
"""What a checkpoint records about one codec: "name", "version" and parameters; JSON values only, no secrets."""


class FramePlace(NamedTuple):
    """Identifies a frame. Codecs that authenticate bind a frame to its place."""

    file: str
    """Name of the blob, which contains the id of the save: no two saves have files of one name."""
    number: int
    """Number of the frame in the order of writing, unique in its file."""
    offset: int
    """Offset of its plain bytes in the plain file."""
    nbytes: int
    """Number of its plain bytes."""

    @property
    def named(self) -> str:
        """Its description for messages."""
        return f"frame {self.number} of {self.file} (bytes {self.offset} to {self.offset + self.nbytes})"


def damaged_frame(place: FramePlace, what: str) -> DamagedFrame:
    """Make the error of a frame whose stored form cannot be what a codec wrote."""
    hint = "use another checkpoint, or another copy of this one"
    return DamagedFrame(f"{place.named} {what}", hint=hint, file=place.file)


class Codec(Protocol):
    """Turns frames into other bytes and back. Used by many threads at once; should release the GIL for heavy work."""

    def bound(self, nbytes: int) -> int:
        """Return the largest size of the result of `encode` for `nbytes` bytes."""

    def encode(self, data: memoryview, place: FramePlace) -> Buffer:
        """Return the stored form of these bytes. It may be `data` itself, but must not be memory that is reused."""

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> Buffer:
        """
        Return the bytes that `encode` was given.

        Must never return more than `most_nbytes`, whatever `data` says, because stored data may be forged. An exception
        other than a `CheckpointError` means that `data` is damaged.
        """


# What a codec may have besides: methods that save time or memory, and a secret key.


@runtime_checkable
class EncodesMany(Codec, Protocol):
    """Encodes several frames at once. Only the first codec of a chain is used this way."""

    def encode_many(self, data: memoryview, places: Sequence[FramePlace]) -> Iterator[Buffer]:
        """Yield what `encode` would for each frame; `data` has them end to end, of one size (the last may be smaller)."""


@runtime_checkable
class DecodesInto(Protocol):
    def decode_into(self, data: memoryview, place: FramePlace, into: memoryview) -> int:
        """Decode into the beginning of `into`; return how many bytes were filled. More than it holds is an error."""


@runtime_checkable
class Authenticates(Protocol):
    def mac(self, data: bytes) -> bytes:
        """Return the message authentication code of `data`, made with a secret key."""


class CodecConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    What a user asks for: a codec and its parameters, as fields.

    A subclass sets `name` and `version`, and implements `open`. The rest suits codecs whose record is their parameters.
    """

    name: ClassVar[str] = ""
    """The name in `codecs=["zstd"]` and in the checkpoint."""
    version: ClassVar[int] = 1
    """Version of the stored bytes; raise it when an older version could not read them."""

    @classmethod
    def from_text(cls, argument: str) -> Self:
        """Return the config for "name:argument"; for "name", the argument is empty."""
        if argument:
            raise InvalidCodec(f"the codec {cls.name!r} takes no argument after a colon, and was given {argument!r}")
        return cls()

    @classmethod
    def from_recorded(cls, recorded: CodecRecord) -> Self:
        """Read the parameters back from a record."""
        fields = {key: value for key, value in recorded.items() if key not in ("name", "version")}
        try:
            return msgspec.convert(fields, cls)
        except (msgspec.ValidationError, TypeError, ValueError) as exc:
            raise invalid_record(cls.name, exc) from exc

    @classmethod
    def check_version(cls, recorded: CodecRecord) -> None:
        """Reject the record of another version of this codec. A codec that reads several versions overrides this."""
        if recorded.get("version") != cls.version:
            raise UnknownCodec(
                f"the codec {cls.name!r} was written by version {recorded.get('version')!r}; this is version {cls.version}",
                hint="install the version of shardkeep, or of the codec's package, that wrote the checkpoint",
            )

    def begin(self, keys: KeySource | None) -> CodecRecord:  # noqa: ARG002 - for codecs that encrypt
        """Return the record of this codec for a new checkpoint. Called on one rank, once per checkpoint."""
        fields: CodecRecord = msgspec.to_builtins(self)
        return {"name": self.name, "version": self.version, **fields}

    @classmethod
    def open(cls, recorded: CodecRecord, keys: KeySource | None) -> Codec:
        """Return the codec for a checkpoint with this record. Called on every rank."""
        raise NotImplementedError(f"{cls.__name__} does not implement open()")

    @classmethod
    def rewrap(cls, recorded: CodecRecord, keys: KeySource) -> CodecRecord:  # noqa: ARG003 - for codecs that encrypt
        """Return the record with its data key wrapped by the current key; only the entry `WRAPPED` may differ."""
        return recorded


def invalid_record(codec: str, why: object) -> InvalidCodec:
    hint = "the commit record was edited or damaged: use another checkpoint"
    return InvalidCodec(f"the checkpoint's record of its codec {codec!r} is invalid: {why}", hint=hint)


def without_keys(recorded: list[CodecRecord]) -> list[CodecRecord]:
    """Return the records of a chain without the entries that key rotation changes: what a checkpoint's MAC covers."""
    return [{key: value for key, value in each.items() if key != WRAPPED} for each in recorded]


def require_module(module: str, *, package: str, wanted_by: str) -> Any:
    """Import a module of an optional package, or raise `PackageMissing` with a hint what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        hint = f"pip install {shlex.quote(package)}"
        raise PackageMissing(f"{wanted_by} needs the package {package}: {exc}", hint=hint, package=package) from exc
