"""Asynchronous saves on a thread: what is saved, in which order, and who learns of what fails."""

import gc
import logging
import threading
import time
import weakref
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs

from shardkeep.dcp._async_executor import _AsyncCheckpointExecutor
from shardkeep.dcp._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor, save_wrapper
from shardkeep.dcp._impl.async_ import AsyncCheckpointerType, AsyncSaveResponse, async_save, group_saves_of
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from shardkeep.dcp.filesystem import FileSystemWriter
from shardkeep.dcp.metadata import Metadata
from shardkeep.dcp.staging import AsyncStager, DefaultStager, StagingOptions
from shardkeep.dcp.state_dict_loader import load
from shardkeep.dcp.state_dict_saver import save, save_state_dict
from shardkeep.engine.pools import staging_memory
from shardkeep.engine.process.client import writer_manager
from shardkeep.errors import EarlierSaveFailed
from tests.protocol.samples import blank, holds, quietly, state_of_ranks
from tests.toolkit.samples import numbered
from tests.warm.python import needs_late_threads, warm_python


def writer_to(folder, kind=FileSystemWriter, **options):
    return kind(folder, **options)


def loaded(folder, **like):
    quietly(theirs.load, like, storage_reader=theirs.FileSystemReader(folder), no_dist=True)
    return like


class Slow(FileSystemWriter):
    def __init__(self, folder):
        super().__init__(folder)
        self.go = threading.Event()
        self.began = threading.Event()

    def write_data(self, plan, planner):
        self.began.set()
        if not self.go.wait(30):
            raise TimeoutError("never let on")
        return super().write_data(plan, planner)


class Passing(FileSystemWriter):
    """Might look at what it writes, so it gets a whole copy of the state in host memory."""

    def write_data(self, plan, planner):
        assert all(tensor.device.type == "cpu" for tensor in planner.state_dict.values())
        return super().write_data(plan, planner)


class Broken(FileSystemWriter):
    def write_data(self, plan, planner):
        raise OSError(28, "no space")


class Marked(torch.Tensor):
    """A subclass, which only torch can write."""


