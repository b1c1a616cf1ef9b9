"""
Uploads that nobody will finish: those of processes that were killed. They are seen by no listing, and are paid for.

On S3 and what speaks its language boto3 finds them. Elsewhere, and better anyway, the bucket has a rule that removes them
after some days. Azure drops them after a week by itself; Google does not, and the library has no way to ask for them there.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from shardkeep.errors import CheckpointError, StorageError
from shardkeep.options import setting
from shardkeep.storage.base import innermost
from shardkeep.storage.fsspec import without_user
from shardkeep.storage.object_client import has_keys
from shardkeep.storage.object_config import canonical_options, is_true, resolve_options
from shardkeep.storage.object_store import ObjectStore

# The client that finds unfinished uploads: boto3, which reaches a bucket by the way that its store takes.
#
# The endpoint, keys, a session's token, a profile, no keys at all, a proxy, certificates and headers are handed on,
# as they
# were when the store was opened. What cannot be is said, and no other way is tried: uploads of another account, or
# server,
# could be meant. What boto3 says is shown without passwords.

_LONGEST_S = 10.0
_UNTOLD = (
    "role_arn", "role_session_name", "web_identity_token_file", "container_credentials_relative_uri",
    "container_credentials_full_uri", "container_authorization_token_file", "s3_express",
)  # fmt: skip
"""Options that boto3 takes only from the environment, if at all."""
_BY_ITSELF = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_ENDPOINT_URL_STS", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip
"""Variables in which boto3 finds keys, or the way to them, where it is given none."""


@contextmanager
def s3_client(place: ObjectStore) -> Iterator[Any]:
    """
    Open the bucket as its store was opened.

    Raises:
        CheckpointError: boto3 is not installed, or cannot be told how.

    """
    try:
        boto3 = importlib.import_module("boto3")
    except ImportError as exc:  # or one of the packages that it needs
        raise CheckpointError(
            f"{place.url}: to find unfinished uploads takes the package boto3: {exc}",
            hint="pip install 'shardkeep[cloud]'",
        ) from exc
    given = resolve_options("s3", place.bucket.given, place.url, place.bucket.environment)
    if untold := [name for name in _UNTOLD if given.get(name)]:
        raise CheckpointError(
            f"{place.url}: cannot look after uploads: boto3 cannot be told {untold[0]}=",
            hint=f"set AWS_{untold[0].upper()} instead",
        )
    http = dict(given.get("client_options", ()))
    with ExitStack() as stack:
        try:
            client = stack.enter_context(closing(_opened(boto3, place, given, http, stack)))
        except CheckpointError:
            raise
        except Exception as exc:  # noqa: BLE001 - of botocore, which has many: an endpoint that is none, say
            raise failed(place, exc) from None
        yield client


def failed(place: ObjectStore, exc: Exception) -> StorageError:
    """Say what boto3 said, of which nothing is kept as a cause: there may be a password in its addresses."""
    return StorageError(without_user(f"{place.url}: cannot look after uploads: {exc}"))


def _opened(boto3: Any, place: ObjectStore, given: dict[str, Any], http: dict[str, Any], stack: ExitStack) -> Any:
    environment = place.bucket.environment
    keys = _keys(place, given)
    # As the store: where there are keys, nothing in the environment asks for none.
    unsigned = is_true(given.get("skip_signature", None if keys else environment.get("AWS_SKIP_SIGNATURE")))
    if not unsigned and not (keys.get("access_key_id") and keys.get("secret_access_key")):
        keys = {**_keys_of_the_environment(place), **keys}
    known = bool(keys) or has_keys(given, environment)
    session = boto3.Session(
        aws_access_key_id=keys.get("access_key_id"),
        aws_secret_access_key=keys.get("secret_access_key"),
        aws_session_token=keys.get("token"),
        region_name=given.get("region") or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION"),
        # A profile that a variable names need not be there where keys are known: then no variable names one.
        botocore_session=_part("session").Session({"profile": (None, None, None, None)} if known else None),
    )
    # Somebody waits, and can do without: it is asked for once, and not for long.
    seconds = min(place.bucket.manners.timeout_s, _LONGEST_S)
    more: dict[str, Any] = {"read_timeout": seconds, "connect_timeout": seconds, "retries": {"total_max_attempts": 2}}
    if unsigned:
        more["signature_version"] = importlib.import_module("botocore").UNSIGNED
    # As the store does: a bucket's name before the host's is asked for only where somebody says so.
    by_name = given.get("virtual_hosted_style_request", environment.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"))
    more["s3"] = {"addressing_style": "virtual" if is_true(by_name) else "path"}
    endpoint = given.get("endpoint")
    more.update(_proxies(http, endpoint, stack))
    # What is in a profile's file about endpoints the store does not read.
    config = _part("config").Config(ignore_configured_endpoint_urls=True, **more)
    client = session.client("s3", endpoint_url=endpoint, config=config, verify=_trusted(http, environment, stack))
    headers = {name: _text(value) for name, value in dict(http.get("default_headers", ())).items()}

    def add_headers(request: Any, **_: Any) -> None:
        for name, value in headers.items():
            request.headers[name] = value

    client.meta.events.register("before-sign.s3", add_headers)
    return client


def _keys(place: ObjectStore, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that options say, or a profile, if they do."""
    # A profile's keys are asked of the one whom the store asks: which profile, in which files, was settled there.
    provider = given.get("credential_provider") or getattr(place.bucket.opened, "credential_provider", None)
    if provider is None:
        return {
            name: given[key]
            for name, key in (
                ("access_key_id", "access_key_id"), ("secret_access_key", "secret_access_key"), ("token", "session_token")
            )
            if given.get(key)
        }  # fmt: skip
    keys = provider()
    if inspect.isawaitable(keys):
        if inspect.iscoroutine(keys):
            keys.close()
        raise CheckpointError(
            f"{place.url}: cannot look after uploads: the credential_provider= is asynchronous",
            hint="pass one that is called and returns the keys",
        )
    return dict(keys)


