"""
Errors of stream extensions, codecs and keys.

Those of extensions are also the ValueError that callers of torch's checkpoint expect.

    UnknownExtension        (ValueError)    a stored descriptor names an extension that is not known here
    ExtensionUnavailable    (ValueError)    an extension needs a module that is not installed
    UnknownCodec            (ValueError)    no codec of this name, or none of this version, is known here
    InvalidCodec            (ValueError)    a codec was asked for in a way that makes no sense
    CodecUnavailable        (ImportError)   a codec needs a package that is not installed
    CodecFailed             (RuntimeError)  a codec broke its contract, or failed, while writing
    DamagedFrame            (DamagedCheckpoint)  a stored frame cannot be turned back into what was written
    ├── NotAuthentic        an encrypted frame, or what was recorded with it, was changed, moved or exchanged
    └── OversizedFrame      a frame that would become larger than what was written: a bomb, or damage
    KeyMissing              (LookupError)   it is encrypted, and no key was given
    WrongKey                (ValueError)    it is encrypted, and none of the keys given opens it
    InvalidKey              (ValueError)    what was given as a key is none
"""

from __future__ import annotations

from shardkeep.errors import CheckpointError, DamagedCheckpoint


class UnknownExtension(CheckpointError, ValueError):
    """A stored descriptor names an extension, or a version of one, that is not known here."""


class ExtensionUnavailable(CheckpointError, ValueError):
    """An extension needs a module that is not installed."""


class UnknownCodec(CheckpointError, ValueError):
    """No codec of this name, or none of this version, is known here."""


class InvalidCodec(CheckpointError, ValueError):
    """A codec was asked for in a way that makes no sense, or its class cannot be one."""


class CodecUnavailable(CheckpointError, ImportError):
    """A codec needs a package that is not installed."""


class CodecFailed(CheckpointError, RuntimeError):
    """A codec failed while writing, or gave more than it said it would."""


class DamagedFrame(DamagedCheckpoint):
    """A stored frame cannot be turned back into what was written."""


class NotAuthentic(DamagedFrame):
    """What is encrypted, or was recorded with it, was changed, cut, moved or exchanged."""


class OversizedFrame(DamagedFrame):
    """A stored frame stands for more bytes than were written."""


class KeyMissing(CheckpointError, LookupError):
    """It is encrypted, or is to be, and no key was given."""


class WrongKey(CheckpointError, ValueError):
    """It is encrypted, and none of the keys that were given opens it."""


class InvalidKey(CheckpointError, ValueError):
    """What was given as a key is none."""
