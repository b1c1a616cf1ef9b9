"""
Codecs as a stream extension: what DCP's storage writers and readers can pass values through.

A stream begins with an id of its own; frames follow, each with its size before and after coding; the last one is
empty, so that a stream that was cut is told from one that ended. With encryption frames are bound to their stream and
their place in it. Which stream belongs to which value the extension is not told: that whole streams were exchanged
within a file it cannot notice, as `shardkeep.save` does.
"""

from __future__ import annotations

import io
import json
import secrets
import struct
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

from shardkeep.codec.codecs import FRAME_NBYTES, WRAPPED, CodecConfig, FramePlace
from shardkeep.codec.extensions import StreamTransformExtension
from shardkeep.codec.frame_chain import Chain
from shardkeep.codec.keys import KeyRing, Keys, RememberedKeys, key_source
from shardkeep.codec.problems import DamagedFrame, UnknownExtension
from shardkeep.options import setting

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

_ID_NBYTES = 16
_SIZES = struct.Struct("<QQ")
_VERSION = "1"
_HINT = "the file was cut short or damaged: use another checkpoint, or another copy of this one"


class CodecStream(StreamTransformExtension):
    """
    Passes values through codecs: `FileSystemWriter(path, _extensions=[CodecStream(["float", "aes"])])`.

    Readers need nothing but the keys, from SHARDKEEP_KEY_FILE or SHARDKEEP_KEY; or a registry on which
    `CodecStream.reading_with(keys)` is registered.

    Args:
        codecs: Names or configs of codecs, in the order in which bytes pass them.
        keys: Whoever wraps the data key, if a codec encrypts. By default as the environment says.

    """

    _reading_keys: ClassVar[RememberedKeys | None] = None

    def __init__(self, codecs: Sequence[str | CodecConfig], *, keys: Keys = None) -> None:
        super().__init__()
        self._keys = _remembered(keys)
        self._recorded = Chain.begin(codecs, keys=self._keys).recorded

    @staticmethod
    def registry_name() -> str:
        """Return the name that readers know it by."""
        return "stream.shardkeep"

    @classmethod
    def from_descriptor(cls, version: str) -> Self:
        """
        Make the extension that left a descriptor.

        Raises:
            UnknownExtension: (a ValueError) a later version of shardkeep wrote it, or it was changed.

        """
        number, _, text = version.partition(":")
        if number != _VERSION:
            raise UnknownExtension(f"Unknown extension {version=} of {cls.registry_name()}; known is {_VERSION}")
        try:
            recorded = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise UnknownExtension(f"what {cls.registry_name()} recorded cannot be read: {version!r}") from exc
        if not isinstance(recorded, list):
            raise UnknownExtension(f"what {cls.registry_name()} recorded is no list of codecs: {version!r}")
        made = cls.__new__(cls)
        made._recorded = recorded
        # A key file that is not there matters only to those who need it.
        is_secret = any(isinstance(each, dict) and WRAPPED in each for each in recorded)
        made._keys = _remembered(cls._reading_keys) if is_secret else None
        return made

    @classmethod
    def reading_with(cls, keys: Keys) -> type[CodecStream]:
        """Return this extension with keys to read with, to be registered on a reader's registry."""
        names = {"_reading_keys": _remembered(keys), "__doc__": cls.__doc__, "__module__": __name__}
        return type(cls.__name__, (cls,), names)

    def get_descriptor(self) -> str:
        """Return what is stored with each value: the codecs and, wrapped, the data key."""
        return f"{self.registry_name()}/{_VERSION}:{json.dumps(self._recorded, separators=(',', ':'))}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that codes to `output`, and closes it when it is closed itself."""
        return cast("IO[bytes]", _Writer(self._chain(), output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        """Return a stream that gives what was coded to `input`."""
        return cast("IO[bytes]", _Reader(self._chain(), input))

    def _chain(self) -> Chain:
        # Not kept: the extension travels to other processes with its storage writer, and what is open does not.
        return Chain.opened(self._recorded, keys=self._keys)


class _Writer(io.RawIOBase):
    def __init__(self, chain: Chain, output: IO[bytes]) -> None:
        self._chain = chain
        self._output = output
        self._held = bytearray()
        self._id = secrets.token_bytes(_ID_NBYTES)
        self._place = _Places(self._id)
        self._began = self._ended = False

    def writable(self) -> bool:
        return True

    def write(self, b: Buffer, /) -> int:
        if self._ended:
            raise ValueError("write to a closed stream of codecs")
        rest = memoryview(b).cast("B")
        nbytes = len(rest)
        while rest:
            if not self._held and len(rest) >= FRAME_NBYTES:
                self._pass_on(rest[:FRAME_NBYTES])
                rest = rest[FRAME_NBYTES:]
                continue
            room = FRAME_NBYTES - len(self._held)
            self._held += rest[:room]
            rest = rest[room:]
            if len(self._held) == FRAME_NBYTES:
                self._pass_on_held()
        return nbytes

    def flush(self) -> None:
        if not self._ended:
            self._output.flush()

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            if self._held:
                self._pass_on_held()
            self._pass_on(memoryview(b""))
        finally:
            super().close()
            self._output.close()

    def _pass_on_held(self) -> None:
        held, self._held = self._held, bytearray()
        self._pass_on(memoryview(held))

    def _pass_on(self, data: memoryview) -> None:
        stored = memoryview(self._chain.encode(data, self._place(len(data))))
        head = _SIZES.pack(len(data), stored.nbytes)
        self._output.write(head if self._began else self._id + head)
        self._began = True
        self._output.write(cast("Any", stored))


class _Reader(io.RawIOBase):
    def __init__(self, chain: Chain, source: IO[bytes]) -> None:
        self._chain = chain
        self._source = source
        self._place: _Places | None = None
        self._ready = memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        if len(view) and not self._ready and not self._ended:
            self._next()
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _next(self) -> None:
        """Decode the next frame."""
        if self._place is None:
            self._place = _Places(self._exactly(_ID_NBYTES))
        nbytes, stored_nbytes = _SIZES.unpack(self._exactly(_SIZES.size))
        if nbytes > FRAME_NBYTES or stored_nbytes > self._chain.bound(nbytes):
            raise DamagedFrame("a stream of codecs has a frame of a size that none has", hint=_HINT)
        plain = bytearray(nbytes)
        self._chain.decode(memoryview(self._exactly(stored_nbytes)), memoryview(plain), self._place(nbytes))
        self._ready = memoryview(plain)
        if not nbytes:
            self._ended = True
            if self._source.read(1):
                raise DamagedFrame("there is more behind the end of a stream of codecs", hint=_HINT)

    def _exactly(self, nbytes: int) -> bytes:
        pieces = []
        while nbytes:
            piece = self._source.read(nbytes)
            if not piece:
                raise DamagedFrame("a stream of codecs ends within a frame, or before its end", hint=_HINT)
            pieces.append(piece)
            nbytes -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Places:
    """The places of the frames of a stream, one after the other."""

    def __init__(self, stream_id: bytes) -> None:
        self._file = f"stream {stream_id.hex()}"
        self._number = 0
        self._offset = 0

    def __call__(self, nbytes: int) -> FramePlace:
        """Return the place of the next frame."""
        place = FramePlace(self._file, self._number, self._offset, nbytes)
        self._number += 1
        self._offset += nbytes
        return place


def _remembered(keys: Keys) -> RememberedKeys | None:
    """Return the keys that were given, or those of the environment; a stream is opened for each value."""
    if isinstance(keys, RememberedKeys):
        return keys
    source = key_source(keys)
    if source is None and (file := setting("SHARDKEEP_KEY_FILE")):
        source = KeyRing.from_file(file)
    elif source is None and (text := setting("SHARDKEEP_KEY")):
        source = KeyRing.from_text(text, named="SHARDKEEP_KEY")
    return None if source is None else RememberedKeys(source)
