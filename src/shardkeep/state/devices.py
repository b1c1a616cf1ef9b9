"""Work in flight on accelerators, which our worker threads would neither wait for nor be waited for."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """
    Wait until all work queued on the accelerators that hold these tensors is done.

    Streams belong to threads: a copy made by another thread is not ordered after what the caller has queued, nor
    before what it queues next. Where all lie in host memory, no accelerator is asked for anything: torch refuses CUDA to
    processes that are forked after that.
    """
    kind = torch.accelerator.current_accelerator()  # of this build of torch, whether one is there or not
    for device in {tensor.device for tensor in tensors}:
        if kind is not None and device.type == kind.type:
            torch.accelerator.synchronize(device)
