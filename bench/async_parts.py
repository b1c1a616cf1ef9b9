"""The timed parts of `async_gpu.py`: calls, the training loop, and transfers to and from a directory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

import async_raw
from async_contenders import DEVICE, NO_SAVE, OURS, OVERLAP, TORCH, Contender, no_save
from async_training import Training
from async_vitals import Vitals

ROOM = 2.1
"""Times the state that must be free in a place: two checkpoints, or one and what is written raw."""


def calls(
    training: Training, everyone: Mapping[str, Contender], scratch: str, saves: int, vitals: Vitals
) -> dict[str, list[dict[str, Any]]]:
    """
    Save `saves` times each, with a training step in between and nothing else going on.

    The device is idle when the clock starts, so that only the call is charged to the call. Memory is counted above
    what was held before the first save of each, and `close` before it makes that a first save again: buffers are made,
    threads started. (Modules are imported once; ours come first, overlap before the others.)
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for name, contender in everyone.items():
        rows = results.setdefault(name, [])
        training.drain()
        vitals.begin()
        for number in range(saves if name in OURS else 2):  # torch's take three times as long
            where = f"{scratch}/call"
            training.step()
            training.drain()
            vitals.restart()
            began = time.perf_counter()
            try:
                flight = contender.begin(training.state, where)
                blocked_s = time.perf_counter() - began
                staged = flight.finish()
                durable_s = time.perf_counter() - began
                times = {"blocked_s": blocked_s, "staged_s": staged.until_s, "copying_s": staged.copying_s}
                rows.append({**times, "durable_s": durable_s, **vitals.rise()})
                print(
                    f"    {name}, save {number + 1}: blocked {blocked_s:.4f} s, staged {staged.until_s:.3f} s"
                    f" ({training.nbytes / staged.copying_s / 1e9:.1f} GB/s), durable {durable_s:.2f} s",
                    flush=True,
                )
            except Exception as exc:  # noqa: BLE001 - how a contender fails is a result
                rows.append({"failed": f"{type(exc).__name__}: {exc}"[:300]})
                print(f"    {name}, save {number + 1}: {rows[-1]['failed']}", flush=True)
            shutil.rmtree(where, ignore_errors=True)
            if "failed" in rows[-1]:
                break
        try:
            contender.close()
        except Exception as exc:  # noqa: BLE001 - what the others did is still worth having
            print(f"    {name}, closing: {type(exc).__name__}: {exc}", flush=True)
    return results


