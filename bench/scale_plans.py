"""
What rank 0 does in a save of very many ranks: its CPU time, its memory, and the bytes through the key-value store.

    python bench/scale.py --only plans [--sizes 1024x500 4096x1000 16384x1000] [--replicas 1 2] [--drop-in]

Rank 0 is real: `SaveSession` and `NativeSave` plan, check and commit, over a store in memory that keeps no index. Simulated are the
other ranks: what they send is made beforehand, and what they write is a header of eight bytes. Not counted is what rank 0 does as a rank like the
others. Each size runs in a process of its own; memory is what it had at most above what it had before the save.

`--drop-in`: the same of `shardkeep.dcp.save`, which ends with `.metadata`, written to a temporary directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from planning import rank_state, requests_of
from scale import exponent
from shardkeep.dcp import DefaultSavePlanner, FileSystemWriter
from shardkeep.dcp._impl.default_save import DefaultSave, _SentState, pack_places
from shardkeep.dist.world import World
from shardkeep.engine.native_save import NativeSave, data_name, make_manifest
from shardkeep.engine.report import Phases, Span
from shardkeep.engine.save_session import (
    DescribedState,
    PlanAnswer,
    PlanRequest,
    RankPlan,
    SaveArguments,
    SaveSession,
    WrittenFiles,
    kept_plans,
)
from shardkeep.format import data_file
from shardkeep.format.boxes import ints
from shardkeep.format.record import FileEntry
from shardkeep.plan.save_plan import RankManifest, RankWritePlan, common_part, encode, manifest_of
from shardkeep.state.describe import describe
from shardkeep.storage.base import Version
from shardkeep.storage.memory import MemoryStore
from worker import status_bytes

CHECKSUM = data_file.checksum_text(data_file.digest(b""))


class Forgetful(MemoryStore):
    """Keeps no large blob."""

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        super().put(name, data if len(data) < 1 << 20 else b"", replace=replace, over=over)


class Meeting:
    """Meets the simulated ranks, and counts what rank 0 does for them."""

    def __init__(self) -> None:
        self.others: list[bytes] = []
        self.answers: list[bytes] = []
        self.cpu_s = 0.0
        self.nbytes = 0

    def agree(self, phase: str, work: Callable[[], bytes], decide: Callable[[list[bytes]], list[bytes]]) -> bytes:
        del phase
        sent = [work(), *self.others]
        began = time.process_time()
        self.answers = decide(sent)
        self.cpu_s += time.process_time() - began
        # An answer that is equal for all travels once, as a reply that all read.
        self.nbytes += sum(map(len, sent)) + sum(map(len, self.answers[1:]))
        return self.answers[0]


def written_by(rank: int, ranks: int, answer: bytes, save_id: str, store: MemoryStore) -> bytes:
    """Write the files of a rank, of which none has data, and return what it says about them."""
    plan = msgspec.msgpack.decode(answer, type=RankWritePlan)
    entries = []
    for file in plan.files:
        name = data_name(file, rank, ranks, save_id)
        store.put(name, bytes(8))
        entries.append(
            FileEntry(name=name, nbytes=8, checksum=CHECKSUM, header_nbytes=8, block_nbytes=file.block_nbytes)
        )
    spans = [Span("call", 0.0, 0.0), Span("write", 0.0, 1.0)]
    return encode((WrittenFiles(entries), spans))


def items_by(rank: int, answer: bytes) -> bytes:
    """Return what a rank says in the drop-in's save of a file with an item of 128 bytes, and what frames it, for each row."""
    count = len(ints(answer))
    at = np.arange(count) * 1216
    where = np.stack([np.zeros_like(at), at, np.full_like(at, 1216), at + 704])
    entry = FileEntry(
        name=f"__{rank}_0.distcp", nbytes=count * 1216, header_nbytes=0, block_nbytes=1 << 18, checksum=CHECKSUM
    )
    return encode((WrittenFiles([entry], pack_places(where)), [Span("call", 0.0, 0.0), Span("write", 0.0, 1.0)]))


class Ranks:
    """Of all ranks, what the drop-in asks rank 0 for."""

    rank, is_coordinator = 0, True


