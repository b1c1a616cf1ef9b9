"""What the documentation says is what happens: its snippets run, its commands print what it shows, its tables are the code's."""

import doctest
import importlib
import importlib.metadata
import logging
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardkeep as sk
from shardkeep.cli.main import SUMMARIES
from shardkeep.format.dtypes import DTYPES
from tests.docs.fences import commands_of, fences_of
from tests.docs.masks import masked
from tests.docs.running import Reader, on_ranks
from tests.docs.troubles import TROUBLES, text_of
from tests.docs.variables import VARIABLES, table, variables_read
from tests.test_architecture import LAYERS
from tests.warm.python import warm_python

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
ALL_PAGES = [ROOT / "README.md", *PAGES]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix(""))


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty folder; whatever a page does to the log is undone."""
    monkeypatch.chdir(tmp_path)
    root, ours = logging.getLogger(), logging.getLogger("shardkeep")
    before = [(log, log.handlers[:], log.level) for log in (root, ours)]
    yield tmp_path
    for log, handlers, level in before:
        log.handlers[:] = handlers
        log.setLevel(level)


@pytest.mark.filterwarnings("ignore:torch.distributed is not in use")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_snippets_run(page, alone, rank_pool):
    """Every block of a page runs, in order, with the packages it says to install, and prints what the page says."""
    if "transformers" in page.read_text() and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    for fence, printed in Reader(page, rank_pool).follow():
        assert masked(fence.body) == masked(printed), f"{page}, line {fence.line}: python -m tests.docs.refresh {page}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_every_block_is_run_or_says_why_not(page):
    """
    A block is Python, a console or plain text; the only ones that do not run are those that install something. Lines of
    80 characters fit on the site, in a window of 1280 pixels; longer lines of plain text are wrapped there.
    """
    for fence in fences_of(page.read_text()):
        assert fence.language == "text" or max(map(len, fence.body.splitlines())) <= 80, f"{page}, line {fence.line}"
        assert fence.language in {"python", "console", "text"}, f"{page}, line {fence.line}"
        assert not set(fence.options) - {"title"}, f"{page}, line {fence.line}"
        if fence.skipped:
            assert all(each.words.startswith("pip install ") for each in commands_of(fence)), (
                f"{page}, line {fence.line}"
            )
        if fence.language == "text" and fence.title:
            assert fence.is_output or fence.title in TROUBLES, f"{page}, line {fence.line}"
    assert page.read_text().count("```") == 2 * len(fences_of(page.read_text())), f"{page}: a block is not closed"


@pytest.mark.parametrize("kind", TROUBLES)
def test_the_troubleshooting_page_has_what_is_really_said(kind, alone):
    """Each error of the page happens, and its text is the one that is shown there."""
    page = (DOCS / "troubleshooting.md").read_text()
    [shown] = [fence.body for fence in fences_of(page) if fence.title == kind]
    assert masked(shown) == masked(text_of(kind))
    assert f"### {kind}\n" in page


def test_the_troubleshooting_page_has_every_error():
    """No public error is missing from the page."""
    public = {name: getattr(sk, name) for name in sk.__all__}
    found = {name for name, each in public.items() if isinstance(each, type) and issubclass(each, Exception)}
    assert found <= set(TROUBLES)


def test_the_site_builds(tmp_path):
    """The site builds without a warning, needs no network, and has every public name in its API reference."""
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed")
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings-python is not installed")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    reference = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert [name for name in sk.__all__ if f'id="shardkeep.{name}"' not in reference] == []
    for page in site.glob("**/*.html"):
        asked = re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="(https?://[^"]*)"', page.read_text())
        assert asked == [], f"{page.name} needs the network"
        assert "```" not in page.read_text(), f"a block of {page.name} was not understood"


@pytest.mark.parametrize(
    "module",
    [
        "saving", "loading", "opening", "events", "conversion.api", "manage.catalog",
        "manage.checkpointer", "manage.retention", "reports.progress", "reports.trace",
    ],
)  # fmt: skip
def test_docstring_examples_run(module):
    """Examples in the public docstrings give the results they show."""
    result = doctest.testmod(importlib.import_module(f"shardkeep.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_format_page_has_every_dtype_code():
    """The table of codes on the format page is the one in the code."""
    page = (DOCS / "format.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (\d+) \| (\w+) \|$", page, re.MULTILINE)
    assert [(int(code), name, int(size)) for code, name, size, _ in rows] == [
        (r.code, r.name, r.itemsize) for r in DTYPES
    ]
    assert [kind for *_, kind in rows] == [row.safetensors or "U8" for row in DTYPES]


def test_every_environment_variable_is_described():
    """The page has one table, made from the code, with every variable that the code reads."""
    assert table() in (DOCS / "environment.md").read_text(), "python -m tests.docs.refresh docs/environment.md"
    assert variables_read() == set(VARIABLES)
    named = {name for page in ALL_PAGES for name in re.findall(r"\bSHARDKEEP_[A-Z_]+\b", page.read_text())}
    assert named - set(VARIABLES) == set()


def test_the_start_page_has_every_extra():
    """The extras that can be installed are those that the start page describes."""
    table = (DOCS / "start.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]
    shown = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1] if line else "")}
    assert shown == set(importlib.metadata.metadata("shardkeep").get_all("Provides-Extra"))


def test_readme_is_up_to_date():
    """The README begins as the home page does, and lists the commands of the command line."""
    first = [
        next(fence.body for fence in fences_of(page.read_text()) if fence.language == "python")
        for page in (ROOT / "README.md", DOCS / "index.md")
    ]
    assert first[0] == first[1]
    [listed] = re.findall(r"`shardkeep (ls[\s\w|]+)`", (ROOT / "README.md").read_text())
    assert [name.strip() for name in listed.split("|")] == list(SUMMARIES)


def test_the_architecture_page_is_true():
    """Folders and layers on the architecture page are those that a test enforces; modules that it names exist."""
    page = (DOCS / "architecture.md").read_text()
    source = Path(sk.__file__).parent
    there = {path.stem for path in source.iterdir() if path.stem[0] != "_" and path.suffix in ("", ".py")}
    shown = re.findall(r"^ +(\d+) (\w+)(?:/|\.py) ", page, re.MULTILINE)
    layers = [names & there for names in LAYERS if names & there]
    assert {(int(number), name) for number, name in shown} == {
        (number, name) for number, names in enumerate(layers, 1) for name in names
    }
    named = {name.rstrip("/") for name in re.findall(r"`((?:\w+/)+\w*)(?:\.\w+)*`", page)}
    files = [(source / name, source / f"{name}.py", ROOT / name, ROOT / f"{name}.py") for name in sorted(named)]
    assert [str(paths[0]) for paths in files if not any(path.exists() for path in paths)] == []
    assert len(page.splitlines()) <= 150, "it should fit on three screens"


def test_links_lead_somewhere():
    """Relative links in the documentation point at files that exist."""
    for page in [*ALL_PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example, alone, rank_pool):
    """Every example runs as its first lines say, from an empty folder."""
    [command] = re.findall(r"^    ((?:python|torchrun) [^\[\n]*)", example.read_text(), re.MULTILINE)
    words = [str(example) if word.endswith(".py") else word for word in command.split()]
    if words[0] == "python":
        done = warm_python(*words[1:], cwd=alone)
        assert done.returncode == 0, done.stderr
    else:
        # What torchrun would start; torchrun itself is run by tests/manage/test_signals.py.
        on_ranks(rank_pool, " ".join(words))
