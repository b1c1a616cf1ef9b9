"""What saves and loads do not do: talk over the training's groups, make groups, start processes, listen."""

import os
from unittest import mock

import torch
import torch.distributed as dist

import shardkeep as sk
from tests.asynchronous.scene import PATIENCE_S, HeldStore
from tests.asynchronous.test_in_flight import part_of
from tests.dcp.test_defects_at_work import COLLECTIVES


def listening():
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}", encoding="ascii") as file:
            for line in file.read().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    found.add(words[1])
    return found


def children():
    found = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            found |= set(file.read().split())
    return found


def save_quietly(folder):
    """Save modules, optimizers and shards; count collectives and groups, and what else is there in flight."""
    calls = []

    def counting(function):
        def call(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    before = listening(), children()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    patched = {name: counting(getattr(dist, name)) for name in (*COLLECTIVES, "new_group")}
    in_flight = set()
    dist.barrier()
    c10d = dist.distributed_c10d
    sequence, groups = c10d._get_default_group()._get_sequence_number_for_group(), len(c10d._world.pg_map)
    with mock.patch.multiple(dist, **patched):
        for n in range(3):
            where = HeldStore(sk.LocalStore(f"{folder}/{n}"))
            state = {"model": model, "optimizer": optimizer, "part": part_of(n)}
            handle = sk.async_save(state, where, max_in_flight=3)
            assert where.reached.wait(PATIENCE_S)
            in_flight.add((listening() <= before[0], children() <= before[1]))  # what was there may end
            where.release.set()
            handle.result(PATIENCE_S)
        sk.save({"part": part_of(3)}, f"{folder}/3")
        sk.load({"part": part_of(0)}, f"{folder}/3")
    after = c10d._get_default_group()._get_sequence_number_for_group()
    return calls, after - sequence, len(c10d._world.pg_map) - groups, in_flight


def test_no_collective_no_process_no_port(rank_pool, tmp_path):
    assert rank_pool.run(2, save_quietly, str(tmp_path)) == [([], 0, 0, {(True, True)})] * 2
