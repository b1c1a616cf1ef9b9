"""`shardkeep completion`: the script in a real bash completes commands, options, directories and keys."""

import subprocess
import sys

import pytest


def complete(script, line, cwd, path):
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f"export PATH={path}:$PATH\nsource {script}\n"
        "complete -p shardkeep >/dev/null || exit 3\n"
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; COMP_POINT={len(line)}\n"
        "$(complete -p shardkeep | sed 's/.*-F \\([^ ]*\\).*/\\1/') shardkeep\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", program], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def script(shardkeep, tmp_path):
    """The script for bash, and a `shardkeep` to call from it."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "shardkeep"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardkeep "$@"\n')
    command.chmod(0o755)
    answer = shardkeep("completion", "bash")
    assert answer.code == 0
    (tmp_path / "completion.sh").write_text(answer.out)
    return tmp_path / "completion.sh"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("shardkeep ve", {"verify"}),
        ("shardkeep d", {"du", "diff", "doctor"}),
        ("shardkeep diff --keys", {"--keys-only"}),
        ("shardkeep completion ", {"bash", "zsh", "fish"}),
        ("shardkeep ls ru", {"run"}),
        ("shardkeep diff run/step-10 run/step-2", {"run/step-20"}),
        ("shardkeep show run/step-30 model.layers.1", {"model.layers.10.bias", "model.layers.10.weight"}),
    ],
)
def test_bash_completes(script, run_dir, line, expected):
    """Commands, options, choices, directories and the keys of the checkpoint named before."""
    found = complete(script, line, run_dir.parent, script.parent / "bin")
    assert {word.rstrip("/") for word in found} == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(shardkeep, shell):
    """Each script names the commands and their options; JSON holds the same script."""
    answer = shardkeep("completion", shell)
    assert answer.code == 0
    assert "keep-last" in answer.out
    assert "verify" in answer.out
    assert shardkeep("completion", shell, "--json").json["script"] + "\n" == answer.out
