"""
Random states in files of torch's layout: any boxes of any tensors, written and read by either side in other boxes,
against what plain indexing says.
"""

import io
import itertools
import os
import tempfile
import zipfile
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.dcp._impl.file_writer import lay_out
from shardkeep.engine.writer import write_files
from shardkeep.format.data_file import DIGEST_NBYTES, combine_crc32, digest
from shardkeep.storage.local import LocalStore
from tests.dcp.sides import part, quietly, side
from tests.dcp.test_defects import xor_and_tail
from tests.engine.samples import bits, random_tensor, raw_view

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64, torch.uint16,
    torch.float8_e4m3fn, torch.complex128,
]  # fmt: skip
BASE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Boxes(torch.Tensor):
    """A tensor of which some boxes are held here, in the words of one of the sides; it has no memory of its own."""

    words: Any
    boxes: list[tuple[tuple[int, ...], torch.Tensor]]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, words: Any, full: torch.Tensor, boxes: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, full.shape, dtype=full.dtype)
        made.words, made.boxes = words, boxes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of boxes")

    def __create_chunk_list__(self) -> list[Any]:
        chunk = self.words.metadata.ChunkStorageMetadata
        return [chunk(offsets=torch.Size(at), sizes=each.size()) for at, each in self.boxes]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        words = self.words
        properties = words.metadata.TensorProperties(dtype=self.dtype)
        return [
            words.planner.WriteItem(
                index=words.metadata.MetadataIndex(fqn, chunk.offsets),
                type=words.planner.WriteItemType.SHARD,
                tensor_data=words.planner.TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        [found] = [each for at, each in self.boxes if torch.Size(at) == index.offset]
        return found


def cuts_of(draw: Any, size: int) -> list[tuple[int, int]]:
    if size < 2:
        return [(0, size)]
    inner = draw(st.lists(st.integers(1, size - 1), max_size=2, unique=True))
    edges = [0, *sorted(inner), size]
    return list(itertools.pairwise(edges))


def grid_of(draw: Any, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    boxes: list[tuple[slice, ...]] = [()]
    for size in shape:
        cuts = cuts_of(draw, size)
        boxes = [(*box, slice(*cut)) for box in boxes for cut in cuts]
    return boxes


def held_as(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    raw = raw_view(tensor)
    if layout == "permuted" and raw.dim():
        made = raw.permute(*reversed(range(raw.dim()))).contiguous().permute(*reversed(range(raw.dim())))
    elif layout == "strided" and raw.dim():
        room = torch.zeros([2 * n + 1 for n in raw.shape], dtype=raw.dtype)
        made = room[tuple(slice(1, None, 2) for _ in raw.shape)]
        made.copy_(raw)
    elif layout == "view":
        room = torch.zeros(raw.numel() + 5, dtype=raw.dtype)
        made = room[3 : 3 + raw.numel()].view(raw.shape)
        made.copy_(raw)
    else:
        made = raw.clone()
    return made.view(tensor.dtype)


LAYOUTS = st.sampled_from(["dense", "permuted", "strided", "view"])


@st.composite
def tensors(draw: Any) -> dict[str, torch.Tensor]:
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4))
    return {
        f"k{n}.{'x' * draw(st.integers(0, 3))}": random_tensor(shape, draw(st.sampled_from(DTYPES)), seed=n)
        for n, shape in enumerate(shapes)
    }


def spread(draw: Any, words: Any, full: torch.Tensor, *, blank: bool) -> Any:
    """A tensor as boxes, or whole; with its values or without."""
    source = torch.zeros_like(raw_view(full)).view(full.dtype) if blank else full
    if draw(st.booleans()) or full.numel() == 0:
        return held_as(source, draw(LAYOUTS))
    boxes = grid_of(draw, tuple(full.shape))
    if blank:  # what is read need not be all there is
        boxes = draw(st.lists(st.sampled_from(boxes), min_size=1, unique_by=str))
    return Boxes(words, full, [(tuple(s.start for s in box), held_as(source[box], draw(LAYOUTS))) for box in boxes])


def check(full: torch.Tensor, into: Any) -> None:
    for at, found in into.boxes if isinstance(into, Boxes) else [((0,) * full.dim(), into)]:
        box = tuple(slice(o, o + n) for o, n in zip(at, found.shape, strict=True))
        assert bits(found) == bits(full[box])


def check_archives(folder: str) -> None:
    """Insist that every item of a checkpoint without extensions is a sound archive of torch's."""
    for index, place in side("ours").FileSystemReader(folder).read_metadata().storage_data.items():
        with open(os.path.join(folder, place.relative_path), "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        assert len(data) == place.length
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert sum(entry.file_size for entry in archive.infolist()) < len(data), index
        torch.load(io.BytesIO(data), weights_only=True)


@settings(max_examples=60, deadline=None)
@given(st.data(), tensors(), st.sampled_from([("ours", "ours"), ("ours", "torch"), ("torch", "ours")]))
def test_any_boxes_into_any_others(data: Any, full: dict[str, torch.Tensor], sides: tuple[str, str]) -> None:
    """What one side wrote in any boxes, in any number of files, the other reads in any others, bit for bit."""
    writes, reads = map(side, sides)
    state: dict[str, Any] = {key: spread(data.draw, writes, each, blank=False) for key, each in full.items()}
    into: dict[str, Any] = {key: spread(data.draw, reads, each, blank=True) for key, each in full.items()}
    state["object"], into["object"] = {"n": [1, "two", None]}, {"n": None}
    one = data.draw(st.booleans())
    threads = data.draw(st.integers(1, 4))
    with tempfile.TemporaryDirectory(dir=BASE) as folder:
        writer = writes.FileSystemWriter(folder, single_file_per_rank=one, thread_count=threads, sync_files=False)
        quietly(writes.save, state, storage_writer=writer, no_dist=True)
        quietly(reads.load, into, checkpoint_id=folder, no_dist=True)
        if writes is side("ours"):
            check_archives(folder)
    assert into["object"] == {"n": [1, "two", None]}
    for key, each in full.items():
        check(each, into[key])


@settings(max_examples=30, deadline=None)
@given(
    st.data(),
    tensors(),
    st.lists(st.sampled_from(["xor", "tail", "zstd"]), max_size=3),
    st.sampled_from([("ours", "ours"), ("ours", "torch"), ("torch", "ours")]),
)
def test_any_chain_of_extensions(
    data: Any, full: dict[str, torch.Tensor], chain: list[str], sides: tuple[str, str]
) -> None:
    """The same through any chain of extensions; torch takes part where there is one at most, as it can undo no more."""
    if len(chain) > 1:
        sides = ("ours", "ours")
    writes, reads = map(side, sides)
    xor, tail = xor_and_tail(sides[0])[0]
    zstd = part(sides[0], "_extension").ZStandard
    made = {"xor": xor, "tail": tail, "zstd": zstd() if "zstd" in chain else None}
    registry = xor_and_tail(sides[1])[1]
    state = {key: spread(data.draw, writes, each, blank=False) for key, each in full.items()}
    into: dict[str, Any] = {key: spread(data.draw, reads, each, blank=True) for key, each in full.items()}
    state["n"], into["n"] = (1, "x"), None
    with tempfile.TemporaryDirectory(dir=BASE) as folder:
        writer = writes.FileSystemWriter(
            folder,
            thread_count=data.draw(st.integers(1, 3)),
            _extensions=[made[each] for each in chain],
            sync_files=False,
        )
        quietly(writes.save, state, storage_writer=writer, no_dist=True)
        reader = reads.FileSystemReader(folder, _extension_registry=registry)
        quietly(reads.load, into, storage_reader=reader, no_dist=True)
    assert into["n"] == (1, "x")
    for key, each in full.items():
        check(each, into[key])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=6))
def test_checksums_of_parts(parts: list[bytes]) -> None:
    """Checksums of parts that follow each other combine into that of the whole."""
    whole = 0
    for each in parts:
        whole = combine_crc32(whole, zlib.crc32(each), len(each))
    assert whole == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", [1 << 16, 1 << 20])
def test_items_larger_than_windows(tmp_path: Any, threads: int, window: int) -> None:
    """Items that several threads write in many windows are sound archives, and the digests are those of the file."""
    gen = torch.Generator().manual_seed(0)
    held = [
        torch.randn(700_001, generator=gen),
        torch.randn(3, generator=gen),
        torch.randint(0, 255, (window - 1700,), generator=gen, dtype=torch.uint8),
        torch.randn(1000, 300, generator=gen).t(),
        torch.empty(0),
        *(torch.randn(n, generator=gen) for n in range(0, 40, 3)),
        torch.randint(0, 255, (3 * window,), generator=gen, dtype=torch.uint8),
    ]
    job, placed = lay_out("__0_0.distcp", [memoryview(b"an object" * 1000), *held])
    [digests] = write_files(LocalStore(tmp_path, durable=False), [job], threads=threads, window_nbytes=window)
    data = (tmp_path / "__0_0.distcp").read_bytes()
    assert len(data) == job.data_nbytes
    for tensor, place in zip(held, placed[1:], strict=True):
        item = data[place.offset : place.offset + place.nbytes]
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            assert archive.namelist()[-1] == "archive/data/0"
        assert bits(torch.load(io.BytesIO(item), weights_only=True)) == bits(tensor)
        assert place.data_start is not None
        assert place.data_start % (4096 if tensor.numel() * tensor.element_size() >= 1 << 20 else 64) == 0
    blocks = range(0, len(data), job.block_nbytes)
    assert digests == b"".join(digest(data[at : at + job.block_nbytes]) for at in blocks)
    assert len(digests) == len(blocks) * DIGEST_NBYTES
