"""
Converts and exports checkpoints of any layout, in bounded memory: in one process, or on all ranks of a group.

    convert   open -> select all -> write in windows -> read back and compare -> commit             all of a checkpoint
    export    open -> select names, dtype -> write in windows -> read back and compare -> publish   its weights, to use a model

Files that belong to no checkpoint are left alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap, takewhile
from typing import TYPE_CHECKING, Literal

from shardkeep.codecs.base import WRAPPED
from shardkeep.conversion.pipeline import Progress, WriteArguments, Written, already_there
from shardkeep.conversion.select import Selection, cast_target, select, select_all
from shardkeep.conversion.to_file import write_torch_file
from shardkeep.conversion.to_hf import model_files, names_in, state_metadata, write_model
from shardkeep.conversion.to_native import write_native
from shardkeep.conversion.to_torch import write_torch_layout
from shardkeep.display import OneLine, format_count, format_seconds, format_size
from shardkeep.dist.team import Team, team_of
from shardkeep.engine.codecs import Codecs
from shardkeep.engine.reader import Source
from shardkeep.engine.sources import find
from shardkeep.errors import CheckpointError, CheckpointExists, PickleRefused, StateError, UnsupportedLeaf
from shardkeep.format.record import RECORD_NAME
from shardkeep.format.values import decode_value, part_name, tree_leaves
from shardkeep.layouts import native, orphans
from shardkeep.layouts.safetensors import INDEX_NAME, tie_metadata
from shardkeep.layouts.safetensors_publish import NOTE_NAME, list_model
from shardkeep.layouts.torch import is_data, is_metadata
from shardkeep.options import Options, Size
from shardkeep.state.patterns import Patterns, Renames
from shardkeep.storage.base import Store, local_path, same_place
from shardkeep.storage.resolve import open_store

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from shardkeep.dist.world import World

log = logging.getLogger("shardkeep")

Layout = Literal["native", "dcp", "safetensors"]
LAYOUTS = ("native", "dcp", "safetensors")


@dataclass(frozen=True, kw_only=True, repr=False)
class _Report(OneLine):
    to: str
    tensors: int
    bytes_written: int
    """Of the data files."""
    seconds: float
    left_out: list[str] = field(default_factory=list)
    """
    What the new files cannot hold. For Hugging Face files: plain values. For torch's layout: `step` and `meta` of the commit
    record, and per-rank state: `PerRank of 'rng'` means that `rng` is a plain dict by rank there.
    """
    decrypted: bool = False
    """Whether the checkpoint is encrypted and what was written is not, because no codec that encrypts was given."""

    @property
    def gb_per_s(self) -> float:
        """Bytes written per second; the time includes reading and comparing."""
        return self.bytes_written / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        took = f"{format_size(self.bytes_written)} in {format_seconds(self.seconds)}"
        return f"wrote {self.to}: {format_count(self.tensors, 'tensor')}, {took}"


@dataclass(frozen=True, kw_only=True, repr=False)
class ConvertReport(_Report):
    layout: str
    values: int


@dataclass(frozen=True, kw_only=True, repr=False)
class ExportReport(_Report):
    """What an export wrote; all of it was read back and compared."""

    format: str
    files: list[str]
    ties: dict[str, str] = field(default_factory=dict)
    """Names of tensors that share the memory of another one. Hugging Face files hold only that one, from which a model
    with tied weights sets both."""
    skipped: dict[str, int] = field(default_factory=dict)
    """
    Parts of the checkpoint that are not of the model, such as optimizer state, and the number of tensors in each. What
    `include`, `exclude`, `rename` or a `prefix` left out is not listed.
    """
    infinite: list[str] = field(default_factory=list)
    """Exported names of tensors with finite numbers that became infinite in the new dtype."""


def convert(
    where: str | os.PathLike[str] | Store,
    to: str | os.PathLike[str] | Store,
    layout: Layout = "native",
    *,
    drop: Patterns = None,
    max_shard_bytes: Size = 5e9,
    overwrite: bool = False,
    allow_pickle: bool = False,
    codecs: Codecs = None,
    group: ProcessGroup | World | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """
    Write all of a checkpoint in another layout, or again in its own; in one process, or on all ranks of `group`.

    Tensors, nesting and plain values are kept bit for bit; safetensors files hold the values in the header of the first
    file. In torch's layout the keys of dicts become text, and what ranks saved in a `PerRank` becomes a plain dict by
    rank: the report names it, and `load` fills no `PerRank` from it. Besides plain values, memory use is at most
    `Options.host_budget_bytes`. What is written is read back and compared before it is committed.

    Args:
        where: the checkpoint: native, torch's, safetensors files, or a file of `torch.save`.
        to: where it goes: a path, a URL, or a store.
        layout: "native", "dcp" (torch's), or "safetensors".
        drop: names to leave out, as the checkpoint has them: a name, a dotted prefix, a glob, several, or a callable.
        max_shard_bytes: how large a safetensors file may be ("5GB"), if no tensor is larger alone.
        overwrite: replace a checkpoint of any layout; its files are removed once the new one is committed.
        allow_pickle: also convert pickled values, which "dcp" unpickles. Only for checkpoints you trust.
        codecs: compress or encrypt the files, as in `save`. Only for "native": no other program could read them.
        group: the ranks that make this call with the same arguments and share the work: each writes some of the files, and
            rank 0 publishes them. A failure on any rank is raised on all. None: this process alone, also under torchrun.
        options: threads, memory and keys.
        progress: called with the bytes that this rank has written so far and those it has to write, from any thread.

    Raises:
        CheckpointNotFound: there is no checkpoint at `where`.
        CheckpointExists: a checkpoint is at `to`, and `overwrite` was not given.
        UnsupportedLeaf: the new layout cannot hold a leaf, which the error names.
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
    _check_codecs(codecs, "layout", layout)
    options = options or Options()
    if allow_pickle:
        options = replace(options, allow_pickle=True)
    origin, target = (open_store(each, direct=options.direct_io) for each in (where, to))

    def choose() -> tuple[Source, Selection]:
        check_different_place(origin, target)
        source = find(origin).open(options)
        chosen = select_all(source.index, drop)
        if not options.allow_pickle:
            _refuse_pickles(source, chosen)
        return source, chosen

    call = partial(team_of, group, f"convert {origin.url} to {target.url}", timeout_s=options.timeout_s)
    with call() as team:
        source, chosen = team.alike("open", choose, lambda it: (it[0].record.index.checksum, it[1], layout, overwrite))
    with call(nbytes=source.record.stored_nbytes) as team:
        how = WriteArguments(overwrite, options, progress, team)
        with replacing_other_layouts(target, layout, overwrite=overwrite) if team.leads else nullcontext():
            if layout == "native":
                written = write_native(target, chosen, source, how, codecs=codecs)
            elif layout == "dcp":
                written = write_torch_layout(target, chosen, source, how)
            else:
                metadata = state_metadata(chosen, source)
                written = write_model(
                    target,
                    chosen.tensors,
                    source,
                    how,
                    max_shard_bytes=max_shard_bytes,
                    metadata=metadata,
                    replaces_others=True,
                )
        decrypted = _is_decrypted(team, source, target if codecs else None, options)
    report = ConvertReport(
        to=target.url,
        layout=layout,
        tensors=len(chosen.tensors) + len(chosen.ties),
        values=len(chosen.values),
        bytes_written=written.nbytes,
        seconds=time.perf_counter() - began,
        left_out=list(_not_in_torch_layout(source, chosen)) if layout == "dcp" else [],
        decrypted=decrypted,
    )
    if team.leads:
        _log("converted", origin, report)
    return report


def _refuse_pickles(source: Source, chosen: Selection) -> None:
    index = source.index
    for key in chosen.values:
        try:
            decode_value(index.value_data.raw(index.value_rows[key]), key=key, allow_pickle=False)
        except PickleRefused as exc:
            raise PickleRefused(
                exc.message, hint=f"pass allow_pickle=True if you trust it, or leave it out: drop={key!r}", key=key
            ) from exc
        except UnsupportedLeaf:
            pass  # sound, but this process lacks what it needs to decode it


def _not_in_torch_layout(source: Source, chosen: Selection) -> Iterator[str]:
    if source.record.step is not None:
        yield "step"
    if source.record.meta:
        yield "meta"
    paths = (path for _, path, _ in tree_leaves(chosen.tree) if "ranks" in dict(path))
    above = (takewhile(lambda step: step[0] != "ranks", path) for path in paths)
    yield from dict.fromkeys(f"PerRank of {'.'.join(starmap(part_name, steps))!r}" for steps in above)


def export(
    where: str | os.PathLike[str] | Store,
    to: str | os.PathLike[str] | Store,
    *,
    format: Literal["hf", "torch", "native"] = "hf",  # noqa: A002 - the user's word for it
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: Size = 5e9,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Renames = None,
    prefix: str | None = None,
    config: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    codecs: Codecs = None,
    group: ProcessGroup | World | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """
    Write the model of a checkpoint as a Hugging Face model, as one file for `torch.load`, or as a checkpoint of its own;
    in one process, or on all ranks of `group`. Optimizer state is left out, wherever it stands, unless `prefix` or `include`
    names it.

    Memory use is at most `Options.host_budget_bytes`, however large the checkpoint. What is written is read back and
    compared before it is published. If anything fails, `to` does not change. A store cannot rename files, so a model that
    replaces another there has files of other names, which its index file lists; a file for `torch.load` is replaced in
    one request.

    Args:
        where: the checkpoint: native, torch's, safetensors files, or a file of `torch.save`.
        to: a file for "torch", else a directory; a path or a URL. For "hf" and "native" also a store.
        format: "hf": `model.safetensors`, or several files and `model.safetensors.index.json`. "torch": one file with a
            flat dict, which `torch.load(weights_only=True)` opens. "native": a checkpoint with a flat dict, which `load`
            and `open` read, and the command line.
        dtype: convert floating-point tensors of 16 to 64 bits to this dtype; others are not converted.
        max_shard_bytes: how large a file of "hf" may be ("5GB"), if no tensor is larger alone.
        include: only these names, as the checkpoint has them: a name, a dotted prefix, a glob, several, or a callable.
        exclude: not these names.
        rename: from a name without its prefix to the exported one, as in `load`: a mapping of names or dotted prefixes,
            pairs of regular expression and replacement, or a callable (None drops a name).
        prefix: only names with this prefix, which is removed. None: that of a dict `model`, `state_dict`,
            `model_state_dict` or `module` at the top of the state, or in the only part of it that has one; else no prefix.
        config: a directory, or the URL of a place, with `config.json`: all files in it but weights are copied beside the
            model.
        overwrite: replace what is there: for "native" any checkpoint, for "hf" a model and nothing else.
        codecs: compress or encrypt the files, as in `save`. Only for "native": no other program could read them.
        group: the ranks that make this call with the same arguments and share the work: each writes some of the files, and
            rank 0 publishes them. A failure on any rank is raised on all. None: this process alone, also under torchrun.
        options: threads, memory and keys.
        progress: called with the bytes that this rank has written so far and those it has to write, from any thread.

    Raises:
        CheckpointNotFound: there is no checkpoint at `where`.
        CheckpointExists: something is at `to`, and `overwrite` was not given.
        StateError: no tensor was selected, or an argument is invalid.
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
    _check_codecs(codecs, "format", format)
    options = options or Options()
    origin = open_store(where, direct=options.direct_io)
    target = None if format == "torch" else open_store(to, direct=options.direct_io)
    shown = target.url if target is not None else os.fspath(to) if isinstance(to, os.PathLike) else str(to)

    def open_source() -> tuple[Source, Selection]:
        if target is None and (not isinstance(to, (str, os.PathLike)) or not shown):
            raise CheckpointError(f"{to!r} is no file to write", hint="give the path or the URL of a file")
        source = find(origin).open(options)
        return source, select(
            source.index, include=include, exclude=exclude, rename=rename, prefix=prefix, dtype=cast_target(dtype)
        )

    call = partial(team_of, group, f"export {origin.url} to {shown}", timeout_s=options.timeout_s)
    with call() as team:
        source, chosen = team.alike(
            "open", open_source, lambda it: (it[0].record.index.checksum, it[1], format, overwrite)
        )
    with call(nbytes=source.record.stored_nbytes) as team:
        how = WriteArguments(overwrite, options, progress, team)
        if target is None:  # a single file, which rank 0 writes
            written = team.on_rank_0("write", lambda: write_torch_file(shown, chosen, source, how), Written)
        elif format == "hf":
            written = write_model(
                target,
                chosen.tensors,
                source,
                how,
                max_shard_bytes=max_shard_bytes,
                metadata=tie_metadata(chosen.ties),
                config=None if config is None else os.fspath(config),
            )
        else:
            check_different_place(origin, target)
            with replacing_other_layouts(target, "native", overwrite=overwrite) if team.leads else nullcontext():
                written = write_native(target, chosen, source, how, codecs=codecs)
        decrypted = _is_decrypted(team, source, target if codecs else None, options)
    report = ExportReport(
        to=shown,
        format=format,
        files=written.files,
        tensors=len(chosen.tensors),
        bytes_written=written.nbytes,
        seconds=time.perf_counter() - began,
        ties=chosen.ties,
        skipped=chosen.skipped,
        left_out=list(chosen.values) if format == "hf" else [],
        infinite=sorted(name for name, part in chosen.tensors.items() if part.row in written.infinite),
        decrypted=decrypted,
    )
    if not team.leads:
        return report
    _log("exported", origin, report)
    if report.left_out:
        values, some = format_count(len(report.left_out), "plain value is", "plain values are"), report.left_out[:4]
        log.warning("%s: %s left out, which safetensors files cannot hold: %s", shown, values, ", ".join(some))
    if report.infinite:
        text = "%s: finite numbers of %s are infinite in the new dtype: %s; use one of a wider range"
        log.warning(text, shown, format_count(len(report.infinite), "tensor"), ", ".join(report.infinite[:4]))
    return report


def _check_codecs(codecs: Codecs, argument: str, value: str) -> None:
    if codecs and value != "native":
        raise StateError(
            f"codecs are for {argument}='native': no other program reads what they make of {argument}={value!r}",
            hint=f'give {argument}="native", which shardkeep opens and loads, or leave the codecs out',
        )


def _is_encrypted(source: Source) -> bool:
    return any(WRAPPED in codec for chain in source.record.chains for codec in chain)


def _is_decrypted(team: Team, source: Source, coded: Store | None, options: Options) -> bool:
    if coded is None or not _is_encrypted(source):
        return _is_encrypted(source)
    # Look at what was written: the names of codecs do not say which of them encrypt.
    return team.on_rank_0("look", lambda: not _is_encrypted(find(coded).open(options)), bool)


def _log(done: str, origin: Store, report: _Report) -> None:
    if report.decrypted:
        log.warning("%s: what it was made from is encrypted, this copy is not", report.to)
    log.info("%s %s: %s", done, origin.url, report)


def check_different_place(origin: Store, target: Store) -> None:
    same = same_place(origin, target)
    if local_path(origin) is not None and local_path(target) is not None and os.path.isfile(origin.url):
        same = same or os.path.dirname(os.path.realpath(origin.url)) == os.path.realpath(target.url)
    if same:
        raise CheckpointError(
            f"{target.url}: a checkpoint cannot be converted in its own place", hint="give another place"
        )


@contextmanager
def replacing_other_layouts(store: Store, layout: str, *, overwrite: bool) -> Iterator[None]:
    """Remove checkpoints of other layouts, first what commits them, once the block has written one; if it fails, nothing."""
    to = store.url
    old = _other_layout_files(store, layout)
    if old and not overwrite:
        raise already_there(to, "a checkpoint of another layout", old[0])
    if old and (writer := orphans.survey(store).living):
        raise CheckpointExists(
            f"{to}: another save is writing here (process {writer.pid})", hint="wait for it, or give another place"
        )
    missing = []  # directories that will be made, the innermost first
    path = os.path.abspath(to)
    while local_path(store) is not None and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):  # not empty: another process uses it
                os.rmdir(path)
        raise
    orphans.discard(store, old)


def _other_layout_files(store: Store, layout: str) -> list[str]:
    """Name the files of checkpoints of other layouts in a place, in the order in which to remove them."""
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
