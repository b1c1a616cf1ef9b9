"""
What a model needs besides its weights: configuration, tokenizer, code, copied from one place to another.
"""

from __future__ import annotations

import os
from contextlib import suppress

from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointExists, StateError
from shardkeep.store.local import LocalStore
from shardkeep.store.paths import PathStore
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store, is_name

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""What else a model's place may hold that is weights, or speaks of them."""
_MOST_COPIED_NBYTES = 1 << 30


class Beside:
    """Files to copy. They are read first, so that nothing is missing in the end."""

    def __init__(self, store: Store, config: str | None, *, overwrite: bool) -> None:
        found = {} if config is None else _read_all(config)
        there = {name: data for name in found if (data := _read(store, name)) is not None}
        self._new = {name: data for name, data in found.items() if name not in there}
        self._changed = {name: data for name, data in found.items() if name in there and there[name] != data}
        self._added: list[str] = []
        if self._changed and not overwrite:
            raise CheckpointExists(
                f"{store.url}/{next(iter(self._changed))} is already there, and another one in {config}",
                hint="pass overwrite=True (--overwrite) to replace it",
            )

    def add(self, store: Store) -> None:
        """Write what is not there: before the weights get their names, so that the model is complete."""
        for name, data in self._new.items():
            self._added.append(name)
            store.put(name, data)

    def replace(self, store: Store) -> None:
        """Replace what belonged to the model that was there, which is gone now."""
        for name, data in self._changed.items():
            store.put(name, data, replace=True)
        self._added = []

    def take_back(self, store: Store) -> None:
        """Remove what was added to a place that has not become a model."""
        for name in self._added:
            with suppress(CheckpointError):
                store.delete(name)


def _read_all(config: str) -> dict[str, bytes]:
    """Read all files of a place but weights."""
    place = open_store(config, direct=False)
    if isinstance(place, LocalStore) and not os.path.isdir(place.url):
        raise StateError(f"config={config!r} is no directory", hint="give the directory that has config.json in it")
    found: dict[str, bytes] = {}
    for name in _names(place):
        if is_name(name) and not name.startswith(".") and not name.endswith(_WEIGHTS):
            data = _read(place, name)
            found |= {} if data is None else {name: data}
    if "config.json" not in found:
        raise StateError(f"{config}: there is no config.json", hint="give the place that has it")
    return found


def _names(place: Store) -> list[str]:
    if not isinstance(place, LocalStore):
        return [info.name for info in place.list()]
    # Through links, as in a Hugging Face cache.
    return [name for name in sorted(os.listdir(place.url)) if os.path.isfile(os.path.join(place.url, name))]


def _read(place: Store, name: str) -> bytes | None:
    """Read a file; None where there is none."""
    try:
        if isinstance(place, LocalStore):
            return PathStore(direct=False).get(os.path.join(place.url, name), limit=_MOST_COPIED_NBYTES)
        return place.get(name, limit=_MOST_COPIED_NBYTES)
    except BlobNotFound:
        return None
