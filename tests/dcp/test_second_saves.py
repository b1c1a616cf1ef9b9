"""What is kept from one `dcp.save` to the next never shows: a state that was changed in any way is saved as if it were the first."""

import os

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import shardkeep as sk
from shardkeep import dcp
from shardkeep.dcp._impl import default_save
from shardkeep.engine.save_session import kept_plans
from shardkeep.engine.staging import BackgroundWrite
from tests.dcp.sides import quietly


def flat_state():
    state = {f"w{n}": torch.arange(8, dtype=torch.float32) + n for n in range(100)}
    return state | {"empty": torch.zeros(0, 3), "bias": torch.arange(3.0), "step": 1, "name": "model"}


def nested_state():
    return {
        "model": flat_state(),
        "list": [torch.ones(2), torch.zeros(3)],
        "optimizer": {"lr": 0.1, 0: {"m": torch.ones(4)}},
    }


def put(key, change):
    """Return a change of one value, in whichever mapping has it."""

    def changed(state):
        holder = state if key in state else state["model"]
        holder[key] = change(holder[key])

    return changed


def reorder(state):
    for key in list(state)[:2]:
        state[key] = state.pop(key)


def spell_out(state):
    """Give the names of a nested state to values that are not nested."""
    for key in [key for key, value in state.items() if isinstance(value, dict)]:
        state.update({f"{key}.{name}": value for name, value in state.pop(key).items()})


def replace_all(state):
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            state[key] = value.clone() * 2
        elif isinstance(value, dict):
            replace_all(value)


def list_as_dict(state):
    state["list"] = {str(at): value for at, value in enumerate(state.get("list", [torch.ones(2)]))}


CHANGES = {
    "nothing": lambda state: None,
    "values in place": put("w3", lambda w: w.mul_(7)),
    "other memory": put("w3", torch.clone),
    "all other memory": replace_all,
    "a gradient": put("w3", lambda w: w.requires_grad_()),
    "a parameter": put("w3", lambda w: torch.nn.Parameter(w, requires_grad=False)),
    "a parameter with a gradient": put("w3", torch.nn.Parameter),
    "another type in the same memory": put("w3", lambda w: w.view(torch.int32)),
    "another shape in the same memory": put("w3", lambda w: w.view(2, 4)),
    "less of the same memory": put("w3", lambda w: w[:5]),
    "a column of a matrix": put("w3", lambda w: w.view(4, 2)[:, 0]),
    "no elements": put("w3", lambda w: w[:0]),
    "no elements, and later some": put("bias", lambda w: w[:0]),
    "other dimensions of no elements": put("empty", lambda empty: torch.zeros(4, 0)),
    "no dimensions": put("w3", lambda w: w[2]),
    "a conjugate": put("w3", lambda w: torch.view_as_complex(w.view(4, 2)).conj()),
    "an attribute": put("w3", lambda w: setattr(w, "note", 1) or w),
    "a number": put("step", lambda step: step + 1),
    "a number for a truth": put("step", bool),
    "a text of another length": put("name", lambda name: name * 100),
    "a number for a tensor": put("w3", lambda w: 3),
    "a tensor for a number": put("step", torch.tensor),
    "a list for a number": put("step", lambda step: [step, {"more": torch.ones(3)}]),
    "one more": lambda state: state.update(more=torch.ones(5)),
    "one less": lambda state: state.popitem(),
    "another order": reorder,
    "another order of a tensor and a number": lambda state: state.update(bias=state.pop("bias", torch.ones(3))),
    "names that are not nested": spell_out,
    "a dict for a list": list_as_dict,
}


def contents(place):
    """Return the bytes of the data files, and what torch reads of the metadata, but for the id of the save."""
    metadata = torch_dcp.FileSystemReader(place).read_metadata()
    places = {index: (info.relative_path, info.offset, info.length) for index, info in metadata.storage_data.items()}
    names = sorted(name for name in os.listdir(place) if name.endswith((".distcp", ".sums")))
    files = {name: (place / name).read_bytes() for name in names}
    said = metadata.state_dict_metadata, metadata.planner_data
    return files, said, list(metadata.state_dict_metadata), places


