"""From the descriptors stored with data to the extensions that read it."""

from __future__ import annotations

from collections.abc import Sequence

from shardkeep.codec.codec_stream import CodecStream
from shardkeep.codec.extensions import Extension
from shardkeep.codec.problems import UnknownExtension
from shardkeep.codec.zstd import ZStandard


class ExtensionRegistry:
    """The extensions that a reader knows: the ones that come with shardkeep, and those registered."""

    def __init__(self) -> None:
        self.extensions: dict[str, type[Extension]] = {each.registry_name(): each for each in (ZStandard, CodecStream)}

    def register(self, cls: type[Extension]) -> None:
        """Make an extension known, in place of another one of its name."""
        self.extensions[cls.registry_name()] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]:
        """
        Make the extensions that left these descriptors, in their order.

        What an extension raises because of a version passes through.

        Raises:
            UnknownExtension: (a ValueError) nothing is registered under a name.

        """
        return [self._from_descriptor(descriptor) for descriptor in descriptors]

    def _from_descriptor(self, descriptor: str) -> Extension:
        name, _, version = descriptor.partition("/")
        extension = self.extensions.get(name)
        if extension is None:
            raise UnknownExtension(
                f"Unknown extension {name=}; known are {sorted(self.extensions)}",
                hint="give the reader a registry (_extension_registry) on which the extension's class was registered",
                descriptor=descriptor,
            )
        return extension.from_descriptor(version)
