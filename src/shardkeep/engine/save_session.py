"""
A save on one rank, step by step; the same steps whether the caller waits for it or not.

    describe    what this rank holds, as columns; ranks communicate only if objects in the state differ or communicate
    plan        every rank sends its manifest to rank 0, and gets its write plan
    write       every rank writes its files
    commit      every rank hands its files over, and rank 0 publishes them

A failure in any step, on any rank, is raised on all of them. What was written is removed, and a checkpoint that was there
before stays as it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import World
from shardkeep.engine.codecs import Codecs, FileCodecs
from shardkeep.engine.report import SAVE_WORK, Phases, SaveReport, SentPhases, find_slowest, unlogged
from shardkeep.engine.writer import FileJob
from shardkeep.format.record import FileEntry
from shardkeep.options import Options, decodable
from shardkeep.plan.save_plan import RankManifest, encode
from shardkeep.state.describe import Description
from shardkeep.storage.base import Store, keep_cached
from shardkeep.storage.cancel import run_with_deadline

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer


@dataclass(frozen=True)
class SaveArguments:
    """What a caller asks for: the arguments of `sk.save`."""

    where: str | os.PathLike[str] | Store
    step: int | None = None
    meta: Mapping[str, Any] | None = None
    overwrite: bool = False
    allow_pickle: bool = False
    check_replicas: bool = False
    codecs: Codecs = None
    group: ProcessGroup | World | None = None
    options: Options = field(default_factory=Options)
    check: Callable[[], object] | None = None
    """Called on this rank before the state is described; what it raises fails the save on all ranks."""


Labels = tuple[int | None, dict[str, Any]]
"""The step and the user's own values, as they go into the commit record."""


@dataclass(frozen=True)
class DescribedState:
    """What this rank holds."""

    description: Description
    manifest: RankManifest
    """The same as columns, which rank 0 plans from."""
    samples: Callable[[], bytes] = bytes
    """Waits until accelerators have read the manifest's samples, and returns them."""
    labels: Labels = (None, {})
    optimizers: Sequence[Optimizer] = ()
    """The optimizers that are in the state as objects."""
    items: Sequence[Any] = ()
    """Values that are written as items of their own, in layouts that have such."""
    order: Sequence[int] = ()
    """The rows in the order in which they will probably be written, if that is known."""

    def sent(self) -> bytes:
        return encode(msgspec.structs.replace(self.manifest, samples=self.samples()))


@decodable
class WrittenFiles(msgspec.Struct, frozen=True):
    """What a rank has written, as it is sent to rank 0."""

    files: list[FileEntry]
    items: bytes = b""
    """Where each item lies in the files, in layouts whose plan does not say so."""


