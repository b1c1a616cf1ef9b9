"""
Make one golden checkpoint of torch's own: `python tests/golden/make_torch.py FOLDER`, with the torch that it is to show.

Two ranks save plain, transposed and sharded tensors, numbers and objects. The test knows what is in it: `state_of`.
This file imports nothing of ours, so that any torch since 2.3 can run it in an environment with nothing else in it.
"""

import os
import socket
import sys
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

RANKS = 2


def whole(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns).to(dtype)


def state_of(shard: Any = lambda tensor: tensor) -> dict[str, Any]:
    """Return what the checkpoint holds; `shard` cuts a tensor by rows over the ranks."""
    return {
        "model": {
            "weight": shard(whole(6, 4, torch.bfloat16)),
            "bias": whole(1, 5, torch.float32)[0],
            "transposed": whole(3, 2, torch.float64).t(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(7, dtype=torch.int64),
        },
        "optimizer": {"state": [{"exp_avg": shard(whole(6, 4, torch.float32)), "step": torch.tensor(3.0)}], "lr": 0.5},
        "step": 12,
        "name": "run",
        "seen": {"a": [1, 2, (3, "x")], "none": None},
    }


def _rank(rank: int, folder: str, port: int) -> None:
    import torch.distributed.checkpoint as dcp

    try:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    except ImportError:  # up to 2.4
        from torch.distributed._tensor import Shard, distribute_tensor
        from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    dcp.save(state_of(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])), checkpoint_id=folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(_rank, (sys.argv[1], port), nprocs=RANKS)
