"""A stager that exchanges states between pairs of ranks, so that a lost rank's state is still held by another."""

from __future__ import annotations

import contextlib
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardkeep.compat.transport import PGTransport
from shardkeep.errors import RanksDisagree, StorageError
from shardkeep.stage.stagers import AsyncStager, StateDictStager

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _ReplicationStager(AsyncStager):
    """
    Sends this rank's state to its partner, half the group away, and returns the partner's, which is kept in a file.

    A rank alone gets a copy of its own state.

    Args:
        pg: the ranks; an even number of them, or one.
        timeout: how long a message between partners may take.
        device: where the group's backend sends from and receives to.
        storage_dir: where the partner's state is kept; a new temporary folder by default.

    """

    _synchronize_after_execute: bool = False

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta = timedelta(minutes=30),
        device: torch.device = torch.device("cpu"),  # noqa: B008 - torch's default; a device never changes
        storage_dir: str | None = None,
    ) -> None:
        self._pg = pg
        self._timeout = timeout
        self._device = device
        self._transport = PGTransport(pg, timeout, device, None)
        self._storage_dir = tempfile.mkdtemp(prefix="replication_stager_") if storage_dir is None else storage_dir
        os.makedirs(self._storage_dir, exist_ok=True)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """
        Exchange states with the partner, and return the one that came.

        Raises:
            RanksDisagree: the group has an odd number of ranks, so that not all have a partner.
            RanksSilent: the partner did not answer in time.
            StorageError: the state that came could not be stored.

        """
        size, me = self._pg.size(), self._pg.rank()
        if size == 1:
            staged: dict[str, Any] = StateDictStager().stage(state_dict)
            return staged
        if size % 2:
            raise RanksDisagree(f"{size} ranks cannot be paired", hint="use a group with an even number of ranks")
        partner = (me + size // 2) % size
        received: Any
        # One of the two speaks first, or both would wait for the other to listen.
        if me < partner:
            self._transport.send_checkpoint([partner], state_dict)
            received = self._transport.recv_checkpoint(partner)
        else:
            received = self._transport.recv_checkpoint(partner)
            self._transport.send_checkpoint([partner], state_dict)
        self._persist_state_dict(received, me, partner)
        replica: dict[str, Any] = received
        return replica

    def _persist_state_dict(self, state_dict: dict[str, Any], current_rank: int, partner_rank: int) -> None:
        """Store the partner's state in place of its last one: all of it, or nothing."""
        final = Path(self._get_persisted_path(current_rank, partner_rank))
        temporary = final.with_name(f"{final.name}.{os.getpid()}.tmp")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(final)
            _sync_folder(final.parent)
        except Exception as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise _NotKept(f"rank {current_rank} could not store the state of rank {partner_rank}: {error}") from error

    def _get_persisted_path(self, current_rank: int, partner_rank: int) -> str:
        """Return the file that the partner's state is kept in."""
        return os.path.join(self._storage_dir, f"rank_{current_rank}_replica_partner_{partner_rank}.pt")

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has waited."""

    def close(self) -> None:
        """Leave the files where they are, to be found later."""


class _NotKept(StorageError, RuntimeError):
    """The partner's state could not be stored."""


def _sync_folder(folder: Path) -> None:
    """Make a new name durable."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
