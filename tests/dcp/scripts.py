"""
Scripts that save with one module and load with another: `writes` and `reads` are torch's checkpoint package or ours.

Each runs on every rank, in a folder of its own that all ranks see, and returns what there is to compare; not one of
them knows which side it was given.
"""

import collections
import copy
import io
import os
import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from tests.dcp.sides import quietly
from tests.engine.samples import all_dtypes, random_tensor, raw_view
from tests.protocol.samples import Counter, blank, clear_torchs_plans, on_few_ranks
from tests.toolkit.samples import grid, in_chunks, mesh_of, numbered, seen, sharded_tensor, spread_out
from tests.training.samples import Net, adamw, train
from tests.training.wrappers import WRAPPERS

SCRIPTS: dict[str, Any] = {}
PLAIN: list[str] = []
"""Those in which all ranks hold the same."""
MISTAKES: list[str] = []
"""Those that end in an error."""


TORCH_SAYS_WHERE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether torch's `save` returns metadata that say where everything is; ours always do."""


def script(function: Any) -> Any:
    """List a function as one of the scripts."""
    SCRIPTS[function.__name__] = function
    return function


def plain_script(function: Any) -> Any:
    """List one of a state that is not spread over ranks."""
    PLAIN.append(function.__name__)
    return script(function)


def mistake(function: Any) -> Any:
    """List one that ends in an error."""
    MISTAKES.append(function.__name__)
    return script(function)


def described(metadata: Any) -> Any:
    """Everything that metadata say of the state, in words that both sides share."""
    entries = {}
    for key, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ == "BytesStorageMetadata":
            entries[key] = "bytes"
            continue
        chunks = sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks)
        properties = entry.properties
        entries[key] = (
            tuple(entry.size),
            chunks,
            str(properties.dtype),
            str(properties.layout),
            properties.requires_grad,
            str(properties.memory_format),
            properties.pin_memory,
        )
    if not TORCH_SAYS_WHERE:
        return entries, metadata.planner_data
    places = sorted((i.fqn, tuple(i.offset) if i.offset is not None else (), i.index) for i in metadata.storage_data)
    return (
        entries,
        metadata.planner_data,
        str(places),
        metadata.version,
        os.path.basename(metadata.storage_meta.checkpoint_id),
    )


def round_trip(
    writes: Any,
    reads: Any,
    folder: str,
    state: dict[str, Any],
    into: dict[str, Any],
    *,
    writer: dict[str, Any] | None = None,
    save: dict[str, Any] | None = None,
    save_planner: dict[str, Any] | None = None,
    load: dict[str, Any] | None = None,
    load_planner: dict[str, Any] | None = None,
) -> Any:
    storage = writes.FileSystemWriter(folder, **(writer or {}))
    plans = writes.DefaultSavePlanner(**(save_planner or {}))
    metadata = quietly(writes.save, state, storage_writer=storage, planner=plans, **(save or {}))
    fills = reads.DefaultLoadPlanner(**(load_planner or {}))
    quietly(reads.load, into, storage_reader=reads.FileSystemReader(folder), planner=fills, **(load or {}))
    on_disk = reads.FileSystemReader(folder)
    rank = {"rank": dist.get_rank()} if (save or {}).get("use_collectives") is False else {}
    return seen_all(into), described(metadata), described(on_disk.read_metadata(**rank))


class Marked(torch.Tensor):
    """A class of tensors that adds nothing."""


def seen_all(value: Any) -> Any:
    """What a state holds: as `seen`, with the types of containers and the order of keys."""
    if isinstance(value, Counter):
        return ("counter", value.count, seen(value.log))
    if isinstance(value, dict):
        return (type(value).__name__, [(repr(key), seen_all(each)) for key, each in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [seen_all(each) for each in value])
    if isinstance(value, Marked):
        return ("marked", seen(value.as_subclass(torch.Tensor)))
    if type(value) is torch.Tensor:
        return (seen(value), value.stride(), value.is_conj(), value.is_neg(), value.requires_grad)
    return seen(value)


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor.detach())
    raw_view(made).zero_() if made.numel() else None
    return made