def save(ranks: int, requests: list[bytes], described: DescribedState, drop_in: str | None) -> dict[str, float]:
    """Make one save on rank 0; by the drop-in to a directory, if that is given."""
    store, world, meeting = Forgetful(), World(0, ranks), Meeting()
    request = SaveArguments(store)
    layout = NativeSave(request, store, world)
    if drop_in is not None:
        layout = DefaultSave(FileSystemWriter(drop_in), DefaultSavePlanner(), Ranks(), [], False)
    session = SaveSession(layout, store, world, request.options, phases=Phases())
    meeting.others = requests
    plan: RankPlan = session.plan(meeting, lambda: described)
    bodies = {each: msgspec.msgpack.decode(each, type=PlanAnswer).body for each in set(meeting.answers)}
    planned = {each: plan.answer if body is None else zlib.decompress(body) for each, body in bodies.items()}
    plan_s = meeting.cpu_s
    to_write = enumerate(planned[each] for each in meeting.answers)
    if drop_in is not None:
        wrote = [items_by(rank, body) for rank, body in to_write]
    else:
        wrote = [written_by(rank, ranks, body, layout.save_id, store) for rank, body in to_write]
    meeting.others = wrote[1:]
    mine, _ = msgspec.msgpack.decode(wrote[0], type=tuple[WrittenFiles, list[Span]])
    files = session.write(meeting, plan, lambda: mine)
    meeting.others = [b""] * (ranks - 1)
    session.commit(meeting, plan, files, (None, {}))
    return {"cpu_s": meeting.cpu_s, "plan_cpu_s": plan_s, "mb": meeting.nbytes / 1e6}


def drop_in_state(ranks: int, tensors: int, replicas: int) -> DescribedState:
    description = describe(rank_state(0, ranks, tensors, replicas), rank=0)
    manifest = manifest_of(
        description,
        groups=["state"] * tensors,
        flags=np.zeros(tensors, np.uint8),
        alias=np.arange(tensors),
        tree=encode(_SentState([], description.keys, [[key] for key in description.keys])),
        values=b"",
    )
    return DescribedState(description, manifest)


def as_drop_in(request: PlanRequest, manifest: RankManifest) -> PlanRequest:
    common = common_part(manifest)
    digest = xxhash.xxh3_128_digest(common)
    return msgspec.structs.replace(request, digest=digest, values=b"", common=common if request.common else b"")


def measure(ranks: int, tensors: int, replicas: int, directory: str | None = None) -> dict[str, float]:
    """Make two saves of an unchanged state, by so many ranks."""
    full = requests_of(ranks, tensors, replicas)[0]
    description = describe(rank_state(0, ranks, tensors, replicas), rank=0)
    described = DescribedState(description, make_manifest(description, allow_pickle=False, check_replicas=False))
    again = [msgspec.msgpack.decode(each, type=PlanRequest) for each in full]
    if directory is not None:
        described = drop_in_state(ranks, tensors, replicas)
        again = [as_drop_in(each, described.manifest) for each in again]
        full = [encode(each) for each in again]
    kept_plans().clear()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    before = status_bytes("VmRSS")
    first = save(ranks, full[1:], described, directory)
    peak = status_bytes("VmHWM") - before
    plan_id = next(iter(kept_plans().plans), b"")
    known = (
        [msgspec.structs.replace(each, plan_id=plan_id, own=None, common=b"") for each in again] if plan_id else again
    )
    second = save(ranks, [encode(each) for each in known[1:]], described, directory)
    written = {} if directory is None else {"metadata MB": (Path(directory) / ".metadata").stat().st_size / 1e6}
    return {
        "ranks": ranks,
        "tensors": tensors,
        "replicas": replicas,
        "first: CPU s": first["cpu_s"],
        "of it, plan": first["plan_cpu_s"],
        "memory MB": peak / 1e6,
        "through the store MB": first["mb"],
        "second: CPU s": second["cpu_s"],
        "its MB": second["mb"],
        **written,
    }


def apart(*size: int, drop_in: bool) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--one", *map(str, size), *(["--drop-in"] if drop_in else [])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["256x1000", "1024x1000", "4096x1000", "16384x1000", "1024x125", "1024x250", "1024x500"]
    parser.add_argument("--sizes", nargs="+", default=sizes, help="ranks x tensors, of which each rank holds a shard")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="ranks that hold the same shards")
    parser.add_argument("--drop-in", action="store_true", help="saves by shardkeep.dcp")
    args = parser.parse_args(arguments)
    shapes = [tuple(map(int, each.split("x"))) for each in args.sizes]
    rows = []
    for replicas in args.replicas:
        for ranks, tensors in shapes:
            rows.append(row := apart(ranks, tensors, replicas, drop_in=args.drop_in))
            if len(rows) == 1:
                print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            print("| " + " | ".join(f"{each:,.4g}" for each in row.values()) + " |", flush=True)
    for replicas in args.replicas:
        mine = [row for row in rows if row["replicas"] == replicas]
        for what, other in (("ranks", "tensors"), ("tensors", "ranks")):
            for fixed in {row[other] for row in mine}:
                law = [row for row in mine if row[other] == fixed]
                if len(law) > 2:
                    found = [
                        f"{cost} {exponent([r[what] for r in law], [r[cost] for r in law]):.2f}"
                        for cost in list(law[0])[3:]
                    ]
                    print(f"exponent in {what}, {fixed} {other}, {replicas} replicas: " + ", ".join(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        with tempfile.TemporaryDirectory() as where, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps(measure(*map(int, sys.argv[2:5]), directory=where if sys.argv[5:] else None)))
    else:
        main()
