"""Our tree in the place of torch's: in a process, in those it starts, and out of it again."""

import os
import pickle
import subprocess
import sys
import textwrap

import pytest

from tests.warm.python import needs_late_threads, warm_python

OPTIONS = {"PYTHONPATH": None, "SHARDKEEP_DCP_INSTALL": None}


def run(*command, cwd, check=True, warm=False, **env):
    """Run Python in a process of its own, which may have imported torch before; and return what it printed."""
    environment = {key: value for key, value in {**os.environ, **OPTIONS, **env}.items() if value is not None}
    if warm:
        done = warm_python(*command, cwd=cwd, env=environment)
    else:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout if check else done


@pytest.fixture
def script(tmp_path):
    def written(text, name="job.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return written


FIRST = """
    import importlib, sys, warnings
    warnings.simplefilter("error")
    from shardkeep.dcp_install import install, uninstall

    path, before = list(sys.meta_path), set(sys.modules)
    install()
    assert len(sys.meta_path) == len(path) + 1
    install()
    assert len(sys.meta_path) == len(path) + 1
    assert "torch" not in sys.modules, "installing imports nothing"

    import torch
    import torch.distributed.fsdp, torch.distributed.tensor  # loads one of ours into torch itself
    import torch.distributed.checkpoint as dcp
    import shardkeep.dcp
    assert dcp is shardkeep.dcp is torch.distributed.checkpoint is sys.modules["torch.distributed.checkpoint"]
    from torch.distributed import checkpoint
    assert checkpoint is dcp
    import torch.distributed.checkpoint.metadata, torch.distributed.checkpoint.planner
    assert torch.distributed.checkpoint.metadata is importlib.import_module("shardkeep.dcp.metadata")
    assert dcp.metadata.__name__ == dcp.metadata.__spec__.name == "shardkeep.dcp.metadata"
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed._state_dict_utils import _gather_state_dict
    assert Metadata is shardkeep.dcp.metadata.Metadata
    assert get_state_dict is shardkeep.dcp.state_dict.get_state_dict
    assert _gather_state_dict is importlib.import_module("shardkeep.dcp._state_dict_utils")._gather_state_dict
    assert importlib.import_module("torch.distributed.checkpoint.storage") is shardkeep.dcp.storage
    try:
        import torch.distributed.checkpoint.nothing
    except ModuleNotFoundError as error:
        assert error.name == "torch.distributed.checkpoint.nothing"
    else:
        raise SystemExit("found nothing")

    # Torch's own modules, those loaded now and the one that has its imports in functions, work with ours.
    from torch.distributed.tensor import _shards_wrapper, DeviceMesh, Replicate, distribute_tensor
    assert _shards_wrapper.WriteItem is dcp.planner.WriteItem
    wrapped = _shards_wrapper.LocalShardsWrapper([torch.ones(2, 2)], [(0, 0)])
    [item] = wrapped.__create_write_items__("w", wrapped)
    assert type(item) is dcp.planner.WriteItem
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    shared = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Replicate()])
    [item] = shared.__create_write_items__("w", shared)
    assert type(item) is dcp.planner.WriteItem
    assert torch.distributed.fsdp._optim_utils._gather_state_dict is _gather_state_dict

    # What ours has not is torch's, on top of ours.
    import torch.distributed.checkpoint._experimental.barriers as barriers
    assert "site-packages" in barriers.__file__ and barriers.__name__.startswith("torch.")

    uninstall()
    assert sys.meta_path == path
    left = [name for name in sys.modules if name.startswith("torch.distributed.checkpoint")]
    assert not hasattr(shardkeep.dcp, "_experimental")
    theirs = importlib.import_module("torch.distributed.checkpoint")
    assert "site-packages" in theirs.__file__ and torch.distributed.checkpoint is theirs
    assert _shards_wrapper.WriteItem is theirs.WriteItem and theirs.WriteItem is not item.__class__
    assert torch.distributed.fsdp._optim_utils._gather_state_dict.__module__ == "torch.distributed._state_dict_utils"
    [item] = shared.__create_write_items__("w", shared)
    assert type(item) is theirs.WriteItem
    uninstall()

    import os
    assert "SHARDKEEP_DCP_INSTALL" not in os.environ and "PYTHONPATH" not in os.environ
    print("done")
"""


def test_before_torch_is_imported(script, tmp_path):
    """Every way to import gives ours, as one set of modules; torch's own users of it work; and all is undone."""
    assert run(script(FIRST), cwd=tmp_path) == "done\n"


LATE = """
    import pickle, sys, warnings
    import torch, torch.distributed.fsdp
    import torch.distributed.checkpoint as old
    from torch.distributed.checkpoint import save as old_save
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
    import torch.distributed.tensor._shards_wrapper as shards
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    from shardkeep.dcp_install import install, uninstall
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        install()
    [warning] = said
    assert warning.filename == __file__
    assert "stay torch's: __main__.old, __main__.old_save;" in str(warning.message), warning

    import torch.distributed.checkpoint as new
    import shardkeep.dcp
    import torch.distributed._state_dict_utils as utils
    assert new is shardkeep.dcp is torch.distributed.checkpoint is not old
    assert torch.distributed.checkpoint.metadata.Metadata is shardkeep.dcp.metadata.Metadata
    assert utils is sys.modules["shardkeep.dcp._state_dict_utils"] is torch.distributed._state_dict_utils

    # What was imported before is torch's, and works: its objects are pickled, its files have torch's names in them.
    values = [old.Metadata({"a": old.BytesStorageMetadata()}), shards.WriteItemType.SHARD, old.SavePlan([])]
    for value in values:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            again = pickle.loads(pickle.dumps(value, protocol))
            assert again == value and type(again) is type(value)
    place = sys.argv[1]
    old_save({"w": torch.arange(4.0), "o": {"x": (1,)}}, checkpoint_id=f"{place}/old")
    state = {"w": torch.zeros(4), "o": {"x": 0}}
    old.load(state, checkpoint_id=f"{place}/old")
    assert state["o"] == {"x": (1,)} and state["w"].tolist() == [0, 1, 2, 3]

    # Ours with torch's writer and reader, on a tensor that torch's module described before.
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.checkpoint.state_dict_loader import load
    assert save.__module__.startswith("shardkeep.")
    wrapped = LocalShardsWrapper([torch.ones(2, 2)], [(0, 0)])
    save({"l": wrapped, "o": {"x": (1,)}}, storage_writer=old.FileSystemWriter(f"{place}/mixed"))
    for name in ("old", "mixed"):
        assert b"shardkeep" not in open(f"{place}/{name}/.metadata", "rb").read()
    state = {"l": LocalShardsWrapper([torch.zeros(2, 2)], [(0, 0)]), "o": {"x": 0}}
    load(state, storage_reader=old.FileSystemReader(f"{place}/mixed"))
    assert state["o"] == {"x": (1,)} and state["l"].local_shards()[0].sum() == 4

    uninstall()
    assert torch.distributed.checkpoint is sys.modules["torch.distributed.checkpoint"] is old
    assert torch.distributed._state_dict_utils is not utils and torch.distributed._state_dict_utils.__file__
    import copyreg
    assert not [kind for kind in copyreg.dispatch_table if kind.__module__.startswith("torch.distributed.checkpoint")]
    assert old.filesystem.pickle is pickle
    for name in ("old", "mixed"):
        with open(f"{place}/{name}/.metadata", "rb") as file:
            assert type(pickle.load(file)) is old.Metadata
    install(), uninstall()
    assert torch.distributed.checkpoint is old
    print("done")
"""


def test_after_torch_is_imported(script, tmp_path):
    """New imports and attributes give ours; old names stay torch's, with a warning, and work; and all is undone."""
    assert run(script(LATE), str(tmp_path), cwd=tmp_path, warm=True) == "done\n"


QUIET = """
    import warnings
    warnings.simplefilter("error")
    import torch, torch.distributed.fsdp, torch.distributed.tensor._shards_wrapper
    import torch.distributed.checkpoint
    from shardkeep.dcp_install import install
    install()
    print(torch.distributed.checkpoint.__name__)
"""


def test_what_only_torch_imported_is_not_warned_of(script, tmp_path):
    """Modules of torch may have loaded the tree, and a script may reach it by attributes: nothing is lost then."""
    assert run(script(QUIET), cwd=tmp_path, warm=True) == "shardkeep.dcp\n"


CHILDREN = """
    import multiprocessing, os, subprocess, sys

    def look(put):
        sought = "torch.distributed.checkpoint"
        put.put([bool(each.find_spec(sought)) for each in sys.meta_path if hasattr(each, "awaits")])

    if __name__ == "__main__":
        from shardkeep.dcp_install import install, uninstall
        install()
        code = "from torch.distributed.checkpoint.metadata import Metadata; print(Metadata.__module__)"
        # Whether the one who waits for this import takes it: asked in the others without the seconds that torch takes.
        taken = ("import sys; print([bool(each.find_spec('torch.distributed.checkpoint'))"
                 " for each in sys.meta_path if hasattr(each, 'awaits')])")
        made = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], sys.argv[1]])}
        kinds = [
            subprocess.Popen([sys.executable, "-c", code + "; import sitecustomize; print(sitecustomize.mine)"],
                             stdout=subprocess.PIPE, text=True, env=made),
            subprocess.Popen([sys.executable, "-c", taken], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "SHARDKEEP_DCP_INSTALL": "0"}),
        ]
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=look, args=(queue,))
            process.start()
            kinds.append((process, queue))
        for kind in kinds:
            print(kind.communicate()[0].split() if isinstance(kind, subprocess.Popen) else kind[1].get())
        for process, _ in kinds[2:]:
            process.join()
        assert "torch" not in sys.modules
        uninstall()
        print(subprocess.run([sys.executable, "-c", taken], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
"""


def test_processes_started_from_here(script, tmp_path):
    """Those of subprocess, spawn and forkserver have ours, unless switched off, and so have those started later."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("mine = 'kept'\n")
    printed = run(script(CHILDREN), str(tmp_path / "site"), cwd=tmp_path).splitlines()
    ours = "shardkeep.layouts.torch_values"
    assert printed == [str([ours, "kept"]), str(["[False]"]), str([True]), str([True]), "[]"]


def test_a_process_without_shardkeep_says_so(tmp_path):
    """A Python that cannot import shardkeep has torch's, with a warning, and starts without a word."""
    import shardkeep.dcp_install

    hide = "import sys; sys.modules['shardkeep'] = None\n"
    code = hide + "import torch.distributed.checkpoint as dcp; print(dcp.__file__)"
    env = {"PYTHONPATH": shardkeep.dcp_install._STARTUP, "SHARDKEEP_DCP_INSTALL": "1"}
    done = run("-c", code, cwd=tmp_path, check=False, **env)
    assert "site-packages" in done.stdout
    assert "stays torch's: shardkeep cannot be imported here" in done.stderr
    assert run("-c", hide, cwd=tmp_path, check=False, **env).stderr == ""


SHOW = """
    import sys
    import beside
    from torch.distributed.checkpoint.planner import SavePlan
    print(__name__, sys.argv, SavePlan.__module__, beside.here)
"""


@pytest.mark.parametrize("how", ["script", "module", "torchrun"])
def test_a_script_run_by_us(script, tmp_path, how):
    """`python -m shardkeep.dcp` runs a script, or a module such as torchrun, as Python would, with ours in place."""
    script("here = 5", "beside.py")
    path = script(SHOW)
    arguments, shown = {
        "script": ([path, "a", "-b"], [path, "a", "-b"]),
        "module": (["-m", "job", "a"], [path, "a"]),
        "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", path, "a"], [path, "a"]),
    }[how]
    expected = f"__main__ {shown} shardkeep.layouts.torch_values 5\n"
    assert run("-m", "shardkeep.dcp", *arguments, cwd=tmp_path, warm=how != "script") == expected


