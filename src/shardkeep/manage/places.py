"""Stores of the checkpoints of a Checkpointer, which try again what fails in passing, and tell of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardkeep.errors import StorageError
from shardkeep.events import Retried, tell
from shardkeep.manage.jobs import Job
from shardkeep.manage.lease import Lease
from shardkeep.manage.restoring import Candidate
from shardkeep.manage.tiers import NEAR
from shardkeep.store.protocol import Store
from shardkeep.store.retrying import Patience, RetryingStore
from shardkeep.store.roots import Root


class Places:
    """Where checkpoints are written to and read from."""

    def __init__(
        self, roots: Sequence[Root], retries: int, sleep: Callable[[float], object], lease: Lease, job: Job
    ) -> None:
        """
        Open nothing yet.

        Args:
            roots: the near one, and perhaps a far one.
            retries: how often an operation is tried again.
            sleep: waits for so many seconds.
            lease: of the near root, which rank 0 insists on before each commit.
            job: the ranks.

        """
        self._roots = roots
        self._retries = retries
        self._sleep = sleep
        self._lease = lease
        self._job = job

    def to_read(self, candidate: Candidate) -> Store:
        """Return where a checkpoint is read from."""
        place = self._roots[candidate.tier].place(candidate.name)
        # Files of torch's layout may be called, and be links to, anything: their reader knows the plain store.
        return place if candidate.torch else RetryingStore(place, self._patience(place, candidate.step))

    def to_write(self, name: str, step: int) -> Store:
        """Return where the checkpoint of a step is saved."""
        place = self._roots[NEAR].place(name)
        before_put: Callable[[], None] | None = self._lease.insist if self._job.world.rank == 0 else None
        return RetryingStore(place, self._patience(place, step), before_put=before_put)

    def _patience(self, place: Store, step: int) -> Patience:
        rank = self._job.world.rank

        def told(attempt: int, error: StorageError, wait_s: float) -> None:
            kind, message = type(error).__name__, str(error)
            tell(
                Retried,
                lambda: Retried(
                    rank=rank, where=place.url, step=step, attempt=attempt, kind=kind, message=message, wait_s=wait_s
                ),
            )

        return Patience(self._retries, told=told, sleep=self._sleep)
