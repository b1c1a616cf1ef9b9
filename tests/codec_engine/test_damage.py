"""Whatever happens to the files of a coded checkpoint, it is an error that says where; never wrong numbers."""

import random
import tracemalloc

import pytest
import torch
from msgspec.structs import replace

import shardkeep as sk
from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.coded_store import put_coded
from shardkeep.errors import KeyMissing, NotAuthentic, WrongKey
from shardkeep.format.data_file import checksum_text, digest
from shardkeep.format.frames import FOOTER_NBYTES, FrameTable, decode_table, encode_table, table_nbytes
from shardkeep.format.record import RECORD_NAME, decode_record, encode_record
from shardkeep.opening import verify_stored
from tests.codec_engine.scene import KEYS, MIB, OPTIONS, OTHER_KEYS, InOrderStore, blobs_of
from tests.engine.samples import bits, blank_like

CHAINS = {"zstd": ["zstd"], "float": ["float"], "lz4": ["lz4"], "aes": ["aes"], "all": ["float", "zstd", "aes"]}
CHAINS["beside"] = None
"""Without codecs, on a store that takes bytes in order: digests lie beside the data."""


def sample_state(seed=0):
    torch.manual_seed(seed)
    return {"model": {"w": torch.randn(600, 1000), "b": torch.randn(9)}, "optim": {"m": torch.randn(50, 50)}, "lr": 0.1}


def saved(chain, *, seed=0):
    store = sk.MemoryStore() if chain else InOrderStore()
    sk.save(sample_state(seed), store, codecs=chain, options=OPTIONS)
    return store


def changed(store, name, data):
    store.put(name, bytes(data), replace=True)


def flip(store, name, *offsets):
    bad = bytearray(store.get(name, limit=8 * MIB))
    for at in offsets:
        bad[at] ^= 1
    changed(store, name, bad)


def data_files(store):
    return [file for file in decode_record(store.get(RECORD_NAME, limit=MIB), "").files if file.stored_nbytes != 0]


def load(store, options=OPTIONS):
    state = blank_like(sample_state())
    sk.load(state, store, options=options)
    return state


