"""
A chain of codecs over the frames of a file.

Frames pass through the codecs in the order they were asked for, and back through them in reverse.

What a caller has to keep: the names of files are never used twice with one chain for different contents, and no two
frames of a file have one number. A frame is read with the very place it was written with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardkeep.codec.codecs import Authenticates, Codec, CodecConfig, DecodesInto, FramePlace, Recorded
from shardkeep.codec.keys import KeySource, RememberedKeys
from shardkeep.codec.known import config_of, known_codecs
from shardkeep.codec.problems import CodecFailed, DamagedFrame, InvalidCodec, OversizedFrame
from shardkeep.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MOST_CODECS = 16
_HINT = "use another checkpoint, or another copy of this one"


class Chain:
    """
    The codecs of one checkpoint, opened: safe to use from any number of threads.

    Made by `Chain.begin` for a new checkpoint, on one rank, and by `Chain.opened` from what that recorded, on every
    other rank and by readers. Without codecs it passes bytes on as they are.
    """

    def __init__(self, recorded: Sequence[Recorded], codecs: Sequence[Codec]) -> None:
        self.recorded = [dict(each) for each in recorded]
        """What the checkpoint keeps of each codec, in the order of writing."""
        self._codecs = tuple(codecs)

    @classmethod
    def begin(cls, codecs: Sequence[str | CodecConfig], *, keys: KeySource | None = None) -> Chain:
        """
        Begin a new checkpoint: choose its data keys and whatever else is its own.

        Args:
            codecs: Names ("float", "zstd", "zstd:3", "aes") or configs, in the order in which bytes pass them.
            keys: Whoever wraps the data keys of codecs that encrypt.

        Raises:
            UnknownCodec: there is no codec of a name.
            InvalidCodec: what was given are not codecs, or too many.
            CodecUnavailable: a codec needs a package that is not installed.
            KeyMissing: a codec encrypts, and `keys` is None.

        """
        if isinstance(codecs, (str, CodecConfig)):
            codecs = [codecs]
        keys = None if keys is None else RememberedKeys(keys)  # what was wrapped just now need not be asked for
        return cls.opened([config_of(each).begin(keys) for each in codecs], keys=keys)

    @classmethod
    def opened(cls, recorded: Sequence[Recorded], *, keys: KeySource | None = None) -> Chain:
        """
        Open the chain of a checkpoint from what it recorded.

        Raises:
            UnknownCodec: a codec, or its version, is not known here.
            InvalidCodec: what is recorded makes no sense.
            CodecUnavailable: a codec needs a package that is not installed.
            KeyMissing: a codec encrypts, and `keys` is None.
            WrongKey: a codec encrypts, and none of the keys opens it.

        """
        if len(recorded) > _MOST_CODECS:
            raise InvalidCodec(f"a chain of {len(recorded)} codecs; {_MOST_CODECS} are the most")
        return cls(recorded, [_opened(each, keys) for each in recorded])

    @property
    def names(self) -> list[str]:
        """The names of its codecs, in the order of writing."""
        return [each["name"] for each in self.recorded]

    @property
    def is_secret(self) -> bool:
        """Whether what it stores can be read only with a key, and `mac` gives a code."""
        return any(isinstance(each, Authenticates) for each in self._codecs)

    def bound(self, nbytes: int) -> int:
        """Return the most bytes that a frame of so many plain ones takes when it is stored."""
        for codec in self._codecs:
            nbytes = codec.bound(nbytes)
        return nbytes

    def encode(self, data: memoryview, place: FramePlace) -> Buffer:
        """
        Return what is stored for a frame; without codecs that is `data` itself.

        Raises:
            CodecFailed: a codec failed.

        """
        _check_place(data, place)
        stored: Buffer = data
        for codec, name in zip(self._codecs, self.names, strict=True):
            view = _bytes_of(stored)
            try:
                stored = codec.encode(view, place)
                size = memoryview(stored).nbytes
            except (CheckpointError, MemoryError):
                raise
            except Exception as exc:
                raise CodecFailed(f"the codec {name!r} failed on {_named(place)}: {exc!r}") from exc
            if size > codec.bound(view.nbytes):
                raise CodecFailed(
                    f"the codec {name!r} made {size} bytes of {view.nbytes}, and {codec.bound(view.nbytes)} are its bound",
                    hint="its method `bound` is wrong",
                )
        return stored

    def decode(self, stored: memoryview, into: memoryview, place: FramePlace) -> None:
        """
        Fill `into` with the plain bytes of a frame. After an error its contents mean nothing.

        Raises:
            DamagedFrame: (a DamagedCheckpoint) they cannot be had from what is stored.

        """
        _check_place(into, place)
        bounds = [place.nbytes]
        for codec in self._codecs[:-1]:
            bounds.append(codec.bound(bounds[-1]))
        data, filled = _bytes_of(stored), False
        for at in reversed(range(len(self._codecs))):
            codec, name = self._codecs[at], self.recorded[at]["name"]
            try:
                if at == 0 and isinstance(codec, DecodesInto):
                    size, filled = codec.decode_into(data, place, into), True
                else:
                    data = _bytes_of(codec.decode(data, place, bounds[at]))
                    size = data.nbytes
            except (CheckpointError, MemoryError):
                raise
            except Exception as exc:
                raise DamagedFrame(
                    f"the codec {name!r} cannot read {_named(place)}: {exc!r}", hint=_HINT, file=place.file
                ) from exc
            if size > bounds[at]:
                raise OversizedFrame(
                    f"{_named(place)} became {size} bytes in the codec {name!r}, and {bounds[at]} are the most it may be",
                    hint=_HINT,
                    file=place.file,
                )
        size = size if filled else data.nbytes
        if size != place.nbytes:
            raise DamagedFrame(
                f"{_named(place)} became {size} bytes instead of {place.nbytes}", hint=_HINT, file=place.file
            )
        if not filled:
            into[:] = data

    def mac(self, data: bytes) -> bytes | None:
        """Return a code that proves, to those who have the key, that `data` are as written; None without a secret."""
        for codec in reversed(self._codecs):
            if isinstance(codec, Authenticates):
                return codec.mac(data)
        return None


def rewrapped(recorded: Sequence[Recorded], keys: KeySource) -> list[Recorded]:
    """
    Return what is recorded of a chain with its data keys wrapped by the key that `keys` wraps with now.

    Data stay as they are: to change a key, only the record is written anew.

    Raises:
        WrongKey: none of the keys opens what is recorded.

    """
    return [_class_of(each).rewrap(each, keys) for each in recorded]


def _class_of(recorded: Recorded) -> type[CodecConfig]:
    name = recorded.get("name") if isinstance(recorded, dict) else None
    if not isinstance(name, str):
        raise InvalidCodec(f"the checkpoint records {recorded!r} as one of its codecs, which has no name")
    cls = known_codecs().find(name)
    cls.check_version(recorded)
    return cls


def _opened(recorded: Recorded, keys: KeySource | None) -> Codec:
    return _class_of(recorded).open(recorded, keys)


def _check_place(data: memoryview, place: FramePlace) -> None:
    if data.nbytes != place.nbytes:
        raise CodecFailed(f"{data.nbytes} bytes were given for {_named(place)}, which has {place.nbytes}")


def _bytes_of(data: Buffer) -> memoryview:
    view = memoryview(data)
    # What is empty cannot be cast, and need not be.
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _named(place: FramePlace) -> str:
    return f"frame {place.number} of {place.file} (bytes {place.offset} to {place.offset + place.nbytes})"
