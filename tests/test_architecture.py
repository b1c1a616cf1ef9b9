"""The structure of src/: imports go one way and have no cycles, and some constructs are forbidden."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import shardkeep

SRC = Path(shardkeep.__file__).parent
LAYERS = [
    {"__main__"},
    {"cli"},
    {"dcp", "testing"},
    {"startup"},
    {"dcp_install"},
    {"manage", "conversion"},
    {"saving", "loading", "opening", "reports"},
    {"engine"},
    {"layouts", "plan"},
    {"codecs"},
    {"state", "storage"},
    {"format", "dist"},
    {"options"},
    {"errors"},
    {"events", "_version"},
    {"display"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FORBIDDEN = ("torch.distributed.checkpoint", "torch.distributed._state_dict_utils")
MODULES = sorted(SRC.rglob("*.py"))
STORES = {"LocalStore", "MemoryStore", "ObjectStore", "FsspecStore"}


def name_of(path):
    return ".".join(["shardkeep", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")


PATHS = {name_of(path): path for path in MODULES}


def imports_of(path, *, typing=True):
    """All modules that a file imports, also inside functions and, with `typing`, for annotations only."""
    nodes = [ast.parse(path.read_text())]
    for node in nodes:  # grows during the loop
        if not typing and isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from {name if name in PATHS else node.module or "" for name in names}


def part_of(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def test_modules_have_no_import_cycle():
    """No module imports itself through others, not even inside functions. Imports for annotations do not count."""
    graph = {name: {*imports_of(path, typing=False)} & PATHS.keys() for name, path in PATHS.items()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_go_one_way(path):
    mine = part_of(path)
    if mine == "__init__":
        return
    for name in imports_of(path):
        assert not name.startswith(FORBIDDEN), f"{path} imports {name}"
        if not name.startswith("shardkeep."):
            continue
        other = name.split(".")[1]
        if other in LEVEL and other != mine:
            assert LEVEL[other] > LEVEL[mine], f"{mine} ({path.name}) must not import {other}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SRC)))
def test_modules_keep_the_house_style(path):
    """No assert, no bare except, and every module has a docstring."""
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}: assert"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{path}:{node.lineno}: bare except"


def test_only_options_reads_the_environment():
    readers = {
        str(path.relative_to(SRC))
        for path in MODULES
        if any(
            isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")
            for n in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert {name for name in readers if not name.startswith("cli/")} == {"options.py"}


def test_only_storage_knows_the_classes_of_stores():
    """Outside of storage/, code asks a store for what it can do, and never for its class."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "isinstance"
                and part_of(path) != "storage"
            ):
                names = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                assert not names & STORES, f"{path}:{node.lineno}: isinstance of {names & STORES}"


def test_the_public_names_are_exactly_those_listed():
    """Everything in `__all__` exists, type checkers see the same names, and `dir` shows nothing else."""
    seen = [node for node in ast.walk(ast.parse(PATHS["shardkeep"].read_text())) if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname for node in seen for alias in node.names if alias.asname == alias.name}
    assert {*typed, *shardkeep.errors.__all__, "__version__"} == set(shardkeep.__all__)
    assert all(getattr(shardkeep, name) is not None for name in shardkeep.__all__)
    assert sorted(dir(shardkeep)) == sorted(shardkeep.__all__)


def test_what_is_not_imported(tmp_path):
    """Opening, listing and verifying, of any layout, do not import torch; loading meta tensors does not import sympy."""
    import torch
    from safetensors.torch import save_file

    state = {"w": torch.ones(3), "part": torch.ones(4, 4)[::2, ::3], "step": 1}
    run, file, model = tmp_path / "run", tmp_path / "file.pt", tmp_path / "model.safetensors"
    shardkeep.save(state, run / "step-1", step=1)
    torch.save(state, file)
    save_file({"w": state["w"]}, model)
    script = (
        "import sys, shardkeep as sk\n"
        "run, *places = sys.argv[1:]\n"
        "assert sk.Catalog(run).latest().step == 1\n"
        "for place in places:\n"
        "    ck = sk.open(place)\n"
        "    assert list(ck)[-1] == 'w' and ck['w'].shape == (3,) and ck['w'].stored_dtype.name == 'float32'\n"
        "    assert ck.get('step', 1) == 1\n"
        "    ck.verify()\n"
        "    assert 'torch' not in sys.modules, f'{place}: torch was imported'\n"
        "import torch; before = 'sympy' in sys.modules\n"
        "sk.load({'w': torch.empty(3, device='meta')}, places[-1])\n"
        "assert before or 'sympy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, run, run / "step-1", file, model], check=True, timeout=60)
