"""
What a job of many ranks pays for its meetings: the curve to 16,384 ranks, on this machine.

`meetings`: the three meetings of a call, through a real TCPStore in a process of its own. Rank 0 is real. The other ranks are
simulated: a few processes with one connection each make the requests that `dist.rendezvous` makes for them, in its order, with
its pauses and in sizes like those of real calls (`MEETINGS`); see `Wire`. These processes share the cores with the store and rank
0, so their CPU time is part of the seconds here, but not of a job's. With `--batch 1` the store gets each request by itself, as in a
job, and its CPU time is that of a job; the simulation is slower then. Up to `--real` ranks, every rank is a thread that runs the real
code on its own connection. What is not simulated: the network, and the connections of the ranks.

The other parts are in files of their own, which get the other arguments: `--only plans`, what rank 0 plans and commits
(`scale_plans.py`); `--only processes`, real processes beside torch (`scale_processes.py`); `--only tensors`, many small ones in one
process (`scale_tensors.py`); `--only runs`, what `Checkpointer.step` and many checkpoints cost (`scale_runs.py`). Each part prints
the exponents of its curves.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import importlib
import multiprocessing
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed import PrefixStore, TCPStore

from shardkeep.dist import kv
from shardkeep.dist.rendezvous import (
    LOG_RANKS,
    LOGGED_BYTES,
    CoordinatorReply,
    RankActivity,
    RankMessage,
    decode_reply,
    encode,
    rendezvous,
)
from shardkeep.dist.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

TITLE = "save to runs/a/step-10"
TIMEOUT_S = 600.0
WORKERS = 2
"""Processes that make the requests of simulated ranks."""


@dataclass(frozen=True)
class Meeting:
    phase: str
    sent_nbytes: int
    """What each rank sends to rank 0."""
    answer_nbytes: int
    shared: bool
    """Whether all ranks get the same answer."""


WRITTEN = [Meeting("write", 330, 0, shared=True), Meeting("commit", 0, 200, shared=True)]
MEETINGS = {
    "save": [Meeting("plan", 130, 3200, shared=True), *WRITTEN],
    "another": [Meeting("plan", 60, 60, shared=True), *WRITTEN],
    "differing": [Meeting("plan", 58_000, 29_000, shared=False), *WRITTEN],
    "load": [
        Meeting("open", 20, 4096, shared=True),
        Meeting("match", 300, 40, shared=True),
        Meeting("read", 300, 0, shared=True),
    ],
}
"""
By the kind of call: a save of tensors that are cut alike (`scale_plans.py` prints what ranks send), another one of the same tensors, one by
ranks of which no two have anything in common, and a load.
"""


class CountingStore:
    """A store that counts its requests and their bytes."""

    def __init__(self, store: Any) -> None:
        self.requests = self.answered = self.nbytes = 0
        self._store = store

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            answer = request(*arguments)
            self.requests += 1
            self.answered += name not in ("set", "append")
            self.nbytes += _nbytes(arguments) + _nbytes(answer)
            return answer

        setattr(self, name, counted)
        return counted


def _nbytes(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def connect(port: int, prefix: str) -> CountingStore:
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    return CountingStore(PrefixStore(prefix, client))


def serve(pipe: Connection) -> None:
    """Host the store, and say when asked how many seconds of CPU it has taken, and how much memory at most."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    before = _peak_mb()
    while pipe.recv():
        pipe.send((time.process_time(), _peak_mb() - before))


def _peak_mb() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1000


# -- simulated ranks -------------------------------------------------------------------------------------------


class Wire:
    """
    A connection that makes the requests of many ranks in the protocol of torch's TCPStore, some at a time.

    torch's client sends one, and waits for its answer before the next: on two cores that takes most of the time, but the ranks of a
    job do it side by side. Here the store gets up to `most` requests at once, from ranks that are due at the same time.
    """

    SET, COMPARE_SET, ADD, DELETE_KEY, APPEND = b"\1", b"\2", b"\4", b"\10", b"\11"

    def __init__(self, port: int, prefix: str, most: int) -> None:
        self.requests = self.answered = self.nbytes = 0
        self.most = most
        self.waits: dict[tuple[int, int], float] = {}
        """How long each rank waited for rank 0's answer in each meeting of its last call."""
        self._prefix = f"/{prefix}/".encode()
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb", 1 << 20)
        self._out = bytearray(b"\0" + struct.pack("<I", 0x3C85F7CE))  # torch's greeting

    def send(self, kind: bytes, key: str, *values: bytes) -> bytes:
        """Queue a request, and return its kind."""
        return self.send_packed(kind, *self.pack(kind, key, *values))

    def pack(self, kind: bytes, key: str, *values: bytes) -> tuple[bytes, int]:
        """Return a request, and how many bytes of it are counted."""
        name = key.encode()
        parts = [kind, U64(len(self._prefix) + len(name)), self._prefix, name]
        for value in values:
            parts += [value] if kind == self.ADD else [U64(len(value)), value]
        return b"".join(parts), len(name) + sum(map(len, values))

    def send_packed(self, kind: bytes, request: bytes, nbytes: int) -> bytes:
        self._out += request
        self.requests += 1
        self.nbytes += nbytes
        return kind

    def flush(self) -> None:
        self._socket.sendall(self._out)
        self._out.clear()

    def answer(self, kind: bytes) -> Any:
        """Read the answer to the first request that has none yet."""
        self.answered += 1
        (number,) = struct.unpack("<q", self._answers.read(8))
        if kind != self.COMPARE_SET:
            return number
        self.nbytes += number
        return self._answers.read(number)


