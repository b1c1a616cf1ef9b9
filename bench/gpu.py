"""
Saves and loads of device tensors: exactness, and speed compared with torch DCP.

Needs an accelerator: `python bench/gpu.py [GB]`. Prints a short table. Not part of the test suite.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time

import torch
import torch.distributed.checkpoint as dcp

import shardkeep as sk


def state(gb: float, device: torch.device) -> dict[str, torch.Tensor]:
    """bf16 weights and two fp32 moments, as Adam has them, of random bits."""
    count = max(1, int(gb * 1e9 / 10 / (4096 * 1024)))
    made = {}
    for i in range(count):
        made[f"w{i}"] = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)
        made[f"m{i}"] = torch.randn(4096, 1024, device=device)
        made[f"v{i}"] = torch.randn(1024, 4096, device=device).t()  # not contiguous
    return made


def timed(call, rounds: int = 3) -> float:
    """Best of some rounds, device idle before and after."""
    best = float("inf")
    for _ in range(rounds):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        call()
        torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    gb = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    device = torch.accelerator.current_accelerator()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else device}")
    mine = state(gb, device)
    nbytes = sum(t.nbytes for t in mine.values())
    for folder in (tempfile.gettempdir(), "/dev/shm"):
        where = tempfile.mkdtemp(dir=folder)
        before = torch.accelerator.memory_stats().get("allocated_bytes.all.peak", 0)
        torch.accelerator.reset_peak_memory_stats()
        save = timed(lambda where=where: sk.save(mine, f"{where}/sk", overwrite=True))
        extra = torch.accelerator.memory_stats().get("allocated_bytes.all.peak", 0) - before
        blank = {key: torch.zeros_like(t) for key, t in mine.items()}
        load = timed(lambda where=where, blank=blank: sk.load(blank, f"{where}/sk"))
        exact = all(torch.equal(mine[key], blank[key]) for key in mine)
        half = {key: torch.zeros(t.shape, dtype=torch.float16, device=device) for key, t in list(mine.items())[:3]}
        sk.load(half, f"{where}/sk", include=list(half), cast=True)
        cast = all(torch.equal(half[key], mine[key].to(torch.float16)) for key in half)
        dcp_save = timed(lambda where=where: dcp.save(mine, checkpoint_id=f"{where}/dcp"), 2)
        dcp_load = timed(lambda where=where, blank=blank: dcp.load(blank, checkpoint_id=f"{where}/dcp"), 2)
        shutil.rmtree(where)
        print(
            f"{folder}: {nbytes / 1e9:.2f} GB  save {nbytes / save / 1e9:.2f} GB/s (DCP {nbytes / dcp_save / 1e9:.2f})"
            f"  load {nbytes / load / 1e9:.2f} GB/s (DCP {nbytes / dcp_load / 1e9:.2f})"
            f"  exact {exact}  cast {cast}  extra device memory {extra / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
