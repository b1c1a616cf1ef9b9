"""
Shared by the programs in this folder: a small model, its data, and the line that each prints about its run.

Every rank sees the same batches, so the mean of their gradients is exact, and a run gives the same bits on 1, 2 and 4 ranks.
Any difference after a load is an error of the load.
"""
# ruff: noqa: INP001, T201 - beside scripts to read and run

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = 4
SAVED = 2
"""The step after which a checkpoint is saved."""


def arguments(about: str, **more: list[str]) -> argparse.Namespace:
    """Return the command line's arguments; `more` are options and their choices, of which the first is the default."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where the checkpoint is")
    parser.add_argument("--resume", action="store_true", help="load the checkpoint and go on from there")
    parser.add_argument("--megabytes", type=float, default=0, help="state of each rank: parameters and AdamW's moments")
    parser.add_argument("--saves", type=int, default=0, help="this many more saves when training is done")
    for option, choices in more.items():
        parser.add_argument(f"--{option}", choices=choices, default=choices[0])
    return parser.parse_args()


def tiny_model(args: argparse.Namespace) -> nn.Module:
    """
    Return a model that has other weights when they are about to be loaded.

    It has 25 rows, which 2 ranks cannot halve; or as many layers of 1,025 as make up the megabytes asked for.
    """
    torch.manual_seed(1 if args.resume else 0)
    ranks = int(os.environ["WORLD_SIZE"])
    width = 1025 if args.megabytes else 25
    layers = round(args.megabytes * 1e6 * ranks / (3 * 4 * width**2)) if args.megabytes else 0
    hidden = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), *hidden, nn.Linear(width, 8))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all parameters and of the optimizer's state of each, the same for every sharding of them."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = {"": parameter, **{key: optimizer.state[parameter][key] for key in sorted(optimizer.state[parameter])}}
        for key, value in values.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(f"{name} {key} {whole.dtype} {tuple(whole.shape)}".encode())
            digest.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


class Timed:
    """A framework's way to save, and for how many seconds each save kept this rank from training."""

    def __init__(self, save: Callable[[Any], object], *, finish: Callable[[], object] = int) -> None:
        self.save, self.finish = save, finish
        self.seconds: list[float] = []

    def __call__(self, where: Any) -> None:
        self.finish()  # the save before, which is over by now where training takes its time
        dist.barrier()
        start = time.perf_counter()
        self.save(where)
        self.seconds.append(time.perf_counter() - start)

    def slowest(self) -> list[float]:
        """Return, on all ranks, what each save took on the rank that it took longest on."""
        seconds = torch.tensor(self.seconds)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return [round(each, 4) for each in seconds.tolist()]


def say(
    framework: str, folder: str, losses: dict[int, float], loaded: str, final: str, save: Timed, **more: object
) -> None:
    """Print, on rank 0, one line of what this run was and saw: whose code, which files, each loss and the state."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - as late as frameworks do

    slowest = save.slowest()
    if dist.get_rank() == 0:
        names = [path.name for path in Path(folder).rglob("*") if path.is_file()]
        line = {
            "framework": f"{framework} {version(framework)}",
            "ranks": dist.get_world_size(),
            "dcp": dcp.__name__,
            "writer": dcp.FileSystemWriter.__module__,
            "data files": sum(name.endswith(".distcp") for name in names),
            "checksum files": sum(name.endswith(".sums") for name in names),
            "losses": {step: loss.hex() for step, loss in losses.items()},
            f"state after step {SAVED}": loaded,
            f"state after step {STEPS}": final,
            "seconds blocked by each save": slowest,
            **more,
        }
        print(json.dumps(line), flush=True)
    # A thread of gloo still holds the tensors of the last collective, and aborts a process that ends before it let go of them.
    dist.barrier()