def resealed(store, change):
    """Change the record as an attacker would who knows the format and has no key."""
    record = decode_record(store.get(RECORD_NAME, limit=MIB), "")
    changed(store, RECORD_NAME, encode_record(change(record)))


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_any_flipped_byte_is_found(chain):
    """One bit anywhere in any file: to load or to verify is an error of damage that names the file and an offset."""
    store = saved(chain)
    rng = random.Random(1)
    for name, good in blobs_of(store).items():
        # The mark, the first frame, the middle, the table, the footer, and wherever.
        for at in {0, 9, len(good) // 2, len(good) - FOOTER_NBYTES - 3, len(good) - 1, rng.randrange(len(good))}:
            bad = bytearray(good)
            bad[at] ^= 1 << rng.randrange(8)
            changed(store, name, bad)
            with pytest.raises(sk.DamagedCheckpoint, match=name.replace(".", r"\.")) as raised:
                sk.open(store, options=OPTIONS).verify()
            whole = name == RECORD_NAME or name.endswith(".skindex")
            assert whole or "byte" in str(raised.value) or "checksum" in str(raised.value)
            with pytest.raises(sk.DamagedCheckpoint) as raised:
                load(store)
            assert raised.value.details["file"] == name
            assert name == RECORD_NAME or raised.value.details["offset"] is not None
        changed(store, name, good)
    assert bits(load(store)) == bits(sample_state())


@pytest.mark.parametrize("cut", [1, 100, "half", "all"])
def test_any_file_that_was_cut_short_is_found(cut):
    """The error says how long the file is and should be."""
    store = saved(["zstd", "aes"])
    for name, good in blobs_of(store).items():
        keep = {"half": len(good) // 2, "all": 0}.get(cut, len(good) - 1 if cut == 1 else 100)
        changed(store, name, good[:keep])
        with pytest.raises(sk.DamagedCheckpoint, match=f"{keep} bytes" if name != RECORD_NAME else "damaged"):
            load(store)
        changed(store, name, good)


@pytest.mark.parametrize("chain", [["aes"], None])
def test_a_missing_file_is_named(chain):
    store = saved(chain)
    for name, good in blobs_of(store).items():
        store.delete(name)
        with pytest.raises((sk.WrongSize, sk.CheckpointNotFound), match=r"missing|no committed"):
            load(store)
        changed(store, name, good)


def test_every_damaged_frame_is_listed_with_what_it_holds():
    """`verify` goes through all of a file; without a key it reports the same, except for the names."""
    store = saved(["aes"])
    [file] = [file for file in data_files(store) if file.name.startswith("model")]
    flip(store, file.name, MIB // 2, 2 * MIB)
    with pytest.raises(sk.DamagedCheckpoint) as raised:
        sk.open(store, options=OPTIONS).verify()
    assert len(raised.value.details["problems"]) == 2
    assert all(file.name in each and "'model.w'" in each for each in raised.value.details["problems"])
    with pytest.raises(sk.DamagedCheckpoint) as raised:
        verify_stored(store)
    assert len(raised.value.details["problems"]) == 2


def test_without_the_key_what_is_stored_is_checked():
    """The report says how many files were not decoded; with the key there are none."""
    store = saved(["aes"])
    assert verify_stored(store).undecoded == len(data_files(store)) == 2
    assert sk.open(store, options=OPTIONS).verify().undecoded == 0


def test_wrong_keys_and_none():
    """Each is its own error, names the key that is needed, and shows no key."""
    store = saved(["zstd", "aes"])
    with pytest.raises(KeyMissing, match=KEYS.ids[0]):
        load(store, sk.Options())
    with pytest.raises(WrongKey, match=f"{KEYS.ids[0]}.*{OTHER_KEYS.ids[0]}"):
        load(store, sk.Options(keys=OTHER_KEYS))
    with pytest.raises(KeyMissing):
        sk.save(sample_state(), sk.MemoryStore(), codecs=["aes"], options=sk.Options())


def swap_frames(store, file, *, reseal_record):
    """Exchange the stored bytes of two frames of one size, and make all digests fit."""
    data = bytearray(store.get(file.name, limit=8 * MIB))
    frames = int.from_bytes(data[-FOOTER_NBYTES : -FOOTER_NBYTES + 8], "little")
    tail = table_nbytes(frames)
    table = decode_table(bytes(data[-tail:]), plain_nbytes=file.nbytes, stored_nbytes=len(data), where="")
    one, other = [row for row in range(frames) if table.stored_nbytes[row] == table.stored_nbytes.max()][:2]
    places = [slice(s, s + n) for s, n in zip(table.stored_start.tolist(), table.stored_nbytes.tolist(), strict=True)]
    data[places[one]], data[places[other]] = bytes(data[places[other]]), bytes(data[places[one]])
    digests = b"".join(digest(data[place]) for place in places)
    forged = encode_table(FrameTable(*[getattr(table, name) for name in COLUMNS], digests))
    data[-tail:] = forged
    changed(store, file.name, data)
    if reseal_record:
        entry = replace(file, table_checksum=checksum_text(digest(forged)))
        resealed(store, lambda record: with_file(record, file.name, entry))


COLUMNS = ("start", "nbytes", "stored_start", "stored_nbytes", "number")


def with_file(record, name, entry):
    return replace(record, files=[entry if file.name == name else file for file in record.files])


def test_swapped_frames_are_found_by_the_table_and_by_encryption(monkeypatch):
    """Exchanged frames are found by the table's checksum, by the record's MAC, and by the frames themselves."""
    store = saved(["aes"])
    [file] = [file for file in data_files(store) if file.name.startswith("model")]
    swap_frames(store, file, reseal_record=False)
    with pytest.raises(sk.ChecksumMismatch, match=r"model.*table of frames"):
        load(store)
    store = saved(["aes"])
    [file] = [file for file in data_files(store) if file.name.startswith("model")]
    swap_frames(store, file, reseal_record=True)
    with pytest.raises(NotAuthentic, match=RECORD_NAME):
        load(store)
    monkeypatch.setattr("shardkeep.engine.codecs.check_signature", lambda *_: None)
    with pytest.raises(NotAuthentic, match=file.name):
        load(store)


def test_swapped_files_are_found(monkeypatch):
    """A file of another save with the same key, under this one's name and with digests that fit."""
    store, other = saved(["aes"]), saved(["aes"], seed=1)
    [mine], [its] = ([file for file in data_files(each) if file.name.startswith("optim")] for each in (store, other))
    changed(store, mine.name, other.get(its.name, limit=MIB))
    with pytest.raises(sk.DamagedCheckpoint, match=mine.name):
        load(store)
    entry = replace(its, name=mine.name)
    resealed(store, lambda record: with_file(record, mine.name, entry))
    with pytest.raises(NotAuthentic, match=RECORD_NAME):
        load(store)
    monkeypatch.setattr("shardkeep.engine.codecs.check_signature", lambda *_: None)
    with pytest.raises(NotAuthentic, match=mine.name):
        load(store)


FORGERIES = {
    "step": lambda record: replace(record, step=99),
    "meta": lambda record: replace(record, meta={"a": 2}),
    "files in another order": lambda record: replace(record, files=record.files[::-1]),
    "a file less": lambda record: replace(record, files=record.files[:1]),
    "no signature": lambda record: replace(record, mac=None),
    "another salt": lambda record: replace(record, chains=[[{**each, "salt": "00" * 32} for each in record.chains[0]]]),
    "an index in the clear": lambda record: replace(
        record, mac=None, index=replace(record.index, chain=None, stored_nbytes=None, table_checksum=None)
    ),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_a_record_that_was_edited_is_not_authentic(change):
    """Any change of the record by an attacker without a key, with a checksum that fits."""
    store = saved(["aes"])
    resealed(store, change)
    with pytest.raises(NotAuthentic, match=RECORD_NAME):
        load(store)


MALFORMED = {
    "a chain that is not there": {"chain": 3},
    "half of what a coded file has": {"stored_nbytes": None},
    "a size below zero": {"stored_nbytes": -1},
    "coded, with digests apart": {"blocks": "x.blocks"},
    "no checksum": {"table_checksum": "crc:1"},
}


@pytest.mark.parametrize("members", MALFORMED.values(), ids=MALFORMED)
def test_records_no_writer_makes_are_refused(members):
    """Before any file is touched."""
    store = saved(["zstd"])
    resealed(store, lambda record: with_file(record, record.files[0].name, replace(record.files[0], **members)))
    with pytest.raises(sk.MalformedFile, match="no writer"):
        load(store)


def test_a_record_of_codecs_in_the_first_version_is_refused():
    """An old reader would ignore unknown fields, so none may be written."""
    store = saved(["zstd"])
    resealed(store, lambda record: replace(record, version=1))
    with pytest.raises(sk.MalformedFile):
        load(store)


def test_the_tables_of_enemies():
    """Tables with frames that overlap, leave holes, are too large, or stand for more than the record says."""
    good = FrameTable(*[torch.tensor(c).numpy() for c in ([0, 10], [10, 5], [8, 20], [12, 4], [0, 1])], bytes(32))

    def judged(table, plain_nbytes=15):
        data = encode_table(table)
        return decode_table(data, plain_nbytes=plain_nbytes, stored_nbytes=24 + len(data), where="f")

    assert len(judged(good)) == 2
    for column, values in {
        "start": [0, 9], "nbytes": [10, 2 * MIB], "stored_start": [8, 19], "stored_nbytes": [12, -4], "number": [1, 1],
    }.items():  # fmt: skip
        columns = {name: getattr(good, name) for name in COLUMNS} | {column: torch.tensor(values).numpy()}
        with pytest.raises(sk.MalformedFile):
            judged(FrameTable(**columns, digests=bytes(32)))
    with pytest.raises(sk.MalformedFile):
        judged(good, plain_nbytes=16)


def test_a_small_file_that_claims_a_large_index_is_not_believed():
    """All its frames and checksums are sound; what a reader allocates stays in proportion to what is stored."""
    store = saved(["float"])
    record = decode_record(store.get(RECORD_NAME, limit=MIB), "")
    zeros, name = bytes(65 * MIB), "index-bomb.skframes"
    seal = put_coded(store, name, zeros, CodecChain.opened(record.chains[0]))
    sizes = {"nbytes": len(zeros), "stored_nbytes": seal.stored_nbytes, "table_checksum": seal.table_checksum}
    bomb = replace(record.index, name=name, checksum=checksum_text(digest(zeros)), **sizes)
    changed(store, RECORD_NAME, encode_record(replace(record, index=bomb)))
    tracemalloc.start()
    try:
        with pytest.raises(sk.MalformedFile, match=r"an index of 68,157,440 bytes; at most 67,108,864"):
            load(store)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_chains_that_no_file_went_through():
    """A few are not opened, so they may need what is not here; more than a writer makes are refused."""
    store = saved(["zstd"])
    unknown = [[{"name": "of-another", "version": 1}]]
    resealed(store, lambda record: replace(record, chains=record.chains + unknown))
    assert bits(load(store)) == bits(sample_state())
    resealed(store, lambda record: replace(record, chains=record.chains * 129))
    with pytest.raises(sk.MalformedFile, match="codecs in a way no writer does"):
        load(store)


def test_damage_is_placed_whatever_the_file_is_called():
    """Also where the word that says where is a part of the name."""
    store = InOrderStore()
    sk.save({"bytes": {"w": torch.ones(9)}}, store)
    [name] = [file.blocks for file in data_files(store) if file.blocks]
    flip(store, name, 3)
    with pytest.raises(sk.DamagedCheckpoint, match=", from byte 0 on"):
        sk.open(store).verify()
