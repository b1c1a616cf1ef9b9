"""An object store behind a network that fails: which faults come in a round, all decided by a seed."""

import random
from typing import Any, get_args

from tests.object_store.proxy import Fault, Proxy, Rule
from tests.support.s3_server import S3Server

PART_BYTES = 5 << 20
_CLIENT: dict[str, Any] = {"timeout_s": 3.0, "retries": 5, "retry_s": 15.0, "requests": 8, "part_bytes": PART_BYTES}
"""How the ranks' stores are opened: patient for as long as a round can wait."""
_MISREAD: tuple[Fault, ...] = ("flip_answer", "shorten_answer")
"""Answers that say something else than what is there; who restores may take it for damage, and an older checkpoint."""


def options_by(server: S3Server, proxy: Proxy) -> dict[str, Any]:
    """Say how a store is opened by way of a proxy."""
    return {**server.options, **_CLIENT, "endpoint": proxy.endpoint}


def rules_of(seed: str, *, rate: float, storm: bool, misread: bool, at_part: int | None) -> list[Rule]:
    """
    Say what goes wrong: with which rate of requests, and which upload (`at_part`) waits for ever in its second part.

    In a `storm` the service answers for a while that it has enough; `misread` answers may be changed on the way.
    """
    dice = random.Random(seed)
    rules: list[Rule] = []
    if at_part is not None:
        rules.append(Rule("stall", path="partNumber=2", after=at_part, times=1))
    if storm:
        rules.append(Rule("slow_down", after=dice.randrange(200), times=dice.choice([5, 30, 200])))
    if rate:
        kinds = [each for each in get_args(Fault) if misread or each not in _MISREAD]
        delays = {"delay": 0.3, "trickle": 0.05}
        most = {"stall": 2}  # each costs a timeout
        rules += [
            Rule(each, chance=rate / len(kinds), delay_s=delays.get(each, 0.0), times=most.get(each)) for each in kinds
        ]
    return rules
