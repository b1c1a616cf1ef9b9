"""The recipes of CONTRIBUTING.md work as they are printed: a store, a codec and a command."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep.cli import main
from tests.docs.fences import fences_of

ROOT = Path(__file__).parents[2]
RECIPES = {fence.title: fence.body for fence in fences_of((ROOT / "CONTRIBUTING.md").read_text()) if fence.title}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Import a recipe under the name that it would have in src/."""

    def load(title):
        path = tmp_path / Path(title).name
        path.write_text(RECIPES[title])
        name = f"shardkeep.{title.removesuffix('.py').replace('/', '.')}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("title", RECIPES)
def test_recipes_are_short(title):
    """A recipe has about 20 lines of code."""
    lines = [line for line in RECIPES[title].splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 20


def test_a_store(tmp_path):
    (tmp_path / "logged.py").write_text(RECIPES["storage/logged.py"])
    test = RECIPES["tests/storage/test_logged.py"].replace("shardkeep.storage.logged", "logged")
    (tmp_path / "test_logged.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_logged.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout


def test_a_codec(recipe, tmp_path):
    """A checkpoint that went through the codec is smaller and loads exactly."""
    deflate = sk.register_codec(recipe("codecs/deflate.py").Deflate)
    state = {"w": torch.arange(100_000) % 7}
    sk.save(state, tmp_path / "step-1", codecs=[deflate(level=9)])
    loaded = {"w": torch.zeros(100_000, dtype=torch.int64)}
    sk.load(loaded, tmp_path / "step-1")
    assert torch.equal(state["w"], loaded["w"])
    assert sum(file.stat().st_size for file in (tmp_path / "step-1").iterdir()) < 100_000


def test_a_command(recipe, tmp_path, monkeypatch, capsys):
    recipe("cli/count.py")
    monkeypatch.setitem(main._MODULES, "count", "count")
    monkeypatch.setitem(main.SUMMARIES, "count", "count parameters")
    sk.save({"model": {"w": torch.ones(3, 4)}, "other": torch.ones(5)}, tmp_path / "step-1")
    assert main.main(["count", str(tmp_path / "step-1")]) == 0
    assert capsys.readouterr().out == "12 parameters\n"
    assert main.main(["count", str(tmp_path / "step-1"), "--json"]) == 0
    assert capsys.readouterr().out == '{"count": 12}\n'
    assert main.main(["count", "--help"]) == 0
    assert "shardkeep count runs/a/step-500" in capsys.readouterr().out
