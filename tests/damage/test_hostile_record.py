"""
Commit records written by somebody who means harm, each ending in its right checksum: an error, before any other file
is touched where names are at fault, and no memory or time for what is merely declared.
"""

import json

import msgspec
import pytest

import shardkeep as sk
from shardkeep.format.data_file import checksum_text, digest
from shardkeep.format.record import RECORD_NAME
from shardkeep.testing.faulty_store import FaultyStore
from tests.damage import doors
from tests.damage.bounds import bounded
from tests.damage.forge import change, json_text, seal_header, seal_record
from tests.damage.subjects import QUICK, state, store_of

pytestmark = pytest.mark.timeout(60)


NAMES = {
    "parent": "../secret",
    "parent inside": "a/../../secret",
    "absolute": "/etc/passwd",
    "directory": "sub/model.safetensors",
    "backslash": "..\\secret",
    "drive": "C:secret",
    "NUL": "model\0.safetensors",
    "newline": "model\n.safetensors",
    "empty": "",
    "dot": ".",
    "dots": "..",
    "hidden": ".secret",
    "option": "-rf",
    "long": "a" * 252,
    "very long": "a" * 100_000,
    "not ASCII": "modèl.safetensors",
    "full-width dots": "\uff0e\uff0e\uff0fsecret",
    "surrogate": "\ud800",
    "the record": RECORD_NAME,
    "URL": "file:///etc/passwd",
    "wildcard": "*",
    "spaces": "a b",
}


@pytest.mark.parametrize("which", ["index", "file"])
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_that_are_no_names(subject, forgery, which, name):
    """A file name that could lead outside, or upset a file system, is refused before another file is touched."""
    (forgery.record["index"] if which == "index" else forgery.record["files"][0])["name"] = name
    forgery.record["index"] |= {"nbytes": 100, "checksum": "xxh3_128:" + "0" * 32}
    record = seal_record(json_text(forgery.record))
    spy = FaultyStore(store_of({**subject.blobs, RECORD_NAME: record}))
    answers = doors.try_all(spy, subject, f"{which} named {name[:50]!r}")
    assert all(isinstance(error, sk.MalformedFile) for error in answers.all)
    assert {each.partition(" ")[2] for each in spy.operations} == {RECORD_NAME}


CASES = {}


def case(forge):
    CASES[forge.__name__] = forge
    return forge


@case
def a_header_of_all_the_file(f):
    entry = f.file("model")
    entry["header_nbytes"] = entry["nbytes"]
    entry["checksum"] = checksum_text(digest(f.data[entry["name"]]))


@case
def a_header_shorter_than_it_is(f):
    entry = f.file("model")
    entry["header_nbytes"] = 8
    entry["checksum"] = checksum_text(digest(f.data[entry["name"]][:8]))


@case
def meta_a_hundred_thousand_deep(f):
    f.record["meta"] = {"a": 0}
    f.record_text = json_text(f.record).replace(b'"a": 0', b'"a": ' + b"[" * 100_000 + b"]" * 100_000)


@case
def an_unknown_member_a_hundred_thousand_deep(f):
    f.record["new"] = 0
    f.record_text = json_text(f.record).replace(b'"new": 0', b'"new": ' + b'{"a":' * 100_000 + b"0" + b"}" * 100_000)