ONE = struct.pack("<q", 1)
U64 = struct.Struct("<Q").pack


@dataclass(frozen=True)
class Prepared:
    """What all simulated ranks of a process have in common, and is made once."""

    messages: list[bytes]
    """Of each rank, by meeting."""
    looks: dict[tuple[int, int], tuple[bytes, int]]
    """The request that looks for the answer of a call's meeting."""
    replies: dict[bytes, CoordinatorReply]
    """What was read last, decoded."""

    @classmethod
    def of(cls, meetings: list[Meeting]) -> Prepared:
        said = [RankMessage(title=TITLE, phase=each.phase, payload=b"x" * each.sent_nbytes) for each in meetings]
        return cls([*map(encode, said)], {}, {})

    def look(self, wire: Wire, call: int, step: int) -> tuple[bytes, int]:
        if (call, step) not in self.looks:
            self.looks[call, step] = wire.pack(wire.COMPARE_SET, f"{call}/{step}/out", b"?", b"?")
        return self.looks[call, step]

    def decoded(self, raw: bytes) -> CoordinatorReply:
        if raw not in self.replies:
            self.replies.clear()
            self.replies[raw] = decode_reply(raw[1:])
        return self.replies[raw]


def simulated_rank(wire: Wire, rank: int, ranks: int, meetings: list[Meeting], made: Prepared) -> Iterator[Any]:
    """Make the requests of a rank that is not rank 0; gives the pauses, and the requests whose answers it gets."""
    slowest_s, quickest_s = kv.longest_pause_s(ranks), kv.quickest_pause_s(ranks)
    call = yield wire.send(wire.ADD, f"calls/{rank}", ONE)
    if call == 1:
        note = encode(RankActivity(call, 0, meetings[0].phase, TITLE))
        wire.send(wire.SET, f"doing/{rank}", b"w" + note)
    for step in range(len(meetings)):
        message, look = made.messages[step], made.look(wire, call, step)
        own, long = f"{call}/{step}/own/{rank}", len(message) > LOGGED_BYTES
        if long:
            wire.send(wire.SET, own, b"w" + message)
        entry = bytes([long]) + rank.to_bytes(4, "little") + (b"" if long else message)
        wire.send(wire.APPEND, f"{call}/{step}/in/{rank // LOG_RANKS}", len(entry).to_bytes(4, "little") + entry)
        began = time.monotonic()
        first_s = quickest_s + ranks * len(message) * long / kv.BYTES_PER_S
        yield min(slowest_s, max(first_s, wire.waits.get((rank, step), 0.0) * 3 / 4))
        while (raw := (yield wire.send_packed(wire.COMPARE_SET, *look))) == b"?":
            yield min(slowest_s, max(quickest_s, (time.monotonic() - began) / 4))
        wire.waits[rank, step] = time.monotonic() - began
        reply = made.decoded(raw)
        if reply.own:
            yield wire.send(wire.COMPARE_SET, own, b"?", b"?")
        if reply.own or long:
            yield wire.send(wire.DELETE_KEY, own)
    if (yield wire.send(wire.ADD, f"{call}/parted", ONE)) == reply.present:
        for key in ("parted", f"{len(meetings) - 2}/out", f"{len(meetings) - 1}/out"):
            yield wire.send(wire.DELETE_KEY, f"{call}/{key}")


