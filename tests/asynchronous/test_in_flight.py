"""Several saves at once: how many, in which order, beside what else a training loop does, and with ranks that differ."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

import shardkeep as sk
from tests.asynchronous.scene import PATIENCE_S, HeldStore, full, held, says

HASTY = sk.Options(timeout_s=2)


def in_background(call):
    told = []
    thread = threading.Thread(target=lambda: told.append(call()))
    thread.start()
    return thread, told


@pytest.mark.parametrize("most", [1, 3])
def test_back_pressure(most):
    """So many saves may be under way; the next call waits for the first of them, and no longer."""
    stores = [held() for _ in range(most + 1)]
    handles = [sk.async_save(full(n), stores[n], max_in_flight=most) for n in range(most)]
    assert all(store.reached.wait(PATIENCE_S) for store in stores[:most])
    thread, told = in_background(lambda: sk.async_save(full(most), stores[most], max_in_flight=most))
    thread.join(0.2)
    assert thread.is_alive()
    assert not stores[most].operations
    stores[0].release.set()
    thread.join(PATIENCE_S)
    assert handles[0].done()
    assert not any(handle.done() for handle in handles[1:])
    for store in stores:
        store.release.set()
    for n, handle in enumerate([*handles, *told]):
        handle.result(PATIENCE_S)
        assert says(stores[n].inner) == {n}


def test_a_later_save_may_end_first():
    """Saves in flight do not wait for each other, and each has the state of its own call."""
    first, second = held(), sk.MemoryStore()
    state = full(1)
    slow = sk.async_save(state, first, max_in_flight=2)
    state["w"].fill_(2)
    for each in state["few"]:
        each.fill_(2)
    quick = sk.async_save(state, second, max_in_flight=2)
    quick.result(PATIENCE_S)
    assert not slow.done()
    assert says(second) == {2}
    first.release.set()
    slow.result(PATIENCE_S)
    assert says(first.inner) == {1}


def test_two_saves_to_one_place():
    where = held()
    first = sk.async_save(full(1), where, max_in_flight=2)
    assert where.reached.wait(PATIENCE_S)
    second = sk.async_save(full(2), where.inner, max_in_flight=2, overwrite=True)
    with pytest.raises(sk.CheckpointExists, match="another save is writing"):
        second.result(PATIENCE_S)
    where.release.set()
    first.result(PATIENCE_S)
    assert says(where.inner) == {1}


def test_one_place_over_and_over(place):
    for step in range(10):
        sk.async_save(full(step), place, step=step, overwrite=True)
    sk.finish_saves()
    assert says(place) == {9}
    assert sk.open(place).step == 9


# On ranks


def part_of(value):
    """This rank's rows of a tensor that says one number, and one that all ranks have."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.full((3, 50), float(value))
    return {
        "rows": sk.ShardedBox(rows, offsets=(3 * rank, 0), shape=(3 * size, 50)),
        "all": torch.full((999,), float(value)),
        "mine": sk.PerRank([value, rank]),
    }


def spoil(state):
    state["rows"].pieces[0][0].fill_(-1)
    state["all"].fill_(-1)


def train_and_save(folder, most):
    """Saves one upon the other, collectives, a save that waits, a load; return the sum of the collectives."""
    total = torch.zeros(1)

    def train():
        nonlocal total
        for _ in range(5):
            one = torch.ones(1)
            dist.all_reduce(one)
            total += one

    handles = []
    for step in range(8):
        state = part_of(step)
        handles.append(sk.async_save(state, f"{folder}/{step}", step=step, max_in_flight=most))
        spoil(state)
        train()
        if step % 3 == 1:
            sk.save(part_of(100 + step), f"{folder}/{100 + step}")
            into = part_of(0)
            sk.load(into, f"{folder}/{100 + step}")
            assert into["all"].eq(100 + step).all()
        train()
    assert [handle.result(PATIENCE_S).step for handle in handles] == list(range(8))
    return total.item()


@pytest.mark.parametrize("most", [1, 3])
def test_beside_collectives_and_calls_that_wait(rank_pool, tmp_path, most):
    assert rank_pool.run(3, train_and_save, str(tmp_path), most) == [3 * 80.0] * 3
    for step in range(8):
        tree = sk.open(str(tmp_path / str(step))).to_dict()
        assert tree["rows"].shape == (9, 50)
        assert tree["rows"].eq(step).all()
        assert tree["all"].eq(step).all()


def ranks_differ(folder, order):
    """Save to these places in this rank's order; return how each ended, and how a save after that did."""
    mine = order[dist.get_rank()]
    began = time.monotonic()
    handles = [(name, sk.async_save(part_of(1), f"{folder}/{name}", max_in_flight=3, options=HASTY)) for name in mine]
    ended = {name: type(handle.exception(PATIENCE_S)).__name__ for name, handle in handles}
    took_s = time.monotonic() - began
    dist.barrier()
    for n in range(3):
        try:
            sk.async_save(part_of(2), f"{folder}/after-{n}", options=HASTY).result(PATIENCE_S)
        except sk.CheckpointError:
            dist.barrier()
        else:
            break
    return ended, took_s, n


@pytest.mark.parametrize("order", [{0: "ab", 1: "ba"}, {0: "a", 1: ""}])
def test_ranks_that_do_not_make_the_same_calls(rank_pool, tmp_path, order):
    """In another order, or not at all: no rank waits for ever, nothing is saved, and the next save works."""
    found = rank_pool.run(2, ranks_differ, str(tmp_path), order)
    for ended, took_s, _ in found:
        assert set(ended.values()) <= {"RanksDisagree", "RanksSilent"} if order[1] else {"RanksSilent"}
        assert took_s < 30
    assert [n for *_, n in found] == [0, 0]
    for name in order[0]:
        with pytest.raises(sk.CheckpointNotFound):
            sk.open(str(tmp_path / name))


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_misses_one_of_several(rank_pool, tmp_path, absent):
    """If a rank missed the second of several in flight, all end within their deadlines, and saves work again."""
    found = rank_pool.run(2, ranks_differ, str(tmp_path), {1 - absent: "abc", absent: "ac"}, timeout_s=100)
    for ended, took_s, _ in found:
        assert ended["a"] == "NoneType"
        assert ended.get("b", "RanksSilent") in {"RanksSilent", "RanksDisagree"}
        assert took_s < 40
    assert found[0][2] == found[1][2] < 2


def cancel_on(folder, ranks):
    """Cancel on these ranks before a byte is written; return how it ended, and what the next save says."""
    where = HeldStore(sk.LocalStore(f"{folder}/ck"))
    handle = sk.async_save(part_of(1), where)
    assert where.reached.wait(PATIENCE_S)
    dist.barrier()
    could = [handle.cancel() for _ in range(dist.get_rank() in ranks)]
    dist.barrier()
    where.release.set()
    error = handle.outcome()
    dist.barrier()
    sk.async_save(part_of(2), f"{folder}/next").result(PATIENCE_S)  # what another rank cancels is no failure to raise
    sk.finish_saves()
    return type(error).__name__, could, handle.progress.phase


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_cancelled_on_some_ranks(rank_pool, tmp_path, ranks):
    found = rank_pool.run(2, cancel_on, str(tmp_path), ranks)
    assert found == [("SaveCancelled", [True] * (rank in ranks), "cancelled") for rank in range(2)]
    assert list(sk.LocalStore(str(tmp_path / "ck")).list()) == []
