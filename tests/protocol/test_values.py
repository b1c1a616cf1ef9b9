"""The protocol's values next to torch's own: equal where torch looks, and turned into each other without loss."""

import dataclasses
import pickle
import random

import pytest
import torch
from torch.distributed.checkpoint import metadata as their_metadata
from torch.distributed.checkpoint import planner as their_planner
from torch.distributed.checkpoint import storage as their_storage

from shardkeep.errors import BrokenProtocol
from shardkeep.layouts import torch_values as metadata
from shardkeep.layouts import torch_values as plans
from shardkeep.layouts import torch_values as storage
from shardkeep.layouts.torch_values import protocol_classes_of, to_ours, translator

OFFSETS = [None, (), (0,), (3, 4)]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("hint", [None, 5])
def test_an_index_finds_what_is_stored_under_torchs(offset, hint):
    """Ours and torch's are equal and have one hash, whatever their hints, so each finds the other in a dict."""
    mine, theirs = metadata.MetadataIndex("a.b", offset, hint), their_metadata.MetadataIndex("a.b", offset)
    assert mine == theirs
    assert theirs == mine
    assert {theirs: 1}[mine] == {mine: 1}[theirs] == 1
    assert mine != metadata.MetadataIndex("a.b", (9, 9))
    assert mine != their_metadata.MetadataIndex("a", offset)
    assert mine != ("a.b", offset)


def test_an_index_is_frozen_and_survives():
    index = metadata.MetadataIndex("w", [1, 2], 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        index.fqn = "v"
    back = pickle.loads(pickle.dumps(index))
    assert (back.fqn, back.offset, back.index) == ("w", torch.Size([1, 2]), 3)
    assert dataclasses.replace(index, index=7).offset == torch.Size([1, 2])


@pytest.mark.parametrize("name", ["WriteItemType", "LoadItemType"])
def test_item_types_equal_torchs_of_the_same_name(name):
    """Each member equals torch's member of that name and no other, in both orders, and has its hash."""
    mine, theirs = getattr(plans, name), getattr(their_planner, name)
    for a in mine:
        for b in theirs:
            assert (a == b) == (b == a) == (a.name == b.name)
            assert (a != b) == (b != a) == (a.name != b.name)
        assert {theirs[a.name]: 1}[a] == 1
        assert pickle.loads(pickle.dumps(a)) is a
        assert [each for each in mine if each == a] == [a]
    assert plans.WriteItemType.TENSOR != their_planner.LoadItemType.TENSOR
    assert plans.WriteItemType.TENSOR != plans.LoadItemType.TENSOR


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_properties_are_pickled_as_torchs_are(memory_format):
    mine = metadata.TensorProperties(torch.bfloat16, memory_format=memory_format, requires_grad=True)
    theirs = their_metadata.TensorProperties(torch.bfloat16, memory_format=memory_format, requires_grad=True)
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert [getattr(x, "name", x) for x in mine.__getstate__()] == [
        getattr(x, "name", x) for x in theirs.__getstate__()
    ]
    read = metadata.TensorProperties()
    read.__setstate__(theirs.__getstate__())
    assert read == mine


def test_a_memory_format_that_cannot_be_stored_is_refused():
    """Neither an unknown format is written nor an unknown code read; both are RuntimeErrors, as in torch."""
    with pytest.raises(RuntimeError, match="memory format"):
        metadata.TensorProperties(memory_format=torch.channels_last_3d).__getstate__()
    with pytest.raises(BrokenProtocol, match="memory format"):
        metadata.TensorProperties().__setstate__((torch.float32, torch.strided, False, 77, False))


def every_value(of_metadata, of_plans, of_storage):
    index = of_metadata.MetadataIndex("w", (2, 0), 1)
    chunk = of_metadata.ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))
    properties = of_metadata.TensorProperties(torch.int8)
    data = of_plans.TensorWriteData(chunk, properties, torch.Size([4, 3]))
    items = [
        of_plans.WriteItem(index, of_plans.WriteItemType.SHARD, tensor_data=data),
        of_plans.WriteItem(
            of_metadata.MetadataIndex("o"), of_plans.WriteItemType.BYTE_IO, of_plans.BytesIOWriteData(9)
        ),
    ]
    read = of_plans.ReadItem(of_plans.LoadItemType.TENSOR, index, (0,), index, (1,), (2,))
    whole = of_metadata.Metadata(
        {
            "w": of_metadata.TensorStorageMetadata(properties, data.size, [chunk]),
            "o": of_metadata.BytesStorageMetadata(),
        },
        planner_data={"w": ("w",)},
        storage_data={index: "file"},
        storage_meta=of_metadata.StorageMeta("here", "id", modules=["m"]),
        version="1.0.0",
    )
    return [
        whole,
        of_plans.SavePlan(items, storage_data="s", planner_data={"p": (1,)}, usable=False),
        of_plans.LoadPlan([read], "s", "p"),
        [[of_storage.WriteResult(index, 12, "place")]],
    ]


def test_values_go_to_torch_and_back_without_loss():
    mine = every_value(metadata, plans, storage)
    theirs = every_value(their_metadata, their_planner, their_storage)
    assert to_ours(theirs) == mine
    writer = their_storage.StorageWriter
    foreign = type("TheirWriter", (writer,), dict.fromkeys(writer.__abstractmethods__))()
    sent = translator(object(), foreign)(mine)
    assert sent == theirs
    assert [type(index) for index in sent[0].storage_data] == [their_metadata.MetadataIndex]
    assert sent[0].storage_data.popitem()[0].index == 1
    assert type(sent[1].items[0].type) is their_planner.WriteItemType
    # Their pickles name no module of ours.
    assert b"shardkeep" not in pickle.dumps(translator(object(), foreign)(every_value(metadata, plans, storage)))


def test_what_is_not_of_the_protocol_stays_as_it_is():
    """A user's subclass, and whatever a planner or a storage keeps in its own fields, is the same object afterwards."""

    class MyPlan(plans.SavePlan):
        pass

    mine, secret = MyPlan([]), object()
    assert to_ours(mine) is mine
    assert to_ours(their_planner.SavePlan([], storage_data=secret, planner_data=secret)).storage_data is secret


def test_what_another_version_of_torch_added_is_kept():
    theirs = their_metadata.BytesStorageMetadata()
    theirs.extra = random.random()
    assert to_ours(theirs).extra == theirs.extra


def test_the_language_of_a_party_is_that_of_its_base():
    """Subclasses of torch's planners and storages expect torch's classes; all others ours."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as Theirs

    from shardkeep.dcp.default_planner import DefaultLoadPlanner

    assert protocol_classes_of(type("Mine", (Theirs,), {})())["Metadata"] is their_metadata.Metadata
    assert protocol_classes_of(type("Mine", (DefaultLoadPlanner,), {})())["Metadata"] is metadata.Metadata
    assert protocol_classes_of(object())["Metadata"] is metadata.Metadata


def test_the_size_of_an_item():
    """`tensor_storage_size` counts the whole tensor, as in torch; what balances ranks counts the chunk."""
    plan = every_value(metadata, plans, storage)[1]
    theirs = every_value(their_metadata, their_planner, their_storage)[1]
    assert [item.tensor_storage_size() for item in plan.items] == [12, None]
    assert [item.tensor_storage_size() for item in theirs.items] == [12, None]
    assert [plans.chunk_nbytes(item) for item in plan.items] == [6, None]
