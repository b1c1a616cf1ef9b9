"""Asking the system, and making its calls fail."""

import fcntl
import os
import resource
import signal
import sys
from contextlib import contextmanager

import pytest

from shardkeep.storage.local import cached_bytes, open_files

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux about its own files")
MIB = 1 << 20


def failing(name, number, monkeypatch, *, when=None):
    real = getattr(os, name)

    def call(*args, **kwargs):
        if when is None or when(*args):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


@contextmanager
def no_file_above(nbytes):
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def is_direct(fd, *_):
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def drop_cached(store, name, start, end):
    """Make part of a file cold, as far as the system obliges."""
    fd = os.open(os.path.join(store.url, name), os.O_RDONLY)
    os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached(store, name):
    fd = os.open(os.path.join(store.url, name), os.O_RDONLY)
    found = cached_bytes(fd, 0, 1 << 40)
    direct = open_files(os.path.join(store.url, name), os.O_RDONLY, direct=True)
    os.close(fd)
    direct.close()
    if found is None or direct.direct is None:
        pytest.skip("this system does not report what is cached, or has no direct I/O")
    return found
