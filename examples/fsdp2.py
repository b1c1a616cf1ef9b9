"""
Train with FSDP2 on two CPU ranks and save; then load into another sharding and a fresh optimizer, and go on.

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


def build(seed: int, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(64, 257), nn.GELU(), nn.Linear(257, 64)), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(4, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    place = [tempfile.mkdtemp() + "/step-1" if rank == 0 else ""]
    dist.broadcast_object_list(place)  # every rank names the same place
    where = place[0]

    # Every rank calls save with the same objects; each writes the shards it holds.
    model, optimizer = build(0, init_device_mesh("cpu", (2,)))
    train_step(model, optimizer)
    saved = sk.save({"model": model, "optim": optimizer, "rng": sk.RNG(), "step": 1}, where, step=1)
    print(f"rank {rank} wrote {saved.bytes_written} of {saved.bytes_total} bytes")

    # Another mesh, other weights, an optimizer without state: the load reads only the boxes this rank holds now.
    other, fresh = build(1, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    state = {"model": other, "optim": fresh, "rng": sk.RNG(), "step": 0}
    loaded = sk.load(state, where)
    print(f"rank {rank} read {loaded.bytes_read} bytes of step {state['step']}")

    same = train_step(model, optimizer) == train_step(other, fresh)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    same = same and all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
    print(f"rank {rank}: the next step is the same, bit for bit" if same else f"rank {rank}: the next step DIFFERS")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