def many_kinds():
    whole = numbered(40, 30)
    halves = numbered(6)
    halves.global_shape, halves.local_sizes = (6,), ((3,), (3,))
    halves.global_offsets = halves.local_offsets = ((0,), (3,))
    return {
        "halves": halves,
        "whole": whole,
        "alias": whole,
        "row": whole[3],
        "strided": whole.t()[2:5],
        "expanded": torch.tensor([2.0]).expand(50, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(4),
        "half": numbered(5, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(numbered(4)),
        "marked": numbered(4).as_subclass(Marked),
        "tuple": (whole, 1),
        "list": [numbered(3), {"deep": numbered(2), 7: "x"}],
        "numbers": [1, 2],
        "none": None,
    }


def empty_like(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value.detach().resolve_conj()).as_subclass(type(value.detach()))
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        made = {key: empty_like(each) for key, each in items}
        return made if isinstance(value, dict) else type(value)(made.values())
    return None


def wipe(state):
    for tensor in (state["whole"], state["half"], state["parameter"], state["marked"], *state["list"][:1]):
        tensor.detach().fill_(-1)
    state["scalar"].fill_(-1)
    state["list"][1].clear()
    state["numbers"].append(3)


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
@pytest.mark.parametrize("staging_bytes", [0, 1000], ids=["copied", "no room"])
def test_a_snapshot_holds_what_a_save_would(tmp_path, monkeypatch, kind, staging_bytes):
    """Tensors of all kinds, changed right after the call, are those of the call, also where there is no memory for a copy."""
    monkeypatch.setenv("SHARDKEEP_STAGING_BYTES", str(staging_bytes))
    state = many_kinds()
    future = quietly(async_save, state, checkpoint_id=tmp_path / "a", async_checkpointer_type=kind, no_dist=True)
    wipe(state)
    assert len(future.result(60).state_dict_metadata["halves"].chunks) == 2
    quietly(save, many_kinds(), checkpoint_id=tmp_path / "b", no_dist=True)
    found = []
    for name in "ab":
        found.append(empty_like(many_kinds()))
        with torch.serialization.safe_globals([Marked]):
            quietly(load, found[-1], checkpoint_id=tmp_path / name, no_dist=True)
    assert str(found[0]) == str(found[1])
    assert torch.equal(found[0]["whole"], numbered(40, 30))
    assert found[0]["numbers"] == [1, 2]
    assert (tmp_path / "a" / "__0_0.distcp").stat().st_size < 2 * (tmp_path / "b" / "__0_0.distcp").stat().st_size
    assert staging_memory().arenas.nbytes_in_use == writer_manager().memory().arenas.nbytes_in_use == 0


def test_a_planner_that_stores_something_else_gets_a_copy_in_host_memory(tmp_path):
    """So does one that does not flatten, and a stager of the user's: each is asked as before."""

    class Doubling(DefaultSavePlanner):
        def transform_object(self, write_item, found):
            return 2 * super().transform_object(write_item, found)

    class Adding(DefaultStager):
        def stage(self, state_dict):
            return {key: value + 1 for key, value in super().stage(state_dict).items()}

    state = {"w": numbered(9)}
    quietly(async_save, state, checkpoint_id=tmp_path / "a", planner=Doubling()).result(30)
    assert torch.equal(loaded(tmp_path / "a", w=torch.empty(9))["w"], 2 * numbered(9))
    stager = Adding(StagingOptions(False, False, False, False))
    quietly(async_save, state, checkpoint_id=tmp_path / "b", async_stager=stager).result(30)
    assert torch.equal(loaded(tmp_path / "b", w=torch.empty(9))["w"], numbered(9) + 1)
    nested = {"n": {"w": numbered(9)}}
    quietly(
        async_save, nested, checkpoint_id=tmp_path / "c", planner=DefaultSavePlanner(flatten_state_dict=False)
    ).result(30)
    found = {"n": None}
    quietly(load, found, checkpoint_id=tmp_path / "c", planner=DefaultLoadPlanner(flatten_state_dict=False))
    assert torch.equal(found["n"]["w"], numbered(9))


def test_one_stager_over_many_saves(tmp_path):
    stager = DefaultStager(StagingOptions(use_async_staging=True))
    weights = torch.zeros(1000)
    responses = []
    for step in range(20):
        weights.fill_(float(step))
        where = tmp_path / str(step)
        response = quietly(async_save, {"w": weights}, storage_writer=writer_to(where), async_stager=stager)
        assert isinstance(response, AsyncSaveResponse)
        assert response.staging_completion.result(30) is None
        responses.append(response)
    for step, response in enumerate(responses):
        assert isinstance(response.upload_completion.result(30), Metadata)
        assert torch.equal(loaded(tmp_path / str(step), w=torch.empty(1000))["w"], torch.full((1000,), float(step)))
    stager.close()


class BadStager(DefaultStager):
    def __init__(self, wait=0.0):
        super().__init__(StagingOptions(False, False, False, False))
        self.wait = wait

    def stage(self, state_dict):
        failed = Future()
        failed.set_exception(MemoryError("no room"))
        return failed


def test_a_failed_staging_is_never_a_success(tmp_path):
    """Both futures fail, though the staging one had failed before it was looked at; torch's says that it succeeded."""
    response = quietly(async_save, {"w": numbered(2)}, storage_writer=writer_to(tmp_path), async_stager=BadStager())
    with pytest.raises(MemoryError, match="no room"):
        response.staging_completion.result(30)
    with pytest.raises(MemoryError, match="no room"):
        response.upload_completion.result(30)
    assert not list(tmp_path.glob(".metadata"))
    torchs = quietly(
        theirs.async_save, {"w": numbered(2)}, storage_writer=writer_to(tmp_path), async_stager=BadStager()
    )
    assert torchs.staging_completion.result(30) is None  # the fault


class Unsure(DefaultStager):
    """Finds out after the call that the copy is no good."""

    _synchronize_after_execute = True

    def __init__(self):
        super().__init__(StagingOptions(False, False, False, False))

    def synchronize_staging(self):
        raise MemoryError("copy failed")


def test_a_copy_that_turns_out_bad_is_not_saved(tmp_path):
    with pytest.raises(MemoryError, match="copy failed"):
        quietly(async_save, {"w": numbered(2)}, storage_writer=writer_to(tmp_path), async_stager=Unsure())
    quietly(async_save, {"w": numbered(2)}, storage_writer=writer_to(tmp_path / "next")).result(30)
    assert not list(tmp_path.glob(".metadata"))


def test_saves_run_one_after_the_other(tmp_path):
    """A save that is begun while another writes waits for it, with one writer for both; none is torn."""
    writer = Slow(tmp_path / "x")
    first = quietly(async_save, {"w": torch.full((9,), 1.0)}, storage_writer=writer, checkpoint_id=tmp_path / "1")
    assert writer.began.wait(30)
    second = quietly(async_save, {"w": torch.full((9,), 2.0)}, storage_writer=writer, checkpoint_id=tmp_path / "2")
    assert not second.done()
    assert second.cancel() is False
    writer.go.set()
    second.result(30)
    assert first.done()
    for step in (1, 2):
        assert loaded(tmp_path / str(step), w=torch.empty(9))["w"].tolist() == [float(step)] * 9


class Halting(DefaultSavePlanner):
    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.began = threading.Event()

    def finish_plan(self, plan):
        if threading.current_thread() is not threading.main_thread():
            self.began.set()
            if not self.go.wait(30):
                raise TimeoutError("never let on")
        return super().finish_plan(plan)


@pytest.mark.parametrize("shared", ["writer", "planner"])
@pytest.mark.parametrize("sync", ["save", "save_state_dict"])
def test_a_save_waits_for_one_that_uses_the_same_objects(tmp_path, caplog, shared, sync):
    """A synchronous save does not disturb writer or planner of an asynchronous one, and logs what it waits for."""
    planner = Halting()
    options = {"writer": {"storage_writer": writer_to(tmp_path / "2")}, "planner": {"planner": planner}}[shared]
    begun = {"planner": planner, "checkpoint_id": tmp_path / "1", **options}
    first = quietly(async_save, {"w": torch.full((9,), 1.0)}, **begun)
    assert planner.began.wait(30)
    threading.Timer(0.2, planner.go.set).start()
    options.setdefault("storage_writer", writer_to(tmp_path / "2"))
    if sync == "save":
        quietly(save, {"w": torch.full((9,), 2.0)}, checkpoint_id=tmp_path / "2", **options)
    else:
        options["storage_writer"].reset = lambda place=tmp_path / "2": FileSystemWriter.reset(
            options["storage_writer"], place
        )
        quietly(save_state_dict, {"w": torch.full((9,), 2.0)}, no_dist=True, **options)
    assert first.done()
    assert "waits for the one to" in caplog.text
    for step in (1, 2):
        assert loaded(tmp_path / str(step), w=torch.empty(9))["w"].tolist() == [float(step)] * 9


class Twice(DefaultSavePlanner):
    def __init__(self, folder=None):
        super().__init__()
        self.folder = folder

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        folder, self.folder = self.folder, None
        if folder is not None:
            quietly(save, {"w": numbered(2)}, checkpoint_id=folder, planner=self, no_dist=True)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_a_save_inside_a_save_does_not_wait_for_it(tmp_path):
    """One thread never waits for itself: neither inside a save, nor for one that comes later in its lane."""
    quietly(async_save, {"w": numbered(9)}, checkpoint_id=tmp_path / "a", planner=Twice(tmp_path / "e")).result(30)
    assert torch.equal(loaded(tmp_path / "a", w=torch.empty(9))["w"], numbered(9))
    slow, other = Slow(tmp_path / "b"), writer_to(tmp_path / "c")
    first = quietly(async_save, {"w": numbered(9)}, storage_writer=slow)
    inside = Future()
    first.add_done_callback(
        lambda _: inside.set_result(
            quietly(save, {"w": numbered(3)}, storage_writer=other, checkpoint_id=tmp_path / "d")
        )
    )
    last = quietly(async_save, {"w": numbered(9)}, storage_writer=other, checkpoint_id=tmp_path / "c")
    slow.go.set()
    assert isinstance(inside.result(30), Metadata)
    last.result(30)
    assert torch.equal(loaded(tmp_path / "d", w=torch.empty(3))["w"], numbered(3))


class Planless(DefaultSavePlanner):
    def create_local_plan(self):
        raise OSError(28, "no space")


@pytest.mark.parametrize("options", [{"storage_writer": Broken("nowhere")}, {"planner": Planless}])
def test_a_failed_save_holds_no_state(tmp_path, monkeypatch, options):
    """Neither its exception, whose frames had it, nor the list of unretrieved failures keeps the copy alive."""
    monkeypatch.setattr(logging.getLogger("shardkeep"), "disabled", True)  # pytest keeps what is logged
    stager = DefaultStager(StagingOptions(False, False, False, False))
    copies = []
    stage = stager.stage

    def remember(state_dict):
        staged = stage(state_dict)
        copies.append(weakref.ref(staged["w"]))
        return staged

    stager.stage = remember
    options = {key: kind() if isinstance(kind, type) else kind for key, kind in options.items()}
    future = quietly(async_save, {"w": numbered(9)}, checkpoint_id=tmp_path, async_stager=stager, **options)
    del options
    while not future.done():
        time.sleep(0.01)
    gc.collect()
    assert copies[0]() is None
    assert not future.handle.retrieved
    assert isinstance(future.exception(), CheckpointException)
    assert group_saves_of(None, no_dist=True).take_failure() is None


def test_a_failure_nobody_asks_for_is_raised_by_the_next_save(tmp_path, caplog):
    """It is logged when it happens and raised once; a failure that was asked for is not raised again."""
    asked = quietly(async_save, {"w": numbered(2)}, storage_writer=writer_to(tmp_path / "a", Broken))
    with pytest.raises(CheckpointException, match="no space"):
        asked.result(30)
    ignored = quietly(async_save, {"w": numbered(2)}, storage_writer=writer_to(tmp_path / "b", Broken))
    while not ignored.done():
        time.sleep(0.01)
    with pytest.raises(EarlierSaveFailed, match="no space") as caught:
        quietly(async_save, {"w": numbered(2)}, storage_writer=writer_to(tmp_path / "c"))
    assert isinstance(caught.value.__cause__, CheckpointException)
    assert isinstance(caught.value.response.result(30), Metadata)
    assert "an asynchronous save, to" in caplog.text
    quietly(async_save, {"w": numbered(2)}, storage_writer=writer_to(tmp_path / "d")).result(30)


def test_memory_is_free_again_when_a_save_is_done(tmp_path):
    """The next state is staged in the same place; a failed one keeps it no longer than its future is kept."""
    stager = DefaultStager(StagingOptions(False, False, True, False))
    places = []
    for step in range(6):
        writer = writer_to(tmp_path / str(step), Broken if step == 3 else Passing)
        response = quietly(async_save, {"w": numbered(1000)}, storage_writer=writer, async_stager=stager)
        places.append(stager._staging_future.result(30)["w"].data_ptr())
        response.upload_completion.exception(30)
        del response
    gc.collect()
    assert len({*places[:4]}) == 1
    assert stager._state_dict_stager._memory.kept_bytes <= 2 * 4000
    stager.close()


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
@pytest.mark.parametrize("why", ["an object that cannot be pickled", "a place that cannot be written", "a checkpoint"])
def test_what_makes_a_save_impossible_fails_the_future(tmp_path, kind, why):
    """The call returns, as torch's does, and the future raises torch's exception."""
    place = "/proc/nowhere" if why == "a place that cannot be written" else tmp_path / "a"
    quietly(save, {"w": numbered(3)}, checkpoint_id=tmp_path / "a")
    writer = FileSystemWriter(place, overwrite=why != "a checkpoint")
    state = {"w": numbered(3), "object": (lambda: 0) if why == "an object that cannot be pickled" else 0}
    future = quietly(async_save, state, storage_writer=writer, async_checkpointer_type=kind)
    with pytest.raises(CheckpointException, match="nowhere" if "place" in why else "pickle|already exists"):
        future.result(60)


def test_a_storage_that_cannot_be_found_fails_the_future():
    """As torch's does: the call returns, and the future says what is wrong."""
    with pytest.raises(RuntimeError, match="checkpoint_id"):
        quietly(async_save, {"w": numbered(2)}).result(30)


LEAVES_EARLY = """
import sys, warnings
import torch
from shardkeep.dcp._impl.async_ import AsyncCheckpointerType, async_save

warnings.simplefilter("ignore")


class Settings:
    rate = 1


if __name__ == "__main__":
    state = {"w": torch.arange(1000.0), "settings": Settings()}
    async_save(state, checkpoint_id=sys.argv[1], async_checkpointer_type=AsyncCheckpointerType(sys.argv[2]))
"""


@needs_late_threads
@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_a_script_that_ends_early_ends_its_save_first(tmp_path, kind):
    """The interpreter waits for what is under way, which can still start the threads it needs and find its classes."""
    (tmp_path / "script.py").write_text(LEAVES_EARLY)
    done = warm_python(tmp_path / "script.py", tmp_path / "a", kind.value)
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.equal(loaded(tmp_path / "a", w=torch.empty(1000))["w"], torch.arange(1000.0))


def test_the_executors_have_torchs_arguments(tmp_path):
    """An executor of its own saves a state or a future of one; so does the function it runs."""
    executor = _ThreadBasedAsyncCheckpointExecutor()
    assert isinstance(executor, _AsyncCheckpointExecutor)
    staged = Future()
    staged.set_result({"w": numbered(4)})
    executor.execute_save(staged, storage_writer=writer_to(tmp_path / "a"), no_dist=True).result(30)
    save_wrapper({"w": numbered(4)}, storage_writer=writer_to(tmp_path / "b"), no_dist=True)
    for name in "ab":
        assert torch.equal(loaded(tmp_path / name, w=torch.empty(4))["w"], numbered(4))
    assert [each.value for each in AsyncCheckpointerType] == ["thread", "process"]


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode])
def test_modes_of_the_users_thread(tmp_path, mode):
    """Where tensors are made by default, and what becomes of them, is no matter to saves and loads."""
    state = {"w": numbered(40), "strided": numbered(40)[::2]}
    with mode():
        stager = DefaultStager(StagingOptions(False, False, True, False))
        quietly(async_save, state, checkpoint_id=tmp_path / "a", async_stager=stager).upload_completion.result(30)
        quietly(async_save, state, checkpoint_id=tmp_path / "b").result(30)
        stager.close()
        targets = [
            {"w": torch.zeros(40, device="cpu", dtype=kind), "strided": torch.zeros(40, device="cpu")[::2]}
            for kind in (torch.float32, torch.float16)
        ]
        for name in "ab":
            for target in targets:
                quietly(load, target, checkpoint_id=tmp_path / name)
    for target in targets:
        with torch.inference_mode():
            target["w"].zero_()
        quietly(load, target, checkpoint_id=tmp_path / "a")
        assert torch.equal(target["w"], numbered(40).to(target["w"].dtype))
        assert torch.equal(target["strided"], numbered(40)[::2])


