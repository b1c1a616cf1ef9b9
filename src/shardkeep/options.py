"""
Every default and every environment variable, in one place.

Only the public entry points (`saving`, `loading`, `opening`, the command line) read these; other functions take plain arguments.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shardkeep.errors import BadValue, StateError

MIB = 1 << 20
_NO_LIMIT_NBYTES = 1 << 60
"""What control groups of version 1 report if there is no limit is more than this."""
T = TypeVar("T")

Size = str | float
"""A number of bytes, or a text such as "5GB" (powers of ten), "512MiB" or "2GiB" (powers of two)."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def per_process(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that makes one object for each process: a forked process must not use that of its parent."""
    made = functools.cache(lambda _process_id: make())
    return lambda: made(os.getpid())


def _env_int(name: str, default: int, accepted: str = "a whole number, such as 4") -> int:
    raw = os.environ.get(name, "")
    if not raw:
        return default
    try:
        return int(raw)
    except ValueError:
        raise BadValue(
            f"the environment variable {name} is {raw!r}, expected {accepted}", hint="correct it, or unset it"
        ) from None


def _env_flag(name: str, default: int) -> bool:
    return _env_int(name, default, "0 or 1") != 0


def parse_size(size: Size, name: str) -> float:
    """Return the number of bytes of a size; raise `StateError`, with the name of the argument, for anything else."""
    if isinstance(size, str):
        if found := _SIZE.fullmatch(size.strip()):
            return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))
    else:
        with suppress(TypeError):
            if type(size) is not bool and 0 <= size < math.inf:
                return size
    raise StateError(
        f"{name}={size!r} is not a size", hint="give a number of bytes, or a text such as 500MB, 5GB or 2GiB"
    )


def _env_size(name: str, default: int) -> int:
    raw = os.environ.get(name, "")
    return int(parse_size(raw, name)) if raw else default


def cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def local_ranks() -> int:
    """Return how many ranks of the job share this machine, according to the launcher."""
    return max(1, _env_int("LOCAL_WORLD_SIZE", 1))


