"""
Both doors and torch DCP side by side, on the CPU or an accelerator: `python bench/dcp_async.py [GB] [FOLDER]`.

Each contender has a process of its own, so its first save is the first of a process. Prints how long asynchronous saves block
their caller, the first and the later ones, and when they are durable; then the rates of synchronous saves and loads. Every
save is followed by a change of the state, and the last checkpoint is loaded and compared bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SAVES = 4
ROUNDS = 3
State = dict[str, torch.Tensor]
Begun = tuple[Callable[[], object], Callable[[], object]]
"""Wait until the state may be changed; wait until the checkpoint is durable."""


def make_state(gb: float, device: torch.device) -> State:
    """bf16 weights and two fp32 moments of each, 84 tensors."""
    rows = max(1, int(gb * 1e9 / 28 / 10 / 1024))
    made = {}
    for layer in range(28):
        made[f"w{layer}"] = torch.empty(rows, 1024, device=device, dtype=torch.bfloat16)
        made[f"m{layer}"] = torch.empty(rows, 1024, device=device)
        made[f"v{layer}"] = torch.empty(rows, 1024, device=device)
    return made


def fill(state: State, step: int) -> None:
    for number, tensor in enumerate(state.values()):
        tensor.fill_(step + number / 128)


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# -- asynchronous saves ------------------------------------------------------------------------------------------------


def of_dcp(dcp: Any, **options: Any) -> Callable[[State, str], Begun]:
    def begin(state: State, where: str) -> Begun:
        begun = dcp.async_save(dict(state), checkpoint_id=where, **options)
        if hasattr(begun, "upload_completion"):
            return begun.staging_completion.result, begun.upload_completion.result
        return lambda: None, begun.result

    return begin


def asynchronous(name: str) -> Callable[[State, str], Begun]:
    """Return what begins a save."""
    from importlib import import_module

    if name == "sk":
        sk = import_module("shardkeep")

        def native(state: State, where: str) -> Begun:
            handle = sk.async_save(state, where)
            return handle.staged.wait, handle.result

        return native
    side, kind = name.split()
    package = "shardkeep.dcp" if side == "ours" else "torch.distributed.checkpoint"
    dcp, staging = import_module(package), import_module(f"{package}.staging")
    process = import_module(f"{package}.state_dict_saver").AsyncCheckpointerType.PROCESS
    options: dict[str, Any] = {}
    if "stager" in kind:
        on_device = torch.accelerator.is_available()
        options["async_stager"] = staging.DefaultStager(staging.StagingOptions(on_device, True, True, on_device))
    if "process" in kind:
        options["async_checkpointer_type"] = process
    return of_dcp(dcp, **options)


def measure_async(name: str, state: State, folder: str) -> dict[str, Any]:
    begin = asynchronous(name)
    blocked, staged, durable = [], [], []
    last = ""
    for step in range(SAVES):
        fill(state, step)
        synchronize()
        last = f"{folder}/{step}"
        began = time.perf_counter()
        wait_for_staging, wait = begin(state, last)
        blocked.append(time.perf_counter() - began)
        wait_for_staging()
        staged.append(time.perf_counter() - began)
        fill(state, -1 - step)
        wait()
        durable.append(time.perf_counter() - began)
        if step < SAVES - 1:
            shutil.rmtree(last)
    later = [statistics.median(each[1:]) for each in (blocked, staged, durable)]
    exact = is_exact(name, state, last, SAVES - 1)
    return {"first": [blocked[0], staged[0], durable[0]], "later": later, "exact": exact}


def is_exact(name: str, state: State, where: str, step: int) -> bool:
    found = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    load_of(name)(found, where)
    fill(state, step)
    return all(torch.equal(found[key], state[key]) for key in state)


# -- synchronous saves and loads ---------------------------------------------------------------------------------------


def load_of(name: str) -> Callable[[State, str], object]:
    if name.startswith("sk"):
        import shardkeep as sk

        return sk.load
    from importlib import import_module

    dcp = import_module("shardkeep.dcp" if name.startswith("ours") else "torch.distributed.checkpoint")
    return lambda state, where: dcp.load(state, checkpoint_id=where)


def save_of(name: str) -> Callable[[State, str], object]:
    if name.startswith("sk"):
        import shardkeep as sk

        return sk.save
    from importlib import import_module

    dcp = import_module("shardkeep.dcp" if name.startswith("ours") else "torch.distributed.checkpoint")
    return lambda state, where: dcp.save(state, checkpoint_id=where)


def measure_sync(name: str, state: State, folder: str) -> dict[str, Any]:
    """Best of some rounds."""
    times: dict[str, list[float]] = {"save": [], "load": []}
    for step in range(ROUNDS):
        fill(state, step)
        for what, call in (("save", save_of(name)), ("load", load_of(name))):
            synchronize()
            began = time.perf_counter()
            call(state, f"{folder}/{step}")
            synchronize()
            times[what].append(time.perf_counter() - began)
        shutil.rmtree(f"{folder}/{step}")
    return {what: min(seconds) for what, seconds in times.items()}


# -- one process for each contender ------------------------------------------------------------------------------------

ASYNC = {
    "sk": "sk.async_save",
    "ours plain": "shardkeep.dcp.async_save",
    "torch plain": "torch dcp.async_save",
    "ours stager": "shardkeep.dcp, DefaultStager",
    "torch stager": "torch, DefaultStager",
    "ours process": "shardkeep.dcp, PROCESS",
    "torch process": "torch, PROCESS",
    "ours stager+process": "shardkeep.dcp, DefaultStager, PROCESS",
}
SYNC = {"sk": "sk", "ours": "shardkeep.dcp", "torch": "torch dcp"}


def one(kind: str, name: str, gb: float, folder: str) -> None:
    """Measure one contender, and print the result as JSON."""
    warnings.simplefilter("ignore")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    dist.init_process_group("gloo", rank=0, world_size=1)
    state = make_state(gb, device)
    fill(state, 0)
    print(json.dumps((measure_async if kind == "async" else measure_sync)(name, state, folder)), flush=True)
    dist.destroy_process_group()


def ask(kind: str, name: str, gb: float, folder: str) -> dict[str, Any] | None:
    scratch = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, __file__, "--one", kind, name, str(gb), scratch]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            print(f"{name}: failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:150]}")
            return None
        return json.loads(lines[-1])
    except subprocess.TimeoutExpired:
        print(f"{name}: hung")
        return None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> None:
    gb = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    folder = sys.argv[2] if len(sys.argv) > 2 else "/dev/shm"
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    print(f"torch {torch.__version__}, {device}, {gb} GB in 84 tensors, to {folder}; milliseconds")
    print(f"{'':40}{'blocked':>18}{'may be changed':>20}{'durable':>20}")
    for name, title in ASYNC.items():
        if (found := ask("async", name, gb, folder)) is not None:
            cells = "".join(
                f"{first * 1e3:>10.1f}{later * 1e3:>10.1f}"
                for first, later in zip(found["first"], found["later"], strict=True)
            )
            print(f"{title:38}{cells}{'' if found['exact'] else '  NOT WHAT WAS SAVED'}", flush=True)
    print("(each: the first save of a process, the median of the later ones)\n")
    for name, title in SYNC.items():
        if (found := ask("sync", name, gb, folder)) is not None:
            print(f"{title:20}save {gb / found['save']:6.2f} GB/s   load {gb / found['load']:6.2f} GB/s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])
    else:
        main()
