"""
Rank 0's part of a save: it plans the files of all ranks, checks that they were written, publishes them, and cleans up.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from shardkeep import errors
from shardkeep.codecs.keys import KeySource
from shardkeep.engine.codecs import CodecPlan, Codecs, plan_codecs
from shardkeep.format.data_file import block_nbytes_for
from shardkeep.format.index import Chunks, Index, strings_of
from shardkeep.format.record import RECORD_NAME, FileEntry, Record, Recorded
from shardkeep.format.values import decode_tree
from shardkeep.layouts import native, orphans
from shardkeep.layouts import torch as torch_files
from shardkeep.plan import save_plan
from shardkeep.storage.base import Store, Version, free_nbytes, is_sequential

log = logging.getLogger("shardkeep")


_HOW_TO_REPLACE = "pass overwrite=True to replace it, or save to another place"


class CommittedSave(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 sends to all ranks about a committed checkpoint."""

    save_id: str
    step: int | None
    bytes_total: int
    tensors: int


Labels = tuple[int | None, dict[str, Any]]
"""The step and the user's own values, as they go into the commit record."""


@dataclass(frozen=True)
class PlannedSave:
    """What rank 0 has planned."""

    plan: save_plan.CheckpointPlan
    by_rank: list[save_plan.RankWritePlan]
    values: list[tuple[str, bytes]]
    tree: bytes
    codecs: CodecPlan
    replaces: Version | None
    """The version of the commit record that this save replaces."""


def index_of(plan: save_plan.CheckpointPlan, values: list[tuple[str, bytes]], tree: bytes) -> Index:
    """Return the index of a planned checkpoint."""
    pieces = plan.pieces_by_tensor()
    return Index(
        keys=strings_of(key.encode() for key in plan.keys),
        tensors=plan.tensors,
        chunk_ends=np.searchsorted(pieces.tensor, np.arange(len(plan.keys)), "right"),
        chunks=Chunks(pieces.offsets, pieces.sizes, pieces.file, pieces.start),
        value_keys=strings_of(key.encode() for key, _ in values),
        value_data=strings_of(data for _, data in values),
        make_tree=lambda: tree,
    )


