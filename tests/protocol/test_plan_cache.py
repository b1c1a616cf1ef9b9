"""Plans that are used again: only where nothing changed, and never so that a checkpoint says what it does not hold."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.default_planner import DefaultSavePlanner
from shardkeep.dcp.planner import SavePlan
from shardkeep.dcp.planner_helpers import _compare_save_plans, _contains_usable_plan, _merge_delta_local_plans
from shardkeep.dcp.state_dict_loader import load
from shardkeep.dcp.state_dict_saver import save
from shardkeep.errors import RanksDisagree
from tests.protocol.samples import quietly, torch_fills_metadata
from tests.toolkit.samples import mesh_of, numbered, seen, spread_out


class Watched(DefaultSavePlanner):
    """Counts the plans that were made anew, and keeps what was sent."""

    def __init__(self, **options):
        super().__init__(enable_plan_caching=True, **options)
        self.made, self.sent, self.got = 0, [], []

    def create_local_plan(self):
        self.sent.append(super().create_local_plan())
        return self.sent[-1]

    def _create_global_plan(self, all_plans):
        self.made += 1
        return super()._create_global_plan(all_plans)

    def finish_plan(self, new_plan):
        self.got.append(new_plan.usable)
        return super().finish_plan(new_plan)


def store(state, folder, planner):
    return quietly(save, state, storage_writer=theirs.FileSystemWriter(folder), planner=planner)


def read_like(state, folder):
    into = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in state.items()}
    quietly(theirs.load, into, checkpoint_id=folder)
    return into


def save_again_and_again(folder):
    rank, mesh = dist.get_rank(), mesh_of(dist.get_world_size())
    planner, right = Watched(), []
    for step in range(4):
        # In the third save one rank has a new key; in the fourth nothing is new.
        state = {"w": spread_out(numbered(6, 2) + step, mesh, Cut(0)), "b": numbered(5) * step, "step": step}
        if step >= 2 and rank == 1:
            state["more"] = numbered(3) + step
        store(state, f"{folder}/{step}", planner)
        into = {**state, "w": spread_out(torch.zeros(6, 2), mesh, Cut(0)), "b": torch.zeros(5), "step": None}
        quietly(load, into, storage_reader=theirs.FileSystemReader(f"{folder}/{step}"))
        right.append(seen(into) == seen(state))
    return right, [plan.usable for plan in planner.sent], planner.got, planner.made


def test_ranks_send_and_get_only_what_changed(rank_pool, tmp_path):
    """
    The second and fourth of four saves plan nothing and send nothing; every checkpoint holds its own step's values.
    """
    for rank, (right, sent, got, made) in enumerate(rank_pool.run(2, save_again_and_again, str(tmp_path))):
        assert right == [True] * 4
        assert sent == [True, False, rank == 1, False]
        assert (got[0], got[1], got[3]) == (True, False, False)
        assert made == (2 if rank == 0 else 0)


def test_another_dtype_is_another_plan(tmp_path):
    """The same names and shapes in bfloat16 after float32: the metadata say so. Torch's say float32."""
    planner = Watched()
    first = store({"w": numbered(4)}, tmp_path / "a", planner)
    second = store({"w": numbered(4).bfloat16()}, tmp_path / "b", planner)
    assert first.state_dict_metadata["w"].properties.dtype == torch.float32
    assert second.state_dict_metadata["w"].properties.dtype == torch.bfloat16
    assert planner.made == 2


def test_another_path_under_the_same_name_is_another_plan(tmp_path):
    """{"a": {"b": ...}} after {"a.b": ...}: the same flat names, and each checkpoint rebuilds its own nesting."""
    planner = Watched()
    assert store({"a.b": numbered(2)}, tmp_path / "a", planner).planner_data == {"a.b": ("a.b",)}
    assert store({"a": {"b": numbered(2)}}, tmp_path / "b", planner).planner_data == {"a.b": ("a", "b")}


def test_metadata_are_never_shared(tmp_path):
    """Saves by one plan return metadata of their own: what one storage writes into them is not seen in the next."""
    planner, state = Watched(), {"w": numbered(4)}
    first = store(state, tmp_path / "a", planner)
    first.state_dict_metadata["w"].chunks.clear()
    first.state_dict_metadata["junk"] = None
    second = store(state, tmp_path / "b", planner)
    assert planner.made == 1
    assert second is not first
    assert list(second.state_dict_metadata) == ["w"]
    assert len(second.state_dict_metadata["w"].chunks) == 1
    if torch_fills_metadata(tmp_path / "c"):
        assert str(second.storage_meta.checkpoint_id).endswith("b")
    assert seen(read_like(state, tmp_path / "b")) == seen(state)


