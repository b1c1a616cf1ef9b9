"""
Uploads that nobody will finish: those of processes that were killed. They are seen by no listing, and are paid for.

Only S3 and what speaks its language says which there are, and only boto3 asks. Elsewhere, and better anyway, the bucket
has a rule that removes them after a day or a week; Google Cloud Storage and Azure drop them after a week by themselves.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardkeep.errors import CheckpointError, StorageError
from shardkeep.options import setting
from shardkeep.store.object_client import has_keys
from shardkeep.store.objects import ObjectStore

log = logging.getLogger("shardkeep")


@dataclass(frozen=True)
class Unfinished:
    """An upload that was begun."""

    name: str
    """Of the blob, below the place that was looked at."""
    id: str
    began_s: float
    """Seconds since the epoch, by the service's clock."""


def unfinished(store: object) -> list[Unfinished]:
    """
    Find the uploads that were begun below a place and neither finished nor taken back; some may be alive.

    Returns:
        None at all where the store is not on S3.

    Raises:
        CheckpointError: boto3 is not installed.
        StorageError: the service did not answer.

    """
    place = _on_s3(store)
    if place is None:
        return []
    with _client(place) as client:
        return _found(place, client)


def sweep(store: object, *, older_than_s: float, is_dead: Callable[[str], bool] = lambda _: False) -> int:
    """
    Take back the uploads below a place that were begun longer ago than any save takes, or whose writer is known to be
    dead by their names; returns how many.

    Raises:
        CheckpointError: boto3 is not installed.
        StorageError: the service did not answer.

    """
    place = _on_s3(store)
    if place is None:
        return 0
    with _client(place) as client:
        over = [
            each for each in _found(place, client) if time.time() - each.began_s > older_than_s or is_dead(each.name)
        ]
        for each in over:
            log.info("the upload of %s/%s, which nobody finished, is taken back", place.url, each.name)
            _asked(place, client.abort_multipart_upload, Key=place.prefix + each.name, UploadId=each.id)
    return len(over)


def _on_s3(store: object) -> ObjectStore | None:
    while not isinstance(store, ObjectStore) and hasattr(store, "inner"):  # one that tries again, or counts
        store = store.inner
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
    try:
        return verb(Bucket=place.bucket.name, **arguments)
    except Exception as exc:
        said = getattr(exc, "response", None) or {}  # those of connections have one that is None
        if said.get("Error", {}).get("Code") == "NoSuchUpload":
            return {}
        raise StorageError(f"{place.url}: cannot look after uploads: {exc}") from exc


@contextmanager
def _client(place: ObjectStore) -> Iterator[Any]:
    """Open the bucket as its store was opened, as far as boto3 can."""
    try:
        boto3 = importlib.import_module("boto3")
    except ModuleNotFoundError as exc:
        raise CheckpointError(
            f"{place.url}: to find unfinished uploads takes the package boto3", hint="pip install 'shardkeep[cloud]'"
        ) from exc
    http = dict(place.bucket.given.get("client_options", ()))
    with ExitStack() as stack:
        try:
            client = _opened(boto3, place, http, stack.enter_context(_trusted(http)))
        except Exception as exc:  # of botocore, which has many: a profile that is not there, an endpoint that is none
            raise StorageError(f"{place.url}: cannot look after uploads: {exc}") from exc
        yield stack.enter_context(closing(client))


def _opened(boto3: Any, place: ObjectStore, http: dict[str, Any], verify: str | bool | None) -> Any:
    given = place.bucket.given
    keys = has_keys(given)
    session = boto3.Session(
        aws_access_key_id=given.get("access_key_id"),
        aws_secret_access_key=given.get("secret_access_key"),
        aws_session_token=given.get("session_token"),
        region_name=given.get("region") or setting("AWS_REGION"),
        profile_name=None if keys else given.get("profile"),
        # A profile that a variable names need not be there where keys were given: then no variable names one.
        botocore_session=_part("session").Session({"profile": (None, None, None, None)} if keys else None),
    )
    # As the store does: a bucket's name before the host's is asked for only where somebody says so.
    style = "virtual" if given.get("virtual_hosted_style_request") else "path"
    more: dict[str, Any] = {"read_timeout": place.bucket.manners.timeout_s, "connect_timeout": 10}
    if proxy := http.get("proxy_url"):
        more["proxies"] = {"http": proxy, "https": proxy}
    config = _part("config").Config(s3={"addressing_style": style}, **more)
    endpoint = given.get("endpoint") or setting("AWS_ENDPOINT")
    return session.client("s3", endpoint_url=endpoint, config=config, verify=verify)


@contextmanager
def _trusted(http: dict[str, Any]) -> Iterator[str | bool | None]:
    """Say which certificates are good: boto3 wants a file of them where the store was given their text."""
    if str(http.get("allow_invalid_certificates")).lower() == "true":
        yield False
        return
    given = http.get("root_certificate")
    if not given:
        yield None
        return
    usual = Path(_part("httpsession").get_cert_path(True)).read_bytes()
    with TemporaryDirectory(prefix="shardkeep-") as folder:
        file = Path(folder, "trusted.pem")
        file.write_bytes(usual + b"\n" + (given.encode() if isinstance(given, str) else given))
        yield str(file)


def _part(name: str) -> Any:
    return importlib.import_module(f"botocore.{name}")