CASES |= {
    "all_files_of_2_62_bytes": lambda f: [file.update(nbytes=2**62) for file in f.record["files"]],
    "a_header_of_2_40_bytes": lambda f: f.file("model").update(header_nbytes=2**40, nbytes=2**41),
    "a_file_that_is_a_name": lambda f: f.record["files"].__setitem__(0, "model"),
    "a_file_that_is_null": lambda f: f.record["files"].__setitem__(0, None),
    "a_size_that_is_a_fraction": lambda f: f.file("model").update(nbytes=f.file("model")["nbytes"] + 0.5),
    "two_files_of_one_name": lambda f: f.record["files"][1].update(name=f.record["files"][0]["name"]),
    "a_file_named_as_the_index": lambda f: f.record["files"][1].update(name=f.index_name),
    "a_file_of_negative_size": lambda f: f.record["files"][0].update(nbytes=-1),
    "a_file_of_2_62_bytes": lambda f: f.file("model").update(nbytes=2**62),
    "a_file_of_2_63_bytes": lambda f: f.file("model").update(nbytes=2**63),
    "a_file_of_2_70_bytes": lambda f: f.file("model").update(nbytes=2**70),
    "a_file_of_a_thousand_digits": lambda f: f.file("model").update(nbytes=10**1000),
    "a_file_of_ten_thousand_digits": lambda f: change(
        f, record_text=json_text(f.record).replace(b'"nbytes": ', b'"nbytes": 1' + b"0" * 10000)
    ),
    "a_header_longer_than_the_file": lambda f: f.file("model").update(header_nbytes=f.file("model")["nbytes"] + 1),
    "a_header_of_no_bytes": lambda f: f.file("model").update(header_nbytes=0),
    "a_header_of_negative_size": lambda f: f.file("model").update(header_nbytes=-4096),
    "blocks_of_no_bytes": lambda f: f.file("model").update(block_nbytes=0),
    "blocks_of_one_byte": lambda f: f.file("model").update(block_nbytes=1),
    "blocks_of_half_a_page": lambda f: f.file("model").update(block_nbytes=2048),
    "blocks_of_a_page_and_a_byte": lambda f: f.file("model").update(block_nbytes=4097),
    "blocks_that_no_window_is_a_multiple_of": lambda f: f.file("optim").update(block_nbytes=3 * 4096),
    "blocks_of_negative_size": lambda f: f.file("model").update(block_nbytes=-4096),
    "blocks_of_2_40_bytes": lambda f: f.file("model").update(block_nbytes=2**40),
    "blocks_of_2_62_bytes": lambda f: f.file("model").update(block_nbytes=2**62),
    "blocks_of_2_70_bytes": lambda f: f.file("model").update(block_nbytes=2**70),
    "a_checksum_that_is_none": lambda f: f.file("model").update(checksum=""),
    "a_checksum_of_another_kind": lambda f: f.file("model").update(checksum="crc32:00000000"),
    "an_index_of_2_60_bytes": lambda f: f.record["index"].update(nbytes=2**60),
    "an_index_of_2_70_bytes": lambda f: f.record["index"].update(nbytes=2**70),
    "an_index_of_negative_size": lambda f: f.record["index"].update(nbytes=-1),
    "an_index_with_another_checksum": lambda f: f.record["index"].update(checksum="xxh3_128:" + "0" * 32),
    "no_files": lambda f: f.record.update(files=[]),
    "a_file_too_few": lambda f: f.record["files"].pop(),
    "files_in_another_order": lambda f: f.record["files"].reverse(),
    "a_file_that_is_not_there": lambda f: f.file("model").update(name="model-elsewhere.safetensors"),
    "files_that_are_no_list": lambda f: f.record.update(files={"0": f.record["files"][0]}),
    "a_size_that_is_text": lambda f: f.file("model").update(nbytes=str(f.file("model")["nbytes"])),
    "a_size_that_is_true": lambda f: f.file("model").update(nbytes=True),
    "an_index_that_is_null": lambda f: f.record.update(index=None),
    "an_index_without_a_name": lambda f: f.record["index"].pop("name"),
    "a_name_that_is_a_number": lambda f: f.file("model").update(name=5),
    "no_save_id": lambda f: f.record.pop("save_id"),
    "no_totals": lambda f: f.record.pop("totals"),
    "meta_that_is_a_list": lambda f: f.record.update(meta=[1]),
    "another_format": lambda f: f.record.update(format="pickle"),
    "no_format": lambda f: f.record.pop("format"),
    "a_record_that_is_a_list": lambda f: change(f, record_text=b"[1"),
    "a_record_that_is_no_json": lambda f: change(f, record_text=b"{'a': 1"),
    "a_record_that_is_no_text": lambda f: change(f, record_text=json_text(f.record).replace(b'"small"', b'"\xff\xfe"')),
    # A second end in the middle: the text up to it has a right checksum too.
    "a_record_with_a_tail_inside": lambda f: change(f, record_text=seal_record(json_text(f.record))),
    "a_record_in_utf_16": lambda f: change(f, record_text=json.dumps(f.record).encode("utf-16")),
}