class Coordinator:
    """Plans, checks, commits and cleans up one save: `plan`, `collect`, `commit`, `tidy`, in this order; or `withdraw`."""

    def __init__(self, store: Store, *, overwrite: bool, codecs: Codecs = None, keys: KeySource | None = None) -> None:
        self.store = store
        self.save_id = native.new_save_id()
        self._overwrite = overwrite
        self._codecs = codecs
        self._keys = keys
        self._publishing = False
        self._committed = False
        self._interrupt: KeyboardInterrupt | None = None

    def plan(self, payloads: list[bytes]) -> PlannedSave:
        """Check that the place is free, claim it, and plan the save from the manifests of all ranks."""
        replaces = self._check_place()
        manifests = [msgspec.msgpack.decode(payload, type=save_plan.RankManifest) for payload in payloads]
        tree = save_plan.merge_rank_trees(manifests)
        codecs = plan_codecs(self._codecs, tree=lambda: decode_tree(tree), keys=self._keys)
        plan = save_plan.plan_save(manifests, codecs.chain_of)
        values = save_plan.merge_rank_values(manifests, plan.keys)
        wanted, free = sum(file.data_nbytes for file in plan.files), free_nbytes(self.store)
        wanted += sum(len(data) for _, data in values)
        # Files that are replaced stay until the commit. The size of coded files is not known beforehand.
        if not codecs.chains and free is not None and free < wanted:
            raise errors.StorageFull(
                f"{self.store.url}: the checkpoint takes {wanted:,} bytes, and {free:,} are free there",
                hint="delete checkpoints you no longer need, or save to another place; nothing was written",
                errno=errno.ENOSPC,
                wanted=wanted,
                free=free,
            )
        orphans.make_claim(self.store, self.save_id)
        recorded = [chain.recorded for chain in codecs.chains]
        sidecar = is_sequential(self.store)
        by_rank = split_by_rank(plan, self.save_id, len(manifests), chains=recorded, sidecar=sidecar)
        return PlannedSave(plan, by_rank, values, tree, codecs, replaces)

    def collect(self, planned: PlannedSave, by_rank: list[list[FileEntry]]) -> list[FileEntry]:
        """Return the files that all ranks wrote, in the order of the plan; all of them must be in the store."""
        written = {entry.name: entry for entries in by_rank for entry in entries}
        files = [written[name] for name in data_file_names(planned.plan, self.save_id, len(by_rank))]
        listed = {info.name: info.nbytes for info in self.store.list()}
        for entry, file in zip(files, planned.plan.files, strict=True):
            for name, nbytes in entry.at_rest:
                # A network file system may list an old state; a request for one name is answered anew.
                if listed.get(name) != nbytes and self._nbytes(name) != nbytes:
                    raise errors.StorageError(
                        f"{self.store.url}: rank {file.rank} wrote {name} of {nbytes} bytes, but rank 0 does not find it",
                        hint="all ranks must see one file system",
                        name=name,
                    )
        return files

    def _nbytes(self, name: str) -> int | None:
        try:
            with contextlib.closing(self.store.open(name)) as blob:
                return blob.nbytes
        except errors.BlobNotFound:
            return None

    def commit(self, planned: PlannedSave, files: list[FileEntry], labels: Labels) -> CommittedSave:
        """Publish the checkpoint."""
        step, meta = labels
        self._publishing = True
        record = native.publish(
            self.store,
            index_of(planned.plan, planned.values, planned.tree),
            save_id=self.save_id,
            files=files,
            tensor_bytes=int(planned.plan.pieces.nbytes.sum()),
            world_size=len(planned.by_rank),
            step=step,
            meta=meta,
            over=planned.replaces,
            chains=planned.codecs.chains,
            index_chain=planned.codecs.of_index,
        )
        self._check_all_present(record)
        self._committed = True
        totals = record.totals
        return CommittedSave(save_id=self.save_id, step=step, bytes_total=totals.tensor_bytes, tensors=totals.tensors)

    def _check_all_present(self, record: Record) -> None:
        """Look once more for all files: a job that prunes may have taken this place for an old checkpoint meanwhile."""
        names = [RECORD_NAME, *record.names]
        try:
            listed = {info.name for info in self.store.list()}
            gone = [name for name in names if name not in listed and self._nbytes(name) is None]
        except errors.CheckpointError as exc:
            log.warning("could not check the committed files in %s once more: %s", self.store.url, exc)
            return
        except KeyboardInterrupt as exc:
            # The checkpoint is committed, and the other ranks must learn that; `tidy`, which comes next, raises it.
            self._interrupt = exc
            return
        if not gone:
            return
        with contextlib.suppress(errors.CheckpointError):
            if native.read_record(self.store).save_id == self.save_id:
                orphans.discard(self.store, [RECORD_NAME])
        self._publishing = False
        raise errors.StorageError(
            f"{self.store.url}: {len(gone)} of the {len(names)} files of this save were deleted by another process while"
            f" it was writing: {gone[0]}",
            hint="save again, and do not delete checkpoints by hand in a place that a job saves to",
            name=gone[0],
        )

    def withdraw(self) -> None:
        """Remove every file of a save that failed, including those of ranks that died. Never raises."""
        claim = native.claim_name(self.save_id)
        try:
            committed = self._committed
            if self._publishing and not committed:
                # The record may be in place, even if the attempt to put it there has raised.
                with contextlib.suppress(errors.CheckpointNotFound):
                    committed = native.read_record(self.store).save_id == self.save_id
            if committed:
                orphans.discard(self.store, [claim])
                return
            mine = [info.name for info in self.store.list() if native.save_id_of(info.name) == self.save_id]
        except errors.CheckpointError as exc:
            log.warning("could not look for the files of a failed save in %s: %s", self.store.url, exc)
            return
        orphans.discard(self.store, [*mine, claim])

    def tidy(self) -> None:
        """After the commit, remove the claim, the files that were replaced, and orphans. A failure here loses nothing."""
        orphans.discard(self.store, [native.claim_name(self.save_id)])
        try:
            # Metadata first: without them, data files of torch's layout mean nothing.
            names = [info.name for info in self.store.list()]
            if replaced := list(filter(torch_files.is_metadata, names)):
                orphans.discard(self.store, [*replaced, *filter(torch_files.is_data, names)])
            orphans.sweep(self.store, orphans.survey(self.store))
        except errors.CheckpointError as exc:
            log.warning("could not remove replaced files in %s: %s", self.store.url, exc)
        if self._interrupt is not None:
            raise self._interrupt

    def _check_no_checkpoint(self) -> None:
        try:
            try:
                native.record_in(self.store)
            except errors.BlobNotFound:
                if self._nbytes(torch_files.METADATA_NAME) is None:
                    return
                with contextlib.suppress(errors.PickleRefused):
                    data = self.store.get(torch_files.METADATA_NAME, limit=torch_files.MAX_METADATA_NBYTES)
                    torch_files.decode_torch_metadata(data, where=torch_files.METADATA_NAME)
        except (errors.DamagedCheckpoint, errors.UnsupportedVersion) as exc:
            raise errors.CheckpointExists(
                f"{self.store.url}: a checkpoint that cannot be read is already there: {exc.message}",
                hint=_HOW_TO_REPLACE,
            ) from exc
        raise errors.CheckpointExists(
            f"{self.store.url}: a committed checkpoint is already there", hint=_HOW_TO_REPLACE
        )

    def _check_place(self) -> Version | None:
        """Check that this save may write here; return the version of the record that it replaces."""
        replaces: Version | None = None
        if self._overwrite:
            # Only what is there now may be replaced: if another save commits meanwhile, this one fails.
            replaces = self.store.version(RECORD_NAME)
        else:
            self._check_no_checkpoint()
        found = orphans.survey(self.store)
        if found.living:
            raise errors.CheckpointExists(
                f"{self.store.url}: another save is writing here (process {found.living.pid})",
                hint="wait for it, or save to another place",
            )
        # Before the first byte, or a job that dies in every save would fill the disk.
        orphans.sweep(self.store, found)
        return replaces


