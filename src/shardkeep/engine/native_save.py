"""Saves in the native layout, in the steps of `engine.save_session`: each rank's part, and rank 0's."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from shardkeep import errors
from shardkeep.display import format_count, format_size
from shardkeep.dist.rendezvous import Rendezvous
from shardkeep.dist.world import World, agree_and_return, collision_hint
from shardkeep.engine.codecs import CodecPlan, FileCodecs, keys_for, plan_codecs
from shardkeep.engine.report import Phases
from shardkeep.engine.save_session import (
    CommittedSave,
    DescribedState,
    Labels,
    RankFiles,
    SaveArguments,
    WrittenFiles,
    kept_plans,
)
from shardkeep.engine.tensors import host_address, sample_replicas, scattered_memory, windows_of
from shardkeep.engine.workers import WINDOW_NBYTES, Scattered
from shardkeep.engine.writer import FileJob
from shardkeep.format.boxes import Box, Boxes, IntArray, ints, pack, relative, slices
from shardkeep.format.data_file import HeaderEntry, build_header
from shardkeep.format.dtypes import by_code
from shardkeep.format.index import Chunks, Index, IndexParts, parts_of, strings_of
from shardkeep.format.record import RECORD_NAME, Record, Recorded, checked_meta, checked_step
from shardkeep.format.values import decode_tree, encode_tree, encode_value
from shardkeep.layouts import native, orphans
from shardkeep.layouts import torch as torch_files
from shardkeep.plan import save_plan
from shardkeep.plan.stamped_plan import StampedPlan, plan_stamped
from shardkeep.state.describe import Description, describe, file_groups, find_buffers
from shardkeep.state.objects import Objects, check_same_objects
from shardkeep.storage.base import Store, Version, broken_path, explaining_place, free_nbytes, is_sequential

if TYPE_CHECKING:
    import torch

log = logging.getLogger("shardkeep")


_HOW_TO_REPLACE = "pass overwrite=True to replace it, or save to another place"


@dataclass(frozen=True)
class PlannedSave:
    index: Index
    """With values and the tree of this save."""
    parts: IndexParts
    """Of the index, which are the same for all saves by this plan."""
    world_size: int
    tensor_nbytes: int
    sidecar: bool
    sampled: save_plan.SampledReplicas | None
    """None also for codecs, each of whose chains is for one save."""
    codecs: CodecPlan
    replaces: Version | None
    """The version of the commit record that this save replaces."""

    @property
    def nbytes(self) -> int:
        """What this takes in memory for each chunk."""
        return sum(column.nbytes for column in (*self.index.chunks.columns(), *self.parts.values()))


def index_of(plan: save_plan.CheckpointPlan | StampedPlan, values: list[tuple[str, bytes]], tree: bytes) -> Index:
    if isinstance(plan, StampedPlan):
        ends, chunks = plan.chunk_ends, plan.chunks
    else:
        pieces = plan.pieces.take(np.lexsort((*plan.pieces.offsets.T[::-1], plan.pieces.tensor)))
        ends = np.searchsorted(pieces.tensor, np.arange(len(plan.keys)), "right")
        chunks = Chunks(*map(_narrowed, (pieces.offsets, pieces.sizes, pieces.file, pieces.start)))
    index = Index(
        keys=strings_of(key.encode() for key in plan.keys),
        tensors=plan.tensors,
        chunk_ends=ends,
        chunks=chunks,
        value_keys=strings_of([]),
        value_data=strings_of([]),
        make_tree=lambda: tree,
    )
    return _with_values(index, values)


def _narrowed(column: IntArray) -> IntArray:
    """Return a column in the narrowest type that holds it, as an index is encoded."""
    return column.astype(np.min_scalar_type(int(column.max()))) if column.size else column


def _with_values(index: Index, values: list[tuple[str, bytes]]) -> Index:
    keys, data = strings_of(key.encode() for key, _ in values), strings_of(data for _, data in values)
    return replace(index, value_keys=keys, value_data=data)


class NativeSave:
    def __init__(self, request: SaveArguments, store: Store, world: World) -> None:
        self.store = store
        self.save_id = native.new_save_id()
        self.keys = keys_for(request.options)
        self._request = request
        self._world = world
        self._publishing = False
        self._interrupt: KeyboardInterrupt | None = None

    # -- every rank ----------------------------------------------------------------------------------------------------

    def claimed(self) -> contextlib.AbstractContextManager[None]:
        """Count the save as running: its claim is not that of a dead one."""
        return orphans.holding_claim(self.save_id)

    def discard(self, names: Sequence[str]) -> None:
        orphans.discard(self.store, names)

    def describer(self, ranks: Rendezvous, phases: Phases, state: Mapping[str, Any]) -> Callable[[], DescribedState]:
        """Agree on what differs between ranks, and return a function that describes the state."""
        # Everything that can fail on one rank alone comes before ranks wait for each other.
        request, world = self._request, self._world
        try:
            kept = kept_plans()
            objects = Objects(
                state, rank=world.rank, world_size=world.size, kept=kept.names, forms=kept.descriptions.forms
            )
            flattened = objects.flattened
        except errors.CheckpointError:  # a state that cannot be walked: describing it then fails on all ranks
            objects, flattened = Objects({}, rank=world.rank, world_size=world.size), None
        differing = frozenset[str]()
        if objects and world.size > 1:  # ranks meet only then
            with phases.phase("plan"):
                differing = _find_differing_state(objects, ranks, allow_pickle=request.allow_pickle)

        def prepare() -> tuple[Labels, dict[str, Any]]:
            if request.check is not None:
                request.check()
            labels = checked_step(request.step), checked_meta(request.meta)
            return labels, objects.states(differing, communicating=False)

        def describe_now() -> DescribedState:
            with phases.phase("describe"):
                labels, in_place_of = prepared or prepare()
                if objects.communicates:
                    in_place_of |= objects.states(differing, communicating=True)
                description = describe(
                    state,
                    rank=world.rank,
                    in_place_of=in_place_of,
                    flattened=flattened,
                    kept=kept_plans().descriptions,
                )
                flags: npt.NDArray[np.uint8] | None = None
                samples: Callable[[], bytes] = bytes
                if world.size > 1:
                    buffers = find_buffers(description, objects.modules)
                    flags = buffers * np.uint8(save_plan.BUFFER)
                    if request.check_replicas:
                        samples = _digest_all(description)
                    else:
                        samples = sample_replicas(description, ~buffers)
                manifest = make_manifest(
                    description,
                    allow_pickle=request.allow_pickle,
                    check_replicas=request.check_replicas,
                    flags=flags,
                )
                return DescribedState(description, manifest, samples, labels, objects.optimizers)

        prepared: tuple[Labels, dict[str, Any]] | None = None
        if objects.communicates:

            @phases.phase("describe")
            def prepare_first() -> tuple[tuple[Labels, dict[str, Any]], bytes]:
                return prepare(), b""

            prepared, _ = agree_and_return(ranks.agree, "prepare", prepare_first, lambda done: done)
        return describe_now

    def order(self, answer: bytes) -> list[int]:
        plan = msgspec.msgpack.decode(answer, type=save_plan.RankWritePlan)
        rows: list[int] = ints(plan.row).tolist()
        return rows

    def files(self, described: DescribedState, answer: bytes, save_id: str) -> RankFiles:
        plan = msgspec.msgpack.decode(answer, type=save_plan.RankWritePlan)
        names = [data_name(file, self._world.rank, self._world.size, save_id) for file in plan.files]
        jobs = make_file_jobs(described.description, answer, plan, names, save_id)
        codecs = FileCodecs(plan, names, self.keys)

        def written() -> WrittenFiles:
            entries = {job.name: codecs.entry_of(job) for job in jobs}
            return WrittenFiles(
                [entries[name] for name in names]
            )  # in the order of the plan, whatever was written first

        return RankFiles(jobs, written, codecs)

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def plan(self, manifests: list[save_plan.RankManifest]) -> tuple[PlannedSave, list[bytes]]:
        """Claim the place, and plan the save; the answer to each rank is a `RankWritePlan`."""
        with explaining_place(self.store):
            replaces = self._check_place()
        tree = save_plan.merge_rank_trees(manifests)
        codecs = plan_codecs(self._request.codecs, tree=lambda: decode_tree(tree), keys=self.keys)
        plan = plan_stamped(manifests, codecs.chain_of) or save_plan.plan_save(manifests, codecs.chain_of, warn=_warn)
        values = save_plan.merge_rank_values([each.values for each in manifests])
        save_plan.check_no_tensors((key for key, _ in values), plan.keys, manifests)
        recorded = [chain.recorded for chain in codecs.chains]
        sidecar = is_sequential(self.store)
        index = index_of(plan, values, tree)
        planned = PlannedSave(
            index=index,
            parts=parts_of(index) if codecs.of_index is None else {},
            world_size=len(manifests),
            tensor_nbytes=sum(file.data_nbytes for file in plan.files),
            sidecar=sidecar,
            sampled=None if codecs.chains else plan.sampled,
            codecs=codecs,
            replaces=replaces,
        )
        self._claim(planned)
        by_rank = split_by_rank(plan, len(manifests), chains=recorded, sidecar=sidecar)
        encoded = {id(each): save_plan.encode(each) for each in by_rank}  # many ranks may have one plan
        return planned, [encoded[id(each)] for each in by_rank]

    def plan_again(self, kept: PlannedSave, values: list[bytes]) -> PlannedSave | None:
        """Check and claim the place for a save of the same tensors; None if the plan does not fit it."""
        if self._request.codecs or is_sequential(self.store) != kept.sidecar:
            return None
        with explaining_place(self.store):
            replaces = self._check_place()
        planned = replace(kept, index=_with_values(kept.index, save_plan.merge_rank_values(values)), replaces=replaces)
        self._claim(planned)
        return planned

    def _claim(self, planned: PlannedSave) -> None:
        wanted, free = planned.tensor_nbytes + len(planned.index.value_data.data), free_nbytes(self.store)
        # Files that are replaced stay until the commit. The size of coded files is not known beforehand.
        if not planned.codecs.chains and free is not None and free < wanted:
            raise errors.StorageFull(
                f"{self.store.url}: the checkpoint takes {format_size(wanted)}, and {format_size(free)} are free there",
                hint="delete checkpoints you no longer need, or save to another place; nothing was written",
                errno=errno.ENOSPC,
                wanted=wanted,
                free=free,
            )
        orphans.make_claim(self.store, self.save_id)

    def check_written(self, written: list[WrittenFiles]) -> None:
        sizes = dict(named for each in written for entry in each.files for named in entry.at_rest)
        if (name := first_missing(self.store, sizes)) is not None:
            of_rank = [{name for entry in each.files for name, _ in entry.at_rest} for each in written]
            rank = next(rank for rank, names in enumerate(of_rank) if name in names)
            raise errors.StorageError(
                f"{self.store.url}: rank {rank} wrote {name} of {sizes[name]} bytes, but rank 0 does not find it",
                hint="all ranks must see one file system",
                name=name,
            )

    def commit(self, planned: PlannedSave, written: list[WrittenFiles], labels: Labels) -> CommittedSave:
        step, meta = labels
        self._publishing = True
        record = native.publish(
            self.store,
            planned.index,
            planned.parts,
            save_id=self.save_id,
            files=[entry for each in written for entry in each.files],
            tensor_bytes=planned.tensor_nbytes,
            world_size=planned.world_size,
            step=step,
            meta=meta,
            over=planned.replaces,
            chains=planned.codecs.chains,
            index_chain=planned.codecs.of_index,
        )
        self._check_all_present(record)
        totals = record.totals
        return CommittedSave(save_id=self.save_id, step=step, bytes_total=totals.tensor_bytes, tensors=totals.tensors)

    def _check_all_present(self, record: Record) -> None:
        """Look once more for all files: a job that prunes may have taken this place for an old checkpoint meanwhile."""
        names = [RECORD_NAME, *record.names]
        try:
            listed = {info.name for info in self.store.list()}
            gone = [name for name in names if name not in listed and _nbytes(self.store, name) is None]
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
            f"{self.store.url}: {len(gone)} of {format_count(len(names), 'file')} of this save were deleted by another process"
            f" while it was writing: {gone[0]}",
            hint="save again, and do not delete checkpoints by hand in a place that a job saves to",
            name=gone[0],
        )

    def withdraw(self) -> None:
        """Remove every file of a save that failed, including those of ranks that died. Never raises."""
        claim = native.claim_name(self.save_id)
        try:
            committed = False
            if self._publishing:
                # The record may be in place, even if the attempt to put it there has raised.
                with contextlib.suppress(errors.CheckpointNotFound):
                    committed = native.read_record(self.store).save_id == self.save_id
            if committed:
                orphans.discard(self.store, [claim])
                return
            mine = [info.name for info in self.store.list() if native.save_id_of(info.name) == self.save_id]
        except errors.CheckpointError as exc:
            if not broken_path(self.store):  # otherwise there is no place to look in
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
                if _nbytes(self.store, torch_files.METADATA_NAME) is None:
                    return
                with contextlib.suppress(errors.PickleRefused):
                    data = self.store.get(torch_files.METADATA_NAME, limit=torch_files.MAX_METADATA_NBYTES)
                    torch_files.decode_torch_metadata(data, where=torch_files.METADATA_NAME)
        except (errors.DamagedCheckpoint, errors.UnsupportedVersion) as exc:
            raise errors.CheckpointExists(
                f"{self.store.url}: a checkpoint that cannot be read is already there: {exc.message}",
                hint=collision_hint(_HOW_TO_REPLACE),
            ) from exc
        raise errors.CheckpointExists(
            f"{self.store.url}: a committed checkpoint is already there", hint=collision_hint(_HOW_TO_REPLACE)
        )

    def _check_place(self) -> Version | None:
        """Check that this save may write here; return the version of the record that it replaces."""
        replaces: Version | None = None
        if self._request.overwrite:
            # Only what is there now may be replaced: if another save commits meanwhile, this one fails.
            replaces = self.store.version(RECORD_NAME)
        else:
            self._check_no_checkpoint()
        found = orphans.survey(self.store)
        if found.living:
            raise errors.CheckpointExists(
                f"{self.store.url}: another save is writing here (process {found.living.pid})",
                hint=collision_hint("wait for it, or save to another place"),
            )
        # Before the first byte, or a job that dies in every save would fill the disk.
        orphans.sweep(self.store, found)
        return replaces


def first_missing(store: Store, sizes: Mapping[str, int]) -> str | None:
    """Return a file that the store does not have with the given size; None if it has all of them."""
    listed = {info.name: info.nbytes for info in store.list()}
    # A network file system may list an old state; a request for one name is answered anew.
    missing = (name for name, nbytes in sizes.items() if listed.get(name) != nbytes != _nbytes(store, name))
    return next(missing, None)


def _nbytes(store: Store, name: str) -> int | None:
    try:
        with contextlib.closing(store.open(name)) as blob:
            return blob.nbytes
    except errors.BlobNotFound:
        return None


def data_name(file: save_plan.PlannedFile, rank: int, world_size: int, save_id: str) -> str:
    return native.data_name(file.group, rank, world_size, save_id, part=file.part, coded=file.chain is not None)


def split_by_rank(
    plan: save_plan.CheckpointPlan | StampedPlan,
    world_size: int,
    *,
    chains: Sequence[Recorded] = (),
    sidecar: bool = False,
) -> list[save_plan.RankWritePlan]:
    """Divide the plan, which is sorted by file and so by rank, into each rank's part."""
    if isinstance(plan, StampedPlan):
        by_rank: dict[int, save_plan.RankWritePlan] = {}
        for stamp in plan.stamps:
            previous, parts = None, list[save_plan.RankWritePlan]()
            for ranks, each in stamp.plans():
                if each is not previous:  # groups that write alike have one plan
                    previous, parts = each, split_by_rank(each, len(ranks), chains=chains, sidecar=sidecar)
                by_rank.update(zip(ranks, parts, strict=True))
        return [by_rank[rank] for rank in range(world_size)]
    first_file = np.searchsorted(plan.ranks, np.arange(world_size + 1))
    first_piece = np.searchsorted(plan.pieces.file, first_file)
    plans = []
    for rank in range(world_size):
        low, high = int(first_file[rank]), int(first_file[rank + 1])
        pieces = plan.pieces.take(slice(int(first_piece[rank]), int(first_piece[rank + 1])))
        boxes = pieces.boxes if pieces.cut.any() else None
        plans.append(
            save_plan.RankWritePlan(
                files=plan.files[low:high],
                file=pack(pieces.file - low),
                start=pack(pieces.start),
                row=pack(pieces.row),
                axes=pieces.boxes.axes,
                offsets=pack(boxes.offsets) if boxes else b"",
                sizes=pack(boxes.sizes) if boxes else b"",
                chains=list(chains),
                sidecar=sidecar,
            )
        )
    return plans


