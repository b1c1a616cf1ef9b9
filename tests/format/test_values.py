"""Plain values: the same type and bits come back, and no byte string does harm."""

import collections
import enum
import functools
import pathlib
import re
import struct
import sys
import types
import typing
import uuid
import zoneinfo
from datetime import date, datetime, timedelta, timezone, tzinfo
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import MalformedFile, PickleRefused, UnsupportedLeaf
from shardkeep.format.values import EnumRef, decode_value, encode_value


class Color(enum.Enum):
    RED = 1
    GREEN = ("g", 2)


class Level(enum.IntEnum):
    LOW = 1


class Mode(str, enum.Enum):
    TRAIN = "train"


class Bits(enum.Flag):
    A = 1
    B = 2


class Made(enum.Enum):
    LINEAR = torch.nn.Linear


class Outer:
    class Inner(enum.Enum):
        X = 1


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Point(typing.NamedTuple):
    x: int
    y: int


class Opaque:
    def __init__(self, n=0):
        self.n = n

    def __eq__(self, other):
        return type(other) is Opaque and other.n == self.n

    __hash__ = None


class Loop(tzinfo):
    pass


def round_trip(value, **options):
    return decode_value(encode_value(value, key="k", **options), key="k", **options)


def ext(code, *parts):
    """An ext value whose parts are encoded as they are, sense or not."""
    return raw_ext(code, encode_value(list(parts), key="k"))


def raw_ext(code, payload):
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, payload))


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and (a.tobytes() == b.tobytes() or repr(a.tolist()) == repr(b.tolist()))
        )
    if isinstance(a, np.longdouble | np.clongdouble):
        return a == b or bool(np.isnan(a) and np.isnan(b))
    if isinstance(a, np.str_ | np.bytes_):
        return a == b and len(a) == len(b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if type(a) is Decimal:
        return a.as_tuple() == b.as_tuple()
    if type(a) in (set, frozenset):
        order = functools.partial(encode_value, key="k")
        return same(sorted(a, key=order), sorted(b, key=order))
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) in (dict, collections.OrderedDict):
        return same(list(a.items()), list(b.items()))
    if type(a) in (datetime, clock):
        return a == b and a.fold == b.fold and same(a.tzinfo, b.tzinfo)
    if type(a) is slice:
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    return a == b


FIXED = [
    None, True, False, 0, 1, -1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 2**4000, -(2**4000),
    0.0, -0.0, 1.5, float("inf"), float("nan"), struct.unpack("d", b"\x01\0\0\0\0\0\xf8\xff")[0],
    1j, complex(-0.0, float("nan")), "", "a", "\u00e9\U0001f600", "\ud800x", "a" * 300, b"", b"\0\xff", bytearray(b"q"),
    [], (), set(), frozenset(), {}, [1, [2, (3, {4}, {"a": [None]})]], (1, (2, (3,))), {1: 2, (1, "a"): [3], None: {}},
    {"b": 1, "a": 2}, collections.OrderedDict([("b", 1), ("a", 2)]), {1.5, "a", None, (1, frozenset({2}))},
    ["\ud800", 2**70], range(3), range(10**30, 0, -7), slice(None), slice(1, "a", 2.5), ...,
    datetime(2020, 2, 29, 1, 2, 3, 4),  # noqa: DTZ001 (naive is a case)
    datetime(2020, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
    datetime(1, 1, 1, tzinfo=timezone.utc), datetime.max.replace(tzinfo=timezone.utc), date.min, clock(1, 2, fold=1), timedelta.min, timezone.utc,
    clock(23, 59, 59, 999999, tzinfo=timezone(timedelta(hours=-3, seconds=1), "here")), zoneinfo.ZoneInfo("Etc/GMT+5"),
    Decimal("1.10"), Decimal("-0E+7"), Decimal("sNaN12"), Decimal("-Infinity"), Decimal("1E+999999999999999999"),
    Fraction(-1, 3), uuid.UUID(int=7), pathlib.Path("/a/b"), pathlib.PurePosixPath(), pathlib.PureWindowsPath("C:\\a"),
    Color.RED, Color.GREEN, Level.LOW, Mode.TRAIN, Bits.A | Bits.B, Bits(0), Made.LINEAR, Outer.Inner.X, re.IGNORECASE | re.MULTILINE,
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda:1"), torch.device("cpu"), torch.Size([]),
    torch.Size([2, 3]), torch.strided, torch.sparse_coo, torch.channels_last, torch.preserve_format,
    np.dtype("f4"), np.dtype(">f4"), np.dtype("U0"), np.dtype("M8[25s]"), np.dtype("M8"), np.dtype(np.longlong),
    np.dtype("c"), np.dtype("V0"), np.dtype([]), np.dtype([("a", "i4"), ("b", "U3", (2, 1))]), np.dtype(">g"),
    np.dtype({"names": ["a", "b"], "formats": ["<i4", [("x", "S2")]], "offsets": [4, 1], "itemsize": 40}),
    np.dtype([(("title", "a"), "i1"), ("b", "i8")], align=True), np.dtype(("i2", (2, 3))),
    np.str_("a\0"), np.bytes_(b"a\0"), np.str_("\ud800"), np.float64("nan"), np.float64(-0.0), np.float16(1.5),
    np.longdouble(1) / 3, np.clongdouble(1 + 2j) / 3, np.longlong(3), np.ulonglong(2**64 - 1), np.bool_(True),
    np.datetime64("NaT", "s"), np.datetime64("2020-01-01T00", "ns"), np.timedelta64(5, "25s"), np.void(b"abc"),
    np.array((1, 2.5), dtype=[("a", "i4"), ("b", "f8")])[()],
    *[np.dtype(char).type(1) for char in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]],
]  # fmt: skip


