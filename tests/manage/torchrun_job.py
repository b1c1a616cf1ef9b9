"""
A training script for `torchrun`, which test_signals.py starts: python -m torch.distributed.run ... torchrun_job.py DIR

Two Checkpointers handle signals: one that ends the job when SIGTERM comes, and one that saves when SIGUSR1 comes and
goes on. Each rank writes down what it saved, as it happens.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardkeep as sk

WORLD = 2
MOST_STEPS = 5000


def values_at(step):
    return torch.arange(10.0 * 8).reshape(10, 8) + 1000.0 * step


def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with (
        open(folder / f"rank-{rank}.log", "w", buffering=1) as log,
        sk.Checkpointer(folder / "stop", signals=("SIGTERM",)) as stop,
        sk.Checkpointer(folder / "look", signals=("SIGUSR1",), save_last=False) as look,
    ):
        log.write(f"pid {os.getpid()}\n")
        for step in range(1, MOST_STEPS):
            values = values_at(step)
            dist.all_reduce(torch.zeros(1))  # as training does: ranks stay within a step of each other
            state = {"w": distribute_tensor(values, mesh, [Shard(0)]), "r": values.clone(), "step": step}
            log.write(f"step {step}\n")
            for name, ckpt in (("stop", stop), ("look", look)):
                if ckpt.step(step, state) is not None:
                    log.write(f"{name} {step} durable={ckpt.latest_step() == step}\n")
            if stop.should_stop:
                log.write(f"end {step} look={look.should_stop}\n")
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
