"""What goes wrong in a round: which job is run, and who is killed, all decided by a seed."""

import random
from dataclasses import dataclass, field
from typing import Any, Literal

Chaos = Literal[
    "calm", "rank", "rank at an operation", "writer", "machine", "machine at an operation", "disk", "clock", "rivals",
    "network",
]  # fmt: skip
StoreKind = Literal["local", "s3"]
"""A disk, or a bucket."""
KINDS: tuple[Chaos, ...] = (
    "rank",
    "rank at an operation",
    "machine",
    "machine at an operation",
    "writer",
    "disk",
    "rivals",
    "clock",
)
SHORT_KINDS: tuple[Chaos, ...] = (*KINDS, *KINDS[:3], *KINDS[:3], "machine at an operation")
"""Where there is little time: rather more kills."""
S3_KINDS: tuple[Chaos, ...] = tuple("network" if kind == "disk" else kind for kind in KINDS)
CALM_EVERY, SHORT_CALM_EVERY = 3, 4
"""Rounds; a calm job tidies up what the others left."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round."""

    number: int
    chaos: Chaos
    world: int
    steps: int
    how: dict[str, Any]
    """More for the job's plan."""
    victim: int = 0
    """The rank that is killed, or whose writer is."""
    after_steps: int = 0
    """Steps that have begun before the kill, or before a rival comes."""
    after_s: float = 0.0
    """From then until it happens."""
    orphans_s: float | None = 0.0
    """How long the other ranks are left alone after it; None: until they find out by themselves."""
    store_on: Literal["parent", "rank0"] = "parent"
    takeover: bool = False
    """Whether the second of two rivals takes the root over."""
    rival_world: int = 1
    network: dict[str, Any] = field(default_factory=dict)
    """What goes wrong between the ranks and a bucket; nothing at all if it is empty."""
    at_request: int | None = None
    """After how many requests to the bucket a process is killed, if not by a disk operation or by time."""

    @property
    def misread(self) -> bool:
        """Whether what comes from the bucket may be something else than what is there."""
        return bool(self.network.get("misread"))


def round_of(seed: int, number: int, *, short: bool) -> Round:
    """Decide what happens in a round; the same for the same seed."""
    dice = random.Random(f"{seed} {number}")
    world = dice.choice([1, 2, 2, 3] if short else [1, 2, 2, 3, 4])
    every = SHORT_CALM_EVERY if short else CALM_EVERY
    calm = number % every == 0
    count = number - 1 - (number - 1) // every
    chaos: Chaos = "calm" if calm else _in_turn(seed, count, SHORT_KINDS if short else KINDS)
    how: dict[str, Any] = {
        "asynchronous": dice.random() < 0.8,
        "writer": "process" if chaos == "writer" or (not short and dice.random() < 0.15) else "thread",
        "max_in_flight": dice.choice([1, 1, 2]),
    }
    victim = dice.randrange(world)
    alone = dice.random() < 0.15
    if chaos in ("rank", "rank at an operation") and alone:
        how["timeout_s"] = 1.0 if short else 2.0
    if chaos == "writer":
        how["asynchronous"] = True
    elif chaos in ("rank at an operation", "machine at an operation"):
        how["dies_at"] = victim, dice.randrange(100 if short else 400)
    if chaos == "disk" or (chaos != "calm" and dice.random() < 0.2):
        how["rate"] = dice.choice([0.002, 0.01, 0.05])
    if chaos == "clock" or (chaos == "calm" and dice.random() < 0.3):
        how["jumps"] = True
    if chaos == "clock":
        how["keep_hours"] = 0.001
    if how.get("rate") or how.get("dies_at"):
        how["writer"] = "thread"  # another process writes to a plain store
    steps = dice.randrange(3, 8) if calm else dice.randrange(10, 20 if short else 60)
    about: dict[str, Any] = {"number": number, "chaos": chaos, "world": world, "victim": victim}
    return Round(**about, steps=steps, how=how, **_moments(dice, [0, 1, 1, 3, 8], 0.1, alone=alone))


def bucket_round_of(seed: int, number: int, *, short: bool) -> Round:
    """Decide what happens in a round of jobs that save to a bucket; the same for the same seed."""
    dice = random.Random(f"{seed} {number} s3")
    every = SHORT_CALM_EVERY if short else CALM_EVERY
    calm, count = number % every == 0, number - 1 - (number - 1) // every
    chaos: Chaos = "calm" if calm else _in_turn(seed, count, S3_KINDS)
    world = dice.choice([1, 2, 2] if short else [1, 2, 2, 3, 4])
    victim, alone = dice.randrange(world), dice.random() < 0.15
    how: dict[str, Any] = {
        "asynchronous": chaos == "writer" or dice.random() < 0.8,
        "writer": "process" if chaos == "writer" or dice.random() < 0.1 else "thread",
        "max_in_flight": dice.choice([1, 1, 2]),
        "codecs": dice.choice(
            [None, None, ["float"], ["aes"], ["float", "aes"], {"model": ["zstd"], "optim": ["aes"]}]
        ),
        "timeout_s": 3.0 if alone and chaos.startswith("rank") else 30.0,
    }
    network: dict[str, Any] = {"rate": 0.0, "storm": False, "misread": False, "at_part": None}
    at_request = None
    if chaos.endswith("at an operation"):
        if dice.random() < 0.5:
            network["at_part"] = dice.randrange(4)
        else:
            at_request = dice.randrange(20, 200)
    if chaos == "network" or (not calm and dice.random() < 0.25):
        network |= {
            "rate": dice.choice([0.01, 0.03, 0.1]),
            "storm": dice.random() < 0.4,
            "misread": dice.random() < 0.3,
        }
    if chaos == "clock":
        how |= {"jumps": True, "keep_hours": 0.001}
    steps = dice.randrange(3, 6) if calm else dice.randrange(4, 8 if short else 15)
    about: dict[str, Any] = {"number": number, "chaos": chaos, "world": world, "victim": victim, "network": network}
    moments = _moments(dice, [0, 1, 1, 3], 0.3, alone=alone)
    return Round(**about, steps=steps, how=how, at_request=at_request, **moments)


def _moments(dice: random.Random, after_steps: list[int], most_s: float, *, alone: bool) -> dict[str, Any]:
    return {
        "after_steps": dice.choice(after_steps),
        "after_s": dice.uniform(0.0, most_s),
        "orphans_s": None if alone else dice.uniform(0.0, 0.2),
        "store_on": dice.choice(["parent", "parent", "rank0"]),
        "takeover": dice.random() < 0.6,
        "rival_world": dice.choice([1, 2]),
    }


def _in_turn(seed: int, count: int, kinds: tuple[Chaos, ...]) -> Chaos:
    """Every kind comes before one comes again."""
    order = list(kinds)
    random.Random(f"{seed} {count // len(order)} order").shuffle(order)
    return order[count % len(order)]
