"""
Export: the weights of a checkpoint of any layout, for those who only use the model.

    pick (names, dtype) -> write in windows beside what is there -> read back and compare -> publish
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from shardkeep.errors import CheckpointError, StateError
from shardkeep.exchange.models import write_model
from shardkeep.exchange.picked_index import contents_of
from shardkeep.exchange.picking import Picked, dtype_of, pick
from shardkeep.exchange.replacing import check_apart, replacing
from shardkeep.exchange.secrecy import came_out
from shardkeep.exchange.streams import Progress
from shardkeep.exchange.to_native import write_native
from shardkeep.exchange.torch_file import write_torch_file
from shardkeep.layout.safetensors_names import CUSTOM_METADATA_KEY, FILE_COUNT_KEY, FORMAT_KEY, SAVE_ID_KEY
from shardkeep.layout.safetensors_state import STATE_KEY
from shardkeep.options import Options
from shardkeep.run.coding import Codecs
from shardkeep.run.read import Headers
from shardkeep.run.sources import find
from shardkeep.state.names import Patterns, Renames
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store

if TYPE_CHECKING:
    import torch

log = logging.getLogger("shardkeep")


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
    source = find(origin).open(options, Headers())
    picked = pick(source.index, include=include, exclude=exclude, rename=rename, prefix=prefix, dtype=dtype_of(dtype))
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
        check_apart(origin, target)
        with replacing(target, "native", overwrite=overwrite):
            made = write_native(
                target,
                source,
                contents_of(picked, source.index),
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
        decrypted=came_out(source, shown, target if codecs else None, options),
    )
    _tell(report)
    return report


def _path(to: str | os.PathLike[str] | Store) -> str:
    """Return the path or URL of a file."""
    path = os.fspath(to) if isinstance(to, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise CheckpointError(f"{to!r} is no file to write", hint="give the path or the URL of a file")
    return path


def _metadata(picked: Picked) -> dict[str, str]:
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
