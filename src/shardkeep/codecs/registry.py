"""
The registry of codecs: those of shardkeep, those that a program registers, and those of installed packages.

A package provides a codec by an entry point of the group `shardkeep.codecs` with the codec's name. It is imported when a
codec of this name is first needed.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from shardkeep.codecs.base import CodecConfig
from shardkeep.errors import InvalidCodec, UnknownCodec

GROUP = "shardkeep.codecs"
_OURS = {
    "zstd": ("shardkeep.codecs.zstd", "Zstd"),
    "lz4": ("shardkeep.codecs.lz4", "Lz4"),
    "float": ("shardkeep.codecs.float", "Float"),
    "aes": ("shardkeep.codecs.aes", "Aes"),
}


class CodecRegistry:
    """Codecs by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._classes: dict[str, type[CodecConfig]] = {}

    def register(self, cls: type[CodecConfig]) -> type[CodecConfig]:
        """
        Register a codec by its name, replacing another of this name; returns the class, so that it can decorate.

        Raises:
            InvalidCodec: the class is not a codec, or its name is missing or one of shardkeep's.

        """
        if not (isinstance(cls, type) and issubclass(cls, CodecConfig)):
            raise InvalidCodec(f"{cls!r} is not a subclass of CodecConfig")
        if not cls.name or ":" in cls.name:
            raise InvalidCodec(
                f"{cls.__name__} has the name {cls.name!r}", hint="set the class attribute `name`, without a colon"
            )
        if cls.name in _OURS:
            # The meaning of "zstd" in a checkpoint must not depend on what a program has imported.
            raise InvalidCodec(f"{cls.name!r} is a codec of shardkeep", hint="give yours another name")
        with self._lock:
            self._classes[cls.name] = cls
        return cls

    def find(self, name: str) -> type[CodecConfig]:
        """
        Return the codec of a name.

        Raises:
            UnknownCodec: there is none.
            InvalidCodec: the entry point of this name is not a codec.

        """
        if name in _OURS:
            module, attribute = _OURS[name]
            found: type[CodecConfig] = getattr(import_module(module), attribute)
            return found
        with self._lock:
            registered = self._classes.get(name)
        return registered if registered is not None else self._from_packages(name)

    def names(self) -> list[str]:
        """Return all names of codecs."""
        with self._lock:
            return sorted({*_OURS, *self._classes, *(each.name for each in entry_points(group=GROUP))})

    def _from_packages(self, name: str) -> type[CodecConfig]:
        for entry in entry_points(group=GROUP, name=name):
            cls = entry.load()
            if not (isinstance(cls, type) and issubclass(cls, CodecConfig)) or cls.name != name:
                raise InvalidCodec(
                    f"the entry point {name!r} of {GROUP} is {entry.value}, which is not a codec of this name",
                    hint="it must be a subclass of shardkeep's CodecConfig with this `name`",
                )
            return self.register(cls)
        raise UnknownCodec(
            f"there is no codec named {name!r}; the codecs are {', '.join(self.names())}",
            hint="install the package that provides it, or call register_codec with its class first",
            codec=name,
        )


@cache
def known_codecs() -> CodecRegistry:
    """Return the registry of this process."""
    return CodecRegistry()


def register_codec(cls: type[CodecConfig]) -> type[CodecConfig]:
    """Register a codec in this process, by its `name`. Every process that reads or writes with it must do so."""
    return known_codecs().register(cls)


def codec_config(codec: str | CodecConfig) -> CodecConfig:
    """
    Return a config, or the config of a name, which may have an argument ("zstd:3").

    Raises:
        UnknownCodec: there is no codec of this name.
        InvalidCodec: it is neither a name nor a config, or its argument is invalid.

    """
    if isinstance(codec, CodecConfig):
        return codec
    if not isinstance(codec, str):
        raise InvalidCodec(f"{codec!r} is not a codec", hint='pass names ("zstd") or configs (Zstd(level=3))')
    name, _, argument = codec.partition(":")
    return known_codecs().find(name).from_text(argument)
