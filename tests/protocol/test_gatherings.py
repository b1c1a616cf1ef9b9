"""Steps on real ranks: results, failures of any rank on all of them, and nobody left waiting."""

import os
import pickle
import signal
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs

from shardkeep.dcp.api import CheckpointException, _is_wrapped_exception, _wrap_exception
from shardkeep.dcp.state_dict_loader import load
from shardkeep.dcp.state_dict_saver import save
from shardkeep.dcp.utils import _all_gather_keys, _assert_same_keys, _DistWrapper, _get_failure_dict
from shardkeep.errors import CheckpointError, MalformedFile
from tests.protocol.samples import quietly
from tests.toolkit.samples import numbered

RANKS = [1, 2, 4]


class Unsendable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.lock = threading.Lock()


class Unreadable(Exception):
    """Can be pickled, and not rebuilt."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def every_method(leader, kind):
    ranks = kind(None, True, leader)
    me, size = ranks.get_rank(), ranks.get_world_size()
    ranks.barrier()
    return {
        "who": (me, size, ranks.is_coordinator, ranks.coordinator_rank, ranks.global_coordinator_rank),
        "broadcast_object": ranks.broadcast_object({"from": me} if me == leader else None),
        "gather_object": ranks.gather_object(me * 10),
        "all_gather_object": ranks.all_gather_object((me, b"x" * 10_000)),
        "scatter_object": ranks.scatter_object([f"for {rank}" for rank in range(size)] if me == leader else None),
        "reduce_scatter": ranks.reduce_scatter("a", lambda: me, lambda all_: [sum(all_) + rank for rank in all_]),
        "all_reduce": ranks.all_reduce("b", lambda: me, sum),
        "all_gather": ranks.all_gather("c", lambda: torch.full((2,), me).tolist()),
        "broadcast": ranks.broadcast("d", lambda: f"said by {me}"),
    }


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("leader", ["first", "last"])
def test_each_method_does_what_torchs_does(rank_pool, ranks, leader):
    chosen = 0 if leader == "first" else ranks - 1
    mine = rank_pool.run(ranks, every_method, chosen, _DistWrapper)
    assert mine == rank_pool.run(ranks, every_method, chosen, theirs.utils._DistWrapper)
    assert mine[0]["all_reduce"] == sum(range(ranks))


def test_a_process_alone():
    """Without ranks the methods work on this process's own values, and failures are CheckpointExceptions as well."""
    alone = _DistWrapper(None, use_dist=False, coordinator_rank=0)
    assert (alone.get_rank(), alone.get_world_size(), alone.is_coordinator) == (0, 1, True)
    thing = object()
    assert alone.broadcast_object(thing) is thing
    assert alone.gather_object(thing) == alone.all_gather_object(thing) == [thing]
    assert alone.scatter_object([thing]) is thing
    assert alone.reduce_scatter("s", lambda: 1, lambda all_: [all_[0] + 1]) == 2
    assert alone.all_gather("s", lambda: thing) == [thing]
    assert alone.barrier() is None
    with pytest.raises(AssertionError, match="one for each rank"):
        alone.scatter_object(None)
    error = Unsendable(1, 2)
    with pytest.raises(CheckpointException) as caught:
        alone.broadcast("s", lambda: throw(error))
    assert caught.value.failures[0][0] is error


def throw(error):
    raise error


ERRORS = {
    "value": lambda: ValueError("bad value"),
    "ours": lambda: MalformedFile("bad file", hint="look", at=3),
    "stop": KeyboardInterrupt,
    "unsendable": lambda: Unsendable("this", "that"),
    "unreadable": lambda: Unreadable("this", "that"),
}
METHODS = {
    "reduce_scatter": lambda ranks, work: ranks.reduce_scatter("s", work, lambda all_: all_),
    "all_reduce": lambda ranks, work: ranks.all_reduce("s", work, sum),
    "all_gather": lambda ranks, work: ranks.all_gather("s", work),
}


def fail_in(method, error, failing, leader):
    ranks = _DistWrapper(None, True, leader)
    work = (lambda: throw(ERRORS[error]())) if ranks.rank in failing else (lambda: 1)
    try:
        METHODS[method](ranks, work)
    except CheckpointException as caught:
        told = {rank: (type(exc).__name__, str(exc)) for rank, (exc, _) in caught.failures.items()}
        lines = [frame.name for _, stack in caught.failures.values() for frame in stack]
        pickle.dumps(caught)
        # What comes next finds everyone in step.
        return told, "throw" in lines, ranks.all_reduce("next", lambda: 1, sum), str(caught)
    return None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", ERRORS)