@pytest.mark.parametrize("value", FIXED, ids=lambda v: f"{type(v).__name__}")
def test_every_kind_comes_back(value):
    assert same(value, round_trip(value))
    assert same([value, (value, 1)], round_trip([value, (value, 1)]))
    if not isinstance(value, list | set | dict | bytearray | slice | np.void) and not (
        type(value) is Decimal and value.is_snan()
    ):
        assert same({value: 1}, round_trip({value: 1}))


def test_every_name_torch_has():
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    found = [value for value in vars(torch).values() if isinstance(value, kinds)]
    assert len(found) > 40
    assert all(a is b for a, b in zip(found, round_trip(found), strict=True))


ARRAYS = [
    np.array(["a", "bcd"]),
    np.array([b"a", b""]),
    np.array("x"),
    np.array([""]),
    np.zeros((0, 3), "U4"),
    np.arange(6).astype("M8[s]").reshape(2, 3).T,
    np.array([(i, i / 2) for i in range(16)], dtype=[("a", "i4"), ("b", "f8")]).reshape(4, 4)[::2, 1:],
    np.arange(4, dtype=">i4"),
    np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    np.arange(3, dtype="g") / 3,
    (np.arange(3, dtype="g") / 3).astype(">g"),
    (np.arange(3, dtype="G") * 1j / 3).astype(">G"),
    np.zeros((), "V3"),
    np.zeros((2, 2), "V0"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: str(a.dtype))
def test_arrays_keep_dtype_shape_and_order(array):
    got = round_trip(array)
    assert (array.dtype, array.shape, array.tolist()) == (got.dtype, got.shape, got.tolist())
    assert got.flags.writeable
    assert got.flags.f_contiguous == (array.flags.f_contiguous or got.ndim < 2)
    assert got.flags.owndata


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**80), 2**80), st.floats(), st.complex_numbers(),
    st.text(st.characters(codec=None)), st.binary(), st.datetimes(timezones=st.none() | st.just(timezone.utc)),
    st.dates(), st.times(), st.timedeltas(), st.decimals(allow_nan=False), st.fractions(), st.uuids(),
    st.sampled_from([*Color, *Level, *Mode, Bits.A | Bits.B, torch.int8, torch.device("cpu"), torch.Size([1]), ...]),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(pathlib.PurePosixPath, st.text()), st.builds(pathlib.PureWindowsPath, st.text()),
    st.builds(np.float32, st.floats(width=32)), st.builds(np.float64, st.floats()), st.builds(np.str_, st.text()),
)  # fmt: skip
hashables = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.sets(hashables),
        st.frozensets(hashables),
        st.dictionaries(hashables, inner),
        st.dictionaries(hashables, inner).map(collections.OrderedDict),
        st.builds(slice, inner, inner, inner),
        st.binary().map(bytearray),
    ),
    max_leaves=12,
)


