"""Metadata in columns: all that was there comes back, in its order, or there are no columns."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import DamagedCheckpoint
from shardkeep.format.index import pack_sections, unpack_sections
from shardkeep.format.torch_columns import (
    _SHAPES,
    MAGIC,
    decode_columns,
    decode_path,
    encode_columns,
    encode_path,
)
from shardkeep.layouts.column_metadata import columns_of, metadata_of
from shardkeep.layouts.torch_pickle import decode_metadata, encode_metadata
from shardkeep.layouts.torch_values import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)

Size = torch.Size


def tensor(size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]], **properties: Any) -> Any:
    """An entry of a tensor, in chunks of these offsets and sizes."""
    made = [ChunkStorageMetadata(Size(offsets), Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(**properties), Size(size), made)


def place(file: str, offset: int, length: int, start: int | None = None, ways: list[str] | None = None) -> Any:
    """Where an item lies."""
    info = _StorageInfo(file, offset, length, ways)
    if start is not None:
        info.keep_data_start(start)
    return info


def sample() -> Metadata:
    """Metadata with something of everything."""
    entries = {
        "z.w": tensor((4, 3), ((0, 0), (2, 3)), ((2, 0), (2, 3)), dtype=torch.bfloat16, requires_grad=True),
        "a": BytesStorageMetadata(),
        "scalar": tensor((), ((), ()), dtype=torch.int64),
        "empty": tensor((0, 5), ((0, 0), (0, 5)), dtype=torch.float32),
        "uneven": tensor((3,), ((0,), (2,)), ((2,), (1,)), ((3,), (0,)), ((3,), (0,)), dtype=torch.float32),
        "list.0.ключ": tensor((1 << 40,), ((0,), (1 << 40,)), dtype=torch.quint8, memory_format=torch.preserve_format),
        "": BytesStorageMetadata(),
        "nothing": tensor((2,), dtype=torch.float32),
    }
    places = {
        MetadataIndex("uneven", [2], 1): place("__1_0.distcp", 0, 9),
        MetadataIndex("z.w", [2, 0], 1): place("__1_0.distcp", 10, 20, 15),
        MetadataIndex("a"): place("__0_0.distcp", 0, 7, ways=["stream.zstd", "x"]),
        MetadataIndex("z.w", [0, 0], 0): place("__0_0.distcp", 1 << 40, 20, 1 << 40),
        MetadataIndex("scalar", [], 0): place("__0_0.distcp", 50, 3, 51, []),
        MetadataIndex("empty", [0, 0]): place("sub/other", 0, 0),
        MetadataIndex("uneven", [0], 7): place("__0_0.distcp", 60, 3),
        MetadataIndex("uneven", [3], 3): place("__0_0.distcp", 70, 3),
        MetadataIndex("list.0.ключ", [0], 0): place("__0_0.distcp", 80, 1 << 41, 99, ["x"]),
        MetadataIndex("", None, 2): place("__0_0.distcp", 90, 1),
    }
    paths = {
        "a": ("a",),
        "z.w": ("z", "w"),
        "gone": ("gone", 10),
        "list.0.ключ": ("list", 0, "ключ"),
        "scalar": ("an", "other.place", -5),
        "": ("",),
        "empty": (),
    }
    made = Metadata(entries, paths, places, StorageMeta(Path("/x"), "id", None, ["m"]), "1.0.0")
    vars(made)["shardkeep_sums"] = {"__0_0.distcp": (5, 6, "x")}
    return made


def through(value: Metadata) -> Metadata:
    """Metadata written as columns and opened again."""
    columns = columns_of(value)
    assert columns is not None
    return metadata_of(decode_columns(encode_columns(columns), where="here"), where="here")


def all_of(value: Metadata) -> dict[str, Any]:
    """All there is in metadata, with orders and hints."""
    parts = {
        key: list(each.items()) if isinstance(each, dict) and key != "shardkeep_sums" else each
        for key, each in vars(value).items()
    }
    hints = [index.index for index in value.storage_data]
    return {**parts, "hints": hints, "states": [each.__getstate__() for each in value.storage_data.values()]}


def test_everything_comes_back() -> None:
    """
    Entries, places with their hints, paths, and all else come back equal and in their order; as a pickle, too.
    """
    value = sample()
    assert all_of(through(value)) == all_of(value)
    assert through(value) == value
    assert value == through(value)
    again = decode_metadata(encode_metadata(through(value)), where="there")
    assert type(again.state_dict_metadata) is dict
    assert all_of(again) == all_of(value)
    copied = pickle.loads(pickle.dumps(through(value)))
    assert type(copied.storage_data) is type(copied.planner_data) is dict
    assert all_of(copied) == all_of(value)


def test_one_by_one() -> None:
    """
    Each entry, place and path is found alone, by indices with and without hints, and nothing else is.
    """
    value, opened = sample(), through(sample())
    for key, entry in value.state_dict_metadata.items():
        assert opened.state_dict_metadata[key] == entry
    for index, info in value.storage_data.items():
        for hint in (index.index, None, 0, 9, -1):
            found = opened.storage_data[MetadataIndex(index.fqn, index.offset, hint)]
            assert (found, vars(found)) == (info, vars(info))
    for key, path in value.planner_data.items():
        assert opened.planner_data[key] == path
    others = [MetadataIndex("z.w"), MetadataIndex("z.w", [1, 0]), MetadataIndex("z.w", [0]), MetadataIndex("gone"),
              MetadataIndex("nothing", [0]), MetadataIndex("a", [0]), "z.w", None, 5]  # fmt: skip
    assert not any(each in opened.storage_data for each in others)
    assert [opened.storage_data.get(each) for each in others] == [None] * len(others)
    assert opened.state_dict_metadata.get("gone") is None


def test_entries_are_not_shared() -> None:
    """
    What one changes in an entry stays in it, and is found again.
    """
    value = sample()
    value.state_dict_metadata["y"] = tensor((4, 3), ((0, 0), (4, 3)), dtype=torch.bfloat16, requires_grad=True)
    opened = through(value)
    opened.state_dict_metadata["z.w"].properties.dtype = torch.int8
    assert opened.state_dict_metadata["z.w"].properties.dtype == torch.int8
    assert opened.state_dict_metadata["y"].properties.dtype == torch.bfloat16


def test_planner_data_of_others_are_kept_whole() -> None:
    """
    What is no table of paths is pickled as it is.
    """
    for planner_data in (None, {}, {"a": ["list"]}, {1: ("a",)}, {"a": ("x", True)}, ["a"], {"a": (1.5,)}):
        value = dataclasses.replace(sample(), planner_data=planner_data)
        opened = through(value)
        assert opened.planner_data == planner_data
        assert type(opened.planner_data) is type(planner_data)


class Info(_StorageInfo):
    """A place of a user's own class."""