# On ranks


def spread_state(use_collectives):
    state = state_of_ranks()
    if not use_collectives:
        del state["few"]  # is not on all ranks, and each saves and loads its own
    return state


def save_spread(folder, use_collectives, kind):
    state = spread_state(use_collectives)
    future = async_save(
        state, storage_writer=writer_to(folder), use_collectives=use_collectives, async_checkpointer_type=kind
    )
    expected = holds(state)
    for value in state.values():
        if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
            with torch.no_grad():
                local = getattr(value, "_local_tensor", value)
                local.zero_()
    future.result(60)
    found = blank(spread_state(use_collectives))
    load(found, storage_reader=theirs.FileSystemReader(folder))
    return holds(found) == expected


@pytest.mark.parametrize(("ranks", "use_collectives"), [(2, True), (3, True), (2, False)])
def test_spread_states(rank_pool, tmp_path, ranks, use_collectives):
    assert all(rank_pool.run(ranks, save_spread, tmp_path, use_collectives, AsyncCheckpointerType.THREAD))


def busy(folder):
    """Collectives, synchronous saves and several asynchronous ones at once, each rank at its own pace."""
    torch.manual_seed(dist.get_rank())
    futures = []
    for step in range(6):
        state = {f"rank {dist.get_rank()}": torch.full((50,), float(step)), "all": torch.full((3,), float(step))}
        futures.append(async_save(state, storage_writer=writer_to(f"{folder}/async {step}")))
        for _ in range(5):
            total = torch.ones(1)
            dist.all_reduce(total)
            time.sleep(torch.rand(1).item() / 200)
        save(state, storage_writer=writer_to(f"{folder}/sync {step}"))
    metadata = [future.result(60) for future in futures]
    return [sorted(each.state_dict_metadata) for each in metadata]


