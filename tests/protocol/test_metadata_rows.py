"""`.metadata` made of rows says what one made of objects does, for any values, paths and places, to us and to torch."""

import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.format.boxes import Boxes
from shardkeep.layouts import torch_values as values
from shardkeep.layouts.torch_pickle import (
    Contents,
    decode_metadata,
    encode_body,
    encode_metadata,
    encode_plain_metadata,
)

AXES, FILES = 3, ("__0_0.distcp", "__1_0.distcp")
NAMES = st.one_of(st.text(max_size=5), st.sampled_from(["a", "a.b", "storage_data", "é" * 200, "x" * 300]))
NUMBERS = st.sampled_from([0, 1, 255, 256, 65536, 1 << 31, 1 << 40])
PARTS = st.one_of(NAMES, NUMBERS, st.integers(-3, 3))
KINDS = st.tuples(st.sampled_from(["float32", "bfloat16"]), st.booleans(), st.booleans())


@st.composite
def states(draw):
    """Return the values of a state by name: a kind, a shape and chunks; or a place alone. Each chunk has a place."""
    place = st.tuples(st.integers(0, 1), NUMBERS, NUMBERS, st.sampled_from([-1, 64, 1 << 33]))
    found = {}
    for name in draw(st.lists(NAMES, max_size=40, unique=True)):
        shape = draw(st.lists(st.sampled_from([1, 2, 300, 70000]), max_size=AXES).map(tuple))
        chunks = st.lists(st.tuples(*[st.integers(0, 3)] * len(shape)), min_size=1, max_size=3, unique=True)
        tensor = draw(st.one_of(st.none(), st.tuples(KINDS, st.just(shape), chunks)))
        found[name] = (
            tensor,
            [(*draw(place)[:3], -1 if tensor is None else draw(place)[3]) for _ in (tensor or [0, 0, [0]])[2]],
        )
    paths = {name: draw(st.lists(PARTS, min_size=1, max_size=4).map(tuple)) for name in found}
    return found, draw(st.sampled_from([paths, None]))


def objects_of(found, paths):
    """Return the metadata as torch's planners and writers make them, object by object."""
    entries, places = {}, {}
    for name, (tensor, where) in found.items():
        entries[name] = values.BytesStorageMetadata()
        indices = [values.MetadataIndex(name)]
        if tensor is not None:
            (dtype, grad, pinned), shape, chunks = tensor
            properties = values.TensorProperties(getattr(torch, dtype), requires_grad=grad, pin_memory=pinned)
            boxes = [values.ChunkStorageMetadata(torch.Size(at), torch.Size(shape)) for at in chunks]
            entries[name] = values.TensorStorageMetadata(properties, torch.Size(shape), boxes)
            indices = [values.MetadataIndex(name, torch.Size(at), number) for number, at in enumerate(chunks)]
        for index, (file, offset, length, start) in zip(indices, where, strict=True):
            places[index] = values._StorageInfo(FILES[file], offset, length)
            if start >= 0:
                places[index].shardkeep_data_start = start
    return values.Metadata(entries, paths, places)


def columns_of(found, paths, order):
    def padded(rows, fill):
        return np.array([(*row, *[fill] * (AXES - len(row))) for row in rows], np.int64).reshape(-1, AXES)

    tensors = [tensor for tensor, _ in found.values()]
    shapes = [() if tensor is None else tensor[1] for tensor in tensors]
    items = [
        (value, offset, shapes[value], place)
        for value, (tensor, where) in enumerate(found.values())
        for offset, place in zip([()] if tensor is None else tensor[2], where, strict=True)
    ]
    items = [items[at] for at in order(len(items))]
    contents = Contents(
        kinds={name: None if tensor is None else tensor[0] for name, (tensor, _) in found.items()},
        ndim=np.array(list(map(len, shapes)), np.int64),
        shape=padded(shapes, 1),
        paths=paths,
        value=np.array([value for value, *_ in items], np.int64),
        boxes=Boxes(padded([offset for _, offset, *_ in items], 0), padded([shape for *_, shape, _ in items], 1)),
    )
    return contents, np.array([place for *_, place in items], np.int64).reshape(-1, 4).T


def said(metadata):
    places = {
        (index.fqn, index.offset): (
            index.index,
            {name: value for name, value in vars(info).items() if value is not None},
        )
        for index, info in metadata.storage_data.items()
    }
    return metadata.state_dict_metadata, list(metadata.state_dict_metadata), metadata.planner_data, places


@given(states(), st.booleans())
def test_rows_say_what_objects_say(state, backwards):
    """Items in the order of the values, or files that were written the other way round."""
    found, paths = state
    contents, places = columns_of(found, paths, lambda count: range(count)[:: -1 if backwards else 1])
    if backwards:  # chunks are listed in the order of their items
        found = {
            name: (tensor and (*tensor[:2], tensor[2][::-1]), where[::-1]) for name, (tensor, where) in found.items()
        }
    others = {"storage_meta": None, "version": None}
    made = encode_plain_metadata(encode_body(contents, places, len(FILES)), FILES, **others)
    expected = objects_of(found, paths)
    assert said(expected) == said(decode_metadata(made, where="rows"))
    assert said(decode_metadata(encode_metadata(expected), where="objects")) == said(
        decode_metadata(made, where="rows")
    )
    torchs = pickle.loads(made)
    assert list(torchs.state_dict_metadata) == list(found)
    assert torchs.planner_data == paths
