"""A stager that is part of a storage writer: it returns when the copy is there."""

from __future__ import annotations

from typing import Any

import torch

from shardkeep.stage.stagers import AsyncStager, StateDict, StateDictStager
from shardkeep.state.toolkit.iterate import check_types


class BlockingAsyncStager(AsyncStager):
    """
    Copies a state into host memory and returns when it is done; `synchronize_staging` has nothing to wait for.

    A base of `FileSystemWriter`. The copy is of the values at the time of the call, for tensors on the CPU too.
    """

    _synchronize_after_execute: bool = False
    _share_memory: bool = False
    """Whether another process is to read the copy; set by whoever begins the save."""

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        """
        Choose how states are staged.

        Args:
            cache_staged_state_dict: keep the memory, pinned where there is an accelerator, for the next save. The
                copy of an earlier save is overwritten only if nobody holds it any more.
            type_check: refuse values other than tensors, numbers, strings, bytes and None.

        """
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self.state_dict_cache: StateDict | None = None
        self._stager: StateDictStager | None = None

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a copy of the state in host memory."""
        if self.type_check:
            check_types(state_dict)
        if not self.cache_staged_state_dict:
            staged: StateDict = StateDictStager(share_memory=self._share_memory).stage(state_dict)
            return staged
        self.state_dict_cache = None  # else its memory would look used
        if self._stager is None or self._stager.share_memory != self._share_memory:
            self._stager = StateDictStager(torch.accelerator.is_available(), self._share_memory)
        self.state_dict_cache = self._stager.stage(state_dict)
        return self.state_dict_cache

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has waited."""

    def close(self) -> None:
        """Give back the memory kept for the next save."""
        self.state_dict_cache = None
        if self._stager is not None:
            self._stager.close()

    def __getstate__(self) -> dict[str, Any]:
        # A writer that goes to another process does not take the last save along.
        return {**self.__dict__, "state_dict_cache": None}
