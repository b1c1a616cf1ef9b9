"""Bounded memory, nothing that grows, and cost in proportion to what is asked for."""

import gc
import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep.storage.local import drop_from_cache
from shardkeep.testing.thread_ranks import run_thread_ranks

MIB = 1 << 20


def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def open_descriptors():
    found = Counter()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one by which they were listed
            found[os.readlink(f"/proc/self/fd/{entry}")] += 1
    return found


def peak_growth(call):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def state_of(kind, nbytes):
    if kind == "contiguous":
        return {f"w{i}": torch.ones(nbytes // 4 // 4) for i in range(4)}
    return {f"w{i}": torch.ones(1024, nbytes // 4 // 4 // 1024).t() for i in range(4)}


@pytest.mark.parametrize("kind", ["contiguous", "strided"])
def test_saving_and_loading_stay_within_the_budget(tmp_path, kind):
    budget = 32 * MIB
    options = sk.Options(io_threads=4, host_budget_bytes=budget, keep_cached=False)
    slack = 24 * MIB  # threads' stacks and arenas, the index, the allocator's own
    state = state_of(kind, 256 * MIB)
    assert peak_growth(lambda: sk.save(state, tmp_path, options=options)) < budget + slack
    drop_from_cache(map(str, tmp_path.iterdir()))  # the first load is cold
    assert peak_growth(lambda: sk.load(state, tmp_path, options=options)) < budget + slack
    other = {key: torch.zeros(value.shape, dtype=torch.float16) for key, value in state.items()}
    assert peak_growth(lambda: sk.load(other, tmp_path, options=options, cast=True)) < budget + slack


def test_nothing_grows_over_a_hundred_saves(tmp_path):
    state = {f"w{i}": torch.randn(64, 1024) for i in range(16)}

    def once():
        sk.save(state, tmp_path / "one", overwrite=True)
        sk.load(state, tmp_path / "one")
        run_thread_ranks(
            3,
            lambda w: sk.save({"w": state["w0"], "r": sk.PerRank(w.rank)}, tmp_path / "three", overwrite=True, group=w),
        )

    for _ in range(10):
        once()
    gc.collect()
    before, threads, descriptors = resident("VmRSS"), set(threading.enumerate()), open_descriptors()
    for _ in range(90):
        once()
    gc.collect()
    assert resident("VmRSS") - before < 16 * MIB
    # Those of tests that ran before in this process may end meanwhile: connections that nobody uses are closed in time.
    assert set(threading.enumerate()) - threads == set()
    assert open_descriptors() - descriptors == Counter()
