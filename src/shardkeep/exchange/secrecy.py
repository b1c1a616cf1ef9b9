"""Whether what is encrypted stays so where it is copied to."""

from __future__ import annotations

import logging

from shardkeep.codec.codecs import WRAPPED
from shardkeep.options import Options
from shardkeep.run.read import Headers, Source
from shardkeep.run.sources import find
from shardkeep.run.torch_open import TorchSource
from shardkeep.store.protocol import Store

log = logging.getLogger("shardkeep")


def is_secret(source: Source) -> bool:
    """Say whether anything of a checkpoint is encrypted."""
    if isinstance(source, TorchSource):
        return source.is_secret
    return any(WRAPPED in codec for chain in source.record.chains for codec in chain)


def came_out(source: Source, to: str, coded: Store | None, options: Options) -> bool:
    """
    Say whether a checkpoint is encrypted and nothing of its copy is, and warn of that.

    Args:
        source: the checkpoint.
        to: where the copy is, to be shown.
        coded: the copy, if it went through codecs.
        options: memory and keys.

    """
    if not is_secret(source):
        return False
    # By what was written, and not by the names of codecs: which of them encrypt only they know.
    if coded is not None and is_secret(find(coded).open(options, Headers())):
        return False
    log.warning("%s: what it was made from is encrypted, this copy is not", to)
    return True
