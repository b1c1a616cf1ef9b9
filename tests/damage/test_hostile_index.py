"""
Indexes written by somebody who knows the format and means harm: every checksum is right, what is said is not.

Each one costs an error of ours from `load` and from `open`, little memory and little time; never a crash, another
exception, or memory that was not filled.
"""

import msgspec
import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep.format.data_file import digest
from shardkeep.format.values import Container, encode_tree, encode_value
from shardkeep.testing.thread_ranks import thread_outcomes
from tests.damage import doors
from tests.damage.bounds import bounded
from tests.damage.forge import U64_MAX, Section, change, take_apart
from tests.damage.subjects import blank_for, store_of, three_ranks

pytestmark = pytest.mark.timeout(60)

CASES = {}


def case(forge):
    CASES[forge.__name__] = forge
    return forge


def _widen(f, axes):
    for name, fill in (("shape", 1), ("offsets", 0), ("sizes", 1)):
        column = f.get(name)
        wide = np.full((len(column), axes), fill, object)
        wide[:, : column.shape[1]] = column
        f.set(name, wide)


def _nothing(f, *names):
    """Sections of 2**31 rows that take no bytes."""
    f.sections.update({name: Section("|u1", (2**31, 0), b"") for name in names})


def _rename(f, of, at, new):
    """Change a key of a tensor (`key`) or of a value (`value_key`)."""
    keys = f.strings(f"{of}s", f"{of}_ends")
    keys[at] = new
    f.set_strings(f"{of}s", f"{of}_ends", keys)


def _resize(f, key, shape, *, chunk=True):
    f.put("shape", f.rows[key], shape)
    if chunk:
        f.put("sizes", f.chunk(key), shape)


@case
def a_huge_tensor_in_a_file_said_to_be_huge(f):
    _resize(f, "model.weight", [2**50, 1])
    f.file("model")["nbytes"] = 2**60


@case
def an_infinite_tensor_times_zero(f):
    """inf * 0 is nan, and nan is not too large."""
    _widen(f, 32)
    f.put("shape", f.rows["model.empty"], [0] + [2**62] * 31)
    _resize(f, "model.weight", [2**60, 1] + [1] * 30)


@case
def a_tensor_and_a_value_of_one_key(f):
    keys = f.strings("value_keys", "value_key_ends")
    keys[keys.index(b"name")] = b"mask"
    f.set_strings("value_keys", "value_key_ends", sorted(keys))


@case
def a_section_twice(f):
    names = [*f.sections, "start"]
    table = [(name, *_declared(f.sections[name])) for name in names]
    f.header = msgspec.msgpack.encode(table)


def _declared(section):
    return section.code, section.shape, 0, digest(section.raw)


@case
def a_box_cut_on_57_axes(f):
    """A reader that looks at every corner of a box would look at 2**57 of them."""
    _widen(f, 57)
    row = f.rows["model.weight"]
    f.put("ndim", row, 57, "|u1")
    f.put("shape", row, [2] * 57)
    f.put("sizes", f.chunk("model.weight"), [1] * 57)


@case
def no_elements_outside_of_its_axes(f):
    """Padding of size 0 makes a tensor of 7 elements need no box, and nothing would fill it."""
    row = f.rows["model.half"]
    f.put("shape", row, [7, 0])
    f.set("chunk_ends", [end - (at >= row) for at, end in enumerate(f.get("chunk_ends").tolist())])
    gone = [n for n in range(len(f.get("file"))) if n != f.chunk("model.half")]
    for name in ("offsets", "sizes", "file", "start"):
        f.set(name, f.get(name)[gone])


@case
def an_alias_loop(f):
    a, b = f.rows["model.tied_a"], f.rows["model.tied_b"]
    f.put("alias", a, b)
    f.put("alias", b, a)


@case
def an_alias_of_an_alias(f):
    f.put("alias", f.rows["model.tied_b"], f.rows["model.weight"])
    f.put("alias", f.rows["model.tied_a"], f.rows["model.tied_b"])


@case
def an_alias_of_a_larger_element(f):
    """Eight bytes for each element of two would be written past the end of the destination."""
    row = f.rows["loss"]
    f.put("dtype", row, 8, "|u1")
    f.put("shape", row, [7, 1])
    f.put("ndim", row, 1, "|u1")
    f.put("sizes", f.chunk("loss"), [7, 1])
    f.put("dtype", row, 10, "|u1")
    f.put("start", f.chunk("loss"), 0)
    f.put("file", f.chunk("loss"), f.record["files"].index(f.file("optim")))
    f.put("alias", f.rows["model.half"], row)