def _find_differing_state(objects: Objects, ranks: Rendezvous, *, allow_pickle: bool) -> frozenset[str]:
    """Return the names of object state whose digests differ between ranks, and which so is saved for each rank."""

    def digests() -> bytes:
        return msgspec.msgpack.encode((objects.names, objects.digests(allow_pickle=allow_pickle)))

    def differing(payloads: list[bytes]) -> list[bytes]:
        said = [msgspec.msgpack.decode(payload, type=tuple[list[str], dict[str, bytes]]) for payload in payloads]
        check_same_objects([names for names, _ in said])
        different = {pair for _, digests in said for pair in digests.items()}
        found = [name for name, times in Counter(name for name, _ in different).items() if times > 1]
        return [msgspec.msgpack.encode(found)] * len(payloads)

    return frozenset(msgspec.msgpack.decode(ranks.agree("compare", digests, differing), type=list[str]))


def _warn(error: errors.CheckpointError) -> None:
    log.warning("%s; what the lowest rank holds is saved (%s)", error.message, error.hint)


def make_manifest(
    description: Description,
    *,
    allow_pickle: bool,
    check_replicas: bool,
    flags: npt.NDArray[np.uint8] | None = None,
) -> save_plan.RankManifest:
    """Encode a description; a plain value that has no safe form raises an error that names it."""
    d = description
    flags = np.zeros(len(d.keys), np.uint8) if flags is None else flags
    manifest: save_plan.RankManifest
    # Kept with the columns, of which the manifest has nothing but these two besides. States of one form have one skeleton.
    tree, known, manifest = d.derived.get("manifest", (None, None, None))
    if tree is not d.tree or known != flags.tobytes():
        manifest = save_plan.manifest_of(
            d, groups=file_groups(d.tree, d.keys), flags=flags, alias=d.alias, tree=encode_tree(d.tree), values=b""
        )
        d.derived["manifest"] = d.tree, flags.tobytes(), manifest
    values = [encode_value(value, key=key, allow_pickle=allow_pickle) for key, value in d.values.items()]
    return msgspec.structs.replace(
        manifest,
        values=save_plan.encode((list(d.values), values)),
        check_replicas=check_replicas,
    )


