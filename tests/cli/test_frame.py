"""The frame around all commands: help, mistakes, JSON, exit codes, pipes, and what is imported."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import shardkeep as sk
from shardkeep.cli import main as frame
from shardkeep.cli import output
from shardkeep.cli.main import SUMMARIES
from shardkeep.cli.output import Table, did_you_mean, format_age, format_size, printable, shorten, shorten_name
from shardkeep.options import available_memory, container_memory
from tests.support.terminal import terminal

SHARDKEEP = [sys.executable, "-m", "shardkeep"]


def test_alone_it_names_every_command(shardkeep):
    """`shardkeep` alone is no error: it lists what there is, in 80 columns."""
    answer = shardkeep()
    assert answer.code == 0
    assert all(name in answer.out for name in SUMMARIES)
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.parametrize("name", sorted(SUMMARIES))
def test_every_command_has_help_with_examples(shardkeep, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    answer = shardkeep(name, "--help")
    assert answer.code == 0
    assert "--json" in answer.out
    assert f"shardkeep {name}" in answer.out.partition("examples:")[2]
    assert max(map(len, answer.out.splitlines())) <= 80


def example_lines():
    """The example lines of all commands that can be run here: not those of shells, nor what takes minutes."""
    for name in SUMMARIES:
        for line in frame.load_command(name).examples.splitlines():
            words = shlex.split(line.strip().partition("   ")[0])
            if words[:1] == ["shardkeep"] and name not in {"bench", "completion"} and "|" not in words:
                yield pytest.param(words[1:], id=" ".join(words[1:]))


@pytest.fixture(scope="module")
def place_of_examples(tmp_path_factory):
    place = tmp_path_factory.mktemp("examples")
    state = {"model": {"layers": {"0": {"weight": torch.randn(8, 8)}}, "net": {"x.ema": torch.ones(2)}}, "step": 1}
    for run, step in (("a", 500), ("a", 600), ("b", 500)):
        meta = {"metrics": {"loss": 0.5, "accuracy": 0.5}}
        saved = {**state, "optimizer": {"m": torch.ones(3)}}
        sk.save(saved, place / "runs" / run / f"step-{step}", step=step, meta=meta)
    (place / "base-model").mkdir()
    (place / "base-model" / "config.json").write_text("{}")
    shutil.copytree(place / "runs" / "a" / "step-500", place / "step-500")
    sk.export(place / "step-500", place / "hf", dtype="bf16")
    sk.convert(place / "step-500", place / "dcp-checkpoint", "dcp")
    return place


@pytest.mark.parametrize("words", list(example_lines()))
def test_the_examples_of_the_help_work(shardkeep, place_of_examples, tmp_path, monkeypatch, words):
    shutil.copytree(place_of_examples, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    os.makedirs("out")
    if "dcp-checkpoint" in words:
        shutil.rmtree("runs/a/step-500")
    more = ["--yes"] if words[0] == "prune" and "--dry-run" not in words and "--yes" not in words else []
    answer = shardkeep(*words, *more)
    assert (answer.code, answer.err if words[0] != "convert" else "") == (0, ""), answer.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sohw", "x"], "did you mean show"),
        (["frobnicate"], "there is no command 'frobnicate'"),
        (["--json", "ls"], "the command comes first"),
        (["ls", "x", "--jsno"], "did you mean --json"),
        (["ls"], "ls: needs PATH\n"),
        (["diff"], "diff: needs A"),
        (["completion", "powershell"], "fish"),
        (["ls", "x", "--limit", "many"], "invalid int value"),
    ],
)
def test_mistakes_are_explained(shardkeep, words, said):
    answer = shardkeep(*words)
    assert answer.code == 2
    assert said in answer.err
    if "--json" not in words:
        assert answer.out == ""


def test_errors_are_json_too(shardkeep, tmp_path):
    answer = shardkeep("ls", tmp_path / "nothing", "--json")
    assert answer.code == 2
    assert answer.json["error"]["kind"] == "CheckpointNotFound"
    assert "no committed checkpoint" in answer.err


def test_a_bug_is_not_a_finding(shardkeep, monkeypatch):
    """An unexpected exception exits with 2, not with the 1 of a command that ran, and shows its traceback."""
    monkeypatch.setattr(frame, "_run", lambda words: 1 // 0)
    answer = shardkeep("ls", "x")
    assert answer.code == 2
    assert "ZeroDivisionError" in answer.err
    assert "please report" in answer.err


LOOKING = [
    "ls {run}",
    "ls {run}/step-30 --long",
    "du {run}",
    "du {run}/step-30",
    "cat {run}/step-30",
    "latest {run}",
    "verify {run}",
    "verify {run} --quick",
    "prune {run} --keep-last 1 --dry-run",
    "diff {run}/step-30 {run}/step-30",
    "diff {run}/step-30 {run}/step-20 --keys-only",
    "show {run}/step-30 step",
    "completion bash",
    "doctor {run}",
    "pin {run}/step-10",
    "unpin {run}/step-10",
]


def test_looking_imports_no_torch(run_dir):
    commands = [command.format(run=run_dir).split() for command in LOOKING]
    script = (
        "import sys; from shardkeep.cli.main import main\n"
        f"for words in {commands!r}:\n"
        "    code, heavy = main(words), {'torch', 'rich'} & set(sys.modules)\n"
        "    if code or heavy: sys.exit(f'{words}: {code}, imported {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_silent(checkpoint):
    command = f"{' '.join(SHARDKEEP)} ls {checkpoint} -l | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*SHARDKEEP, "cat", checkpoint], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_ends_with_130(monkeypatch):
    def interrupted(words):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(frame, "_run", interrupted)
    assert frame.main(["ls", "x"]) == 130


def in_terminal(words, environment):
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "PAGER": "cat", **environment}
    command = [*SHARDKEEP, *map(str, words)]
    with terminal() as (screen, written):
        done = subprocess.run(command, stdout=screen, stderr=screen, env=env, timeout=60, check=False)
    return done.returncode, written[0]


def test_colours_only_on_a_terminal_and_not_against_the_users_will(checkpoint, shardkeep):
    """A terminal gets colours and lines of 80 columns, one with NO_COLOR no colours, a pipe neither."""
    code, coloured = in_terminal(["ls", checkpoint, "--long"], {})
    assert code == 0
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    chunk_lines = [line for line in plain.splitlines() if ".safetensors" in line]
    assert chunk_lines
    assert max(map(len, chunk_lines)) <= 80
    assert "\x1b[" not in in_terminal(["ls", checkpoint], {"NO_COLOR": "1"})[1]
    assert "\x1b[" not in shardkeep("ls", checkpoint).out


PAGER = {"PAGER": "sed s/^/paged:/"}


def test_output_is_paged_on_a_terminal(checkpoint):
    """Looking goes through $PAGER, in colour and in lines of the terminal's width."""
    code, seen = in_terminal(["ls", checkpoint, "-l"], PAGER)
    assert (code, "\x1b[" in seen) == (0, True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", seen).splitlines()
    assert all(line.startswith("paged:") for line in lines)
    assert f"paged:{checkpoint}" in lines[0]  # whole, however long it is, so that it can be copied
    assert max(map(len, lines[1:])) <= len("paged:") + 80


@pytest.mark.parametrize(
    ("words", "environment", "terminal"),
    [
        (["ls", "{it}"], PAGER, False),
        (["ls", "{it}", "--no-pager"], PAGER, True),
        (["verify", "{it}"], PAGER, True),
        (["ls", "{it}"], {"PAGER": ""}, True),
        (["ls", "{it}"], {"PAGER": "no-such-program"}, True),
        (["ls", "{it}"], {**PAGER, "TERM": "dumb"}, True),
    ],
)
def test_output_is_not_paged(checkpoint, capfd, monkeypatch, words, environment, terminal):
    """In a pipe, against the user's will, of commands that act, or without a pager, output comes as it is."""
    monkeypatch.setattr(output, "is_terminal", lambda stream=None: terminal)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    assert frame.main([word.format(it=checkpoint) for word in words]) == 0
    seen = capfd.readouterr().out
    assert ("paged:" in seen, "step-30" in seen) == (False, True)


def test_a_pager_that_is_closed_early_is_no_error(checkpoint, capfd, monkeypatch):
    monkeypatch.setattr(output, "is_terminal", lambda stream=None: True)
    monkeypatch.setenv("PAGER", "true")
    monkeypatch.setenv("TERM", "xterm")
    assert frame.main(["ls", str(checkpoint), "--long"]) in {0, 141}
    assert "Traceback" not in capfd.readouterr().err


SLOW_PAGER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(1)
sys.stdin.read()
"""


def test_ctrl_c_is_for_the_pager(tmp_path):
    """The pager keeps the terminal, reads what it got, and ends; the command ends with it."""
    sk.save({f"a-key-of-some-length-{n:05}": torch.ones(1) for n in range(3000)}, tmp_path / "ck")
    (tmp_path / "pager.py").write_text(SLOW_PAGER)
    started = tmp_path / "started"
    env = {**os.environ, "TERM": "xterm", "PAGER": shlex.join([sys.executable, f"{tmp_path}/pager.py", str(started)])}
    words = [*SHARDKEEP, "ls", tmp_path / "ck"]
    with terminal() as (screen, _):
        job = subprocess.Popen(words, stdout=screen, stderr=screen, env=env, start_new_session=True)
        try:
            while not started.exists():
                assert job.poll() is None
                time.sleep(0.02)
            time.sleep(0.2)  # by now the pipe is full
            os.killpg(job.pid, signal.SIGINT)
            assert job.wait(timeout=30) == 0
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


@pytest.fixture(scope="module")
def wide_run(tmp_path_factory):
    """A run whose keys, values and metrics do not fit into 80 columns."""
    root = tmp_path_factory.mktemp("wide") / "a-run-with-quite-a-long-name"
    for step in (10, 20):
        names = [f"model.decoder.layers.{n}.self_attention.query_key_value_projection.weight" for n in (2, 10)]
        state = {name: torch.full((128, 256), step / n) for n, name in enumerate(names, 3)}
        state["config"] = {"description": "words " * 30, "lr": step * 3.14159265358979e-05}
        metrics = {f"validation/perplexity_of_set_{n}": 1.23456789 * n * step for n in range(6)}
        sk.save(state, root / f"step-{step}", step=step, meta={"metrics": metrics})
    next((root / "step-10").glob("*.safetensors")).write_bytes(b"")
    return root


@pytest.mark.parametrize(
    "words",
    [
        "ls {run}",
        "ls {run}/step-20",
        "ls {run}/step-20 --tree",
        "ls {run}/step-20 --long",
        "du {run}/step-20 --depth 0",
        "show {run}/step-20 model",
        "diff {run} --keys-only",
        "diff {run} config",
        "verify {run}",
        "prune {run} --keep-last 1 --dry-run",
        "doctor {run}",
    ],
)
def test_no_word_or_number_is_cut_in_two(shardkeep, wide_run, words, monkeypatch):
    monkeypatch.chdir(wide_run.parent)
    arguments = words.format(run=wide_run.name).split()
    piped = shardkeep(*arguments).out
    monkeypatch.setattr(output, "is_terminal", lambda stream=None: True)
    for name, value in {"COLUMNS": "80", "NO_COLOR": "1", "PAGER": "cat"}.items():
        monkeypatch.setenv(name, value)
    seen = shardkeep(*arguments).out
    assert max(map(len, seen.splitlines())) <= 80, seen
    figure = r"[\d.]+ \w+" if words.startswith("doctor") else r"[\d.]+ (?:[µm]?s|GB)\b"  # these change between calls
    shown = re.sub(rf"{figure}|not shown, for lack of room:", "", seen)
    assert set(re.findall(r"\w+", shown)) <= set(re.findall(r"\w+", piped)), seen


def test_long_work_shows_a_progress_bar(checkpoint):
    """Reading that takes long shows how far it is, on a terminal, and leaves nothing of the bar behind for stdout."""
    code, seen = in_terminal(["verify", checkpoint], {})
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert "step-30 ━" in plain
    assert "ok  " in plain[plain.rindex("━") :]


def test_errors_fit_the_terminal(run_dir):
    code, seen = in_terminal(["show", run_dir / "step-30", "model.layers.10.weihgt"], {"NO_COLOR": "1"})
    assert code == 2
    assert max(map(len, seen.splitlines())) <= 80
    assert "  hint: did you mean model.layers.10.weight" in seen


def test_doctor_says_what_a_bug_report_needs(shardkeep, run_dir, monkeypatch):
    """Versions, limits, options without secrets, what the place can do; its probe is gone afterwards."""
    monkeypatch.setenv("SHARDKEEP_KEY", "very-secret")
    monkeypatch.setenv("SHARDKEEP_IO_THREADS", "3")
    before = sorted(run_dir.rglob("*"))
    answer = shardkeep("doctor", run_dir, "--json")
    assert sorted(run_dir.rglob("*")) == before
    found = answer.json
    assert (answer.code, found["failed"], "secret" in answer.out.replace("(a secret)", "")) == (0, None, False)
    assert (found["versions"]["shardkeep"], found["versions"]["torch"]) == (sk.__version__, torch.__version__)
    assert found["options"]["io_threads"] == found["options"]["$SHARDKEEP_IO_THREADS"] == "3"
    assert found["options"]["staging_bytes"].startswith("0: as much as needed")
    assert {"memory", "memory of the container", "open files"} <= found["machine"].keys()
    assert {"file system", "free space", "direct I/O", "commits"} <= found["place"].keys()
    text = shardkeep("doctor", run_dir).out
    assert all(part in text for part in ("versions\n", "  cores ", "place\n", "what would be slow\n"))


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [("IO_THREADS", "many", "a whole number"), ("DIRECT_IO", "yes", "0 or 1"), ("PINNED_BYTES", "4 gigs", "4 gigs")],
)
def test_a_variable_that_is_no_number(shardkeep, run_dir, monkeypatch, name, value, accepted):
    """The error names the variable, its value and what is accepted, in the library and on the command line."""
    monkeypatch.setenv(f"SHARDKEEP_{name}", value)
    with pytest.raises(sk.StateError, match=rf"SHARDKEEP_{name}.*'{value}'"):
        sk.load({}, run_dir / "step-30")
    answer = shardkeep("ls", run_dir / "step-30")
    assert answer.code == 2
    assert all(part in answer.err for part in (f"SHARDKEEP_{name}", repr(value), accepted)), answer.err


def make_files(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


UNLIMITED = str((1 << 63) - 4096)


@pytest.mark.parametrize(
    ("groups", "files", "limit", "free"),
    [
        ("0::/a/b", {"a/memory.max": "5000", "a/memory.current": "3000", "a/b/memory.max": "max"}, 5000, 3000),
        ("0::/../hidden", {"memory.max": "9000", "memory.current": "8500"}, 9000, 1500),
        ("4:cpu:/x\n5:memory:/a", {"memory/a/memory.limit_in_bytes": "7000", "memory/a/memory.usage_in_bytes": "7000"}, 7000, 1000),
        ("5:memory:/", {"memory/memory.limit_in_bytes": UNLIMITED, "memory/memory.usage_in_bytes": "5"}, 0, 10240),
        ("", {}, 0, 10240),
    ],
)  # fmt: skip
def test_the_limits_of_containers_are_respected(tmp_path, groups, files, limit, free):
    """Both versions of control groups, those above a process's own too; what the page cache holds counts as free."""
    stats = {f"{os.path.dirname(name)}/memory.stat": "inactive_file 1000\ntotal_inactive_file 1000" for name in files}
    found = {f"sys/fs/cgroup/{name}": text for name, text in (files | stats).items()}
    root = make_files(tmp_path, {"proc/self/cgroup": groups, "proc/meminfo": "MemAvailable: 10 kB\n", **found})
    assert (container_memory(root), available_memory(root)) == (limit, free)


def test_doctor_of_a_place_that_cannot_be_used(shardkeep, tmp_path, monkeypatch):
    """A place that refuses to write is reported, with exit code 1; one that does not exist is a mistake."""

    def refuse(store, name, nbytes=None):
        raise sk.StorageError("nothing to delete" if nbytes is None else "the disk is tired")

    monkeypatch.setattr(sk.LocalStore, "create", refuse)
    monkeypatch.setattr(sk.LocalStore, "delete", refuse)  # the first failure is the one to report
    answer = shardkeep("doctor", tmp_path)
    assert (answer.code, "the disk is tired" in answer.err, "free space" in answer.out) == (1, True, True)
    assert shardkeep("doctor", tmp_path / "nothing").code == 2


def test_letters_a_terminal_lacks_are_spelt_out(checkpoint):
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [*SHARDKEEP, "ls", checkpoint, "--tree"], capture_output=True, env=env, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u2514" in done.stdout


def test_small_texts():
    """Sizes, ages, names and guesses are said as people say them, and names cannot steer a terminal."""
    sizes = [format_size(n) for n in (0, 999, 1000, 9_995, 12_345, 999_499, 999_500, 1_500_000_000_000)]
    assert sizes == ["0 B", "999 B", "1.00 kB", "10.0 kB", "12.3 kB", "999 kB", "1.00 MB", "1.50 TB"]
    assert [format_age(s) for s in (-1, 5, 60, 3600, 86400, 200000)] == ["0 s", "5 s", "1 min", "1 h", "24 h", "2 d"]
    assert printable("a\x1b[2Jb\nc") == "a\\x1b[2Jb\\nc"
    assert shorten_name(f"model-00000-of-00002-{'a1' * 10}.safetensors", 40) == "model-00000-of-00002-….safetensors"
    assert shorten("[0.00019635254915624216, 0.1]", 28) == "[0.00019635254915624216, …"
    assert did_you_mean("modle", ["model", "optim"]) == "did you mean model?"
    many = [f"model.layers.{n}.weight" for n in range(5000)]
    assert "model.layers.42.weight" in did_you_mean("model.layers.42.weigth", many)


def test_tables_leave_out_what_is_empty(capsys):
    table = Table(("key", "note", "size"), right={"size"})
    table.add("a", "", "1")
    table.add("bb", "", "100", note="remark")
    table.print()
    assert capsys.readouterr().out == "key  size\na       1\nbb    100\n  remark\n"
