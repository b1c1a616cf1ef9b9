"""
Random mutations of every file. As they are, they are caught by checksums: an error or exactly what was saved. With the
checksums made right again they reach the parsers: an error of ours, whatever was written.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkeep.format.record import RECORD_NAME
from tests.damage import doors
from tests.damage.forge import json_text, seal_header, seal_record, take_apart
from tests.damage.subjects import SUBJECTS, one_rank, store_of

COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
}
ODD_BYTES = [
    b"\0",
    b"\xff",
    b"\x80",
    b"\x7f",
    b"\xff" * 8,
    bytes(8),
    b"\x7f" + b"\xff" * 7,
    b"\x01" * 64,
    b"-",
    b"9" * 30,
]


@st.composite
def mutations(draw, data):
    """Flip, overwrite, splice, insert, delete or repeat, a few times."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        end = min(len(data), at + draw(st.sampled_from([1, 2, 8, 64, 4096])))
        how = draw(st.sampled_from(["flip", "overwrite", "splice", "insert", "delete", "repeat", "swap"]))
        new = draw(st.sampled_from(ODD_BYTES) | st.binary(min_size=1, max_size=16))
        if how == "flip" and data:
            data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        elif how == "overwrite":
            data = (data[:at] + new + data[at + len(new) :])[: len(data)]
        elif how == "splice":
            source = draw(st.integers(0, max(0, len(data) - 1)))
            piece = data[source : source + end - at]
            data = data[:at] + piece + data[at + len(piece) :]
        elif how == "insert":
            data = data[:at] + new + data[at:]
        elif how == "delete":
            data = data[:at] + data[end:]
        elif how == "repeat":
            data = data[:end] + data[at:end] + data[end:]
        elif how == "swap":
            middle = (at + end) // 2
            data = data[:at] + data[middle:end] + data[at:middle] + data[end:]
    return data


@settings(max_examples=120, **COMMON)
@given(st.data())
def test_mutated_files(data):
    """One or two files mutated at random: each door refuses or is exact; what `verify` passes is what was written."""
    subject = data.draw(st.sampled_from(SUBJECTS))()
    names = sorted(subject.blobs)
    blobs = dict(subject.blobs)
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        blobs[name] = data.draw(mutations(blobs[name]))
    answers = doors.try_all(store_of(blobs), subject, "mutated")
    if blobs != subject.blobs:
        assert answers.verify is not None


@settings(max_examples=100, **COMMON)
@given(st.data())
def test_files_mixed_up(data):
    """Files of two saves dealt out at random under each other's names: an error, or exactly what was saved."""
    subject, other = one_rank(), one_rank(1)
    pool = [*subject.blobs.values(), *other.blobs.values()]
    blobs = {name: data.draw(st.sampled_from([subject.blobs[name], *pool])) for name in subject.blobs}
    answers = doors.try_all(store_of(blobs), subject, "mixed up")
    if blobs != subject.blobs:
        assert answers.verify is not None


BYTES = ("keys", "values", "value_keys", "tree")
SECTIONS = sorted(take_apart(one_rank()).sections)
NUMBERS = st.sampled_from([0, 1, 2, 3, 255, 2**16, 2**31, 2**32, 2**58, 2**62, 2**63 - 1, 2**63, 2**64 - 1])


@settings(max_examples=120, **COMMON)
@given(st.data())
def test_forged_columns(data):
    """Random numbers in the index under right digests: an error of ours or data of the right shapes, no crash."""
    subject = data.draw(st.sampled_from(SUBJECTS))()
    forgery = take_apart(subject)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(SECTIONS))
        section = forgery.sections[name]
        how = data.draw(st.sampled_from(["number", "number", "bytes", "shape", "code", "swap"]))
        if how == "number" and section.raw and len(section.raw) % np.dtype(section.code).itemsize == 0:
            flat = np.frombuffer(section.raw, section.code).astype(object)
            flat[data.draw(st.integers(0, flat.size - 1))] = data.draw(NUMBERS | st.integers(0, 12))
            shape = section.shape
            forgery.set(name, flat, section.code if name in BYTES else "<u8")
            forgery.sections[name].shape = shape
        elif how == "bytes" and section.raw:
            section.raw = data.draw(mutations(section.raw))[: len(section.raw)].ljust(len(section.raw), b"\0")
        elif how == "shape":
            section.shape = tuple(data.draw(st.lists(NUMBERS, max_size=3)))
        elif how == "code":
            section.code = data.draw(st.sampled_from(["|u1", "<u2", "<u4", "<u8", "<i8"]))
        elif how == "swap":
            other = data.draw(st.sampled_from(SECTIONS))
            forgery.sections[name], forgery.sections[other] = forgery.sections[other], forgery.sections[name]
    _survives(store_of(forgery.blobs()), subject)


@settings(max_examples=100, **COMMON)
@given(st.data())
def test_forged_records(data):
    """A mutated record with its checksum made right: an error of ours or data."""
    subject = one_rank()
    forgery = take_apart(subject)
    forgery.keep_index(subject)
    text = data.draw(mutations(json_text(forgery.record)))
    _survives(store_of({**subject.blobs, RECORD_NAME: seal_record(text)}), subject)


@settings(max_examples=80, **COMMON)
@given(st.data())
def test_forged_index_headers(data):
    """A mutated index with its checksum made right in the record: an error of ours or data."""
    subject = one_rank()
    forgery = take_apart(subject)
    forgery.index = data.draw(mutations(subject.blobs[subject.index_name]))
    _survives(store_of(forgery.blobs()), subject)


@settings(max_examples=60, **COMMON)
@given(st.data())
def test_forged_data_files(data):
    """A mutated data file with size and header's checksum made right in the record: an error of ours or data."""
    subject = one_rank()
    forgery = take_apart(subject)
    group = data.draw(st.sampled_from(["model", "optim", "state"]))
    changed = data.draw(mutations(forgery.data[forgery.file(group)["name"]]))
    if len(changed) >= forgery.file(group)["header_nbytes"]:
        seal_header(forgery, group, changed)
    _survives(store_of(forgery.blobs()), subject)


def _survives(store, subject):
    """Whatever a forger wrote, every door raises one of our errors or gives something: it is the forger's own data."""
    for door in (doors.load, doors.to_dict, doors.verify, doors.look):
        try:
            door(store, subject, doors.FORGED)
        except doors.OtherData:
            pass
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is not ours
            pytest.fail(f"{door.__name__} raised {type(exc).__name__}: {exc}")
