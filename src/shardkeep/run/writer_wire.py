"""
What a training process and the process that writes for it say to each other. Bytes of tensors are not among it: they
lie in memory that both see.

Each request has one reply, on the pipe it came from. What has none comes on a pipe of its own: all others may be in use
by those who wait for a reply.
"""

from __future__ import annotations

import msgspec

from shardkeep.codec.frame_chain import Chain
from shardkeep.codec.keys import RememberedKeys
from shardkeep.errors import Failure
from shardkeep.format.record import Recorded
from shardkeep.layout.frame_writer import Seal
from shardkeep.run.writer_places import Place


class Coded(msgspec.Struct, frozen=True):
    """The codecs that a file goes through."""

    recorded: Recorded
    data_keys: dict[str, str]
    """By what they are wrapped as: that process cannot ask the user for keys."""

    def __repr__(self) -> str:
        return f"Coded({[each.get('name') for each in self.recorded]})"  # no keys in a log

    def opened(self) -> Chain:
        """Open them here."""
        return Chain.opened(self.recorded, keys=RememberedKeys(known=self.data_keys))


class Create(msgspec.Struct, frozen=True, tag=True):
    """Begin a file; the reply says its number."""

    place: Place
    name: str
    nbytes: int
    coded: Coded | None = None
    room_nbytes: int = 0
    """For what a store copies on the way, of all files of the save; 0: what it has for all files together."""


class WriteRuns(msgspec.Struct, frozen=True, tag=True):
    """Hash and write runs of shared memory, end to end; the reply has the digests."""

    file: int
    offset: int
    """Where in the file."""
    block_nbytes: int
    region: int
    """Where in the shared memory the region begins that the runs are in."""
    region_nbytes: int
    starts: bytes
    """Where in the region each run begins; int64."""
    sizes: bytes
    """Of each run; int64."""


class WriteBytes(msgspec.Struct, frozen=True, tag=True):
    """Write a few bytes, such as a header."""

    file: int
    offset: int
    data: bytes


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Make a file durable; the reply has the seal of a coded one."""

    file: int
    nbytes: int | None = None
    """Where it ends; None: as it was created."""


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Remove a file, unless it is finished, and forget it."""

    file: int


Request = Create | WriteRuns | WriteBytes | Finish | Abandon


class GiveUp(msgspec.Struct, frozen=True):
    """Wait no longer for a store because of this file, nor for others of its save, which has failed; there is no reply."""

    name: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request."""

    file: int = 0
    digests: bytes = b""
    seal: Seal | None = None
    """Of a coded file that is finished."""
    failure: Failure | None = None