def test_two_planners_have_nothing_in_common(tmp_path):
    """Two states saved in turn, by planners of one class: torch's cache is one for both."""
    planners, states = [Watched(), Watched()], [{"w": numbered(4)}, {"v": numbered(2, 2)}]
    for step in range(2):
        for number in range(2):
            folder = tmp_path / f"{step}{number}"
            store(states[number], folder, planners[number])
            assert seen(read_like(states[number], folder)) == seen(states[number])
    assert [planner.made for planner in planners] == [1, 1]


class Stumbling(theirs.FileSystemWriter):
    """Fails in a step, once."""

    def __init__(self, path, step):
        super().__init__(path)
        self.step = step

    def prepare_global_plan(self, plans):
        if self.step == "plan":
            raise OSError("no plan today")
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        if self.step == "write":
            raise OSError("no write today")
        return super().write_data(plan, planner)


def fail_between(folder, step):
    rank, planner = dist.get_rank(), Watched()
    for number in range(4):
        # Before the failing save the state changes on rank 1, so that it has a plan that nobody answered.
        state = {"b": numbered(3) + number, "mine" if rank and number else "ours": numbered(2) + number}
        if number == 1:
            with pytest.raises(CheckpointException):
                quietly(save, state, storage_writer=Stumbling(f"{folder}/{number}", step), planner=planner)
            continue
        store(state, f"{folder}/{number}", planner)
        into = {key: torch.zeros_like(value) for key, value in state.items()}
        quietly(load, into, storage_reader=theirs.FileSystemReader(f"{folder}/{number}"))
        if seen(into) != seen(state):
            return f"save {number} is wrong"
    return [plan.usable for plan in planner.sent]


@pytest.mark.parametrize("step", ["plan", "write"])
def test_after_a_failure_all_is_planned_anew(rank_pool, tmp_path, step):
    """
    A save that fails after its plan was made, or before it was carried out, leaves nothing that the next could mistake.
    """
    after = [True, False] if step == "plan" else [False, False]
    for rank, sent in enumerate(rank_pool.run(2, fail_between, str(tmp_path), step)):
        assert sent == [True, rank == 1, *after]


def test_word_of_an_unknown_plan_is_refused():
    """
    A coordinator with a new planner cannot know the plans of ranks that kept theirs, and a rank without a plan cannot
    be told to keep it.
    """
    planner = DefaultSavePlanner(enable_plan_caching=True)
    with pytest.raises(RanksDisagree, match=r"ranks \[1\]"):
        planner.create_global_plan([SavePlan([], planner_data={}), SavePlan([], usable=False)])
    with pytest.raises(RanksDisagree, match="has none"):
        planner.finish_plan(SavePlan([], usable=False))


def test_the_storage_names_each_saves_files():
    """What a storage puts into the word that comes back is this save's, and the items are the previous one's."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for name in ("first", "second"):
        planner.set_up_planner({"w": numbered(2)})
        [plan], _ = planner.create_global_plan([planner.create_local_plan()])
        final = planner.finish_plan(dataclasses.replace(plan, storage_data=name))
        assert (final.storage_data, [item.index.fqn for item in final.items]) == (name, ["w"])
        assert final.usable


def test_the_helpers_of_the_cache():
    """Plans differ by a hint alone; the new plan of a rank counts, and its previous one where it sent none."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": numbered(2)})
    plan = planner.create_local_plan()
    [hinted], _ = planner.create_global_plan([plan])
    none = SavePlan([], usable=False)
    assert _compare_save_plans(plan, dataclasses.replace(plan))
    assert not _compare_save_plans(plan, hinted)
    assert not _compare_save_plans(plan, none)
    assert not _compare_save_plans(plan, dataclasses.replace(plan, planner_data={}))
    assert _merge_delta_local_plans([plan, plan], [none, hinted]) == [plan, hinted]
    assert [_contains_usable_plan(plans) for plans in ([none], [none, plan], [])] == [False, True, False]