@settings(max_examples=120, deadline=None)
@given(nested)
def test_random_nested_values_come_back(value):
    assert same(value, round_trip(value))


GOLDEN = [
    ("05", 5),
    ("cb8000000000000000", -0.0),
    ("c70a0100000000000000000001", 2**72),
    ("d602eda08061", "\ud800a"),
    ("d5036162", bytearray(b"ab")),
    ("d6049201a161", (1, "a")),
    ("c70305920102", {2, 1}),
    ("c7030691a161", frozenset({"a"})),
    ("c7060794a1620102c0", {"b": 1, 2: None}),
    ("d60892a16201", collections.OrderedDict(b=1)),
    ("c7130992cb3ff0000000000000cbc000000000000000", 1 - 2j),
    ("d60a93010902", range(1, 9, 2)),
    ("d60b9301c0c0", slice(1, None)),
    ("d40c90", ...),
    (
        "c7150d99cd07e4021d0102030401c7071191d61093000000",
        datetime(2020, 2, 29, 1, 2, 3, 4, fold=1, tzinfo=timezone.utc),
    ),
    ("c7060e93cd07e4021d", date(2020, 2, 29)),
    ("c7070f960102000000c0", clock(1, 2)),
    ("d61093ff0203", timedelta(-1, 2, 3)),
    ("c70c1192c706109300cd0e1000a178", timezone(timedelta(hours=1), "x")),
    ("c70e1291ac4575726f70652f5061726973", zoneinfo.ZoneInfo("Europe/Paris")),
    ("c7061391a4312e3130", Decimal("1.10")),
    ("c7031492ff03", Fraction(-1, 3)),
    ("c7131591c41000000000000000000000000000000007", uuid.UUID(int=7)),
    ("c7071693c2c2a3612f62", pathlib.PurePosixPath("a/b")),
    ("c7191794a27265a95265676578466c6167a94d554c54494c494e4508", re.RegexFlag.MULTILINE),
    ("c70a1891a862666c6f61743136", torch.bfloat16),
    ("d71991a6637564613a31", torch.device("cuda:1")),
    ("c7031a920203", torch.Size([2, 3])),
    ("c7091b91a773747269646564", torch.strided),
    ("c70f1c91ad6368616e6e656c735f6c617374", torch.channels_last),
    ("c7091d92a33c6632c402003e", np.float16(1.5)),
    ("c70e1d92a23c71c4080300000000000000", np.longlong(3)),
    ("c7031e91a161", np.str_("a")),
    ("d61e91c40161", np.bytes_(b"a")),
    (
        "c7271f9194a67374727563740ac29294a161a33c693400c094a16293a56172726179a37c5333910204c0",
        np.dtype([("a", "<i4"), ("b", "S3", (2,))]),
    ),
    ("c71a2094a33c55329102c2c41061000000000000006200000063000000", np.array(["a", "bc"], dtype="<U2")),
]


def test_bytes_are_the_contract():
    """What is written today is what was written yesterday; the order of a set, which is by chance, does not show."""
    assert encode_value({0, 8, 16}, key="k") == encode_value({16, 8, 0}, key="k")
    for text, value in GOLDEN:
        assert text == encode_value(value, key="k").hex()
        assert same(value, decode_value(bytes.fromhex(text), key="k"))


