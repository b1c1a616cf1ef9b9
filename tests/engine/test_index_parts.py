"""A large index is read in parts: what is read of it, what is verified, and that the answers are those of the whole."""

import itertools
import json
import zlib
from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep.format.boxes import Box, whole
from shardkeep.format.data_file import checksum_text, digest
from shardkeep.format.dtypes import by_code
from shardkeep.format.index import (
    MAGIC,
    PartialIndex,
    build_index,
    decode_index,
    encode_index,
    head_nbytes,
    parts_of,
    read_table,
    strings_of,
)
from shardkeep.format.record import RECORD_NAME, decode_record
from shardkeep.plan.load_plan import ReadRequests, plan_load
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.thread_ranks import run_thread_ranks
from tests.codec_engine.scene import OPTIONS
from tests.damage.bounds import bounded
from tests.damage.forge import decode_sections, encode_sections, json_text, seal_record
from tests.damage.subjects import store_of
from tests.engine.many_chunks import ROWS, CountingStore, many_chunks, saved_state
from tests.engine.samples import bits

KEY = "model.layers.050.weight"


def index_of(blobs):
    record = decode_record(blobs[RECORD_NAME], "test")
    return record.index, blobs[record.index.name]


def test_one_tensor_takes_kilobytes_of_a_large_index():
    """Opening reads the head, a slice one part, a value the values: each in one request, together less than 1 % of the index."""
    blobs = many_chunks()
    entry, _ = index_of(blobs)
    store = CountingStore(store_of(blobs))
    weight = sk.open(store)[KEY]
    assert weight.shape == (ROWS, 3)
    assert store.calls == ["get json", "open metadata", "open skindex", "read skindex"]
    assert store.nbytes["skindex"] == entry.head_nbytes
    assert torch.equal(weight[500:502], saved_state()["model"]["layers.050.weight"][500:502])
    assert store.calls.count("read skindex") == 2
    assert store.nbytes["skindex"] < entry.nbytes / 100


def test_a_load_reads_the_parts_of_its_boxes():
    store = CountingStore(store_of(many_chunks()))
    state = {"model": {"layers.050.weight": torch.zeros(ROWS, 3)}}
    sk.load(state, store, include="model.layers.050")
    assert torch.equal(state["model"]["layers.050.weight"], saved_state()["model"]["layers.050.weight"])
    assert store.calls.count("read skindex") == 3
    assert store.nbytes["skindex"] < 8 << 10


