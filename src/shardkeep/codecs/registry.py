"""
Which codecs there are: those that come with shardkeep, those a program registers, and those that packages bring.

A package brings a codec by an entry point of the group `shardkeep.codecs`, whose name is the codec's. It is imported
when a codec of this name is asked for, and not before.
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
        Make a codec known by its name, in place of another one of this name; returns it, so it can decorate.

        Raises:
            InvalidCodec: it is no codec, or its name is one of ours or none.

        """
        if not (isinstance(cls, type) and issubclass(cls, CodecConfig)):
            raise InvalidCodec(f"{cls!r} is not a subclass of CodecConfig")
        if not cls.name or ":" in cls.name:
            raise InvalidCodec(
                f"{cls.__name__} has the name {cls.name!r}", hint="set the class attribute `name`, without a colon"
            )
        if cls.name in _OURS:
            # What "zstd" means in a checkpoint must not depend on what a program imported.
            raise InvalidCodec(f"{cls.name!r} is a codec of shardkeep", hint="give yours another name")
        with self._lock:
            self._classes[cls.name] = cls
        return cls

    def find(self, name: str) -> type[CodecConfig]:
        """
        Return the codec of a name.

        Raises:
            UnknownCodec: there is none.
            InvalidCodec: an entry point of this name leads to something else.

        """
        if name in _OURS:
            module, attribute = _OURS[name]
            found: type[CodecConfig] = getattr(import_module(module), attribute)
            return found
        with self._lock:
            registered = self._classes.get(name)
        return registered if registered is not None else self._from_packages(name)

    def names(self) -> list[str]:
        """Return every name that `find` knows."""
        with self._lock:
            return sorted({*_OURS, *self._classes, *(each.name for each in entry_points(group=GROUP))})

    def _from_packages(self, name: str) -> type[CodecConfig]:
        for entry in entry_points(group=GROUP, name=name):
            cls = entry.load()
            if not (isinstance(cls, type) and issubclass(cls, CodecConfig)) or cls.name != name:
                raise InvalidCodec(
                    f"the entry point {name!r} of {GROUP} leads to {entry.value}, which is not a codec of this name",
                    hint="it has to be a subclass of shardkeep's CodecConfig with this `name`",
                )
            return self.register(cls)
        raise UnknownCodec(
            f"there is no codec named {name!r}; known are {', '.join(self.names())}",
            hint="install the package that brings it, or call register_codec with its class before",
            codec=name,
        )


@cache
def known_codecs() -> CodecRegistry:
    """Return the registry of this process."""
    return CodecRegistry()


def register_codec(cls: type[CodecConfig]) -> type[CodecConfig]:
    """Make a codec known to this process, by its `name`. Every process that reads or writes with it has to."""
    return known_codecs().register(cls)


def codec_config(codec: str | CodecConfig) -> CodecConfig:
    """
    Return the config that a user means: itself, or the one of a name, which may have an argument ("zstd:3").

    Raises:
        UnknownCodec: there is no codec of this name.
        InvalidCodec: it is neither a name nor a config, or its argument makes no sense.

    """
    if isinstance(codec, CodecConfig):
        return codec
    if not isinstance(codec, str):
        raise InvalidCodec(f"{codec!r} is no codec", hint='give names ("zstd") or configs (Zstd(level=3))')
    name, _, argument = codec.partition(":")
    return known_codecs().find(name).from_text(argument)