# Plain states


@plain_script
def nested_values(writes: Any, reads: Any, folder: str) -> Any:
    state = {
        "model": {"w": numbered(3, 4), "deep": {"er": {"b": numbered(2)}}},
        "list": [numbered(3), {"x": numbered(2), "name": "a"}, 5, None],
        "plain list": [1, 2, "three"],
        "tuple": (1, numbered(2), {"in": 3}),
        "ordered": collections.OrderedDict(z=numbered(1), a=1),
        "set": {1, 2},
        "array": np.arange(4.0),
        "none": None,
        "empty list": [],
        "empty tuple": (),
        "empty dict": {},
        "numbers": {0: numbered(2), 1: {"step": numbered(1)}},
        "text": "\u00fcber\n",
        "bytes": b"\x00\xff",
        "big": 1 << 70,
        "inf": float("inf"),
        "truth": True,
        "complex": 1 + 2j,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "dotted.key": numbered(1),
        "": numbered(1),
    }
    return round_trip(writes, reads, folder, state, blank(state))


@plain_script
def not_flattened(writes: Any, reads: Any, folder: str) -> Any:
    state = {"w": numbered(3), "nested": {"a": 1, "b": {"c": numbered(2)}}, "n": 4}
    no = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    return round_trip(
        writes, reads, folder, state, {"w": torch.zeros(3), "nested": 0, "n": 0}, save_planner=no, load_planner=no
    )


@plain_script
def statefuls(writes: Any, reads: Any, folder: str) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"counter": Counter(5), "model": model, "optimizer": optimizer, "n": 1}
    torch.manual_seed(1)
    other = nn.Linear(3, 2)
    steps = torch.optim.Adam(other.parameters(), lr=0.5)
    other(torch.ones(1, 3)).sum().backward()
    steps.step()
    into = {"counter": Counter(), "model": other, "optimizer": steps, "n": 0}
    storage = writes.FileSystemWriter(folder)
    quietly(writes.save, state, storage_writer=storage)
    quietly(reads.load, into, checkpoint_id=folder)
    return seen_all(into["counter"]), seen_all(other.state_dict()), seen_all(steps.state_dict()), into["n"]


# Tensors of every kind


def _torch_can(dtype: torch.dtype) -> bool:
    """Say whether torch's checkpoint can save and load a dtype: it must know its size, and copy it."""
    try:
        torch._utils._element_size(dtype)
        torch.zeros(1, dtype=torch.uint8).to(torch.float32).to(dtype).clone()
        torch.empty(2, dtype=dtype).copy_(torch.empty(2, dtype=dtype))
    except (TypeError, RuntimeError):
        return False
    return True


@plain_script
def every_dtype(writes: Any, reads: Any, folder: str) -> Any:
    state = {str(d): random_tensor((5, 3), d, seed) for seed, d in enumerate(all_dtypes()) if _torch_can(d)}
    into = {key: _blank(each) for key, each in state.items()}
    return round_trip(writes, reads, folder, state, into)


