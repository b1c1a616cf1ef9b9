"""
A save on one rank, step by step: describe, plan, write, commit; the same steps whether the caller waits for it or not.

A failure in any step, on any rank, is raised on all of them. What was written is removed, and a checkpoint that was
there before stays as it was.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
import xxhash

from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import World, agree_and_return
from shardkeep.engine.codecs import Codecs, FileCodecs
from shardkeep.engine.report import SAVE_WORK, CommonMoment, Phases, SaveReport, SentPhases, find_slowest, unlogged
from shardkeep.engine.writer import FileJob
from shardkeep.events import RankPhases
from shardkeep.format.record import FileEntry
from shardkeep.options import Options, collector_paused, decodable, per_process
from shardkeep.plan.save_plan import RankManifest, SampledReplicas, common_part, encode
from shardkeep.state.describe import Description, KeptDescriptions
from shardkeep.state.optimizers import KeptNames
from shardkeep.storage.base import Store, keep_cached
from shardkeep.storage.cancel import run_with_deadline

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer


@dataclass(frozen=True)
class SaveArguments:
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
    description: Description
    manifest: RankManifest
    samples: Callable[[], bytes] = bytes
    """Waits until accelerators have read the manifest's samples, and returns them."""
    labels: Labels = (None, {})
    optimizers: Sequence[Optimizer] = ()
    items: Sequence[Any] = ()
    """Values that are written as items of their own, in layouts that have such."""


@decodable
class WrittenFiles(msgspec.Struct, frozen=True, gc=False):
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
    jobs: list[FileJob]
    written: Callable[[], WrittenFiles]
    codecs: FileCodecs | None = None


class SaveLayout(Protocol):
    """
    How a save is described, planned and committed in one layout. `plan`, `check_written`, `commit` and `tidy` are rank
    0's part, in this order; `withdraw` follows a failure. A layout that derives from this need not have the steps that
    have a body here.
    """

    def claimed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def describer(self, ranks: Rendezvous, phases: Phases, state: Any) -> Callable[[], DescribedState]:
        """Prepare what ranks do together, and return a function that describes this rank's state."""

    @property
    def save_id(self) -> str:
        """Names this save; all ranks use that of rank 0."""

    def plan(self, manifests: list[RankManifest]) -> tuple[KeptPlan, list[bytes]]:
        """Check the place, and plan the files of all ranks. Return the plan, and what is sent of it to each rank."""

    def plan_again(self, kept: Any, values: list[bytes]) -> Any | None:
        """Check the place, and return the kept plan for new values of all ranks; None if it does not fit them."""

    def order(self, answer: bytes) -> list[int]:  # noqa: ARG002 - for layouts
        """Return the rows of the manifest in the order in which they are written, if rank 0's plan says that."""
        return []

    def files(self, described: DescribedState, answer: bytes, save_id: str) -> RankFiles:
        """Return the files that this rank writes, given rank 0's plan for it."""

    def check_written(self, written: list[WrittenFiles]) -> None:  # noqa: ARG002 - for layouts
        return

    def commit(self, planned: Any, written: list[WrittenFiles], labels: Labels) -> CommittedSave:
        """Publish the checkpoint."""

    def withdraw(self) -> None:
        """Remove every file of a save that failed. Never raises."""
        return

    def discard(self, names: Sequence[str]) -> None:
        """Remove files of this rank. Never raises."""

    def tidy(self) -> None:
        """After the commit, remove what it replaced."""
        return


T = TypeVar("T")

_MOST_SENT_NBYTES = 1 << 20
"""Metadata that all ranks together get with the commit."""


