"""
Which state of objects is one for all ranks, and which is each rank's own: decided by all ranks together.

A scheduler's state is the same everywhere, a data loader's is not, and neither says so.
"""

from __future__ import annotations

import msgspec

from shardkeep.errors import RanksDisagree
from shardkeep.ranks.agree import Meeting
from shardkeep.state.objects.find import Objects


def differing_state(objects: Objects, meeting: Meeting, ranks: int, *, allow_pickle: bool) -> frozenset[str]:
    """Return the names of what the ranks compared and found to differ."""
    if ranks == 1 or not objects:
        return frozenset()

    def digests() -> bytes:
        return msgspec.msgpack.encode((objects.names, objects.unsure(allow_pickle=allow_pickle)))

    def differing(payloads: list[bytes]) -> list[bytes]:
        said = [msgspec.msgpack.decode(payload, type=tuple[list[str], dict[str, bytes]]) for payload in payloads]
        insist_on_same_objects([names for names, _ in said])
        first: dict[str, bytes] = {}
        found: set[str] = set()
        for _, digests in said:
            for name, digest in digests.items():
                if first.setdefault(name, digest) != digest:
                    found.add(name)
        return [msgspec.msgpack.encode(sorted(found))] * len(payloads)

    return frozenset(msgspec.msgpack.decode(meeting.agree("compare", digests, differing), type=list[str]))


def insist_on_same_objects(names: list[list[str]]) -> None:
    """Refuse ranks that have different objects: names inside them, and who talks to whom, would not be the same."""
    for rank, own in enumerate(names):
        if odd := sorted({*own} ^ {*names[0]}):
            raise RanksDisagree(
                f"ranks 0 and {rank} do not have the same objects in the state: {', '.join(map(repr, odd))}",
                hint="pass modules, optimizers and other objects under the same keys on every rank",
            )
