"""A part of a stream read as a stream, lookups in a state, and the small functions beside them."""

import io
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import utils as their_utils
from torch.distributed.checkpoint.metadata import MetadataIndex as TheirIndex

from shardkeep.dcp import utils
from shardkeep.dcp._impl import driver
from shardkeep.dcp.metadata import MetadataIndex
from tests.toolkit.samples import numbered, seen, sharded_tensor

DATA = bytes(range(40))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("seek"), st.integers(0, 25), st.just(os.SEEK_SET)),
        st.tuples(st.just("seek"), st.integers(-5, 5), st.sampled_from([os.SEEK_CUR, os.SEEK_END])),
        st.tuples(st.sampled_from(["read", "readinto"]), st.integers(-1, 30), st.none()),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), steps)
def test_a_view_reads_as_a_stream_of_its_own(offset, length, actions):
    view, alone = utils._create_file_view(io.BytesIO(DATA), offset, length), io.BytesIO(DATA[offset : offset + length])
    assert view.readable()
    assert view.seekable()
    for name, number, whence in actions:
        if name == "seek":
            target = number + {os.SEEK_SET: 0, os.SEEK_CUR: alone.tell(), os.SEEK_END: len(alone.getvalue())}[whence]
            if target < 0:
                with pytest.raises(ValueError, match="before the start"):
                    view.seek(number, whence)
            else:
                assert view.seek(number, whence) == alone.seek(target) == target
        elif name == "read":
            assert view.read(number) == alone.read(number)
        else:
            mine, other = bytearray(max(number, 0)), bytearray(max(number, 0))
            assert view.readinto(mine) == alone.readinto(other)
            assert mine == other
        assert view.tell() == alone.tell()


def test_a_view_is_what_torch_loads_from():
    stored = io.BytesIO()
    torch.save(numbered(3, 2), stored)
    whole = io.BytesIO(b"before" + stored.getvalue() + b"after")
    view = utils._ReaderView(whole, 6, len(stored.getvalue()))
    assert seen(torch.load(view, weights_only=True)) == seen(numbered(3, 2))
    view.close()
    assert not whole.closed
    with pytest.raises(ValueError, match="whence"):
        utils._ReaderView(whole, 0, 3).seek(0, 9)


LOOKED_UP_IN_VAIN = [
    ("w", None, "a ShardedTensor and no offset was provided"),
    ("w", (1, 1), r"Could not find shard at 'torch.Size\(\[1, 1\]\)' for FQN: "),
    ("absent", None, "Could not find FQN: "),
    ("n", (0,), "is not a ShardedTensor, can't find by offset: "),
    ("plain", (1, 0), "is not a ShardedTensor, can't find by offset: "),
]


def find_shards():
    full = numbered(6, 4)
    tensor = sharded_tensor(full, [(0, (0, 0), (3, 2)), (0, (0, 2), (3, 2)), (0, (3, 0), (3, 4))])
    found = [
        seen(utils.find_tensor_shard(tensor, MetadataIndex("w", at, hint)))
        for at, hint in [((0, 2), None), ((0, 2), 1), ((0, 2), 0), ((0, 2), 9), ((0, 2), -1)]
    ]
    state = {"w": tensor, "n": 5, "plain": full}
    found.append(seen(utils.find_state_dict_object(state, MetadataIndex("w", (0, 2)))))
    for name, at, words in LOOKED_UP_IN_VAIN:
        for module, kind in ((utils, MetadataIndex), (their_utils, TheirIndex)):
            with pytest.raises(ValueError, match=f"{words}.*{name}|{name}.*{words}"):
                module.find_state_dict_object(state, kind(name, at and torch.Size(at)))
    assert utils.find_state_dict_object(state, MetadataIndex("n")) == 5
    return [each == seen(full[:3, 2:]) for each in found]


def test_a_shard_is_found_by_its_offset(rank_pool):
    """With a right hint, a wrong one or none; where there is no such shard, a ValueError says so in torch's words."""
    assert rank_pool.run(1, find_shards) == [[True] * 6]


def test_profiles_are_printed_where_asked_for(monkeypatch, capsys):
    """Nothing is printed by default; with the switch on, where the time went."""
    with utils._profile():
        pass
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(driver, "ENABLE_PROFILE", True)
    with utils._profile():
        sorted([2, 1])
    assert "function calls" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="one positional"):
        utils._api_bc_check(lambda a, *, b=1: a)(1, 2)