def test_training_goes_on_meanwhile(rank_pool, tmp_path):
    found = rank_pool.run(3, busy, str(tmp_path))
    assert found == [[["all", "rank 0", "rank 1", "rank 2"]] * 6] * 3
    for kind in ("sync", "async"):
        for step in range(6):
            assert loaded(tmp_path / f"{kind} {step}", all=torch.empty(3))["all"].tolist() == [float(step)] * 3


class Failing(AsyncStager):
    def __init__(self, rank, kind, later):
        self.rank, self.kind, self.later = rank, kind, later

    def stage(self, state_dict):
        if self.later:
            future = Future()
            future.set_exception(self.kind("no room"))
            return future if dist.get_rank() == self.rank else DefaultStager().stage(state_dict)
        if dist.get_rank() == self.rank:
            raise self.kind("no room")
        return dict(state_dict)


def stage_badly(folder, kind, later):
    found = []
    try:
        response = async_save(
            {"w": numbered(3)}, storage_writer=writer_to(folder), async_stager=Failing(1, kind, later)
        )
        upload = response.upload_completion if later else response
        upload.result(60)
    except BaseException as error:  # noqa: BLE001 - as told to the test
        found = [type(error).__name__, "no room" in str(error)]
    async_save({"w": numbered(3)}, storage_writer=writer_to(f"{folder}/next")).result(60)
    return found


