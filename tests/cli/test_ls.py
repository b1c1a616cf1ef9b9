"""`shardkeep ls` and `shardkeep du`: of a run, of a checkpoint, of other programs' checkpoints, of damaged ones."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardkeep as sk
from shardkeep.manage.catalog import guess_template
from tests.cli.conftest import state_of


def test_a_run_is_a_table_of_its_checkpoints(shardkeep, run_dir):
    """Every step with its size, metric and marks, the newest first; unfinished and damaged ones with their reason."""
    (run_dir / "step-40").mkdir()
    shutil.copy(next((run_dir / "step-30").glob("model-*")), run_dir / "step-40")
    (run_dir / "step-10" / "shardkeep.json").write_text("{}")
    answer = shardkeep("ls", run_dir)
    rows = [line.split() for line in answer.out.splitlines() if line.startswith("step-")]
    assert answer.code == 0
    assert [row[:3] for row in rows] == [
        ["step-40", "40", "unfinished"],
        ["step-30", "30", "committed"],
        ["step-20", "20", "committed"],
        ["step-10", "10", "damaged"],
    ]
    assert answer.out.splitlines()[0].split()[-2:] == ["loss", "marks"]
    assert rows[1][-2:] == ["1.5", "latest"]
    assert "no commit record" in answer.out
    assert "does not end in its own checksum" in answer.out


def test_the_last_ones_are_listed_without_the_others(shardkeep, run_dir):
    """A damaged one that is older is not looked at, and is no part of the totals."""
    (run_dir / "step-10" / "shardkeep.json").write_text("{}")
    answer = shardkeep("ls", run_dir, "--last", 2)
    assert [line.split()[0] for line in answer.out.splitlines() if line.startswith("step-")] == ["step-30", "step-20"]
    assert "in 2 checkpoints\n" in answer.out
    assert "damaged" not in answer.out


def test_a_run_as_json(shardkeep, run_dir):
    """Programs get the path of the latest, and of each checkpoint all that its record says of it."""
    document = shardkeep("ls", run_dir, "--json").json
    assert document["latest"] == f"{run_dir}/step-30"
    assert [entry["step"] for entry in document["checkpoints"]] == [30, 20, 10]
    first = document["checkpoints"][0]
    assert (first["status"], first["world_size"], first["metrics"], first["latest"]) == (
        "committed",
        1,
        {"loss": 1.5},
        True,
    )
    stored = sum(file.stat().st_size for file in (run_dir / "step-30").iterdir() if file.name != "shardkeep.json")
    assert first["nbytes"] == stored


def test_keys_with_shape_dtype_and_size(shardkeep, checkpoint):
    answer = shardkeep("ls", checkpoint)
    rows = {line.split()[0]: line.split()[1:] for line in answer.out.splitlines() if line}
    assert rows["model.layers.0.weight"] == ["bfloat16", "[32,", "32]", "2.05", "kB", "1"]
    assert rows["model.head.weight"][-2] == "tied"
    assert rows["step"] == ["value", "30"]
    assert rows["betas"] == ["value", "(0.9,", "0.95)"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.layers.10"], ["model.layers.10.bias", "model.layers.10.weight"]),
        (["*.bias", "step"], ["model.layers.10.bias", "step"]),
        (["model.layers.1"], []),
    ],
)
def test_only_the_keys_asked_for(shardkeep, checkpoint, words, expected):
    answer = shardkeep("ls", checkpoint, *words, "--names")
    assert answer.out.split() == expected
    assert answer.code == (0 if expected else 2)


def test_layers_are_in_natural_order_and_sizes_too(shardkeep, tmp_path):
    """Layer 2 comes before layer 10, everywhere; --sort size has the largest first, --limit as many as asked for."""
    layers = {f"layers.{n}.w": torch.ones(n + 1) for n in (10, 2, 0, 1)}
    sk.save(layers, tmp_path / "run" / "a-10")
    sk.save({key: value + 1 for key, value in layers.items()}, tmp_path / "run" / "a-2")
    expected = [f"layers.{n}.w" for n in (0, 1, 2, 10)]
    assert shardkeep("ls", tmp_path / "run" / "a-2", "--names").out.split() == expected
    changed = shardkeep("diff", tmp_path / "run" / "a-2", tmp_path / "run" / "a-10", "--json").json["other_elements"]
    assert list(changed) == expected
    answer = shardkeep("ls", tmp_path / "run" / "a-2", "--sort", "size", "--limit", 2)
    assert [line.split()[0] for line in answer.out.splitlines()[-3:]] == ["layers.10.w", "layers.2.w", "and"]
    assert shardkeep("ls", tmp_path / "run", "--sort", "name", "--names").out.split() == ["a-2", "a-10"]
    assert shardkeep("ls", tmp_path / "run", "--limit", 1, "--names").out.split() == ["a-2"]  # saved last


def test_a_tree_counts_what_is_below(shardkeep, checkpoint):
    lines = shardkeep("ls", checkpoint, "--tree").out.splitlines()
    assert "├─ model  5 keys, 14.5 kB" in lines
    assert "│     ├─ 0.weight  bfloat16 [32, 32], 2.05 kB" in lines
    assert "├─ betas  (0.9, 0.95)" in lines
    text = "\n".join(lines)
    assert text.index("─ 0.weight") < text.index("─ 10  2 keys")
    shallow = shardkeep("ls", checkpoint, "--tree", "--depth", "1").out
    assert "weight" not in shallow
    assert shardkeep("ls", checkpoint, "--tree", "--limit", 3).out.splitlines()[3:] == [
        *lines[3:6],
        f"and {len(lines) - 6} more (--limit 0 lists them)",
    ]


def test_long_says_where_every_chunk_is(shardkeep, checkpoint):
    document = shardkeep("ls", checkpoint, "optim.exp_avg", "--long", "--json").json
    [item] = document["items"]
    [chunk] = item["chunks"]
    raw = (checkpoint / chunk["file"]).read_bytes()[chunk["offset"] :][: chunk["nbytes"]]
    assert raw == state_of(30)["optim"]["exp_avg"].numpy().tobytes()
    assert chunk["file"] in shardkeep("ls", checkpoint, "optim.exp_avg", "--long").out


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_other_programs(shardkeep, tmp_path):
    weight = torch.arange(12.0).reshape(3, 4)
    dcp.save({"model": {"w": weight}, "step": 7}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "hf").mkdir()
    save_file({"w": weight}, tmp_path / "hf" / "model.safetensors")
    listed = shardkeep("ls", tmp_path / "dcp", "--json").json
    assert listed["format"] == "torch.distributed.checkpoint"
    assert [item["key"] for item in listed["items"]] == ["model.w", "step"]
    for words in ([], ["--long"], ["--tree"]):
        assert shardkeep("ls", tmp_path / "dcp", *words).out.splitlines()[-1].split()[-1] == "7"
    [item] = shardkeep("ls", tmp_path / "hf", "--long", "--json").json["items"]
    assert (item["shape"], item["dtype"]) == ([3, 4], "float32")
    place = item["chunks"][0]
    raw = (tmp_path / "hf" / place["file"]).read_bytes()[place["offset"] :][: place["nbytes"]]
    assert raw == weight.numpy().tobytes()
    parts = shardkeep("du", tmp_path / "dcp", "--json").json["parts"]
    assert (parts["model"]["nbytes"], parts["values"]["nbytes"] > 0) == (48, True)


def test_hostile_keys_do_not_reach_the_terminal(shardkeep, tmp_path):
    sk.save({"\x1b[2Jevil": torch.ones(2), "ok": 1}, tmp_path / "ck")
    for words in ([], ["--tree"], ["--long"], ["--names"]):
        answer = shardkeep("ls", tmp_path / "ck", *words)
        assert "\x1b" not in answer.out
        assert "\\x1b[2Jevil" in answer.out
    answer = shardkeep("show", tmp_path / "ck", "[2Jevil")
    assert "\x1b" not in answer.err
    assert "did you mean \\x1b[2Jevil" in answer.err


def test_what_is_not_there_is_guessed(shardkeep, run_dir, tmp_path):
    """A misspelt place or key names what is spelt alike, an empty directory is a run without checkpoints."""
    assert "did you mean step-30" in shardkeep("ls", run_dir / "step-3O").err
    assert "did you mean model.head.weight" in shardkeep("ls", run_dir / "step-30", "model.haed.weight").err
    assert "its latest checkpoint is" in shardkeep("cat", run_dir).err
    (tmp_path / "empty").mkdir()
    answer = shardkeep("ls", tmp_path / "empty", "--json")
    assert (answer.code, answer.json["checkpoints"]) == (0, [])
    (tmp_path / "other" / "things").mkdir(parents=True)
    assert "no checkpoint, here or up to 4 levels below" in shardkeep("ls", tmp_path / "other").err
    assert "give its directory" in shardkeep("ls", run_dir / "step-30" / "shardkeep.json").err
    assert shardkeep("ls", run_dir, "model").code == 2


@pytest.mark.parametrize(
    ("names", "template"),
    [
        (["step-5", "step-10"], "step-{step}"),
        (["checkpoint-500", "checkpoint-1000", "logs"], "checkpoint-{step}"),
        (["iter_0000100", "iter_0000200"], "iter_{step:07d}"),
        (["global_step9", "global_step10"], "global_step{step}"),
        (["step-000900", "step-001000"], "step-{step:06d}"),
        (["0", "100"], "{step}"),
        (["logs", "exp-1", "exp-2", "llama-7b"], "step-{step}"),
        ([], "step-{step}"),
    ],
)
def test_names_of_other_trainers_are_recognised(names, template):
    assert guess_template(names) == template


NAMES = ["final", "checkpoint-500", "epoch=3-step=300", "iter_0000200", "best", "step-30", "step-20", "step-10"]
"""Checkpoints of a run, by step, the newest first; the names of some do not say the step."""


@pytest.fixture
def mixed_run(run_dir):
    """A run with checkpoints of all kinds of names and layouts, and directories that are none."""
    for name, step in zip(NAMES, (600, 500, 300, 200, 40), strict=False):
        sk.save({"w": torch.ones(4)}, run_dir / name, step=step)
    sk.convert(run_dir / "step-10", run_dir / "from dcp", "dcp")
    sk.export(run_dir / "step-10", run_dir / "hf-model")
    (run_dir / "logs" / "old").mkdir(parents=True)
    (run_dir / "logs" / "events.out").write_text("x")
    (run_dir / ".cache").mkdir()
    return run_dir


def test_checkpoints_of_any_name_are_listed(shardkeep, mixed_run):
    """ls, verify, latest, du and sk.Catalog see every checkpoint, ordered by the step in its record."""
    assert shardkeep("ls", mixed_run, "--names").out.splitlines()[:8] == NAMES
    listed = shardkeep("ls", mixed_run, "--json").json["checkpoints"]
    assert [(each["step"], each["layout"]) for each in listed][:2] == [(600, "native"), (500, "native")]
    assert {(each["name"], each["step"], each["layout"]) for each in listed[8:]} == {
        ("from dcp", None, "torch"),
        ("hf-model", None, "safetensors"),
    }
    assert shardkeep("latest", mixed_run).out == f"{mixed_run}/final\n"
    verified = shardkeep("verify", mixed_run)
    assert (verified.code, "9 of 10 checkpoints sound, 1 read, with nothing to compare" in verified.out) == (0, True)
    assert {each["name"] for each in shardkeep("du", mixed_run, "--json").json["checkpoints"]} > set(NAMES)
    catalog = sk.Catalog(mixed_run)
    assert [entry.name for entry in catalog.entries()][:8] == NAMES
    assert catalog.find(300).name == "epoch=3-step=300"
    assert [entry.name for entry in sk.Catalog(mixed_run, "step-{step}").entries()] == NAMES[-3:]
    (mixed_run / "best" / "shardkeep.json").unlink()
    (mixed_run / "step-7").mkdir()
    (mixed_run / "step-7" / "notes.txt").touch()
    listed = shardkeep("ls", mixed_run, "--json").json["checkpoints"]
    assert [each["name"] for each in listed if each["status"] == "unfinished"] == ["best"]


def test_files_of_torch_save_in_a_folder_are_checkpoints(shardkeep, tmp_path):
    """A folder of .ckpt and .pt files is a run: listed, verified, added up and compared, and never pruned."""
    for step in (100, 200, 1000):
        torch.save({"w": torch.full((4,), step), "epoch": step // 100}, tmp_path / f"epoch=3-step={step}.ckpt")
    torch.save({"w": torch.zeros(4)}, tmp_path / "weights.pth")
    torch.save([1, 2], tmp_path / "losses.pt")
    torch.save({"w": torch.zeros(4)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "data.bin").write_bytes(bytes(1000))
    (tmp_path / "hf" / "checkpoint-5").mkdir(parents=True)
    torch.save({"w": torch.zeros(4)}, tmp_path / "hf" / "checkpoint-5" / "pytorch_model.bin")
    names = ["epoch=3-step=1000.ckpt", "epoch=3-step=200.ckpt", "epoch=3-step=100.ckpt", "weights.pth"]
    assert shardkeep("pin", tmp_path / "weights.pth").code == 0
    listed = shardkeep("ls", tmp_path, "--json").json
    assert [each["name"] for each in listed["checkpoints"]] == names
    assert [each["step"] for each in listed["checkpoints"]] == [1000, 200, 100, None]
    assert {(each["layout"], each["pinned"]) for each in listed["checkpoints"][2:]} == {
        ("torch.save", False),
        ("torch.save", True),
    }
    assert [each["name"] for run in listed["runs"] for each in run["checkpoints"]] == ["checkpoint-5"]
    assert shardkeep("latest", tmp_path).out == f"{tmp_path}/{names[0]}\n"
    sizes = {each["name"]: each["nbytes"] for each in shardkeep("du", tmp_path, "--json").json["checkpoints"]}
    assert sizes == {name: (tmp_path / name).stat().st_size for name in names}
    assert "2 differ; 0 keys equal" in shardkeep("diff", tmp_path).out
    pruned = shardkeep("prune", tmp_path, "--keep-last", "1", "--yes")
    assert (pruned.code, pruned.out.count("not managed: of another program")) == (0, 4)
    assert "5 of 5 checkpoints sound" in shardkeep("verify", tmp_path).out
    with (tmp_path / names[0]).open("r+b") as file:
        file.truncate(900)
    verified = shardkeep("verify", tmp_path)
    assert (verified.code, "4 of 5 checkpoints sound, 1 damaged" in verified.out) == (1, True)


def test_a_folder_of_runs_is_listed_as_runs(shardkeep, run_dir):
    """Runs in a folder, or some levels deeper, are listed, verified and added up; other commands ask for one of them."""
    folder = run_dir.parent
    shutil.copytree(run_dir / "step-30", folder / "group" / "seed-2" / "best")
    shutil.copytree(run_dir / "step-30", folder / "lightning_logs" / "version_0" / "checkpoints" / "last")
    (folder / "notes").mkdir()
    assert shardkeep("ls", folder, "--names").out.split() == [
        "group/seed-2",
        deep := "lightning_logs/version_0/checkpoints",
        "run",
    ]
    rows = [line.split() for line in shardkeep("ls", folder).out.splitlines()]
    assert [row[:4] for row in rows[1:4]] == [
        ["group/seed-2", "1", "best", "30"],
        [deep, "1", "last", "30"],
        ["run", "3", "step-30", "30"],
    ]
    document = shardkeep("ls", folder, "--json").json
    assert (document["kind"], [run["latest"] for run in document["runs"]]) == (
        "runs",
        [f"{folder}/group/seed-2/best", f"{folder}/{deep}/last", f"{run_dir}/step-30"],
    )
    verified = shardkeep("verify", folder)
    assert (verified.code, "5 of 5 checkpoints sound" in verified.out) == (0, True)
    assert "in 5 checkpoints of 3 runs" in shardkeep("du", folder).out
    assert "in 5 checkpoints of 3 runs" in shardkeep("ls", folder, "--last", "1").out
    for words in (["latest", folder], ["prune", folder, "--keep-last", "1"]):
        answer = shardkeep(*words)
        assert (answer.code, f"give one of them: {folder}/group/seed-2" in answer.err) == (2, True)
    assert f"it is a folder of runs, such as {folder}/group/seed-2" in shardkeep("show", folder, "model").err


def test_du_adds_up_by_prefix(shardkeep, checkpoint):
    """Bytes by prefix add up to all bytes, tied tensors count once, model and optimizer are separate."""
    state = state_of(30)
    model = sum(tensor.nbytes for key, tensor in state["model"].items() if key != "head.weight")
    optim = sum(tensor.nbytes for tensor in state["optim"].values())
    for depth in (0, 1, 2, 5):
        document = shardkeep("du", checkpoint, "--depth", depth, "--json").json
        assert sum(prefix["nbytes"] for prefix in document["prefixes"]) == document["nbytes"]
        sizes = [prefix["nbytes"] for prefix in document["prefixes"]]
        assert sizes == sorted(sizes, reverse=True)
    assert document["parts"]["model"]["nbytes"] == model
    assert document["parts"]["optimizer"]["nbytes"] == optim
    deep = {prefix["name"] for prefix in shardkeep("du", checkpoint, "--depth", 3, "--json").json["prefixes"]}
    assert {"model.layers.10.*", "optim.mask", "step"} <= deep


def test_du_is_in_proportion(shardkeep, tmp_path):
    """Bars are as long as shares, what is next to nothing has none, and generators' state is not counted as model."""
    state = {
        "model": torch.zeros(3000),
        "optim": torch.zeros(1000),
        "rng": sk.RNG(),
        "ema": {"rng_state": torch.ones(1)},
    }
    sk.save(state, tmp_path / "ck")
    lines = shardkeep("du", tmp_path / "ck").out.partition("\n\n")[0].splitlines()
    rows = {line.split()[0]: line.split()[4:] for line in lines[1:]}
    for share, *bar in rows.values():
        assert abs(len("".join(bar)) - 20 * float(share.strip("<%")) / 100) <= 1
    assert rows["ema.rng_state"] == ["<0.1%"]
    parts = shardkeep("du", tmp_path / "ck", "--json").json["parts"]
    assert parts["model"]["nbytes"] == 12_000
    assert parts["rng"]["nbytes"] > 5000


