"""
Save from FSDP2 shards on two CPU ranks, then load into another sharding of the same ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py
"""
# ruff: noqa: INP001, T201 - a script to read and run

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkeep as sk


def build(seed: int, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 257), nn.GELU(), nn.Linear(257, 64))
    return fully_shard(model, mesh=mesh)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    place = [tempfile.mkdtemp() + "/step-1" if rank == 0 else ""]
    dist.broadcast_object_list(place)  # every rank names the same place
    where = place[0]

    # Every rank calls save, with its own shards; what belongs to one rank alone is wrapped in PerRank.
    model = build(0, init_device_mesh("cpu", (2,)))
    state = {"model": model.state_dict(), "step": 1, "rng": sk.PerRank(torch.get_rng_state())}
    saved = sk.save(state, where, step=1)
    print(f"rank {rank} wrote {saved.bytes_written} of {saved.bytes_total} bytes")

    # Another mesh, other weights: the load reads only the boxes this rank holds now.
    other = build(1, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    state = {"model": other.state_dict(), "step": 0, "rng": sk.PerRank(torch.get_rng_state())}
    loaded = sk.load(state, where)
    print(f"rank {rank} read {loaded.bytes_read} bytes of step {state['step']}")

    pairs = zip(model.parameters(), other.parameters(), strict=True)
    same = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
    print(f"rank {rank}: weights are equal, bit for bit" if same else f"rank {rank}: weights DIFFER")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