def run_simulated(wire: Wire, ranks: list[int], world_size: int, meetings: list[Meeting]) -> None:
    """Take turns among the ranks, each in the order and with the pauses of its requests."""
    numbers, made = count(), Prepared.of(meetings)
    due = [(0.0, next(numbers), simulated_rank(wire, rank, world_size, meetings, made)) for rank in ranks]
    waiting: list[tuple[Any, bytes]] = []

    def go_on(rank: Any, answer: Any) -> None:
        with contextlib.suppress(StopIteration):
            found = rank.send(answer)
            if isinstance(found, bytes):
                waiting.append((rank, found))
            else:
                heapq.heappush(due, (time.monotonic() + found, next(numbers), rank))

    while due or waiting:
        while due and len(waiting) < wire.most and due[0][0] <= time.monotonic():
            go_on(heapq.heappop(due)[2], None)
        wire.flush()
        batch, waiting[:] = list(waiting), []
        for rank, kind in batch:
            go_on(rank, wire.answer(kind))
        if not waiting and due:
            time.sleep(max(0.0, due[0][0] - time.monotonic()))


def run_real(stores: list[Any], ranks: list[int], world_size: int, meetings: list[Meeting]) -> None:
    """Run the real code of each rank, on a thread of its own."""

    def follow(store: Any, rank: int) -> None:
        with rendezvous(World(rank, world_size, store, TIMEOUT_S), TITLE) as call:
            for meeting in meetings:
                call.agree(meeting.phase, lambda m=meeting: b"x" * m.sent_nbytes, lambda said: said)

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(follow, stores, ranks))


def work(pipe: Connection, port: int) -> None:
    """Be some ranks, for one job after the other."""
    while (job := pipe.recv()) is not None:
        prefix, ranks, world_size, meetings, calls, real, most = job
        stores = [connect(port, prefix) for _ in ranks] if real else [Wire(port, prefix, most)]
        pipe.send("ready")
        for _ in range(calls + 1):
            pipe.recv()
            before, cpu_s = total(stores), time.process_time()
            if real:
                run_real(stores, ranks, world_size, meetings)
            else:
                run_simulated(stores[0], ranks, world_size, meetings)
            spent_s = time.process_time() - cpu_s
            pipe.send(([now - then for now, then in zip(total(stores), before, strict=True)], spent_s))


def total(stores: Sequence[CountingStore | Wire]) -> list[int]:
    return [sum(each) for each in zip(*((one.requests, one.answered, one.nbytes) for one in stores), strict=True)]


# -- rank 0 ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    seconds: float
    """Of the call, until the slowest rank has left it."""
    on_rank_0_s: float
    """Until rank 0 has sent its last answer."""
    cpu_s: float
    """Of rank 0's process."""
    store_cpu_s: float
    """Of the store's process."""
    clients_cpu_s: float
    """Of the processes that are the other ranks, on this machine's cores: a job has it on other machines, side by side."""
    requests: float
    """For each rank and meeting."""
    answered: float
    """Those of them that wait for an answer: a store does not confirm what is set or appended."""
    mbytes: float
    keys: int
    """Left in the store by the second and later calls."""


def lead(store: CountingStore, world_size: int, meetings: list[Meeting]) -> float:
    """Make the call on rank 0; return how long its meetings took."""

    def decide(meeting: Meeting, said: list[bytes]) -> list[bytes]:
        if meeting.shared:
            return [b"y" * meeting.answer_nbytes] * len(said)
        return [rank.to_bytes(8, "little") + b"y" * meeting.answer_nbytes for rank in range(len(said))]

    began = time.monotonic()
    with rendezvous(World(0, world_size, store, TIMEOUT_S), TITLE) as call:  # type: ignore[arg-type]  # counts only
        for meeting in meetings:
            payload = b"x" * meeting.sent_nbytes
            call.agree(meeting.phase, lambda p=payload: p, lambda said, m=meeting: decide(m, said))
        return time.monotonic() - began


def ask(host: Connection) -> tuple[float, float]:
    host.send(True)
    seconds, mbytes = host.recv()
    return seconds, mbytes


def measure(
    port: int,
    host: Connection,
    pipes: list[Connection],
    ranks: int,
    meetings: list[Meeting],
    calls: int,
    most: int,
    *,
    real: bool,
) -> list[Measured]:
    prefix = f"{ranks}/{'real' if real else 'simulated'}/{time.monotonic_ns()}"
    store, found = connect(port, prefix), []
    for number, pipe in enumerate(pipes):
        pipe.send((prefix, list(range(1 + number, ranks, len(pipes))), ranks, meetings, calls, real, most))
    for pipe in pipes:
        pipe.recv()
    keys = 0
    for _ in range(calls + 1):
        before, cpu_s, store_cpu_s = total([store]), time.process_time(), ask(host)[0]
        began = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        on_rank_0_s = lead(store, ranks, meetings)
        others, clients_cpu_s = zip(*[pipe.recv() for pipe in pipes], strict=True)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
        store_cpu_s = ask(host)[0] - store_cpu_s
        own = [now - then for now, then in zip(total([store]), before, strict=True)]
        requests, answered, nbytes = map(sum, zip(own, *others, strict=True))
        keys, keys_before = store.num_keys(), keys
        visits = ranks * len(meetings)
        each = requests / visits, answered / visits
        cpus = cpu_s, store_cpu_s, sum(clients_cpu_s)
        found.append(Measured(seconds, on_rank_0_s, *cpus, *each, nbytes / 1e6, keys - keys_before))
    return found[1:]  # in its first call, each rank makes a request more


