"""`shardkeep doctor`: versions, limits, what a store can do, and what would be slow: the text for a bug report. No torch."""

from __future__ import annotations

import argparse
import errno
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import fields
from importlib import metadata

from shardkeep._version import __version__
from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.runs import suggest_path
from shardkeep.errors import CheckpointError, StorageError
from shardkeep.options import Options, cores, physical_memory, settings_with
from shardkeep.storage.base import (
    Root,
    free_nbytes,
    innermost,
    local_path,
    part_nbytes_of,
    preferred_requests,
    verifies_uploads,
)
from shardkeep.storage.local import available_memory, open_files
from shardkeep.storage.resolve import open_root

_PACKAGES = ("torch", "numpy", "xxhash", "msgspec", "rich")
_EXTRAS = ("safetensors", "obstore", "fsspec", "backports.zstd", "lz4", "cryptography")
_PROBE_NBYTES = 4 << 20
_LITTLE_NBYTES = 10 * 10**9
_NETWORK = ("nfs", "cifs", "smb", "fuse", "9p", "virtiofs")
"""Types of network file systems begin with these; parallel ones, such as lustre, are no concern."""
_IN_MEMORY = ("tmpfs", "ramfs")

Rows = dict[str, str]


@command(
    argument("place", metavar="PLACE", nargs="?", help="a directory or a URL; writes 4 MB there, and deletes them"),
    examples="""
  shardkeep doctor                                 this machine
  shardkeep doctor runs/a                          and the place of a run
""",
)
def doctor(args: argparse.Namespace) -> int:
    """Print the report; 1 if the place cannot be used."""
    sections = {"versions": _versions(), "machine": _machine(), "options": _options()}
    slow, failed = list(_slow_machine()), ""
    if args.place is not None:
        root = open_root(args.place, direct=Options().direct_io)
        path = local_path(root)
        if path is not None and not os.path.isdir(path):
            raise out.UsageError(f"{args.place} is not a directory", hint=suggest_path(args.place))
        rows = sections["place"] = {"url": root.url}
        try:
            slow += _examine(root, rows)
        except CheckpointError as exc:
            failed = exc.message
    if args.json:
        out.print_json({**sections, "slow": slow, "failed": failed or None})
        return 1 if failed else 0
    for title, rows in sections.items():
        print(out.styled(title, "bold"))
        table = out.Table(("name", "value"), flexible="value", indent="  ", show_headings=False)
        for name, value in rows.items():
            table.add(name, out.printable(value))
        table.print()
    print(out.styled("what would be slow", "bold"))
    for line in slow or ["nothing that can be seen from here; `shardkeep bench PLACE` measures"]:
        print(out.wrap_lines(out.printable(line), "  "))
    if failed:
        out.echo_err(out.printable(failed), "red")
    return 1 if failed else 0


# -- this machine


