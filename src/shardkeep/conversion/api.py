"""
Convert: all of a checkpoint, from the layout it has to another one, in one process and bounded memory.

    open -> leave out what is to be dropped -> write in windows -> read back and compare -> commit
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from shardkeep.codecs.base import WRAPPED
from shardkeep.conversion.pipeline import Progress
from shardkeep.conversion.select import Selection, cast_target, drop_leaves, select, selection_contents
from shardkeep.conversion.to_file import write_torch_file
from shardkeep.conversion.to_hf import model_files, names_in, write_model, write_safetensors
from shardkeep.conversion.to_native import Contents, write_native
from shardkeep.conversion.to_torch import write_torch_layout
from shardkeep.engine.codecs import Codecs
from shardkeep.engine.reader import DigestCache, Source
from shardkeep.engine.sources import find
from shardkeep.errors import CheckpointError, CheckpointExists, PickleRefused, StateError, UnsupportedLeaf
from shardkeep.format.record import RECORD_NAME
from shardkeep.format.tree import Node, decode_tree, join
from shardkeep.format.values import decode_value
from shardkeep.layouts import native
from shardkeep.layouts import orphans as leftovers
from shardkeep.layouts.safetensors import (
    CUSTOM_METADATA_KEY,
    FILE_COUNT_KEY,
    FORMAT_KEY,
    INDEX_NAME,
    SAVE_ID_KEY,
    STATE_KEY,
)
from shardkeep.layouts.safetensors_publish import NOTE_NAME, list_model
from shardkeep.layouts.torch import is_data, is_metadata
from shardkeep.options import Options
from shardkeep.state.patterns import Patterns, Renames
from shardkeep.storage.base import Store, local_path, same_place
from shardkeep.storage.resolve import open_store

if TYPE_CHECKING:
    import torch


# Whether what is encrypted stays so where it is copied to.

log = logging.getLogger("shardkeep")


def is_encrypted(source: Source) -> bool:
    """Say whether anything of a checkpoint is encrypted."""
    return any(WRAPPED in codec for chain in source.record.chains for codec in chain)


def warn_if_decrypted(source: Source, to: str, coded: Store | None, options: Options) -> bool:
    """
    Say whether a checkpoint is encrypted and nothing of its copy is, and warn of that.

    Args:
        source: the checkpoint.
        to: where the copy is, to be shown.
        coded: the copy, if it went through codecs.
        options: memory and keys.

    """
    if not is_encrypted(source):
        return False
    # By what was written, and not by the names of codecs: which of them encrypt only they know.
    if coded is not None and is_encrypted(find(coded).open(options, DigestCache())):
        return False
    log.warning("%s: what it was made from is encrypted, this copy is not", to)
    return True


# What a conversion takes the place of, where a checkpoint of another layout is.
#
# What was there stays whole until the new checkpoint is committed. Then it goes: first what says that it exists, then
# its
# files. Files that are of no checkpoint are left alone.


def check_different_place(origin: Store, target: Store) -> None:
    """
    Refuse to write a checkpoint into the place that it is read from.

    Raises:
        CheckpointError: both are one place.

    """
    same = same_place(origin, target)
    if local_path(origin) is not None and local_path(target) is not None and os.path.isfile(origin.url):
        same = same or os.path.dirname(os.path.realpath(origin.url)) == os.path.realpath(target.url)
    if same:
        raise CheckpointError(
            f"{target.url}: a checkpoint cannot be converted in its own place", hint="give another place"
        )


def other_layout_files(store: Store, layout: str) -> list[str]:
    """Name the files of checkpoints of other layouts in a place, in the order in which they are to go."""
    names = names_in(store)
    found: list[str] = []
    if layout != "native" and RECORD_NAME in names:
        found += [RECORD_NAME, *(name for name in names if native.save_id_of(name))]
    metadata = list(filter(is_metadata, names))
    if layout != "dcp" and metadata:
        found += [*metadata, *filter(is_data, names)]
    if layout != "safetensors":
        found += [name for name in names if name in (INDEX_NAME, NOTE_NAME)]
        found += [name for name in model_files(list_model(store)) if native.save_id_of(name) is None] if names else []
    return found


@contextmanager
def replacing_other_layouts(store: Store, layout: str, *, overwrite: bool) -> Iterator[None]:
    """
    Convert into a place, inside; afterwards checkpoints of other layouts that it held are gone.

    If that fails, they are as they were, and directories that were made for it are gone.

    Raises:
        CheckpointExists: there is one, and `overwrite` was not given; or somebody is saving there.

    """
    to = store.url
    old = other_layout_files(store, layout)
    if old and not overwrite:
        raise CheckpointExists(
            f"{to}: a checkpoint of another layout is already there ({old[0]})",
            hint="pass overwrite=True (--overwrite) to replace it, or give another place",
        )
    made = _missing(to) if local_path(store) is not None else []
    if old and (writer := leftovers.survey(store).living):
        raise CheckpointExists(
            f"{to}: another save is writing here (process {writer.pid})", hint="wait for it, or give another place"
        )
    try:
        yield
    except BaseException:
        for path in made:
            with suppress(OSError):  # not empty: somebody else's
                os.rmdir(path)
        raise
    for name in old:
        try:
            store.delete(name)
        except CheckpointError as exc:
            log.warning("could not remove %s, which was replaced, from %s: %s", name, to, exc)


def _missing(to: str) -> list[str]:
    """Return the directories that will be made, the innermost first."""
    found = []
    path = os.path.abspath(to)
    while not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


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
        codecs: what the files go through, as for `save`: for "native" only, as no other program could read them.
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
    if codecs and layout != "native":
        raise StateError(
            f"codecs are for layout='native': no other program reads what they make of layout={layout!r}",
            hint='give layout="native", or leave the codecs out',
        )
    options = options or Options()
    if allow_pickle:
        options = replace(options, allow_pickle=True)
    origin = open_store(where, direct=options.direct_io)
    target = open_store(to, direct=options.direct_io)
    check_different_place(origin, target)
    source = drop_leaves(find(origin).open(options, DigestCache()), drop)
    if not options.allow_pickle:
        _refuse_pickles(source)
    with replacing_other_layouts(target, layout, overwrite=overwrite):
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
            nbytes = write_torch_layout(target, source, overwrite=overwrite, options=options, progress=progress)
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
        decrypted=warn_if_decrypted(source, target.url, target if codecs else None, options),
    )
    log.info("converted %s to %s: %.3f GB in %.2f s", origin.url, report.to, nbytes / 1e9, report.seconds)
    return report


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


# Export: the weights of a checkpoint of any layout, for those who only use the model.
#
#     pick (names, dtype) -> write in windows beside what is there -> read back and compare -> publish


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export wrote, all of it read back and found to be what was meant."""

    to: str
    format: str
    files: list[str]
    tensors: int
    bytes_written: int
    seconds: float
    ties: dict[str, str] = field(default_factory=dict)
    """Names of tensors that are the same memory as another one. Hugging Face files hold that one alone: a model that
    ties its weights finds both."""
    left_out: list[str] = field(default_factory=list)
    """Plain values, which Hugging Face files cannot hold."""
    infinite: list[str] = field(default_factory=list)
    """Tensors, by their names outside, of which finite numbers are infinite in the new dtype."""
    decrypted: bool = False
    """Whether the checkpoint is encrypted, and nothing of what was written is."""

    @property
    def gb_per_s(self) -> float:
        """What was written over the time it took, reading and comparing included."""
        return self.bytes_written / max(self.seconds, 1e-9) / 1e9


