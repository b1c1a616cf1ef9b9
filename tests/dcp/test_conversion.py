"""Checkpoints and files of torch.save, converted into each other: the same values, read by torch and by us."""

import datetime as dt
import os
import pickle
import threading
import warnings
import zipfile
from collections import defaultdict
from contextlib import contextmanager
from decimal import Decimal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as their_dcp
from torch.distributed.checkpoint import format_utils as theirs
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as Cut

import shardkeep
from shardkeep.codecs.stream_extensions import ZStandard
from shardkeep.conversion import pipeline
from shardkeep.conversion.to_file import pickle_state
from shardkeep.dcp import format_utils as ours
from shardkeep.dcp.filesystem import FileSystemWriter
from shardkeep.dcp.state_dict_saver import save
from shardkeep.errors import PickleRefused
from shardkeep.format.dtypes import known_to_torch
from tests.protocol.samples import quietly
from tests.toolkit.samples import grid, in_chunks, mesh_of, numbered, seen, spread_out
from tests.warm.python import warm_python

BLOCK_NBYTES = 4096


def small_windows(monkeypatch, blocks=1):
    monkeypatch.setattr(pipeline, "block_nbytes_for", lambda _: BLOCK_NBYTES)
    monkeypatch.setattr(pipeline, "limits", lambda *_: (2, blocks * BLOCK_NBYTES))


def plain_state():
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {
            "weight": torch.randn(300, 70, generator=generator),
            "deep": {"er": {"bias": numbered(7, dtype=torch.bfloat16)}},
            "transposed": numbered(40, 30).t(),
            "scalar": torch.tensor(3.5),
            "none": torch.empty(0, 3),
            "eighth": numbered(9).to(torch.float8_e4m3fn),
            "wide": numbered(5).to(torch.uint16),
        },
        "optim": [{"moment": numbered(3), "lr": 0.1}, {"moment": numbered(2), "lr": 0.2}],
        "tuple": (numbered(3), numbered(4)[1:]),
        "names": ["a", "b"],
        "nothing": None,
        "step": 5,
        "odd.key/with spaces": numbered(1),
    }


def save_spread(folder, by):
    line = mesh_of(dist.get_world_size())
    state = {
        "rows": spread_out(numbered(50, 30), line, Cut(0)),
        "columns": {"inside": spread_out(numbered(50, 30), line, Cut(1))},
        "middle": spread_out(numbered(6, 9, 5), line, Cut(1)),
        "both": spread_out(numbered(16, 12, dtype=torch.float64), grid(), Cut(0), Cut(1)),
        "copied": spread_out(numbered(33), line, Replicate()),
        "few rows": spread_out(numbered(2, 3), line, Cut(0)),
        "chunks": in_chunks(numbered(10, 3)),
        "plain": numbered(4),
        "step": 7,
    }
    quietly(save if by == "ours" else their_dcp.save, state, checkpoint_id=folder)


def same(ours_path, theirs_path):
    mine, other = (torch.load(path, weights_only=False) for path in (ours_path, theirs_path))
    assert seen(mine) == seen(other)
    assert list(mine) == list(other)


def archive_root(path):
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()[0].split("/")[0]


@pytest.mark.parametrize("by", ["ours", "theirs"])
@pytest.mark.parametrize("window", [1, None], ids=["small windows", "one window"])
def test_a_checkpoint_of_four_ranks_becomes_the_file_that_torch_makes(rank_pool, tmp_path, monkeypatch, by, window):
    """Tensors that were cut by rows, columns and both are whole again, with the very pickle that torch writes."""
    if window:
        small_windows(monkeypatch, window)
    rank_pool.run(4, save_spread, str(tmp_path / "ck"), by)
    theirs.dcp_to_torch_save(tmp_path / "ck", tmp_path / "theirs.pt")
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "ours.pt")
    same(tmp_path / "ours.pt", tmp_path / "theirs.pt")
    assert torch.equal(torch.load(tmp_path / "ours.pt")["columns"]["inside"], numbered(50, 30))
    pickles = []
    for name in ("ours.pt", "theirs.pt"):
        with zipfile.ZipFile(tmp_path / name) as archive:
            pickles.append(archive.read(f"{archive_root(tmp_path / name)}/data.pkl"))
    assert pickles[0] == pickles[1]


