"""Which ranks a process finds itself among."""

import contextlib
import subprocess
import sys

import pytest
import torch.distributed as dist

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.errors import RanksDisagree


def test_a_process_without_a_group_is_alone():
    assert World(0, 1, None, 5.0) == current_world(timeout_s=5.0)


def test_being_alone_does_not_import_torch():
    code = "import sys; from shardkeep.dist.world import current_world; current_world(timeout_s=1); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def who_am_i():
    world = current_world(timeout_s=1)
    return world.rank, world.size, world.store is None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_default_group_is_the_world(rank_pool, size):
    assert rank_pool.run(size, who_am_i) == [(rank, size, size == 1) for rank in range(size)]


def in_groups():
    """Groups {0, 2} and {1}: each rank calls with the first one, then with its own."""
    pair, lone = dist.new_group([0, 2]), dist.new_group([1])
    mine = lone if dist.get_rank() == 1 else pair
    try:
        first = current_world(pair, timeout_s=1).rank
    except RanksDisagree as error:
        first = str(error)
    world = current_world(mine, timeout_s=1)
    return first, (world.rank, world.size, world.solo)


def test_ranks_count_within_their_group(rank_pool):
    zero, one, two = rank_pool.run(3, in_groups)
    assert zero == (0, (0, 2, False))
    assert two == (1, (1, 2, False))
    assert one[1] == (0, 1, True)
    assert one[0].startswith("rank 1 of the default group is not a member")


def talk(title, world, word):
    with rendezvous(world, title) as meeting:
        return meeting.agree("talk", word.encode, lambda words: [b" ".join(words)] * world.size).decode()


def interleaved():
    """Even and odd ranks talk among themselves between calls of all, in a different order on each side."""
    rank = dist.get_rank()
    sides = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    side = current_world(sides[rank % 2], timeout_s=5)
    everyone = current_world(timeout_s=5)
    said = []
    for turn in range(3):
        said += [talk(f"side {turn}", side, f"{turn}:{rank}") for _ in range(1 + rank % 2 * turn)]
        said.append(talk(f"all {turn}", everyone, f"{turn}:{rank}"))
    return said


def test_groups_beside_each_other_never_mix(rank_pool):
    heard = rank_pool.run(4, interleaved)
    all_of = [f"{turn}:0 {turn}:1 {turn}:2 {turn}:3" for turn in range(3)]
    assert heard[0] == heard[2] == ["0:0 0:2", all_of[0], "1:0 1:2", all_of[1], "2:0 2:2", all_of[2]]
    assert heard[1] == heard[3] == ["0:1 0:3", all_of[0], *["1:1 1:3"] * 2, all_of[1], *["2:1 2:3"] * 3, all_of[2]]


def same_name():
    """Two disjoint groups to which torch was made to give one name."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    dist.distributed_c10d._world.pg_names[mine] = "twin"
    world = current_world(mine, timeout_s=5)
    return {talk("call", world, str(dist.get_rank())) for _ in range(20)}


def test_groups_of_one_name_never_mix(rank_pool):
    assert rank_pool.run(4, same_name) == [{"0 1"}, {"0 1"}, {"2 3"}, {"2 3"}]


def on_a_file(path, rank_count):
    import os

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(os.environ["RANK"]), world_size=rank_count)
    try:
        return [talk(f"call {turn}", current_world(timeout_s=5), str(dist.get_rank())) for turn in range(3)]
    finally:
        dist.destroy_process_group()


def test_a_file_store_will_do(rank_pool, tmp_path):
    assert rank_pool.run(3, on_a_file, str(tmp_path / "store"), 3, init=False) == [["0 1 2"] * 3] * 3


COLLECTIVES = [name for name in dist.distributed_c10d.__all__ if name.startswith(("all_", "broadcast", "gather", "scatter", "reduce", "send", "recv", "isend", "irecv", "barrier", "monitored", "new_", "split", "batch"))]  # fmt: skip


def forbidden(*args, **kwargs):
    raise RuntimeError("a collective was called")


def without_collectives():
    from unittest import mock

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, forbidden))
            stack.enter_context(mock.patch.object(dist.distributed_c10d, name, forbidden))
        return talk("call", current_world(timeout_s=5), str(dist.get_rank()))


@pytest.mark.parametrize("backend", ["fake", "gloo"])
def test_nothing_but_the_store_is_used(rank_pool, backend):
    """The fake backend moves no data at all, as nccl moves none on a machine without a GPU."""
    assert {"all_gather_object", "broadcast_object_list", "barrier", "new_group"} <= set(COLLECTIVES)
    assert rank_pool.run(3, without_collectives, backend=backend) == ["0 1 2"] * 3
