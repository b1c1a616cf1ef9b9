"""
`make demo`: train on several ranks with saves, kill the job in the middle of a save, resume on fewer ranks.

    python examples/demo/demo.py [--short] [--dir DIR]

Three jobs run one after the other: a reference that runs undisturbed, one that is killed, and one that resumes the killed
one on another mesh. The demo prints what was saved, killed, restored and compared, and fails if any of it is wrong.
"""
# ruff: noqa: INP001, T201 - a script to read and run

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from job import DemoFailed, Job, Ranks, is_checkpoint

TOLERANCE = 1e-5
"""Relative difference of losses on different numbers of ranks, which add the same gradients in another order."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The three jobs of a demo."""

    first: Job
    resumed_mesh: tuple[int, ...]
    kill_at: int
    """Step whose save is interrupted; if it finishes too early, the next save is tried."""


FULL = Plan(first=Job(mesh=(4,), steps=12, save_every=3), resumed_mesh=(1, 2), kill_at=9)
SHORT = Plan(
    first=Job(mesh=(2,), steps=8, save_every=2, width=128, blocks=1, context=16, batch=4),
    resumed_mesh=(1,),
    kill_at=4,
)


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What the killed job left on the disk."""

    losses: dict[int, float]
    last_saved: int
    leftover: str
    """Directory of the interrupted save."""


@dataclass(frozen=True, kw_only=True)
class Check:
    what: str
    ok: bool


def main() -> int:
    """Run the three jobs and print the verdict; 0 if every check holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].strip())
    parser.add_argument("--short", action="store_true", help="2 ranks resumed by 1, a smaller model, fewer steps")
    parser.add_argument("--dir", help="work below this directory and keep everything there")
    args = parser.parse_args()
    plan = SHORT if args.short else FULL
    began = time.monotonic()
    if args.dir:
        os.makedirs(args.dir, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="shardkeep-demo-", dir=args.dir))
    try:
        checks = _run(plan, root)
    except DemoFailed as failure:
        print(f"\nFAILED: {failure}")
        return 1
    finally:
        if not args.dir:
            shutil.rmtree(root, ignore_errors=True)
    print()
    for check in checks:
        print(f"  {'ok  ' if check.ok else 'FAIL'}  {check.what}")
    good = all(check.ok for check in checks)
    print(f"\n{'PASSED' if good else 'FAILED'} in {time.monotonic() - began:.0f} s")
    return 0 if good else 1


def _run(plan: Plan, root: Path) -> list[Check]:
    first = plan.first
    print(f"A transformer under FSDP2 and AdamW on CPU ranks over gloo, in {root}\n")
    print(f"1. {first.ranks} ranks train {first.steps} steps undisturbed, for reference", flush=True)
    reference = _reference(first, root)
    print(f"\n2. {first.ranks} ranks train the same and save every {first.save_every} steps", flush=True)
    killed = _killed(plan, root)
    mesh = " x ".join(map(str, plan.resumed_mesh))
    resumed_job = replace(_saving(first, root), mesh=plan.resumed_mesh, save_every=0, resume=True)
    print(f"\n3. {resumed_job.ranks} of {first.ranks} ranks come back, on a mesh of {mesh}, and resume", flush=True)
    with Ranks(resumed_job, root / "resumed") as ranks:
        ranks.wait()
    restored = ranks.events("resumed")[0]
    _print_restore(restored)
    resumed = _losses(ranks)
    _print_losses(reference, killed, resumed)
    return checks_of(reference, killed, restored, resumed)


def _reference(job: Job, root: Path) -> dict[int, float]:
    with Ranks(replace(job, save_every=0), root / "reference") as ranks:
        ranks.wait()
    losses = _losses(ranks)
    print(f"   loss {losses[1]:.4f} at step 1, {losses[job.steps]:.4f} at step {job.steps}")
    return losses


