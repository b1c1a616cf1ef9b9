"""The contenders as a table of functions: each saves a state to a directory and loads it in place."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from workloads import PAGE, State, raw_bytes

PIECE = 8 << 20


@dataclass(frozen=True)
class Contender:
    family: str
    """Contenders of one family share a worker process, and so one state in memory."""
    save: Callable[[State, str], object]
    load: Callable[[State, str], object] | None
    """None where another contender of the family loads in the same way."""
    durable: bool = True
    """Whether the bytes are on the disk when `save` returns."""


def _on_threads(threads: int, nbytes: int, do: Callable[[int, int], None]) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: do(at, min(nbytes, at + PIECE)), range(0, nbytes, PIECE)))


def _memory(state: State, *, direct: bool) -> memoryview:
    data = state["bytes"]
    if direct:  # whole pages only; the memory behind `flat` goes on to the end of its last page
        data = data.as_strided((-(-data.nbytes // PAGE) * PAGE,), (1,))
    return memoryview(raw_bytes(data))


def raw_save(state: State, where: str, *, threads: int, direct: bool = False) -> None:
    data = _memory(state, direct=direct)
    os.makedirs(where)
    fd = os.open(f"{where}/raw", os.O_CREAT | os.O_WRONLY | (os.O_DIRECT if direct else 0))

    def write(start: int, end: int) -> None:
        while start < end:
            start += os.pwrite(fd, data[start:end], start)

    try:
        _on_threads(threads, len(data), write)
        os.ftruncate(fd, state["bytes"].nbytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def raw_load(state: State, where: str, *, threads: int, direct: bool = False) -> None:
    data = _memory(state, direct=direct)
    fd = os.open(f"{where}/raw", os.O_RDONLY | (os.O_DIRECT if direct else 0))
    nbytes = os.fstat(fd).st_size

    def read(start: int, end: int) -> None:
        while start < min(end, nbytes):
            start += os.preadv(fd, [data[start:end]], start)

    try:
        _on_threads(threads, len(data), read)
    finally:
        os.close(fd)


def dcp_save(state: State, where: str, *, threads: int) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=dcp.FileSystemWriter(where, thread_count=threads))


def dcp_load(state: State, where: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(state, storage_reader=dcp.FileSystemReader(where))


def torch_save(state: State, where: str) -> None:
    os.makedirs(where)
    torch.save(state, f"{where}/state.pt")


def torch_load(state: State, where: str) -> None:
    _copy_into(state, torch.load(f"{where}/state.pt", weights_only=True))


def safetensors_save(state: State, where: str) -> None:
    from safetensors.torch import save_file

    os.makedirs(where)
    save_file(state, f"{where}/state.safetensors")


def safetensors_load(state: State, where: str) -> None:
    from safetensors.torch import load_file

    _copy_into(state, load_file(f"{where}/state.safetensors"))


def _copy_into(state: State, loaded: State) -> None:
    for key, tensor in state.items():
        tensor.copy_(loaded[key])


def shardkeep_save(state: State, where: str) -> None:
    import shardkeep as sk

    sk.save(state, where)


def shardkeep_load(state: State, where: str) -> None:
    import shardkeep as sk

    sk.load(state, where)


def drop_in_save(state: State, where: str) -> None:
    from shardkeep import dcp

    dcp.save(state, storage_writer=dcp.FileSystemWriter(where))


def drop_in_load(state: State, where: str) -> None:
    from shardkeep import dcp

    dcp.load(state, storage_reader=dcp.FileSystemReader(where))


def _with(function: Callable[..., None], **fixed: object) -> Callable[[State, str], None]:
    return lambda state, where: function(state, where, **fixed)


CONTENDERS = {
    "raw x1": Contender("raw", _with(raw_save, threads=1), _with(raw_load, threads=1)),
    "raw x2": Contender("raw", _with(raw_save, threads=2), _with(raw_load, threads=2)),
    "raw O_DIRECT x2": Contender(
        "raw-direct", _with(raw_save, threads=2, direct=True), _with(raw_load, threads=2, direct=True)
    ),
    "torch DCP x1": Contender("dcp", _with(dcp_save, threads=1), dcp_load),
    "torch DCP x2": Contender("dcp", _with(dcp_save, threads=2), None),
    "torch.save": Contender("torch", torch_save, torch_load, durable=False),
    "safetensors": Contender("safetensors", safetensors_save, safetensors_load, durable=False),
    "shardkeep.dcp": Contender("shardkeep-dcp", drop_in_save, drop_in_load),
    "shardkeep": Contender("shardkeep", shardkeep_save, shardkeep_load),
}
