"""Hostile pickles: nothing that a name gives can be changed, and little does not become much."""

import argparse
import collections
import datetime as dt
import decimal
import fractions
import io
import pathlib
import pickle
import tracemalloc
import types
import uuid

import numpy as np
import pytest

from shardkeep.dcp._impl import planners as objects
from shardkeep.errors import MalformedFile, PickleRefused
from shardkeep.format import torch_zip as torch_archive
from shardkeep.format.pickles import NameTable, load_pickle, plain_names
from shardkeep.layouts import torch as torch_metadata
from shardkeep.layouts import torch_pickle as pickled_metadata

TABLES = {
    "plain": plain_names(),
    "tensors": torch_archive._NAMES,
    "layout": torch_metadata._stand_ins(),
    "metadata": pickled_metadata._known(),
    "objects": objects._plain(),
}
CASES = [(table, *name) for table, names in TABLES.items() for name in names]


def text(value):
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def named(module, name):
    return f"c{module}\n{name}\n".encode()


def read(body, names=None):
    return load_pickle(b"\x80\x04" + body + b".", plain_names() if names is None else names, where="a file")


@pytest.mark.parametrize(("table", "module", "name"), CASES)
def test_nothing_that_a_name_gives_can_be_changed(table, module, name):
    """Neither by setting an attribute, nor by what a pickle has for a state."""
    found = NameTable(TABLES[table], 100).find(module, name)
    with pytest.raises((AttributeError, TypeError, MalformedFile)):
        found.exists = 1
    for state in (b"N}" + text("exists") + b"K\x01s\x86", b"}" + text("exists") + b"K\x01s"):
        with pytest.raises(MalformedFile):
            read(named(module, name) + state + b"b0N", TABLES[table])


@pytest.mark.parametrize("kind", [pathlib.Path, collections.Counter, argparse.Namespace, uuid.UUID, fractions.Fraction])
def test_classes_of_the_process_stay_as_they_are(kind):
    """The attack itself, on an attribute that is there."""
    attribute = "__eq__"
    before = dict(vars(kind))
    with pytest.raises(MalformedFile):
        read(named(kind.__module__, kind.__name__) + b"N}" + text(attribute) + b"Ns\x86b0N")
    assert dict(vars(kind)) == before


def test_dtypes_of_numpy_stay_as_they_are():
    state = pickle.dumps((3, ">", None, None, None, -1, -1, 0), 2)[2:-1]
    made = read(named("numpy", "dtype") + b"(" + text("f8") + b"\x89\x89tR" + state + b"b")
    assert made == np.dtype(">f8")
    assert np.dtype("f8").isnative


def dtype_with(state, code):
    return named("numpy", "dtype") + b"(" + text(code) + b"\x89\x89tR" + pickle.dumps(state, 2)[2:-1] + b"b"


def test_forged_states_of_dtypes_do_not_reach_numpy():
    """Flags that say that elements are objects crash numpy; a field behind the end of an element reads other memory."""
    forged = dtype_with((3, "<", None, None, None, -1, -1, 255), "i8")
    array = named("numpy._core.multiarray", "_reconstruct") + named("numpy", "ndarray") + b"K\0\x85" + text("b")
    made = read(array + b"\x87R(K\x01K\x02\x85" + forged + b"\x89C\x10" + bytes([1] + 15 * [0]) + b"tb")
    assert made.tolist() == [1, 0]
    assert made.dtype.flags == np.dtype("i8").flags
    for state, code in [
        ((3, "|", None, ("a",), {"a": (np.dtype("i4"), 9000)}, 4, 1, 16), "V4"),
        ((3, "<", None, ("a",), {"a": (np.dtype("i4"), 0)}, 4, 1, 16), "i4"),
        ((3, "|", None, None, None, 1 << 30, 1, 0), "V4"),
        ((3, "<", (np.dtype("i4"), (1 << 40,)), None, None, 4, 1, 0), "V4"),
    ]:
        with pytest.raises(MalformedFile):
            read(dtype_with(state, code))


@pytest.mark.parametrize(
    "described",
    [
        ">i4", "S5", "U3", "V7", "M8[25s]", ">m8[ns]", "M8", "g", [("a", "i4"), ("b", ">U2", (2,))], ("i4", (2, 3)),
        {"names": ["x", "y"], "formats": ["f4", "i1"], "offsets": [4, 8], "titles": ["T", None], "itemsize": 16},
    ],
)  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 4])
def test_dtypes_come_back(described, protocol):
    value = np.dtype(described)
    made = load_pickle(pickle.dumps(value, protocol), plain_names(), where="a file")
    assert (made, made.type, made.flags) == (value, value.type, value.flags)


@pytest.mark.parametrize("nbytes", [26, 40])
def test_a_short_file_with_marks_of_an_archive_is_malformed(nbytes):
    data = b"PK\6\6".ljust(nbytes - 22, b"\0") + torch_archive._END.pack(b"PK\5\6", *(0,) * 7)
    assert not torch_archive.is_archive(data)
    with pytest.raises(MalformedFile):
        torch_archive.read_object(data, where="a file")


