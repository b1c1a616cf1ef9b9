"""
What a job of many ranks pays for its meetings: the curve to 16,384 ranks, on this machine.

`meetings`: the three meetings of a call, through a real TCPStore in a process of its own. Rank 0 is real. The other ranks are
simulated: a few processes with one connection each make the requests that `dist.rendezvous` makes for them, in its order, with
its pauses and in sizes like those of real calls (`MEETINGS`). Up to `--real` ranks, every rank is a thread that runs the real
code on its own connection. What is not simulated: the network, and the connections of the ranks.

The other parts are in files of their own, which get the other arguments: `--only plans`, what rank 0 plans and commits
(`scale_plans.py`); `--only processes`, real processes beside torch (`scale_processes.py`); `--only tensors`, many small ones in one
process (`scale_tensors.py`); `--only runs`, what `Checkpointer.step` and many checkpoints cost (`scale_runs.py`). Each part prints
the exponents of its curves.
"""

from __future__ import annotations

import argparse
import heapq
import importlib
import multiprocessing
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


def simulated_rank(store: Any, rank: int, ranks: int, meetings: list[Meeting]) -> Iterator[float]:
    """Make the requests of a rank that is not rank 0; gives the pauses."""
    slowest_s, quickest_s = kv.longest_pause_s(ranks), max(0.0005, ranks / kv.CHECKS_PER_S / 5)
    call = store.add(f"calls/{rank}", 1)
    store.set(f"doing/{rank}", b"w" + encode(RankActivity(call, 0, meetings[0].phase, TITLE)))
    for step, meeting in enumerate(meetings):
        message = encode(RankMessage(title=TITLE, phase=meeting.phase, payload=b"x" * meeting.sent_nbytes))
        own, long = f"{call}/{step}/own/{rank}", len(message) > LOGGED_BYTES
        if long:
            store.set(own, b"w" + message)
        entry = bytes([long]) + rank.to_bytes(4, "little") + (b"" if long else message)
        store.append(f"{call}/{step}/in/{rank // LOG_RANKS}", len(entry).to_bytes(4, "little") + entry)
        began = time.monotonic()
        yield min(slowest_s, quickest_s + ranks * len(message) * long / kv.BYTES_PER_S)
        while (raw := store.compare_set(f"{call}/{step}/out", b"?", b"?")) == b"?":
            yield min(slowest_s, max(quickest_s, (time.monotonic() - began) / 4))
        reply = decode_reply(raw[1:])
        if reply.own:
            store.compare_set(own, b"?", b"?")
            store.delete_key(own)
        elif long:
            store.delete_key(own)
    if store.add(f"{call}/parted", 1) == reply.present:
        for key in ("parted", f"{len(meetings) - 2}/out", f"{len(meetings) - 1}/out"):
            store.delete_key(f"{call}/{key}")


def run_simulated(store: Any, ranks: list[int], world_size: int, meetings: list[Meeting]) -> None:
    """Take turns among the ranks, each in the order and with the pauses of its requests."""
    numbers = count()
    due = [(0.0, next(numbers), simulated_rank(store, rank, world_size, meetings)) for rank in ranks]
    while due:
        at_s, _, rank = heapq.heappop(due)
        time.sleep(max(0.0, at_s - time.monotonic()))
        pause_s = next(rank, None)
        if pause_s is not None:
            heapq.heappush(due, (time.monotonic() + pause_s, next(numbers), rank))


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
        prefix, ranks, world_size, meetings, calls, real = job
        stores = [connect(port, prefix) for _ in (ranks if real else [0])]
        pipe.send("ready")
        for _ in range(calls):
            pipe.recv()
            before = total(stores)
            if real:
                run_real(stores, ranks, world_size, meetings)
            else:
                run_simulated(stores[0], ranks, world_size, meetings)
            pipe.send([now - then for now, then in zip(total(stores), before, strict=True)])


def total(stores: list[CountingStore]) -> list[int]:
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
    port: int, host: Connection, pipes: list[Connection], ranks: int, meetings: list[Meeting], calls: int, *, real: bool
) -> list[Measured]:
    prefix = f"{ranks}/{'real' if real else 'simulated'}/{time.monotonic_ns()}"
    store, found = connect(port, prefix), []
    for number, pipe in enumerate(pipes):
        pipe.send((prefix, list(range(1 + number, ranks, len(pipes))), ranks, meetings, calls, real))
    for pipe in pipes:
        pipe.recv()
    keys = 0
    for _ in range(calls):
        before, cpu_s, store_cpu_s = total([store]), time.process_time(), ask(host)[0]
        began = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        on_rank_0_s = lead(store, ranks, meetings)
        others = [pipe.recv() for pipe in pipes]
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
        store_cpu_s = ask(host)[0] - store_cpu_s
        own = [now - then for now, then in zip(total([store]), before, strict=True)]
        requests, answered, nbytes = map(sum, zip(own, *others, strict=True))
        keys, keys_before = store.num_keys(), keys
        visits = ranks * len(meetings)
        each = requests / visits, answered / visits
        found.append(Measured(seconds, on_rank_0_s, cpu_s, store_cpu_s, *each, nbytes / 1e6, keys - keys_before))
    return found


def meetings_part(sizes: list[int], real_to: int, calls: int, what: str, budget_s: float) -> None:
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
    measure(port, host, pipes, 8, MEETINGS["another"], 1, real=False)  # the processes have imported torch after this

    meetings, began = MEETINGS[what], time.monotonic()
    print(f"three meetings of a call, {what}, median of {calls} calls")
    print(
        f"{'':>7}  {'':<10} {'':>9} {'rank 0':>9} {'its':>8} {'CPU of':>9} {'requests':>9} {'of them':>8} {'through':>11} {'keys':>4}"
    )
    print(
        f"{'ranks':>7}  {'ranks are':<10} {'call':>9} {'is done':>9} {'CPU':>8} {'store':>9} {'/rank/mtg':>9}"
        f" {'answered':>8} {'the store':>11} {'left':>4}"
    )
    curve: dict[int, Measured] = {}
    for real, ranks in [(True, each) for each in sizes if each <= real_to] + [(False, each) for each in sizes]:
        if time.monotonic() - began > budget_s * (0.3 if ranks >= 16384 else 0.6):
            print(f"{ranks:>7}  left out: too much of the budget of {budget_s:g} s is spent (--budget-s)")
            continue
        found = measure(port, host, pipes, ranks, meetings, calls, real=real)
        middle = sorted(found, key=lambda each: each.seconds)[len(found) // 2]
        print(
            f"{ranks:>7}  {'real' if real else 'simulated':<10} {middle.seconds:>7.3f} s {middle.on_rank_0_s:>7.3f} s"
            f" {middle.cpu_s:>6.2f} s {middle.store_cpu_s:>7.2f} s {middle.requests:>9.2f} {middle.answered:>8.2f} {middle.mbytes:>8.1f} MB"
            f" {max((each.keys for each in found[1:]), default=0):>4}",
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
    args = parser.parse_args()
    threading.stack_size(256 << 10)
    meetings_part(args.ranks, args.real, args.calls, args.call, args.budget_s)


if __name__ == "__main__":
    main()
