"""`shardkeep doctor`: versions, limits, what a store can do, and what would be slow: the text for a bug report. No torch."""

from __future__ import annotations

import argparse
import errno
import os
import platform
import secrets
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import fields
from importlib import metadata

from shardkeep._version import __version__
from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.runs import suggest_path
from shardkeep.display import format_field
from shardkeep.errors import CheckpointError, StorageError
from shardkeep.options import Options, available_memory, container_memory, cores, physical_memory, settings_with
from shardkeep.storage import base
from shardkeep.storage.local import open_files
from shardkeep.storage.resolve import open_root

_PACKAGES = "torch numpy xxhash msgspec rich obstore fsspec backports.zstd lz4 cryptography"
_PROBE_NBYTES = 4 << 20
_LITTLE_NBYTES = 10 * 10**9
_REMARKS = {
    **dict.fromkeys(
        ("nfs", "cifs", "smb", "fuse", "9p"), "a network file system: each small request waits for the server"
    ),
    "overlay": "a container's own layer: slower than a volume, and gone with the container",
    **dict.fromkeys(("tmpfs", "ramfs"), "memory of this machine, and lost when it restarts"),
}
"""What to know of a file system, by how its type begins."""

Facts = dict[str, str]


@command(
    argument("place", metavar="PLACE", nargs="?", help="a directory or a URL; writes 4 MB there, and deletes them"),
    examples="""
  shardkeep doctor                                 this machine
  shardkeep doctor runs/a                          and the place of a run
""",
)
def doctor(args: argparse.Namespace) -> int:
    slow = []
    if cores() < 4:
        slow.append(f"{out.format_count(cores(), 'core')}: training, hashing and copying compete for them")
    sections = {"versions": _versions(), "machine": _machine(), "options": _options()}
    failed = ""
    if args.place is not None:
        root = open_root(args.place, direct=Options().direct_io)
        path = base.local_path(root)
        if path is not None and not os.path.isdir(path):
            raise out.UsageError(f"{args.place} is not a directory", hint=suggest_path(args.place))
        sections["place"] = {"url": root.url}
        try:
            slow += _examine(root, path, sections["place"])
        except CheckpointError as exc:
            failed = str(exc)
    if args.json:
        return out.print_json({**sections, "slow": slow, "failed": failed or None}, 1 if failed else 0)
    sections["what would be slow"] = dict.fromkeys(
        slow or ["nothing that shows from here; `shardkeep bench` measures"], ""
    )
    for title, rows in sections.items():
        print(out.styled(title, "bold"))
        table = out.Table(("name", "value"), flexible="value", indent="  ", show_headings=False)
        for name, value in rows.items():
            table.add(name, value) if value else print(out.wrap_lines(out.printable(name), "  "))
        table.print()
    if failed:
        out.echo_err(out.printable_lines(failed), "red")
    return 1 if failed else 0


def _versions() -> Facts:
    found = {"shardkeep": __version__, "python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in _PACKAGES.split():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _machine() -> Facts:
    limit = container_memory()
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


def _options() -> Facts:
    values = {each.name: getattr(Options(), each.name) for each in fields(Options) if each.name != "keys"}
    rows = {name: str(format_field(name, value)) for name, value in values.items()}
    if not values["staging_bytes"]:
        rows["staging_bytes"] = "0: as much as needed, if the machine has it free"
    if values["share_reads"] is None:
        rows["share_reads"] = "where storage is slower than the network"
    for name, value in sorted(settings_with(("SHARDKEEP_", "LOCAL_WORLD_SIZE")).items()):
        rows[f"${name}"] = "(a secret)" if name == "SHARDKEEP_KEY" else value
    return rows


def _examine(root: base.Root, path: str | None, rows: Facts) -> Iterator[str]:
    """Find out what a place can do, by writing and deleting a probe; fill `rows`, and yield what would be slow."""
    if path is not None:
        kind, mounted = _file_system(path)
        rows["file system"] = f"{kind or 'unknown'}, mounted at {mounted}"
        yield from (f"{kind} is {remark}" for begin, remark in _REMARKS.items() if kind.startswith(begin))
    if (free := base.free_nbytes(root)) is not None:
        rows["free space"] = out.format_size(free)
        if free < _LITTLE_NBYTES:
            yield f"only {out.format_size(free)} are free"
    name = f"shardkeep-doctor-{secrets.token_hex(8)}"
    try:
        rows["a probe of 4 MB"] = _write_and_read(root, name)
        if path is not None:
            with closing(open_files(os.path.join(path, name), os.O_RDONLY, direct=True)) as files:
                rows["direct I/O"] = "yes" if files.direct is not None else "no"
        rows["commits"] = _commits(root, name)
    except CheckpointError:
        with suppress(CheckpointError):  # the first failure says more
            root.delete(name)
        raise
    root.delete(name)
    if path is None:
        rows["requests at once"] = str(base.preferred_requests(root, Options().io_threads))
        rows["uploads"] = (
            f"in parts of {out.format_size(base.part_nbytes_of(root))}" if base.is_sequential(root) else "whole"
        )
        rows["uploads are verified by the service"] = "yes" if base.verifies_uploads(root) else "not known"
    if rows.get("direct I/O") == "no":
        yield "no direct I/O: data goes through the page cache, which takes CPU time and evicts other data"
    if rows["commits"].startswith("not"):
        yield "no conditional puts: each commit waits a moment, and reads back whether another writer interfered"


def _write_and_read(root: base.Root, name: str) -> str:
    data, into = secrets.token_bytes(_PROBE_NBYTES), bytearray(_PROBE_NBYTES)
    began = time.perf_counter()
    with base.abandoning(root.create(name, len(data))) as writer:
        writer.write_at(0, memoryview(data))
        writer.finish()
    wrote = time.perf_counter()
    with closing(root.open(name)) as reader:
        reader.read_into(0, memoryview(into))
    read = time.perf_counter()
    if into != data:
        raise StorageError(f"{root.url}: what was read back is not what was written", hint="do not save there")
    return f"written and made durable in {out.format_seconds(wrote - began)}, read back in {out.format_seconds(read - wrote)}"


def _commits(root: base.Root, name: str) -> str:
    checks = getattr(base.innermost(root), "checks_conditions", None)
    try:
        root.put(name, b"")
    except StorageError as exc:
        if exc.errno != errno.EEXIST:
            raise
        how = "by a lock" if checks is None else "by conditional puts" if checks(None) else ""
        return f"safe, {how}" if how else "not atomic: looks first, and reads back"
    return "not protected: a second writer replaces what the first one wrote"


def _file_system(path: str) -> tuple[str, str]:
    real, found = os.path.realpath(path), ("", "/")
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8") as file:
        for line in file:
            _, mounted, kind, *_ = line.split(" ")
            if os.path.commonpath([real, mounted]) == mounted and len(mounted) >= len(found[1]):
                found = kind, mounted
    return found