def _fair_threads() -> int:
    # With more, threads wait for the interpreter's lock and for each other.
    return min(8, max(4, cores() // local_ranks()))


def physical_memory() -> int:
    """Return the memory of this machine in bytes; 0 if it does not say."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def available_memory(root: str = "/") -> int:
    """Return how many bytes of memory this process may still use; a cautious guess if the system does not say."""
    available = 4 << 30
    with suppress(OSError, IndexError, ValueError), open(os.path.join(root, "proc/meminfo"), encoding="utf-8") as file:
        available = int(file.read().split("MemAvailable:", 1)[1].split(None, 1)[0]) << 10
    if root == "/" and not _container_memory():  # it does not change in the life of a process
        return available
    return min([available, *(free for _, free in _memory_groups(root))])


def container_memory(root: str = "/") -> int:
    """Return the memory limit of this process, by its control groups (its container); 0 if there is none."""
    return min((limit for limit, _ in _memory_groups(root)), default=0)


_container_memory = per_process(container_memory)


def _memory_groups(root: str) -> Iterator[tuple[int, int]]:
    """Yield limit and free bytes of the control groups (v1 or v2) that limit this process: its own, and those above it."""
    groups: list[str] = []
    with suppress(OSError):
        groups = Path(root, "proc/self/cgroup").read_text("utf-8").splitlines()
    for controllers, path in (line.split(":", 2)[1:] for line in groups):
        if controllers == "":
            top, names = "", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A container may see its own group as the top one, whatever its path says.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            group = Path(root, "sys/fs/cgroup", top, *parts[:depth])
            with suppress(OSError, ValueError):
                limit, used = (int((group / name).read_text("utf-8")) for name in names[:2])  # "max" is not a number
                stat = dict(line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines())
                if limit < _NO_LIMIT_NBYTES:
                    yield limit, max(0, limit - used + int(stat.get(names[2], 0)))  # the page cache gives way


def _fair_pinned_nbytes() -> int:
    # With more, staging is faster, but other processes cannot use pinned memory.
    memory = min(physical_memory(), _container_memory() or physical_memory())
    return min(4096 * MIB, max(256 * MIB, memory // 32 // local_ranks()))


@dataclass(frozen=True, kw_only=True)
class Options:
    """
    How a save or a load uses the machine. What is saved does not depend on it.

    Fields that end in `_bytes` also take a text, such as "512MiB" or "2GB".
    """

    io_threads: int = field(default_factory=lambda: _env_int("SHARDKEEP_IO_THREADS", _fair_threads()))
    """Threads that copy, hash and move bytes, on each rank. There may be more than cores: most wait for the disk."""
    host_budget_bytes: int = field(default_factory=lambda: _env_size("SHARDKEEP_HOST_BUDGET_BYTES", 256 * MIB))
    """Most host memory used beyond the state itself, on each rank."""
    timeout_s: float = field(default_factory=lambda: float(_env_int("SHARDKEEP_TIMEOUT_S", 600)))
    """
    How long rank 0 waits for the other ranks when its own part is done; they wait twice as long for it. Also how long the writer
    process may take for one reply.
    """
    pinned_bytes: int = field(default_factory=lambda: _env_size("SHARDKEEP_PINNED_BYTES", _fair_pinned_nbytes()))
    """
    Most pinned memory that this process keeps for copies from and to accelerators; half of the state at most. By default
    the ranks of a machine share a 32nd of its memory, or of their container's, up to 4 GiB each.
    """
    staging_bytes: int = field(default_factory=lambda: _env_size("SHARDKEEP_STAGING_BYTES", 0))
    """
    Most host memory that asynchronous saves copy the state to. 0: as much as needed, up to a fair share of what the machine has
    free. If the state takes more, staging waits for the disk.
    """
    allow_pickle: bool = field(default_factory=lambda: _env_flag("SHARDKEEP_ALLOW_PICKLE", 0))
    """Unpickle objects of any class in checkpoints of torch's layout. Only for checkpoints you trust."""
    direct_io: bool = field(default_factory=lambda: _env_flag("SHARDKEEP_DIRECT_IO", 1))
    """Use O_DIRECT on local disks where it works and is better: for writes, and for reads if memory is short."""
    keep_cached: bool = field(default_factory=lambda: _env_flag("SHARDKEEP_KEEP_CACHED", 1))
    """
    After a save to a local disk, keep the newest checkpoint in the page cache, if it takes at most a quarter of the available
    memory: a restart then loads it from memory.
    """
    share_reads: bool | None = field(
        default_factory=lambda: _env_flag("SHARDKEEP_SHARE_READS", 0) if setting("SHARDKEEP_SHARE_READS") else None
    )
    """
    Let ranks that load the same bytes each fetch a part of them, and pass it on to the others over TCP. None: if the store is
    an object store or a network file system.
    """
    keys: Any = field(default=None, repr=False)
    """
    For encrypted checkpoints: a `KeyRing`, the path of a key file, a function that returns a key, or any object with
    `wrap` and `unwrap` (a KMS). None: what SHARDKEEP_KEY_FILE names, or the text in SHARDKEEP_KEY.
    """

    if TYPE_CHECKING:  # fields hold numbers, and take texts, too

        def __init__(
            self,
            *,
            io_threads: int = ...,
            host_budget_bytes: Size = ...,
            timeout_s: float = ...,
            pinned_bytes: Size = ...,
            staging_bytes: Size = ...,
            allow_pickle: bool = ...,
            direct_io: bool = ...,
            keep_cached: bool = ...,
            share_reads: bool | None = ...,
            keys: Any = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("host_budget_bytes", "pinned_bytes", "staging_bytes"):
            object.__setattr__(self, name, int(parse_size(getattr(self, name), name)))
        if type(self.io_threads) is not int or self.io_threads < 1:
            raise StateError(f"io_threads={self.io_threads!r}", hint="give a whole number, 1 or more")
        if not isinstance(self.timeout_s, (int, float)) or not self.timeout_s > 0:
            raise StateError(f"timeout_s={self.timeout_s!r}", hint="give a number of seconds, above 0")


def setting(name: str) -> str | None:
    return os.environ.get(name)


def settings_with(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return all environment variables whose names begin with one of these prefixes."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def set_for_children(name: str, value: str | None) -> None:
    """Set an environment variable that child processes inherit; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cycle collector, which would scan a million new objects again and again although none is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


S = TypeVar("S", bound=msgspec.Struct)


def decodable(kind: type[S]) -> type[S]:
    """
    Decorate a struct that holds other structs and is decoded, so that any number of threads may be the first to do so.

    Otherwise the process may crash: msgspec looks at the inner structs when the outer one is first decoded, and a second
    thread would use what is not complete yet.
    """
    msgspec.msgpack.Decoder(kind)
    return kind
