"""Goes from round to round: runs jobs on real ranks, kills what is to be killed, and has the root checked."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tests.object_store.proxy import Proxy
from tests.soak.checker import Damage
from tests.soak.job import Plan, run_job
from tests.soak.ledger import Ledger, Made
from tests.soak.rounds import Round, StoreKind, bucket_round_of, round_of
from tests.soak.scene import Scene
from tests.support.forking import preload
from tests.support.rank_pool import Outcome, RankPool
from tests.support.s3_server import S3Server

# Ranks are killed all the time, and new ones should not have to import all this.
preload("shardkeep.manage.checkpointer", "tests.soak.job", "boto3")

JOB_S, BUCKET_JOB_S = 90.0, 240.0
"""After which a job hangs."""

Running = Future[list[Outcome[str]]]


class Soak:
    """A root, and all that is done to it. A context manager."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        store: StoreKind = "local",
        server: S3Server | None = None,
        short: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """Fill a folder with the root and with logs, as the seed decides; `short` starts processes as rarely as can be."""
        self.scene = Scene.of(store, folder, server)
        self._folder = folder
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True)
        self._seed = seed
        self._short = short
        self._say = say
        self.ledger = Ledger(self._logs)
        self.checker = self.scene.checker(self.ledger)
        self.faults: Counter[str] = Counter()
        """Of the network."""
        self.counts: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self._jobs = 0
        self._newest: Made | None = None
        self._died = 0
        self._young = False
        """Whether a job has kept more than others do, because it was young."""
        self._pools = [RankPool(4), RankPool(2)]
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="soak")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.close()
        self._threads.shutdown()

    def round(self, number: int) -> None:
        """Make a round; raise `Damage`, which says how to do it again, if something was lost, is wrong or stays for ever."""
        decide = round_of if self.scene.server is None else bucket_round_of
        this = decide(self._seed, number, short=self._short)
        began = time.monotonic()
        try:
            with self.scene.network(self._seed, this) as proxy:
                ended = self._two_jobs(this, proxy) if this.chaos == "rivals" else self._one_job(this, proxy)
                self.faults.update(proxy.counts.faults if proxy else ())
            self._check(this)
        except Exception as error:
            short = " --short" if self._short else ""
            self.checker.note(self._folder / "there.json")
            raise Damage(
                f"round {number} ({this}): {error}"
                f"\n  again: python -m tests.soak --store {self.scene.store} --seed {self._seed} --only {number}{short}"
                f"\n  the root, all logs, and lists of what was there: {self._folder}"
            ) from error
        self.counts["rounds"] += 1
        took = time.monotonic() - began
        self._say(f"round {number:4d}  {this.chaos:<24}{this.world} ranks  {' '.join(ended):<40} {took:5.1f} s")

    def summary(self) -> str:
        """Say in a few lines what was done."""
        ledger, checker = self.ledger, self.checker
        lines = {
            "rounds": self.counts["rounds"],
            "jobs": self.counts["jobs"],
            "steps begun": len(ledger.begun),
            "saves acknowledged": len(ledger.acked),
            "kills": f"{sum(self.kills.values())}  {dict(self.kills)}",
            "disk errors injected": f"{sum(ledger.faults.values())}",
            "network faults": f"{self.faults.total()}  {dict(self.faults.most_common())}",
            "errors that ranks saw": dict(ledger.errors.most_common()),
            "two jobs on a root": f"{self.counts['takeovers']} with takeover, {self.counts['refusals']} without",
            "checks": f"{self.counts['checks']}, of which after a calm job {self.counts['tidy checks']}",
            "checkpoints read": f"{checker.checkpoints_read}, {checker.bytes_read / 1e9:.2f} GB",
            "most places at a time": checker.most_places,
            "uploads left by the dead": checker.uploads_seen,
        }
        return "\n".join(f"{name:<24}{value}" for name, value in lines.items())

    # -- jobs ----------------------------------------------------------------------------------------------------

    def check_all(self) -> None:
        """Read everything again, after a calm round."""
        self.checker.check(tidy=True, afresh=True)

    def _one_job(self, this: Round, proxy: Proxy | None) -> list[str]:
        with self._job(this, 0, this.world, proxy) as (plan, running):
            if proxy is not None and (this.at_request is not None or this.network["at_part"] is not None):
                self._kill_at_request(this, plan, running, proxy)
            elif this.chaos in ("rank", "machine", "writer"):
                self._kill_by_time(this, plan, running)
            elif this.chaos.endswith("at an operation"):
                self._kill_the_others(this, plan, running)
                self.kills[this.chaos] += any(each.died for each in running.result())
        ended = self._ended(running)
        if this.chaos == "calm" and (bad := [each for each in running.result() if each.value != "done"]):
            raise Damage(f"a calm job ended with {bad}")
        return ended

    def _two_jobs(self, this: Round, proxy: Proxy | None) -> list[str]:
        with self._job(this, 0, this.world, proxy) as (plan, first):
            self._await_ranks(plan, first, this.world, this.after_steps)
            time.sleep(this.after_s)
            with self._job(this, 1, this.rival_world, proxy, takeover=this.takeover) as (_, second):
                pass
        self.counts["takeovers" if this.takeover else "refusals"] += 1
        return ["first:", *self._ended(first), "second:", *self._ended(second)]

    @contextmanager
    def _job(
        self, this: Round, pool: int, world: int, proxy: Proxy | None, **more: Any
    ) -> Iterator[tuple[Plan, Running]]:
        """Run a job; it has ended afterwards."""
        self._jobs += 1
        plan = Plan(
            job=self._jobs,
            seed=f"{self._seed} {this.number} {pool}",
            logs=str(self._logs),
            steps=this.steps,
            **{**self.scene.plan(proxy), **this.how, **more},
        )
        running = self._threads.submit(
            self._pools[pool].outcomes,
            world,
            run_job,
            plan,
            timeout_s=JOB_S if self.scene.server is None else BUCKET_JOB_S,
            init=world > 1,
            store_on=this.store_on if world > 1 else "parent",
        )
        try:
            yield plan, running
        finally:
            running.exception()
        self.counts["jobs"] += 1
        self._young = plan.keep_hours is not None or (self._young and this.chaos != "calm")

    def _ended(self, running: Running) -> list[str]:
        for outcome in running.result():
            if outcome.error is not None:
                raise Damage(f"rank {outcome.rank}: {outcome.trace}")
        said = Counter(each.value or each.died.partition("\n")[0] or "raised" for each in running.result())
        return [f"{word}x{count}" for word, count in said.items()]

    # -- kills ---------------------------------------------------------------------------------------------------

    def _await_ranks(self, plan: Plan, running: Running, world: int, steps: int = 0) -> dict[int, int]:
        """Wait until all ranks have begun so many steps, or ended."""
        while len(pids := self.ledger.pids(plan.job, steps)) < world and not running.done():
            time.sleep(0.005)
        return pids

    def _kill_by_time(self, this: Round, plan: Plan, running: Running) -> None:
        pids = self._await_ranks(plan, running, this.world, this.after_steps)
        time.sleep(this.after_s)
        if running.done():
            return
        if this.chaos == "writer":
            while not (writers := _children(pids[this.victim])) and not running.done():
                time.sleep(0.005)
            self._kill("writer", writers[-1:])
        else:
            self._kill_now(this, plan, running, pids)

    def _kill_at_request(self, this: Round, plan: Plan, running: Running, proxy: Proxy) -> None:
        """Kill when so much was asked of the bucket, or when a part of an upload is under way."""
        pids = self._await_ranks(plan, running, this.world)
        while not running.done():
            if proxy.counts.faults["stall"] if this.at_request is None else proxy.has_seen(this.at_request):
                self._kill_now(this, plan, running, pids)
                return
            time.sleep(0.002)

    def _kill_now(self, this: Round, plan: Plan, running: Running, pids: dict[int, int]) -> None:
        if this.chaos.startswith("rank"):
            self._kill(this.chaos, [pids[this.victim]])
            self._kill_the_others(this, plan, running)
            return
        everybody = [*pids.values(), *(child for pid in pids.values() for child in _children(pid))]
        for pid in everybody:  # at one moment, as far as they can tell
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self._kill(this.chaos, everybody)

    def _kill_the_others(self, this: Round, plan: Plan, running: Running) -> None:
        """Do as torchrun does when a rank has died, a moment later; or let them find out."""
        pids = self._await_ranks(plan, running, this.world)
        victim = pids.get(this.victim)
        while not running.done() and (victim is None or _runs(victim)):
            time.sleep(0.002)
        if this.orphans_s is None and this.chaos != "machine at an operation":
            return
        time.sleep(0 if this.chaos == "machine at an operation" else this.orphans_s or 0)
        for pid in pids.values():
            if not running.done():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _kill(self, kind: str, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kills[kind] += bool(pids)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check(self, this: Round) -> None:
        calm = this.chaos == "calm"
        self._died = self._died if calm else self._died + 1 + (this.chaos == "rivals")
        before, first = self._newest, self._jobs - (this.chaos == "rivals")
        slack = self._died + (100 if self._young else 0)
        afresh = self.counts["checks"] % 20 == 19
        there = self.checker.check(tidy=calm, died_since_tidy=slack, afresh=afresh)
        self.counts["checks"] += 1
        went_on = self.ledger.restored.get(first)
        if before is not None and not this.misread and went_on not in (None, before.step):
            raise Damage(f"job {first} went on from {went_on}, and {before} was the newest")
        self._newest = next(iter(there), None)
        if calm:
            self._died = 0
            self.counts["tidy checks"] += 1


def _runs(pid: int) -> bool:
    """Return whether a process still runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return sorted(found)
