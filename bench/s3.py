"""
Save to and load from an S3 server on this machine: `python bench/run.py --only s3`.

All contenders move the same bytes to and from the same SeaweedFS in turn: obstore's put and get of one buffer, which is the
limit of the library that we use; boto3's transfers of one buffer; torch DCP through fsspec and s3fs, if that is installed;
and shardkeep. Loads come from the server's page cache. Server and clients share the cores, so only ratios within a round are
judged.
"""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/support has the S3 server, also for children

import torch
from tests.support.s3_server import BUCKET, S3Server

import shardkeep as sk
from report import Verdict
from shardkeep.options import set_for_children
from shardkeep.storage.object_client import RequestPolicy

TENSOR_BYTES = 16 << 20
OBSTORE, OURS, DROP_IN, TORCH = "obstore put / get", "shardkeep", "shardkeep.dcp", "torch DCP, s3fs"
TARGETS = ((OBSTORE, 0.8), ("boto3", 1.0), (TORCH, 1.0))


@dataclass(frozen=True)
class Contender:
    """Who takes part."""

    save: Callable[[str], object]
    """Takes a name of its own in the bucket."""
    load: Callable[[str], object]
    """Loads over what was wiped out; raises if it is not what was saved."""


class State:
    """Random bytes, as tensors and as one buffer of the same memory."""

    def __init__(self, nbytes: int) -> None:
        count = max(1, nbytes // TENSOR_BYTES)
        self.memory = torch.randint(0, 256, (count * TENSOR_BYTES,), dtype=torch.uint8)
        self.tensors = {f"w{i}": part.view(torch.float32) for i, part in enumerate(self.memory.split(TENSOR_BYTES))}
        self.nbytes = self.memory.nbytes
        self._kept = self.memory.clone()

    def wipe(self) -> None:
        self.memory.zero_()

    def check(self, who: str) -> None:
        if not torch.equal(self.memory, self._kept):
            raise AssertionError(f"{who}: what was loaded is not what was saved")


def _obstore(state: State, server: S3Server) -> Contender:
    import obstore
    from obstore.store import S3Store

    client = S3Store(BUCKET, client_options={"allow_http": True}, **server.options)
    part = RequestPolicy().part_bytes
    buffer = memoryview(state.memory.numpy())

    def load(name: str) -> None:
        got = obstore.get(client, name).bytes()
        buffer[:] = memoryview(got)

    return Contender(lambda name: obstore.put(client, name, buffer, chunk_size=part), load)


def _boto3(state: State, server: S3Server) -> Contender:
    import boto3

    given = server.options
    client = boto3.client(
        "s3", endpoint_url=given["endpoint"], aws_access_key_id=given["access_key_id"],
        aws_secret_access_key=given["secret_access_key"], region_name=given["region"],
    )  # fmt: skip
    buffer = memoryview(state.memory.numpy())

    def load(name: str) -> None:
        into = io.BytesIO()
        client.download_fileobj(BUCKET, name, into)
        buffer[:] = into.getbuffer()

    return Contender(lambda name: client.upload_fileobj(io.BytesIO(buffer), BUCKET, name), load)


def _shardkeep(state: State, server: S3Server) -> Contender:
    def place(name: str) -> Any:
        return sk.open_place(server.url(name), **server.options)

    return Contender(lambda name: sk.save(state.tensors, place(name)), lambda name: sk.load(state.tensors, place(name)))


def _drop_in(state: State, server: S3Server) -> Contender:
    from shardkeep import dcp

    return Contender(
        lambda name: dcp.save(state.tensors, checkpoint_id=server.url(name), no_dist=True),
        lambda name: dcp.load(state.tensors, checkpoint_id=server.url(name), no_dist=True),
    )


class Child:
    """
    Torch DCP through s3fs, in a process of its own: s3fs wants another botocore than boto3 does.

    The folder that BENCH_S3FS names comes first on its path: `pip install --target FOLDER s3fs`.
    """

    def __init__(self, nbytes: int, server: S3Server) -> None:
        path = os.pathsep.join(filter(None, [os.environ.get("BENCH_S3FS"), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, __file__, "torch", str(nbytes)]
        environment = {**os.environ, **server.environment, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._process.stdout.readline()

    def ask(self, op: str, url: str) -> float:
        """Let it save or load; returns the seconds it took."""
        self._process.stdin.write(f"{op} {url}\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("torch DCP ended early; its error is above")
        return float(line)

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def be_torch(nbytes: int) -> None:
    """Be that process."""
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state = State(nbytes)
    print("ready", flush=True)
    for line in sys.stdin:
        op, url = line.split()
        if op == "save":
            work = functools.partial(
                dcp.save, state.tensors, storage_writer=FsspecWriter(url, thread_count=4), no_dist=True
            )
        else:
            state.wipe()
            work = functools.partial(dcp.load, state.tensors, storage_reader=FsspecReader(url), no_dist=True)
        print(_timed(work), flush=True)
        state.check(TORCH)


CONTENDERS: Mapping[str, Callable[[State, S3Server], Contender]] = {
    OBSTORE: _obstore,
    OURS: _shardkeep,
    DROP_IN: _drop_in,
    "boto3": _boto3,
}


def measure(scratch: str, gb: float, rounds: int) -> dict[str, Any]:
    """Let every contender save and load once a round; who begins changes with the round."""
    state = State(int(gb * 1e9))
    samples = []
    with S3Server(os.path.join(scratch, "s3")) as server, ExitStack() as after, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has much to say of ranks that are not there
        for name, value in server.environment.items():
            after.callback(set_for_children, name, os.environ.get(name))
            os.environ[name] = value
        turns = {name: _turn(state, make(state, server), name) for name, make in CONTENDERS.items()}
        if os.path.isdir(os.path.join(os.environ.get("BENCH_S3FS", ""), "s3fs")) or find_spec("s3fs"):
            child = Child(state.nbytes, server)
            after.callback(child.close)
            turns[TORCH] = lambda where: {op: child.ask(op, server.url(where)) for op in ("save", "load")}
        else:
            print("    torch DCP is left out: there is no s3fs (see Child in bench/s3.py)", file=sys.stderr)
        names = list(turns)
        # Round 0 does not count: it includes connections, imports and the server's first volumes.
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                took = turns[name](f"round-{number}/{names.index(name)}")
                _remove(server, f"round-{number}/{names.index(name)}")
                if number:
                    samples.append({"contender": name, "round": number, **took})
                    times = "".join(f"  {op} {seconds:.3f} s" for op, seconds in took.items())
                    print(f"    round {number}: {name:<18}{times}", file=sys.stderr)
    return {"nbytes": state.nbytes, "samples": samples}


def _turn(state: State, contender: Contender, name: str) -> Callable[[str], dict[str, float]]:
    def taken(where: str) -> dict[str, float]:
        saved_s = _timed(functools.partial(contender.save, where))
        state.wipe()
        loaded_s = _timed(functools.partial(contender.load, where))
        state.check(name)
        return {"save": saved_s, "load": loaded_s}

    return taken


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _remove(server: S3Server, where: str) -> None:
    """Delete it, so that the server's disk does not fill up."""
    import obstore
    from obstore.store import S3Store

    client = S3Store(BUCKET, client_options={"allow_http": True}, **server.options)
    obstore.delete(client, [each["path"] for chunk in obstore.list(client, where) for each in chunk])


def lines(results: Mapping[str, Any]) -> list[str]:
    """Lay it out."""
    out = [f"  {results['nbytes'] / 1e9:.2f} GB, SeaweedFS on this machine    best   median   spread    GB/s"]
    for op in ("save", "load"):
        for name in dict.fromkeys(each["contender"] for each in sorted(results["samples"], key=_place)):
            times = sorted(each[op] for each in results["samples"] if each["contender"] == name)
            speed = results["nbytes"] / times[0] / 1e9
            out.append(
                f"    {op}: {name:<28} {times[0]:7.3f}  {median(times):7.3f}   x{times[-1] / times[0]:<5.2f} {speed:6.2f}"
            )
    return out


def _place(sample: Mapping[str, Any]) -> int:
    return [*CONTENDERS, TORCH].index(sample["contender"])


def judge(results: Mapping[str, Any]) -> list[Verdict]:
    """Compare with the others, round by round."""
    by = {(each["contender"], each["round"]): each for each in results["samples"]}
    rounds = sorted({number for _, number in by})
    verdicts = []
    for op in ("save", "load"):
        for theirs, at_least in TARGETS:
            ratios = [by[theirs, n][op] / by[OURS, n][op] for n in rounds if (theirs, n) in by]
            if not ratios:
                continue
            what = f"S3 {op}: ours / {theirs}"
            verdicts.append(
                Verdict(what, median(ratios), at_least, "x", median(ratios) >= at_least, (min(ratios), max(ratios)))
            )
    return verdicts


if __name__ == "__main__":
    if sys.argv[1:2] == ["torch"]:
        be_torch(int(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory(prefix="shardkeep-bench-") as folder:
            found = measure(folder, float(sys.argv[1]) if len(sys.argv) > 1 else 0.25, 3)
        print("\n".join([*lines(found), *(verdict.line() for verdict in judge(found))]))