def test_a_failure_on_some_ranks_is_raised_on_all(rank_pool, method, error):
    """Each rank gets the failures of all, with where they were raised, and the next step works."""
    outcome = rank_pool.run(3, fail_in, method, error, {0, 2}, 1)
    for told, where, following, text in outcome:
        assert sorted(told) == [0, 2]
        assert where
        assert following == 3
        expected = type(ERRORS[error]()).__name__
        kind, message = told[2]
        assert kind == expected or (kind == "CheckpointError" and expected in message)
        assert "(RANK 0)" in text
        assert expected in text


def fail_while_deciding(method):
    ranks = _DistWrapper(None, True, 1)
    try:
        if method == "broadcast":
            ranks.broadcast("s", lambda: throw(ValueError("undecided")))
        else:
            getattr(ranks, method)("s", lambda: 1, lambda all_: throw(ValueError("undecided")))
    except CheckpointException as caught:
        return {rank: str(error) for rank, (error, _) in caught.failures.items()}
    return None


@pytest.mark.parametrize("method", ["reduce_scatter", "all_reduce", "broadcast"])
def test_a_failure_of_the_coordinator_is_raised_on_all(rank_pool, method):
    assert rank_pool.run(3, fail_while_deciding, method) == [{1: "undecided"}] * 3


def give_too_few():
    ranks = _DistWrapper(None, True, 0)
    with pytest.raises(CheckpointException, match="1 results for 2 ranks"):
        ranks.reduce_scatter("s", lambda: 1, lambda all_: [1])
    with pytest.raises(CheckpointException):
        ranks.all_gather("s", threading.Lock)
    return ranks.all_reduce("next", lambda: 1, sum)


def test_what_cannot_be_sent_is_a_failure_too(rank_pool):
    """A list that does not have an item for each rank, and a result that cannot be pickled, are raised on all ranks."""
    assert rank_pool.run(2, give_too_few) == [2, 2]


def die_in_the_middle(folder):
    os.environ["SHARDKEEP_TIMEOUT_S"] = "2"
    try:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CheckpointException) as caught:
            quietly(save, {"w": numbered(2)}, storage_writer=theirs.FileSystemWriter(folder))
        return {rank: type(error).__name__ for rank, (error, _) in caught.value.failures.items()}
    finally:
        del os.environ["SHARDKEEP_TIMEOUT_S"]


def test_a_rank_that_dies_is_named_and_not_waited_for(rank_pool, tmp_path):
    """The others get an exception that says which rank is silent, and no checkpoint appears."""
    outcome = rank_pool.run(2, die_in_the_middle, str(tmp_path / "ck"), expect_death=[1])
    assert outcome[0] == {1: "RanksSilent"}
    assert not (tmp_path / "ck" / ".metadata").exists()


class Failing:
    """Part of a storage or a planner that fails on one rank, in one method."""

    def __init__(self, wrapped, method, rank):
        self.wrapped, self.method, self.rank = wrapped, method, rank

    def __getattr__(self, name):
        if name == self.method and dist.get_rank() == self.rank:
            return self.fail
        return getattr(self.wrapped, name)

    def fail(self, *args, **kwargs):
        raise OSError(f"{self.method} failed")


def fail_in_a_save(folder, method, rank, use_collectives):
    writer = Failing(theirs.FileSystemWriter(folder), method, rank)
    with pytest.raises(CheckpointException) as caught:
        quietly(save, {"w": numbered(2), "n": 1}, storage_writer=writer, use_collectives=use_collectives)
    return {rank: str(error) for rank, (error, _) in caught.value.failures.items()}


STEPS = [("set_up_storage_writer", 1), ("prepare_local_plan", 1), ("prepare_global_plan", 0), ("write_data", 1)]
ALONE = ("write_data", 1, False)


@pytest.mark.parametrize(("method", "rank", "together"), [*((*step, True) for step in [*STEPS, ("finish", 0)]), ALONE])
def test_a_writer_that_fails_on_one_rank_fails_the_save_on_all(rank_pool, tmp_path, method, rank, together):
    """Every rank learns who failed in which step and why, also if each saves for itself; there is no checkpoint."""
    outcome = rank_pool.run(2, fail_in_a_save, str(tmp_path / "ck"), method, rank, together)
    assert outcome == [{rank: f"{method} failed"}] * 2
    assert not (tmp_path / "ck" / ".metadata").exists()


