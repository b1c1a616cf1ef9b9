"""
A network that goes wrong on purpose: a proxy between a client and an S3 server on this machine.

    with Proxy(server.port) as proxy:
        proxy.rules = [Rule("slow_down", method="PUT", times=3), Rule("cut_answer", path="safetensors", chance=0.2)]

Each request is judged once, by the first rule that wants it. What happens by chance depends on a seed and on how often
the like was asked for before, not on which thread came first. Everything is counted.
"""

import contextlib
import random
import re
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Fault = Literal[
    "refuse", "cut_request", "cut_answer", "end_answer", "lose_answer", "shorten_answer", "flip_request", "flip_answer",
    "slow_down", "broken", "stall", "delay", "trickle",
]  # fmt: skip
"""
refuse: the connection is reset before the request is passed on. cut_request, cut_answer: it is reset in the middle of the
body. end_answer: it is closed there, in good order. lose_answer: the server has done it, and the answer is lost.
shorten_answer: half of the body is missing, and the headers agree with that. flip_request, flip_answer: one bit of the
body is another. slow_down, broken: 503 and 500 are answered, and nothing is passed on. stall: nothing ever comes.
delay, trickle: it comes, but late, or slowly.
"""
_PIECE_BYTES = 256 << 10
_ID = re.compile(r"[0-9a-f]{8,}")


@dataclass(frozen=True)
class Request:
    """One request, as far as rules look at it."""

    method: str
    path: str
    """With its query."""
    nbytes: int
    """Of its body."""

    @property
    def like(self):
        """What it asks for, without names that are drawn by lot."""
        return f"{self.method} {_ID.sub('*', self.path)}"


@dataclass
class Rule:
    """Which requests go wrong, and how."""

    fault: Fault
    method: str = ""
    """A pattern; empty: any."""
    path: str = ""
    """A pattern that is found somewhere in it; empty: any."""
    times: int | None = None
    """How often at most."""
    after: int = 0
    """How many are spared first."""
    first: bool = False
    """Only what was not asked for before."""
    chance: float = 1.0
    delay_s: float = 0.0
    least: int = 0
    """Bytes that the request's body must have."""

    def wants(self, request):
        return bool(
            re.fullmatch(self.method or ".*", request.method)
            and re.search(self.path, request.path)
            and request.nbytes >= self.least
        )


@dataclass
class Counts:
    """What passed."""

    requests: list[Request] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    """Bytes of the bodies of requests that reached the server."""
    received: int = 0
    """Bytes of the bodies of answers that reached the client."""