def data_file_names(plan: save_plan.CheckpointPlan, save_id: str, world_size: int) -> list[str]:
    """Return the names of all data files of a save."""
    return [
        native.data_name(file.group, file.rank, world_size, save_id, part=file.part, coded=file.chain is not None)
        for file in plan.files
    ]


def split_by_rank(
    plan: save_plan.CheckpointPlan,
    save_id: str,
    world_size: int,
    *,
    chains: Sequence[Recorded] = (),
    sidecar: bool = False,
) -> list[save_plan.RankWritePlan]:
    """Divide the plan, which is sorted by file and so by rank, into each rank's part."""
    names = data_file_names(plan, save_id, world_size)
    ranks = np.array([file.rank for file in plan.files], np.int64)
    first_file = np.searchsorted(ranks, np.arange(world_size + 1))
    first_piece = np.searchsorted(plan.pieces.file, first_file)
    together: dict[tuple[int, str], int] = {}
    for file in plan.files:
        together[file.rank, file.group] = together.get((file.rank, file.group), 0) + file.data_nbytes
    # By the size of its group: many small blocks keep many threads waiting.
    blocks = [block_nbytes_for(together[file.rank, file.group]) for file in plan.files]
    plans = []
    for rank in range(world_size):
        low, high = int(first_file[rank]), int(first_file[rank + 1])
        pieces = plan.pieces.take(slice(int(first_piece[rank]), int(first_piece[rank + 1])))
        plans.append(
            save_plan.RankWritePlan(
                save_id=save_id,
                files=[(names[i], plan.files[i].data_nbytes, blocks[i]) for i in range(low, high)],
                file=(pieces.file - low).tobytes(),
                start=pieces.start.tobytes(),
                row=pieces.row.tobytes(),
                axes=pieces.boxes.axes,
                offsets=pieces.offsets.tobytes(),
                sizes=pieces.sizes.tobytes(),
                chain=[file.chain for file in plan.files[low:high]],
                chains=list(chains),
                sidecar=sidecar,
            )
        )
    return plans