@pytest.mark.parametrize("how", [{}, {"mmap": True}, {"mmap": True, "weights_only": True}, {"map_location": "meta"}])
def test_torch_loads_the_file_in_every_way(tmp_path, how):
    """Read into memory, mapped, under torch's allow-list, or as shapes only; and every checksum in it is right."""
    quietly(save, plain_state(), checkpoint_id=tmp_path / "ck")
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", **how)
    assert loaded["model"]["weight"].shape == (300, 70)
    if "map_location" not in how:
        theirs.dcp_to_torch_save(tmp_path / "ck", tmp_path / "theirs.pt")
        assert seen(loaded) == seen(torch.load(tmp_path / "theirs.pt"))
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None
    assert os.listdir(tmp_path).count("file.pt") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_the_file_does_not_depend_on_the_windows(tmp_path, monkeypatch):
    quietly(save, plain_state(), checkpoint_id=tmp_path / "ck")
    made = []
    for blocks in (1, 3, 100):
        small_windows(monkeypatch, blocks)
        ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
        made.append((tmp_path / "file.pt").read_bytes())
    assert len(made[0]) > 20 * BLOCK_NBYTES
    assert made[0] == made[1] == made[2]


def test_every_dtype_goes_both_ways(tmp_path):
    """The bits of each dtype that this torch has come back, also of those that it can only store."""
    raw = torch.arange(64, dtype=torch.uint8).reshape(4, 16)
    state = {
        dtype.name: (raw % 2).bool() if known is torch.bool else raw.clone().view(known)
        for known, dtype in known_to_torch().items()
    }
    quietly(save, state, checkpoint_id=tmp_path / "ck")
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "out.pt")
    for mapped in (False, True):
        assert seen(torch.load(tmp_path / "out.pt", mmap=mapped)) == seen(state)
    quietly(ours.torch_save_to_dcp, tmp_path / "out.pt", tmp_path / "again")
    ours.dcp_to_torch_save(tmp_path / "again", tmp_path / "last.pt")
    assert seen(torch.load(tmp_path / "last.pt")) == seen(state)


def test_tensors_inside_objects_keep_their_memory_shared(tmp_path):
    """A tuple of two views of one tensor is an object; in the file, they share its bytes."""
    base = numbered(1000)
    quietly(save, {"pair": (base[:10], base[5:])}, checkpoint_id=tmp_path / "ck")
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    first, second = torch.load(tmp_path / "file.pt")["pair"]
    first[5] = -1
    assert second[0] == -1
    assert torch.equal(second[1:], base[6:])
    assert os.path.getsize(tmp_path / "file.pt") < 8000


