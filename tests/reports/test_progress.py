"""The progress bar, in a terminal and where there is none."""

import contextlib
import io
import os
import pty
import re
import sys
import threading
from unittest import mock

import pytest
import torch

import shardkeep as sk
from tests.asynchronous.scene import broken
from tests.reports import scene
from tests.support.terminal import start_reading, terminal

pytest.importorskip("rich")

OPTIONS = sk.Options(io_threads=1, host_budget_bytes=16 << 20)
"""One thread and windows of 8 MiB."""
SIZE = 8 << 20
"""Numbers in the tensor: four windows."""
LONG_S = 0.25
"""For a window, so that each is drawn: ten times a second."""


@contextlib.contextmanager
def terminal_for_errors():
    """Let standard error be a terminal of 80 columns; at the end, give what it got, without colours and movements."""
    shown = []
    before = sys.stderr
    with terminal() as (screen, written), mock.patch.dict(os.environ, TERM="xterm", COLUMNS="80", LINES="24"):
        try:
            with open(screen, "w", closefd=False) as sys.stderr:
                yield shown
        finally:
            sys.stderr = before
    shown.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written[0]))


def test_what_training_prints_goes_where_it_would_have_gone(tmp_path):
    """Beside a bar, standard output is what it was, also after a block that diverted it and ended before the save."""
    with terminal_for_errors(), sk.show_progress():
        out = sys.stdout
        with contextlib.redirect_stdout(io.StringIO()) as diverted:
            handle = sk.async_save({"w": torch.ones(SIZE)}, scene.slow_store(str(tmp_path / "ck"), "write_at", LONG_S))
            print("a step")
        handle.result()
        assert (diverted.getvalue(), sys.stdout) == ("a step\n", out)
    assert sys.stdout is out


def test_a_terminal_that_takes_no_more_stops_no_save(tmp_path):
    """As after Ctrl-S: what is drawn waits, and saves do not."""
    master, slave = pty.openpty()
    before, sys.stderr = sys.stderr, open(slave, "w")  # noqa: SIM115 - closed below
    try:
        with sk.show_progress():  # the other side is not read, and its buffer is soon full
            for n in range(30):
                sk.save({"w": torch.ones(1 << 10)}, scene.slow_store(str(tmp_path / f"{n}"), "create", 0.2))
        assert "shardkeep-progress" in {each.name for each in threading.enumerate()}  # it still waits for its terminal
    finally:
        # Now it is read, until it is closed, because a thread that waits to write keeps the file from being closed.
        reader = start_reading(master, [])
        sys.stderr.close()
        sys.stderr = before
        reader.join(60)
        os.close(master)


def save_in_terminal(where, background):
    state = {"w": torch.ones(SIZE)}
    store = scene.slow_store(where, "write_at", LONG_S)
    with terminal_for_errors() as shown, sk.show_progress(), scene.logged() as lines:
        if background:
            report = sk.async_save(state, store, options=OPTIONS).result()
        else:
            report = sk.save(state, store, options=OPTIONS)
        drawing = [each for each in threading.enumerate() if type(each).__module__.startswith("rich")]
        for thread in drawing:
            thread.join(60)
        unchanged = sys.stderr.isatty() and not any(thread.is_alive() for thread in drawing)
    return shown[0], lines, unchanged, report.bytes_written


@pytest.mark.parametrize(("background", "verbs"), [(True, {"stage", "write"}), (False, {"write"})])
def test_a_terminal_gets_bars(rank_pool, tmp_path, background, verbs):
    """A save has its bars, with its name and what is done of how much, within 80 columns; afterwards nothing draws."""
    [(shown, lines, unchanged, written)] = rank_pool.run(1, save_in_terminal, tmp_path / "step-7", background)
    assert set(re.findall(r"(\w+) step-7", shown)) == verbs
    done = {float(found) for found in re.findall(r"write step-7 \S+ +(\d+\.\d)/33\.6 MB", shown)}
    assert written // 10**5 == 335
    assert len(done) > 1, shown
    assert max(done) < 33.7
    assert max(len(line) for line in re.split(r"[\r\n]+", shown)) <= 80
    assert (unchanged, len(lines)) == (True, 1)


def fail_in_terminal():
    with terminal_for_errors() as shown, scene.logged() as lines:
        with sk.show_progress():
            for save in (sk.save, sk.async_save):
                with contextlib.suppress(sk.StorageError):
                    handle = save({"w": torch.ones(4)}, broken())
                    handle.exception()
            sk.finish_saves()
        print("afterwards", file=sys.stderr)
    return shown[0], lines


def test_a_save_that_fails_leaves_no_bar(rank_pool):
    [(shown, lines)] = rank_pool.run(1, fail_in_terminal)
    assert shown.endswith("afterwards\r\n")
    assert not [line for line in lines if "SaveFailed" in line or "SaveBegan" in line]


def save_without_terminal(where, environment):
    with mock.patch.dict(os.environ, environment), contextlib.redirect_stderr(io.StringIO()) as shown:
        with sk.show_progress():
            sk.save({"w": torch.ones(SIZE)}, where)
        return shown.getvalue()


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}])
def test_nothing_is_shown_without_a_terminal(rank_pool, tmp_path, environment):
    """Not even where variables ask for colours in logs, which rich takes for a terminal."""
    assert rank_pool.run(1, save_without_terminal, tmp_path / "ck", environment) == [""]


def save_on_ranks(where, closed):
    with terminal_for_errors() as shown:
        if closed:
            sys.stderr.close()
        with sk.show_progress():
            sk.save(scene.state(), where)
    return "step-7" in shown[0]


def test_rank_0_alone_shows_anything(rank_pool, tmp_path):
    """Of two ranks in terminals of their own, rank 1 shows nothing; nor does any where standard error is closed."""
    assert rank_pool.run(2, save_on_ranks, tmp_path / "step-7", False) == [True, False]
    assert rank_pool.run(2, save_on_ranks, tmp_path / "step-7b", True) == [False, False]