def test_every_way_to_read_gives_what_was_saved():
    """Whole loads on one and on two ranks, `to_dict`, `verify`, and a walk through all names and boxes."""
    store, saved = store_of(many_chunks()), saved_state()
    blank = {"model": {key: torch.full_like(value, -1) for key, value in saved["model"].items()}, "step": 0, "name": ""}

    def load_half(world):
        own = sk.ShardedBox(torch.zeros(ROWS // 2, 3), offsets=(world.rank * ROWS // 2, 0), shape=(ROWS, 3))
        sk.load({"model": {"layers.003.weight": own}}, store, include="model.layers.003", group=world)
        return own.pieces[0][0]

    sk.load(blank, store)
    opened = sk.open(store)
    halves = run_thread_ranks(2, load_half)

    assert bits(blank) == bits(saved)
    assert bits(opened.to_dict()) == bits(saved)
    assert opened.verify().files == len(opened.record.files)
    assert torch.equal(torch.cat(halves), saved["model"]["layers.003.weight"])
    assert sorted(opened) == sorted([f"model.{key}" for key in saved["model"]] + ["step", "name"])
    assert [box.offsets[0] for box in opened[KEY].boxes] == list(range(ROWS))
    assert "model.layers.100.weight" not in opened
    with pytest.raises(KeyError):
        opened["model.layers"]


def test_only_a_large_plain_index_has_parts():
    """A small index is read whole, in one request; one that went through codecs, too, however large."""
    small = CountingStore(sk.MemoryStore())
    sk.save({"w": torch.ones(3)}, small)
    small.calls.clear()
    assert torch.equal(sk.open(small)["w"][...], torch.ones(3))
    assert [call for call in small.calls if "skindex" in call] == ["get skindex"]
    assert b"head_" not in small.get(RECORD_NAME, limit=1 << 20)
    many = {f"w{number:06d}": torch.full((1,), float(number)) for number in range(40_000)}
    coded, plain = sk.MemoryStore(), sk.MemoryStore()
    sk.save({"m": many}, coded, codecs=["aes"], options=OPTIONS)
    sk.save({"m": many}, plain)
    for store in (coded, plain):
        assert sk.open(store, options=OPTIONS)["m.w031234"][...].item() == 31234
    heads = [b"head_nbytes" in store.get(RECORD_NAME, limit=1 << 20) for store in (coded, plain)]
    assert heads == [False, True]


def test_older_readers_see_the_same_index():
    """Decoded as one, with parts and without, the index says the same; the version of the record is still the first."""
    entry, data = index_of(many_chunks())
    record = decode_record(many_chunks()[RECORD_NAME], "test")
    index = decode_index(data, where="test")
    without = decode_index(encode_index(index), where="test")
    assert record.version == 1
    assert entry.head_nbytes == head_nbytes(data)
    assert head_nbytes(encode_index(index)) is None
    assert all(map(np.array_equal, index.chunks.columns(), without.chunks.columns()))
    assert index.keys.all() == without.keys.all()


@cache
def irregular():
    """An index of chunks of all shapes, in no order, beside ties and a tensor without elements; whole and encoded."""
    rng = np.random.default_rng(5)
    shapes, chunks = [], []
    for number in range(60):
        ndim = int(rng.integers(0, 4)) if number % 7 else 2
        shape = (int(rng.choice([1, 50, 9000])), *rng.integers(1, 4, 2).tolist())[:ndim]
        rows = (
            [Box((row, *(0,) * (ndim - 1)), (1, *shape[1:])) for row in rng.permutation(shape[0])]
            if ndim
            else [whole(())]
        )
        shapes.append(shape)
        chunks.append([(box, int(rng.integers(500)), 4 * int(rng.integers(1 << 40))) for box in rows])
    index = build_index(
        keys=[f"t{number:03d}" for number in range(63)],
        dtypes=[by_code(9)] * 63,
        shapes=[*shapes, shapes[3], shapes[7], (0, 5)],
        chunks=[*chunks, [], [], []],
        alias=[*range(60), 3, 7, 62],
        value_keys=["v"],
        value_data=strings_of([b"\x01"]),
        where="test",
    )
    return index, encode_index(index, parts=parts_of(index))


def partial_index(data):
    reads = []

    def load(offset, nbytes, decode):
        reads.append(nbytes)
        return decode(memoryview(data)[offset : offset + nbytes])

    head = memoryview(data)[: head_nbytes(data)]
    return PartialIndex(head, len(data), load, lambda: decode_index(data, where="test"), where="test"), reads


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_parts_say_what_the_whole_says_of_a_box(data):
    index, encoded = irregular()
    partial, reads = partial_index(encoded)
    tensors = data.draw(st.lists(st.integers(0, 61), min_size=1, max_size=5))
    offsets, sizes = np.zeros((len(tensors), 3), np.int64), np.ones((len(tensors), 3), np.int64)
    for at, tensor in enumerate(tensors):
        for axis, full in enumerate(index.shape(tensor)):
            offsets[at, axis] = data.draw(st.integers(0, full - 1))
            sizes[at, axis] = data.draw(st.integers(1, full - int(offsets[at, axis])))
    wants = ReadRequests(offsets, sizes, np.array(tensors), np.arange(1, len(tensors) + 1) << 44)
    files = np.full(500, 1 << 62)
    narrow = plan_load(partial.narrowed(wants.tensor, wants), wants, files)
    wide = plan_load(index, wants, files)
    assert all(map(np.array_equal, narrow[0].columns(), wide[0].columns()))
    assert narrow[1] == wide[1]
    assert reads


def test_parts_hold_the_columns_of_the_whole():
    index, encoded = irregular()
    partial, _ = partial_index(encoded)
    partial.check_parts()
    assert partial.keys.all() == index.keys.all()
    assert all(map(np.array_equal, partial.tensors.columns(), index.tensors.columns()))
    assert (partial.value_rows, partial.value_data.all(), partial.tree) == ({"v": 0}, [b"\x01"], b"")
    assert all(map(np.array_equal, partial.chunks.columns(), index.chunks.columns()))


@pytest.mark.parametrize("section", ["directory", "parts", "value_keys", "offsets"])
def test_a_flipped_byte_is_found_by_what_reads_it(section):
    """The head is checked when it is opened, a part and the values when they are read, all columns by `verify`."""
    blobs = many_chunks()
    entry, data = index_of(blobs)
    raw = decode_sections(data)[section].raw
    at = data.index(raw) + len(raw) // 2
    store = store_of({**blobs, entry.name: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]})
    reads = {
        "directory": lambda: sk.open(store),
        "parts": lambda: sk.open(store)["model.layers.049.weight"][...],
        "value_keys": lambda: sk.open(store)["step"],
        "offsets": lambda: sk.open(store)[KEY].boxes,
    }

    with pytest.raises(sk.ChecksumMismatch, match=r"read twice, the same both times|not what was saved") as raised:
        reads[section]()
    assert raised.value.details["file"] == entry.name
    with pytest.raises(sk.DamagedCheckpoint, match=r"skindex"):
        sk.open(store).verify()
    if section == "offsets":
        assert torch.equal(sk.open(store)[KEY][...], saved_state()["model"]["layers.050.weight"])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_damaged_on_the_way_is_read_again(at, caplog):
    """One flipped bit in any read of the index is repaired by a second read, and a warning says so."""
    faulty = FaultyStore(store_of(many_chunks()), "flip", at=at, verbs=("read_into",))
    state = {"model": {"layers.050.weight": torch.zeros(ROWS, 3)}, "step": 0}
    sk.load(state, faulty, include=["model.layers.050", "step"])
    assert torch.equal(state["model"]["layers.050.weight"], saved_state()["model"]["layers.050.weight"])
    assert "right when read again" in caplog.text


def test_an_index_that_is_gone_or_cut_is_named():
    blobs = many_chunks()
    entry, data = index_of(blobs)
    for changed in ({}, {entry.name: data[:-64]}):
        store = store_of({**{name: each for name, each in blobs.items() if name != entry.name}, **changed})
        with pytest.raises(sk.WrongSize, match=entry.name):
            sk.open(store)


def packed(columns):
    return zlib.compress(msgspec.msgpack.encode(columns))


def unpacked(raw):
    return [list(column) for column in msgspec.msgpack.decode(zlib.decompress(raw))]


def forged(change):
    """Put a checkpoint together whose directory and parts were changed, with every checksum right."""
    blobs = many_chunks()
    _, data = index_of(blobs)
    sections = decode_sections(data)
    directory, ends = unpacked(sections["directory"].raw), [0]
    steps = np.frombuffer(directory[8][2], {"|i1": "i1", "<i2": "<i2", "<i4": "<i4"}[directory[8][0]]).astype(np.int64)
    ends += np.cumsum(steps).tolist()
    parts = [unpacked(sections["parts"].raw[a:b]) for a, b in itertools.pairwise(ends)]
    change(directory, parts)
    encoded = [part if isinstance(part, bytes) else packed(part) for part in parts]
    if directory[8] is not None:
        directory[8] = ["<i8", [len(encoded)], np.array(list(map(len, encoded)), "<i8")[:1].tobytes()
                        + np.diff(np.array(list(map(len, encoded)), "<i8").cumsum()).tobytes()]  # fmt: skip
    directory[9] = directory[9] and ["|u1", [len(encoded), 16], b"".join(map(digest, encoded))]
    for name, raw in (("directory", packed([each for each in directory if each])), ("parts", b"".join(encoded))):
        sections[name].raw, sections[name].shape = raw, (len(raw),)
    return with_index(blobs, encode_sections(sections))


def with_index(blobs, index):
    """Put a checkpoint together with another index, with every checksum right."""
    entry, _ = index_of(blobs)
    record = json.loads(blobs[RECORD_NAME])
    record.pop("checksum")
    head = head_nbytes(index)
    record["index"] |= {
        "nbytes": len(index),
        "checksum": checksum_text(digest(index)),
        "head_nbytes": head,
        "head_checksum": checksum_text(digest(index[:head])),
    }
    return store_of({**blobs, entry.name: index, RECORD_NAME: seal_record(json_text(record))})


def put(columns, at, code, shape, values):
    columns[at] = [code, shape, np.array(values, code).tobytes()]


FORGERIES = {
    "a_box_outside_its_tensor": lambda d, parts: [put(p, 0, "<i4", [len(p[2][2]), 2], [[5000, 0]] * len(p[2][2])) for p in parts],
    "a_negative_offset": lambda d, parts: [put(p, 0, "<i4", [len(p[2][2]), 2], [[-1, 0]] * len(p[2][2])) for p in parts],
    "a_part_of_fewer_rows": lambda d, parts: [put(p, 3, "|i1", [1], [0]) for p in parts],
    "a_part_of_2_31_rows_of_nothing": lambda d, parts: [put(p, 0, "|i1", [2**31, 0], []) for p in parts],
    "a_part_without_a_column": lambda d, parts: [p.pop() for p in parts],
    "a_part_of_floats": lambda d, parts: [put(p, 3, "<f4", [2], [1, 2]) for p in parts],
    "a_part_that_is_not_packed": lambda d, parts: parts.__setitem__(slice(None), [b"x" * 50] * len(parts)),
    "a_part_that_unpacks_to_a_gigabyte": lambda d, parts: parts.__setitem__(
        slice(None), [zlib.compress(bytes(1 << 28), 9)] * len(parts)
    ),
    "too_few_parts": lambda d, parts: parts.pop(),
    "no_parts": lambda d, parts: parts.clear(),
    "a_directory_without_a_column": lambda d, parts: d.__setitem__(11, None),
    "bounds_of_other_axes": lambda d, parts: put(d, 10, "|i1", [len(parts), 1], [[0]] * len(parts)),
    "more_keys_than_tensors": lambda d, parts: put(d, 2, "|i1", [2], [9, 0]),
    "ends_of_chunks_that_go_back": lambda d, parts: put(d, 7, "<i8", [103], [1 << 40, -5] + [0] * 101),
    "a_dtype_of_code_200": lambda d, parts: put(d, 2, "<i2", [103], [200] + [0] * 102),
    "an_alias_out_of_range": lambda d, parts: put(d, 6, "<i2", [103], [1000] + [0] * 102),
    # The parts are sound, but they say something else than the columns.
    "chunks_at_other_places": lambda d, parts: [put(p, 3, "|i1", [len(p[2][2])], [0] * len(p[2][2])) for p in parts],
    "bounds_that_hide_chunks": lambda d, parts: put(d, 11, "|i1", [len(parts), 2], [[0, 0]] * len(parts)),
}  # fmt: skip


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_forged_parts_are_refused(change):
    """Loading raises an error of ours and takes little memory, or reads only what is verified; `verify` always refuses."""
    store = forged(change)

    def refused(work):
        try:
            work()
        except sk.DamagedCheckpoint:
            return True
        return False

    state = {"model": {"layers.050.weight": torch.zeros(ROWS, 3)}}
    loaded, verified = bounded(
        lambda: [
            refused(lambda: sk.load(state, store, include="model.layers.050")),
            refused(lambda: sk.open(store).verify(deep=False)),
        ],
        mib=96,
    )

    assert verified
    assert loaded or change is FORGERIES["chunks_at_other_places"]


def test_values_that_begin_before_the_index_are_refused():
    """No memory is taken for what lies between them and the index."""
    blobs = many_chunks()
    _, data = index_of(blobs)
    table, start = read_table(memoryview(data), "the index")
    table = [(*each[:3], -(1 << 40) if each[0] == "tree" else each[3], each[4]) for each in table]
    header = msgspec.msgpack.encode(table)
    at = len(MAGIC) + 4 + len(header)
    forgery = b"".join((MAGIC, len(header).to_bytes(4, "little"), header, bytes(-at % 64), data[start:]))
    opened = sk.open(with_index(blobs, forgery))
    with pytest.raises(sk.MalformedFile, match="beyond its end"):
        bounded(lambda: opened["step"], mib=96)


def test_an_honest_forger_of_parts_is_believed():
    """The yardstick: taken apart and put together without a change, it is the same checkpoint."""
    store = forged(lambda directory, parts: None)
    assert torch.equal(sk.open(store)[KEY][...], saved_state()["model"]["layers.050.weight"])
    assert sk.open(store).verify().deep


@pytest.mark.parametrize(
    "head",
    [
        {"head_nbytes": 1 << 40},
        {"head_nbytes": -1},
        {"head_nbytes": None},
        {"head_checksum": None},
        {"head_checksum": "xxh3_128:0"},
        {"head_nbytes": 0, "head_checksum": checksum_text(digest(b""))},
        {"head_nbytes": 12},
    ],
)
def test_a_forged_head_is_refused(head):
    """A head beyond the file, of no bytes, too short, or of which the record says only a part, is damage."""
    blobs = many_chunks()
    record = json.loads(blobs[RECORD_NAME])
    record.pop("checksum")
    record["index"] |= head
    with pytest.raises(sk.DamagedCheckpoint):
        sk.open(store_of({**blobs, RECORD_NAME: seal_record(json_text(record))}))
