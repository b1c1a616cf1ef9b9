"""
Which state of objects is one for all ranks, and which is each rank's own: decided by all ranks together.

A scheduler's state is the same everywhere, a data loader's is not, and neither says so.
"""

from __future__ import annotations

import msgspec

from shardkeep.ranks.agree import Meeting
from shardkeep.state.objects.find import Objects


def differing_state(objects: Objects, meeting: Meeting, ranks: int, *, allow_pickle: bool) -> frozenset[str]:
    """Return the names of what the ranks compared and found to differ."""
    if ranks == 1 or not objects.may_be_unsure:
        return frozenset()

    def digests() -> bytes:
        return msgspec.msgpack.encode(objects.unsure(allow_pickle=allow_pickle))

    def differing(payloads: list[bytes]) -> list[bytes]:
        first: dict[str, bytes] = {}
        found: set[str] = set()
        for payload in payloads:
            for name, digest in msgspec.msgpack.decode(payload, type=dict[str, bytes]).items():
                if first.setdefault(name, digest) != digest:
                    found.add(name)
        return [msgspec.msgpack.encode(sorted(found))] * len(payloads)

    return frozenset(msgspec.msgpack.decode(meeting.agree("compare", digests, differing), type=list[str]))