@pytest.mark.parametrize("forge", CASES.values(), ids=CASES)
def test_a_forged_record_is_refused(subject, forgery, forge):
    """`load` and `verify` raise an error of ours, at no cost; so does `to_dict`, or it gives exactly what was saved."""
    forge(forgery)
    store = store_of(forgery.blobs())
    loaded, _, verified, _ = bounded(
        lambda: [door(store, subject) for door in (doors.load, doors.to_dict, doors.verify, doors.look)]
    )
    assert loaded is not None, "load took it"
    assert verified is not None, "verify took it"


@pytest.mark.parametrize("version", [3, 4, 10**6, 2**70, "1", 1.5, None, [], "two"])
def test_a_newer_version_says_to_upgrade(subject, forgery, version):
    """A version that this reader does not know is not damage: the error says so, and what to do."""
    forgery.record |= {"version": version, "writer": "shardkeep 9.0", "files": "whatever version 3 has here"}
    answers = doors.try_all(store_of(forgery.blobs()), subject, f"version {version!r}")
    for error in answers.all:
        assert isinstance(error, sk.UnsupportedVersion)
        assert "upgrade shardkeep" in str(error)
        assert "shardkeep 9.0" in str(error)


@pytest.mark.parametrize("version", [0, -1, -(2**70), True])
def test_versions_that_never_were(subject, forgery, version):
    forgery.record["version"] = version
    answers = doors.try_all(store_of(forgery.blobs()), subject, f"version {version!r}")
    assert all(isinstance(error, (sk.MalformedFile, sk.UnsupportedVersion)) for error in answers.all)


def test_what_a_record_may_say(subject, forgery):
    """Members nobody knows, other spacing, totals of any size and odd meta are read: nothing depends on them."""
    forgery.record |= {"new": {"a": [1, 2, {"b": None}]}, "world_size": 10**6, "step": -1}
    forgery.record["totals"] |= {"tensors": 0, "tensor_bytes": 2**60, "new": 1}
    forgery.record["files"][0]["new"] = True
    forgery.record["meta"] = {"huge": 10**18, "text": "\u2028 é \x7f", "deep": {"a": [[[[[]]]]]}, "float": 1e300}
    forgery.keep_index(subject)
    forgery.record_text = json.dumps(forgery.record).encode().removesuffix(b"}")
    store = store_of(forgery.blobs())
    assert doors.try_all(store, subject, "odd but sound").all == [None, None, None]
    assert sk.open(store).meta == forgery.record["meta"]


@pytest.mark.parametrize(
    "number", ["1" + "0" * 30, "1e999", "-1e999", '"\\ud800"', '"\\u0000"'], ids=["1e30", "inf", "-inf", "half", "nul"]
)
def test_meta_that_json_can_say_and_python_hardly(subject, forgery, number):
    """Numbers and letters at the edge of what JSON has are read or refused, and never upset a load."""
    forgery.record["meta"] = {"x": 0}
    forgery.keep_index(subject)
    forgery.record_text = json_text(forgery.record).replace(b'"x": 0', b'"x": ' + number.encode())
    answers = doors.try_all(store_of(forgery.blobs()), subject, f"meta {number[:10]}")
    assert len({type(error) for error in answers.all}) == 1