def _killed(plan: Plan, root: Path) -> Killed:
    """Run until a save is in progress, and kill every rank in the middle of it."""
    job = _saving(plan.first, root)
    (root / "digests").mkdir()
    with Ranks(job, root / "killed") as ranks:
        step, leftover = _stop_in_a_save(ranks, job, plan.kill_at)
        ranks.kill()
    saves = ranks.events("saved")
    for event in saves:
        print(
            f"   step {event['step']:>3}  saved {_speed(event)}; training stood still for {event['blocked'] * 1e3:.0f} ms"
        )
    files = sum(1 for file in leftover.iterdir() if file.is_file())
    print(f"   step {step:>3}  SIGKILL to all {job.ranks} ranks in the middle of the save:")
    print(f"             {files} files with {_nbytes(leftover) / 1e6:.1f} MB are left, and no commit record")
    return Killed(losses=_losses(ranks), last_saved=saves[-1]["step"], leftover=leftover.name)


def _stop_in_a_save(ranks: Ranks, job: Job, first_step: int) -> tuple[int, Path]:
    """Stop the last rank as soon as a save has written something, and let the others write their part."""
    last = job.ranks - 1
    for step in range(first_step, job.steps + 1, job.save_every):
        path = Path(job.checkpoints, f"step-{step:06d}")
        ranks.wait_until(partial(_nbytes, path), pause_s=0.0005)
        ranks.freeze(last)
        _settle(path)
        if not is_checkpoint(path):
            return step, path
        ranks.thaw(last)  # it had finished its part, and the save was committed: try the next one
    raise DemoFailed("every save was over before a rank could be stopped in it")


def _saving(job: Job, root: Path) -> Job:
    return replace(job, checkpoints=str(root / "checkpoints"), digests=str(root / "digests"))


def _nbytes(path: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(path))
    except FileNotFoundError:  # not started, or a file was renamed meanwhile
        return 0


def _settle(path: Path) -> None:
    """Wait until nothing is added for a while, because the running ranks have done their part."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < 0.3:
        if (now := _nbytes(path)) != before:
            before, since = now, time.monotonic()
        time.sleep(0.01)


def _losses(ranks: Ranks) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in ranks.events("step")}


def _speed(event: dict[str, Any]) -> str:
    return f"{event['bytes'] / 1e6:6.1f} MB in {event['seconds']:.3f} s: {event['bytes'] / event['seconds'] / 1e9:.2f} GB/s"


def _print_restore(restored: dict[str, Any]) -> None:
    skipped = ", ".join(restored["skipped"]) or "nothing"
    print(f"   passed over, as it was never committed: {skipped}")
    print(f"   loaded {Path(restored['path']).name}:  {_speed(restored)}")
    equal = restored["compared"] - len(restored["differing"])
    print(f"   {equal} of {restored['compared']} values equal, bit for bit, what was about to be saved")


def _print_losses(reference: dict[int, float], killed: Killed, resumed: dict[int, float]) -> None:
    print("\n   loss at step   undisturbed    killed   resumed   difference")
    for step, loss in reference.items():
        shown = [f"{losses[step]:9.5f}" if step in losses else " " * 9 for losses in (killed.losses, resumed)]
        other = resumed.get(step, killed.losses.get(step, loss))
        print(f"   {step:12}   {loss:11.5f} {shown[0]} {shown[1]}   {abs(other - loss) / loss:10.1e}")


def checks_of(
    reference: dict[int, float], killed: Killed, restored: dict[str, Any], resumed: dict[int, float]
) -> list[Check]:
    """Check the results, one line per promise."""
    differing = restored["differing"]
    worst = max(abs(resumed[step] - reference[step]) / reference[step] for step in resumed)
    return [
        Check(
            what="the losses before the kill are exactly those of the reference",
            ok=all(loss == reference[step] for step, loss in killed.losses.items()),
        ),
        Check(what="the save that was cut short is no checkpoint", ok=restored["skipped"] == [killed.leftover]),
        Check(
            what=f"the newest committed save, step {killed.last_saved}, was resumed",
            ok=restored["step"] == killed.last_saved,
        ),
        Check(
            what=f"all {restored['compared']} restored values equal those saved, bit for bit"
            + (f"; not {', '.join(differing[:5])}" if differing else ""),
            ok=not differing and restored["compared"] > 0,
        ),
        Check(
            what=f"the losses go on as in the reference to {worst:.1e} (rounding: {TOLERANCE:.0e} allowed)",
            ok=worst <= TOLERANCE and max(resumed) == max(reference),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