def _versions() -> Rows:
    found = {"shardkeep": __version__, "python": f"{platform.python_implementation()} {platform.python_version()}"}
    missing = []
    for name in (*_PACKAGES, *_EXTRAS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return {**found, "not installed": ", ".join(missing)} if missing else found


def _machine() -> Rows:
    limit = _container_nbytes()
    rows = {
        "system": platform.platform(),
        "cores": str(cores()),
        "memory": f"{out.format_size(physical_memory())}, {out.format_size(available_memory())} available",
        "memory of the container": out.format_size(limit) if limit else "no limit",
    }
    with suppress(ImportError):  # Windows
        import resource  # noqa: PLC0415

        files, locked = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
        rows["open files"] = f"at most {files:,}" if files >= 0 else "no limit"
        rows["locked memory"] = f"at most {out.format_size(locked)}" if locked >= 0 else "no limit"
    return rows


def _container_nbytes() -> int:
    """Return the memory limit of the control group that this process is in; 0 if there is none."""
    found = []
    with suppress(OSError):
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            own = [line.strip().split(":", 2)[2].lstrip("/") for line in file]
        for where in ("/sys/fs/cgroup", *(os.path.join("/sys/fs/cgroup", each) for each in own)):
            for name in ("memory.max", "memory/memory.limit_in_bytes"):
                with suppress(OSError, ValueError), open(os.path.join(where, name), encoding="utf-8") as file:
                    found.append(int(file.read()))  # "max" is no number
    return min((nbytes for nbytes in found if nbytes < 1 << 60), default=0)


def _options() -> Rows:
    options = Options()
    rows = {each.name: str(getattr(options, each.name)) for each in fields(options) if each.name != "keys"}
    for name in ("host_budget_bytes", "pinned_bytes", "staging_bytes"):
        rows[name] = out.format_size(int(rows[name])) if rows[name] != "0" else "a fair share of free memory"
    for name, value in sorted(settings_with(("SHARDKEEP_", "LOCAL_WORLD_SIZE")).items()):
        rows[f"${name}"] = "(a secret)" if name == "SHARDKEEP_KEY" else value
    return rows


def _slow_machine() -> Iterator[str]:
    if cores() < 4:
        yield f"{out.format_count(cores(), 'core')}: training, hashing and copying compete for them"
    if (limit := _container_nbytes()) and limit < physical_memory():
        yield (
            f"the container may use {out.format_size(limit)} of {out.format_size(physical_memory())} of memory, and"
            " asynchronous saves go by what the machine has free: set SHARDKEEP_STAGING_BYTES"
        )


# -- a place


def _examine(root: Root, rows: Rows) -> Iterator[str]:
    """Find out what a place can do, by writing and deleting a probe; fill `rows`, and yield what would be slow."""
    path, kind = local_path(root), ""
    if path is not None:
        kind, mounted = _file_system(path)
        rows["file system"] = f"{kind or 'unknown'}, mounted at {mounted}"
    free = free_nbytes(root)
    if free is not None:
        whole = f" of {out.format_size(shutil.disk_usage(path).total)}" if path is not None else ""
        rows["free space"] = f"{out.format_size(free)}{whole}"
        if free < _LITTLE_NBYTES:
            yield f"only {out.format_size(free)} are free"
    name, data = f"shardkeep-doctor-{secrets.token_hex(8)}", secrets.token_bytes(_PROBE_NBYTES)
    try:
        rows["a probe of 4 MB"] = _write_and_read(root, name, data)
        if path is not None:
            with closing(open_files(os.path.join(path, name), os.O_RDONLY, direct=True)) as files:
                rows["direct I/O"] = "yes" if files.direct is not None else "no"
        rows["commits"] = _commits(root, name)
    finally:
        root.delete(name)
    if path is None:
        nbytes = part_nbytes_of(root)
        rows["requests at once"] = f"{preferred_requests(root, Options().io_threads)}"
        rows["uploads"] = (f"in parts of {out.format_size(nbytes)}" if nbytes else "whole") + (
            ", verified by the service" if verifies_uploads(root) else ""
        )
    if kind.startswith(_NETWORK):
        yield f"{kind} is a network file system: each small request waits for the server"
    if kind == "overlay":
        yield "overlay is a container's own layer: slower than a volume, and gone with the container"
    if kind.startswith(_IN_MEMORY):
        yield f"{kind} is memory: fast, counted as memory of the container, and lost when the machine restarts"
    elif rows.get("direct I/O") == "no":
        yield "no direct I/O: data goes through the page cache, which takes CPU time and evicts other data"
    if rows["commits"].startswith("no"):
        yield "no conditional puts: each commit waits a moment, and reads back whether another writer interfered"


def _write_and_read(root: Root, name: str, data: bytes) -> str:
    began = time.perf_counter()
    writer = root.create(name, len(data))
    try:
        writer.write_at(0, memoryview(data))
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    wrote, into = time.perf_counter(), bytearray(len(data))
    with closing(root.open(name)) as reader:
        reader.read_into(0, memoryview(into))
    read = time.perf_counter()
    if into != data:
        raise StorageError(f"{root.url}: what was written is not what was read back", hint="do not save there")
    return f"written and made durable in {(wrote - began) * 1e3:.0f} ms, read back in {(read - wrote) * 1e3:.0f} ms"


def _commits(root: Root, name: str) -> str:
    """Say what keeps two writers from replacing each other's commits."""
    checks = getattr(innermost(root), "checks_conditions", None)
    how = "by a lock" if checks is None else "by conditional puts" if checks(None) else ""
    try:
        root.put(name, b"")
    except StorageError as exc:
        if exc.errno == errno.EEXIST:
            return f"safe, {how}" if how else "not atomic: looks first, and reads back"
        raise
    return "no protection: a second writer replaces what the first one wrote"


def _file_system(path: str) -> tuple[str, str]:
    """Return the type of the file system that a directory is in, and where it is mounted."""
    real, found = os.path.realpath(path), ("", "/")
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8") as file:
        for line in file:
            _, mounted, kind, *_ = line.split(" ")
            if os.path.commonpath([real, mounted]) == mounted and len(mounted) >= len(found[1]):
                found = kind, mounted
    return found