def _digest_all(description: Description) -> Callable[[], bytes]:
    """Return a function that returns a digest of every row, for `RankManifest.samples`."""
    pairs: list[tuple[int, int]] = []
    for row, tensor in enumerate(description.pieces):
        digest = xxhash.xxh3_64()
        for window in windows_of(tensor, WINDOW_NBYTES):
            digest.update(window)
        pairs.append((row, digest.intdigest()))
    return np.array(pairs, np.uint64).tobytes


class _FileChunks(NamedTuple):
    """The chunks of a file, in order, and its header with the id of the save that made it."""

    start: IntArray
    rows: list[int]
    cuts: dict[int, tuple[slice, ...]]
    """Of chunks that are a part of what this rank holds, because replicas share the work."""
    header: bytes


def make_file_jobs(
    d: Description, answer: bytes, plan: save_plan.RankWritePlan, names: Sequence[str], save_id: str
) -> list[FileJob]:
    """Find the memory of every chunk that this rank writes, and build its files' headers."""
    known, first_id, files = d.derived.get("files", (b"", "", []))
    if known != answer:  # else only the id and the memory are others than in the last save
        first_id, files = save_id, _chunks_of_files(d, plan, save_id)
        d.derived["files"] = answer, save_id, files
    jobs = []
    for name, planned, each in zip(names, plan.files, files, strict=True):
        tensors = [
            d.pieces[row][each.cuts[at]] if at in each.cuts else d.pieces[row] for at, row in enumerate(each.rows)
        ]
        header = bytearray(each.header.replace(first_id.encode(), save_id.encode(), 1))  # names of tensors come later
        begins, addresses, others = _sources(each.start, tensors)
        sizes, sidecar = (planned.data_nbytes, planned.block_nbytes), plan.sidecar and planned.chain is None
        jobs.append(FileJob(name, header, *sizes, begins, addresses, others, sidecar=sidecar))
    return jobs


