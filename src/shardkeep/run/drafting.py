"""From a rank's description to its draft, and from all drafts to what the index says of the tree and plain values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import xxhash

from shardkeep.errors import InvalidShards, ReplicasDiffer
from shardkeep.format.tree import decode_tree, encode_tree, merge_trees
from shardkeep.format.values import encode_value
from shardkeep.plan.draft import Draft, PlainValues, TensorNames, decode_names, decode_values, encode
from shardkeep.stage.memory import view_memory
from shardkeep.stage.tensors import host_address, scattered
from shardkeep.state.describe import Description, file_groups

_WINDOW_NBYTES = 8 << 20


def make_draft(description: Description, *, allow_pickle: bool, check_replicas: bool) -> Draft:
    """Put a description into the form that travels; plain values are encoded here, and refused by name if unsafe."""
    d = description
    held = np.bincount(d.row_tensor, minlength=len(d.keys)) > 0
    names = TensorNames(
        keys=d.keys,
        groups=file_groups(d),
        dtype=d.dtype.tobytes(),
        ndim=d.ndim.tobytes(),
        origin=d.origin.tobytes(),
    )
    values = PlainValues(
        keys=list(d.values),
        data=[encode_value(value, key=key, allow_pickle=allow_pickle) for key, value in d.values.items()],
    )
    return Draft(
        axes=d.boxes.axes,
        names=encode(names),
        shape=d.shape.tobytes(),
        alias=np.where(held, d.alias, -1).tobytes(),
        row_tensor=d.row_tensor.tobytes(),
        row_offsets=d.boxes.offsets.tobytes(),
        row_sizes=d.boxes.sizes.tobytes(),
        check_replicas=check_replicas,
        row_digest=_digests(description) if check_replicas else b"",
        tree=encode_tree(d.tree),
        values=encode(values),
    )


def _digests(description: Description) -> bytes:
    buffer = memoryview(bytearray(_WINDOW_NBYTES))
    digests = bytearray()
    for tensor in description.pieces:
        nbytes = tensor.numel() * tensor.element_size()
        address = host_address(tensor)
        digest = xxhash.xxh3_128()
        source = None if address else scattered(tensor, tensor.dtype)
        for start in range(0, nbytes, _WINDOW_NBYTES):
            stop = min(start + _WINDOW_NBYTES, nbytes)
            if source is None:
                digest.update(view_memory(address + start, stop - start))
            else:
                source.read(start, stop, buffer[: stop - start])
                digest.update(buffer[: stop - start])
        digests += digest.digest()
    return bytes(digests)


def merge_skeletons(drafts: Sequence[Draft]) -> bytes:
    """Unite the trees of all ranks."""
    distinct = list(dict.fromkeys(draft.tree for draft in drafts))
    if len(distinct) == 1:
        return distinct[0]
    return encode_tree(merge_trees([decode_tree(raw) for raw in distinct]))


def merge_values(drafts: Sequence[Draft], tensors: Sequence[str]) -> list[tuple[str, bytes]]:
    """Unite the plain values of all ranks, sorted by key; one key must have one value, and not name a tensor too."""
    merged: dict[str, tuple[bytes, int]] = {}
    seen: set[bytes] = set()
    for rank, draft in enumerate(drafts):
        if draft.values in seen:
            continue
        seen.add(draft.values)
        values = decode_values(draft.values)
        for key, data in zip(values.keys, values.data, strict=True):
            known, teller = merged.setdefault(key, (data, rank))
            if known != data:
                raise ReplicasDiffer(
                    f"{key!r} is not the same on all ranks: ranks {teller} and {rank} hold different values",
                    hint="wrap state that differs by rank in sk.PerRank, or save the same value on every rank",
                    key=key,
                )
    for key, (_, teller) in merged.items():
        at = bisect_left(tensors, key.encode(), key=str.encode)
        if at < len(tensors) and tensors[at] == key:
            holder = next(rank for rank, draft in enumerate(drafts) if key in decode_names(draft.names).keys)
            raise InvalidShards(
                f"{key!r} is a plain value on rank {teller} but a tensor on rank {holder}",
                hint="one key must name one thing; wrap state that differs by rank in sk.PerRank",
                key=key,
            )
    return sorted(((key, data) for key, (data, _) in merged.items()), key=lambda item: item[0].encode())
