"""
For how many seconds a save keeps each framework from training: with torch's distributed checkpoint and with shardkeep's.

    pip install accelerate lightning torchtitan                # or any of them
    python examples/frameworks/gain.py --megabytes 150         # of state on each of 2 CPU ranks

Each round runs the program of a framework on torch's code and on ours, in turn and in processes of their own: same state,
same calls. A process's first save is told apart from those after it. Torchtitan saves asynchronously; Accelerate and
Lightning have no asynchronous save of sharded state, so the whole save blocks. A save's time is that of the slowest rank.
"""
# ruff: noqa: INP001, S603, T201 - a script to read and run

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

PROGRAMS = {"torchtitan": ["--mode", "async"], "lightning": [], "accelerate": []}
"""The frameworks, and the options by which their programs save as their users would."""
SIDES = {"torch": [], "shardkeep": ["-m", "shardkeep.dcp"]}


def run(framework: str, launch: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run a framework's program on ranks, and return the line that it printed."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        command += [*launch, str(Path(__file__).with_name(f"{framework}_fsdp2.py")), f"{folder}/checkpoint"]
        command += [f"--megabytes={args.megabytes}", f"--saves={args.saves - 1}", *PROGRAMS[framework]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    # Not by the exit code: torch may abort a rank that has ended, because a thread of gloo outlives the interpreter.
    if line is None:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return json.loads(line)


def compare(framework: str, args: argparse.Namespace) -> None:
    """Run both sides in turn, and print the seconds."""
    first: dict[str, list[float]] = {side: [] for side in SIDES}
    later: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side in sorted(SIDES, reverse=number % 2 == 0):  # each goes first in every other round
            saw = run(framework, SIDES[side], args)
            seconds = saw["seconds blocked by each save"]
            first[side].append(seconds[0])
            later[side].extend(seconds[1:])
    print(f"\n{saw['framework']}: {' '.join(PROGRAMS[framework]) or 'synchronous'}, {saw['ranks']} ranks", end="")
    print(f" x {args.megabytes:g} MB, seconds blocked", flush=True)
    print(f"{'':10} {'first save':>24} {'later saves':>24}")
    for side in SIDES:
        print(f"{side:10} {spread(first[side]):>24} {spread(later[side]):>24}", flush=True)


def spread(seconds: list[float]) -> str:
    return f"{median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", help=f"some of {', '.join(PROGRAMS)}; by default those installed")
    parser.add_argument("--megabytes", type=float, default=150, help="state of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=4, help="in each process, at least 2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", help="where checkpoints are written; by default where temporary files are")
    args = parser.parse_args()
    frameworks = args.frameworks or [name for name in PROGRAMS if find_spec(name)]
    if not frameworks:
        sys.exit(f"none is installed: pip install {' '.join(PROGRAMS)}")
    for framework in frameworks:
        compare(framework, args)


if __name__ == "__main__":
    main()