@pytest.mark.parametrize(
    "value",
    [
        Text("a"), Number(1), Point(1, 2), Opaque(), object(), len, Color, np, collections.defaultdict(int),
        collections.deque(), np.array([None]), np.dtype("O"), np.ma.array([1]), torch.zeros(1),
        np.array([(1,)], dtype=[("a", "i4")]).view(np.recarray), np.dtype("V2000000"), Loop(),
        Fraction(1, 3 << 70000), memoryview(b"a"), Exception("x"), NotImplemented, re.compile("a"),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_the_rest_is_refused_by_name(value):
    """What has no safe form is refused, alone or inside, with key, type and hint."""
    for outer in (value, [1, (value,)], {"a": value}):
        with pytest.raises(UnsupportedLeaf, match=rf"'model\.x' holds a .*{type(value).__qualname__}") as caught:
            encode_value(outer, key="model.x")
        assert "allow_pickle=True" in caught.value.hint


def test_numpy_variable_width_strings_are_refused():
    string_dtype = pytest.importorskip("numpy.dtypes").StringDType
    with pytest.raises(UnsupportedLeaf):
        encode_value(np.array(["a"], dtype=string_dtype()), key="k")


def test_cycles_and_depth_are_refused():
    loop = [1]
    loop.append(loop)
    twice = []
    twice += [twice, twice]
    deep = functools.reduce(lambda inner, _: [inner], range(64), 1)
    tuples = functools.reduce(lambda inner, _: (inner,), range(64), 1)
    for bad in (loop, twice, [deep], (tuples,), {"a": {"b": deep}}):
        with pytest.raises(UnsupportedLeaf, match="'k' is nested more than 64 levels deep, or contains itself"):
            encode_value(bad, key="k", allow_pickle=True)
    assert same(deep, round_trip(deep))
    assert same(tuples, round_trip(tuples))


# Pickle


def test_pickle_only_where_asked_and_only_the_unplain_part():
    value = [1, Opaque(7), {"a": Opaque(8)}]
    data = encode_value(value, key="k", allow_pickle=True)
    assert value == decode_value(data, key="k", allow_pickle=True)
    with pytest.raises(PickleRefused, match=r"'model\.k' is stored as a pickle") as caught:
        decode_value(data, key="model.k")
    assert "allow_pickle=True" in caught.value.hint
    assert b"pickle" not in encode_value([1, "a"], key="k", allow_pickle=True)


def test_pickles_that_fail_are_named():
    with pytest.raises(UnsupportedLeaf, match="cannot be pickled"):
        encode_value(lambda: 0, key="k", allow_pickle=True)
    with pytest.raises(MalformedFile, match="'k': stored pickle is malformed"):
        decode_value(raw_ext(127, b"junk"), key="k", allow_pickle=True)
    with pytest.raises(UnsupportedLeaf, match="cannot be rebuilt here"):
        decode_value(raw_ext(127, b"cno_such_module\nx\n."), key="k", allow_pickle=True)


# Enums


def test_enum_without_its_class_is_a_reference():
    """A class that is not loaded gives an EnumRef, which is saved again as it was; `like` finds local classes."""

    class Local(enum.Enum):
        A = "a"
        B = [1]  # noqa: RUF012 (unhashable is the case)

    data = encode_value(Local.A, key="k")
    ref = decode_value(data, key="k")
    assert EnumRef(__name__, Local.__qualname__, "A", "a") == ref
    assert data == encode_value(ref, key="k")
    assert Local.A is decode_value(data, key="k", like=Local.A)
    assert ref == decode_value(data, key="k", like=Color.RED)
    assert {EnumRef(__name__, Local.__qualname__, "B", [1]): 1} == round_trip({Local.B: 1})


def test_enum_lookup_imports_and_runs_nothing(monkeypatch):
    """Only enum classes of loaded modules are found; module hooks, other attributes and imports are left alone."""
    trap = types.ModuleType("trap")
    trap.__getattr__ = lambda name: pytest.fail("a module's __getattr__ was called")
    trap.thing = print
    monkeypatch.setitem(sys.modules, "trap", trap)
    for module, qualname in [
        ("trap", "X"), ("trap", "thing"), ("trap", "thing.__self__.X"), ("os", "path.X"), ("sys", "modules"),
        ("antigravity", "X"), ("", ""), ("builtins", "int"), ("os", "system"),
    ]:  # fmt: skip
        assert EnumRef(module, qualname, "A", 1) == decode_value(ext(23, module, qualname, "A", 1), key="k")
    assert "antigravity" not in sys.modules


def test_enum_members_that_are_gone_are_references():
    where = (__name__, "Color"), (__name__, "Bits")
    assert EnumRef(*where[0], "BLUE", 9) == decode_value(ext(23, *where[0], "BLUE", 9), key="k")
    assert EnumRef(*where[1], None, 1 << 40) == decode_value(ext(23, *where[1], None, 1 << 40), key="k")
