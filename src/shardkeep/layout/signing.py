"""
The proof, in a commit record of an encrypted checkpoint, that nobody changed it who has not the key.

What is encrypted proves itself, frame by frame. The record is plain, and says which files there are: the proof is a MAC of
all it says but of the wrapped data keys, so that keys can be rotated without the data.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from msgspec.structs import replace

from shardkeep.codec.codecs import without_keys
from shardkeep.codec.frame_chain import Chain
from shardkeep.codec.problems import NotAuthentic
from shardkeep.format.record import RECORD_NAME, Record, authenticated_bytes

_HINT = "somebody changed it who has not the key: do not trust this checkpoint"


def signed(record: Record, chain: Chain | None) -> Record:
    """Return the record with its MAC, if the chain of its index has a secret."""
    return replace(record, mac=None if chain is None else _mac(record, chain))


def check_signature(record: Record, chains: Sequence[Chain]) -> None:
    """
    Insist that a record is what was signed, if any of its chains, which are given opened, has a secret.

    Raises:
        NotAuthentic: it was changed, or its proof was taken away.

    """
    if not any(chain.is_secret for chain in chains):
        return
    # Or a forged index in the clear could stand before encrypted files.
    chain = None if record.index.chain is None else chains[record.index.chain]
    expected = None if chain is None else _mac(record, chain)
    if expected is None or record.mac is None or not hmac.compare_digest(expected, record.mac):
        raise NotAuthentic(f"{RECORD_NAME}: the commit record is not what was written", hint=_HINT, file=RECORD_NAME)


def _mac(record: Record, chain: Chain) -> str | None:
    code = chain.mac(authenticated_bytes(record, [without_keys(each) for each in record.chains]))
    return None if code is None else f"hmac_sha256:{code.hex()}"
