"""What every store must do with small blobs, which are put in one step; a part of `StoreContract`."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkeep.errors import MalformedFile, StorageError
from shardkeep.store.protocol import Store
from shardkeep.testing.contract_helpers import read_blob, same, sample, winners


class PutContract:
    """The promises about `put`, `get` and `version`, one test each."""

    def make_store(self) -> Store:
        """Make a new, empty store."""
        raise NotImplementedError

    @pytest.mark.parametrize("data", [b"", b"abc", sample(1_000_001)])
    def test_put_get(self, data: bytes) -> None:
        """What was put is what is got, and `open` sees it too."""
        store = self.make_store()
        store.put("a", data)
        same(data, store.get("a", limit=len(data)))
        same(data, read_blob(store, "a"))

    def test_put_keeps_what_is_there(self) -> None:
        """Without `replace`, an existing blob is an error and stays."""
        store = self.make_store()
        store.put("a", b"old")
        with pytest.raises(StorageError) as caught:
            store.put("a", b"new")
        same(errno.EEXIST, caught.value.errno)
        same(b"old", store.get("a", limit=10))
        same(["a"], [blob.name for blob in store.list()])

    def test_put_replaces_when_told(self) -> None:
        """With `replace`, the new bytes take the old ones' place, or an empty one."""
        store = self.make_store()
        store.put("a", b"old, and longer", replace=True)
        store.put("a", b"new", replace=True)
        same(b"new", store.get("a", limit=3))

    def test_one_of_many_puts_wins(self) -> None:
        """Of puts racing for one name, one succeeds, and its bytes are there whole."""
        store = self.make_store()
        won = winners(lambda i: store.put("a", bytes([i]) * 10_000), 8)
        same(1, len(won))
        same(bytes([won[0]]) * 10_000, store.get("a", limit=10_000))

    def test_put_over_a_version(self) -> None:
        """A blob is replaced if it is of the version that was seen, and only then; one that is gone is not made anew."""
        store = self.make_store()
        same(None, store.version("a"))
        store.put("a", b"one")
        first = store.version("a")
        same(first, store.version("a"))
        store.put("a", b"two", over=first)
        second = store.version("a")
        same(False, first == second)
        same(2, len({first, second}))
        with pytest.raises(StorageError, match="replaced or deleted by another writer") as caught:
            store.put("a", b"new", over=first)
        same(errno.EEXIST, caught.value.errno)
        same(b"two", store.get("a", limit=3))
        store.delete("a")
        with pytest.raises(StorageError) as caught:
            store.put("a", b"new", over=second)
        same(errno.EEXIST, caught.value.errno)
        same([], list(store.list()))

    def test_one_of_many_swaps_wins(self) -> None:
        """Of puts racing to replace one version, one succeeds, round after round."""
        store = self.make_store()
        store.put("a", b"begin")
        for turn in range(2):
            seen, said = store.version("a"), sample(1000, seed=turn)
            won = winners(lambda i: store.put("a", bytes([i]) + said, over=seen), 8)  # noqa: B023 - used at once
            same(1, len(won))
            same(bytes([won[0]]) + said, store.get("a", limit=1001))

    def test_put_is_atomic(self) -> None:
        """A reader beside a replacing writer sees the old bytes or the new ones, never a part."""
        store, versions = self.make_store(), [bytes([i]) * (10_000 + i) for i in range(2)]
        store.put("a", versions[0])

        def replace() -> None:
            for i in range(30):
                store.put("a", versions[i % 2], replace=True)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(replace)
            while not done.done():
                same(True, store.get("a", limit=20_000) in versions)
                same(True, read_blob(store, "a") in versions)
            done.result()

    def test_get_limit(self) -> None:
        """A blob of exactly the limit is read; one byte more is an error."""
        store = self.make_store()
        store.put("a", b"12345")
        same(b"12345", store.get("a", limit=5))
        with pytest.raises(MalformedFile, match="a: 5 bytes, expected at most 4"):
            store.get("a", limit=4)
