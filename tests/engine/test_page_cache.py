"""What is kept in the page cache: the newest save, and what loads read, where there is memory for it."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep import dcp
from shardkeep.storage import local
from tests.dcp.sides import quietly

NBYTES = 24 << 20


@pytest.fixture(autouse=True)
def on_disk(tmp_path):
    probe = tmp_path / "probe"
    probe.write_bytes(b"x")
    with local._opened(str(probe)) as fd:
        says = local.cached_bytes(fd, 0, 1)
    if not sys.platform.startswith("linux") or local._kind_of(str(tmp_path)) not in local._ON_DISK or says is None:
        pytest.skip("the temporary directory is on no disk, or the kernel does not say what is cached")


def cached(where):
    total = held = 0
    for path in Path(where).iterdir():
        if (nbytes := path.stat().st_size) > 1 << 20:
            with local._opened(str(path)) as fd:
                held += local.cached_bytes(fd, 0, nbytes)
            total += nbytes
    return held / total


def wait_for(what):
    until = time.monotonic() + 20
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("door", ["sk", "dcp"])
def test_the_newest_save_is_kept_and_the_one_before_dropped(tmp_path, door):
    state = {"w": torch.ones(NBYTES // 4)}
    for step in (1, 2):
        where = tmp_path / f"step-{step}"
        if door == "sk":
            report = sk.save(state, where)
            assert report.bytes_cached == report.bytes_stored > NBYTES
        else:
            quietly(dcp.save, state, checkpoint_id=where)
        assert wait_for(lambda where=where: cached(where) > 0.99)
    assert cached(tmp_path / "step-1") < 0.1


@pytest.mark.parametrize("why", ["option", "memory", "size"])
def test_when_a_save_is_not_kept(tmp_path, monkeypatch, why):
    """Nothing is read back if it was not asked for, if memory is short, or if there is next to nothing to read."""
    if why == "memory":
        monkeypatch.setattr(local, "available_memory", lambda: NBYTES)
        monkeypatch.setattr(local, "_ALWAYS_CACHED_BYTES", 1)
    state = {"w": torch.ones(1000 if why == "size" else NBYTES // 4)}
    assert sk.save(state, tmp_path / "ck", options=sk.Options(keep_cached=why != "option")).bytes_cached == 0


@pytest.mark.parametrize("short", [False, True])
def test_a_load_leaves_what_it_read_in_the_cache(tmp_path, monkeypatch, short):
    """Other processes of the machine find it there; if memory is short, the disk is read around the cache."""
    sk.save({"w": torch.arange(NBYTES // 4)}, tmp_path / "ck", options=sk.Options(keep_cached=False))
    local.drop_from_cache(map(str, (tmp_path / "ck").iterdir()))
    if short:
        monkeypatch.setattr(local, "available_memory", lambda: NBYTES)
        monkeypatch.setattr(local, "_ALWAYS_CACHED_BYTES", 1)
    state = {"w": torch.zeros(NBYTES // 4, dtype=torch.int64)}
    sk.load(state, tmp_path / "ck")
    assert torch.equal(state["w"], torch.arange(NBYTES // 4))
    assert cached(tmp_path / "ck") < 0.2 if short else cached(tmp_path / "ck") > 0.99


def read_from_disk(where):
    def so_far():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))

    state = {"w": torch.zeros(NBYTES // 4)}
    before = so_far()
    sk.load(state, where)
    assert state["w"].eq(1).all()
    return so_far() - before


def test_a_disk_is_read_once_for_all_ranks(rank_pool, tmp_path):
    sk.save({"w": torch.ones(NBYTES // 4)}, tmp_path / "ck", options=sk.Options(keep_cached=False))
    os.sync()
    local.drop_from_cache(map(str, (tmp_path / "ck").iterdir()))
    assert NBYTES * 0.9 < sum(rank_pool.run(4, read_from_disk, tmp_path / "ck")) <= NBYTES * 1.05
