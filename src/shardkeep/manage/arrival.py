"""
Whether what was copied to a store has arrived as it was sent: the service says so, or it is read back.

S3 compares each part of an upload with the SHA-256 that is sent along with it, and refuses what differs. Of services that
only speak its language nobody knows whether they do; others are sent no checksum; and a disk says nothing at all.
"""

from __future__ import annotations

from shardkeep.store.objects import ObjectStore
from shardkeep.store.protocol import innermost


def is_checked_by_service(store: object) -> bool:
    """Say whether a store is known to have compared all bytes with a checksum before it says that it has them."""
    store = innermost(store)
    if not isinstance(store, ObjectStore):
        return False
    bucket = store.bucket
    return bucket.service == "s3" and bucket.official and bool(bucket.opened.config.get("checksum_algorithm"))
