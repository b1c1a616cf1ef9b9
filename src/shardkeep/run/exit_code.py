"""
The exit code of this process: kept as the program gave it, and made a failure where it gave none.

Python has settled on its code before it calls anything at exit, and nothing that is called then can change it.
`os._exit` could end the process there, but with it would go all that comes later: threads that are waited for, other
handlers, files that are flushed as they are collected. So Python ends as always, and the C library, whose `exit` it calls
with its code when all that is done, is told to end with another one. What is skipped are handlers in C that were there
before, such as destructors of static objects; output that C still holds is flushed.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import sys
import threading
import traceback
from collections.abc import Iterable
from functools import cache
from typing import NoReturn

log = logging.getLogger("shardkeep")

_FAILED = 1
_MOST = 0xFF
"""What a system keeps of an exit code."""


class ExitCode:
    """What this process ends with. Used by one thread at a time."""

    def __init__(self) -> None:
        self._before = sys.exit
        self._watching = False
        self._inside = False
        self._given = 0

    def watch(self) -> None:
        """Note what `sys.exit` is given: at exit there is no way to ask for it. A raised `SystemExit` is not noted."""
        if not self._watching and not _interactive():
            self._watching = True
            self._before = sys.exit
            sys.exit = self._exit

    def look_away(self) -> None:
        """Put `sys.exit` back, unless somebody else has put theirs over ours."""
        if self._watching and sys.exit == self._exit:
            sys.exit = self._before
            self._watching = False

    def fail(self) -> int | None:
        """
        End with a failure, called at exit; return its code, or None where the code is left alone.

        It is what the program gave to `sys.exit`, or 1 if that was nothing or 0. Left alone is a program that ends with
        an error that Python has printed, or a Ctrl-C: its code is not 0. So is a session that somebody sits at, and a
        process that does not end by C's `exit`, or not when Python ends.
        """
        if _interactive() or getattr(sys, "last_value", None) is not None or not _ends_by_exit():
            return None
        code = self._given or _FAILED
        try:
            libc = ctypes.CDLL(None)
            at_exit = libc["__cxa_atexit"]  # which hands an argument on, as `atexit` does not
        except (AttributeError, OSError, TypeError):  # another C library: the text has to do
            return None
        at_exit.argtypes = [ctypes.c_void_p] * 3
        for call, argument in (("_exit", code), ("fflush", None)):  # the last one is called first
            at_exit(ctypes.cast(libc[call], ctypes.c_void_p), argument, None)
        return code

    def _exit(self, status: object = None, /) -> NoReturn:
        if self._inside:  # by way of somebody who kept this one from an earlier time
            raise SystemExit(status)
        if threading.current_thread() is threading.main_thread():  # in others it ends the thread alone
            self._given = _code_of(status)
        self._inside = True
        try:
            self._before(status)  # type: ignore[arg-type]  # whatever it is
        finally:
            self._inside = False


@cache
def exit_code() -> ExitCode:
    """Return that of this process."""
    return ExitCode()


def tell_at_exit(error: BaseException | None = None) -> None:
    """Print an error that nobody is left to catch, and let whoever started this process know: a scheduler reads no texts."""
    if error is not None:
        traceback.print_exception(type(error), error, error.__traceback__)
    if (code := exit_code().fail()) is not None:
        log.error("a save is lost, and nobody had asked for it: this process ends with exit code %d", code)


def give_up_at_exit(places: Iterable[str]) -> None:
    """Say which saves somebody would not wait for, and end with a failure."""
    tell_at_exit()
    log.error("interrupted at exit: given up before they were complete: saves to %s", ", ".join(places))


def _code_of(status: object) -> int:
    if status is None:
        return 0
    return status & _MOST if isinstance(status, int) else _FAILED  # anything else is printed


def _ends_by_exit() -> bool:
    """
    Say whether this process ends by C's `exit`, and with its interpreter.

    Those that `multiprocessing` forks, itself or by its server, end by `_exit`; a program that Python is embedded in has
    no command line of Python's, and goes on after it.
    """
    forked = multiprocessing.parent_process() is not None and "--multiprocessing-fork" not in sys.orig_argv
    return bool(sys.orig_argv) and not forked


def _interactive() -> bool:
    """Say whether somebody sits at a prompt; IPython and notebooks set one as well."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