class Proxy:
    """Listens on a port of its own, as long as the context lasts."""

    def __init__(self, port, *, seed=0):
        self.upstream = port
        self._seed = seed
        self._rules = []
        self._seen = Counter()
        self._struck = Counter()
        self.counts = Counts()
        self._lock = threading.Lock()
        self.over = threading.Event()
        self.hurry = threading.Event()
        """Set it to end all delays."""
        self._open = set()
        self._threads = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    @property
    def rules(self):
        """What goes wrong; setting it begins all counts anew."""
        return self._rules

    @rules.setter
    def rules(self, rules):
        with self._lock:
            self._rules = list(rules)
            self._seen.clear()
            self._struck.clear()
            self.counts = Counts()

    def __enter__(self):
        self._spawn(self._accept)
        return self

    def __exit__(self, *_):
        self.over.set()
        self.hurry.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def judge(self, request):
        with self._lock:
            self.counts.requests.append(request)
            number = self._seen[request.like]
            self._seen[request.like] += 1
            for index, rule in enumerate(self._rules):
                if not rule.wants(request) or (rule.first and number):
                    continue
                key = f"{self._seed} {index} {request.like} {number}"
                if rule.chance < 1 and random.Random(key).random() >= rule.chance:
                    continue
                turn = self._struck[index]
                if rule.times is not None and turn >= rule.after + rule.times:
                    continue
                self._struck[index] += 1
                if turn < rule.after:
                    continue
                self.counts.faults[rule.fault] += 1
                return rule
        return None

    def has_seen(self, requests):
        return len(self.counts.requests) > requests

    def count(self, *, sent=0, received=0):
        with self._lock:
            self.counts.sent += sent
            self.counts.received += received

    def keep(self, connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(connection)
        return connection

    def forget(self, connection):
        if connection is not None:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _spawn(self, work, *args):
        thread = threading.Thread(target=work, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while not self.over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(_Link(self, self.keep(connection)).serve)


class _Cut(Exception):
    """The connection is at its end, and how."""

    def __init__(self, *, reset=False):
        super().__init__()
        self.reset = reset


class _Link:
    """One connection of a client, and the one to the server that goes with it."""

    def __init__(self, proxy, client):
        self._proxy = proxy
        self._client = client
        self._server = None

    def serve(self):
        """Pass on requests until either side has enough."""
        try:
            with contextlib.suppress(OSError):
                while self._one():
                    pass
        except _Cut as cut:
            if cut.reset:
                with contextlib.suppress(OSError):
                    self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            self._proxy.forget(self._client)
            self._proxy.forget(self._server)

    def _one(self):
        head, early = _head_of(self._client)
        if not head:
            return False
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        nbytes = _length_of(head) or 0
        rule = self._proxy.judge(Request(method, path, nbytes))
        fault = rule.fault if rule else None
        if fault == "refuse":
            raise _Cut(reset=True)
        if fault == "stall":
            self._proxy.over.wait(None)
            raise _Cut
        if rule and fault in {"delay", "broken"}:
            self._proxy.hurry.wait(rule.delay_s)
        if fault in {"slow_down", "broken"}:
            _drain(self._client, nbytes - len(early))
            self._client.sendall(_error(fault))
            return True
        self._pass_request(head, early, nbytes, fault)
        return self._pass_answer(method, rule)

    def _pass_request(self, head, early, nbytes, fault):
        if self._server is None:
            self._server = self._proxy.keep(socket.create_connection(("127.0.0.1", self._proxy.upstream)))
        if b"100-continue" in head.lower():
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(rb"(?i)\r\nexpect: 100-continue", b"", head)
        self._server.sendall(head)
        stop = nbytes // 2 if fault == "cut_request" else nbytes
        flip = nbytes // 2 if fault == "flip_request" else -1
        for piece in _body(self._client, early, nbytes, stop, flip):
            self._server.sendall(piece)
            self._proxy.count(sent=len(piece))
        if fault == "cut_request":
            raise _Cut(reset=True)

    def _pass_answer(self, method, rule):
        fault = rule.fault if rule else None
        server = self._server
        if server is None:
            raise _Cut
        head, early = _head_of(server)
        if not head:
            raise _Cut
        status = int(head.split(b" ", 2)[1])
        bare = method == "HEAD" or status in {204, 304}
        nbytes = 0 if bare else _length_of(head)
        if nbytes is None:
            return self._pass_chunked(head, early, fault)
        if fault == "lose_answer":
            _drain(server, nbytes - len(early))
            raise _Cut(reset=True)
        stop = nbytes // 2 if fault in {"cut_answer", "end_answer", "shorten_answer"} else nbytes
        if fault == "shorten_answer":
            head = re.sub(rb"(?i)(\r\ncontent-length: *)\d+", rb"\g<1>%d" % stop, head)
        self._client.sendall(head)
        for piece in _body(server, early, nbytes, stop, nbytes // 2 if fault == "flip_answer" else -1):
            self._proxy.count(received=len(piece))  # first: a test looks as soon as the client has it
            self._client.sendall(piece)
            if rule and fault == "trickle":
                self._proxy.over.wait(rule.delay_s)
        if stop < nbytes:
            raise _Cut(reset=fault == "cut_answer")
        return b"connection: close" not in head.lower()

    def _pass_chunked(self, head, early, fault):
        """Pass on an answer of unknown length (listings): whole, or cut after its head."""
        server = self._server
        body = bytearray(early)
        while server is not None and not body.endswith(b"0\r\n\r\n"):
            piece = server.recv(_PIECE_BYTES)
            if not piece:
                break
            body += piece
        if fault == "lose_answer":
            raise _Cut(reset=True)
        cut = fault in {"cut_answer", "end_answer", "shorten_answer"}
        sent = body[: len(body) // 2] if cut else body
        self._client.sendall(head + bytes(sent))
        self._proxy.count(received=len(sent))
        if cut:
            raise _Cut(reset=fault == "cut_answer")
        return True


def _head_of(connection):
    """Read up to the end of the headers; returns them, and what came after them already."""
    got = b""
    while b"\r\n\r\n" not in got:
        piece = connection.recv(64 << 10)
        if not piece:
            return b"", b""
        got += piece
    head, _, rest = got.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return _head_of(connection) if not rest else (rest, b"")
    return head + b"\r\n\r\n", rest


def _length_of(head):
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(found[1]) if found else None


def _drain(connection, nbytes):
    while nbytes > 0:
        piece = connection.recv(min(nbytes, _PIECE_BYTES))
        if not piece:
            return
        nbytes -= len(piece)


def _body(source, early, nbytes, stop, flip):
    """Read a body of `nbytes`, of which some came `early`, up to `stop`; the byte at `flip` is another."""
    done = 0
    while done < stop:
        piece = early or source.recv(min(_PIECE_BYTES, nbytes - done))
        early = b""
        if not piece:
            raise _Cut
        changed = bytearray(piece[: stop - done])
        if 0 <= flip - done < len(changed):
            changed[flip - done] ^= 0x10
        done += len(changed)
        yield bytes(changed)


def _error(fault):
    code, status = {"slow_down": ("SlowDown", "503 Slow Down")}.get(
        fault, ("InternalError", "500 Internal Server Error")
    )
    body = f"<Error><Code>{code}</Code><Message>Please reduce your request rate.</Message></Error>".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