def plain(value):
    """Return a value whose tensors can be compared."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


def zeroed(value):
    if isinstance(value, dict):
        return {key: zeroed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [zeroed(each) for each in value]
    return torch.zeros_like(value.detach()) if isinstance(value, torch.Tensor) else type(value)()


def save(state, place, *, asynchronous=False, **how):
    how = how or {"checkpoint_id": place}
    if asynchronous:
        quietly(dcp.async_save, state, no_dist=True, **how).result()
    else:
        quietly(dcp.save, state, no_dist=True, **how)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waits", "asynchronous"])
@pytest.mark.parametrize("make", [flat_state, nested_state])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_is_saved_as_if_it_were_the_first(tmp_path, make, change, asynchronous):
    kept_plans().clear()
    state = make()
    for number in range(2):
        save(state, tmp_path / f"before-{number}", asynchronous=asynchronous)
    CHANGES[change](state)
    for number in range(2):
        save(state, tmp_path / f"after-{number}", asynchronous=asynchronous)
    kept_plans().clear()
    save(state, tmp_path / "first")
    expected = contents(tmp_path / "first")
    quietly(torch_dcp.save, state, checkpoint_id=tmp_path / "torch", no_dist=True)
    assert contents(tmp_path / "torch")[1] == expected[1]
    assert expected == contents(tmp_path / "after-0") == contents(tmp_path / "after-1")
    for load in (torch_dcp.load, dcp.load):
        loaded = zeroed(state)
        quietly(load, loaded, checkpoint_id=tmp_path / "after-1", no_dist=True)
        assert plain(state) == plain(loaded)


def test_the_state_of_before_is_saved_again(tmp_path):
    """Two states in turn, of which what is kept is used alternately."""
    states = [flat_state(), nested_state(), {key: value for key, value in flat_state().items() if key != "w0"}]
    places = [(at, tmp_path / f"{number}-{at}") for number in range(3) for at in range(3)]
    for at, place in places:
        save(states[at], place)
    kept_plans().clear()
    for at, state in enumerate(states):
        save(state, tmp_path / f"first-{at}")
    for at, place in places:
        assert contents(tmp_path / f"first-{at}") == contents(place)


HOW = {
    "not flattened": lambda place: {
        "checkpoint_id": place,
        "planner": dcp.DefaultSavePlanner(flatten_state_dict=False),
    },
    "a file for each item": lambda place: {"storage_writer": dcp.FileSystemWriter(place, single_file_per_rank=False)},
    "three files": lambda place: {"storage_writer": dcp.FileSystemWriter(place, thread_count=3)},
}


@pytest.mark.parametrize("how", HOW)
def test_another_way_to_save(tmp_path, how):
    """The same state, by another planner or writer than before, and then as before."""
    kept_plans().clear()
    state = flat_state()
    for name in ("a", "b"):
        save(state, tmp_path / f"plain-{name}")
        save(state, tmp_path / name, **HOW[how](tmp_path / name))
    for name in ("first", "plain-first"):
        kept_plans().clear()
        save(state, tmp_path / name, **({} if name != "first" else HOW[how](tmp_path / name)))
    assert contents(tmp_path / "first") == contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "plain-first") == contents(tmp_path / "plain-a") == contents(tmp_path / "plain-b")


def test_both_layouts_of_one_state_in_turn(tmp_path):
    """They share the description, and what each of them has derived from it stays apart."""
    state = flat_state()
    for number in range(3):
        state["w1"].add_(1)
        state["step"] += 1
        save(state, tmp_path / f"dcp-{number}")
        sk.save(state, tmp_path / f"sk-{number}")
        found = sk.open(tmp_path / f"sk-{number}").to_dict()
        assert plain(state) == plain(found)
        kept = contents(tmp_path / f"dcp-{number}")
        kept_plans().clear()
        save(state, tmp_path / f"first-{number}")
        assert contents(tmp_path / f"first-{number}") == kept


def test_tensors_without_elements_are_known_the_next_time(tmp_path, monkeypatch):
    """Torch's layout stores them apart from columns; the second save does not find that out by describing all once more."""
    kept_plans().clear()
    calls = []
    described = default_save.describe_leaves
    monkeypatch.setattr(default_save, "describe_leaves", lambda *a, **k: calls.append(1) or described(*a, **k))
    for number, wanted in enumerate([2, 1, 1]):
        calls.clear()
        quietly(dcp.save, flat_state(), checkpoint_id=tmp_path / str(number), no_dist=True)
        assert len(calls) == wanted


@pytest.mark.parametrize("layout", ["torch", "native"])
def test_files_may_be_written_in_any_order(tmp_path, monkeypatch, layout):
    """As where those come first for which training waits: metadata still say in which file each tensor lies."""
    write = BackgroundWrite.write

    def reversed_files(self, store, jobs, *more):
        seen.append(len(jobs))
        jobs.reverse()
        return write(self, store, jobs, *more)

    seen = []
    monkeypatch.setattr(BackgroundWrite, "write", reversed_files)
    state = {f"w{n}": torch.randn(300) for n in range(8)}
    if layout == "torch":
        writer = dcp.FileSystemWriter(tmp_path / "ck", thread_count=4)
        quietly(dcp.async_save, state, storage_writer=writer, no_dist=True).result()
        found = {key: torch.zeros(300) for key in state}
        quietly(torch_dcp.load, found, checkpoint_id=tmp_path / "ck", no_dist=True)
        assert all(torch.equal(found[key], state[key]) for key in state)
        assert seen == [4]
    else:
        sk.async_save(state, tmp_path / "ck").result()
    into = {key: torch.zeros(300) for key in state}
    sk.load(into, tmp_path / "ck")
    assert all(torch.equal(into[key], state[key]) for key in state)
