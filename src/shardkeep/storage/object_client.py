"""
Opening buckets, once per process and set of options, and how requests are made.

Server, account and credentials come from options, else from the usual environment variables. obstore takes whatever the
options leave open from the environment. So a token that is meant for another bucket would join credentials given as options.
Here those are used alone, or opening the bucket fails and names the variable.

Errors say which object, what the service answered, and what to do. obstore's own exceptions are dropped, even as a
cause: their text contains whole URLs, which may contain keys.
"""

from __future__ import annotations

import base64
import errno
import functools
import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar
from urllib.parse import urlsplit

from shardkeep.errors import BlobNotFound, CheckpointError, StorageError
from shardkeep.options import MIB, parse_size, settings_with
from shardkeep.storage.buffers import MemoryBudget
from shardkeep.storage.retry import call_with_retries

T = TypeVar("T")

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
"""The schemes of URLs, and the service of each."""
_CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_KEY_OPTIONS = frozenset({
    "access_key_id", "credential_provider", "skip_signature", "web_identity_token_file",
    "container_credentials_relative_uri", "container_credentials_full_uri",
})  # fmt: skip
_OTHER_KEYS = (
    "AWS_ACCESS_KEY_ID", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
_MOST_PARTS = 10_000
"""Limit of S3 for one upload."""
_LEAST_PART_BYTES = 5 * MIB
"""Limit of S3 for all parts but the last."""
_CREDENTIAL_LIFETIME = timedelta(minutes=10)
_INSTALL = "pip install 'shardkeep[cloud]'"


@dataclass(frozen=True)
class RequestPolicy:
    """How requests are made: options of `open_place`, which says what they mean."""

    timeout_s: float = 60.0
    retries: int = 8
    retry_s: float = 180.0
    requests: int = 16
    part_bytes: int = 8 * MIB
    conditional_puts: bool | None = None
    settle_s: float = 1.0

    def part_bytes_for(self, nbytes: int) -> int:
        """Return the size of the parts of a blob; larger than `part_bytes` if there would be too many."""
        least = -(-nbytes // _MOST_PARTS)
        return max(self.part_bytes, -(-least // MIB) * MIB)


@dataclass(frozen=True)
class Bucket:
    """An open bucket, with what all places in it share."""

    raw_client: Any
    """obstore's client; use `client`, which checks the process."""
    policy: RequestPolicy
    official: bool
    """Whether this is the provider's own endpoint, whose behaviour is known."""
    service: str
    name: str
    all_slots: threading.BoundedSemaphore
    budget: MemoryBudget
    """Memory for parts that are copied before they are sent, shared by all uploads."""
    probed: dict[str, bool] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Serialises puts of this process where the service checks no conditions."""
    options: dict[str, Any] = field(default_factory=dict)
    """The options it was opened with; they may contain secrets."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment variables it was opened with, for opening it again; they may contain secrets."""
    server: tuple[str, ...] = ()
    """Identifies server and account, however they were named."""

    def __repr__(self) -> str:
        return f"Bucket({self.service}, {self.name!r})"  # without secrets

    @property
    def client(self) -> Any:
        self.check_process()
        return self.raw_client

    @property
    def slots(self) -> threading.BoundedSemaphore:
        """One slot for each request that may be in flight."""
        self.check_process()  # after a fork, slots of threads that are gone are never released
        return self.all_slots

    def check_process(self) -> None:
        """Raise in a fork of a process that used obstore: its threads do not exist here, and requests would hang."""
        if os.getpid() != _first_user():
            raise CheckpointError(
                f"{self.service}://{self.name}: this process was forked after the store was used, and cannot use it",
                hint="start it with spawn or forkserver (DataLoader: multiprocessing_context='forkserver')",
            )

    def request(self, verb: str, url: str, name: str, work: Callable[[Any], T]) -> T:
        """Call `work` with the client, for a request that can safely be made twice; retries it, raises our errors."""

        def once() -> T:
            with self.slots, object_errors(f"cannot {verb}", url, name):
                return work(self.client)

        return self.retry(f"{verb} {url}/{name}", once)

    def retry(self, what: str, work: Callable[[], T], *, can: Callable[[], bool] = lambda: True) -> T:
        return call_with_retries(what, work, retries=self.policy.retries, within_s=self.policy.retry_s, can=can)


@functools.cache
def _first_user() -> int:
    """Return the first process to use obstore, of this one and those it was forked from."""
    return os.getpid()


def open_bucket(scheme: str, name: str, options: dict[str, Any]) -> Bucket:
    """Open a bucket, without any request."""
    service = SCHEMES[scheme]
    try:
        # The environment is part of the cache key: it may change between two calls.
        return _open(service, name, _frozen(options), tuple(sorted(environment_of(service).items())))
    except TypeError as exc:
        raise CheckpointError(f"{scheme}://{name}: an option has a value of the wrong type: {exc}") from None


def _frozen(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, _frozen(value) if isinstance(value, dict) else value)
        for key, value in sorted(options.items())
        if value is not None
    )


def _thawed(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    found = dict(options)
    if "client_options" in found:
        found["client_options"] = client = dict(found["client_options"])
        if "default_headers" in client:
            client["default_headers"] = dict(client["default_headers"])
    return found


@functools.lru_cache(maxsize=64)
def _open(service: str, name: str, options: tuple[tuple[str, Any], ...], read: tuple[tuple[str, str], ...]) -> Bucket:
    given, environment = _thawed(options), dict(read)
    policy = _policy(given)
    url = f"{service}://{name}"
    more = resolve_options(service, given, url, environment)
    official, at = server_identity(service, more)
    endpoint = str(more.get("endpoint", ""))
    if service == "gs" and endpoint:
        more["base_url"] = more.pop("endpoint")
    if service == "s3" and endpoint and environment.get("AWS_ENDPOINT_URL_S3") is not None:
        more["aws_endpoint_url_s3"] = endpoint  # otherwise the variable would take precedence
    client: dict[str, Any] = {"timeout": timedelta(seconds=policy.timeout_s), "connect_timeout": timedelta(seconds=10)}
    client.update(more.pop("client_options", ()))
    if endpoint.lower().startswith("http://"):  # explicitly asked for
        client.setdefault("allow_http", True)
    if service == "s3":
        # SHA-256 costs nothing, because requests are signed with it anyway.
        if not environment.get("AWS_CHECKSUM_ALGORITHM"):
            more.setdefault("checksum_algorithm", "sha256")
        if str(more.get("checksum_algorithm")).lower() in {"none", "false"}:
            del more["checksum_algorithm"]
        _add_certificates(client, url, environment)
        if provider := _boto3_keys(more, environment):
            more["credential_provider"] = provider
    isolate_credentials(service, more, url, environment)
    retry = {"max_retries": policy.retries, "retry_timeout": timedelta(seconds=policy.retry_s)}
    return Bucket(
        _client(service, name, client_options=client, retry_config=retry, **more), policy, official, service, name,
        threading.BoundedSemaphore(policy.requests), MemoryBudget(policy.requests * policy.part_bytes),
        options=_thawed(options), environment=environment, server=at,
    )  # fmt: skip


def _add_certificates(client: dict[str, Any], url: str, environment: Mapping[str, str]) -> None:
    """Trust the certificates that AWS_CA_BUNDLE names, as the AWS tools do; obstore does not read it."""
    file = environment.get("AWS_CA_BUNDLE")
    if file and "root_certificate" not in client:
        try:
            with open(file, "rb") as bundle:
                client["root_certificate"] = bundle.read()
        except OSError as exc:
            raise CheckpointError(
                f"{url}: the certificates cannot be read: {exc}", hint="correct the variable AWS_CA_BUNDLE"
            ) from None


def _policy(given: dict[str, Any]) -> RequestPolicy:
    """Take our own options out of `given`."""
    mine = {key: given.pop(key) for key in RequestPolicy.__dataclass_fields__ if key in given}
    if "part_bytes" in mine:
        mine["part_bytes"] = int(parse_size(mine["part_bytes"], "part_bytes"))
    policy = RequestPolicy(**mine)
    for key in ("timeout_s", "retry_s", "requests", "part_bytes"):
        if not getattr(policy, key) > 0:
            raise CheckpointError(f"{key}={getattr(policy, key)!r}: must be more than 0")
    if policy.retries < 0 or policy.settle_s < 0:
        raise CheckpointError("retries and settle_s cannot be negative")
    if policy.part_bytes < _LEAST_PART_BYTES:
        raise CheckpointError(f"part_bytes={policy.part_bytes}: S3 takes no parts of less than {_LEAST_PART_BYTES}")
    return policy


def obstore() -> Any:
    """Import obstore, or say how to install it."""
    try:
        return importlib.import_module("obstore")
    except ModuleNotFoundError as exc:
        raise CheckpointError("object stores need the package obstore", hint=_INSTALL) from exc


def _client(service: str, name: str, **more: Any) -> Any:
    stores = importlib.import_module(f"{obstore().__name__}.store")
    try:
        return getattr(stores, _CLASSES[service])(name, **more)
    except Exception as exc:
        if not is_obstore_error(exc) and not isinstance(exc, ValueError):
            raise
        # Only the first paragraph: the rest may contain keys.
        text = str(exc).partition("\n\nDebug")[0]
        unknown = type(exc).__name__ == "UnknownConfigurationKeyError"
        hint = "see shardkeep.open_place" if unknown else CREDENTIAL_HINTS[service]
        raise CheckpointError(f"cannot open {service}://{name}: {text}", hint=hint) from None


def _boto3_keys(more: dict[str, Any], environment: Mapping[str, str]) -> Any:
    """Return credentials of a profile, if one was chosen, or if there are no others and the machine has profiles."""
    chosen = more.pop("profile", None)
    if _KEY_OPTIONS & more.keys() or (not chosen and any(map(environment.get, _OTHER_KEYS))):
        return None
    profile = chosen or environment.get("AWS_PROFILE")
    if not profile and not os.path.exists(
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    ):
        return None
    try:
        boto3 = importlib.import_module("boto3")
    except ModuleNotFoundError as exc:
        if not profile:
            return None
        raise CheckpointError(f"the profile {profile!r} needs the package boto3", hint="pip install boto3") from exc
    try:
        keys = boto3.Session(profile_name=profile).get_credentials()
    except Exception as exc:  # noqa: BLE001 - botocore's, which cannot be imported by name here
        raise CheckpointError(f"the profile {profile or 'default'!r} gives no keys: {exc}") from None
    return None if keys is None else functools.partial(_current_keys, keys)


def _current_keys(keys: Any) -> dict[str, Any]:
    """Return credentials that boto3 renews, as obstore takes them from a provider."""
    now = keys.get_frozen_credentials()
    until = datetime.now(timezone.utc) + _CREDENTIAL_LIFETIME
    return {
        "access_key_id": now.access_key, "secret_access_key": now.secret_key, "token": now.token, "expires_at": until,
    }  # fmt: skip


# -- server and account -----------------------------------------------------------------------------------------------

CREDENTIAL_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass access_key_id= and secret_access_key= to"
    " shardkeep.open_place",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or pass service_account= or bearer_token="
    " to shardkeep.open_place",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN, or"
    " AZURE_STORAGE_CONNECTION_STRING), or pass account_name= and account_key= (sas_key=, connection_string=) to"
    " shardkeep.open_place",
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables of the endpoint; the first one that is set counts."""
_NETWORK = (
    "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "all_proxy", "no_proxy",
)  # fmt: skip
_VARIABLES = {
    "s3": ("AWS_", *_NETWORK),
    "gs": ("GOOGLE_", "GCE_METADATA_", "STORAGE_EMULATOR_HOST", *_NETWORK),
    "az": ("AZURE_", "AZURITE_", "IDENTITY_HEADER", *_NETWORK),
}
"""Prefixes of the variables that shardkeep or obstore reads."""
_PREFIXES = {"s3": ("aws_",), "gs": ("google_",), "az": ("azure_storage_", "azure_")}
_ALIASES = {
    "s3": {"endpoint_url_s3": "endpoint", "endpoint_url": "endpoint", "token": "session_token", "default_region": "region"},
    "gs": {"base_url": "endpoint", "service_account_path": "service_account"},
    "az": {
        "account": "account_name", "key": "account_key", "access_key": "account_key", "master_key": "account_key",
        "sas_token": "sas_key", "bearer_token": "token",
    },
}  # fmt: skip
_OWN_HOSTS = {
    "s3": (".amazonaws.com", ".amazonaws.com.cn"),
    "gs": ("storage.googleapis.com",),
    "az": (".core.windows.net", ".core.usgovcloudapi.net", ".core.chinacloudapi.cn"),
}
_GOOGLE_FILES = {
    "service_account": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    "application_credentials": ("GOOGLE_APPLICATION_CREDENTIALS",),
}
_GOOGLE_KEYS = ("service_account", "service_account_key", "application_credentials", "bearer_token", "skip_signature")
_AZURE_KEYS = {"token": "token", "account_key": "access_key", "sas_key": "sas_token"}
"""Options that are credentials, and their names in obstore's credential providers."""
_AZURE_TYPES = {
    "federated_token_file": "workload_identity", "client_secret": "client_secret", "use_azure_cli": "azure_cli",
}  # fmt: skip
"""Options that lead to credentials, and the obstore credential type that uses only them."""
_AWS_FIXED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_AZURE_CONFLICTS = (
    "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE", "AZURE_CREDENTIAL_TYPE",
)  # fmt: skip
_CONFLICTS: dict[str, dict[str, tuple[str, ...]]] = {
    "s3": {
        "access_key_id": ("AWS_SESSION_TOKEN", "AWS_TOKEN"),
        "web_identity_token_file": _AWS_FIXED,
        "container_credentials_relative_uri": (*_AWS_FIXED, "AWS_WEB_IDENTITY_TOKEN_FILE"),
        "container_credentials_full_uri": (
            *_AWS_FIXED, "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"
        ),
    },
    "gs": {
        "bearer_token": (*_GOOGLE_FILES["service_account"], "GOOGLE_SERVICE_ACCOUNT_KEY"),
        "service_account_key": ("GOOGLE_BEARER_TOKEN", *_GOOGLE_FILES["service_account"]),
        "service_account": ("GOOGLE_BEARER_TOKEN", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        "application_credentials": (
            "GOOGLE_BEARER_TOKEN", *_GOOGLE_FILES["service_account"], "GOOGLE_SERVICE_ACCOUNT_KEY"
        ),
    },
    "az": dict.fromkeys((*_AZURE_KEYS, *_AZURE_TYPES), _AZURE_CONFLICTS),
}  # fmt: skip
"""Kinds of credentials, and the variables that obstore would use in addition to them, or instead of them."""
_ADDRESS = re.compile(r"[\w.~:/?#\[\]@!$&'()*+,;=%-]+", re.ASCII)
"""Characters of an address; obstore panics at any other."""
_HOST = re.compile(r"[\w.-]+|[0-9a-f:.]*:[0-9a-f:.]*", re.ASCII)
_LONGEST_PATH = 1024
_AZURE_ACCOUNT = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
_EMULATOR = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}
"""Azurite's account, which is public and the same everywhere."""


def environment_of(service: str) -> dict[str, str]:
    """Return the environment variables of a service; they may contain secrets."""
    return settings_with(_VARIABLES[service])


def resolve_options(
    service: str, options: Mapping[str, Any], url: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return options by their canonical names, with endpoint and account from the environment if they have none."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = key.lower()
        prefix = next((each for each in _PREFIXES[service] if name.startswith(each)), "")
        name = _ALIASES[service].get(name.removeprefix(prefix), name.removeprefix(prefix))
        if name in found:
            raise CheckpointError(f"{url}: {key}= is given twice, under two names of {name}=", hint="pass one of them")
        found[name] = value
    if service == "az":
        _resolve_azure(found, url, environment)
    if service == "gs":
        _check_google_files(found, url, environment)
    if "endpoint" not in found:
        given = ((name, value) for name in _ENDPOINTS[service] if (value := environment.get(name)))
        variable, found["endpoint"] = next(given, ("", ""))
        if variable == "STORAGE_EMULATOR_HOST":
            # As Google's own libraries do: the address of an emulator may lack http://, and it needs no credentials.
            if "://" not in found["endpoint"]:
                found["endpoint"] = f"http://{found['endpoint']}"
            variables = [f"GOOGLE_{name.upper()}" for name in _GOOGLE_KEYS]
            if not found.keys() & {*_GOOGLE_KEYS, "credential_provider"} and not any(map(environment.get, variables)):
                found["bearer_token"] = "emulator"  # noqa: S105 - of no use elsewhere; unsigned, obstore only reads
    if found["endpoint"]:
        found["endpoint"] = _checked_address(str(found["endpoint"]).strip(), url)
    else:
        del found["endpoint"]
    return found


def _checked_address(text: str, url: str) -> str:
    try:
        parts = urlsplit(text)
        fits = parts.scheme in {"http", "https"} and parts.port != 0
        fits = fits and bool(_ADDRESS.fullmatch(text) and _HOST.fullmatch(parts.hostname or ""))
    except ValueError:
        fits = False
    if not fits:
        shown = text.rpartition("@")[2]  # there may be a password before it
        raise CheckpointError(
            f"{url}: endpoint {shown!r}: not the address of a service", hint="write https://host or http://host:port"
        )
    return text


def _check_google_files(found: dict[str, Any], url: str, environment: Mapping[str, str]) -> None:
    """Reject the text of a file where its path belongs: obstore would show it, as the path of a missing file."""
    for option, variables in _GOOGLE_FILES.items():
        for name, value in ((f"{option}=", found.get(option)), *((name, environment.get(name)) for name in variables)):
            text = str(value or "")
            if len(text) > _LONGEST_PATH or not text.isprintable() or "{" in text:
                raise CheckpointError(
                    f"{url}: {name} is not the path of a file; its value is not shown here",
                    hint="the text of a service account's file goes into GOOGLE_SERVICE_ACCOUNT_KEY, or service_account_key=",
                )


def server_identity(service: str, found: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Return whether this is the provider's own service, and what identifies server and account, however written."""
    account, endpoint = str(found.get("account_name", "")), str(found.get("endpoint", ""))
    parts = urlsplit(endpoint)
    for own in _OWN_HOSTS[service]:
        if not endpoint or (parts.hostname or "").endswith(own):
            return True, (service, own, account)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return False, (service, f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}", account)


# -- credentials -------------------------------------------------------------------------------------------------------


def isolate_credentials(service: str, found: dict[str, Any], url: str, environment: Mapping[str, str]) -> None:
    """Change options so that credentials among them are used alone, without any from the environment."""
    if is_true(found.get("skip_signature")):
        return
    kind = next((name for name in _CONFLICTS[service] if _is_given(found, name)), None)
    if "credential_provider" in found or kind is not None:
        found["skip_signature"] = False  # whatever the environment says
    if "credential_provider" in found or kind is None:
        return
    if kind in _AZURE_KEYS:
        found[kind] = _checked_azure_key(kind, str(found[kind]), url)
    conflict = next((name for name in _CONFLICTS[service][kind] if name in environment), None)
    if conflict is None:
        return
    if keys := _fixed_credentials(kind, found):
        found["credential_provider"] = lambda: {**keys, "expires_at": None}
    elif service == "az":
        found.setdefault("credential_type", _AZURE_TYPES[kind])
    else:
        raise CheckpointError(
            f"{url}: {kind}= would not be used alone: {conflict} is set, too",
            hint=f"unset {conflict}, which is for other buckets",
        )


def _is_given(found: dict[str, Any], kind: str) -> bool:
    if kind == "access_key_id":
        return bool(found.get(kind) and found.get("secret_access_key"))
    return is_true(found.get(kind)) if kind == "use_azure_cli" else bool(found.get(kind))


def _fixed_credentials(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return credentials as obstore takes them from a provider; empty if they have yet to be requested."""
    if kind == "access_key_id":
        fixed = {name: found[name] for name in ("access_key_id", "secret_access_key")}
        return {**fixed, "token": found.get("session_token")}
    if kind == "bearer_token":
        return {"token": found[kind]}
    return {_AZURE_KEYS[kind]: found[kind]} if kind in _AZURE_KEYS else {}


def _checked_azure_key(name: str, key: str, url: str) -> str:
    """Check what obstore would only find out at the first request, and then not report clearly."""
    fits = True
    if name == "account_key":
        try:
            base64.b64decode(key, validate=True)
        except ValueError:
            fits = False
    elif name == "sas_key":
        key = key.removeprefix("?")
        fits = all("=" in pair for pair in key.split("&"))
    if not fits:
        shape = "in base64" if name == "account_key" else "a list of name=value, joined by '&'"
        raise CheckpointError(
            f"{url}: {name}= is not {shape}, so it is not a key of Azure", hint=CREDENTIAL_HINTS["az"]
        )
    return key


# -- Azure -------------------------------------------------------------------------------------------------------------


def _resolve_azure(found: dict[str, Any], url: str, environment: Mapping[str, str]) -> None:
    given = found.pop("connection_string", None)
    emulator = found.pop("use_emulator", None)
    if "AZURE_STORAGE_USE_EMULATOR" in environment:
        found["use_emulator"] = False  # otherwise obstore would only use Azurite; we set its address ourselves
    text = given or environment.get("AZURE_STORAGE_CONNECTION_STRING")
    if is_true(environment.get("AZURE_STORAGE_USE_EMULATOR") if emulator is None else emulator):
        _add(found, _azurite(environment))
    elif text:
        parsed = _parse_connection_string(text, url, environment)
        # A connection string in the environment may be for another account.
        if given or found.get("account_name") in {None, parsed["account_name"]}:
            _add(found, parsed)
    account = next(filter(None, map(environment.get, _AZURE_ACCOUNT)), None)
    # Azure's own command line reads AZURE_STORAGE_KEY, and obstore does not.
    key = None if environment.get("AZURE_STORAGE_ACCOUNT_KEY") else environment.get("AZURE_STORAGE_KEY")
    _add(found, {**({"account_name": account} if account else {}), **({"account_key": key} if key else {})})


def _add(found: dict[str, Any], more: dict[str, Any]) -> None:
    """Add options that are not set yet; credentials only if there are none of any kind."""
    has_credentials = not found.keys().isdisjoint({"credential_provider", "skip_signature"})
    has_credentials = has_credentials or any(_is_given(found, kind) for kind in _CONFLICTS["az"])
    for name, value in more.items():
        if not (has_credentials and name in _AZURE_KEYS):
            found.setdefault(name, value)


def _parse_connection_string(text: str, url: str, environment: Mapping[str, str]) -> dict[str, Any]:
    pairs = [pair.partition("=") for pair in text.strip().strip(";").split(";")]
    parsed = {name.strip().lower(): value.strip() for name, equals, value in pairs if equals}
    if parsed.get("usedevelopmentstorage", "").lower() == "true":
        return _azurite(environment)
    account, suffix = parsed.get("accountname"), parsed.get("endpointsuffix")
    endpoint = parsed.get("blobendpoint")
    if not endpoint and account and suffix:
        endpoint = f"{parsed.get('defaultendpointsprotocol', 'https')}://{account}.blob.{suffix}"
    if not account and endpoint:  # one with a signature has no account name
        parts = urlsplit(endpoint)
        account = parts.path.strip("/") or str(parts.hostname).partition(".")[0]
    if not account:
        raise CheckpointError(
            f"{url}: a connection string of Azure has no AccountName= and no BlobEndpoint=",
            hint="copy it whole, as the portal shows it, into AZURE_STORAGE_CONNECTION_STRING or connection_string=",
        )
    signature = (parsed.get("sharedaccesssignature") or "").removeprefix("?")
    found = {
        "account_name": account, "account_key": parsed.get("accountkey"), "sas_key": signature, "endpoint": endpoint,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def _azurite(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options for Azurite on this machine, at its default address or the one in the environment."""
    at = (environment.get("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000").rstrip("/")
    return {**_EMULATOR, "endpoint": f"{at}/{_EMULATOR['account_name']}"}


def is_true(value: object) -> bool:
    """Read a switch as obstore does."""
    return str(value).lower() in {"true", "1", "yes", "on", "t", "y"}


# -- errors ------------------------------------------------------------------------------------------------------------

_STATUS = re.compile(r"status code: (\d{3}) ?([^:<\n]*)")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,500})")  # Azure has a number and a time below it
_RETRIES = re.compile(r"after (\d+) retries")
_QUERY = re.compile(r"\?[^\s\"',]*")
_UNTRUSTED = "the server's certificate was not accepted"
_REASONS = (
    ("Connection refused", errno.ECONNREFUSED, "the connection was refused"),
    ("dns error|failed to lookup address", errno.EHOSTUNREACH, "the host's name was not found"),
    ("TimedOut|kind: Timeout|timed out", errno.ETIMEDOUT, "no answer in time"),
    ("lacked valid authentication", errno.EACCES, "the credentials are not valid"),
    ("BadScheme", errno.EINVAL, "plain http is not allowed"),
    ("InvalidCertificate|certificate", errno.EACCES, _UNTRUSTED),
    ("Network is unreachable", errno.ENETUNREACH, "the network cannot be reached"),
    ("ConnectionReset", errno.ECONNRESET, "the connection was reset"),
    ("connection closed|IncompleteMessage", errno.ECONNRESET, "the connection was closed"),
    ("error decoding response body", errno.ECONNRESET, "the answer broke off"),
    ("kind: Connect", errno.ECONNREFUSED, "no connection could be made"),
    ("kind: Interrupted", errno.ECONNRESET, "the connection broke off"),
)
"""What to look for in the text of obstore's exceptions, the most specific first."""
_BY_CODE = {
    **dict.fromkeys(
        ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServerBusy"), errno.EBUSY
    ),
    "BlobAlreadyExists": errno.EEXIST,  # Azure answers 409 where a put may only create; the others answer 412
    "RequestTimeout": errno.ETIMEDOUT,
}
_SAME = {
    "ContainerNotFound": "NoSuchBucket",
    "ResourceNotFound": "NoSuchBucket",  # or the account does not exist; a missing blob has another code
    "InvalidBlockList": "NoSuchUpload",  # the answer to committing an upload twice
    "Md5Mismatch": "BadDigest",
}
"""Azure's error codes, as the other services name them."""
_NO_CONTAINER = "container does not exist"
"""In the text of a failed bulk deletion, which has no code."""
_DAMAGED = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"})
"""The service received other bytes than were sent."""
_BY_STATUS = {
    400: errno.EINVAL, 401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 408: errno.ETIMEDOUT,
    409: errno.EBUSY, 412: errno.EEXIST, 416: errno.EINVAL, 429: errno.EBUSY, 503: errno.EBUSY, 504: errno.ETIMEDOUT,
}  # fmt: skip
_NO_KEYS = (
    "/latest/api/token", "/latest/meta-data", "metadata.google.internal", "/computeMetadata/", "/metadata/identity",
    "MissingAccessKeyId",
)  # fmt: skip
"""Traces of a search for credentials that were given nowhere."""
_HINTS_BY_CODE = {
    "NoSuchBucket": "create the bucket, or correct its name{account}; nothing was written",
    "InvalidAccessKeyId": "the access key is unknown there: {keys}",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: {keys}",
    "AuthenticationFailed": "the key does not belong to the account: {keys}",
    "AccessDenied": "these credentials do not allow this; the bucket's policy must grant it",
    "AuthorizationPermissionMismatch": "these credentials do not allow this; they need permission to read, write and delete",
    "ExpiredToken": "the session's token has expired: get a new one",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "BadDigest": "the network changed bytes on the way; the service kept none of them",
    "PermanentRedirect": "the bucket is in another region: set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
}
_HINTS_BY_ERRNO = {
    errno.ECONNREFUSED: "nothing answers there: correct the endpoint ({endpoint}), or start the service",
    errno.EHOSTUNREACH: "correct the endpoint ({endpoint}), the region or the account",
    errno.EACCES: "check credentials and permissions: {keys}",
    errno.EBUSY: "the service is overloaded or throttles requests: lower requests=, or try later",
    errno.ETIMEDOUT: "raise timeout_s=, or check the service",
}
_ENDPOINT_VARIABLES = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}


@contextmanager
def object_errors(action: str, url: str, name: str = "", offset: int | None = None) -> Iterator[None]:
    """Turn an exception that obstore raises inside into one of our errors."""
    try:
        yield
    except StorageError:
        raise
    except Exception as exc:
        if not is_obstore_error(exc):
            raise
        raise translate(exc, action, url, name, offset) from None


def is_obstore_error(exc: BaseException) -> bool:
    """Return whether obstore raised an exception: its own, or the built-in one for a missing object."""
    return isinstance(exc, FileNotFoundError) or (type(exc).__module__ or "").startswith("obstore")


def translate(exc: BaseException, action: str, url: str, name: str = "", offset: int | None = None) -> StorageError:
    """Return our error for an exception of obstore."""
    text = str(exc)
    code = _found(_CODE, text)
    code = _SAME.get(code, code) or ("NoSuchBucket" if _NO_CONTAINER in text else "")
    number, summary = _judged(type(exc).__name__, text, code)
    if times := int(_found(_RETRIES, text) or 0):
        summary += f", after {times} retries"
    summary += f" (errno {errno.errorcode.get(number, number)})"
    service = {"g": "gs", "a": "az"}.get(url[:1].lower(), "s3")  # gs, gcs; az, azure, abfs, abfss; s3, s3a
    hint = _HINTS_BY_CODE.get(code) or _HINTS_BY_ERRNO.get(number, "")
    if summary.startswith(_UNTRUSTED):
        hint = "set SSL_CERT_FILE to a file of the certificates to trust, or pass client_options=dict(root_certificate=...)"
    elif code not in _DAMAGED and "x-amz-checksum" in text.lower():
        hint = (
            "this service does not accept checksums of uploads: pass checksum_algorithm='none' to shardkeep.open_place"
        )
    elif "BadScheme" in text:
        switch = "set AWS_ALLOW_HTTP=true" if service == "s3" else "pass client_options=dict(allow_http=True)"
        hint = f"use an https:// endpoint, or {switch}"
    elif any(mark in text for mark in _NO_KEYS):
        summary, hint = "no keys to sign requests with", "no keys were found here: {keys}"
    hint = hint.format(
        keys=CREDENTIAL_HINTS[service],
        endpoint=_ENDPOINT_VARIABLES[service],
        account=" or the account's" if service == "az" else "",
    )
    at = "" if offset is None else f" at offset {offset}"
    missing = number == errno.ENOENT and code not in {"NoSuchBucket", "NoSuchUpload"}
    return (BlobNotFound if missing else StorageError)(
        f"{url}/{name}: {action}{at}: {summary}" if name else f"{url}: {action}{at}: {summary}",
        hint=hint, name=name, offset=offset, errno=number, retried=times > 0, code=code,
    )  # fmt: skip


def _judged(kind: str, text: str, code: str) -> tuple[int, str]:
    """Return an errno and a summary in one line."""
    found = _STATUS.search(text)
    if found is None and kind == "FileNotFoundError":
        return errno.ENOENT, code or "no such object"
    if found is None:
        for words, number, reason in _REASONS:
            if re.search(words, text):
                return number, reason
        return errno.EIO, _QUERY.sub("", text.partition("\n\nDebug source")[0])[:500]
    status = int(found[1])
    detail = _found(_MESSAGE, text)
    summary = f"{status} {code or found[2].strip()}{': ' + detail if detail else ''}"
    if code in _DAMAGED:
        return errno.EIO, f"the service received other bytes than were sent: {summary}"
    return _BY_CODE.get(code) or _BY_STATUS.get(status, errno.EIO if status >= 500 else errno.EINVAL), summary


def _found(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