def meetings_part(sizes: list[int], real_to: int, calls: int, what: str, budget_s: float, most: int) -> None:
    """Print the seconds, requests and bytes of a save's meetings."""
    context = multiprocessing.get_context("spawn")
    host, host_end = context.Pipe()
    processes = [context.Process(target=serve, args=(host_end,))]
    processes[0].start()
    port = host.recv()
    pipes = []
    for _ in range(WORKERS):
        pipe, end = context.Pipe()
        processes.append(context.Process(target=work, args=(end, port)))
        processes[-1].start()
        pipes.append(pipe)
    measure(
        port, host, pipes, 8, MEETINGS["another"], 1, most, real=False
    )  # the processes have imported torch after this

    meetings, began = MEETINGS[what], time.monotonic()
    print(f"three meetings of a call, {what}, median of {calls} calls")
    print(
        f"{'':>7}  {'':<10} {'':>9} {'rank 0':>9} {'its':>8} {'CPU of':>9} {'CPU of':>9} {'requests':>9} {'of them':>8}"
        f" {'through':>11} {'keys':>4}"
    )
    print(
        f"{'ranks':>7}  {'ranks are':<10} {'call':>9} {'is done':>9} {'CPU':>8} {'store':>9} {'clients':>9} {'/rank/mtg':>9}"
        f" {'answered':>8} {'the store':>11} {'left':>4}"
    )
    curve: dict[int, Measured] = {}
    for real, ranks in [(True, each) for each in sizes if each <= real_to] + [(False, each) for each in sizes]:
        if time.monotonic() - began > budget_s * (0.3 if ranks >= 16384 else 0.6):
            print(f"{ranks:>7}  left out: too much of the budget of {budget_s:g} s is spent (--budget-s)")
            continue
        found = measure(port, host, pipes, ranks, meetings, calls, most, real=real)
        middle = sorted(found, key=lambda each: each.seconds)[len(found) // 2]
        print(
            f"{ranks:>7}  {'real' if real else 'simulated':<10} {middle.seconds:>7.3f} s {middle.on_rank_0_s:>7.3f} s"
            f" {middle.cpu_s:>6.2f} s {middle.store_cpu_s:>7.2f} s {middle.clients_cpu_s:>7.2f} s {middle.requests:>9.2f} {middle.answered:>8.2f} {middle.mbytes:>8.1f} MB"
            f" {max(each.keys for each in found):>4}",
            flush=True,
        )
        if not real:
            curve[ranks] = middle
    for cost in ("seconds", "cpu_s", "store_cpu_s", "requests", "mbytes"):
        costs = [getattr(each, cost) for each in curve.values()]
        if len(costs) > 2:
            print(f"exponent in ranks, {cost}: {exponent(list(curve), costs):.2f}")
    print(f"the store's process grew by {ask(host)[1]:.0f} MB at most")
    for pipe in [*pipes, host]:
        pipe.send(None)
    for process in processes:
        process.join()


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return how a cost grows with a size: the slope of the line through their logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def main() -> None:
    parts = argparse.ArgumentParser(add_help=False)
    parts.add_argument("--only", choices=["meetings", "plans", "processes", "runs", "tensors"], default="meetings")
    part, others = parts.parse_known_args()
    if part.only != "meetings":
        importlib.import_module(f"scale_{part.only}").main(others)
        return
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown, parents=[parts])
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096, 16384], help="sizes of the job")
    parser.add_argument("--real", type=int, default=256, help="the largest job whose ranks are real, too")
    parser.add_argument("--calls", type=int, default=3, help="calls of each size")
    parser.add_argument("--call", choices=MEETINGS, default="save", help="what the ranks do")
    parser.add_argument("--budget-s", type=float, default=110, help="no larger size begins after a part of this time")
    parser.add_argument("--batch", type=int, default=64, help="requests of simulated ranks that are sent at once")
    args = parser.parse_args()
    threading.stack_size(256 << 10)
    meetings_part(args.ranks, args.real, args.calls, args.call, args.budget_s, args.batch)


if __name__ == "__main__":
    main()