@case
def a_box_that_wraps(f):
    f.put("offsets", f.chunk("model.weight"), [U64_MAX, 0])
    f.put("sizes", f.chunk("model.weight"), [5, 5])


@case
def keys_in_another_order(f):
    keys = f.strings("keys", "key_ends")
    a, b = f.rows["model.tied_a"], f.rows["optim.moment"]
    keys[a], keys[b] = keys[b], keys[a]
    f.set_strings("keys", "key_ends", keys)


@case
def keys_that_are_text_only_together(f):
    """The bytes of one letter, half in one key and half in the next."""
    keys = f.strings("keys", "key_ends")
    keys[-2], keys[-1] = b"optim.y\xc3", b"\xa9"
    f.set_strings("keys", "key_ends", keys)


CASES |= {
    "a_tensor_of_2_60_elements": lambda f: _resize(f, "model.weight", [2**60, 1]),
    "a_tensor_of_2_57_elements": lambda f: _resize(f, "model.weight", [2**57, 1]),
    "a_tensor_of_2_63_elements": lambda f: _resize(f, "model.weight", [2**63, 1]),
    "a_tensor_whose_bytes_wrap_to_zero": lambda f: _resize(f, "optim.moment", [2**32, 2**30]),
    "a_tensor_of_u64_max_elements": lambda f: _resize(f, "model.weight", [U64_MAX, U64_MAX]),
    "an_empty_tensor_with_a_huge_axis": lambda f: f.put("shape", f.rows["model.empty"], [0, 2**63]),
    "an_empty_tensor_with_an_axis_of_u64_max": lambda f: f.put("shape", f.rows["model.empty"], [0, U64_MAX]),
    # A matrix of 2**60 rows and no columns has no bytes at all.
    "rows_of_nothing_2_60": lambda f: f.sections.update(shape=Section("|u1", (2**60, 0), b"")),
    "rows_of_nothing_2_31": lambda f: _nothing(f, "shape", "offsets", "sizes"),
    "rows_of_nothing_everywhere": lambda f: _nothing(
        f, "shape", "offsets", "sizes", "dtype", "ndim", "origin", "alias", "chunk_ends", "file", "start"
    ),
    "chunks_of_nothing": lambda f: _nothing(f, "offsets", "sizes", "file", "start"),
    "a_matrix_of_65_axes": lambda f: _widen(f, 65),
    "a_negative_shape": lambda f: f.put("shape", f.rows["model.empty"], [-1, 0], "<i8"),
    "a_negative_number_of_axes": lambda f: f.put("ndim", f.rows["model.weight"], -1, "<i8"),
    "a_negative_alias": lambda f: f.put("alias", -1, -1, "<i8"),
    "ends_of_chunks_that_go_back": lambda f: f.put("chunk_ends", 1, f.get("chunk_ends")[-1]),
    "negative_ends_of_chunks": lambda f: f.put("chunk_ends", 0, -3, "<i8"),
    "all_chunks_belong_to_one_tensor": lambda f: f.set("chunk_ends", [len(f.get("file"))] * len(f.rows)),
    "a_box_at_a_negative_place": lambda f: f.put("offsets", f.chunk("model.weight"), [-1, 0], "<i8"),
    "a_negative_file_number": lambda f: f.put("file", f.chunk("model.weight"), -2, "<i8"),
    "a_start_from_which_the_last_byte_is_outside": lambda f: f.put(
        "start", f.chunk("model.weight"), f.file("model")["nbytes"] - f.file("model")["header_nbytes"] - 4 * 5 * 4 + 1
    ),
    "a_start_inside_an_element": lambda f: f.put("start", f.chunk("optim.moment"), 1),
    # Start and length together wrap to a negative number.
    "a_start_just_below_2_63": lambda f: f.put("start", f.chunk("model.weight"), 2**63 - 8),
    "a_negative_start": lambda f: f.put("start", f.chunk("model.weight"), -4, "<i8"),
    "a_dtype_of_a_negative_code": lambda f: f.put("dtype", f.rows["model.weight"], -247, "<i8"),
    "two_tensors_of_one_key": lambda f: _rename(f, "key", f.rows["model.tied_b"], b"model.tied_a"),
    "two_values_of_one_key": lambda f: _rename(f, "value_key", 1, f.strings("value_keys", "value_key_ends")[0]),
    "a_key_that_is_no_text": lambda f: _rename(f, "key", f.rows["model.weight"], b"model.weigh\xff"),
    "a_key_of_a_value_that_is_no_text": lambda f: _rename(f, "value_key", -1, b"ste\xc3"),
    "negative_ends_of_keys": lambda f: f.put("key_ends", 0, -5, "<i8"),
    "a_section_beyond_the_file": lambda f: change(f.sections["start"], offset=1 << 40),
    "a_section_at_u64_max": lambda f: change(f.sections["start"], offset=U64_MAX),
    "a_section_that_begins_in_the_file_and_ends_outside": lambda f: change(f.sections["tree"], shape=(10**6,)),
    "a_section_beyond_the_file_with_the_digest_of_nothing": lambda f: f.sections.update(
        dtype=Section("|u1", (len(f.rows),), b"", offset=1 << 50, digest=digest(b""))
    ),
    "a_section_of_2_64_elements": lambda f: change(f.sections["start"], shape=(2**32, 2**32)),
    "a_section_of_a_hundred_thousand_axes": lambda f: change(f.sections["start"], shape=(U64_MAX,) * 100000),
    "a_section_of_floats": lambda f: change(f.sections["start"], code="<f8"),
    "a_section_of_objects": lambda f: change(f.sections["start"], code="|O"),
    "a_section_in_the_other_byte_order": lambda f: change(f.sections["start"], code=">u8"),
    "a_section_that_is_a_structure": lambda f: change(f.sections["start"], code="u1,O"),
    "a_section_missing": lambda f: f.sections.pop("alias"),
    "no_sections": lambda f: f.sections.clear(),
    "a_section_with_a_wrong_digest": lambda f: change(f.sections["start"], digest=bytes(16)),
    "a_column_with_two_axes": lambda f: change(f.sections["dtype"], shape=(len(f.rows), 1)),
    "a_column_of_alias_with_two_axes": lambda f: change(f.sections["alias"], shape=(len(f.rows), 1)),
    "a_column_of_files_with_two_axes": lambda f: change(f.sections["file"], shape=(*f.sections["file"].shape, 1)),
    "a_column_of_starts_with_two_axes": lambda f: f.set("start", np.stack([f.get("start")] * 2, axis=1)),
    "ends_with_two_axes": lambda f: f.set("chunk_ends", f.get("chunk_ends")[:, None]),
    "ends_of_keys_with_two_axes": lambda f: f.set("key_ends", f.get("key_ends")[:, None]),
    "keys_with_two_axes": lambda f: change(f.sections["keys"], shape=(f.sections["keys"].shape[0], 1)),
    "keys_of_eight_bytes_a_letter": lambda f: f.set("keys", f.get("keys")),
    "a_matrix_without_axes": lambda f: f.sections.update(shape=Section("|u1", (), b"\x01")),
    "values_with_a_key_too_few": lambda f: f.set_strings(
        "value_keys", "value_key_ends", f.strings("value_keys", "value_key_ends")[:-1]
    ),
    "a_tensor_too_few_in_one_column": lambda f: f.set("ndim", f.get("ndim")[:-1], "|u1"),
    "a_chunk_too_few_in_one_column": lambda f: f.set("start", f.get("start")[:-1]),
    "a_header_that_declares_2_32_sections": lambda f: change(f, header=b"\xdd\xff\xff\xff\xff"),
    "a_header_whose_section_declares_2_32_axes": lambda f: change(
        f, header=b"\x91\x95\xa1a\xa3|u1\xdd\xff\xff\xff\xff"
    ),
    "a_header_whose_section_declares_a_name_of_4_gb": lambda f: change(f, header=b"\x91\x95\xdb\xff\xff\xff\xffa"),
    "a_header_of_a_hundred_thousand_arrays_in_each_other": lambda f: change(f, header=b"\x91" * 100000 + b"\xc0"),
    "a_header_of_a_hundred_thousand_maps_in_each_other": lambda f: change(f, header=b"\x81\xa1a" * 100000 + b"\xc0"),
    "a_header_that_is_empty": lambda f: change(f, header=b""),
    "a_header_that_is_no_msgpack": lambda f: change(f, header=b"\xc1" * 64),
    "a_header_that_is_a_number": lambda f: change(f, header=b"\x07"),
    "a_header_with_a_tail": lambda f: change(f, header=msgspec.msgpack.encode([]) + b"\x00" * 10),
    "a_header_with_a_name_that_is_no_text": lambda f: change(
        f, header=msgspec.msgpack.encode([("x", "|u1", (1,), 0, b"")]).replace(b"\xa1x", b"\xa1\xff")
    ),
    "a_header_with_negative_numbers": lambda f: change(
        f, header=msgspec.msgpack.encode([("keys", "|u1", (-1,), -64, bytes(16))])
    ),
    "a_header_longer_than_the_file": lambda f: change(f, index=b"SKINDEX1\xff\xff\xff\xff" + bytes(100)),
    "an_index_of_another_kind": lambda f: change(f, index=b"PK\x03\x04" * 100),
    "an_index_of_nothing_but_its_magic": lambda f: change(f, index=b"SKINDEX1"),
    "an_index_of_no_bytes": lambda f: change(f, index=b""),
    "an_index_of_a_later_version": lambda f: change(f, index=b"SKINDEX2" + bytes(200)),
    "more_axes_than_there_are_columns": lambda f: f.put("ndim", f.rows["model.weight"], 3, "|u1"),
    "two_hundred_axes": lambda f: f.put("ndim", f.rows["model.weight"], 200, "|u1"),
    "fewer_axes_than_it_is_stored_with": lambda f: f.put("ndim", f.rows["optim.moment"], 1, "|u1"),
    "no_axes_where_there_are_two": lambda f: f.put("ndim", f.rows["model.weight"], 0, "|u1"),
    "an_alias_out_of_range": lambda f: f.put("alias", f.rows["model.tied_b"], len(f.rows)),
    "an_alias_of_u64_max": lambda f: f.put("alias", f.rows["model.tied_b"], U64_MAX),
    # What the smaller one does not have would be left unfilled.
    "an_alias_of_a_smaller_tensor": lambda f: f.put("alias", f.rows["model.weight"], f.rows["model.empty"]),
    "an_alias_of_another_shape": lambda f: f.put("alias", f.rows["model.weight"], f.rows["model.tied_a"]),
    "ends_of_chunks_beyond_the_chunks": lambda f: f.put("chunk_ends", -1, 10**6),
    "ends_of_chunks_of_u64_max": lambda f: f.put("chunk_ends", 0, U64_MAX),
    "ends_of_chunks_that_leave_some_over": lambda f: f.set(
        "chunk_ends", np.minimum(f.get("chunk_ends"), len(f.get("file")) - 1)
    ),
    "a_box_that_leaves_a_hole": lambda f: f.put("sizes", f.chunk("optim.moment"), [139, 150]),
    "a_box_outside_its_tensor": lambda f: f.put("offsets", f.chunk("model.weight"), [4, 0]),
    "a_box_that_sticks_out": lambda f: f.put("offsets", f.chunk("model.weight"), [1, 0]),
    "a_box_larger_than_its_tensor": lambda f: f.put("sizes", f.chunk("model.weight"), [5, 5]),
    "a_box_of_no_elements": lambda f: f.put("sizes", f.chunk("model.weight"), [0, 5]),
    "a_box_of_u64_max": lambda f: f.put("sizes", f.chunk("model.weight"), [U64_MAX, U64_MAX]),
    "a_box_in_a_tensor_without_elements": lambda f: f.put("shape", f.rows["model.weight"], [0, 5]),
    "a_file_number_out_of_range": lambda f: f.put("file", f.chunk("model.weight"), len(f.record["files"])),
    "a_file_number_of_2_32": lambda f: f.put("file", f.chunk("model.weight"), 2**32),
    "a_file_number_of_u64_max": lambda f: f.put("file", f.chunk("model.weight"), U64_MAX),
    # As a signed number it counts from the end of the list.
    "a_file_number_of_u64_max_less_one": lambda f: f.put("file", f.chunk("model.weight"), U64_MAX - 1),
    "a_start_beyond_the_file": lambda f: f.put("start", f.chunk("model.weight"), 10**9),
    "a_start_of_2_63": lambda f: f.put("start", f.chunk("model.weight"), 2**63),
    "a_start_of_u64_max": lambda f: f.put("start", f.chunk("model.weight"), U64_MAX),
    "a_dtype_of_code_0": lambda f: f.put("dtype", f.rows["model.weight"], 0, "|u1"),
    "a_dtype_of_code_255": lambda f: f.put("dtype", f.rows["model.weight"], 255, "|u1"),
    "a_dtype_of_code_2_16": lambda f: f.put("dtype", f.rows["model.weight"], 2**16, "<u4"),
    "ends_of_keys_that_go_back": lambda f: f.put("key_ends", 1, 1),
    "ends_of_keys_beyond_the_keys": lambda f: f.put("key_ends", -1, 10**9),
    "ends_of_keys_of_u64_max": lambda f: f.put("key_ends", 0, U64_MAX),
    "ends_of_values_beyond_the_values": lambda f: f.put("value_ends", -1, 10**9),
}


