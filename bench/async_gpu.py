"""
Asynchronous saves on an accelerator: torch's DCP and ours, on the same training run, in one process.

`python bench/async_gpu.py` takes under eight minutes for 8 GB on an H200; `--few` uses the same bytes in few large tensors. It
prints one markdown table and the targets; every sample goes to $OUT/async_gpu.json if OUT is set. Without an accelerator
every part is skipped; `--cpu` runs them on CPU tensors only to check that they work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import async_parts
import async_report
import async_soak
from async_contenders import OURS, contenders
from async_training import Training
from async_vitals import Vitals

PARTS = ("calls", "few", "loop", "disk", "shm", "flat", "exact")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--gb", type=float, default=8.0, help="size of the state (default %(default)s)")
    parser.add_argument(
        "--few", action="store_true", help="28 large weights and their moments, 84 tensors (and 28 counters)"
    )
    parser.add_argument(
        "--small-gb", type=float, default=0.05, help="of the state saved 100 times (default %(default)s)"
    )
    parser.add_argument("--exact-gb", type=float, default=0.4, help="of the one that is compared (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=32768, help="in a batch of the large state (default %(default)s)")
    parser.add_argument(
        "--saves", type=int, default=5, help="of each contender, to time the call (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=12, help="of each window without saves (default %(default)s)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="of raw writes and saves; of loops and loads one less (default %(default)s)",
    )
    parser.add_argument("--soak", type=int, default=100, help="saves that leave nothing behind (default %(default)s)")
    parser.add_argument("--exact", type=int, default=50, help="saves that are compared (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no part after these (default %(default)s)")
    parser.add_argument("--only", action="append", choices=PARTS, help="run these parts")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="a folder on the disk (default %(default)s)")
    parser.add_argument("--shm", default="/dev/shm", help="a folder in memory (default %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="run the parts on CPU tensors")
    return parser.parse_args()


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {cores} cores, {memory:.0f} GiB, Python {platform.python_version()}, torch {torch.__version__}"


class Run:
    """The parts, and what they need; large and small states are made when first asked for."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.disk = tempfile.mkdtemp(prefix="shardkeep-bench-", dir=args.dir)
        self.shm = tempfile.mkdtemp(prefix="shardkeep-bench-", dir=args.shm)
        self.vitals = Vitals(device)
        self.everyone = contenders(device)
        self.large = Training(args.gb, device, args.tokens, few=args.few)
        self.large.seconds_a_step(3)  # kernels are chosen, memory is kept
        self.results: dict[str, Any] = {"machine": machine(device), "nbytes": self.large.nbytes}
        if device.type == "cuda":
            self.results["copy_engine"] = async_parts.copy_engine(device)

    def part(self, name: str) -> Any:
        args, large, everyone = self.args, self.large, self.everyone
        small = max(1, args.tokens // 16)
        table: dict[str, Callable[[], Any]] = {
            "calls": lambda: async_parts.calls(large, everyone, self.disk, args.saves, self.vitals),
            "few": self.few,
            "loop": lambda: async_parts.loop(large, everyone, self.disk, args.steps, max(1, args.rounds - 1)),
            "disk": lambda: async_parts.place(large, everyone, self.disk, args.rounds),
            "shm": lambda: async_parts.place(large, everyone, self.shm, args.rounds),
            "flat": lambda: {
                mode: async_soak.flat(
                    Training(args.small_gb, self.device, small), mode, self.disk, args.soak, self.vitals
                )
                for mode in ("overlap", "device")
            },
            "exact": lambda: {
                mode: async_soak.exact(Training(args.exact_gb, self.device, small), mode, self.shm, args.exact)
                for mode in OURS.values()
            },
        }
        return table[name]()

    def few(self) -> Any:
        """Time the calls for as many bytes in few large tensors."""
        training = Training(self.args.gb, self.device, max(1, self.args.tokens // 16), few=True)
        self.results["few_nbytes"] = training.nbytes
        ours = {name: self.everyone[name] for name in OURS}
        return async_parts.calls(training, ours, self.disk, self.args.saves, self.vitals)

    def keep(self) -> None:
        """Write what is known so far: a run that is cut short is not lost."""
        if folder := os.environ.get("OUT"):
            Path(folder, "async_gpu.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def close(self) -> None:
        for folder in (self.disk, self.shm):
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    args, began = arguments(), time.perf_counter()
    wanted = args.only or [part for part in PARTS if not (args.few and part == "few")]
    if not args.cpu and not torch.accelerator.is_available():
        for name in wanted:
            print(f"{name}: skipped, there is no accelerator here (--cpu runs it on CPU tensors)")
        return 0
    device = torch.device("cpu") if args.cpu else torch.accelerator.current_accelerator()
    warnings.simplefilter("ignore")
    if args.cpu:
        torch.set_num_threads(1)  # on few cores the savers need the others
        print("on CPU tensors, to see that it runs: the figures mean nothing")
    run, failed = Run(args, device), []
    print(f"{run.results['machine']}\n{run.results['nbytes'] / 1e9:.2f} GB in {len(list(run.large.tensors()))} tensors")
    if "copy_engine" in run.results:
        print(f"device to pinned memory: {run.results['copy_engine'] / 1e9:.1f} GB/s")
    try:
        for name in PARTS:
            minutes = (time.perf_counter() - began) / 60
            if name not in wanted:
                continue
            if minutes > args.minutes:
                print(f"{name}: skipped, {minutes:.1f} minutes are over")
                continue
            print(f"{name}: {minutes:.1f} minutes after the start", flush=True)
            try:
                run.results[name] = run.part(name)
            except Exception:  # noqa: BLE001 - the other parts are still worth having
                failed.append(name)
                print(f"{name}: FAILED", flush=True)
                traceback.print_exc()
            run.keep()
    finally:
        run.close()
    run.results["targets"] = async_report.targets(run.results)
    run.keep()
    print("\n" + "\n".join(async_report.table(run.results)) + "\n\ntargets")
    print("\n".join(async_report.target_line(one) for one in run.results["targets"]))
    if failed:
        print(f"failed: {', '.join(failed)}; their errors are above")
    wrong = [error for one in run.results.get("exact", {}).values() for error in one["wrong"]]
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