class CommittedSave(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 sends to all ranks about a committed checkpoint."""

    save_id: str
    step: int | None = None
    bytes_total: int
    tensors: int
    metadata: bytes = b""
    """Of torch's layout; other ranks get it only if it is small, and read it otherwise."""


@dataclass(frozen=True)
class RankFiles:
    """The files that a rank writes."""

    jobs: list[FileJob]
    written: Callable[[], WrittenFiles]
    """Completes the files, when their bytes are written."""
    codecs: FileCodecs | None = None


class SaveLayout(Protocol):
    """
    How a save is described, planned and committed in one layout. `plan`, `collect`, `commit` and `tidy` are rank 0's part, in
    this order; `withdraw` follows a failure.
    """

    def claimed(self) -> contextlib.AbstractContextManager[None]:
        """Count the save as running."""

    def describer(self, ranks: Rendezvous, phases: Phases, state: Any) -> Callable[[], DescribedState]:
        """Prepare what ranks do together, and return a function that describes this rank's state."""

    def plan(self, payloads: list[bytes]) -> Any:
        """Check the place, and plan the files of all ranks; `answers` of the plan has what is sent to each rank."""

    def files(self, described: DescribedState, answer: bytes) -> RankFiles:
        """Return the files that this rank writes, given rank 0's plan for it."""

    def collect(self, planned: Any, written: list[WrittenFiles]) -> list[WrittenFiles]:
        """Check that the files of all ranks are there."""

    def commit(self, planned: Any, written: list[WrittenFiles], labels: Labels) -> CommittedSave:
        """Publish the checkpoint."""

    def withdraw(self) -> None:
        """Remove every file of a save that failed. Never raises."""

    def discard(self, names: Sequence[str]) -> None:
        """Remove files of this rank. Never raises."""

    def tidy(self) -> None:
        """After the commit, remove what it replaced."""


_MOST_SENT_NBYTES = 1 << 20
"""Metadata that all ranks together get with the commit."""


class SaveSession:
    """One save of one rank. Used by one thread at a time; the steps are called inside `running`, in their order."""

    def __init__(
        self,
        layout: SaveLayout,
        store: Store,
        world: World,
        options: Options,
        *,
        phases: Phases,
        meet: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
        logged: Callable[[Callable[..., Any], str], Callable[..., Any]] = unlogged,
    ) -> None:
        """`meet` begins a call of all ranks, and `logged` wraps the steps, by torch's names."""
        self.layout = layout
        self.store = store
        self.world = world
        self.options = options
        self.phases = phases
        self._meet = meet or (lambda: rendezvous(world, f"save to {store.url}"))
        self._logged = logged
        self._written: list[FileEntry] = []
        self._written_s = 0.0
        self._handed_over = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Rendezvous]:
        """Make the call together with the other ranks; gives what they meet through."""
        with self.layout.claimed(), self._meet() as ranks:
            try:
                yield ranks
            except BaseException:
                # With a deadline. The claim is deleted last, so that the next save finds and finishes an interrupted clean-up.
                run_with_deadline(self._clean_up, f"clean up {self.store.url}")
                raise
        if self.world.rank == 0:
            self.layout.tidy()

    def _clean_up(self) -> None:
        if not self._handed_over:
            self.layout.discard(list(self._at_rest()))
        if self.world.rank == 0:
            self.layout.withdraw()

    def plan(self, ranks: Rendezvous, manifest: Callable[[], bytes]) -> tuple[bytes, list[Any]]:
        """Send what this rank holds; return what it has to write, and on rank 0 the plan for all ranks."""
        began_s, on_rank_0 = 0.0, list[Any]()

        def describing() -> bytes:
            nonlocal began_s
            made = manifest()
            began_s = self.phases.now()
            return made

        def decide(sent: list[bytes]) -> list[bytes]:
            on_rank_0.append(self._logged(self.layout.plan, "global_step")(sent))
            answers: list[bytes] = on_rank_0[0].answers
            return answers

        answer = ranks.agree("plan", self._logged(describing, "local_step"), decide)
        self.phases.add("plan", began_s, self.phases.mark_meeting())
        return answer, on_rank_0

    def write(self, ranks: Rendezvous, on_rank_0: list[Any], work: Callable[[], WrittenFiles]) -> list[WrittenFiles]:
        """Write this rank's files, and wait for the other ranks; return, on rank 0, the files of all of them."""
        began_s, files = self.phases.now(), list[WrittenFiles]()
        ended_s = began_s

        def writing() -> bytes:
            nonlocal ended_s
            try:
                written: WrittenFiles = self._logged(work, "write_data")()
                self._written.extend(written.files)
            finally:
                ended_s = self.phases.now()
                self.phases.add("write", began_s, ended_s, sum(entry.nbytes for entry in self._written))
            return encode((written, self.phases.sent()))

        def collect(payloads: list[bytes]) -> list[bytes]:
            said = [msgspec.msgpack.decode(payload, type=tuple[WrittenFiles, SentPhases]) for payload in payloads]
            self.phases.collect([spans for _, spans in said])
            files.extend(self.layout.collect(on_rank_0[0], [written for written, _ in said]))
            return [b""] * len(payloads)

        ranks.agree("write", writing, collect)
        self._written_s = self.phases.now()
        self.phases.add("wait", ended_s, self._written_s)
        return files

    def commit(
        self, ranks: Rendezvous, on_rank_0: list[Any], files: list[WrittenFiles], labels: Labels
    ) -> CommittedSave:
        def decide(payloads: list[bytes]) -> list[bytes]:
            committed = self._logged(self.layout.commit, "finish_checkpoint")(on_rank_0[0], files, labels)
            sent, count = committed, len(payloads)
            if count * len(committed.metadata) > _MOST_SENT_NBYTES:
                sent = msgspec.structs.replace(committed, metadata=b"")
            return [encode(committed), *[encode(sent)] * (count - 1)]

        # From here on this rank's files may be part of a committed checkpoint, and only rank 0 knows.
        self._handed_over = True
        with self.phases.phase("commit"):
            return msgspec.msgpack.decode(ranks.agree("commit", bytes, decide), type=CommittedSave)

    def _at_rest(self) -> dict[str, int]:
        """Return the sizes of this rank's files in the store, by name."""
        return dict(each for entry in self._written for each in entry.at_rest)

    def finish(self, committed: CommittedSave, *, seconds: float, blocked_s: float, staged_s: float) -> SaveReport:
        """
        Start to read this rank's files into the page cache, and report the save.

        `running` must end before, because the disk would read these files while the deletion of the claim is synced to it.
        """
        at_rest = self._at_rest()
        stored_nbytes = sum(at_rest.values())
        cached = self.options.keep_cached and keep_cached(self.store, list(at_rest), stored_nbytes)
        ranks = self.phases.all_ranks()
        return SaveReport(
            where=self.store.url,
            save_id=committed.save_id,
            step=committed.step,
            bytes_written=sum(entry.nbytes for entry in self._written),
            bytes_stored=stored_nbytes,
            bytes_cached=stored_nbytes if cached else 0,
            bytes_total=committed.bytes_total,
            tensors=committed.tensors,
            seconds=seconds,
            blocked_s=blocked_s,
            staged_s=staged_s,
            written_s=self._written_s,
            phases=self.phases.spans,
            ranks=ranks,
            slowest=find_slowest(ranks, SAVE_WORK),
        )
