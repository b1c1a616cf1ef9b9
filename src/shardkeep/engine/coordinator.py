"""
Rank 0's part of a save: what it decides, what it publishes, and what it takes back.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from shardkeep.codecs.keys import KeySource
from shardkeep.engine.codecs import CodecPlan, Codecs, plan_codecs
from shardkeep.engine.rank_plan import data_file_names, merge_rank_trees, merge_rank_values, split_by_rank
from shardkeep.engine.sources import read_record
from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    DamagedCheckpoint,
    PickleRefused,
    StorageError,
    StorageFull,
    UnsupportedVersion,
)
from shardkeep.format.index import Chunks
from shardkeep.format.record import RECORD_NAME, FileEntry, Record, checked_meta, checked_step
from shardkeep.format.tree import decode_tree
from shardkeep.layouts import native
from shardkeep.layouts import orphans as leftovers
from shardkeep.layouts import torch as torch_files
from shardkeep.plan.manifest import decode_manifest, encode
from shardkeep.plan.save_plan import SavePlan, plan_save
from shardkeep.storage.base import Store, Version, free_nbytes, is_sequential

log = logging.getLogger("shardkeep")

_HOW_TO_REPLACE = "pass overwrite=True to replace it, or save to another place"


class CommittedSave(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells all ranks of a checkpoint that is committed."""

    save_id: str
    step: int | None
    bytes_total: int
    tensors: int