@decodable
class PlanRequest(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a rank sends to be planned: its manifest in parts, of which rank 0 may have some."""

    digest: bytes
    values: bytes
    samples: bytes
    plan_id: bytes = b""
    """The plan that this rank has kept for what it holds; then it sends none of the following at first."""
    common: bytes = b""
    """What ranks may have in common (`common_part`). If it is long, only one of them sends it, when rank 0 asks for it."""
    own: bytes | None = None
    """The offsets of its boxes."""

    def manifest(self, common: Mapping[bytes, RankManifest]) -> RankManifest:
        """Return the manifest, of a request that has boxes, given the common parts by digest."""
        found = common[self.digest]
        return msgspec.structs.replace(found, row_offsets=self.own or b"", values=self.values, samples=self.samples)


@decodable
class PlanAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    save_id: str = ""
    plan_id: bytes = b""
    body: bytes | None = None
    """The layout's answer, compressed; None if the kept one counts."""
    incomplete: bool = False
    """Rank 0 needs the boxes of all ranks, and the common parts of these."""
    common_of: list[int] = []


_SHORT_NBYTES = 2048
"""A common part of this length is sent by each rank, because asking for it would take longer."""


class KeptPlan(Protocol):
    """A layout's plan that may serve later saves."""

    @property
    def nbytes(self) -> int: ...

    @property
    def sampled(self) -> SampledReplicas | None:
        """The replicas that must be the same in these saves; None: there can be none."""


class RankPlan(NamedTuple):
    """After `plan`: what this rank writes, and the plan of all ranks on rank 0."""

    answer: bytes
    save_id: str
    on_rank_0: list[Any]
    met: CommonMoment


class WrittenSave(NamedTuple):
    """After `write`: the files of this rank; on rank 0, those of all ranks and their phases; when all files were written."""

    own: list[FileEntry]
    on_rank_0: list[WrittenFiles]
    ranks: list[RankPhases]
    ended_s: float


class _Asked(NamedTuple):
    """What this rank asks rank 0, and what it has kept of an earlier answer."""

    request: PlanRequest
    key: bytes
    kept_answer: bytes
    began_s: float


class KeptPlans:
    """
    What is kept of the last saves: a state with the same tensors as before is neither described nor planned again.

    Each rank keeps rank 0's answer by the digest of what it answers, and rank 0 keeps the plan, both with its name. If
    all ranks ask for the same plan by name, the manifests of none have changed.
    """

    _MOST_ANSWERS = 8
    _MOST_PLANS = 3
    _MOST_PLANS_NBYTES = 256 << 20
    """Of rank 0's memory: a chunk takes 12 bytes in the native layout, and about 100 in torch's."""

    def __init__(self) -> None:
        self.descriptions = KeptDescriptions()
        self.names: KeptNames = KeptNames()
        self.answers: dict[bytes, tuple[bytes, bytes]] = {}
        """The name of a plan and rank 0's answer, by the digest of the manifest."""
        self.plans: dict[bytes, KeptPlan] = {}

    def keep_answer(self, key: bytes, plan_id: bytes, answer: bytes) -> None:
        _keep(self.answers, key, (plan_id, answer), self._MOST_ANSWERS)

    def keep_plan(self, plan: KeptPlan) -> bytes:
        """Keep a plan in the place of the oldest ones, and return its name; none if it is too large."""
        if plan.nbytes > self._MOST_PLANS_NBYTES:
            return b""
        _keep(self.plans, plan_id := secrets.token_bytes(12), plan, self._MOST_PLANS)
        while sum(each.nbytes for each in self.plans.values()) > self._MOST_PLANS_NBYTES:
            self.plans.pop(next(iter(self.plans)))
        return plan_id

    def clear(self) -> None:
        self.descriptions.clear()
        self.names.clear()
        self.answers.clear()
        self.plans.clear()


def _keep(kept: dict[bytes, T], key: bytes, value: T, most: int) -> None:
    kept.pop(key, None)
    for oldest in list(kept)[: len(kept) + 1 - most]:
        kept.pop(oldest, None)  # another thread may have
    kept[key] = value


kept_plans = per_process(KeptPlans)


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

    @contextlib.contextmanager
    def running(self) -> Iterator[Rendezvous]:
        """Make the call together with the other ranks; gives what they meet through."""
        with self.layout.claimed(), self._meet() as ranks:
            try:
                yield ranks
            except BaseException:
                if self.world.rank == 0:
                    # The claim is deleted last, so that the next save finds and finishes an interrupted clean-up.
                    run_with_deadline(self.layout.withdraw, f"clean up {self.store.url}")
                raise
        if self.world.rank == 0:
            self.layout.tidy()

    def order(self, described: DescribedState) -> list[int]:
        """Return the rows of a state in the order in which they will probably be written: that of the last save."""
        manifest = described.manifest
        plan_id, answer = kept_plans().answers.get(self._key(manifest, common_part(manifest)), (b"", b""))
        derived = described.description.derived
        known, order = derived.get("order", (b"", []))
        if known is not answer:
            order = self.layout.order(answer) if plan_id else []
            derived["order"] = answer, order
        return order  # type: ignore[no-any-return]

    def _key(self, manifest: RankManifest, common: bytes) -> bytes:
        """Return the key under which this rank keeps its part of a plan: a digest of all that the plan follows from."""
        who = f"{type(self.layout).__name__} {self.world.rank} of {self.world.size} ".encode()
        digest = xxhash.xxh3_128(common)
        digest.update(manifest.row_offsets)
        return who + digest.digest()

    def plan(self, ranks: Rendezvous, describe: Callable[[], DescribedState]) -> RankPlan:
        """Send what this rank holds, and return what it has to write."""
        on_rank_0, earlier = list[Any](), list[PlanRequest]()

        def describing() -> tuple[_Asked, bytes]:
            described = describe()
            manifest, common = described.manifest, common_part(described.manifest)
            key = self._key(manifest, common)
            plan_id, kept_answer = kept_plans().answers.get(key, (b"", b""))
            digest = xxhash.xxh3_128_digest(common)
            full = PlanRequest(digest, manifest.values, described.samples(), plan_id, common, manifest.row_offsets)
            sent, asked = full, _Asked(full, key, kept_answer, self.phases.now())
            if plan_id:
                sent = msgspec.structs.replace(full, common=b"", own=None)
            elif self.world.rank and len(common) > _SHORT_NBYTES:
                sent = msgspec.structs.replace(full, common=b"")
            return asked, encode(sent)

        def decide(sent: list[bytes]) -> list[bytes]:
            with collector_paused():
                requests = [msgspec.msgpack.decode(each, type=PlanRequest) for each in sent]
            if not earlier and (planned := self._plan_again(requests)) is not None:
                on_rank_0.append(planned)
                return [encode(PlanAnswer(self.layout.save_id))] * len(sent)
            common = {each.digest: each.common for each in (*earlier, *requests) if each.common}
            digests = [each.digest for each in requests]
            absent = sorted(digests.index(each) for each in set(digests) - common.keys())
            if absent or any(each.own is None for each in requests):
                earlier.extend(requests)
                return [encode(PlanAnswer(incomplete=True, common_of=absent))] * len(sent)
            decoded = {digest: msgspec.msgpack.decode(each, type=RankManifest) for digest, each in common.items()}
            planned, bodies = self.layout.plan([each.manifest(decoded) for each in requests])
            on_rank_0.append(planned)
            plan_id = kept_plans().keep_plan(planned) if planned.sampled else b""
            answers = {
                body: encode(PlanAnswer(self.layout.save_id, plan_id, zlib.compress(body, 1)))
                for body in dict.fromkeys(bodies)
            }
            return [answers[body] for body in bodies]

        work, decide = self._logged(describing, "local_step"), self._logged(decide, "global_step")
        asked: _Asked
        asked, sent = agree_and_return(ranks.agree, "plan", work, decide)
        answer = msgspec.msgpack.decode(sent, type=PlanAnswer)
        if answer.incomplete:
            is_asked = self.world.rank in answer.common_of
            rest = asked.request if is_asked else msgspec.structs.replace(asked.request, common=b"")
            answer = msgspec.msgpack.decode(ranks.agree("plan anew", lambda: encode(rest), decide), type=PlanAnswer)
        met = self.phases.met()
        self.phases.add("plan", asked.began_s, met.at_s)
        if answer.body is None:
            return RankPlan(asked.kept_answer, answer.save_id, on_rank_0, met)
        body = zlib.decompress(answer.body)
        if answer.plan_id:
            kept_plans().keep_answer(asked.key, answer.plan_id, body)
        return RankPlan(body, answer.save_id, on_rank_0, met)

    def _plan_again(self, requests: list[PlanRequest]) -> Any | None:
        """Return the kept plan for what has changed; None if not all ranks ask for one that rank 0 has, or if it does not fit."""
        names = {each.plan_id for each in requests}
        kept = kept_plans().plans.get(names.pop()) if len(names) == 1 else None
        if kept is None or kept.sampled is None or kept.sampled.differ([each.samples for each in requests]):
            return None
        return self.layout.plan_again(kept, [each.values for each in requests])

    def write(self, ranks: Rendezvous, plan: RankPlan, work: Callable[[], WrittenFiles]) -> WrittenSave:
        """Write this rank's files, and wait for the other ranks; if any of them fails, remove these files."""
        began_s, own, on_rank_0 = self.phases.now(), list[FileEntry](), list[WrittenFiles]()
        did: list[RankPhases] = []

        def writing() -> tuple[float, bytes]:
            try:
                written: WrittenFiles = self._logged(work, "write_data")()
                own.extend(written.files)
            finally:
                self.phases.add("write", began_s, ended_s := self.phases.now(), sum(entry.nbytes for entry in own))
            return ended_s, encode((written, plan.met.sent()))

        def collect(payloads: list[bytes]) -> list[bytes]:
            with collector_paused():
                said = [msgspec.msgpack.decode(payload, type=tuple[WrittenFiles, SentPhases]) for payload in payloads]
                did.extend(plan.met.of_ranks([spans for _, spans in said]))
                on_rank_0.extend(written for written, _ in said)
            self.layout.check_written(on_rank_0)
            return [b""] * len(payloads)

        try:
            ended_s, _ = agree_and_return(ranks.agree, "write", writing, collect)
        except BaseException:
            run_with_deadline(lambda: self.layout.discard(list(_at_rest(own))), f"clean up {self.store.url}")
            raise
        self.phases.add("wait", ended_s, all_written_s := self.phases.now())
        return WrittenSave(own, on_rank_0, did, all_written_s)

    def commit(self, ranks: Rendezvous, plan: RankPlan, written: WrittenSave, labels: Labels) -> CommittedSave:
        """Publish the files of all ranks. From here on only rank 0 knows whether they are part of a checkpoint."""

        def decide(payloads: list[bytes]) -> list[bytes]:
            commit = self._logged(self.layout.commit, "finish_checkpoint")
            sent = commit(plan.on_rank_0[0], written.on_rank_0, labels)
            own.append(sent)
            if len(payloads) * len(sent.metadata) > _MOST_SENT_NBYTES:
                sent = msgspec.structs.replace(sent, metadata=b"")
            return [encode(sent)] * len(payloads)

        own: list[CommittedSave] = []
        with self.phases.phase("commit"):
            answer = ranks.agree("commit", bytes, decide)
            return own[0] if own else msgspec.msgpack.decode(answer, type=CommittedSave)

    def finish(
        self,
        committed: CommittedSave,
        written: WrittenSave,
        *,
        seconds: float,
        blocked_s: float,
        staged_s: float,
        staging: str = "",
        lost_s: float | None = None,
    ) -> SaveReport:
        """Report the save, and start to read this rank's files into the page cache."""
        # After `running`: the disk would read these files while the deletion of the claim is synced to it.
        at_rest = _at_rest(written.own)
        stored_nbytes = sum(at_rest.values())
        cached = self.options.keep_cached and keep_cached(self.store, list(at_rest), stored_nbytes)
        ranks = self.phases.all_ranks(written.ranks)
        return SaveReport(
            where=self.store.url,
            save_id=committed.save_id,
            step=committed.step,
            bytes_written=sum(entry.nbytes for entry in written.own),
            bytes_stored=stored_nbytes,
            bytes_cached=stored_nbytes if cached else 0,
            bytes_total=committed.bytes_total,
            tensors=committed.tensors,
            seconds=seconds,
            blocked_s=blocked_s,
            staged_s=staged_s,
            staging=staging,
            lost_s=lost_s,
            written_s=written.ended_s,
            phases=self.phases.spans,
            ranks=ranks,
            slowest=find_slowest(ranks, SAVE_WORK),
        )


def _at_rest(files: Sequence[FileEntry]) -> dict[str, int]:
    return dict(each for entry in files for each in entry.at_rest)