def test_the_pickle_of_a_state_is_torchs(tmp_path):
    shared = numbered(6)
    state = {
        "a": shared[2:],
        "b": torch.nn.Parameter(shared),
        "c": torch.ones(3, dtype=torch.uint8).untyped_storage(),
        "d": numbered(2).int(),
    }
    torch.save(state, tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert pickle_state(state).data == archive.read("file/data.pkl")


def test_a_transformed_checkpoint_is_decoded(tmp_path, monkeypatch):
    """What went through an extension cannot be read in parts: tensors are decoded whole, whatever the windows."""
    small_windows(monkeypatch)
    writer = FileSystemWriter(tmp_path / "ck", _extensions=[ZStandard()])
    state = {"a": numbered(5000), "step": 3, "b": {"c": numbered(70, 70), "tiny": numbered(3)}}
    quietly(save, state, storage_writer=writer)
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    assert seen(torch.load(tmp_path / "file.pt")) == seen(state)


def test_a_file_becomes_a_checkpoint_that_torch_reads(tmp_path):
    """Torch makes of our checkpoint the same file as of its own, and loads it into a state."""
    torch.save(plain_state(), tmp_path / "file.pt")
    quietly(ours.torch_save_to_dcp, tmp_path / "file.pt", tmp_path / "ours")
    quietly(theirs.torch_save_to_dcp, tmp_path / "file.pt", tmp_path / "theirs")
    for name in ("ours", "theirs"):
        theirs.dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    same(tmp_path / "ours.pt", tmp_path / "theirs.pt")
    into = {"model": {"weight": torch.zeros(300, 70)}, "step": 0}
    quietly(their_dcp.load, into, checkpoint_id=tmp_path / "ours")
    assert seen(into) == seen({"model": {"weight": plain_state()["model"]["weight"]}, "step": 5})


def there_and_back(tmp_path, state, **how):
    torch.save(state, tmp_path / "file.pt", **how)
    quietly(ours.torch_save_to_dcp, tmp_path / "file.pt", tmp_path / "ck")
    ours.dcp_to_torch_save(str(tmp_path / "ck"), str(tmp_path / "back.pt"))
    return torch.load(tmp_path / "back.pt", weights_only=False)


@pytest.mark.parametrize("form", ["archive", "legacy", "without checksums"])
def test_there_and_back_again(tmp_path, form):
    """A file comes back from a checkpoint bit for bit, also one from before archives, or without checksums."""
    state = plain_state()
    if form == "legacy":
        del state["model"]["eighth"], state["model"]["wide"]  # torch itself cannot read these from such a file
    torch.serialization.set_crc32_options(form != "without checksums")
    try:
        back = there_and_back(tmp_path, state, _use_new_zipfile_serialization=form != "legacy")
    finally:
        torch.serialization.set_crc32_options(True)
    assert seen(back) == seen(state)


def test_plain_values_that_torch_does_not_hold_for_safe_are_read(tmp_path):
    """Dates and sets need no permission, in either direction."""
    state = {"when": dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc), "seen": {1, 2}, "w": numbered(3)}
    back = there_and_back(tmp_path, state)
    assert (back["when"], back["seen"]) == (state["when"], state["seen"])


@pytest.mark.parametrize("factory", [int, str, float, list, dict, bytes, Decimal, defaultdict, None])
def test_defaultdicts_are_read_with_their_factory(tmp_path, factory):
    """In a tuple they are objects, which come back as they were; elsewhere they are walked as any dict."""
    state = {"kept": (defaultdict(factory, a=1), b""), "walked": defaultdict(factory, a=numbered(3))}
    back = there_and_back(tmp_path, state)
    assert back["kept"] == state["kept"]
    assert (type(back["kept"][0]), back["kept"][0].default_factory) == (defaultdict, factory)
    assert seen(back["walked"]) == seen(dict(state["walked"]))


def test_a_defaultdict_of_another_factory_is_refused(tmp_path):
    """One whose values are made by a function, or by a class that is not known to be safe."""
    for factory in (threading.Lock, os.getcwd, torch.Tensor):
        torch.save({"kept": (defaultdict(factory, a=1),)}, tmp_path / "file.pt")
        with pytest.raises(PickleRefused):
            ours.torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "ck")


def test_a_checkpoint_that_ranks_saved_alone_is_that_of_the_first(tmp_path):
    """Without metadata of the whole, rank 0's own are used, as torch does it."""
    quietly(save, {"w": numbered(5)}, checkpoint_id=tmp_path / "ck", use_collectives=False)
    assert not (tmp_path / "ck" / ".metadata").exists()
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    assert seen(torch.load(tmp_path / "file.pt")) == seen({"w": numbered(5)})


def save_native(folder):
    line = mesh_of(dist.get_world_size())
    spread = {"rows": spread_out(numbered(50, 30), line, Cut(0)), "columns": spread_out(numbered(9, 7), line, Cut(1))}
    shardkeep.save({**plain_state(), **spread}, folder)


@pytest.mark.parametrize("window", [1, None], ids=["small windows", "one window"])
def test_a_native_checkpoint_becomes_a_file(rank_pool, tmp_path, monkeypatch, window):
    if window:
        small_windows(monkeypatch, window)
    rank_pool.run(3, save_native, str(tmp_path / "ck"))
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "file.pt")
    full = {**plain_state(), "rows": numbered(50, 30), "columns": numbered(9, 7)}
    assert seen(torch.load(tmp_path / "file.pt")) == seen(full)


