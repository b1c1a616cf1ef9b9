"""
Whether a checkpoint is what was saved: by what its record, index and headers say, or by every byte. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from shardkeep.cli.watching import watched
from shardkeep.codec.problems import KeyMissing, WrongKey
from shardkeep.errors import CheckpointError, CheckpointNotFound, DamagedCheckpoint
from shardkeep.format.record import FileEntry
from shardkeep.opening import Checkpoint, verify_stored
from shardkeep.opening import open as open_checkpoint
from shardkeep.options import Options
from shardkeep.run.key_choice import keys_for
from shardkeep.run.read import open_checked
from shardkeep.run.torch_open import TorchSource


@dataclass(frozen=True)
class Verdict:
    """What was found of one checkpoint."""

    problems: list[str] = field(default_factory=list)
    """What is damaged, each with the file, and the bytes and keys where that is known; or that no given key opens it."""
    unknown: str = ""
    """Why it could not be checked: the store failed, which says nothing about the checkpoint."""
    files: int = 0
    nbytes: int = 0
    """That were read and compared with their digests; without `deep`, of files whose size is right."""
    without_digests: int = 0
    """Files of which nobody took digests: their bytes can be read, but not compared with anything."""
    undecoded: int = 0
    """Files that are encrypted, and no key was given: what is stored of them was checked, not what it stands for."""
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Nothing is wrong."""
        return not self.problems and not self.unknown


def check(where: str, *, deep: bool, on_read: Callable[[int], None] = lambda _: None) -> Verdict:
    """Check the checkpoint at a place; `on_read` is told how many bytes were read, from any thread."""
    began = time.perf_counter()
    try:
        verdict = _check(where, deep=deep, on_read=on_read)
    except (DamagedCheckpoint, CheckpointNotFound) as exc:
        return Verdict(problems=list(exc.details.get("problems", ())) or [exc.message])
    except CheckpointError as exc:
        return Verdict(unknown=exc.message)
    return Verdict(
        problems=verdict.problems,
        files=verdict.files,
        nbytes=verdict.nbytes,
        without_digests=verdict.without_digests,
        undecoded=verdict.undecoded,
        seconds=time.perf_counter() - began,
    )


def _check(where: str, *, deep: bool, on_read: Callable[[int], None]) -> Verdict:
    try:
        checkpoint = open_checkpoint(watched(where, on_read) if deep else where)
    except (KeyMissing, WrongKey) as exc:
        problems = _wrong_keys(exc)
        try:
            report = verify_stored(watched(where, on_read), deep=deep)
        except DamagedCheckpoint as damaged:
            return Verdict(problems=[*problems, *(damaged.details.get("problems") or [damaged.message])])
        return Verdict(problems, files=report.files, nbytes=report.bytes_read, undecoded=report.undecoded)
    problems, undecoded = _keys_of_items(checkpoint)
    if deep and not problems:  # which decodes plain values, and says so where no key was given
        report = checkpoint.verify()
        return Verdict(files=report.files, nbytes=report.bytes_read, without_digests=report.without_digests)
    files = checkpoint.record.files
    return Verdict(
        [*problems, *shallow_problems(checkpoint)],
        files=len(files),
        nbytes=sum(nbytes for file in files for _, nbytes in file.at_rest),
        without_digests=sum(not file.block_nbytes for file in files),
        undecoded=undecoded,
    )


def _wrong_keys(exc: KeyMissing | WrongKey) -> list[str]:
    """Say what is wrong with the keys that were given; nothing where none was, as one may check without."""
    if keys_for(Options()) is None:
        return []
    # Whoever is about to throw an old key away asks just this.
    return [f"none of the given keys opens it: {exc.message}" if isinstance(exc, WrongKey) else exc.message]


def _keys_of_items(checkpoint: Checkpoint) -> tuple[list[str], int]:
    """Try the keys on items of torch's layout, which opening does not; also say how many files no key was given for."""
    source = checkpoint.source
    if isinstance(source, TorchSource):
        try:
            source.check_keys()
        except (KeyMissing, WrongKey) as exc:
            return _wrong_keys(exc), len(checkpoint.record.files)
    return [], 0


def shallow_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Go through what is wrong with an opened checkpoint as far as index, sizes and headers tell."""
    source = checkpoint.source
    try:
        source.check_index(np.unique(np.asarray(checkpoint.index.tensors.alias, np.int64)))
    except DamagedCheckpoint as exc:
        yield exc.message
    headers = source.to_verify()[0]

    def look(file: FileEntry) -> str:
        try:
            open_checked(source.store, file, headers)[0].close()
        except DamagedCheckpoint as exc:
            return exc.message
        return ""

    files = checkpoint.record.files
    if files:
        with ThreadPoolExecutor(min(Options().io_threads, len(files))) as pool:
            yield from filter(None, pool.map(look, files))
