"""
Measure saves and loads against the raw disk, torch DCP, torch.save and safetensors: `make bench`.

Absolute times vary by 1.5x from run to run, so all contenders take turns within each round and only ratios within a round
are judged. Prints tables and targets, and writes every sample to bench-results/<date>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/support has the S3 server and the pool of ranks

import loads
import pagecache
import planning
import report
import reshard
import s3
from contenders import CONTENDERS
from report import Sample
from shardkeep.options import Options

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "bench-results"
PACKAGES = ("shardkeep", "torch", "numpy", "safetensors", "xxhash")
SMALL_ROUNDS = 2
"""At most: torch DCP takes half a minute for each save and each load of 50,000 tensors."""


RESTART_S = 2.0
"""Between a save and the load after it: less than a job takes to start again. Nothing is warmed by hand."""
RESHARD_GB = 1.0
S3_GB = 0.25


class Worker:
    """A process that measures one family; see worker.py."""

    def __init__(self, family: str, workload: str, args: argparse.Namespace, scratch: str) -> None:
        command = [sys.executable, str(HERE / "worker.py"), family, workload, str(args.gb), str(args.tensors), scratch]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.facts = self._reply()

    def ask(self, op: str, contender: str, where: str) -> dict[str, float]:
        self.process.stdin.write(json.dumps({"op": op, "contender": contender, "where": where}) + "\n")
        return self._reply()

    def _reply(self) -> dict[str, float]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{shlex.join(self.process.args)} ended early; its error is above")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.stdout.close()


def one_round(workload: str, number: int, workers: dict[str, Worker], scratch: str) -> list[Sample]:
    """Let every contender save, load after that, and load cold once; who begins changes with the round."""
    names = [name for name, contender in CONTENDERS.items() if contender.family in workers]
    shift = number * 3 % len(names)
    samples = []
    for name in names[shift:] + names[:shift]:
        worker = workers[CONTENDERS[name].family]
        where = f"{scratch}/{workload}-{number}-{name.replace(' ', '-')}"
        os.sync()  # what others left unwritten must not be charged to this one
        samples.append(Sample(workload, number, name, "save", **worker.ask("save", name, where), resident=0.0))
        if CONTENDERS[name].load:
            for op in ("again", "cold"):
                worker.ask("poison", name, where)
                os.sync()
                if op == "cold":
                    pagecache.chill(where)
                else:
                    time.sleep(RESTART_S)
                resident = pagecache.resident_fraction(where)
                samples.append(Sample(workload, number, name, op, **worker.ask("load", name, where), resident=resident))
        shutil.rmtree(where)
        print(f"    round {number + 1}: {name:<18}" + _times(samples, name), file=sys.stderr)
    return samples


def scratch_in(folder: str) -> tempfile.TemporaryDirectory[str]:
    """Make a folder that is removed at the end, with all that is left in it."""
    return tempfile.TemporaryDirectory(prefix="shardkeep-bench-", dir=folder, ignore_cleanup_errors=True)


def _times(samples: list[Sample], name: str) -> str:
    return "".join(f"  {s.op} {s.seconds:.3f} s" for s in samples if s.contender == name)


def measure(workload: str, args: argparse.Namespace) -> tuple[list[Sample], int]:
    """Run all rounds of one workload, print its table, and return the samples and the size of the state."""
    families = [f for f in dict.fromkeys(c.family for c in CONTENDERS.values()) if f not in args.skip]
    scratch = tempfile.mkdtemp(prefix="shardkeep-bench-", dir=args.dir)
    rounds = args.rounds if workload == "large" else min(args.rounds, SMALL_ROUNDS)
    workers: dict[str, Worker] = {}
    samples: list[Sample] = []
    try:
        for family in families:
            workers[family] = Worker(family, workload, args, scratch)
        facts = workers[families[-1]].facts
        print(f"{workload}: {facts['nbytes'] / 1e9:.2f} GB in {facts['tensors']} tensors; rounds: {rounds}")
        for number in range(rounds):
            samples += one_round(workload, number, workers, scratch)
    finally:
        for worker in workers.values():
            worker.close()
        shutil.rmtree(scratch, ignore_errors=True)
    samples.sort(key=lambda s: list(CONTENDERS).index(s.contender))
    not_durable = frozenset(name for name, contender in CONTENDERS.items() if not contender.durable)
    print("\n" + "\n".join(report.table(samples, facts["nbytes"], not_durable)))
    for op, wrong in (("cold", lambda part: part > 0.01), ("again", lambda part: part < 0.99)):
        parts = [s.resident for s in samples if s.op == op and wrong(s.resident)]
        if parts:
            print(f"  note: {len(parts)} {op} loads began with {min(parts):.0%} to {max(parts):.0%} in the page cache")
    return samples, facts["nbytes"]


def machine(directory: str) -> dict[str, object]:
    """Say where the numbers come from."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    mount = subprocess.run(["df", "-T", "--", directory], capture_output=True, text=True, check=True)
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
        "cpu": f"{len(os.sched_getaffinity(0))} cores of {cpu}",
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "disk": " ".join(mount.stdout.splitlines()[-1].split()[:2]) + f" at {directory}",
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": packages,
        "load_average": os.getloadavg()[0],
        "cold_by": "drop_caches"
        if pagecache.can_drop()
        else "posix_fadvise: not root, so only these files were dropped",
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument(
        "--only", choices=("large", "small", "loads", "reshard", "planning", "s3"), help="measure one part"
    )
    parser.add_argument("--rounds", type=int, default=5, help="times each contender is measured (default %(default)s)")
    parser.add_argument("--gb", type=float, default=1.5, help="size of the large state (default %(default)s)")
    parser.add_argument("--tensors", type=int, default=50_000, help="of 4 KB, in the small one (default %(default)s)")
    parser.add_argument("--skip", action="append", default=[], help="leave out a family: raw, dcp, torch, safetensors")
    parser.add_argument("--json", type=Path, help="where the samples go (default bench-results/<date>.json)")
    parser.add_argument("--dir", default=str(RESULTS), help="put the checkpoints on the disk of this directory")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    os.makedirs(args.dir, exist_ok=True)
    facts = machine(args.dir)
    print("\n".join(f"{name:<13} {value}" for name, value in facts.items()) + "\n")
    samples: list[Sample] = []
    sizes = {}
    for workload in ("large", "small"):
        if args.only in (None, workload):
            measured, sizes[workload] = measure(workload, args)
            samples += measured
    verdicts = report.judge(samples, Options().host_budget_bytes)
    if args.only in (None, "loads"):
        with scratch_in(args.dir) as scratch:
            loads.run(scratch, args.gb, min(args.rounds, 3))
    resharded = None
    if args.only in (None, "reshard"):
        with scratch_in(args.dir) as scratch:
            resharded = reshard.measure(scratch, min(args.gb, RESHARD_GB), min(args.rounds, 3))
        print("reshard, torch's layout\n" + "\n".join(report.reshard_lines(resharded)) + "\n")
        verdicts += report.judge_reshard(resharded)
    plans = None
    if args.only in (None, "planning"):
        plans = planning.run()
        print("planning, simulated in one process\n" + "\n".join(report.planning_lines(plans)) + "\n")
        verdicts += report.judge_planning(plans)
    on_s3 = None
    if args.only in (None, "s3"):
        with scratch_in(args.dir) as scratch:
            on_s3 = s3.measure(scratch, min(args.gb, S3_GB), min(args.rounds, 3))
        print("an object store\n" + "\n".join(s3.lines(on_s3)) + "\n")
        verdicts += s3.judge(on_s3)
    print("targets: median over the rounds (lowest to highest), against the best of the others in the same round")
    print("\n".join(verdict.line() for verdict in verdicts))
    path = args.json or RESULTS / f"{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "machine": facts,
        "nbytes": sizes,
        "planning": plans,
        "reshard": resharded,
        "s3": on_s3,
        **report.as_json(samples, verdicts),
    }
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nevery sample: {path}")


if __name__ == "__main__":
    main()