def test_what_was_at_the_destination_is_replaced_through_links(tmp_path):
    quietly(save, {"w": numbered(5)}, checkpoint_id=tmp_path / "ck")
    (tmp_path / "real.pt").write_bytes(b"old")
    (tmp_path / "link.pt").symlink_to(tmp_path / "real.pt")
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert torch.equal(torch.load(tmp_path / "real.pt")["w"], numbered(5))
    torch.save({"v": numbered(2)}, tmp_path / "other.pt")
    with pytest.warns(UserWarning, match="replace"):
        ours.torch_save_to_dcp(tmp_path / "other.pt", tmp_path / "ck")
    ours.dcp_to_torch_save(tmp_path / "ck", tmp_path / "link.pt")
    assert list(torch.load(tmp_path / "real.pt")) == ["v"]


@contextmanager
def anonymous_memory():
    """Give a list with the memory of this process that no file backs, and at the end of the block the most there was."""

    def now():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    def watch():
        while not over.wait(0.002):
            most.append(now())

    over, most = threading.Event(), [now()]
    watcher, held = threading.Thread(target=watch, daemon=True), [most[0]]
    watcher.start()
    yield held
    over.set()
    watcher.join()
    held.append(max(most))


MIB = 1 << 20
BIG = 192 * MIB
MOST = 32 * MIB
"""What a conversion may take of BIG: two windows of 1 MiB, the read pipeline's, and slack for the allocator."""


def convert_big(folder):
    warnings.simplefilter("ignore")
    os.environ["SHARDKEEP_HOST_BUDGET_BYTES"] = str(8 * MIB)
    torch.manual_seed(0)
    taken = {}
    try:
        state = {"one": torch.randn(BIG // 8), **{f"{i}": torch.randn(BIG // 80) for i in range(10)}}
        with anonymous_memory() as held:
            assert held[0] > BIG  # the watch sees tensors
        torch.save(state, f"{folder}/file.pt")
        del state
        for name, convert, src, dst in (
            ("to dcp", ours.torch_save_to_dcp, "file.pt", "ck"),
            ("to torch", ours.dcp_to_torch_save, "ck", "back.pt"),
        ):
            with anonymous_memory() as held:
                convert(f"{folder}/{src}", f"{folder}/{dst}")
            taken[name] = held[1] - held[0]
        files = [torch.load(f"{folder}/{name}", mmap=True) for name in ("file.pt", "back.pt")]
        return taken, all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    finally:
        del os.environ["SHARDKEEP_HOST_BUDGET_BYTES"]


def test_neither_direction_holds_the_model(rank_pool, tmp_path):
    [(taken, right)] = rank_pool.run(1, convert_big, str(tmp_path))
    assert right
    assert {name: nbytes for name, nbytes in taken.items() if nbytes > MOST} == {}


def command(*args):
    return warm_python("-m", "shardkeep.dcp.format_utils", *args)


def test_the_command_converts_both_ways(tmp_path):
    torch.save({"w": numbered(5)}, tmp_path / "file.pt")
    there = command("torch_to_dcp", tmp_path / "file.pt", tmp_path / "ck")
    back = command("dcp_to_torch", tmp_path / "ck", tmp_path / "back.pt")
    assert (there.returncode, back.returncode) == (0, 0), there.stderr + back.stderr
    assert "using method: 'dcp_to_torch'" in back.stdout
    assert (there.stderr, back.stderr) == ("", "")
    assert seen(torch.load(tmp_path / "back.pt")) == seen({"w": numbered(5)})


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    """Nothing at the source is no failure, as with torch; an unknown direction is one."""
    ours.main(["torch_to_dcp", str(tmp_path / "absent.pt"), str(tmp_path / "ck")])
    ours.main(["dcp_to_torch", str(tmp_path / "absent"), str(tmp_path / "file.pt")])
    assert capsys.readouterr().out.count("Skipping conversion") == 2
    assert os.listdir(tmp_path) == []
    with pytest.raises(SystemExit):
        ours.main(["sideways", "a", "b"])
    assert [mode.value for mode in ours.FormatMode] == ["torch_to_dcp", "dcp_to_torch"]


def test_the_names_are_torchs():
    assert set(theirs.__all__) <= set(dir(ours))
    reader = pickle.loads(pickle.dumps(ours.BroadcastingTorchSaveReader("a", 1)))
    assert (reader.checkpoint_id, reader.coordinator_rank) == ("a", 1)
    assert isinstance(pickle.loads(pickle.dumps(ours.DynamicMetaLoadPlanner())), ours.DynamicMetaLoadPlanner)
