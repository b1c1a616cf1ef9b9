"""What ranks and doomed processes do to places on the S3 server, in processes of their own."""

import contextlib
import os
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage.resolve import open_place
from tests.engine.samples import bits
from tests.support.stores import BeforeStore

ROWS = 1200
OPTIONS = sk.Options(io_threads=2, host_budget_bytes=64 << 20, timeout_s=60.0)


def state_of(k, rank=0, size=1):
    """State `k`, or a rank's part of it: 6 MB of random bits, most of them in one tensor, two parts of the least size."""
    gen = torch.Generator().manual_seed(k)
    w, b = torch.randn(ROWS, 1280, generator=gen), torch.randn(999, generator=gen)
    share = ROWS // size
    mine = w[rank * share : (rank + 1) * share]
    return {
        "model": {"w": sk.ShardedBox(mine, offsets=(rank * share, 0), shape=(ROWS, 1280)), "b": b},
        "step": k,
        "rng": sk.PerRank([k, rank]),
    }


def load_and_compare(where, k, rank=0, size=1, group=None):
    wanted, found = state_of(k, rank, size), state_of(k + 1, rank, size)
    for state in (wanted, found):
        del state["rng"]
    sk.load(found, where, exclude="rng.*", group=group, options=OPTIONS)
    assert _bits(found) == _bits(wanted)


def _bits(state):
    [(mine, offsets)] = state["model"]["w"].pieces
    return bits({**state, "model": {"w": mine, "at": offsets, "b": state["model"]["b"]}})


@contextlib.contextmanager
def nowhere(environment):
    """Have only these variables of object stores, and nothing to write to but folders that must stay empty."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
        folders = {name: os.path.join(folder, name) for name in names}
        for path in folders.values():
            os.mkdir(path)
        with mock.patch.dict(os.environ, {**folders, **environment}), mock.patch.object(tempfile, "tempdir", None):
            os.chdir(folders["HOME"])
            try:
                yield
            finally:
                os.chdir(before)
        written = [str(path) for path in Path(folder).rglob("*") if path.name not in names]
        assert written == [], "something was written outside the store"


def save_by_url(url, environment, k):
    """On every rank: save state `k`, overwrite it by the next one in the background, and look at it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with nowhere(environment):
        sk.save(state_of(k, rank, size), url, step=k, options=OPTIONS)
        load_and_compare(url, k, rank, size)
        sk.async_save(state_of(k + 1, rank, size), url, step=k + 1, overwrite=True, options=OPTIONS).result(60)
        sk.finish_saves()


def load_by_url(url, environment, k):
    """On every rank: load state `k`, whatever the number of ranks that saved it."""
    with nowhere(environment):
        load_and_compare(url, k, dist.get_rank(), dist.get_world_size())


def race(url, options, k):
    """On every rank: save alone to one place, as if from a machine of its own, and commit when all others do."""
    rank = dist.get_rank()

    def meet(verb, name):
        if verb == "put" and name == RECORD_NAME:
            dist.barrier()

    with mock.patch("shardkeep.layouts.orphans.host_identity", return_value=f"machine {rank}"):
        try:
            state = {"w": torch.full((999,), k + rank)}
            sk.save(
                state, BeforeStore(open_place(url, **options), meet), step=k + rank, overwrite=True, group=World(0, 1)
            )
        except sk.CheckpointError as exc:
            return f"{type(exc).__name__}: {exc}"
    return "won"


def save_for_ever(pipe, url, options, k):
    """Overwrite one checkpoint by the next; say each number once it is saved."""
    place = open_place(url, **options)
    pipe.send("ready")
    while True:
        sk.save(state_of(k), place, step=k, overwrite=True, options=OPTIONS)
        pipe.send(k)
        k += 1
