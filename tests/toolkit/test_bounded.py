"""How much memory the toolkit takes beyond its result: a batch, or one full tensor, never the tree."""

import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardkeep.dist import rendezvous as agree
from shardkeep.dist.rendezvous import Rendezvous
from shardkeep.state import collectives as stream
from shardkeep.state.collectives import broadcast_state_dict, distribute_state_dict, gather_state_dict
from tests.toolkit.samples import CPU, in_chunks, mesh_of, spread_out

KIB = 1 << 10
FULL = 256 * KIB
"""Bytes of one full tensor of the tree."""
COUNT = 40
BATCH = 512 * KIB
SLACK = 64 * KIB


MANY = [(1024, 64)] * COUNT
ONE = [(1024 * COUNT, 64)]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all memory that operators made and that is still in use."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {self._storage(t)._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and self._storage(tensor)._cdata not in given:
                self._add(self._storage(tensor))
        return made

    @staticmethod
    def _storage(tensor):
        return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()

    def _add(self, storage):
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._known or storage.device.type == "meta":
            return
        self._known.add(address)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, address, nbytes)

    def settled(self, nbytes):
        """What is alive once gloo's threads have let go of the last buffer they sent, if that is `nbytes`."""
        deadline = time.monotonic() + 20
        while self.now != nbytes and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.now

    def _drop(self, address, nbytes):
        self._known.discard(address)
        self.now -= nbytes


def full_tree(shapes):
    return {f"t{i}": torch.full(shape, float(i)) for i, shape in enumerate(shapes)}


def blank_tree(shapes, device):
    line = mesh_of(dist.get_world_size())
    return {f"t{i}": spread_out(torch.zeros(s, device=device), line, Cut(0)) for i, s in enumerate(shapes)}


def broadcast_counted(shapes, device, result):
    full = full_tree(shapes) if dist.get_rank() == 0 else {}
    local = blank_tree(shapes, device)
    before, stream.BATCH_BYTES = stream.BATCH_BYTES, BATCH
    try:
        with LiveBytes() as live:
            broadcast_state_dict(full, local, CPU)
            after = live.settled(result)
    finally:
        stream.BATCH_BYTES = before
    right = all(float(value._local_tensor.mean()) == i for i, value in enumerate(local.values()))
    return live.peak, after, right


@pytest.mark.parametrize("shapes", [MANY, ONE], ids=["many tensors", "one tensor of many batches"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_broadcast_takes_one_batch(rank_pool, shapes, device):
    """Ten MiB arrive through half a MiB: beyond its parts a rank holds one batch, and nothing is left after."""
    result = COUNT * FULL // 4 if device == "meta" else 0
    for peak, after, right in rank_pool.run(4, broadcast_counted, shapes, device, result):
        assert right
        assert after == result
        assert result + BATCH // 2 < peak <= result + BATCH + SLACK


def longest_message():
    """Of all that the ranks tell each other besides the batches, which go through the group."""
    lengths = []

    class Listening(Rendezvous):
        def agree(self, phase, work, decide):
            answer = super().agree(phase, work, decide)
            lengths.append(len(answer))
            return answer

    agree.Rendezvous = Listening
    try:
        broadcast_state_dict(full_tree(MANY) if dist.get_rank() == 0 else {}, blank_tree(MANY, "meta"), CPU)
    finally:
        agree.Rendezvous = Rendezvous
    return len(lengths), max(lengths)


def test_ranks_tell_each_other_about_tensors_not_their_values(rank_pool):
    """What is agreed on takes some bytes for each of forty tensors, whatever their size."""
    for count, longest in rank_pool.run(2, longest_message):
        assert count == 2
        assert longest < 200 * COUNT


def distribute_counted(device):
    full, local = full_tree(MANY), blank_tree(MANY, device)
    with LiveBytes() as live:
        distribute_state_dict(full, local, CPU)
        after = live.now
    return live.peak, after


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_distributing_takes_only_the_parts(rank_pool, device):
    """Each rank's parts are cut out of the full tree that is there; nothing else is made."""
    result = COUNT * FULL // 4
    for peak, after in rank_pool.run(4, distribute_counted, device):
        assert after == result
        assert peak <= result + SLACK


def gather_counted(kind):
    line = mesh_of(dist.get_world_size())
    full = full_tree(MANY)
    cut = in_chunks if kind == "ShardedTensor" else lambda tensor: spread_out(tensor, line, Cut(0))
    tree = {key: cut(value) for key, value in full.items()}
    with LiveBytes() as live:
        made = gather_state_dict(tree, ranks_only=(0,), cpu_offload=True)
        after = live.settled(len(made) * FULL)
    return live.peak, after, len(made)


@pytest.mark.parametrize("kind", ["DTensor", "ShardedTensor"])
def test_a_gather_holds_one_full_tensor_beyond_its_result(rank_pool, kind):
    """Ranks that get no result hold the tensor being gathered and its buffers, a few of forty tensors at most."""
    outcomes = rank_pool.run(4, gather_counted, kind)
    for rank, (peak, after, count) in enumerate(outcomes):
        result = COUNT * FULL if rank == 0 else 0
        assert (after, count) == (result, COUNT if rank == 0 else 0)
        # Three for the tensor, its padded form and its part; more where gloo's threads are slow to let go of the last.
        assert peak <= result + 10 * FULL
