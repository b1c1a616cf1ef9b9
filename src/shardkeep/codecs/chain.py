"""
Chains of codecs over the frames of a file, and the registry that finds codecs by name.

Codecs are ours, registered by a program, or entry points of installed packages (group `shardkeep.codecs`), which are
imported when they are first needed. Frames pass through a chain in the given order, and back in reverse. Encryption
depends on three rules: with one chain, no file name is used twice for different contents; no two frames of a file have one
number; and a frame is read with exactly the place it was written with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points

from typing_extensions import Buffer

from shardkeep.codecs import base
from shardkeep.codecs.keys import CachedKeys, KeySource
from shardkeep.errors import CheckpointError, CodecFailed, InvalidCodec, UnknownCodec
from shardkeep.storage.buffers import flat

_Step = Callable[[memoryview, base.FramePlace], Buffer]


class CodecChain:
    """
    The open codecs of one checkpoint; can be used by any number of threads.

    `CodecChain.begin` makes it for a new checkpoint, on one rank; `CodecChain.opened` makes it from the records, on every
    other rank and for readers. Without codecs it does not change the bytes.
    """

    def __init__(self, recorded: Sequence[base.CodecRecord], codecs: Sequence[base.Codec]) -> None:
        self.recorded = [dict(each) for each in recorded]
        self._codecs = tuple(codecs)

    @classmethod
    def begin(cls, codecs: Sequence[str | base.CodecConfig], *, keys: KeySource | None = None) -> CodecChain:
        """Begin a new checkpoint: choose its parameters, and data keys that `keys` wraps."""
        if isinstance(codecs, (str, base.CodecConfig)):
            codecs = [codecs]
        cached = keys and CachedKeys(lambda: keys)  # a data key that was just wrapped is not unwrapped again
        return cls.opened([codec_config(each).begin(cached) for each in codecs], keys=cached)

    @classmethod
    def opened(cls, recorded: Sequence[base.CodecRecord], *, keys: KeySource | None = None) -> CodecChain:
        return cls(recorded, [_class_of(each).open(each, keys) for each in recorded])

    @property
    def is_secret(self) -> bool:
        """Whether stored bytes can only be read with a key, and `mac` returns a code."""
        return any(isinstance(each, base.Authenticates) for each in self._codecs)

    def bound(self, nbytes: int) -> int:
        for codec in self._codecs:
            nbytes = codec.bound(nbytes)
        return nbytes

    def encode(self, data: memoryview, places: Sequence[base.FramePlace]) -> list[Buffer]:
        """Return the stored form of each frame of `data` (see `EncodesMany`), without codecs its bytes; raises `CodecFailed`."""
        whole = flat(memoryview(data))
        steps: list[_Step] = [codec.encode for codec in self._codecs]
        if self._codecs and isinstance(self._codecs[0], base.EncodesMany):
            coded = _one_by_one(self._codecs[0], whole, places)
            steps[0] = lambda data, place: next(coded)  # noqa: ARG005 - they come in order
        nbytes = places[0].nbytes
        return [self._encoded(steps, whole[row * nbytes :][: place.nbytes], place) for row, place in enumerate(places)]

    def _encoded(self, steps: Sequence[_Step], data: memoryview, place: base.FramePlace) -> Buffer:
        stored: Buffer = data
        for step, codec, recorded in zip(steps, self._codecs, self.recorded, strict=True):
            view = flat(memoryview(stored))
            try:
                stored = step(view, place)
                size = flat(memoryview(stored)).nbytes
            except (CheckpointError, MemoryError):
                raise
            except Exception as exc:
                raise CodecFailed(f"the codec {recorded['name']!r} failed on {place.named}: {exc!r}") from exc
            if (most := codec.bound(view.nbytes)) < size:
                name = recorded["name"]
                raise CodecFailed(
                    f"the codec {name!r} made {size} bytes of {view.nbytes} from {place.named}; its bound is {most}",
                    hint="its method `bound` is wrong",
                )
        return stored

    def decode(self, stored: memoryview, into: memoryview, place: base.FramePlace) -> None:
        """Decode a frame into `into`, whose contents are undefined after an error. Raises `DamagedFrame`."""
        bounds = [place.nbytes]
        for codec in self._codecs[:-1]:
            bounds.append(codec.bound(bounds[-1]))
        data, filled = flat(memoryview(stored)), False
        for at in reversed(range(len(self._codecs))):
            codec, name = self._codecs[at], self.recorded[at]["name"]
            try:
                if at == 0 and isinstance(codec, base.DecodesInto):
                    size, filled = codec.decode_into(data, place, into), True
                else:
                    data = flat(memoryview(codec.decode(data, place, bounds[at])))
                    size = data.nbytes
            except (CheckpointError, MemoryError):
                raise
            except Exception as exc:
                raise base.damaged_frame(place, f"cannot be read by the codec {name!r}: {exc!r}") from exc
            if size > bounds[at]:
                what = f"became {size} bytes in the codec {name!r}, expected at most {bounds[at]}"
                raise base.damaged_frame(place, what)
        size = size if filled else data.nbytes
        if size != place.nbytes:
            raise base.damaged_frame(place, f"became {size} bytes instead of {place.nbytes}")
        if not filled:
            into[:] = data

    def mac(self, data: bytes) -> bytes | None:
        for codec in reversed(self._codecs):
            if isinstance(codec, base.Authenticates):
                return codec.mac(data)
        return None


def rewrapped(recorded: Sequence[base.CodecRecord], keys: KeySource) -> list[base.CodecRecord]:
    """Return the records of a chain with its data keys wrapped by the current key of `keys`; the data stay as they are."""
    return [_class_of(each).rewrap(each, keys) for each in recorded]


def _class_of(recorded: base.CodecRecord) -> type[base.CodecConfig]:
    name = recorded.get("name") if isinstance(recorded, dict) else None
    if not isinstance(name, str):
        raise InvalidCodec(f"the checkpoint records a codec without a name: {recorded!r}")
    cls = find_codec(name)
    cls.check_version(recorded)
    return cls


def _one_by_one(codec: base.EncodesMany, data: memoryview, places: Sequence[base.FramePlace]) -> Iterator[Buffer]:
    """Yield the encoded frames. As a generator it calls the codec, and fails, only when the first frame is needed."""
    yield from codec.encode_many(data, places)
    raise ValueError("it returned fewer frames than it was given")


GROUP = "shardkeep.codecs"
_OURS = {
    "zstd": ("shardkeep.codecs.compression", "Zstd"),
    "lz4": ("shardkeep.codecs.compression", "Lz4"),
    "float": ("shardkeep.codecs.float", "Float"),
    "aes": ("shardkeep.codecs.aes", "Aes"),
}
_registered: dict[str, type[base.CodecConfig]] = {}


def register_codec(cls: type[base.CodecConfig]) -> type[base.CodecConfig]:
    """Register a codec by its `name`, in place of another; every process that uses it must do so. Can be a decorator."""
    if not (isinstance(cls, type) and issubclass(cls, base.CodecConfig)):
        raise InvalidCodec(f"{cls!r} is not a subclass of CodecConfig")
    if not cls.name or ":" in cls.name:
        raise InvalidCodec(
            f"{cls.__name__} has the name {cls.name!r}", hint="set the class attribute `name`, without a colon"
        )
    if cls.name in _OURS:
        # The meaning of "zstd" in a checkpoint must not depend on what a program has imported.
        raise InvalidCodec(f"{cls.name!r} is a codec of shardkeep", hint="give yours another name")
    _registered[cls.name] = cls
    return cls


def find_codec(name: str) -> type[base.CodecConfig]:
    """Return the codec of a name: ours, a registered one, or one of an installed package."""
    if name in _OURS:
        module, attribute = _OURS[name]
        found: type[base.CodecConfig] = getattr(import_module(module), attribute)
        return found
    if name in _registered:
        return _registered[name]
    for entry in entry_points(group=GROUP, name=name):
        cls = entry.load()
        if not (isinstance(cls, type) and issubclass(cls, base.CodecConfig)) or cls.name != name:
            raise InvalidCodec(
                f"the entry point {name!r} of {GROUP} is {entry.value}, which is not a codec of this name",
                hint="it must be a subclass of shardkeep's CodecConfig with this `name`",
            )
        return register_codec(cls)
    names = sorted({*_OURS, *_registered, *(each.name for each in entry_points(group=GROUP))})
    raise UnknownCodec(
        f"there is no codec named {name!r}; the codecs are {', '.join(names)}",
        hint="install the package that provides it, or call register_codec with its class first",
        codec=name,
    )


def codec_config(codec: str | base.CodecConfig) -> base.CodecConfig:
    """Return a config, or the config of a name, which may have an argument ("zstd:3")."""
    if isinstance(codec, base.CodecConfig):
        return codec
    if not isinstance(codec, str):
        raise InvalidCodec(f"{codec!r} is not a codec", hint='pass names ("zstd") or configs (Zstd(level=3))')
    name, _, argument = codec.partition(":")
    return find_codec(name).from_text(argument)