@pytest.mark.parametrize("arguments", [(), ("-x",), ("-m",)])
def test_nothing_to_run(arguments, capsys):
    from shardkeep.dcp_install import finder
    from shardkeep.dcp_install import run as run_script

    with pytest.raises(SystemExit, match="usage: python -m shardkeep"):
        run_script(list(arguments))
    assert finder() is None


READ = """
    import pickle, sys
    from shardkeep.dcp_install import install
    install()
    with open(sys.argv[1], "rb") as file:
        values = pickle.load(file)
    print(sorted({type(value).__module__ for value in values}))
    with open(sys.argv[1], "wb") as file:
        pickle.dump(values, file)
"""


def test_pickles_between_processes_with_and_without(script, tmp_path):
    """What was pickled as torch's is ours in a process that has installed; what that one pickles is read without it."""
    import torch
    import torch.distributed.checkpoint as torchs
    from torch.distributed.checkpoint import metadata, planner

    from shardkeep.layouts.torch_values import to_ours

    box = torchs.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    table = torchs.TensorStorageMetadata(metadata.TensorProperties(torch.float16), torch.Size([2]), [box])
    index = metadata.MetadataIndex("w", [0], 1)
    whole = torchs.Metadata({"w": table, "b": torchs.BytesStorageMetadata()}, {"w": ("w",)}, {index: 5})
    item = torchs.WriteItem(
        index, planner.WriteItemType.SHARD, tensor_data=planner.TensorWriteData(box, table.properties, box.sizes)
    )
    read = torchs.ReadItem(planner.LoadItemType.BYTE_IO, index, box.offsets, index, box.offsets, box.sizes)
    values = [whole, torchs.SavePlan([item]), torchs.LoadPlan([read]), planner.WriteItemType.TENSOR, index]
    file = tmp_path / "values"
    file.write_bytes(pickle.dumps(values))
    printed = run(script(READ), str(file), cwd=tmp_path, warm=True)
    assert printed.strip() == str(["shardkeep.layouts.torch_values"])
    assert pickle.loads(file.read_bytes()) == to_ours(values)


