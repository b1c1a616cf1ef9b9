"""What a second read is worth, and what is said of where damage is, whatever stores and files are called."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep.codecs.coded_store import DecodingStore
from shardkeep.layouts.native import read_record
from shardkeep.storage.base import SecondRead
from shardkeep.storage.local import LocalStore, cached_bytes
from tests.codec_engine.scene import InOrderStore


def test_a_second_read_below_codecs_does_not_come_from_the_page_cache(tmp_path: Path) -> None:
    """A store that decodes is looked through: the pages of the file below it are dropped."""
    (tmp_path / "a").write_bytes(os.urandom(1 << 20))
    file = os.open(tmp_path / "a", os.O_RDONLY)
    try:
        os.fsync(file)  # dirty pages stay
        os.pread(file, 1 << 20, 0)
        if cached_bytes(file, 0, 1 << 20) != 1 << 20:
            pytest.skip("the system does not say what it has in its cache")
        seen = list[int]()

        class Looks(LocalStore):
            """Says what is in the cache when the file is opened anew."""

            def open(self, name: str) -> sk.BlobReader:
                seen.append(cached_bytes(file, 0, 1 << 20))
                return super().open(name)

        with closing(SecondRead("a", DecodingStore(Looks(tmp_path), (), ()))) as again:
            again.read(0, 1 << 20)
        assert seen == [0]
    finally:
        os.close(file)


def test_damage_is_placed_whatever_the_file_is_called() -> None:
    """Also where the word that says where is a part of the name."""
    store = InOrderStore()
    sk.save({"bytes": {"w": torch.ones(9)}}, store)
    [name] = [file.blocks for file in read_record(store).files if file.blocks]
    assert name.startswith("bytes")
    data = bytearray(store.get(name, limit=1 << 20))
    data[3] ^= 1
    store.put(name, bytes(data), replace=True)
    with pytest.raises(sk.DamagedCheckpoint, match=", from byte 0 on"):
        sk.open(store).verify()
