"""Resources of this process: resident, pinned and device memory and its peak, threads, file descriptors."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import torch

GAUGES = ("rss", "pinned", "device", "threads", "fds")


class Pinned:
    """
    Bytes of pinned host memory: what torch's allocator owns, and what anyone registers through `torch.cuda.cudart()`.

    The second is counted by standing in for the two functions, since CUDA does not tell.
    """

    def __init__(self) -> None:
        self._registered: dict[int, int] = {}
        self.peak = 0
        if torch.cuda.is_available():
            torch.cuda.init()
            self._stand_in(torch.cuda.cudart())

    def _stand_in(self, cudart: Any) -> None:
        register, unregister = cudart.cudaHostRegister, cudart.cudaHostUnregister

        def counted(address: int, nbytes: int, flags: int) -> Any:
            answer = register(address, nbytes, flags)
            if int(answer) == 0:
                self._registered[address] = nbytes
                self.now()
            return answer

        def uncounted(address: int) -> Any:
            self._registered.pop(address, None)
            return unregister(address)

        cudart.cudaHostRegister, cudart.cudaHostUnregister = counted, uncounted

    def now(self) -> int:
        held = sum(list(self._registered.values()))
        if torch.cuda.is_available():
            held += torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        self.peak = max(self.peak, held)
        return held

    def reset_peak(self) -> None:
        self.peak = 0
        self.now()


class Vitals:
    def __init__(self, device: torch.device) -> None:
        self.on_accelerator = device.type != "cpu"
        self.pinned = Pinned()
        self._before = (0, 0, 0)

    def now(self) -> dict[str, int]:
        """Read every gauge, garbage collected."""
        tidy()
        return {
            "rss": _status("VmRSS"),
            "pinned": self.pinned.now(),
            "device": torch.accelerator.memory_allocated() if self.on_accelerator else 0,
            "threads": len(os.listdir("/proc/self/task")),
            "fds": len(os.listdir("/proc/self/fd")) - 1,
        }

    def begin(self) -> None:
        """Take what is held now as the level above which `rise` counts."""
        now = self.now()
        self._before = (now["rss"], now["pinned"], now["device"])

    def restart(self) -> None:
        """Let peaks start again; the level stays."""
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        self.pinned.reset_peak()
        if self.on_accelerator:
            torch.accelerator.reset_peak_memory_stats()

    def rise(self) -> dict[str, int]:
        """How far memory rose above the level since `restart`, at its highest."""
        self.pinned.now()
        highest = torch.accelerator.max_memory_allocated() if self.on_accelerator else 0
        peaks = (_status("VmHWM"), self.pinned.peak, highest)
        rises = [max(0, peak - before) for peak, before in zip(peaks, self._before, strict=True)]
        return dict(zip(("rss", "pinned", "device"), rises, strict=True))


def tidy() -> None:
    """Give back what Python and malloc merely keep, so that two readings can be compared."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