EACH_FIRST = """
    import importlib, pkgutil, sys
    import shardkeep.dcp
    for each in pkgutil.iter_modules(shardkeep.dcp.__path__, "shardkeep.dcp."):
        if each.name.endswith("__main__"):
            continue
        for name in [name for name in sys.modules if name.startswith("shardkeep.dcp")]:
            del sys.modules[name]
        module = importlib.import_module(each.name)
        assert ("shardkeep.dcp.format_utils" in sys.modules) == (each.name == "shardkeep.dcp.format_utils"), each.name
        exec(f"from {each.name} import *", {})
    print("done")
"""


def test_each_module_may_be_the_first(script, tmp_path):
    """No order of imports leads in a circle, all that is listed exists, and the command's module is not loaded."""
    assert run(script(EACH_FIRST), cwd=tmp_path, warm=True) == "done\n"


ENDS_EARLY = """
    import sys, time, warnings
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    class Settings:
        rate = 1

    class Late(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            time.sleep(0.5)
            return super().create_local_plan()

    if __name__ == "__main__":
        kind = AsyncCheckpointerType(sys.argv[1])
        state = {"w": torch.ones(3), "settings": Settings()}
        dcp.async_save(state, checkpoint_id=sys.argv[2], planner=Late(), async_checkpointer_type=kind)
        print(dcp.__name__, sys.modules["__main__"].Settings is Settings, __file__)
"""


@needs_late_threads
@pytest.mark.parametrize(("how", "kind"), [("script", "thread"), ("module", "process")])
def test_saves_that_outlive_a_script_run_by_us(script, tmp_path, how, kind):
    """The script's classes are there until its last save has ended, for that save and for processes it has started."""
    path = script(ENDS_EARLY, "job.py")
    target = {"script": ["job.py"], "module": ["-m", "job"]}[how]
    done = run("-m", "shardkeep.dcp", *target, kind, "saved", cwd=tmp_path, check=False, warm=True)
    assert (done.stdout.split(), done.stderr) == (["shardkeep.dcp", "True", path], "")
    assert (tmp_path / "saved" / ".metadata").exists()


@pytest.mark.parametrize(
    ("target", "as_module", "said"),
    [
        ("nowhere", True, "No module named nowhere"),
        ("nothing_here", True, "cannot be directly executed"),
        ("nothing_here", False, "nothing_here"),
        ("absent.py", False, "absent.py"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path, monkeypatch, target, as_module, said):
    from shardkeep.dcp_install import run_as_main

    (tmp_path / "nothing_here").mkdir()
    (tmp_path / "nothing_here" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises((SystemExit, OSError), match=said):
        run_as_main(target, as_module=as_module)
