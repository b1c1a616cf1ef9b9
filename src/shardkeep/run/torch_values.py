"""Objects of a checkpoint of torch's layout as an index has values, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from shardkeep.errors import DamagedCheckpoint
from shardkeep.format.index import Strings
from shardkeep.layout.torch_metadata import Place
from shardkeep.options import Options
from shardkeep.run.item_files import Files, Item, check_inside, read_raw

_TOGETHER_NBYTES = 1 << 20
"""Small objects lie side by side, and a read of one is a read of the blocks it lies in: its neighbours come with it."""
_HELD_NBYTES = 64 << 20


class StoredObjects(Strings):
    """Objects, sorted by key. `decode` makes a value of the bytes of one."""

    def __init__(
        self,
        objects: Mapping[str, Place],
        files: Files,
        options: Options,
        decode: Callable[[str, Place, bytes], bytes],
    ) -> None:
        super().__init__(np.zeros(len(objects), np.int64), memoryview(b""))
        self._files = files
        self._options = options
        self._decode = decode
        self._keys = sorted(objects, key=str.encode)
        self._places = [objects[key] for key in self._keys]
        self._held: dict[int, bytes] = {}

    def raw(self, row: int) -> bytes:
        """Return one object, as a value."""
        data = self._held.get(row)
        if data is None:
            data = self._read(row)
        return self._decode(self._keys[row], self._places[row], data)

    def all(self) -> list[bytes]:
        """Return all of them."""
        return [self.raw(row) for row in range(len(self))]

    def _read(self, row: int) -> bytes:
        rows = self._together(row)
        try:
            held = self._read_all(rows)
        except DamagedCheckpoint:  # of its neighbours, perhaps
            held = self._read_all([row])
        if sum(map(len, self._held.values())) > _HELD_NBYTES:
            self._held = {}
        self._held |= held
        return held[row]

    def _read_all(self, rows: list[int]) -> dict[int, bytes]:
        items = [self._item(row) for row in rows]
        check_inside(self._files, items)
        options = self._options
        found = read_raw(self._files, items, threads=options.io_threads, budget_nbytes=options.host_budget_bytes)
        return {row: bytes(data) for row, data in zip(rows, found, strict=True)}

    def _item(self, row: int) -> Item:
        place = self._places[row]
        return Item(self._files.number(place.file), place.offset, place.nbytes, self._keys[row])

    def _together(self, row: int) -> list[int]:
        """Return a row, and those behind it in its file that are read with it."""
        order, at = self._by_place
        first = self._places[row]
        end = first.offset + max(_TOGETHER_NBYTES, first.nbytes)
        rows = [row]
        for other in order[at[row] + 1 :]:
            place = self._places[other]
            if place.file != first.file or place.offset + place.nbytes > end:
                break
            rows.append(other)
        return rows

    @cached_property
    def _by_place(self) -> tuple[list[int], dict[int, int]]:
        """Return the rows in the order in which they lie in files, and where each is in it."""
        order = sorted(range(len(self)), key=lambda row: self._places[row][:2])
        return order, {row: at for at, row in enumerate(order)}
