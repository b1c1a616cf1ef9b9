"""State dicts in host memory, and companions that are used again and again."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils as theirs
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from shardkeep.errors import BadValue, CompanionMismatch
from shardkeep.state.offload import (
    check_state_dict_similarity,
    copy_state_dict,
    create_cpu_state_dict,
    offload_state_dict_to_cpu,
)
from tests.engine.samples import all_dtypes, random_tensor
from tests.toolkit.samples import numbered, seen, sharded_tree


def pointers(tree):
    return [tensor.data_ptr() for tensor in plain_tensors(tree)]


def offload_both():
    tree = sharded_tree()
    return [
        seen(offload_state_dict_to_cpu(tree, ranks_only=ranks_only))
        == seen(theirs._offload_state_dict_to_cpu(tree, ranks_only=ranks_only))
        for ranks_only in ((), (1,))
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_offloads_as_torch_does(rank_pool, ranks):
    assert rank_pool.run(ranks, offload_both) == [[True, True]] * ranks


def fill_companions(share_memory):
    tree = sharded_tree()
    before = seen(tree)
    companion = create_cpu_state_dict(tree, share_memory=share_memory)
    own = set(pointers(companion)) - {0}
    apart = not own & set(pointers(tree))
    # A ShardedTensor without shards has no memory to share.
    shared = all(t.is_shared() for t in plain_tensors(companion)) if share_memory else True
    similar = check_state_dict_similarity(tree, companion)
    first = copy_state_dict(tree, companion)
    at_first = pointers(first)
    exact = seen(first) == before
    for tensor in plain_tensors(tree):
        tensor.add_(1)
    second = copy_state_dict(tree, companion)
    return (
        apart,
        shared,
        similar,
        exact,
        at_first == pointers(second) == pointers(companion),
        seen(second) == seen(tree),
    )


def plain_tensors(tree):
    if isinstance(tree, ShardedTensor):
        return [shard.tensor for shard in tree.local_shards()]
    if isinstance(tree, DTensor):
        return [tree._local_tensor]
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for value in values for tensor in plain_tensors(value)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("share_memory", [False, True])
def test_companions_are_filled_again_in_the_same_memory(rank_pool, ranks, share_memory):
    """A companion shares no memory with the tree, and a second copy lands where the first did."""
    assert rank_pool.run(ranks, fill_companions, share_memory) == [(True,) * 6] * ranks


def companions_both():
    tree = sharded_tree()
    ours, expected = create_cpu_state_dict(tree), theirs._create_cpu_state_dict(tree)
    copied = copy_state_dict(tree, ours), theirs._copy_state_dict(tree, expected)
    return seen(copied[0]) == seen(copied[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_companions_are_those_of_torch(rank_pool, ranks):
    assert rank_pool.run(ranks, companions_both) == [True] * ranks


def read_shared(queue, answers):
    tensor = queue.get()
    answers.put(tensor.tolist())
    tensor.fill_(9)
    answers.put("done")


def test_shared_companions_are_seen_by_another_process():
    made = create_cpu_state_dict({"w": torch.zeros(3), "step": torch.tensor(0)}, share_memory=True)
    copy_state_dict({"w": numbered(3), "step": torch.tensor(4)}, made)
    context = torch.multiprocessing.get_context("forkserver")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=read_shared, args=(queue, answers), daemon=True)
    process.start()
    queue.put(made["w"])
    assert answers.get(timeout=120) == [0.0, 1.0, 2.0]
    assert answers.get(timeout=120) == "done"
    process.join(60)
    assert made["w"].tolist() == [9.0] * 3
    assert made["step"].is_shared()
    assert process.exitcode == 0


def test_odd_tensors_get_companions_too():
    """Empty, 0-dim, strided, expanded and trainable tensors, and objects of the user's own."""
    config = {"inner": {1, 2}}
    tree = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5, dtype=torch.int16),
        "turned": numbered(2, 3).t(),
        "expanded": numbered(1, 3).expand(2, 3),
        "parameter": torch.nn.Parameter(numbered(3)),
        "object": config,
    }
    companion = create_cpu_state_dict(tree, share_memory=True)
    assert companion["scalar"].item() == 0
    assert companion["object"]["inner"] == {1, 2}
    assert companion["object"]["inner"] is not config["inner"]
    made = copy_state_dict(tree, companion, type_check=False)
    assert seen(made) == seen({**tree, "parameter": numbered(3)})
    assert not made["parameter"].requires_grad


@pytest.mark.filterwarnings("ignore")
def test_every_dtype_is_copied_bit_for_bit():
    tree = {str(dtype): random_tensor((3, 2), dtype) for dtype in all_dtypes()}
    assert seen(copy_state_dict(tree, create_cpu_state_dict(tree))) == seen(tree)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to pin memory for")
@pytest.mark.parametrize("share_memory", [False, True])
def test_pinning_without_an_accelerator_raises_as_torch_does(share_memory):
    tree = {"w": torch.ones(3)}
    with pytest.raises((RuntimeError, AssertionError)) as expected:
        theirs._create_cpu_state_dict(tree, pin_memory=True, share_memory=share_memory)
    with pytest.raises(type(expected.value)) as found:
        create_cpu_state_dict(tree, pin_memory=True, share_memory=share_memory)
    assert str(found.value) == str(expected.value)


def test_similarity_compares_and_changes_nothing():
    """Nesting, kinds, sizes and dtypes count, values do not; torch's would copy them over."""
    tree = {"a": [torch.ones(2), 3], "b": {"c": torch.zeros(1)}}
    other = {"a": [torch.zeros(2), "x"], "b": {"c": torch.ones(1)}}
    before = seen(other)
    assert check_state_dict_similarity(tree, other)
    assert seen(other) == before
    for different in (
        {"a": [torch.zeros(2), 3]},
        {"a": [torch.zeros(2)], "b": {"c": torch.ones(1)}},
        {"a": [torch.zeros(3), 3], "b": {"c": torch.ones(1)}},
        {"a": [torch.zeros(2).half(), 3], "b": {"c": torch.ones(1)}},
        {"a": [None, 3], "b": {"c": torch.ones(1)}},
        {"a": [torch.zeros(2), 3], "b": [torch.ones(1)]},
    ):
        assert not check_state_dict_similarity(tree, different)


@pytest.mark.parametrize("bad", ["companion", "type"])
def test_a_copy_that_fails_has_copied_nothing(bad):
    """The last leaf does not fit: the first one of the companion still has its old values."""
    tree = {"a": numbered(3), "b": numbered(2) if bad == "companion" else object()}
    companion = {"a": torch.full((3,), -1.0), "b": torch.zeros(4) if bad == "companion" else object()}
    with pytest.raises(CompanionMismatch if bad == "companion" else BadValue, match="'b'"):
        copy_state_dict(tree, companion)
    assert companion["a"].tolist() == [-1.0] * 3


def offload_pending():
    pending = all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    companion = {"w": torch.zeros(3)}
    kinds = isinstance(pending, AsyncCollectiveTensor), type(offload_state_dict_to_cpu({"w": pending})["w"])
    copied = copy_state_dict({"w": all_reduce(torch.ones(3), "sum", dist.group.WORLD)}, companion)
    return *kinds, copied["w"].tolist(), type(create_cpu_state_dict({"w": pending})["w"])


def test_tensors_on_their_way_are_waited_for(rank_pool):
    """An AsyncCollectiveTensor is finished before it is offloaded or copied."""
    assert rank_pool.run(2, offload_pending) == [(True, torch.Tensor, [2.0] * 3, torch.Tensor)] * 2