def test_dtypes_of_ours_stay_as_they_are():
    """The rows of the table are not given out: their fields could be filled anew."""
    state = b"](K\x63" + text("x") + b"K\x01NNK\x01e"
    with pytest.raises(MalformedFile):
        read(named("torch", "float32") + state + b"b0N", torch_metadata._stand_ins())
    assert torch_metadata.by_name("float32").itemsize == 4


SHARED = b"](" + b"K\x01" * 5000 + b"eq\x01"
BOMBS = {
    "an array by its size": named("numpy", "ndarray") + b"((J\0\0\0\x40t" + text("u1") + b"tR",
    "an array of that size": named("numpy._core.multiarray", "_reconstruct") + named("numpy", "ndarray")
    + b"J\0\0\0\x40\x85" + text("b") + b"\x87R",
    "a number of numpy's": named("numpy._core.multiarray", "scalar") + named("numpy", "dtype") + text("V9000000")
    + b"\x85R\x85R",
    "a dtype of a gigabyte": named("numpy", "dtype") + text("V99999999") + b"\x85R",
    "a list of a range": named("builtins", "list") + named("builtins", "range") + b"J\xff\xff\xff\0\x85R\x85R",
    "a set of a range": named("builtins", "set") + named("builtins", "range") + b"J\xff\xff\xff\0\x85R\x85R",
    "a deque of a range": named("collections", "deque") + named("builtins", "range") + b"J\xff\xff\xff\0\x85R\x85R",
    "text of tuples": named("builtins", "str") + text("x") + b"\x85\x85R",
    "tuples twice": b"}()" + b"2\x86" * 60 + b"K\x01u",
    "sets of one list": SHARED + b"0](" + (named("builtins", "frozenset") + b"h\x01\x85R") * 100 + b"e",
    "deques of one list": SHARED + b"0](" + (named("collections", "deque") + b"h\x01\x85R") * 100 + b"e",
    "bytes of one text": text("x" * 100_000) + b"q\x010](" + (named("_codecs", "encode") + b"h\x01" + text("latin1")
    + b"\x86R") * 200 + b"e",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_little_does_not_become_much(bomb):
    with pytest.raises(MalformedFile):
        read(BOMBS[bomb])


@pytest.mark.parametrize(
    "kind", [int, list, set, pathlib.PosixPath, collections.Counter, argparse.Namespace, uuid.UUID]
)
def test_a_class_as_a_value_is_refused(kind):
    """What stands for it while the pickle is read must not come back in its place."""
    with pytest.raises(PickleRefused, match="as a value"):
        load_pickle(pickle.dumps({"a": [1, (kind, 2)]}), plain_names(), where="a file")


VALUES = [
    {1, 2}, frozenset("ab"), collections.OrderedDict(a=1), collections.deque([1, 2], 5), collections.Counter("aab"),
    collections.defaultdict(list, a=[1]), collections.defaultdict(collections.Counter), b"", b"abc", bytearray(b"x\xff"),
    range(5), slice(1, 2), 1 + 2j, decimal.Decimal("1.5"), fractions.Fraction(1, 3), dt.timedelta(3),
    dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc), pathlib.Path("/a/b"), pathlib.PureWindowsPath("c:/x"),
    argparse.Namespace(a=1), types.SimpleNamespace(b=2), uuid.UUID(int=5), np.float32(3), np.datetime64("2020-01-01"),
    np.dtype(">i4"), [pathlib.Path("/a/long/folder/of/many/files", str(i)) for i in range(500)],
]  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_values_come_back(protocol):
    made = load_pickle(pickle.dumps(VALUES, protocol), plain_names(), where="a file")
    assert made == VALUES
    assert [type(each) for each in made] == [type(each) for each in VALUES]
    assert [each.default_factory for each in made if isinstance(each, collections.defaultdict)] == [
        list, collections.Counter,
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4])
def test_arrays_come_back(protocol):
    record = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", ">f8")])
    arrays = [np.arange(5), np.arange(6.0).reshape(2, 3).T, np.array(["a", "bc"]), np.arange(3, dtype=">i8"), record]
    raw = pickle.dumps(arrays, protocol)
    for value, made in zip(pickle.loads(raw), load_pickle(raw, plain_names(), where="a file"), strict=True):
        assert (made.dtype, made.tolist()) == (value.dtype, value.tolist())


def test_buffers_count_what_they_copy():
    """Buffers come back as what they are; many of the same bytes, which would take all memory, are refused."""
    nbytes = 1 << 20
    body = b"B" + nbytes.to_bytes(4, "little") + bytes(nbytes) + b"q\x000" + named("_io", "BytesIO") + b"q\x010]("
    buffer = b"h\x01)\x81h\x00K\x02N\x87b"
    for made in read(body + buffer * 3 + b"e"):
        assert (type(made), vars(made), made.getbuffer().nbytes, made.tell()) == (io.BytesIO, {}, nbytes, 2)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFile, match="longer than itself"):
            read(body + buffer * 200 + b"e")
        assert tracemalloc.get_traced_memory()[1] < 50 * nbytes
    finally:
        tracemalloc.stop()
    with pytest.raises(MalformedFile):
        read(named("_io", "BytesIO") + b")\x81" + b"\x96" + (4).to_bytes(8, "little") + b"abcdK\x00N\x87b")
