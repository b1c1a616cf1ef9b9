"""
One contender of `shardkeep bench`, in a process of its own: writes and reads the same state some times, and says how
long that took, as JSON on stdout.

    python -m shardkeep.cli.bench_job CONTENDER PLACE BYTES ROUNDS THREADS

A contender is `raw` (the disk alone: large writes and reads past the page cache, on several files at once), `plain` (a
store alone: puts and gets, as many at once as a save has under way), `shardkeep`, or the name of a module that has `save`
and `load` as torch's distributed checkpoint has. Before every read files of a disk are taken out of the page cache, and
after it the state is compared with what was written.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Protocol

from shardkeep.errors import CheckpointError
from shardkeep.store.place import open_root, open_store
from shardkeep.store.protocol import Store, requests_of

_PIECE_NBYTES = 64 << 20
_REQUEST_NBYTES = 8 << 20
_MOST_FILES = 4


class Contender(Protocol):
    """Something that is measured."""

    def write(self, path: str) -> None:
        """Write all of it, durable on return."""

    def read(self, path: str) -> None:
        """Read all of it."""

    def digest(self) -> int:
        """Tell what is in memory from anything else."""

    def forget(self) -> None:
        """Change what is in memory, so that only a read brings it back."""


class Raw:
    """The disk alone."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._files = max(1, min(_MOST_FILES, threads, nbytes // _REQUEST_NBYTES))
        self._nbytes = max(_REQUEST_NBYTES, nbytes // self._files // _REQUEST_NBYTES * _REQUEST_NBYTES)
        self._buffers = [mmap.mmap(-1, _REQUEST_NBYTES) for _ in range(self._files)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(_REQUEST_NBYTES)

    @property
    def nbytes(self) -> int:
        """What is written: a little less than was asked for, in whole requests."""
        return self._nbytes * self._files

    def write(self, path: str) -> None:
        os.makedirs(path)
        self._each(lambda file, buffer: self._write_file(os.path.join(path, file), buffer))

    def read(self, path: str) -> None:
        self._each(lambda file, buffer: self._read_file(os.path.join(path, file), buffer))

    def digest(self) -> int:
        return 0

    def forget(self) -> None:
        """Nothing is kept but a buffer."""

    def _each(self, work: Callable[[str, mmap.mmap], None]) -> None:
        with ThreadPoolExecutor(self._files) as pool:
            for done in [pool.submit(work, f"raw-{i}", buffer) for i, buffer in enumerate(self._buffers)]:
                done.result()

    def _write_file(self, path: str, buffer: mmap.mmap) -> None:
        fd = _open(path, os.O_WRONLY | os.O_CREAT)
        try:
            for at in range(0, self._nbytes, _REQUEST_NBYTES):
                done = 0
                while done < _REQUEST_NBYTES:
                    done += os.pwrite(fd, memoryview(buffer)[done:], at + done)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _read_file(self, path: str, buffer: mmap.mmap) -> None:
        fd = _open(path, os.O_RDONLY)
        try:
            for at in range(0, self._nbytes, _REQUEST_NBYTES):
                done = 0
                while done < _REQUEST_NBYTES:
                    got = os.preadv(fd, [memoryview(buffer)[done:]], at + done)
                    if not got:
                        raise OSError(f"{path} ends at {at + done}")
                    done += got
        finally:
            os.close(fd)


def _open(path: str, flags: int) -> int:
    """Open a file past the page cache where that is possible."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, 0o644)
    except OSError:
        return os.open(path, flags, 0o644)


class Plain:
    """A store alone."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._threads = threads
        self._data = os.urandom(_REQUEST_NBYTES)
        self._names = [f"plain-{i}" for i in range(max(1, nbytes // _REQUEST_NBYTES))]

    @property
    def nbytes(self) -> int:
        """What is written: a little less than was asked for, in whole requests."""
        return len(self._names) * _REQUEST_NBYTES

    def write(self, path: str) -> None:
        self._each(path, lambda store, name: store.put(name, self._data, replace=True))

    def read(self, path: str) -> None:
        self._each(path, lambda store, name: store.get(name, limit=_REQUEST_NBYTES))

    def digest(self) -> int:
        return 0

    def forget(self) -> None:
        """Nothing is kept but what is put."""

    def _each(self, path: str, work: Callable[[Store, str], object]) -> None:
        store = open_store(path, direct=False)
        with ThreadPoolExecutor(requests_of(store, self._threads)) as pool:
            for done in [pool.submit(work, store, name) for name in self._names]:
                done.result()


class Checkpoints:
    """A state that is saved and loaded."""

    def __init__(self, nbytes: int) -> None:
        import numpy as np  # noqa: PLC0415 - the disk alone needs none
        import torch  # noqa: PLC0415

        random = np.random.default_rng(0)
        count = max(1, nbytes // _PIECE_NBYTES)
        size = nbytes // count // 4096 * 1024
        self.state = {
            "model": {
                f"layer{i}.weight": torch.from_numpy(np.frombuffer(bytearray(random.bytes(4 * size)), np.float32))
                for i in range(count)
            }
        }
        self.nbytes = 4 * size * count

    def digest(self) -> int:
        import xxhash  # noqa: PLC0415

        found = xxhash.xxh3_64()
        for tensor in self.state["model"].values():
            found.update(tensor.numpy().data)
        return found.intdigest()

    def forget(self) -> None:
        for tensor in self.state["model"].values():
            tensor.zero_()


class Ours(Checkpoints):
    """shardkeep's own save and load."""

    def write(self, path: str) -> None:
        import shardkeep  # noqa: PLC0415

        shardkeep.save(self.state, path)

    def read(self, path: str) -> None:
        import shardkeep  # noqa: PLC0415

        shardkeep.load(self.state, path)


class Module(Checkpoints):
    """A module with torch's `save` and `load`."""

    def __init__(self, nbytes: int, name: str) -> None:
        super().__init__(nbytes)
        self._module: Any = import_module(name)

    def write(self, path: str) -> None:
        self._module.save(self.state, checkpoint_id=path, no_dist=True)

    def read(self, path: str) -> None:
        self._module.load(self.state, checkpoint_id=path, no_dist=True)


def drop_cached(path: str) -> None:
    """Take the files below a path out of the page cache; without that, a read measures memory."""
    if not hasattr(os, "posix_fadvise"):
        return
    for folder, _, names in os.walk(path):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def measure(contender: Contender, where: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each write and each read."""
    written, read = [], []
    root = open_root(where, direct=False)
    for number in range(rounds):
        path = f"{where}/round-{number}"
        before = contender.digest()
        began = time.perf_counter()
        contender.write(path)
        written.append(time.perf_counter() - began)
        drop_cached(path)  # a URL is no path: nothing is found there
        contender.forget()
        began = time.perf_counter()
        contender.read(path)
        read.append(time.perf_counter() - began)
        if contender.digest() != before:
            raise SystemExit("what was read is not what was written")
        root.remove(f"round-{number}")
    return written, read


def _contender(name: str, nbytes: int, threads: int) -> Raw | Plain | Ours | Module:
    if name in {"raw", "plain"}:
        return (Raw if name == "raw" else Plain)(nbytes, threads)
    return Ours(nbytes) if name == "shardkeep" else Module(nbytes, name)


def main(argv: list[str]) -> int:
    """Measure one contender."""
    name, where, nbytes, rounds, threads = argv[0], argv[1], int(argv[2]), int(argv[3]), int(argv[4])
    # What is done once a process, imports above all, is not what is measured.
    try:
        measure(_contender(name, 1 << 20, threads), where, 1)
        contender = _contender(name, nbytes, threads)
        written, read = measure(contender, where, rounds)
    except CheckpointError as exc:
        print(" ".join(exc.message.split()), file=sys.stderr)  # whose last line is shown
        return 2
    print(json.dumps({"nbytes": contender.nbytes, "write_s": written, "read_s": read}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