def test_a_hundred_thousand_files(subject):
    """100,000 listed files that are missing cost memory and time in proportion to the record; the others load."""
    record = msgspec.json.decode(subject.blobs[RECORD_NAME])
    del record["checksum"]
    ghost = {"nbytes": 4097, "header_nbytes": 4096, "block_nbytes": 65536, "checksum": "xxh3_128:" + "0" * 32}
    record["files"] += [{"name": f"g{n}", **ghost} for n in range(100_000)]
    data = seal_record(msgspec.json.encode(record).removesuffix(b"}"))
    del record
    store = store_of({**subject.blobs, RECORD_NAME: data})
    answers = bounded(
        lambda: doors.try_all(store, subject, "many files"), mib=20 * len(data) / (1 << 20), seconds=30, traced=False
    )
    assert (answers.load, answers.to_dict) == (None, None)
    assert "100000 wrong" in str(answers.verify)


# Headers of data files


HEADERS = {
    "no digests": lambda h: h.replace(b"shardkeep.blocks", b"shardkeep.blocka"),
    "no base64": lambda h: _digests(h, lambda d: b"!" * len(d)),
    "too few": lambda h: _digests(h, lambda d: d[:-4]),
    "none": lambda h: _digests(h, lambda d: b""),
    "too many": lambda h: _digests(h, lambda d: d + d),
    "of other bytes": lambda h: _digests(h, lambda d: d[::-1]),
    "without an end": lambda h: _digests(h, lambda d: d).replace(b'"', b"'"),
    "zeros": lambda h: bytes(len(h)),
    "another mark first": lambda h: h.replace(b'"format":"pt"', b'"shardkeep.blocks":""'),
}


def _digests(header, change):
    mark = b'"shardkeep.blocks":"'
    start = header.index(mark) + len(mark)
    stop = header.index(b'"', start)
    return header[:start] + change(header[start:stop]) + header[stop:]


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_a_forged_header_is_refused(subject, forgery, change):
    """A header whose own checksum is right but whose digests are missing, malformed or of other data is refused."""
    entry = forgery.file("optim")
    data = forgery.data[entry["name"]]
    header = change(data[: entry["header_nbytes"]])
    header = header[: entry["header_nbytes"]].ljust(entry["header_nbytes"])
    seal_header(forgery, "optim", header + data[entry["header_nbytes"] :])
    answers = doors.try_all(store_of(forgery.blobs()), subject, "a forged header")
    for error in answers.all:
        assert isinstance(error, sk.DamagedCheckpoint)
        assert entry["name"] in str(error)


def test_what_the_header_says_of_tensors_is_not_believed(subject, forgery):
    """Names and offsets in a safetensors header are for other tools; forging them moves no byte of ours."""
    entry = forgery.file("model")
    data = forgery.data[entry["name"]]
    changed = data.replace(b'"model.half"', b'"../../half"').replace(b'"data_offsets":[0', b'"data_offsets":[9')
    assert changed != data
    seal_header(forgery, "model", changed)
    answers = doors.try_all(store_of(forgery.blobs()), subject, "a lying header")
    assert answers.all == [None, None, None]


CLAIMS = {
    "deep": b'{"x":' + b"[" * 4000,
    "no JSON": b"\xff" * 100,
    "no text": b'{"host":"\xff","pid":1,"started":""}',
    "empty": b"",
    "a huge number": b'{"host":"a","pid":1e400,"started":""}',
    "a negative number": b'{"host":"a","pid":-99999999999999999999999,"started":"1"}',
    "a path": b'{"host":"a","pid":"../../etc/passwd","started":"1"}',
    "too long": b" " * 5000,
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_forged_claim_stops_no_save(subject, claim):
    store = store_of({**subject.blobs, "claim-0123456789abcdef0123.json": claim})
    sk.save(state(), store, overwrite=True, options=QUICK)
    assert doors.try_all(store, subject, "beside a forged claim").all == [None, None, None]