@pytest.mark.parametrize("forge", CASES.values(), ids=CASES)
def test_a_forged_index_is_refused(subject, forgery, forge):
    """`load` and `verify` raise an error of ours; `to_dict` and a look around do, or give what was saved."""
    forge(forgery)
    store = store_of(forgery.blobs())
    loaded, read, verified, _ = bounded(
        lambda: [door(store, subject, doors.FORGED) for door in (doors.load, doors.to_dict, doors.verify, doors.look)]
    )
    assert loaded is not None, "load took it"
    assert verified is not None or read is not None, "open took it"


def test_an_honest_forger_is_believed(subject, forgery):
    """The yardstick: rebuilt without a change, with wider numbers or one more section, it is the same checkpoint."""
    for name in ("chunk_ends", "file", "start", "alias", "offsets", "sizes", "shape", "key_ends", "dtype", "ndim"):
        forgery.set(name, forgery.get(name))
    forgery.sections["something new"] = Section("|u1", (3,), b"abc")
    answers = doors.try_all(store_of(forgery.blobs()), subject, "forged without a change")
    assert answers.all == [None, None, None]


@pytest.mark.parametrize("shift", [-1, 1, -50, None])
def test_boxes_that_overlap_or_leave_a_hole(shift):
    """Of three boxes one is moved, or (None) stored twice in place of another: the sum of volumes is still right."""
    subject = three_ranks()
    forgery = take_apart(subject)
    row = forgery.rows["optim.moment"]
    first, second, _ = range(int(forgery.get("chunk_ends")[row - 1]), int(forgery.get("chunk_ends")[row]))
    if shift is None:
        for name in ("offsets", "sizes", "file", "start"):
            forgery.put(name, second, forgery.get(name)[first])
    else:
        forgery.put("offsets", (second, 0), forgery.get("offsets")[second][0] + shift)
    answers = doors.try_all(store_of(forgery.blobs()), subject, "a box moved")
    assert isinstance(answers.load, sk.MalformedFile)
    assert isinstance(answers.to_dict, sk.MalformedFile)
    assert all("optim.moment" in str(error) for error in answers.all)


