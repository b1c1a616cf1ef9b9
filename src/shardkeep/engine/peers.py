"""
Shared reads: ranks that load the same bytes from slow storage fetch each of them once, and pass it on over TCP.

Rank 0 makes teams of ranks that want the same. Each range has one owner in the team, in turn, which fetches it from the
store and keeps it until all of the team have it, as far as its memory allows. This is only a shortcut: a rank whose
owner fails, is slow or is gone reads the range from the store itself. No rank waits for all others, and nothing uses a
process group.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from shardkeep.dist.world import World
from shardkeep.errors import CheckpointError
from shardkeep.options import Options
from shardkeep.storage import base
from shardkeep.storage.buffers import aligned_buffer, copy, flat
from shardkeep.storage.local import host_identity
from shardkeep.storage.wrapper import ReaderWrapper, StoreWrapper

log = logging.getLogger("shardkeep")

_MOST_IN_TEAM = 32
_RANGE_NBYTES = 8 << 20
_SHELF_FRACTION = 4
"""One in so many bytes of a rank's memory budget holds ranges for other ranks."""
_CONNECT_S = 3.0
_LEAST_ANSWER_S, _MOST_ANSWER_S = 5.0, 60.0
"""How long an owner may take for a range: ten times the slowest fetch of this rank, within these limits."""
_MEASURED = 8
"""Ranges after which a rank compares what peers and the store take."""
_MOST_OPEN = 256
_TOKEN_NBYTES = 16
_REQUEST = struct.Struct("<QIH")
"""Offset, size, and the length of the file name, which follows."""
_ANSWER = struct.Struct("<?")
"""Whether the bytes follow."""


class Offer(msgspec.Struct, frozen=True):
    """How a rank can be asked for what it has read, and a digest of what it wants."""

    wants: bytes
    machine: str
    host: str
    port: int
    token: bytes
    """A peer must send it first."""


class Team(msgspec.Struct, frozen=True):
    """Ranks that want the same bytes."""

    members: list[Offer]
    ranks: list[int]
    own: int
    """This rank's place in the lists."""


def make_teams(offers: Sequence[bytes]) -> list[bytes]:
    """Return the team of each rank, encoded; empty for a rank that has none."""
    groups: dict[bytes, list[int]] = {}
    decoded = {rank: msgspec.msgpack.decode(offer, type=Offer) for rank, offer in enumerate(offers) if offer}
    for rank, offer in decoded.items():
        groups.setdefault(offer.wants, []).append(rank)
    teams = [b""] * len(offers)
    for group in groups.values():
        for first in range(0, len(group), _MOST_IN_TEAM):
            ranks = group[first : first + _MOST_IN_TEAM]
            if len(ranks) > 1:
                members = [decoded[rank] for rank in ranks]
                for own, rank in enumerate(ranks):
                    teams[rank] = msgspec.msgpack.encode(Team(members, ranks, own))
    return teams


class _Range(NamedTuple):
    name: str
    offset: int
    nbytes: int


@dataclass
class _Held:
    data: memoryview
    ready: threading.Event = field(default_factory=threading.Event)
    failed: bool = False
    users: int = 0
    taken: int = 0
    """How often it was used: once by each rank of the team, then it can go."""


class _NotFetchedError(Exception):
    """Another thread could not fetch a range, or there is no memory for it."""


class _Shelf:
    """Ranges that this rank owns, each fetched once, in a bounded amount of memory."""

    def __init__(self, room_nbytes: int) -> None:
        self._room = room_nbytes
        self._changed = threading.Condition()
        self._held: dict[_Range, _Held] = {}
        self._nbytes = 0

    @contextmanager
    def lend(self, wanted: _Range, takers: int, fetch: Callable[[memoryview], None]) -> Iterator[memoryview]:
        """Give the bytes of a range, which so many ranks take, once each."""
        with self._changed:
            # Peers that take what they asked for too slowly may hold all of the memory.
            if not self._changed.wait_for(
                lambda: wanted in self._held or self._make_room(wanted.nbytes), _LEAST_ANSWER_S
            ):
                raise _NotFetchedError
            is_first = wanted not in self._held
            if is_first:
                self._held[wanted] = _Held(aligned_buffer(wanted.nbytes))
                self._nbytes += wanted.nbytes
            held = self._held[wanted]
            held.users += 1
        try:
            if is_first:
                try:
                    fetch(held.data)
                except BaseException:
                    held.failed = True
                    raise
                finally:
                    held.ready.set()
            held.ready.wait()
            if held.failed:
                raise _NotFetchedError
            yield held.data
        finally:
            with self._changed:
                held.users -= 1
                held.taken += 1
                if not held.users and (held.failed or held.taken >= takers):
                    self._drop(wanted, held)
                self._changed.notify_all()

    def _make_room(self, nbytes: int) -> bool:
        """Drop ranges, oldest first, that no thread uses; return whether there is room now. One range always fits."""
        for wanted, held in [*self._held.items()]:
            if self._nbytes + nbytes <= self._room:
                break
            if not held.users:
                self._drop(wanted, held)
        return self._nbytes + nbytes <= self._room or not self._held

    def _drop(self, wanted: _Range, held: _Held) -> None:
        if self._held.get(wanted) is held:
            del self._held[wanted]
            self._nbytes -= wanted.nbytes


