"""
What a stream extension is.

An extension changes bytes on their way to a file, and gives them back as they were when they are read. It leaves a
descriptor, "name[@local-domain][/version]", with the data; a reader makes the same extension from it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import IO


class Extension(ABC):
    """Something that changes what is written, and is known to readers by its descriptor."""

    @staticmethod
    @abstractmethod
    def registry_name() -> str:
        """Return the part of the descriptor before the version; readers find the class by it."""

    @staticmethod
    @abstractmethod
    def from_descriptor(version: str) -> Extension:
        """Make the extension that wrote a descriptor with this version; "" stands for none."""

    @abstractmethod
    def get_descriptor(self) -> str:
        """Return what is stored with the data: "name[@local-domain][/version]"."""


class StreamTransformExtension(Extension):
    """
    An extension that changes a stream of bytes: compression, encryption.

    Large tensors pass through in pieces; an implementation should hold one piece at a time and not the whole.
    """

    @abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that changes what is written to it, and writes the result to `output`."""

    @abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        """Return a stream that reads from `input`, and gives what was once written to `transform_to`'s."""
