"""
Convert: all of a checkpoint, from the layout it has to another one, in one process and bounded memory.

    open -> leave out what is to be dropped -> write in windows -> read back and compare -> commit
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from shardkeep.codec.codecs import CodecConfig
from shardkeep.errors import PickleRefused, StateError, UnsupportedLeaf
from shardkeep.exchange.pruning import without
from shardkeep.exchange.replacing import check_apart, replacing
from shardkeep.exchange.secrecy import came_out
from shardkeep.exchange.streams import Progress
from shardkeep.exchange.to_native import Contents, write_native
from shardkeep.exchange.to_safetensors import write_safetensors
from shardkeep.exchange.to_torch_layout import write_torch_layout
from shardkeep.format.tree import Node, decode_tree, join
from shardkeep.format.values import decode_value
from shardkeep.options import Options
from shardkeep.run.coding import Codecs
from shardkeep.run.read import Headers, Source
from shardkeep.run.sources import find
from shardkeep.state.names import Patterns
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store

log = logging.getLogger("shardkeep")

Layout = Literal["native", "dcp", "safetensors"]
LAYOUTS = ("native", "dcp", "safetensors")


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """What a conversion wrote, all of it read back and found to be what was meant."""

    to: str
    layout: str
    tensors: int
    values: int
    bytes_written: int
    """Of the data files."""
    seconds: float
    left_out: list[str] = field(default_factory=list)
    """
    What the new layout has no place for. Torch's has none for `step` and `meta` of the commit record, nor for what each
    rank saved as its own: `PerRank of 'rng'` says that `rng` is a plain dict there, by rank, which no `PerRank` loads.
    """
    decrypted: bool = False
    """Whether what was converted is encrypted, and nothing of what was written is: no codec that encrypts was given."""

    @property
    def gb_per_s(self) -> float:
        """What was written over the time it took, reading and comparing included."""
        return self.bytes_written / max(self.seconds, 1e-9) / 1e9


def convert(
    where: str | os.PathLike[str] | Store,
    to: str | os.PathLike[str] | Store,
    layout: Layout = "native",
    *,
    drop: Patterns = None,
    max_shard_bytes: float = 5e9,
    overwrite: bool = False,
    allow_pickle: bool = False,
    codecs: Codecs = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """
    Write all of a checkpoint in another layout, or anew in its own; in one process.

    Tensors come out bit for bit, nesting and plain values as they were; for safetensors files these are kept in the
    header of the first one. In torch's layout the keys of dicts are text, and what ranks saved in a `PerRank` is a plain
    dict by rank: the report names it, and a job that wants it as a `PerRank` needs one of the other layouts. Memory is `Options.host_budget_bytes` at most, besides plain values. What is written is
    read back and compared before it is committed.

    Args:
        where: the checkpoint: native, torch's, or safetensors files.
        to: where it goes: a path, a URL, or a store.
        layout: "native", "dcp" (torch's), or "safetensors".
        drop: names to leave out, as the checkpoint has them: a name, a dotted prefix, a glob, several, or a callable.
        max_shard_bytes: how large a safetensors file may be, if no tensor is larger alone.
        overwrite: replace a checkpoint that is there, of whichever layout: its files go once the new one is committed.
        allow_pickle: convert values that are pickled, too. For "dcp" they are unpickled. Only for checkpoints you trust.
        codecs: what the files go through, as for `save`. In "dcp" each item does, for all alike: `open`, `load` and
            `shardkeep.dcp` read them, which takes its keys from the environment; torch does not. Not for "safetensors".
        options: threads, memory and keys.
        progress: called with the bytes written so far and those to write, from any thread.

    Raises:
        CheckpointNotFound: there is no checkpoint at `where`.
        CheckpointExists: one is at `to`, and `overwrite` was not given.
        UnsupportedLeaf: the new layout cannot hold a leaf; names it.
        PickleRefused: a value is pickled, and `allow_pickle` was not given.
        DamagedCheckpoint: what is stored is not what was saved.
        StorageError: the files cannot be written.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> root = tempfile.mkdtemp()
        >>> _ = sk.save({"model": {"w": torch.ones(4, 4)}, "step": 1}, root + "/a")
        >>> sk.convert(root + "/a", root + "/b", "safetensors").tensors
        1
        >>> sk.open(root + "/b")["step"]
        1

    """
    began = time.perf_counter()
    if layout not in LAYOUTS:
        raise StateError(f"layout={layout!r}", hint=f"give one of {', '.join(LAYOUTS)}")
    of_all = _for_all(codecs) if layout == "dcp" else None
    if codecs and layout == "safetensors":
        raise StateError(
            "codecs are for layout='native' and 'dcp': no other program reads what they make of safetensors files",
            hint='give layout="native", or leave the codecs out',
        )
    options = options or Options()
    if allow_pickle:
        options = replace(options, allow_pickle=True)
    origin = open_store(where, direct=options.direct_io)
    target = open_store(to, direct=options.direct_io)
    check_apart(origin, target)
    source = without(find(origin).open(options, Headers()), drop)
    if not options.allow_pickle:
        _refuse_pickles(source)
    with replacing(target, layout, overwrite=overwrite):
        if layout == "native":
            nbytes = write_native(
                target,
                source,
                Contents.all_of(source),
                overwrite=overwrite,
                codecs=codecs,
                options=options,
                progress=progress,
            ).nbytes
        elif layout == "dcp":
            nbytes = write_torch_layout(
                target, source, overwrite=overwrite, codecs=of_all, options=options, progress=progress
            )
        else:
            nbytes = write_safetensors(
                target,
                source,
                max_shard_bytes=max_shard_bytes,
                overwrite=overwrite,
                options=options,
                progress=progress,
            )
    report = ConvertReport(
        to=target.url,
        layout=layout,
        tensors=len(source.index.keys),
        values=len(source.index.value_keys),
        bytes_written=nbytes,
        seconds=time.perf_counter() - began,
        left_out=list(_without_place(source)) if layout == "dcp" else [],
        decrypted=came_out(source, target.url, target if codecs else None, options),
    )
    log.info("converted %s to %s: %.3f GB in %.2f s", origin.url, report.to, nbytes / 1e9, report.seconds)
    return report


def _for_all(codecs: Codecs) -> Sequence[str | CodecConfig] | None:
    """Return codecs that are the same for all of the state."""
    if not codecs:
        return None
    if isinstance(codecs, Mapping):
        raise StateError(
            "codecs by part of the state are for layout='native'",
            hint='give a list of codecs for layout="dcp"',
        )
    return codecs


def _refuse_pickles(source: Source) -> None:
    index = source.index
    for key, row in index.value_rows.items():
        try:
            decode_value(index.value_data.raw(row), key=key, allow_pickle=False)
        except PickleRefused as exc:
            raise PickleRefused(
                exc.message, hint=f"pass allow_pickle=True if you trust it, or leave it out: drop={key!r}", key=key
            ) from exc
        except UnsupportedLeaf:
            pass  # sound, only not to be rebuilt here


def _without_place(source: Source) -> Iterator[str]:
    """Name what torch's layout cannot hold."""
    if source.record.step is not None:
        yield "step"
    if source.record.meta:
        yield "meta"
    yield from (f"PerRank of {name!r}" for name in _per_rank(decode_tree(source.index.tree), None))


def _per_rank(node: Node, name: str | None) -> Iterator[str]:
    """Name what each rank saved as its own."""
    if node is None:
        return
    if node.kind == "ranks":
        yield name or ""
        return
    for part, child in node.children:
        yield from _per_rank(child, join(name, node.kind, part))