def test_a_forged_index_is_refused_on_every_rank(subject):
    """Three ranks load a forged index: all of them raise the same error of ours, none of them its own."""
    for name in (
        "an_alias_of_a_larger_element",
        "a_key_that_is_no_text",
        "a_start_just_below_2_63",
        "two_tensors_of_one_key",
    ):
        forgery = take_apart(subject)
        CASES[name](forgery)
        store = store_of(forgery.blobs())
        outcomes = thread_outcomes(3, lambda world, store=store: sk.load(blank_for(subject), store, group=world))
        assert len({str(outcome) for outcome in outcomes}) == 1
        assert all(isinstance(outcome, doors.FORGED) for outcome in outcomes), outcomes


def test_sections_nobody_knows_cost_nothing(subject, forgery):
    """A hundred thousand sections of the same four megabytes, which would take minutes to hash, are not looked at."""
    forgery.sections["new"] = Section("|u1", (4 << 20,), bytes(4 << 20))
    known, offset = [], 0
    for name, section in forgery.sections.items():
        known.append((name, section.code, section.shape, offset, digest(section.raw)))
        offset += -(-len(section.raw) // 64) * 64
    forgery.header = msgspec.msgpack.encode([*known, *[(f"new {n}", *known[-1][1:]) for n in range(100_000)]])
    store = store_of(forgery.blobs())
    answers = bounded(lambda: doors.try_all(store, subject, "many sections"), mib=256, traced=False)
    assert answers.all == [None, None, None]


def test_an_array_of_a_dtype_numpy_has_not(subject, forgery):
    """A bfloat16 tensor said to have been a numpy array: `to_dict` says that it cannot be one; a load is exact."""
    forgery.put("origin", forgery.rows["model.half"], 1, "|u1")
    store = store_of(forgery.blobs())
    assert doors.load(store, subject) is None
    assert isinstance(doors.to_dict(store, subject, doors.FORGED), sk.UnsupportedLeaf)


# The tree


def _leaf(*parts, kind="dict"):
    """A skeleton with one leaf at the end of a path."""
    node = None
    for part in reversed(parts):
        node = Container(kind, ((part, node),))
    return node


def _columns(marks, counts, parts):
    return encode_value([bytes(marks), counts, parts], key="tree")


def _full_tree(subject, **more):
    """The right children at the top, some replaced."""
    keys = {"model": ("weight", "half", "tied_a", "tied_b", "empty"), "optim": ("moment", "strided", "array")}
    top = {key: Container("dict", tuple((part, None) for part in parts)) for key, parts in keys.items()}
    top |= dict.fromkeys(("mask", "loss", "step", "name", "betas", "nothing"))
    return Container("dict", tuple((top | more).items()))


TREES = {
    "a leaf that is not there": lambda s: encode_tree(_full_tree(s, ghost=None)),
    "a leaf below a leaf": lambda s: encode_tree(_full_tree(s, step=_leaf("deeper"))),
    "a leaf left out": lambda s: encode_tree(Container("dict", _full_tree(s).children[:-1])),
    "one leaf at two paths": lambda s: encode_tree(_full_tree(s, **{"model.weight": None})),
    "no leaves": lambda s: encode_tree(Container("dict", ())),
    "a root that is a leaf": lambda s: encode_tree(None),
    "a root that is a list": lambda s: encode_tree(Container("list", ((0, None),))),
    "100,000 levels": lambda s: _columns([1] * 100_000 + [0], [1] * 100_000, ["a"] * 100_000),
    "a count of 2**63": lambda s: _columns([1, 0], [2**63], ["step"]),
    "an array that declares 2**32 items": lambda s: b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_forged_tree_is_refused(subject, forgery, tree):
    """`to_dict` and `verify` refuse a wrong tree; `load` fills a state that has a tree of its own, and is exact."""
    forgery.set_tree(tree(subject))
    store = store_of(forgery.blobs())
    loaded, read, verified = bounded(lambda: doors.try_all(store, subject, "a forged tree").all)
    assert loaded is None
    assert isinstance(read, sk.DamagedCheckpoint)
    assert isinstance(verified, sk.DamagedCheckpoint)


@pytest.mark.parametrize("shift", [-1, 1])
def test_what_is_wrong_elsewhere_is_found_by_verify(shift):
    """
    Rows that a moved box does not touch are read as they were saved; rows that it should hold, and those it overlaps, are
    refused, and so is the checkpoint by `verify`.
    """
    subject = three_ranks()
    forgery = take_apart(subject)
    row = forgery.rows["optim.moment"]
    last = int(forgery.get("chunk_ends")[row]) - 1
    begin, size = int(forgery.get("offsets")[last][0]), int(forgery.get("sizes")[last][0])
    forgery.put("sizes", (last, 0), size - 1)
    forgery.put("offsets", (last, 0), begin if shift > 0 else begin - 1)
    hole = begin + size - 1
    sound = sk.open(store_of(subject.blobs))["optim.moment"]

    opened = sk.open(store_of(forgery.blobs()))
    moment = opened["optim.moment"]

    assert torch.equal(moment[: begin - 1], sound[: begin - 1])
    wrong = [moment.tensor, lambda: moment[hole], *([lambda: moment[begin - 1]] if shift < 0 else []), opened.verify]
    for look in wrong:
        with pytest.raises(sk.DamagedCheckpoint, match=r"chunks of 'optim\.moment' overlap, leave a hole"):
            look()
