"""The long form: python -m tests.soak --minutes 30 --seed 1 --store s3"""

import argparse
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import get_args

from tests.soak.checker import Damage
from tests.soak.driver import Soak
from tests.soak.rounds import CALM_EVERY, SHORT_CALM_EVERY, StoreKind
from tests.support.s3_server import S3Server


def main() -> int:
    """Run rounds until the time is over, or something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="decides what happens; by default a new one")
    parser.add_argument("--store", choices=get_args(StoreKind), default="local", help="a disk, or a bucket")
    parser.add_argument("--only", type=int, default=None, metavar="ROUND", help="do one round again, between calm ones")
    parser.add_argument("--short", action="store_true", help="the rounds of the short form, as CI has them")
    parser.add_argument("--folder", type=Path, default=None, help="where to put it all, by default a temporary folder")
    arguments = parser.parse_args()
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-", dir=arguments.folder))
    print(f"seed {seed}, in {folder}", flush=True)
    end = time.monotonic() + 60 * arguments.minutes
    damage: Damage | None = None
    calm_every = SHORT_CALM_EVERY if arguments.short else CALM_EVERY
    with ExitStack() as stack:
        server = None if arguments.store == "local" else stack.enter_context(S3Server(folder / "s3"))
        soak = stack.enter_context(
            Soak(
                folder,
                seed,
                store=arguments.store,
                server=server,
                short=arguments.short,
                say=partial(print, flush=True),
            )
        )
        number = 0
        rounds = iter(int, 1) if arguments.only is None else iter([0, arguments.only, calm_every])
        try:
            for each in rounds:
                soak.round(number if arguments.only is None else each)
                number += 1
                # A calm round is the last one.
                if time.monotonic() > end and number % calm_every == 1:
                    break
            soak.check_all()
        except Damage as error:
            damage = error
        print(soak.summary())
    if damage is not None:
        print(f"DAMAGE: {damage}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    print("no damage found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
