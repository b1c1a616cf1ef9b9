"""
Stagers: what makes a copy of a state that training can no longer change.

A state goes in; out comes a copy in host memory, or a future of one. One stager serves any number of saves: memory is
used again once nobody holds the snapshot that lay in it.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from typing_extensions import deprecated

from shardkeep.errors import CheckpointError
from shardkeep.stage.host import HostMemory
from shardkeep.stage.snapshot import Snapshot, prepare

StateDict = dict[str, Any]


class StagerClosed(CheckpointError, RuntimeError):
    """A stager was used after it had been closed."""


@runtime_checkable
class AsyncStager(Protocol):
    """
    Makes a copy of a state, from which it is then saved while training goes on.

    `stage` is called on the training thread. If it returns a future, the state must not change before that future is
    done; if not, and `should_synchronize_after_execute` is true, `synchronize_staging` is called before `async_save`
    returns. `close` ends its use.
    """

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `async_save` waits for `synchronize_staging` before it returns."""
        return self._synchronize_after_execute

    def stage(self, state_dict: StateDict) -> Future[StateDict] | StateDict:
        """Return a copy of the state that later changes of it do not reach, or a future of one."""
        raise NotImplementedError(f"{type(self).__name__} has no stage method of its own")

    @deprecated(
        "`synchronize_staging` is deprecated: wait for AsyncSaveResponse.staging_completion", category=FutureWarning
    )
    def synchronize_staging(self) -> None:
        """Wait until the state may be changed."""

    def close(self) -> None:
        """Let go of memory and threads."""


@dataclass
class StagingOptions:
    """How a `DefaultStager` copies. What only an accelerator needs is left out where there is none."""

    use_pinned_memory: bool = True
    """Copy into page-locked memory, which accelerators write to at full speed."""
    use_shared_memory: bool = True
    """Copy into memory that another process can map, as process-based saves do."""
    use_async_staging: bool = True
    """Copy on a thread: `stage` returns a future."""
    use_non_blocking_copy: bool = True
    """Queue all copies on the accelerator and wait once, instead of after each."""


class StateDictStager:
    """Copies states into host memory, on the caller's thread and stream."""

    def __init__(self, pin_memory: bool = False, share_memory: bool = False, pin_memory_min_bytes: int = 5) -> None:
        if pin_memory and not torch.accelerator.is_available():
            warnings.warn("pin_memory is ignored: there is no accelerator to pin memory for", stacklevel=2)
            pin_memory = False
        self.pin_memory = pin_memory
        self.share_memory = share_memory
        self.pin_memory_min_bytes = pin_memory_min_bytes
        self._memory = HostMemory(pinned=pin_memory, shared=share_memory, pinned_from=pin_memory_min_bytes)

    def stage(self, state_dict: Any, non_blocking: bool = False) -> Any:
        """
        Return a deep copy of the state with its tensors in host memory.

        Args:
            state_dict: any nesting of dicts, lists, tuples and objects.
            non_blocking: return while copies are queued on the accelerators' current streams, for the caller to
                synchronise.

        """
        snapshot = self.prepare(state_dict)
        snapshot.fill()
        if not non_blocking:
            snapshot.wait()
        return snapshot.tree

    def prepare(self, state_dict: Any) -> Snapshot:
        """Return the copy with its tensors' values still to be filled in."""
        return prepare(state_dict, self._memory)

    def deepcopy_with_tensor_offload(
        self, x: Any, memo: dict[int, Any] | None = None, _nil: Any = (), non_blocking: bool = False
    ) -> Any:
        """Return a deep copy of anything, its tensors in host memory."""
        if memo is not None and id(x) in memo:
            return memo[id(x)]
        copied = self.stage(x, non_blocking)
        if memo is not None:
            memo[id(x)] = copied
        return copied

    def close(self) -> None:
        """Give back the memory that no snapshot is in."""
        self._memory.release()

    def __reduce__(self) -> Any:
        # Memory stays where it is: a copy in another process begins with none.
        return _unpickled, (self.pin_memory, self.share_memory, self.pin_memory_min_bytes)


def _unpickled(pin_memory: bool, share_memory: bool, pin_memory_min_bytes: int) -> StateDictStager:
    return StateDictStager(pin_memory and torch.accelerator.is_available(), share_memory, pin_memory_min_bytes)


class DefaultStager(AsyncStager):
    """
    Copies a state into host memory, on a thread and a stream of its own if so asked.

    Copies from an accelerator come after all work that was queued on the caller's current streams. With
    `use_async_staging` the state must not change before the future is done.
    """

    def __init__(self, config: StagingOptions = StagingOptions()) -> None:  # noqa: B008 - torch's default, never changed
        self._config = config
        self._state_dict_stager = StateDictStager(
            pin_memory=config.use_pinned_memory and torch.accelerator.is_available(),
            share_memory=config.use_shared_memory,
        )
        self._staging_executor = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardkeep-stage")
            if config.use_async_staging
            else None
        )
        self._streams: dict[torch.device, torch.Stream] = {}
        self._staging_future: Future[StateDict] | None = None
        self._closed = False

    def stage(self, state_dict: StateDict, **kwargs: Any) -> StateDict | Future[StateDict]:
        """
        Return a copy of the state, or a future of one with `use_async_staging`.

        Raises:
            StagerClosed: after `close`.
            Uncopyable: a value that cannot be copied.

        """
        del kwargs
        if self._closed:
            raise StagerClosed("this stager has been closed", hint="make a new one, and close it after the last save")
        if self._staging_future is not None and self._staging_future.done():
            self._staging_future = None  # it holds the last snapshot, whose memory may be free
        snapshot = self._state_dict_stager.prepare(state_dict)
        if self._staging_executor is None:
            snapshot.fill(non_blocking=self._config.use_non_blocking_copy)
            snapshot.wait()
            staged: StateDict = snapshot.tree
            return staged
        # Recorded here, on the streams that the state was made on; the copies wait for it on theirs.
        made = {device: torch.accelerator.current_stream(device).record_event() for device in snapshot.devices}
        for device in made.keys() - self._streams.keys():
            self._streams[device] = torch.Stream(device)
        here = torch.accelerator.current_device_index() if made else None
        self._staging_future = self._staging_executor.submit(self._fill, snapshot, made, here)
        return self._staging_future

    def _fill(self, snapshot: Snapshot, made: dict[torch.device, torch.Event], here: int | None) -> StateDict:
        """Fill a snapshot on the staging thread; the sources live until their values are there."""
        if here is not None:
            # A new thread is on device 0, and would start a context there.
            torch.accelerator.set_device_index(here)
        for device, event in made.items():
            stream = self._streams[device]
            stream.wait_event(event)
            with stream:
                snapshot.fill(non_blocking=self._config.use_non_blocking_copy, device=device)
        snapshot.fill(device=torch.device("cpu"))
        for device in made:
            self._streams[device].synchronize()
        staged: StateDict = snapshot.tree
        return staged

    def synchronize_staging(self) -> None:
        """Wait until the last state that was staged may be changed; raises what staging raised."""
        if self._staging_future is not None:
            self._staging_future.result()

    def close(self) -> None:
        """Wait for what is being staged, then let go of the thread and the memory."""
        self._closed = True
        if self._staging_executor is not None:
            self._staging_executor.shutdown(wait=True)
        self._staging_future = None
        self._streams.clear()
        self._state_dict_stager.close()