def export(
    where: str | os.PathLike[str] | Store,
    to: str | os.PathLike[str] | Store,
    *,
    format: Literal["hf", "torch", "native"] = "hf",  # noqa: A002 - the user's word for it
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: float = 5e9,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Renames = None,
    prefix: str | None = None,
    config: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    codecs: Codecs = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """
    Write the tensors of a checkpoint as a Hugging Face model, as one file for `torch.load`, or as a checkpoint of their
    own; in one process.

    Memory is `Options.host_budget_bytes` at most, however large the checkpoint. What is written is read back and
    compared before it counts. If anything fails, what was at `to` is still there, and nothing else is. In a store, where
    nothing can be renamed, a model that replaces another has files of other names, which its index file tells; a file
    for `torch.load` is replaced in one request, in which an object store puts its parts together.

    Args:
        where: the checkpoint: native, torch's, or safetensors files.
        to: a file for "torch", else a directory; a path or a URL. For "hf" and "native" also a store.
        format: "hf": `model.safetensors`, or several files and `model.safetensors.index.json`. "torch": one file with a
            flat dict, which `torch.load(weights_only=True)` opens. "native": a checkpoint with a flat dict, which `load`
            and `open` read, and the command line.
        dtype: what floating point numbers of 16 to 64 bits become; others stay what they are.
        max_shard_bytes: how large a file of "hf" may be, if no tensor is larger alone.
        include: only these names, as the checkpoint has them: a name, a dotted prefix, a glob, several, or a callable.
        exclude: not these.
        rename: from a name without its prefix to the one outside, as in `load`: a mapping of names or dotted prefixes,
            pairs of regular expression and replacement, or a callable (None drops a name).
        prefix: only names that begin so, and without it. None: `model.` where the state has a dict `model` at its top,
            else nothing.
        config: a directory, or the URL of a place, with `config.json`: all files in it but weights are copied beside the
            model.
        overwrite: replace what is there: for "native" any checkpoint, for "hf" a model and nothing else.
        codecs: what the files go through, as for `save`: compressed, encrypted. For "native" only: no other program could
            read what they make of the files of "hf" and "torch".
        options: threads, memory and keys.
        progress: called with the bytes written so far and those to write, from any thread.

    Raises:
        CheckpointNotFound: there is no checkpoint at `where`.
        CheckpointExists: something is at `to`, and `overwrite` was not given.
        StateError: nothing was picked, or an argument makes no sense.
        DamagedCheckpoint: what is stored is not what was saved.
        StorageError: the files cannot be written.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> root = tempfile.mkdtemp()
        >>> _ = sk.save({"model": {"w": torch.ones(4, 4)}, "step": 1}, root + "/step-1")
        >>> sk.export(root + "/step-1", root + "/hf", dtype="bf16").files
        ['model.safetensors']

    """
    began = time.perf_counter()
    if format not in ("hf", "torch", "native"):
        raise StateError(f"format={format!r}", hint='give "hf", "torch" or "native"')
    if format != "hf" and config is not None:
        raise StateError(f"config is for format='hf': format={format!r} holds no configuration")
    if codecs and format != "native":
        raise StateError(
            f"codecs are for format='native': no other program reads what they make of format={format!r}",
            hint='give format="native", which shardkeep opens and loads, or leave the codecs out',
        )
    options = options or Options()
    origin = open_store(where, direct=options.direct_io)
    source = find(origin).open(options, DigestCache())
    picked = select(
        source.index, include=include, exclude=exclude, rename=rename, prefix=prefix, dtype=cast_target(dtype)
    )
    if format == "hf":
        target = open_store(to, direct=options.direct_io)
        shown = target.url
        written = write_model(
            target,
            picked.tensors,
            source,
            max_shard_bytes=max_shard_bytes,
            metadata=_metadata(picked),
            config=None if config is None else os.fspath(config),
            overwrite=overwrite,
            options=options,
            progress=progress,
        )
        files, nbytes, infinite, left_out = written.files, written.nbytes, written.infinite, list(picked.values)
    elif format == "native":
        target = open_store(to, direct=options.direct_io)
        shown, left_out = target.url, []
        check_different_place(origin, target)
        with replacing_other_layouts(target, "native", overwrite=overwrite):
            made = write_native(
                target,
                source,
                selection_contents(picked, source.index),
                overwrite=overwrite,
                codecs=codecs,
                options=options,
                progress=progress,
            )
        files, nbytes = made.files, made.nbytes
        infinite = {picked.tensors[name].key for name in made.infinite}
    else:
        shown = _path(to)
        nbytes, infinite = write_torch_file(
            shown, picked, source, overwrite=overwrite, options=options, progress=progress
        )
        files, left_out = [os.path.basename(shown)], []
    report = ExportReport(
        to=shown,
        format=format,
        files=files,
        tensors=len(picked.tensors),
        bytes_written=nbytes,
        seconds=time.perf_counter() - began,
        ties=picked.ties,
        left_out=left_out,
        infinite=sorted(name for name, part in picked.tensors.items() if part.key in infinite),
        decrypted=warn_if_decrypted(source, shown, target if codecs else None, options),
    )
    _tell(report)
    return report


def _path(to: str | os.PathLike[str] | Store) -> str:
    """Return the path or URL of a file."""
    path = os.fspath(to) if isinstance(to, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise CheckpointError(f"{to!r} is no file to write", hint="give the path or the URL of a file")
    return path


def _metadata(picked: Selection) -> dict[str, str]:
    """Say which names are tied, as the safetensors library does; what readers look for means what it means to them."""
    reserved = {FORMAT_KEY, CUSTOM_METADATA_KEY, SAVE_ID_KEY, FILE_COUNT_KEY, STATE_KEY}
    return {name: owner for name, owner in picked.ties.items() if name not in reserved}


def _tell(report: ExportReport) -> None:
    log.info(
        "exported %s: %d tensors, %.3f GB in %.2f s",
        report.to,
        report.tensors,
        report.bytes_written / 1e9,
        report.seconds,
    )
    if report.left_out:
        log.warning(
            "%s: %d plain values are left out, which safetensors files cannot hold: %s",
            report.to, len(report.left_out), ", ".join(report.left_out[:4]),
        )  # fmt: skip
    if report.infinite:
        log.warning(
            "%s: finite numbers of %d tensors are infinite in the new dtype: %s; use one of a wider range",
            report.to, len(report.infinite), ", ".join(report.infinite[:4]),
        )  # fmt: skip
