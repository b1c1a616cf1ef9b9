"""
Uploads that nobody will finish: those of processes that were killed. They are seen by no listing, and are paid for.

On S3 and what speaks its language boto3 finds them. Elsewhere, and better anyway, the bucket has a rule that removes them
after some days. Azure drops them after a week by itself; Google does not, and the library has no way to ask for them there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardkeep.errors import CheckpointError
from shardkeep.store.object_settings import is_true, plainly
from shardkeep.store.objects import ObjectStore
from shardkeep.store.protocol import innermost
from shardkeep.store.uploads_client import failed, s3_client

log = logging.getLogger("shardkeep")


@dataclass(frozen=True)
class Unfinished:
    """An upload that was begun."""

    name: str
    """Of the blob, below the place that was looked at."""
    id: str
    began_s: float
    """Seconds since the epoch, by the service's clock."""

    def is_older_than(self, seconds: float) -> bool:
        """Tell whether it was begun longer ago."""
        return time.time() - self.began_s > seconds


def unfinished(store: object) -> list[Unfinished]:
    """
    Find the uploads that were begun below a place and neither finished nor taken back; some may be alive.

    Returns:
        None at all where the store is not on S3.

    Raises:
        CheckpointError: boto3 is not installed, or cannot be told how the store was opened.
        StorageError: the service did not answer.

    """
    place = _on_s3(store)
    if place is None:
        return []
    with s3_client(place) as client:
        return _found(place, client)


def sweep(store: object, is_over: Callable[[Unfinished], bool]) -> int:
    """
    Take back the uploads below a place of which somebody says that they are over; returns how many.

    All that is begun below it is asked about, of other programs too.

    Raises:
        CheckpointError: boto3 is not installed, or cannot be told how the store was opened.
        StorageError: the service did not answer.

    """
    place = _on_s3(store)
    if place is None:
        return 0
    with _told_once(place), s3_client(place) as client:
        over = [each for each in _found(place, client) if is_over(each)]
        for each in over:
            log.info("the upload of %s/%s, which nobody finished, is taken back", place.url, each.name)
            _asked(place, client.abort_multipart_upload, Key=place.prefix + each.name, UploadId=each.id)
    return len(over)


@contextmanager
def _told_once(place: ObjectStore) -> Iterator[None]:
    """Say, once a bucket, that uploads are not taken back: whoever sweeps goes on without it."""
    try:
        yield
    except CheckpointError as error:
        if "uploads" not in place.bucket.warned:
            place.bucket.warned.add("uploads")
            log.warning(
                "uploads to %s that nobody finished are not taken back; let the bucket have a rule that does: %s",
                place.url, error,
            )  # fmt: skip
        raise


def _on_s3(store: object) -> ObjectStore | None:
    store = innermost(store)
    return store if isinstance(store, ObjectStore) and store.bucket.service == "s3" else None


def _found(place: ObjectStore, client: Any) -> list[Unfinished]:
    found: list[Unfinished] = []
    after: dict[str, str] = {}
    while True:
        page = _asked(place, client.list_multipart_uploads, Prefix=place.prefix, **after)
        for each in page.get("Uploads", ()):
            if each["Key"].startswith(place.prefix):  # some services do not look at the prefix
                began_s = each["Initiated"].timestamp()
                found.append(Unfinished(each["Key"].removeprefix(place.prefix), each["UploadId"], began_s))
        if not page.get("IsTruncated"):
            return found
        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}


def _asked(place: ObjectStore, verb: Any, **arguments: Any) -> Any:
    bucket = place.bucket
    paying = plainly("s3", bucket.given, place.url).get("request_payer", bucket.environment.get("AWS_REQUEST_PAYER"))
    if is_true(paying) or str(paying).lower() == "requester":
        arguments["RequestPayer"] = "requester"
    try:
        return verb(Bucket=bucket.name, **arguments)
    except Exception as exc:  # noqa: BLE001 - raised as ours
        said = getattr(exc, "response", None) or {}  # those of connections have one that is None
        if said.get("Error", {}).get("Code") == "NoSuchUpload":
            return {}
        raise failed(place, exc) from None