class Coordinator:
    """Rank 0's part of a save: what it decides, and what it takes back."""

    def __init__(self, store: Store, *, overwrite: bool, codecs: Codecs = None, keys: KeySource | None = None) -> None:
        self.store = store
        self.overwrite = overwrite
        self.save_id = native.new_save_id()
        self._codecs = codecs
        self._keys = keys
        # Known after `label`.
        self.step: int | None
        self.meta: dict[str, Any]
        # Known after `plan`.
        self.saved: SavePlan
        self.values: list[tuple[str, bytes]]
        self.tree: bytes
        self.begun: CodecPlan
        self._over: Version | None = None
        # Known after `collect`, in the order of the plan's files.
        self.files: list[FileEntry]
        self.committed: Record | None = None
        self._publishing = False
        self._interrupt: KeyboardInterrupt | None = None

    def label(self, step: int | None, meta: Mapping[str, Any] | None) -> None:
        """Take what the caller wants in the record, if a record can hold it."""
        self.step, self.meta = checked_step(step), checked_meta(meta)

    def plan(self, payloads: list[bytes]) -> list[bytes]:
        """Check that the place is free, claim it, and share out the work."""
        self._check_place()
        drafts = [decode_manifest(payload) for payload in payloads]
        self.tree = merge_rank_trees(drafts)
        self.begun = plan_codecs(self._codecs, tree=lambda: decode_tree(self.tree), keys=self._keys)
        self.saved = plan_save(drafts, self.begun.chain_of)
        self.values = merge_rank_values(drafts, self.saved.keys)
        self._check_room()
        leftovers.make_claim(self.store, self.save_id)
        chains = [chain.recorded for chain in self.begun.chains]
        orders = split_by_rank(self.saved, self.save_id, len(drafts), chains=chains, apart=is_sequential(self.store))
        return [encode(each) for each in orders]

    def collect(self, by_rank: list[list[FileEntry]]) -> list[bytes]:
        """Note what all ranks wrote, and insist that it is here."""
        written = {entry.name: entry for entries in by_rank for entry in entries}
        self.files = [written[name] for name in data_file_names(self.saved, self.save_id, len(by_rank))]
        listed = {info.name: info.nbytes for info in self.store.list()}
        for entry, plan in zip(self.files, self.saved.files, strict=True):
            for name, nbytes in entry.at_rest:
                # A network file system may list what was there a while ago; asked for by name it looks again.
                if listed.get(name) != nbytes and self._nbytes(name) != nbytes:
                    raise StorageError(
                        f"{self.store.url}: rank {plan.rank} wrote {name} of {nbytes} bytes, which rank 0 does not find"
                        " there",
                        hint="all ranks must see one file system",
                        name=name,
                    )
        return [b""] * len(by_rank)

    def _nbytes(self, name: str) -> int | None:
        try:
            with contextlib.closing(self.store.open(name)) as blob:
                return blob.nbytes
        except BlobNotFound:
            return None

    def commit(self, payloads: list[bytes]) -> list[bytes]:
        """Publish it."""
        plan, pieces = self.saved, self.saved.pieces_by_tensor()
        self._publishing = True
        record = native.publish(
            self.store,
            save_id=self.save_id,
            keys=plan.keys,
            tensors=plan.tensors,
            chunk_ends=np.searchsorted(pieces.tensor, np.arange(len(plan.keys)), "right"),
            chunks=Chunks(pieces.offsets, pieces.sizes, pieces.file, pieces.start),
            values=self.values,
            tree=self.tree,
            files=self.files,
            tensor_bytes=int(pieces.nbytes.sum()),
            world_size=len(payloads),
            step=self.step,
            meta=self.meta,
            over=self._over,
            chains=self.begun.chains,
            index_chain=self.begun.of_index,
        )
        self._insist_on(record)
        self.committed = record
        totals = record.totals
        outcome = CommittedSave(
            save_id=self.save_id, step=self.step, bytes_total=totals.tensor_bytes, tensors=totals.tensors
        )
        return [encode(outcome)] * len(payloads)

    def _insist_on(self, record: Record) -> None:
        """Look once more whether all of it is there: whoever deletes checkpoints may have taken this place for an old one."""
        names = [RECORD_NAME, *record.names]
        try:
            listed = {info.name for info in self.store.list()}
            gone = [name for name in names if name not in listed and self._nbytes(name) is None]
        except CheckpointError as exc:
            log.warning("could not look once more at what was committed to %s: %s", self.store.url, exc)
            return
        except KeyboardInterrupt as exc:
            # The checkpoint stands, and the other ranks are to be told so; `tidy` comes next.
            self._interrupt = exc
            return
        if not gone:
            return
        # A record of files that are gone is worse than none.
        with contextlib.suppress(CheckpointError):
            if native.read_record(self.store).save_id == self.save_id:
                discard(self.store, [RECORD_NAME])
        self._publishing = False
        raise StorageError(
            f"{self.store.url}: {len(gone)} of the {len(names)} files of this save were deleted by somebody else while it"
            f" was under way: {gone[0]}",
            hint="save it again; let nobody delete checkpoints by hand in a place that a job saves to",
            name=gone[0],
        )

    def withdraw(self) -> None:
        """Remove every file of a save that failed, also those of ranks that died; never raises."""
        claim = native.claim_name(self.save_id)
        try:
            if self._has_committed():
                discard(self.store, [claim])
                return
            mine = [info.name for info in self.store.list() if native.save_id_of(info.name) == self.save_id]
        except CheckpointError as exc:
            log.warning("could not look for the files of a failed save in %s: %s", self.store.url, exc)
            return
        discard(self.store, [*mine, claim])

    def _has_committed(self) -> bool:
        """Tell whether the record is in place: it may be, however the attempt to put it there has ended."""
        if not self._publishing:
            return False
        try:
            return self.committed is not None or native.read_record(self.store).save_id == self.save_id
        except CheckpointNotFound:
            return False

    def tidy(self) -> None:
        """After the commit: remove the claim, what was replaced, and what dead saves left. Failure loses nothing."""
        discard(self.store, [native.claim_name(self.save_id)])
        try:
            # Metadata first: without them, data files of torch's layout mean nothing.
            names = [info.name for info in self.store.list()]
            if replaced := list(filter(torch_files.is_metadata, names)):
                discard(self.store, [*replaced, *filter(torch_files.is_data, names)])
            self._sweep(leftovers.survey(self.store))
        except CheckpointError as exc:
            log.warning("could not remove replaced files in %s: %s", self.store.url, exc)
        if self._interrupt is not None:
            raise self._interrupt

    def _sweep(self, found: leftovers.Survey) -> None:
        """Delete the files of saves that are over, but for those of the committed checkpoint."""
        try:
            names = leftovers.deletable(self.store, found)
        except (DamagedCheckpoint, UnsupportedVersion) as exc:
            log.warning("nothing is removed from %s, in case its commit record can be mended: %s", self.store.url, exc)
            return
        if found.dead:
            leftovers.sweep_uploads(self.store, found)
        discard(self.store, names)

    def _check_room(self) -> None:
        """
        Find out before the first file is made whether all of them fit; what is replaced stays until the commit.

        Nobody knows beforehand what codecs make of them.
        """
        if self.begun.chains:
            return
        wanted = sum(file.data_nbytes for file in self.saved.files) + sum(len(data) for _, data in self.values)
        free = free_nbytes(self.store)
        if free is not None and free < wanted:
            raise StorageFull(
                f"{self.store.url}: the checkpoint takes {wanted:,} bytes, and {free:,} are free there",
                hint="delete checkpoints that are needed no more, or save to another place; nothing was written",
                errno=errno.ENOSPC,
                wanted=wanted,
                free=free,
            )

    def _check_place(self) -> None:
        if self.overwrite:
            # What is replaced is what is there now: a save that commits meanwhile has won, and this one is refused.
            self._over = self.store.version(RECORD_NAME)
        else:
            try:
                read_record(self.store)
            except CheckpointNotFound:
                pass
            except (DamagedCheckpoint, UnsupportedVersion, PickleRefused) as exc:
                raise CheckpointExists(
                    f"{self.store.url}: a checkpoint that cannot be read is already there: {exc.message}",
                    hint=_HOW_TO_REPLACE,
                ) from exc
            else:
                raise CheckpointExists(
                    f"{self.store.url}: a committed checkpoint is already there", hint=_HOW_TO_REPLACE
                )
        found = leftovers.survey(self.store)
        if found.living:
            raise CheckpointExists(
                f"{self.store.url}: another save is writing here (process {found.living.pid})",
                hint="wait for it, or save to another place",
            )
        # Before the first byte, or a job that dies in every save would fill the disk.
        self._sweep(found)


def discard(store: Store, names: list[str]) -> None:
    """Delete files of a save that is not to be; never raises. Claims go last, and stay while anything else does."""
    stays = False
    for name in leftovers.claims_last(names):
        if stays and native.is_claim(name):  # without it nobody would know that the rest is of a dead save
            continue
        try:
            store.delete(name)
        except CheckpointError as exc:
            stays = True
            log.warning("could not remove %s from %s: %s", name, store.url, exc)