def _chunks_of_files(d: Description, plan: save_plan.RankWritePlan, save_id: str) -> list[_FileChunks]:
    file, start, row = ints(plan.file), ints(plan.start), ints(plan.row)
    boxes, found = boxes_of(plan, d.boxes.take(row)), list[_FileChunks]()
    for at, planned in enumerate(plan.files):
        mine = np.flatnonzero(file == at)
        entries, cuts = _chunks_of_file(d, row[mine], boxes.take(mine), start[mine])
        header = build_header(
            entries,
            save_id=save_id,
            data_nbytes=planned.data_nbytes,
            block_nbytes=planned.block_nbytes,
            sidecar=plan.sidecar and planned.chain is None,
        )
        found.append(_FileChunks(start[mine], row[mine].tolist(), cuts, bytes(header)))
    return found


def boxes_of(plan: save_plan.RankWritePlan, held: Boxes) -> Boxes:
    """Return the box of each chunk, given all that the rank holds in its row."""
    if not plan.offsets:
        return held
    shape = (len(held), plan.axes)
    return Boxes(ints(plan.offsets).reshape(shape), ints(plan.sizes).reshape(shape))


def _sources(start: IntArray, tensors: Sequence[torch.Tensor]) -> tuple[IntArray, IntArray, dict[int, Scattered]]:
    """Return where a file's sources begin in it, their addresses in host memory (0: none), and those without."""
    # Tensors that a snapshot packed end to end on a device, in the order of the file, are one source.
    addresses = np.array([host_address(tensor) for tensor in tensors], np.int64)
    runs: list[list[int]] = []  # first and last tensor of each source
    base: Any = None
    end = 0
    for at, (tensor, address) in enumerate(zip(tensors, addresses.tolist(), strict=True)):
        packed = None if address or not tensor.is_contiguous() else tensor._base
        if (
            packed is not None
            and packed is base
            and tensor.storage_offset() == end
            and tensor.dtype == tensors[at - 1].dtype
        ):
            runs[-1][1] = at
        else:
            runs.append([at, at])
        base, end = packed, 0 if packed is None else int(tensor.storage_offset()) + tensor.numel()
    others = {}
    for row, (first, last) in enumerate(runs):
        source = tensors[first]
        if first < last:
            count = tensors[last].storage_offset() + tensors[last].numel() - source.storage_offset()
            source = source.as_strided((count,), (1,))
        if not addresses[first]:
            others[row] = scattered_memory(source, source.dtype)
    firsts = [first for first, _ in runs]
    return start[firsts], addresses[firsts], others