ODD: dict[str, Any] = {
    "places of another class": lambda m: m.storage_data.update({MetadataIndex("a"): Info("f", 0, 1)}),
    "a key of another class": lambda m: m.storage_data.update({"a": place("f", 0, 1)}),
    "a place of nothing": lambda m: m.storage_data.update({MetadataIndex("gone"): place("f", 0, 1)}),
    "an offset without a chunk": lambda m: m.storage_data.update({MetadataIndex("z.w", [1, 1]): place("f", 0, 1)}),
    "more to say": lambda m: vars(m.storage_data[MetadataIndex("a")]).update(more=1),
    "a negative offset": lambda m: m.storage_data.update({MetadataIndex("a"): place("f", -1, 1)}),
    "a broken number": lambda m: m.storage_data.update({MetadataIndex("a"): place("f", 1.5, 1)}),  # type: ignore[arg-type]
    "a large number": lambda m: m.storage_data.update({MetadataIndex("a"): place("f", 1 << 70, 1)}),
    "a tuple of extensions": lambda m: m.storage_data.update({MetadataIndex("a"): place("f", 0, 1, None, ("x",))}),  # type: ignore[arg-type]
    "no table of places": lambda m: setattr(m, "storage_data", None),
    "an entry of another class": lambda m: m.state_dict_metadata.update(a=object()),
    "a key that is no text": lambda m: m.state_dict_metadata.update({5: BytesStorageMetadata()}),
    "text beyond UTF-8": lambda m: m.state_dict_metadata.update({"\ud800": BytesStorageMetadata()}),
    "chunks of other axes": lambda m: m.state_dict_metadata.update(a=tensor((2,), ((0, 0), (1, 1)))),
    "a size that is a list": lambda m: setattr(m.state_dict_metadata["z.w"], "size", [4, 3]),
    "too many axes": lambda m: m.state_dict_metadata.update(a=tensor((1,) * 65)),
}


@pytest.mark.parametrize("name", ODD)
def test_what_columns_cannot_hold_is_left_to_the_pickle(name: str) -> None:
    """
    Metadata that hold more than ours do have no columns.
    """
    value = sample()
    assert columns_of(value) is not None
    ODD[name](value)
    assert columns_of(value) is None


parts = st.one_of(st.text(max_size=4), st.integers(-(10**20), 10**20))


@given(path=st.lists(parts, max_size=5).map(tuple), key=st.text(max_size=8), own=st.booleans())
@settings(max_examples=200, deadline=None)
def test_paths_come_back(path: tuple[str | int, ...], key: str, own: bool) -> None:
    """
    Any path comes back, of the key that it makes and of any other.
    """
    key = ".".join(map(str, path)) if own else key
    try:
        written = encode_path(path, key)
    except OverflowError:  # of numbers that msgpack does not have, in a path that is not its key
        assert not own
        return
    assert decode_path(written, key) == path


def test_forged_columns_are_refused() -> None:
    """
    Numbers that contradict each other, under digests that are right, are found when the columns are opened.
    """
    columns = columns_of(sample())
    assert columns is not None
    data = encode_columns(columns)
    whole = unpack_sections(MAGIC, memoryview(data), _SHAPES, where="here")
    refused = 0
    for name, section in whole.items():
        if name in _SHAPES.texts:
            continue
        longer = np.concatenate([section, section[:1]]) if len(section) else np.ones(1, np.int64)
        for forged in (longer, section[:-1], np.full_like(section, 0), section.astype(np.int64) + (1 << 40)):
            if forged.shape == section.shape and (forged == section).all():
                continue
            try:
                opened = decode_columns(pack_sections(MAGIC, {**whole, name: forged}), where="here")
                made = metadata_of(opened, where="here")
                all_of(made)
            except DamagedCheckpoint:
                refused += 1
    assert refused > 40


def test_damaged_columns_are_refused() -> None:
    """
    Any byte that is changed, and any length, is refused or makes no difference.
    """
    value = sample()
    columns = columns_of(value)
    assert columns is not None
    data = encode_columns(columns)
    for at in range(0, len(data), 7):
        bad = bytearray(data)
        bad[at] ^= 0x5A
        for made in (bytes(bad), data[:at]):
            try:
                opened = metadata_of(decode_columns(made, where="here"), where="here")
            except DamagedCheckpoint:
                continue
            assert opened == value