@plain_script
def strange_memory(writes: Any, reads: Any, folder: str) -> Any:
    base = numbered(8, 9)
    state = {
        "channels last": numbered(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "channels last 3d": numbered(1, 2, 3, 2, 2).to(memory_format=torch.channels_last_3d),
        "transposed": numbered(4, 6).t(),
        "permuted": numbered(2, 3, 4).permute(2, 0, 1),
        "strided": base[::2, 1::3],
        "a row of a larger one": base[3],
        "the last column": base[:, 8],
        "the same memory": base,
        "expanded": numbered(1, 4).expand(3, 4),
        "one element": torch.tensor(2.5),
        "nothing": torch.empty(0),
        "no rows": torch.empty(0, 3, dtype=torch.int64),
        "no columns": torch.empty(3, 0),
        "half a storage": torch.empty(0).set_(numbered(10).untyped_storage(), 0, (5,), (1,)),
        "one by one": numbered(1, 1, 1),
    }
    into = {key: torch.zeros(each.shape, dtype=each.dtype) for key, each in state.items()}
    return round_trip(writes, reads, folder, state, into)


@plain_script
def into_strange_memory(writes: Any, reads: Any, folder: str) -> Any:
    state = {
        "cl": numbered(2, 3, 4, 5),
        "t": numbered(4, 6),
        "s": numbered(4, 3),
        "row": numbered(5),
        "0d": torch.tensor(3.0),
    }
    large = torch.zeros(8, 9)
    into = {
        "cl": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "t": torch.zeros(6, 4).t(),
        "s": large[::2, ::3],
        "row": torch.zeros(7, 5)[3],
        "0d": torch.zeros(3)[1],
    }
    found = round_trip(writes, reads, folder, state, into)
    return found, seen(large)


@plain_script
def conjugates_and_negatives(writes: Any, reads: Any, folder: str) -> Any:
    line = torch.complex(numbered(6), numbered(6) + 10)
    state = {"conj": line.conj(), "neg": line.conj().imag, "real": line.real, "rows": line.reshape(2, 3).conj().t()}
    under = torch.zeros(6, dtype=torch.complex64)
    into = {key: torch.zeros(each.shape, dtype=each.dtype) for key, each in state.items()} | {"into": under.conj()}
    return round_trip(writes, reads, folder, state | {"into": line}, into), seen(under)


@plain_script
def classes_of_tensors(writes: Any, reads: Any, folder: str) -> Any:
    state = {
        "p": nn.Parameter(numbered(3, 2)),
        "frozen": nn.Parameter(numbered(2), requires_grad=False),
        "buffer": nn.Buffer(numbered(2)),
        "from marked": numbered(3).as_subclass(Marked),
        "into marked": numbered(3),
    }
    into = {
        "p": nn.Parameter(torch.zeros(3, 2)),
        "frozen": nn.Parameter(torch.zeros(2)),
        "buffer": nn.Buffer(torch.zeros(2)),
        "from marked": torch.zeros(3),
        "into marked": torch.zeros(3).as_subclass(Marked),
    }
    found = round_trip(writes, reads, folder, state, into)
    return found, [(type(each).__name__, each.requires_grad, each._version > 0) for each in into.values()]


@plain_script
def quantized(writes: Any, reads: Any, folder: str) -> Any:
    made = [quietly(torch.quantize_per_tensor, each, 0.1, 0, torch.quint8) for each in (numbered(4), torch.zeros(4))]
    into = {"q": made[1]}
    quietly(writes.save, {"q": made[0]}, checkpoint_id=folder)
    quietly(reads.load, into, checkpoint_id=folder)
    return made[1].int_repr().tolist(), made[1].q_scale()


@plain_script
def other_dtypes(writes: Any, reads: Any, folder: str) -> Any:
    state = {
        "f32": numbered(6) * 1.7 + 1e5,
        "i64": numbered(6, dtype=torch.int64) * 300,
        "b": torch.tensor([True, False]),
        "bf16": numbered(4, dtype=torch.bfloat16),
        "t": numbered(3, 4).t(),
    }
    into = {
        "f32": torch.zeros(6, dtype=torch.float16),
        "i64": torch.zeros(6, dtype=torch.uint8),
        "b": torch.zeros(2),
        "bf16": torch.zeros(4, dtype=torch.float64),
        "t": torch.zeros(4, 3, dtype=torch.int32),
    }
    return round_trip(writes, reads, folder, state, into)


@script
def on_meta(writes: Any, reads: Any, folder: str) -> Any:
    state = {"w": numbered(3, 2), "d": spread_out(numbered(5, 2), mesh_of(dist.get_world_size()), Cut(0))}
    with torch.device("meta"):
        into: dict[str, Any] = {"w": torch.empty(3, 2)}
    into["d"] = distribute_tensor(torch.empty(5, 2, device="meta"), mesh_of(dist.get_world_size()), [Cut(0)])
    return round_trip(writes, reads, folder, state, into)


# Tensors over ranks


@script
def one_mesh_dimension(writes: Any, reads: Any, folder: str) -> Any:
    line = mesh_of(dist.get_world_size())
    state = {
        "even": spread_out(numbered(12, 3), line, Cut(0)),
        "uneven": spread_out(numbered(5, 3), line, Cut(0)),
        "columns": spread_out(numbered(3, 7, dtype=torch.bfloat16), line, Cut(1)),
        "few rows": spread_out(numbered(2, 3), line, Cut(0)),
        "no rows": spread_out(numbered(0, 3), line, Cut(0)),
        "replicated": spread_out(numbered(4), line, Replicate()),
        "scalar": spread_out(torch.tensor(2.5), line, Replicate()),
        "some ranks": on_few_ranks(numbered(12, 2)),
        "last axis": spread_out(numbered(2, 3, 5), line, Cut(2)),
    }
    return round_trip(writes, reads, folder, state, blank(state))


@script
def two_mesh_dimensions(writes: Any, reads: Any, folder: str) -> Any:
    size = dist.get_world_size()
    square = grid() if size % 2 == 0 or size == 1 else mesh_of(size, 1)
    state = {
        "hybrid": spread_out(numbered(6, 5), square, Replicate(), Cut(0)),
        "both": spread_out(numbered(7, 9, dtype=torch.float64), square, Cut(0), Cut(1)),
        "twice": spread_out(numbered(9, 2, dtype=torch.int64), square, Cut(0), Cut(0)),
        "swapped": spread_out(numbered(5, 5), square, Cut(1), Cut(0)),
        "replicated": spread_out(numbered(3), square, Replicate(), Replicate()),
    }
    return round_trip(writes, reads, folder, state, blank(state))


@script
def sharded_tensors(writes: Any, reads: Any, folder: str) -> Any:
    size = dist.get_world_size()
    boxes = [(n % size, (2 * (n // 3), 3 * (n % 3)), (2, 3)) for n in range(6)]
    state = {
        "rows": in_chunks(numbered(4 * size, 2)),
        "tiles": sharded_tensor(numbered(4, 9, dtype=torch.float16), boxes),
    }
    expected = seen_all(state)
    found = round_trip(writes, reads, folder, state, state)
    return expected == found[0], found


@script
def another_layout(writes: Any, reads: Any, folder: str) -> Any:
    size = dist.get_world_size()
    line = mesh_of(size)
    full = numbered(9, 7)
    state = {name: spread_out(full, line, Cut(0)) for name in ("columns", "rows", "whole", "replicated")}
    state["from whole"] = full
    into = {
        "columns": spread_out(torch.zeros(9, 7), line, Cut(1)),
        "rows": spread_out(torch.zeros(9, 7), grid() if size % 2 == 0 else mesh_of(1, size), Cut(0), Cut(1)),
        "whole": torch.zeros(9, 7),
        "replicated": spread_out(torch.zeros(9, 7), line, Replicate()),
        "from whole": in_chunks(torch.zeros(9, 7)),
    }
    found = round_trip(writes, reads, folder, state, into)
    alone = {"columns": torch.zeros(9, 7), "from whole": torch.zeros(9, 7)}
    quietly(reads.load, alone, checkpoint_id=folder, no_dist=True)
    return found, seen_all(alone)


@script
def fewer_ranks(writes: Any, reads: Any, folder: str) -> Any:
    size = dist.get_world_size()
    full = numbered(7, 5)
    few = max(1, size // 2)
    group = dist.new_group(list(range(few)))
    quietly(writes.save, {"w": spread_out(full, mesh_of(size), Cut(0)), "n": 3}, checkpoint_id=folder)
    if dist.get_rank() >= few:
        return None
    mine = torch.zeros(7, 5).tensor_split(few, dim=1)[dist.get_rank()]
    begin = sum(each.shape[1] for each in full.tensor_split(few, dim=1)[: dist.get_rank()])

    class Columns(reads.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            chunk = reads.metadata.ChunkStorageMetadata(torch.Size([0, begin]), mine.size())
            entry = self.metadata.state_dict_metadata["w"]
            items = reads.planner_helpers.create_read_items_for_chunk_list("w", entry, [chunk])
            return reads.LoadPlan(items)

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return mine

    quietly(reads.load, {"w": mine}, checkpoint_id=folder, planner=Columns(), process_group=group)
    return seen(mine), torch.equal(mine, full.tensor_split(few, dim=1)[dist.get_rank()])


# Models


def _trained(wrap: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = wrap(Net())
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(1))
    return model, optimizer


def _model_trip(writes: Any, reads: Any, folder: str, wrap: Any, **options: Any) -> Any:
    model, optimizer = _trained(wrap, 0)
    how = writes.state_dict.StateDictOptions(**options)
    m, o = quietly(writes.state_dict.get_state_dict, model, optimizer, options=how)
    quietly(writes.save, {"model": m, "optim": o}, checkpoint_id=folder)
    other, steps = _trained(wrap, 1)
    how = reads.state_dict.StateDictOptions(**options)
    m, o = quietly(reads.state_dict.get_state_dict, other, steps, options=how)
    into = {"model": m, "optim": o}
    quietly(reads.load, into, checkpoint_id=folder)
    quietly(reads.state_dict.set_state_dict, other, steps, model_state_dict=m, optim_state_dict=o, options=how)
    train(model, optimizer, range(1, 2))
    train(other, steps, range(1, 2))
    ended = [[seen(each) for each in quietly(trained.state_dict).values()] for trained in (model, other)]
    return seen_all(into), ended[0] == ended[1], ended[1]


def _model_script(name: str, wrap: Any, **options: Any) -> None:
    SCRIPTS[name] = lambda writes, reads, folder: _model_trip(writes, reads, folder, wrap, **options)


_model_script("fsdp1", WRAPPERS["fsdp1"])
_model_script("fsdp1_full", WRAPPERS["fsdp1"], full_state_dict=True)
_model_script("fsdp2", WRAPPERS["fsdp2"])
_model_script("hsdp", WRAPPERS["hsdp"])
_model_script("tensor_parallel", WRAPPERS["tp"])


@script
def fsdp1_sharded_tensors(writes: Any, reads: Any, folder: str) -> Any:
    torch.manual_seed(0)
    model = WRAPPERS["fsdp1_flat"](Net())
    torch.manual_seed(1)
    other = WRAPPERS["fsdp1_flat"](Net())
    with quietly(FullyShardedDataParallel.state_dict_type, model, StateDictType.SHARDED_STATE_DICT):
        quietly(writes.save, {"model": quietly(model.state_dict)}, checkpoint_id=folder)
        expected = seen_all(quietly(model.state_dict))
    with quietly(FullyShardedDataParallel.state_dict_type, other, StateDictType.SHARDED_STATE_DICT):
        into = {"model": quietly(other.state_dict)}
        quietly(reads.load, into, checkpoint_id=folder)
        quietly(other.load_state_dict, into["model"])
        found = seen_all(quietly(other.state_dict))
    return expected == found, found


# Ways to save and to load


def _some() -> dict[str, Any]:
    return {
        "d": spread_out(numbered(9, 4), mesh_of(dist.get_world_size()), Cut(0)),
        **{f"t{n}": numbered(n + 1, 3) + n for n in range(7)},
        "objects": {"a": 1, "b": "two", "c": [3]},
    }


@script
def a_file_for_each_item(writes: Any, reads: Any, folder: str) -> Any:
    state = _some()
    found = round_trip(writes, reads, folder, state, blank(state), writer={"single_file_per_rank": False})
    dist.barrier()
    return found, len([name for name in os.listdir(folder) if name.endswith(".distcp")])


@script
def several_threads(writes: Any, reads: Any, folder: str) -> Any:
    """Fewer than items, and more."""
    state, few = _some(), {"w": numbered(3)}
    return (
        round_trip(writes, reads, folder, state, blank(state), writer={"thread_count": 3, "sync_files": False}),
        round_trip(writes, reads, f"{folder}-2", few, blank(few), writer={"thread_count": 9}),
    )


@script
def nothing_at_all(writes: Any, reads: Any, folder: str) -> Any:
    return round_trip(writes, reads, folder, {}, {}), round_trip(writes, reads, f"{folder}-2", {"e": {}}, {"e": {}})


@script
def lowest_rank_saves(writes: Any, reads: Any, folder: str) -> Any:
    state = _some()
    found = round_trip(writes, reads, folder, state, blank(state), save_planner={"dedup_save_to_lowest_rank": True})
    places = reads.FileSystemReader(folder).read_metadata().storage_data
    return found, sorted((index.fqn, place.relative_path) for index, place in places.items() if index.fqn != "d")


@script
def own_keys(writes: Any, reads: Any, folder: str) -> Any:
    rank = dist.get_rank()
    state = {"all": numbered(2), "mine": {str(rank): numbered(3) + rank, f"o{rank}": [rank]}}
    return round_trip(writes, reads, folder, state, blank(state))


@script
def plans_kept(writes: Any, reads: Any, folder: str) -> Any:
    found = []
    planner = writes.DefaultSavePlanner(enable_plan_caching=True)
    for step in range(3):
        state = {"d": spread_out(numbered(9, 4) + step, mesh_of(dist.get_world_size()), Cut(0)), "step": step}
        quietly(writes.save, state, checkpoint_id=f"{folder}-{step}", planner=planner)
        into = blank(state)
        quietly(reads.load, into, checkpoint_id=f"{folder}-{step}")
        found.append(seen_all(into))
    clear_torchs_plans()
    return found


@script
def part_of_the_keys(writes: Any, reads: Any, folder: str) -> Any:
    state = {"a": numbered(2), "b": {"c": 1}, "more": numbered(3)}
    into = {"a": torch.zeros(2), "b": {"c": 0, "new": torch.ones(2)}, "absent": torch.ones(1)}
    return round_trip(writes, reads, folder, state, into, load_planner={"allow_partial_load": True})


@script
def by_keys(writes: Any, reads: Any, folder: str) -> Any:
    state = {
        "model": {"w": numbered(2, 3), "b": numbered(3)},
        "meta": {"step": 3, "tags": ["a"]},
        "x": [numbered(1), 2],
    }
    quietly(writes.save, state, checkpoint_id=folder)
    read = reads.state_dict_loader._load_state_dict_from_keys
    asked = (None, "model", {"model.w", "meta.step"}, "absent", {"x", "meta"})
    # In the order of the metadata, which is that in which ranks were given items, and no promise of either side.
    return [sorted(seen_all(quietly(read, keys, checkpoint_id=folder))[1], key=str) for keys in asked]


@script
def in_halves(writes: Any, reads: Any, folder: str) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    first = list(range(max(1, size // 2)))
    rest = [r for r in range(size) if r not in first]
    groups = [dist.new_group(ranks) for ranks in (first, rest) if ranks]
    half = int(rank not in first)
    state = {"w": numbered(3) + half, "half": half, "mine": {str(rank): rank}}
    into = {"w": torch.zeros(3), "half": None, "mine": {str(rank): None}}
    group = {"process_group": groups[half]}
    return round_trip(writes, reads, f"{folder}-{half}", state, into, save=group, load=group)


@script
def each_alone(writes: Any, reads: Any, folder: str) -> Any:
    rank = dist.get_rank()
    state = {"w": numbered(3) + rank, "rank": rank}
    alone = {"no_dist": True}
    return round_trip(writes, reads, f"{folder}-{rank}", state, blank(state), save=alone, load=alone)


@script
def without_collectives(writes: Any, reads: Any, folder: str) -> Any:
    rank = dist.get_rank()
    state = {"w": numbered(3) + rank, "rank": rank}
    found = round_trip(writes, reads, folder, state, blank(state), save={"use_collectives": False})
    dist.barrier()
    return found, sorted(name for name in os.listdir(folder) if not name.endswith(".sums"))


@script
def over_an_older_one(writes: Any, reads: Any, folder: str) -> Any:
    first = {"w": numbered(4), "gone": 1}
    quietly(reads.save, first, checkpoint_id=folder)
    state = {"w": numbered(5) + 1, "new": 2}
    found = round_trip(writes, reads, folder, state, blank(state))
    return found, seen_all(quietly(reads.state_dict_loader._load_state_dict_from_keys, checkpoint_id=folder))


@plain_script
def old_functions(writes: Any, reads: Any, folder: str) -> Any:
    state = {"w": numbered(3), "n": 2}
    quietly(writes.save_state_dict, state, writes.FileSystemWriter(folder))
    into = {"w": torch.zeros(3), "n": 0}
    quietly(reads.load_state_dict, into, reads.FileSystemReader(folder))
    return seen_all(into)


@plain_script
def flattened_as_in_2_3(writes: Any, reads: Any, folder: str) -> Any:
    """Torch's own code makes the old names: lists without tensors were walked too."""
    from torch.distributed.checkpoint import _version

    state = {"groups": [{"lr": 0.1, "betas": [0.9, 0.99]}], "names": ["a", ["b", 2]], "w": numbered(2)}
    import torch.distributed.checkpoint as torchs

    _version._derived_version = "2_3"
    try:
        quietly(torchs.save, state, checkpoint_id=folder)
    finally:
        _version._derived_version = None
    keys = sorted(reads.FileSystemReader(folder).read_metadata().state_dict_metadata)
    into = {"groups": [{"lr": 0.0, "betas": [0.0, 0.0]}], "names": ["", ["", 0]], "w": torch.zeros(2)}
    quietly(reads.load, into, checkpoint_id=folder)
    return keys, seen_all(into)


def _loaded_with(reads: Any, folder: str, change: Any) -> Any:
    """Save with torch, change the metadata, and return what is loaded."""
    import torch.distributed.checkpoint as torchs

    quietly(torchs.save, {"w": numbered(4, 2), "n": 1}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        path = os.path.join(folder, ".metadata")
        with open(path, "rb") as file:
            metadata = pickle.load(file)
        change(metadata)
        with open(path, "wb") as file:
            pickle.dump(metadata, file)
    dist.barrier()
    into = {"w": torch.zeros(4, 2), "n": 0}
    quietly(reads.load, into, checkpoint_id=folder)
    return seen_all(into)


@plain_script
def attributes_of_tomorrow(writes: Any, reads: Any, folder: str) -> Any:
    """Metadata with more attributes than this torch has, as a later one may write them."""

    def change(metadata: Any) -> None:
        metadata.later = {"a": [1, 2.5], "b": None}
        metadata.state_dict_metadata["w"].note = "x"
        next(iter(metadata.storage_data.values())).crc = 5

    return _loaded_with(reads, folder, change), reads.FileSystemReader(folder).read_metadata().later


@plain_script
def metadata_of_older_ones(writes: Any, reads: Any, folder: str) -> Any:
    return _loaded_with(
        reads, folder, lambda metadata: [vars(metadata).pop(key) for key in ("storage_meta", "version")]
    )


# Mistakes


def _misfit(name: str, into: dict[str, Any]) -> None:
    def load(writes: Any, reads: Any, folder: str) -> Any:
        return round_trip(writes, reads, folder, {"w": numbered(2, 3)}, copy.deepcopy(into))

    load.__name__ = name
    mistake(load)


_misfit("a_key_that_is_not_there", {"w": torch.zeros(2, 3), "absent": torch.zeros(1)})
_misfit("an_object_that_is_not_there", {"w": torch.zeros(2, 3), "absent": 1})
_misfit("another_size", {"w": torch.zeros(3, 2)})


@mistake
def no_checkpoint(writes: Any, reads: Any, folder: str) -> Any:
    quietly(reads.load, {"w": torch.zeros(2)}, checkpoint_id=folder)


@mistake
def no_storage(writes: Any, reads: Any, folder: str) -> Any:
    quietly(writes.save, {"w": numbered(2)})


@mistake
def no_place(writes: Any, reads: Any, folder: str) -> Any:
    quietly(reads.load, {"w": numbered(2)}, checkpoint_id="nowhere://x")


@mistake
def must_not_replace(writes: Any, reads: Any, folder: str) -> Any:
    quietly(writes.save, {"w": numbered(2)}, checkpoint_id=folder)
    quietly(writes.save, {"w": numbered(2)}, storage_writer=writes.FileSystemWriter(folder, overwrite=False))


@mistake
def what_cannot_be_pickled(writes: Any, reads: Any, folder: str) -> Any:
    quietly(writes.save, {"f": lambda: 0}, checkpoint_id=folder)


@mistake
def one_rank_cannot(writes: Any, reads: Any, folder: str) -> Any:
    class Failing(writes.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if dist.get_rank() == dist.get_world_size() - 1:
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    quietly(writes.save, _some(), storage_writer=Failing(folder))


@mistake
def two_values_of_one_name(writes: Any, reads: Any, folder: str) -> Any:
    quietly(writes.save, {"a": {"b": numbered(2)}, "a.b": numbered(3)}, checkpoint_id=folder)


@mistake
def boxes_that_overlap(writes: Any, reads: Any, folder: str) -> Any:
    size = dist.get_world_size()

    class Twice(writes.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            item = plan.items[0]
            chunk = writes.ChunkStorageMetadata(torch.Size([dist.get_rank()]), torch.Size([3]))
            data = writes.planner.TensorWriteData(chunk, item.tensor_data.properties, torch.Size([size + 2]))
            index = writes.metadata.MetadataIndex("w", torch.Size([dist.get_rank()]))
            shard = writes.WriteItem(index, writes.planner.WriteItemType.SHARD, tensor_data=data)
            self.plan = writes.SavePlan([shard] * (1 if size > 1 else 2), planner_data=plan.planner_data)
            return self.plan

    quietly(writes.save, {"w": numbered(3)}, checkpoint_id=folder, planner=Twice())


@mistake
def a_file_is_gone(writes: Any, reads: Any, folder: str) -> Any:
    quietly(writes.save, {"w": numbered(2)}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        os.unlink(
            os.path.join(folder, reads.FileSystemReader(folder).read_metadata().storage_data.popitem()[1].relative_path)
        )
    dist.barrier()
    quietly(reads.load, {"w": torch.zeros(2)}, checkpoint_id=folder)


@mistake
def metadata_cut_short(writes: Any, reads: Any, folder: str) -> Any:
    quietly(writes.save, {"w": numbered(2)}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        os.truncate(os.path.join(folder, ".metadata"), 40)
    dist.barrier()
    quietly(reads.load, {"w": torch.zeros(2)}, checkpoint_id=folder)


@plain_script
def planners_of_users(writes: Any, reads: Any, folder: str) -> Any:
    """Planners that change what is saved and loaded, as documents of torch show them."""

    class Half(writes.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - torch's name
            return object.half() if isinstance(object, torch.Tensor) else super().transform_object(write_item, object)

    class Rename(reads.DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            self.renamed = state_dict
            super().set_up_planner({f"old.{key}": each for key, each in state_dict.items()}, metadata, is_coordinator)

        def load_bytes(self, read_item: Any, value: Any) -> None:
            self.renamed[read_item.dest_index.fqn.removeprefix("old.")] = torch.load(value, weights_only=False)

    class Doubles(reads.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return torch.zeros(tuple(read_item.lengths))

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            self.lookup_tensor(read_item.dest_index).copy_(2 * tensor)

    quietly(writes.save, {"old": {"w": numbered(4, 2), "n": 3}}, checkpoint_id=folder, planner=Half())
    into = {"w": torch.zeros(4, 2), "n": 0}
    quietly(reads.load, into, checkpoint_id=folder, planner=Rename())
    twice = {"old": {"w": torch.zeros(4, 2)}}
    quietly(reads.load, twice, checkpoint_id=folder, planner=Doubles())
    return seen_all(into), seen_all(twice)


@plain_script
def objects_as_bytes(writes: Any, reads: Any, folder: str) -> Any:
    return round_trip(writes, reads, folder, {"io": io.BytesIO(b"abc"), "w": numbered(1)}, {"w": torch.zeros(1)})
