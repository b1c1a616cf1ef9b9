"""Where a call saves to or loads from, opened so that no rank waits for one that cannot."""

from __future__ import annotations

import os

from shardkeep.errors import CheckpointError
from shardkeep.options import Options
from shardkeep.ranks.agree import meet
from shardkeep.ranks.world import World
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store


def opened(where: str | os.PathLike[str] | Store, world: World, options: Options, *, doing: str) -> Store:
    """Open a store; where that fails, all ranks are told."""
    try:
        return open_store(where, direct=options.direct_io)
    except CheckpointError:
        with meet(world, f"{doing} {where!r}"):  # or the others would wait for this rank
            raise