def test_du_lists_layers_of_one_size_in_natural_order(shardkeep, tmp_path):
    sk.save({"layers": {str(at): torch.zeros(8) for at in range(12)}}, tmp_path / "ck")
    lines = shardkeep("du", tmp_path / "ck").out.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"layers.{at}" for at in range(12)]


def test_du_of_a_run_counts_every_file(shardkeep, run_dir):
    """What a run takes is what its files take, damaged ones and leftovers included."""
    (run_dir / "step-10" / "shardkeep.json").write_text("{}")
    on_disk = sum(file.stat().st_size for file in run_dir.rglob("*") if file.is_file())
    answer = shardkeep("du", run_dir, "--json")
    assert answer.json["nbytes"] == on_disk
    assert "damaged" in shardkeep("du", run_dir).out


def test_cat_prints_what_is_stored(shardkeep, checkpoint):
    """The commit record comes out byte for byte, or as one document; a damaged one is not printed."""
    stored = (checkpoint / "shardkeep.json").read_text()
    assert shardkeep("cat", checkpoint).out == stored
    assert shardkeep("cat", checkpoint, "--json").json["step"] == 30
    (checkpoint / "shardkeep.json").write_text(stored.replace('"step": 30', '"step": 31'))
    answer = shardkeep("cat", checkpoint)
    assert (answer.code, answer.out) == (2, "")
    assert "checksum" in answer.err


def test_a_run_is_no_checkpoint(shardkeep, run_dir):
    answer = shardkeep("cat", run_dir)
    assert (answer.code, f"it is a run; its latest checkpoint is {run_dir}/step-30" in answer.err) == (2, True)
    [data, *_] = (run_dir / "step-10").glob("model-*.safetensors")
    places = {run_dir: "step-30", run_dir / "step-10" / "shardkeep.json": "directory: ", data: "directory: "}
    for where, hint in places.items():
        with pytest.raises(sk.CheckpointNotFound) as raised:
            sk.open(where)
        assert hint in raised.value.hint
    with pytest.raises(sk.CheckpointNotFound) as raised:
        sk.open(run_dir / "nothing")
    assert "shardkeep.json" in raised.value.hint