def _keys_of_the_environment(place: ObjectStore) -> dict[str, Any]:
    """
    Return the keys that variables said when the store was opened; none where boto3 finds them by the same way now.

    Raises:
        CheckpointError: it would find others.

    """
    then = place.bucket.environment
    if then.get("AWS_ACCESS_KEY_ID") and then.get("AWS_SECRET_ACCESS_KEY"):
        token = then.get("AWS_SESSION_TOKEN") or then.get("AWS_TOKEN")
        return {
            "access_key_id": then["AWS_ACCESS_KEY_ID"], "secret_access_key": then["AWS_SECRET_ACCESS_KEY"], "token": token,
        }  # fmt: skip
    if other := next((name for name in _BY_ITSELF if setting(name) != then.get(name)), None):
        raise CheckpointError(
            f"{place.url}: cannot look after uploads: {other} is not what it was when the place was opened",
            hint="open the place again",
        )
    return {}


def _proxies(http: dict[str, Any], endpoint: str | None, stack: ExitStack) -> dict[str, Any]:
    """Say which proxy is asked, if the endpoint is not one of those that are asked without."""
    proxy = http.get("proxy_url")
    if not proxy:
        return {}
    host = urlsplit(endpoint or "https://s3.amazonaws.com").hostname or ""
    apart = [each.strip().lstrip("*.") for each in str(http.get("proxy_excludes") or "").split(",") if each.strip()]
    if any(host == each or host.endswith(f".{each}") for each in apart):
        return {"proxies": {}}
    more: dict[str, Any] = {"proxies": {"http": proxy, "https": proxy}}
    if http.get("proxy_ca_certificate"):
        more["proxies_config"] = {"proxy_ca_bundle": _file_of(http["proxy_ca_certificate"], stack)}
    return more


def _trusted(http: dict[str, Any], environment: Mapping[str, str | None], stack: ExitStack) -> str | bool | None:
    """Say which certificates are good: boto3 wants a file of them, and has one of its own; the store uses the machine's."""
    if is_true(http.get("allow_invalid_certificates")):
        return False
    if http.get("root_certificate"):
        return _file_of(http["root_certificate"], stack)
    return environment.get("AWS_CA_BUNDLE") or ssl.get_default_verify_paths().cafile


def _file_of(certificates: str | bytes, stack: ExitStack) -> str:
    """Write the usual certificates and some more into a file that lasts as long as the client."""
    usual = ssl.get_default_verify_paths().cafile or _part("httpsession").get_cert_path(True)
    file = Path(stack.enter_context(TemporaryDirectory(prefix="shardkeep-")), "trusted.pem")
    file.write_bytes(Path(usual).read_bytes() + b"\n" + _text(certificates).encode())
    return str(file)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


def _part(name: str) -> Any:
    return importlib.import_module(f"botocore.{name}")


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
    paying = canonical_options("s3", bucket.given, place.url).get(
        "request_payer", bucket.environment.get("AWS_REQUEST_PAYER")
    )
    if is_true(paying) or str(paying).lower() == "requester":
        arguments["RequestPayer"] = "requester"
    try:
        return verb(Bucket=bucket.name, **arguments)
    except Exception as exc:  # noqa: BLE001 - raised as ours
        said = getattr(exc, "response", None) or {}  # those of connections have one that is None
        if said.get("Error", {}).get("Code") == "NoSuchUpload":
            return {}
        raise failed(place, exc) from None