@dataclass
class _Pace:
    ranges: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.ranges += 1
        self.nbytes += nbytes
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)

    @property
    def s_per_byte(self) -> float:
        return self.seconds / max(self.nbytes, 1)


class Peers:
    """One rank's part in shared reads, for one load. Closed when all ranks have read."""

    def __init__(self, store: base.Store, world: World, room_nbytes: int) -> None:
        """Nothing is shared before `join`."""
        self._world, self._room = world, room_nbytes
        self._token = secrets.token_bytes(_TOKEN_NBYTES)
        self._team: Future[Team | None] = Future()
        self._shelf = _Shelf(room_nbytes)
        self._lock = threading.Lock()
        self._closing = ExitStack()
        self._idle: dict[int, list[socket.socket]] = {}
        self._readers: dict[str, base.BlobReader] = {}
        self._lost: set[int] = set()
        self._from_store, self._from_peers = _Pace(), _Pace()
        self.store = PeerStore(store, self)

    @property
    def received_nbytes(self) -> int:
        return self._from_peers.nbytes

    @property
    def team(self) -> Team | None:
        """The ranks that want the same bytes, when that is known and there are others."""
        return self._team.result() if self._team.done() else None

    def remaining(self, options: Options) -> Options:
        """Return options with the memory that is left for this rank's own reads."""
        return replace(options, host_budget_bytes=options.host_budget_bytes - self._room)

    def offer(self, wants: bytes) -> bytes:
        """Begin to listen; return this rank's offer, or nothing if it cannot be reached."""
        try:
            host = _own_address(self._world)
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            server = socket.create_server(("", 0), family=family, backlog=256, dualstack_ipv6=both)
        except OSError as error:
            log.info("reads are not shared: rank %d cannot listen: %s", self._world.rank, error)
            return b""
        self._close_later(server)
        threading.Thread(target=self._accept, args=(server,), name="shardkeep-peers", daemon=True).start()
        port = server.getsockname()[1]
        return msgspec.msgpack.encode(Offer(wants, host_identity(), host, port, self._token))

    def join(self, team: bytes) -> None:
        self._team.set_result(msgspec.msgpack.decode(team, type=Team) if team else None)

    def close(self) -> None:
        """Stop: peers that still ask read for themselves."""
        with self._lock:
            closing = self._closing.pop_all()
        with suppress(OSError):
            closing.close()

    def _close_later(self, connection: socket.socket) -> None:
        with self._lock:
            self._closing.callback(_shut_down, connection)

    # -- answering -----------------------------------------------------------------------------------------------------

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # it is closed when the load ends
            while True:
                connection, _ = server.accept()
                self._close_later(connection)
                threading.Thread(target=self._answer, args=(connection,), name="shardkeep-peer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            connection.settimeout(_MOST_ANSWER_S)
            if not hmac.compare_digest(_receive(connection, _TOKEN_NBYTES), self._token):
                return
            wait([self._team], _MOST_ANSWER_S)
            team = self.team
            while True:
                connection.settimeout(None)  # until the next question
                offset, nbytes, length = _REQUEST.unpack(_receive(connection, _REQUEST.size))
                connection.settimeout(_MOST_ANSWER_S)
                wanted = _Range(bytes(_receive(connection, length)).decode(), offset, nbytes)
                try:
                    if nbytes > _RANGE_NBYTES or team is None:
                        raise _NotFetchedError
                    with self._shelf.lend(wanted, len(team.members), partial(self._fetch, wanted)) as data:
                        connection.sendall(_ANSWER.pack(True))
                        connection.sendall(data)
                except (CheckpointError, _NotFetchedError):
                    connection.sendall(_ANSWER.pack(False))

    def _fetch(self, wanted: _Range, into: memoryview) -> None:
        """Read a range that a peer wants from the store."""
        with self._lock:
            reader = self._readers.get(wanted.name)
        if reader is None:
            reader = self.store.inner.open(wanted.name)
            with self._lock:
                if len(self._readers) < _MOST_OPEN and wanted.name not in self._readers:
                    self._readers[wanted.name] = reader
                    self._closing.callback(reader.close)
        with nullcontext() if self._readers.get(wanted.name) is reader else closing(reader):
            self._timed(partial(reader.read_into, wanted.offset), into)

    def _timed(self, fetch: Callable[[memoryview], None], into: memoryview) -> None:
        began_s = time.monotonic()
        fetch(into)
        with self._lock:
            self._from_store.add(len(into), time.monotonic() - began_s)

    # -- asking --------------------------------------------------------------------------------------------------------

    def read(self, name: str, offset: int, into: memoryview, alone: Callable[[int, memoryview], None]) -> None:
        """Fill `into` from this rank's share, from the range's owner, or if that fails from the store."""
        team = self.team
        for at in range(0, len(into), _RANGE_NBYTES):
            view = into[at : at + _RANGE_NBYTES]
            wanted = _Range(name, offset + at, len(view))
            fetch = partial(self._timed, partial(alone, wanted.offset))
            owner = (crc32(name.encode()) + wanted.offset // wanted.nbytes) % len(team.members) if team else 0
            if team is None or owner in self._lost:
                alone(wanted.offset, view)
            elif owner == team.own:
                try:
                    with self._shelf.lend(wanted, len(team.members), fetch) as data:
                        copy(view, data)
                except _NotFetchedError:
                    alone(wanted.offset, view)
            elif not self._ask(team, owner, wanted, view):
                fetch(view)

    def _ask(self, team: Team, owner: int, wanted: _Range, into: memoryview) -> bool:
        """Ask the owner of a range for it; return False if it does not send it."""
        connection = None
        try:
            connection = self._connection(team, owner)
            name = wanted.name.encode()
            connection.sendall(_REQUEST.pack(wanted.offset, wanted.nbytes, len(name)) + name)
            if _ANSWER.unpack(_receive(connection, _ANSWER.size)) == (False,):
                with self._lock:
                    self._idle.setdefault(owner, []).append(connection)
                return False
            began_s = time.monotonic()
            _receive_into(connection, into)
        except (OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            with self._lock:
                is_news = owner not in self._lost
                self._lost.add(owner)
            if is_news:
                log.warning(
                    "rank %d does not get from rank %d what that reads for it (%s), and reads it from %s itself",
                    self._world.rank,
                    team.ranks[owner],
                    str(error) or "the connection was closed",
                    self.store.url,
                )
            return False
        with self._lock:
            self._idle.setdefault(owner, []).append(connection)
            self._from_peers.add(wanted.nbytes, time.monotonic() - began_s)
            peers, store = self._from_peers, self._from_store
            if min(peers.ranges, store.ranges) >= _MEASURED and peers.s_per_byte > store.s_per_byte:
                log.info("the store is faster than the network: rank %d no longer shares its reads", self._world.rank)
                self._lost.update(range(len(team.members)))
        return True

    def _connection(self, team: Team, owner: int) -> socket.socket:
        with self._lock:
            answer_s = min(_MOST_ANSWER_S, max(_LEAST_ANSWER_S, 10 * self._from_store.slowest_s))
            if idle := self._idle.get(owner):
                found = idle.pop()
                found.settimeout(answer_s)
                return found
        member = team.members[owner]
        host = "127.0.0.1" if member.machine == team.members[team.own].machine else member.host
        connection = socket.create_connection((host, member.port), timeout=_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(answer_s)
        self._close_later(connection)
        connection.sendall(member.token)
        return connection


def peers_of(store: base.Store, world: World, options: Options) -> Peers | None:
    shares = base.is_remote(store) if options.share_reads is None else options.share_reads
    if not shares:
        return None
    return Peers(store, world, options.host_budget_bytes // _SHELF_FRACTION)


class PeerStore(StoreWrapper):
    def __init__(self, inner: base.Store, peers: Peers) -> None:
        super().__init__(inner)
        self._peers = peers
        self._again: set[str] = set()

    @property
    def local_path(self) -> str | None:
        return base.local_path(self.inner)

    def any_names(self) -> PeerStore:
        return PeerStore(base.with_any_names(self.inner), self._peers)

    def drop_cached(self, name: str, offset: int, nbytes: int) -> None:
        """Bytes that were damaged are read from the store itself."""
        self._again.add(name)
        base.drop_cached(self.inner, name, offset, nbytes)

    def wrap_reader(self, reader: base.BlobReader, name: str) -> base.BlobReader:
        return reader if name in self._again else _PeerReader(reader, self._peers, name)


class _PeerReader(ReaderWrapper):
    def __init__(self, inner: base.BlobReader, peers: Peers, name: str) -> None:
        super().__init__(inner, name=name)
        self._peers = peers

    def prefetch(self, offset: int, nbytes: int) -> None:
        """Most of it comes from peers."""

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002
        self._peers.read(self.name, offset, flat(into), self.inner.read_into)


def _own_address(world: World) -> str:
    """Return the address under which the machine that holds the key-value store sees this one."""
    store: Any = world.store
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host = getattr(store, "host", None) or socket.gethostname()
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only chooses a route
        return str(probe.getsockname()[0])


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
    connection.close()


def _receive(connection: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    _receive_into(connection, memoryview(data))
    return data


def _receive_into(connection: socket.socket, into: memoryview) -> None:
    """Fill all of `into` within the connection's timeout: a peer that sends a little at a time is as good as lost."""
    timeout_s = connection.gettimeout()
    until = time.monotonic() + (timeout_s or 0)
    done = 0
    while done < len(into):
        if timeout_s is not None:
            connection.settimeout(max(1e-3, until - time.monotonic()))
        got = connection.recv_into(into[done:])
        if not got:
            raise EOFError
        done += got
        if timeout_s is not None and done < len(into) and time.monotonic() > until:
            raise TimeoutError("timed out")
    connection.settimeout(timeout_s)