@pytest.mark.parametrize(("kind", "later"), [(MemoryError, False), (MemoryError, True), (KeyboardInterrupt, False)])
def test_staging_that_fails_on_one_rank_fails_the_save_on_all(rank_pool, tmp_path, kind, later):
    """No rank waits for the one that could not stage, also if that was interrupted, and the next save works."""
    found = rank_pool.run(3, stage_badly, str(tmp_path), kind, later)
    here = ["CheckpointException", True] if later else [kind.__name__, True]
    assert found == [["CheckpointException", True], here, ["CheckpointException", True]]
    assert not list(tmp_path.glob(".metadata"))


def ignore_and_go_on(folder):
    """Rank 1 alone forgets to ask about a failed save."""
    future = async_save({"w": numbered(3)}, storage_writer=Broken(f"{folder}/a"))
    while not future.done():
        time.sleep(0.01)
    if dist.get_rank() != 1:
        future.exception()
    told = ""
    try:
        begun = async_save({"w": numbered(3)}, storage_writer=writer_to(f"{folder}/b"))
    except EarlierSaveFailed as error:
        told, begun = str(error), error.response
    begun.result(60)
    async_save({"w": numbered(3)}, storage_writer=writer_to(f"{folder}/c")).result(60)
    return "no space" in told


def test_an_old_failure_on_one_rank_costs_no_other_save(rank_pool, tmp_path):
    """The rank that raises it makes the new save all the same, as the others do, and nobody is told twice."""
    assert rank_pool.run(3, ignore_and_go_on, str(tmp_path)) == [False, True, False]
    for name in "bc":
        assert torch.equal(loaded(tmp_path / name, w=torch.empty(3))["w"], numbered(3))


def on_groups(folder):
    """Two groups, used in another order on each rank, and one without a backend for the CPU's tensors is no matter."""
    left, right = dist.new_group([0, 1]), dist.new_group([0, 1])
    order = [("left", left), ("right", right)]
    if dist.get_rank() == 1:
        order.reverse()
    futures = [
        async_save({"w": numbered(5), name: 1}, storage_writer=writer_to(f"{folder}/{name}"), process_group=group)
        for name, group in order
    ]
    return sorted(key for future in futures for key in future.result(60).state_dict_metadata)


def test_groups_do_not_wait_for_each_other(rank_pool, tmp_path):
    assert rank_pool.run(2, on_groups, str(tmp_path)) == [["left", "right", "w", "w"]] * 2
