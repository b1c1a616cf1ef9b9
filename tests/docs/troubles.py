"""
Every error of the troubleshooting page, made to happen: what is printed there is what is raised here.

Each entry of `TROUBLES` is called in an empty folder and raises the error of its name.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import shardkeep as sk
from shardkeep.codecs.base import require_module
from shardkeep.dist.world import World
from shardkeep.engine.process.client import writer_manager
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.thread_ranks import thread_outcomes
from tests.asynchronous.test_process_mode import stop, until_asked
from tests.damage.forge import seal_record

WHERE = "runs/a/step-10"
MODEL = {"embed": {"weight": torch.arange(32.0).reshape(4, 8)}, "head": {"weight": torch.ones(8, 4)}}


def state() -> dict[str, Any]:
    return {"model": {name: {"weight": each["weight"].clone()} for name, each in MODEL.items()}, "step": 10}


def saved() -> Path:
    sk.save(state(), WHERE, step=10)
    return Path(WHERE)


def data_file() -> Path:
    [found] = saved().glob("model-*.safetensors")
    return found


def on_ranks(size: int, work: Callable[[World], Any], timeout_s: float = 10.0) -> NoReturn:
    outcome = thread_outcomes(size, work, timeout_s=timeout_s)[0]
    if isinstance(outcome, BaseException):
        raise outcome
    raise LookupError(f"rank 0 returned {outcome!r}")


def invalid_shards() -> None:
    def rank(world: World) -> None:
        piece = sk.ShardedBox(torch.ones(2, 8), offsets=(0 if world.rank == 0 else 3, 0), shape=(5, 8))
        sk.save({"model": {"weight": piece}}, WHERE, group=world)

    on_ranks(2, rank)


def state_mismatch() -> None:
    saved()
    other = state()
    other["model"]["head"]["weight"] = torch.ones(8, 6)
    other["model"]["embd"] = other["model"].pop("embed")
    sk.load(other, WHERE)


def checkpoint_exists() -> None:
    saved()
    sk.save(state(), WHERE)


def forge_record(old: str, new: str) -> None:
    record = Path(WHERE) / "shardkeep.json"
    text = record.read_text().replace(old, new)
    record.write_bytes(seal_record(text[: text.rindex(',\n  "checksum"')].encode()))


def unsupported_version() -> None:
    saved()
    forge_record('"version": 1', '"version": 99')
    sk.load(state(), WHERE)


def pickle_refused() -> None:
    sk.save({"model": {"w": torch.ones(4)}, "config": nn.Identity}, WHERE, allow_pickle=True)
    sk.load({"model": {"w": torch.ones(4)}, "config": None}, WHERE)


def flip_a_byte() -> None:
    with data_file().open("r+b") as file:
        file.seek(4100)
        file.write(b"\xff")


def damaged_checkpoint() -> None:
    flip_a_byte()
    sk.Checkpointer("runs/a").restore_latest(state())


def checksum_mismatch() -> None:
    flip_a_byte()
    sk.load(state(), WHERE)


def wrong_size() -> None:
    os.truncate(data_file(), 4100)
    sk.load(state(), WHERE)


def malformed_file() -> None:
    record = saved() / "shardkeep.json"
    record.write_bytes(record.read_bytes()[:100])
    sk.load(state(), WHERE)


def storage_error() -> None:
    Path("runs").write_text("a file where a directory should be")
    sk.save(state(), WHERE)


class Small(sk.LocalStore):
    def free_nbytes(self) -> int:
        return 100


def earlier_save_failed() -> None:
    sk.async_save(state(), Small(WHERE))
    sk.finish_saves()


def save_cancelled() -> None:
    go_on = threading.Event()

    class Waits(FaultyStore):
        """Waits, so that there is time to cancel."""

        def create(self, name: str, nbytes: int) -> Any:
            go_on.wait()
            return super().create(name, nbytes)

    handle = sk.async_save(state(), Waits(sk.LocalStore(WHERE)))
    handle.staged.wait()
    handle.cancel()
    go_on.set()
    handle.result()


def writer_died() -> None:
    sk.async_save(state(), "runs/a/step-9", writer="process").result()
    pid = writer_manager().pid or 0
    stop(pid)
    handle = sk.async_save(state(), WHERE, writer="process")
    until_asked(handle)
    os.kill(pid, signal.SIGKILL)
    handle.result()


def ranks_silent() -> None:
    def rank(world: World) -> None:
        if world.rank != 1:
            sk.save(state(), WHERE, group=world, options=sk.Options(timeout_s=1))

    on_ranks(2, rank, timeout_s=1)


def ranks_disagree() -> None:
    def rank(world: World) -> None:
        sk.save(state(), WHERE if world.rank == 0 else "runs/b/step-10", group=world)

    on_ranks(2, rank)


def root_in_use() -> None:
    with sk.Checkpointer("runs/a") as first, sk.Checkpointer("runs/a") as second:
        first.save(1, state())
        second.save(2, state())


def lease_lost() -> None:
    with sk.Checkpointer("runs/a", asynchronous=False) as first:
        first.save(1, state())
        with sk.Checkpointer("runs/a", takeover=True) as second:
            second.save(2, state())
            first.save(3, state())


def secret() -> sk.Options:
    keys = sk.Options(keys=sk.KeyRing.from_text("11" * 32))
    sk.save(state(), WHERE, codecs=["aes"], options=keys)
    return keys


def key_missing() -> None:
    secret()
    sk.load(state(), WHERE)


def wrong_key() -> None:
    secret()
    sk.load(state(), WHERE, options=sk.Options(keys=sk.KeyRing.from_text("22" * 32)))


def not_authentic() -> None:
    keys = secret()
    forge_record('"step": null', '"step": 20')
    sk.load(state(), WHERE, options=keys)


def not_promoted() -> None:
    with sk.Checkpointer("runs/a", promote_to="far/a") as ckpt:
        ckpt.save(9, state())
        ckpt.wait(promotions=True)
        Path("far/a/step-10").write_text("a file where a directory should be")
        ckpt.save(10, state())
        ckpt.wait(promotions=True)


TROUBLES: dict[str, Callable[[], object]] = {
    "CheckpointError": lambda: sk.save(state(), "nowhere://bucket/step-10"),
    "StateError": lambda: sk.Checkpointer("runs/a", every_steps=0),
    "UnsupportedLeaf": lambda: sk.save({"model": {"w": torch.ones(4)}, "hook": print}, WHERE),
    "KeyCollision": lambda: sk.save({"model.weight": torch.ones(4), "model": {"weight": torch.ones(4)}}, WHERE),
    "InvalidShards": invalid_shards,
    "ReplicasDiffer": lambda: on_ranks(
        2, lambda world: sk.save({"model": {"w": torch.ones(4)}, "position": world.rank}, WHERE, group=world)
    ),
    "StateMismatch": state_mismatch,
    "CheckpointNotFound": lambda: sk.load(state(), "runs/a/step-11"),
    "CheckpointExists": checkpoint_exists,
    "UnsupportedVersion": unsupported_version,
    "PickleRefused": pickle_refused,
    "DamagedCheckpoint": damaged_checkpoint,
    "ChecksumMismatch": checksum_mismatch,
    "WrongSize": wrong_size,
    "MalformedFile": malformed_file,
    "StorageError": storage_error,
    "BlobNotFound": lambda: sk.LocalStore(WHERE).get("notes.txt", limit=100),
    "StorageFull": lambda: sk.save(state(), Small(WHERE)),
    "EarlierSaveFailed": earlier_save_failed,
    "SaveCancelled": save_cancelled,
    "WriterDied": writer_died,
    "RanksSilent": ranks_silent,
    "RanksDisagree": ranks_disagree,
    "RootInUse": root_in_use,
    "LeaseLost": lease_lost,
    "KeyMissing": key_missing,
    "WrongKey": wrong_key,
    "NotAuthentic": not_authentic,
    "NotPromoted": not_promoted,
    "PackageMissing": lambda: require_module(
        "no_such_package", package="tensorboard", wanted_by="the TensorBoard report"
    ),
}


def text_of(name: str) -> str:
    """Make an error happen in this folder, and return what it says, with its class in front."""
    try:
        TROUBLES[name]()
    except sk.CheckpointError as error:
        return f"{type(error).__name__}: {error}\n"
    raise LookupError(f"{name} did not happen")
