"""States for Hugging Face files, spread over ranks, and the other library's word on what files hold."""

import json
import os
import tracemalloc
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp import hf_storage, state_dict_loader, state_dict_saver
from tests.protocol.samples import quietly
from tests.toolkit.samples import in_chunks, mesh_of, numbered, seen, spread_out

INDEX = "model.safetensors.index.json"

SAVERS = {"ours": state_dict_saver.save, "theirs": theirs.save}
LOADERS = {"ours": state_dict_loader.load, "theirs": theirs.load}
WRITERS = {"ours": hf_storage.HuggingFaceStorageWriter, "theirs": theirs.HuggingFaceStorageWriter}
READERS = {"ours": hf_storage.HuggingFaceStorageReader, "theirs": theirs.HuggingFaceStorageReader}


def full_state():
    """Tensors of many dtypes and shapes, some of which ranks will share out."""
    return {
        "rows": numbered(9, 7),
        "columns": numbered(5, 11, dtype=torch.bfloat16),
        "deep": numbered(3, 6, 4, dtype=torch.float64),
        "ints": numbered(8, 2, dtype=torch.int64),
        "bytes": numbered(13, dtype=torch.uint8),
        "flags": numbered(6) % 2 == 0,
        "eight": numbered(4, 6, dtype=torch.float8_e4m3fn),
        "step": torch.tensor(7, dtype=torch.int32),
        "nothing": numbered(0, 3),
        "alone": numbered(3),
    }


CUTS = {"rows": Cut(0), "columns": Cut(1), "deep": Cut(1), "ints": Cut(0), "eight": Cut(1), "alone": Replicate()}


def spread_state(turn=0):
    """The same over all ranks: DTensors on both axes, a ShardedTensor, and tensors that all ranks have."""
    mesh = mesh_of(dist.get_world_size())
    state = {}
    for key, value in full_state().items():
        cut = CUTS.get(key)
        if cut is None:
            state[key] = value
            continue
        if turn and isinstance(cut, Cut):
            cut = Cut((cut.dim + turn) % value.dim())
        state[key] = spread_out(value, mesh, cut)
    state["chunks"] = in_chunks(numbered(10, 3))
    return state


def save(side, state, folder, *, saver=None, no_dist=False, **options):
    writer = WRITERS[side](path=folder, **options)
    return quietly(SAVERS[saver or side], state, storage_writer=writer, no_dist=no_dist)


def load(side, state, folder, *, loader=None, no_dist=False, **options):
    reader = READERS[side](path=folder, **options)
    quietly(LOADERS[loader or side], state, storage_reader=reader, no_dist=no_dist)
    return state


def by_library(folder):
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            found.update(load_file(os.path.join(folder, name)))
    return found


def same(found, expected):
    return sorted(key for key in found.keys() | expected.keys() if seen(found.get(key)) != seen(expected.get(key)))


def shard(folder, number, parts, **metadata):
    """Write a file as torch does: `parts` gives each key a tensor and its offsets."""
    os.makedirs(folder, exist_ok=True)
    info = {key: {"saved_offsets": list(offsets)} for key, (_, offsets) in parts.items()}
    path = os.path.join(folder, f"shard-{number:05}-model-00001-of-00001.safetensors")
    save_file(
        {key: tensor.contiguous() for key, (tensor, _) in parts.items()},
        path,
        metadata={"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt", **metadata},
    )
    return path


@contextmanager
def memory_used():
    """Give a list that will hold the most bytes that the block had beyond those at its beginning: Python's, and all."""
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    used, before = [], resident("VmHWM")
    tracemalloc.start()
    try:
        yield used
        used += [tracemalloc.get_traced_memory()[1], resident("VmHWM") - before]
    finally:
        tracemalloc.stop()


def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))