def loop(
    training: Training, everyone: Mapping[str, Contender], scratch: str, steps: int, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """
    Train without saving, with a save in flight, and after it.

    The second window begins with a step, then the call (the device is then still busy with that step, as in life), then
    steps until the save is durable; all of it, the call included, is compared with as many steps without saving. As a
    device that grows warm becomes slower by itself, each round also has three windows without any save.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for name in (OVERLAP, DEVICE, TORCH):
            if name == TORCH and number:  # its effect is seconds: once is enough
                continue
            contender, where = everyone[name], f"{scratch}/loop"
            if not number and name in OURS:  # a first save is measured by `calls`; this is about the others
                contender.begin(training.state, where).finish()
                shutil.rmtree(where)
            row = _windows(training, contender, where, steps)
            _keep_row(results, name, row)
            shutil.rmtree(where)
        _keep_row(results, NO_SAVE, _windows(training, no_save(results[OVERLAP][-1]["during_steps"]), "", steps))
    for name in results:
        if name in everyone:
            everyone[name].close()
    return results


def _windows(training: Training, contender: Contender, where: str, steps: int) -> dict[str, Any]:
    """Train for three windows: before a save, while it is in flight, after it."""
    before_s = training.seconds_a_step(steps)
    began = time.perf_counter()
    training.step()
    called = time.perf_counter()
    flight = contender.begin(training.state, where)
    blocked_s = time.perf_counter() - called
    during = 2
    training.step()
    while not flight.done():
        training.step()
        during += 1
    training.drain()
    window_s = time.perf_counter() - began
    flight.finish()
    after_s = training.seconds_a_step(steps)
    return {
        "before_s": before_s,
        "after_s": after_s,
        "during_steps": during,
        "during_s": window_s / during,
        "added_s": window_s - during * before_s,
        "slower": window_s / during / before_s - 1,
        "slower_after": after_s / before_s - 1,
        "blocked_s": blocked_s,
    }


def _keep_row(results: dict[str, list[dict[str, Any]]], name: str, row: dict[str, Any]) -> None:
    results.setdefault(name, []).append(row)
    print(
        f"    {name}: a step {row['before_s']:.4f} s; {row['during_steps']} with a save in flight {row['during_s']:.4f} s"
        f" ({row['slower']:+.1%}, {row['added_s']:+.3f} s); after {row['after_s']:.4f} s ({row['slower_after']:+.1%})",
        flush=True,
    )


def place(training: Training, everyone: Mapping[str, Contender], folder: str, rounds: int) -> dict[str, Any]:
    """
    Write to one place and load from it.

    Raw: every recipe once; the fastest then takes turns with ours (device mode, the call until durable) and the ratio
    is taken inside each round. Torch saves once. What was saved last is then loaded into other tensors on the device,
    files in the page cache, in turns, and compared bit for bit with the state.
    """
    nbytes = training.nbytes
    free = shutil.disk_usage(folder).free
    if free < ROOM * nbytes:
        raise RuntimeError(f"{folder} has {free / 1e9:.1f} GB free; {ROOM * nbytes / 1e9:.1f} are needed")
    memory = async_raw.source(nbytes)
    scanned = async_raw.scan(memory, nbytes, f"{folder}/raw")
    best = min(scanned, key=lambda recipe: scanned[recipe])
    print(f"    {folder}: raw {nbytes / scanned[best] / 1e9:.2f} GB/s ({best})", flush=True)
    ours, theirs = f"{folder}/ours", f"{folder}/torch"
    everyone[DEVICE].begin(training.state, ours).finish()  # pins memory; not counted
    saves = []
    for _ in range(rounds):
        os.sync()
        raw_s = async_raw.write(memory, nbytes, f"{folder}/raw", best)
        shutil.rmtree(ours)
        saves.append({"raw_s": raw_s, "ours_s": _durable(training, everyone[DEVICE], ours)})
    memory.close()
    torch_s = _durable(training, everyone[TORCH], theirs)
    loads = _loads(training, ours, theirs, max(1, rounds - 1))
    for name in (DEVICE, TORCH):
        everyone[name].close()
    for where in (ours, theirs):
        shutil.rmtree(where)
    return {
        "scan": {str(recipe): seconds for recipe, seconds in scanned.items()},
        "best": str(best),
        "saves": saves,
        "torch_save_s": torch_s,
        "loads": loads,
    }


def _durable(training: Training, contender: Contender, where: str) -> float:
    training.drain()
    os.sync()
    began = time.perf_counter()
    contender.begin(training.state, where).finish()
    return time.perf_counter() - began


def _loads(training: Training, ours: str, theirs: str, rounds: int) -> list[dict[str, float]]:
    import torch.distributed.checkpoint as dcp

    import shardkeep as sk

    live = list(training.tensors())
    blank = [torch.empty_like(tensor) for _, _, tensor in live]
    by_ours = {name: tensor for (name, _, _), tensor in zip(live, blank, strict=True)}
    by_torch = {name: tensor for (_, name, _), tensor in zip(live, blank, strict=True)}

    def load_ours() -> None:
        sk.load(by_ours, ours, include=["model", "optim.state"])

    def load_torch() -> None:
        dcp.load(by_torch, checkpoint_id=theirs)

    samples = []
    for _ in range(rounds):
        sample = {}
        for name, load in (("ours_s", load_ours), ("torch_s", load_torch)):
            for tensor in blank:
                poison(tensor)
            sample[name] = _timed(training, load)
            if wrong := [name for (name, _, a), b in zip(live, blank, strict=True) if not same_bits(a, b)]:
                raise ValueError(f"{name}: {len(wrong)} tensors came back different, {wrong[0]} first")
        samples.append(sample)
    print(f"    loads: {samples}", flush=True)
    return samples


def _timed(training: Training, call: Callable[[], None]) -> float:
    training.drain()
    began = time.perf_counter()
    call()
    training.drain()
    return time.perf_counter() - began


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def poison(tensor: torch.Tensor) -> None:
    _as_bytes(tensor).fill_(0xA5)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_as_bytes(a), _as_bytes(b))


def copy_engine(device: torch.device) -> float:
    """Bytes a second from the device to pinned memory, a gigabyte at a time: no staging can be faster."""
    there = torch.empty(1 << 29, dtype=torch.uint8, device=device)
    here = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for _ in range(4):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(2):
            here.copy_(there, non_blocking=True)
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * there.nbytes / median(seconds)
