"""The calls a save makes to the operating system, counted, so that one of them can be the last or go wrong."""

import contextlib
import os
import threading
from unittest import mock

CHANGING = ("open", "pwrite", "ftruncate", "fdatasync", "fsync", "replace", "link", "unlink", "mkdir")
"""Calls after which something may be different on disk."""
ASKING = ("preadv", "fstat", "scandir")


@contextlib.contextmanager
def strike_at(n, strike, names):
    """Hand the n-th call of these functions of `os` to `strike`; the list grows with every call, by name."""
    made = []
    lock = threading.Lock()

    def wrap(name):
        real = getattr(os, name)

        def call(*args, **kwargs):
            with lock:
                number = len(made)
                made.append(f"{name} {args[0] if isinstance(args[0], str) else ''}".strip())
            if number == n:
                return strike(name, lambda: real(*args, **kwargs))
            return real(*args, **kwargs)

        return call

    with mock.patch.multiple(os, **{name: wrap(name) for name in names}):
        yield made
