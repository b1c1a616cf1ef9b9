"""What a checkpoint holds is the state as it was at the call, whatever becomes of the state after `staged`."""

import copy
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import shardkeep as sk
from shardkeep.engine.pools import staging_memory
from tests.asynchronous.scene import OPTIONS, PATIENCE_S, HeldStore, held, same, saved_in
from tests.engine.samples import all_dtypes, bits, random_tensor, rich_state


def tensors_of(state):
    leaves = [torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in tree_leaves(state)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def spoil(state, rng):
    for tensor in tensors_of(state):
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        memory.bitwise_not_() if rng.random() < 0.5 else memory.fill_(rng.randrange(256))


def many_shapes():
    large = torch.randn(600, 1000)
    tied = torch.randn(77)
    return {
        "large": torch.randn(400_000),
        "row_of_large": large[7],
        "columns": large[:, 3:5],
        "reversed": torch.randn(50, 60).t()[1:],
        "expanded": torch.randn(1, 9).expand(5, 9),
        "tied": [tied, tied],
        "overlapping": [tied[:50], tied[20:], tied.view(7, 11)],
        "as_whole_numbers": tied.view(torch.int32),
        "scalar": torch.tensor(2.5),
        "empty": [torch.empty(0), torch.empty(3, 0, 2)],
        "parameter": nn.Parameter(torch.randn(3, 3)),
        "array": np.random.default_rng(0).normal(size=(11, 13)),
        "strided_array": np.arange(300.0).reshape(20, 15)[::3, 1::2],
        "number": 3,
    }


def test_everything_is_changed_right_after_staged(place):
    """Fifty saves of states whose every byte changes right after staging: none of the new bytes is saved."""
    rng = random.Random(5)
    state = many_shapes()
    for step in range(50):
        spoil(state, rng)
        wanted = bits(copy.deepcopy(state))
        handle = sk.async_save(state, place, step=step, overwrite=True, options=OPTIONS)
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.005)
        handle.staged.wait(PATIENCE_S)
        spoil(state, rng)
        assert handle.result(PATIENCE_S).step == step
        assert bits(saved_in(place)) == wanted


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_every_dtype(dtype):
    where = held()
    base = random_tensor((40, 12), dtype, seed=1)
    state = {
        "base": base,
        "view": base[3:9],
        "strided": random_tensor((9, 8), dtype, seed=2).t(),
        "scalar": random_tensor((1,), dtype, seed=3)[0],
        "empty": random_tensor((0, 2), dtype),
    }
    wanted = bits({key: tensor.clone() for key, tensor in state.items()}) if copies(dtype) else bits(state)
    handle = sk.async_save(state, where, options=OPTIONS)
    handle.staged.wait(PATIENCE_S)
    spoil(state, random.Random(0))
    where.release.set()
    handle.result(PATIENCE_S)
    assert bits(saved_in(where.inner)) == wanted


def copies(dtype):
    try:
        torch.empty(1, dtype=dtype).clone()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def test_every_kind_of_leaf(place):
    state = rich_state()
    sk.save(state, place)
    handle = sk.async_save(state, where := sk.MemoryStore())
    handle.result(PATIENCE_S)
    assert same(saved_in(where), saved_in(place))


def test_conjugates_and_negatives_are_not_taken_for_what_they_are_views_of():
    """A complex tensor, its conjugate and its imaginary parts share memory, layout and type, and are not the same."""
    x = torch.randn(5, dtype=torch.complex64)
    state = {"x": x, "conj": x.conj(), "imag": x.imag, "neg": x.conj().imag}
    wanted = bits({key: tensor.clone() for key, tensor in state.items()})
    sk.async_save(state, where := sk.MemoryStore()).result(PATIENCE_S)
    assert bits(saved_in(where)) == wanted


def test_values_that_change_after_the_call():
    where = held()
    state = {"step": 1, "seen": [1, 2], "nested": {"lr": 0.5}, "w": torch.zeros(3)}
    handle = sk.async_save(state, where)
    state["step"] = 2
    state["seen"].append(3)
    state["nested"]["lr"] = 0.1
    state["new"] = "x"
    del state["w"]
    where.release.set()
    handle.result(PATIENCE_S)
    assert same(saved_in(where.inner), {"step": 1, "seen": [1, 2], "nested": {"lr": 0.5}, "w": torch.zeros(3)})


def test_only_its_own_bytes_of_a_view_are_copied():
    """A row of 4 kB in a storage of 40 MB takes 4 kB of memory; what occurs twice is copied once."""
    sk.finish_saves()
    before = staging_memory().arenas.nbytes
    row = torch.zeros(10_000, 1000)[7]
    tied = torch.ones(500)
    sk.async_save({"row": row, "tied": [tied, tied, tied]}, sk.MemoryStore()).result(PATIENCE_S)
    assert 6_000 <= staging_memory().arenas.nbytes - before < 7_000


def test_large_tensors_are_copied_whole():
    state = {"a": torch.randint(0, 1 << 60, (5 << 20,)), "b": torch.arange(17 << 20, dtype=torch.uint8)}
    wanted = bits({key: tensor.clone() for key, tensor in state.items()})
    where = HeldStore(sk.MemoryStore())
    handle = sk.async_save(state, where)
    for tensor in state.values():
        tensor.fill_(1)
    where.release.set()
    handle.result(PATIENCE_S)
    assert bits(saved_in(where.inner)) == wanted


def test_a_state_that_cannot_be_saved_is_told_in_the_call():
    """What cannot be described is an error of the call, and the next save is not troubled by it."""
    where = sk.MemoryStore()
    with pytest.raises(sk.UnsupportedLeaf):
        sk.async_save({"w": torch.zeros(2), "bad": object()}, where)
    wrong = {"step": "one", "staging": "quick", "max_in_flight": 0, "writer": "fork"}
    for name, value in wrong.items():
        with pytest.raises(sk.StateError, match=name):
            sk.async_save({"w": torch.zeros(2)}, where, **{name: value})
    assert list(where.list()) == []
    sk.async_save({"w": torch.zeros(2)}, where).result(PATIENCE_S)
