"""
Which process it is that writes something, in words that can be left on disk, whether it is still there, and how much
memory there is for it.
"""

from __future__ import annotations

import os
import socket


def host() -> str:
    """Name machine, boot and process namespace: equal only where process numbers mean the same."""
    boot = namespace = ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        pass  # not Linux: the host name has to do
    return f"{socket.gethostname()} {boot} {namespace}".strip()


def started(pid: int) -> str:
    """Say when a process of this host began, so that a reused number is not taken for it; empty where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return _exists(pid)
    return "" if fields[0] in ("Z", "X") else fields[19]


def free_memory() -> int:
    """Return how many bytes of memory the machine could still give; a cautious guess where it does not say."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            found = dict(line.split(":", 1) for line in file)
        return int(found["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 4 << 30


def _exists(pid: int) -> str:
    if os.path.exists("/proc/self/stat"):
        return ""
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "running"
