"""What the documentation says is what happens: its snippets run, its tables are the code's."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shardkeep.format.dtypes import TABLE

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


class Model(nn.Module):
    """Whatever a snippet calls `model`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])


@pytest.mark.filterwarnings("ignore:torch.distributed is not in use")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    """
    Every Python block of a page runs, in order, in one namespace that has a model and its optimizer.
    """
    monkeypatch.chdir(tmp_path)
    model = Model()
    names = {"torch": torch, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("module", ["saving", "loading", "opening"])
def test_docstring_examples_run(module):
    """
    Examples in the public docstrings give the results they show.
    """
    result = doctest.testmod(importlib.import_module(f"shardkeep.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_format_page_has_every_dtype_code():
    """
    The table of codes on the format page is the one in the code.
    """
    page = (ROOT / "docs" / "format.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (\d+) \| (\w+) \|$", page, re.MULTILINE)
    assert [(int(code), name, int(size)) for code, name, size, _ in rows] == [
        (r.code, r.name, r.itemsize) for r in TABLE
    ]
    assert [kind for *_, kind in rows] == [row.safetensors or "U8" for row in TABLE]


def test_links_lead_somewhere():
    """
    Relative links in the documentation point at files that exist.
    """
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example, tmp_path):
    """
    Every example runs as its first lines say, from an empty folder.
    """
    command = re.search(r"^    (?:\$ )?((?:python|torchrun).*)$", example.read_text(), re.MULTILINE)
    words = command.group(1).split() if command else ["python", str(example)]
    words = [str(example) if word.endswith(".py") else word for word in words if not word.startswith("[")]
    launcher = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]]
    subprocess.run([*launcher, *words[1:]], cwd=tmp_path, check=True, timeout=120)
