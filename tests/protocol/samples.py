"""States over all ranks for the protocol, fresh and blank, and what they hold."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.toolkit.samples import in_chunks, numbered, seen, sharded_tree, spread_out

__all__ = ["Counter", "blank", "holds", "on_few_ranks", "quietly", "state_of_ranks", "torch_fills_metadata"]


class Counter:
    def __init__(self, count=0):
        self.count = count
        self.log = torch.full((3,), float(count))

    def state_dict(self):
        return {"count": self.count, "log": self.log}

    def load_state_dict(self, state_dict):
        self.count, self.log = state_dict["count"], state_dict["log"]


def on_few_ranks(full):
    """A DTensor on a mesh that the last rank, where there are several, is no part of."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if size == 1:
        return spread_out(full, mesh, *[torch.distributed.tensor.Shard(0)])
    from torch.distributed.device_mesh import DeviceMesh

    few = DeviceMesh("cpu", list(range(size - 1)))
    return DTensor.from_local(
        full.chunk(size - 1)[dist.get_rank()].clone()
        if dist.get_rank() < size - 1
        else torch.empty(0, *full.shape[1:]),
        few,
        [torch.distributed.tensor.Shard(0)],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def state_of_ranks():
    return {
        **sharded_tree(),
        "deep": {"er": {"list": [numbered(3), {"x": numbered(2)}, 5], "set": {1, 2}}, "0": {"1": numbered(4)}},
        "long list": [1, 2, 3],
        "one": in_chunks(numbered(7, dtype=torch.float64)),
        "no elements": numbered(0, 3),
        "few": on_few_ranks(numbered(12, 2)),
        "counter": Counter(dist.get_rank() * 0 + 4),
    }


def blank(value):
    """The same state with nothing in it: zeros in the same memory layout, and other objects."""
    if isinstance(value, Counter):
        return Counter()
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list) and any(isinstance(each, (dict, torch.Tensor)) for each in value):
        return [blank(each) for each in value]
    if hasattr(value, "local_shards"):
        for shard in value.local_shards():
            shard.tensor.zero_()
        return value
    if isinstance(value, DTensor):
        local = value._local_tensor
        return DTensor.from_local(
            torch.zeros_like(local),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "blank"


def holds(state):
    return {
        key: ("counter", value.count, seen(value.log)) if isinstance(value, Counter) else seen(value)
        for key, value in state.items()
    }


def torch_fills_metadata(folder):
    """Say whether torch's writer fills the metadata it is given (2.13), or a copy that nobody else sees (2.11)."""
    returned = quietly(theirs.save, {"x": 1}, storage_writer=theirs.FileSystemWriter(folder), no_dist=True)
    return returned.version is not None


def clear_torchs_plans():
    """Make torch's planners forget their plans, which are kept by the name of the class."""
    for kept in [each for name, each in vars(theirs.SavePlanner).items() if name.startswith("_cached")]:
        kept.clear()


def quietly(function, *args, **kwargs):
    """Call a function whose warnings are another test's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)