def fail_in_a_load(folder, method):
    quietly(save, {"w": numbered(2)}, storage_writer=theirs.FileSystemWriter(folder))
    into = {"w": torch.zeros(2)}
    with pytest.raises(CheckpointException) as caught:
        quietly(load, into, storage_reader=Failing(theirs.FileSystemReader(folder), method, 1))
    return {rank: type(error).__mro__ for rank, (error, _) in caught.value.failures.items()}, str(caught.value)


@pytest.mark.parametrize("method", ["read_metadata", "set_up_storage_reader", "prepare_local_plan", "read_data"])
def test_a_reader_that_fails_on_one_rank_fails_the_load_on_all(rank_pool, tmp_path, method):
    """Whatever step a reader fails in, every rank is told; without metadata it is an AssertionError, as in torch."""
    for failures, text in rank_pool.run(2, fail_in_a_load, str(tmp_path / "ck"), method):
        assert list(failures) == [1]
        assert f"{method} failed" in text
        if method == "read_metadata":
            assert AssertionError in failures[1]
            assert "metadata is None; global metadata read failed: read_metadata failed" in text


def test_nothing_is_there_to_load(tmp_path):
    """An empty folder is a CheckpointException around an AssertionError that says what was tried."""
    with pytest.raises(CheckpointException) as caught:
        quietly(load, {"w": torch.zeros(1)}, storage_reader=theirs.FileSystemReader(tmp_path))
    error = caught.value.failures[0][0]
    assert isinstance(error, AssertionError)
    assert isinstance(error, CheckpointError)
    assert str(error).startswith("metadata is None; global metadata read failed: ")
    assert "rank local metadata read failed: " in str(error)


def compare_keys():
    mine = {"a": 1, f"only {dist.get_rank()}": 2}
    gathered = _all_gather_keys(mine)
    _assert_same_keys({"a": 1})
    with pytest.raises(AssertionError, match="keys that this one lacks: only"):
        _assert_same_keys(mine)
    return gathered


def test_keys_of_all_ranks(rank_pool):
    assert rank_pool.run(2, compare_keys) == [{"a", "only 0", "only 1"}] * 2


def test_what_a_wrapped_exception_is():
    """An exception and its stack, that can be pickled; nothing else is taken for one."""
    try:
        throw(ValueError("x"))
    except ValueError as error:
        wrapped = _wrap_exception(error)
    assert _is_wrapped_exception(pickle.loads(pickle.dumps(wrapped)))
    assert [frame.name for frame in wrapped[1]] == ["test_what_a_wrapped_exception_is", "throw"]
    assert theirs.api._is_wrapped_exception(wrapped)
    for other in (ValueError(), (ValueError(), 1), (1, wrapped[1]), [*wrapped], None):
        assert not _is_wrapped_exception(other)
    assert _get_failure_dict([1, wrapped, None]) == {1: wrapped}
    assert not isinstance(CheckpointException("s", {}), Exception)


class Stuck:
    def state_dict(self):
        if not dist.is_initialized() or dist.get_rank() == 1:
            raise LookupError("no state")
        return {"n": 1}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def ask_the_stuck(folder):
    told = []
    quietly(save, {"a": {"n": 1}}, storage_writer=theirs.FileSystemWriter(folder))
    for call, storage in [
        (save, {"storage_writer": theirs.FileSystemWriter(folder)}),
        (load, {"storage_reader": theirs.FileSystemReader(folder)}),
    ]:
        with pytest.raises(CheckpointException) as caught:
            quietly(call, {"a": Stuck()}, **storage)
        told.append({rank: repr(error) for rank, (error, _) in caught.value.failures.items()})
        if dist.get_rank() == 1:
            assert isinstance(caught.value.__cause__, LookupError)
    return told


def test_an_object_that_fails_to_give_its_state_is_told(rank_pool, tmp_path):
    """One rank fails before anything is planned: the others do not wait. A process alone sees the error."""
    assert rank_pool.run(2, ask_the_stuck, str(tmp_path)) == [[{1: "LookupError('no state')"}] * 2] * 2
    with pytest.raises(LookupError, match="no state"):
        quietly(save, {"a": Stuck()}, storage_writer=theirs.FileSystemWriter(tmp_path))
