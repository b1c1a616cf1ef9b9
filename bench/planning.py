"""
Planning at scale, simulated in one process: CPU seconds of rank 0 and of each rank for half a million shards.

1,024 ranks x 500 sharded tensors, and the same with every shard held twice (HSDP); then an index of a million shards.
`python bench/planning.py 1024 16384`: what one rank of so many reads of the index to load its shards of 1,000 tensors.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
import torch
import xxhash

from shardkeep.engine.native_save import index_of, make_manifest, split_by_rank
from shardkeep.engine.save_session import PlanRequest
from shardkeep.format.boxes import Boxes, pack
from shardkeep.format.index import (
    Chunks,
    Index,
    PartialIndex,
    Tensors,
    decode_index,
    encode_index,
    head_nbytes,
    parts_of,
    strings_of,
)
from shardkeep.plan.load_plan import ReadRequests, plan_load
from shardkeep.plan.save_plan import (
    RankManifest,
    common_part,
    encode,
    merge_rank_trees,
    merge_rank_values,
    plan_save,
)
from shardkeep.plan.stamped_plan import plan_stamped
from shardkeep.state.describe import describe
from shardkeep.state.leaves import ShardedBox

T = TypeVar("T")


def rank_state(rank: int, ranks: int, tensors: int, replicas: int) -> dict[str, object]:
    """One rank's row shards of `tensors` matrices; every shard is held by `replicas` ranks."""
    rows = 4
    shard = rank // replicas
    shape = (rows * (ranks // replicas), 8)
    local = [torch.empty(rows, 8) for _ in range(tensors)]
    model = {f"layers.{i}.weight": ShardedBox(t, offsets=(rows * shard, 0), shape=shape) for i, t in enumerate(local)}
    return {"model": model, "step": 3}


def requests_of(ranks: int, tensors: int, replicas: int) -> tuple[list[bytes], float]:
    """Every rank's request as it travels, and the seconds one rank takes to describe what it holds."""
    best = float("inf")
    for rank in (0, 1, ranks - 1):
        state = rank_state(rank, ranks, tensors, replicas)
        began = time.process_time()
        first = make_manifest(describe(state, rank=rank), allow_pickle=False, check_replicas=False)
        best = min(best, time.process_time() - began)
    requests, common = [], common_part(first)
    digest = xxhash.xxh3_128_digest(common)
    base = describe(rank_state(0, ranks, tensors, replicas), rank=0)
    for rank in range(ranks):
        offsets = base.boxes.offsets.copy()
        offsets[:, 0] = 4 * (rank // replicas)
        request = PlanRequest(
            digest, first.values, b"", own=zlib.compress(pack(offsets), 1), common=b"" if rank else common
        )
        requests.append(encode(request))
    return requests, best


def measure_plan(ranks: int, tensors: int, replicas: int) -> dict[str, float]:
    """Seconds rank 0 spends from what it gathered to what it sends, and to the encoded index."""
    payloads, describe_s = requests_of(ranks, tensors, replicas)
    began = time.process_time()
    requests = [msgspec.msgpack.decode(payload, type=PlanRequest) for payload in payloads]
    common = {each.digest: msgspec.msgpack.decode(each.common, type=RankManifest) for each in requests if each.common}
    manifests = [each.manifest(common) for each in requests]
    plan = plan_stamped(manifests, lambda keys, _: [None] * len(keys)) or plan_save(manifests)
    values, tree = merge_rank_values([each.values for each in manifests]), merge_rank_trees(manifests)
    replies = {encode(answer) for answer in split_by_rank(plan, ranks)}  # equal answers travel once
    planned = time.process_time()
    index = encode_index(index_of(plan, values, tree))
    done = time.process_time()
    return {
        "ranks": ranks,
        "shards": ranks * tensors,
        "chunks": len(index_of(plan, values, tree).chunks),
        "gathered_mb": sum(map(len, payloads)) / 1e6,
        "sent_mb": sum(map(len, replies)) / 1e6,
        "index_mb": len(index) / 1e6,
        "plan_s": planned - began,
        "index_s": done - planned,
        "coordinator_s": done - began,
        "a_rank_s": describe_s,
    }


def index_of_rows(each: int, tensors: int) -> Index:
    """An index of tensors that so many ranks have saved, each four rows of every tensor to a file of its own."""
    shards, rows = each * tensors, np.arange(each) * 4
    count = np.zeros(tensors, np.uint8)
    return Index(
        keys=strings_of(sorted(f"model.layers.{i}.weight".encode() for i in range(tensors))),
        tensors=Tensors(count + 9, count + 2, np.tile([[4 * each, 8]], (tensors, 1)), count, np.arange(tensors)),
        chunk_ends=np.arange(1, tensors + 1) * each,
        chunks=Chunks(
            np.stack([np.tile(rows, tensors), np.zeros(shards, np.int64)], axis=1),
            np.tile(np.array([[4, 8]]), (shards, 1)),
            np.tile(np.arange(each), tensors),
            np.repeat(np.arange(tensors) * 128, each),
        ),
        value_keys=strings_of([]),
        value_data=strings_of([]),
        make_tree=bytes,
    )


def measure_rank(ranks: int, tensors: int) -> dict[str, float]:
    """CPU seconds and bytes of index of one rank that loads its shard of every tensor; and what rank 0 adds for that."""
    made = index_of_rows(ranks, tensors)
    began = time.process_time()
    parts = parts_of(made)
    packed = time.process_time()
    data = memoryview(encode_index(made, parts=parts))
    reads: list[int] = []

    def load(offset: int, nbytes: int, decode: Callable[[memoryview], T]) -> T:
        reads.append(nbytes)
        return decode(data[offset : offset + nbytes])

    def all_of_it() -> Index:
        raise AssertionError("a rank does not read the whole index")

    own, shape = np.tile([[ranks // 2 * 4, 0]], (tensors, 1)), np.tile([[4, 8]], (tensors, 1))
    wants = ReadRequests(own, shape, np.arange(tensors), np.arange(1, tensors + 1) * 128)
    head = head_nbytes(bytes(data[: 1 << 16])) or 0
    planning = time.process_time()
    index = load(0, head, lambda found: PartialIndex(found, len(data), load, all_of_it, where="index"))
    runs, _ = plan_load(index.narrowed(wants.tensor, wants), wants, np.full(ranks, tensors * 128))
    done = time.process_time()
    return {
        "chunks": ranks * tensors,
        "index_mb": len(data) / 1e6,
        "pack_s": packed - began,
        "read_mb": sum(reads) / 1e6,
        "reads": len(reads),
        "a_rank_s": done - planning,
        "runs": len(runs),
    }


def measure_index(shards: int = 1_000_000, tensors: int = 1_000) -> dict[str, float]:
    """Seconds to encode an index of a million shards, to open it, and to find one tensor in it."""
    made = index_of_rows(shards // tensors, tensors)
    began = time.process_time()
    data = encode_index(made)
    encoded = time.process_time()
    index = decode_index(data, where="index")
    opened = time.process_time()
    row = index.keys.find(f"model.layers.{tensors // 2}.weight".encode())
    boxes: Boxes = index.chunks.take(index.chunk_rows(row)).boxes
    found = time.process_time()
    return {
        "shards": shards,
        "mb": len(data) / 1e6,
        "encode_s": encoded - began,
        "open_s": opened - encoded,
        "lookup_ms": (found - opened) * 1e3,
        "boxes_found": len(boxes),
    }


def run() -> dict[str, object]:
    """Measure everything; the numbers go into the table and the JSON."""
    return {
        "fsdp": measure_plan(1024, 500, 1),
        "hsdp": measure_plan(1024, 500, 2),
        "replicated": measure_plan(1024, 500, 1024),
        "index": measure_index(),
    }


if __name__ == "__main__":
    ranks = [int(each) for each in sys.argv[1:]]
    results = {f"a loading rank of {each}": measure_rank(each, 1000) for each in ranks} or run()
    for name, row in results.items():
        print(name, {key: round(value, 3) for key, value in row.items()})
