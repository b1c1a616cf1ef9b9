"""A root in a bucket: its places are the prefixes below its own."""

from __future__ import annotations

from collections.abc import Iterator

from shardkeep.store.object_again import ask_again
from shardkeep.store.object_client import obstore
from shardkeep.store.object_errors import object_errors
from shardkeep.store.objects import ObjectStore
from shardkeep.store.protocol import check_name, is_name
from shardkeep.store.roots import empty


class ObjectRoot(ObjectStore):
    """A prefix with prefixes below it."""

    def places(self) -> Iterator[str]:
        found = [path.rstrip("/").removeprefix(self.prefix) for path in self._level()["common_prefixes"]]
        return iter([name for name in found if is_name(name)])

    def place(self, name: str) -> ObjectStore:
        return ObjectStore(self.bucket, f"{self.prefix}{check_name(name)}/", f"{self.url}/{name}")

    def remove(self, name: str) -> None:
        place = self.place(name)
        empty(place)

        def below() -> list[str]:
            with self.bucket.slots, object_errors("cannot list", place.url):
                found = obstore().list(self.bucket.client, place.prefix, chunk_size=1000)
                return [each["path"] for chunk in found for each in chunk]

        # What no blob is called, or lies deeper: left by others.
        paths = ask_again(self.bucket.manners, f"to list {place.url}", below)
        self._delete([path for path in paths if path.startswith(place.prefix)])

    def drop_empty(self, name: str) -> None:
        check_name(name)  # that is all: a prefix without objects is none
