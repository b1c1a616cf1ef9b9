"""
Processes to kill: forked in milliseconds from one that has imported torch and does nothing else.

What they run is in `doomed`, which that process has imported too.
"""

import os
import signal
from multiprocessing.connection import Connection

from tests.support.forking import fork_context, preload

preload("tests.faults.warm")


class Fork:
    """A process running `fn(pipe, *args)`; `pipe` is the other end of `self.pipe`."""

    def __init__(self, fn, *args):
        self.pipe: Connection
        context = fork_context()
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=fn, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def kill(self):
        if self._process.is_alive():
            os.kill(self._process.pid or 0, signal.SIGKILL)
        self.join()

    def join(self, within_s=60.0):
        """Wait for its end; return how it ended, negative for a signal."""
        self._process.join(within_s)
        return self._process.exitcode

    def said(self):
        heard = []
        try:
            while self.pipe.poll():
                heard.append(self.pipe.recv())
        except (EOFError, ConnectionResetError):
            pass
        return heard

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.pipe.close()
        self._process.close()