def _chunks_of_file(
    d: Description, rows: IntArray, boxes: Boxes, starts: IntArray
) -> tuple[list[HeaderEntry], dict[int, tuple[slice, ...]]]:
    """Return the entries of a file's chunks in its header, and which part of its row each is if it is not all of it."""
    tensors = d.row_tensor[rows]
    held = d.boxes.take(rows)
    sizes = boxes.sizes[:, : d.boxes.axes]  # the rest is padding for other ranks' tensors
    columns = zip(
        tensors.tolist(),
        d.ndim[tensors].tolist(),
        d.dtype[tensors].tolist(),
        starts.tolist(),
        boxes.offsets.tolist(),
        sizes.tolist(),
        np.all(sizes == d.shape[tensors], axis=1).tolist(),
        np.all(sizes == held.sizes, axis=1).tolist(),
        strict=True,
    )
    entries: list[HeaderEntry] = []
    cuts: dict[int, tuple[slice, ...]] = {}
    for at, (tensor, ndim, code, start, offset, size, is_whole, is_as_held) in enumerate(columns):
        shape, dtype = tuple(size[:ndim]), by_code(code)
        name = native.chunk_name(d.keys[tensor], None if is_whole else Box(tuple(offset[:ndim]), shape))
        kind, stored = dtype.in_safetensors(shape)
        entries.append(HeaderEntry(name, kind, stored, start, start + math.prod(shape) * dtype.itemsize))
        if not is_as_held:
            cuts[at] = slices(relative(boxes.box(at, ndim), held.box(at, ndim)))
    return entries, cuts
