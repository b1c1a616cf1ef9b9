"""
Opens buckets, once per process and set of options, and makes their requests.

Server, account and credentials come from the options, or else from the usual environment variables. If credentials are
given as options, no credential of the environment is used with them: obstore would combine the two, such as the token of
one bucket with the key of another. Where that cannot be prevented, opening the bucket fails and names the variable.

An error says which object, what the service answered, and what to do. obstore's own exceptions are dropped, even as a
cause, because their text contains whole URLs, which may contain keys.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from msgspec import Meta, Struct, ValidationError, convert

from shardkeep.errors import BlobNotFound, CheckpointError, StorageError
from shardkeep.options import MIB, parse_size, settings_with
from shardkeep.storage.buffers import MemoryBudget
from shardkeep.storage.retry import call_with_retries

T = TypeVar("T")

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
"""The schemes of URLs, and the service of each."""
_CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_MOST_PARTS = 10_000
"""Limit of S3 for one upload."""
_LEAST_PART_BYTES = 5 * MIB
"""Limit of S3 for all parts but the last."""
_CREDENTIAL_LIFETIME = timedelta(minutes=10)
_INSTALL = "pip install 'shardkeep[cloud]'"


class RequestPolicy(Struct, frozen=True):
    """How requests are made. `open_place` documents these options."""

    timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    retries: Annotated[int, Meta(ge=0)] = 8
    retry_s: Annotated[float, Meta(gt=0)] = 180.0
    requests: Annotated[int, Meta(gt=0)] = 16
    part_bytes: Annotated[int, Meta(ge=_LEAST_PART_BYTES)] = 8 * MIB
    conditional_puts: bool | None = None
    settle_s: Annotated[float, Meta(ge=0)] = 1.0

    def part_bytes_for(self, nbytes: int) -> int:
        """Return the size of the parts of a blob; larger than `part_bytes` if there would be too many."""
        least = -(-nbytes // _MOST_PARTS)
        return max(self.part_bytes, -(-least // MIB) * MIB)


class Bucket:
    """An open bucket, with what all places in it share."""

    def __init__(self, service: str, name: str, options: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Open a bucket, without any request. Options and environment may contain secrets."""
        url = f"{service}://{name}"
        self.service, self.name, self.options, self.environment = service, name, options, environment
        given = dict(options)
        self.policy = _policy(given, url)
        more = resolve_options(service, given, url, environment)
        self.official, self.server = server_identity(service, more)
        """Whether this is the provider's own endpoint, whose behaviour is known; and what identifies server and account."""
        self._client = _open_client(service, name, self.policy, more, environment)
        self._slots = threading.BoundedSemaphore(self.policy.requests)
        self.budget = MemoryBudget(self.policy.requests * self.policy.part_bytes)
        """Memory for parts that are copied before they are sent, shared by all uploads."""
        self.probed: dict[bool, bool] = {}
        """Whether the service checks the condition of a put that creates (True) and of one that replaces (False)."""
        self.warned: set[str] = set()
        self.lock = threading.Lock()
        """Serialises puts of this process where the service checks no conditions."""

    def __repr__(self) -> str:
        return f"Bucket({self.service}, {self.name!r})"  # without secrets

    @property
    def client(self) -> Any:
        self.check_process()
        return self._client

    @property
    def slots(self) -> threading.BoundedSemaphore:
        """One slot for each request that may be in flight."""
        self.check_process()  # after a fork, slots of threads that are gone are never released
        return self._slots

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
    """Return the id of the first process that used obstore: this one, or one that it was forked from."""
    return os.getpid()


_buckets: dict[Any, Bucket] = {}


def open_bucket(scheme: str, name: str, options: dict[str, Any]) -> Bucket:
    service = SCHEMES[scheme]
    environment = environment_of(service)
    given = {key: value for key, value in options.items() if value is not None}
    try:
        key = (service, name, _frozen(given), _frozen(environment))
        if key not in _buckets:
            _buckets[key] = Bucket(service, name, given, environment)
        return _buckets[key]
    except TypeError as exc:
        raise CheckpointError(f"{scheme}://{name}: an option has a value of the wrong type: {exc}") from None


def _frozen(value: Any) -> Any:
    """Return options as a value that can be hashed: each dict in them as a set of its items."""
    return frozenset((key, _frozen(each)) for key, each in value.items()) if isinstance(value, dict) else value


def _open_client(
    service: str, name: str, policy: RequestPolicy, more: dict[str, Any], environment: Mapping[str, str]
) -> Any:
    url = f"{service}://{name}"
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
    stores = importlib.import_module(f"{obstore().__name__}.store")
    try:
        return getattr(stores, _CLASSES[service])(name, client_options=client, retry_config=retry, **more)
    except Exception as exc:
        if not is_obstore_error(exc) and not isinstance(exc, ValueError):
            raise
        # Only the first paragraph: the rest may contain keys.
        text = str(exc).partition("\n\nDebug")[0]
        unknown = type(exc).__name__ == "UnknownConfigurationKeyError"
        hint = "see shardkeep.open_place" if unknown else CREDENTIAL_HINTS[service]
        raise CheckpointError(f"cannot open {url}: {text}", hint=hint) from None


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


def _policy(given: dict[str, Any], url: str) -> RequestPolicy:
    mine = {key: given.pop(key) for key in RequestPolicy.__struct_fields__ if key in given}
    if "part_bytes" in mine:
        mine["part_bytes"] = int(parse_size(mine["part_bytes"], "part_bytes"))
    try:
        return convert(mine, RequestPolicy)
    except ValidationError as exc:
        raise CheckpointError(f"{url}: an option is not valid: {exc}", hint="see shardkeep.open_place") from None


def obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ModuleNotFoundError as exc:
        raise CheckpointError("object stores need the package obstore", hint=_INSTALL) from exc


def _boto3_keys(more: dict[str, Any], environment: Mapping[str, str]) -> Any:
    """Return credentials of a profile, if one was chosen, or if there are no others and the machine has profiles."""
    chosen = more.pop("profile", None)
    if _has_credentials("s3", more) or (not chosen and any(map(_CONFLICTS["s3"].fullmatch, environment))):
        return None
    profile = chosen or environment.get("AWS_PROFILE")
    if not profile and not os.path.exists(
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    ):
        return None
    try:
        boto3, auth = importlib.import_module("boto3"), importlib.import_module("obstore.auth.boto3")
    except ModuleNotFoundError as exc:
        if not profile:
            return None
        raise CheckpointError(f"the profile {profile!r} needs the package boto3", hint="pip install boto3") from exc
    try:
        return auth.Boto3CredentialProvider(boto3.Session(profile_name=profile), ttl=_CREDENTIAL_LIFETIME)
    except Exception as exc:  # noqa: BLE001 - botocore's, which cannot be imported by name here
        if not profile and isinstance(exc, ValueError):  # the default profile has no keys
            return None
        raise CheckpointError(f"the profile {profile or 'default'!r} gives no keys: {exc}") from None


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
_PREFIX = re.compile("^(aws|google|azure_storage|azure)_")
_ALIASES = {
    "s3": {"endpoint_url_s3": "endpoint", "endpoint_url": "endpoint", "token": "session_token"},
    "gs": {"base_url": "endpoint", "service_account_path": "service_account"},
    "az": {"access_key": "account_key", "master_key": "account_key", "sas_token": "sas_key", "bearer_token": "token"},
}
"""Other names that obstore has for endpoints and credentials."""
_CREDENTIALS = {
    "s3": {"access_key_id": "access_key_id", "secret_access_key": "secret_access_key", "session_token": "token"},
    "gs": {"bearer_token": "token"},
    "az": {"account_key": "access_key", "sas_key": "sas_token", "token": "token"},
}
"""Options that are credentials, and their names in obstore's credential providers."""
_SOURCES = {
    "s3": ("web_identity_token_file", "container_credentials_relative_uri", "container_credentials_full_uri"),
    "gs": ("service_account", "service_account_key", "application_credentials"),
    "az": ("client_secret", "federated_token_file", "use_azure_cli"),
}
"""Options from which obstore obtains credentials."""
_CONFLICTS = {
    "s3": re.compile("AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|WEB_IDENTITY_.*|CONTAINER_CREDENTIALS_.*|SKIP_SIGNATURE)"),
    "gs": re.compile("GOOGLE_(BEARER_TOKEN|SERVICE_ACCOUNT.*)"),
    "az": re.compile("AZURE_(STORAGE_)?(.*(KEY|TOKEN)|CLIENT_SECRET|FEDERATED_TOKEN_FILE|CREDENTIAL_TYPE)"),
}
"""Variables that obstore might use in addition to such an option, or instead of it."""
_OWN_HOSTS = {
    "s3": (".amazonaws.com", ".amazonaws.com.cn"),
    "gs": ("storage.googleapis.com",),
    "az": (".core.windows.net", ".core.usgovcloudapi.net", ".core.chinacloudapi.cn"),
}
_ADDRESS = re.compile(r"https?://([\w.-]+|\[[0-9a-f:.]+\])(:\d+)?(/[\w.~:@!$&'()*+,;=%/-]*)?", re.ASCII | re.IGNORECASE)
"""The address of a service; obstore panics if it has other characters."""
_LONGEST_PATH = 1024
_EMULATOR = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}
"""Azurite's account, which is public and the same everywhere."""
_OF_EMULATOR = "UseDevelopmentStorage=true"


def environment_of(service: str) -> dict[str, str]:
    """Return the environment variables of a service; they may contain secrets."""
    return settings_with(_VARIABLES[service])


def resolve_options(
    service: str, options: Mapping[str, Any], url: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return options by their canonical names, with endpoint and account from the environment if they have none."""
    found = {_canonical_name(service, key): value for key, value in options.items()}
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
            if not _has_credentials(service, found):
                found["bearer_token"] = "emulator"  # noqa: S105 - of no use elsewhere; unsigned, obstore only reads
    endpoint = str(found.pop("endpoint")).strip()
    if endpoint and not _ADDRESS.fullmatch(endpoint):
        shown = endpoint.rpartition("@")[2]  # there may be a password before it
        raise CheckpointError(
            f"{url}: endpoint {shown!r}: not the address of a service", hint="write https://host or http://host:port"
        )
    return {**found, "endpoint": endpoint} if endpoint else found


def _canonical_name(service: str, option: str) -> str:
    name = _PREFIX.sub("", option.lower())
    return _ALIASES[service].get(name, name)


def _check_google_files(found: dict[str, Any], url: str, environment: Mapping[str, str]) -> None:
    """Reject the text of a file where its path belongs: obstore would show it, as the path of a missing file."""
    variables = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS")
    paths = {f"{option}=": found.get(option) for option in ("service_account", "application_credentials")}
    for name, value in (*paths.items(), *((name, environment.get(name)) for name in variables)):
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


def isolate_credentials(service: str, found: dict[str, Any], url: str, environment: Mapping[str, str]) -> None:
    """Change options so that credentials among them are used alone: a provider takes precedence over the environment."""
    if not _has_credentials(service, found):
        return
    found.setdefault("skip_signature", False)  # whatever the environment says
    fixed = {name: found.pop(option) for option, name in _CREDENTIALS[service].items() if option in found}
    if fixed:
        found.setdefault("credential_provider", lambda: {**fixed, "expires_at": None})
    source = next((option for option in _SOURCES[service] if option in found), None)
    if source is None or "credential_provider" in found or "credential_type" in found:
        return
    for variable in environment:
        if _CONFLICTS[service].fullmatch(variable) and _canonical_name(service, variable) not in found:
            raise CheckpointError(
                f"{url}: {source}= would not be used alone: {variable} is set, too",
                hint=f"unset {variable}, which is for other buckets",
            )


def _has_credentials(service: str, found: dict[str, Any]) -> bool:
    kinds = {*_CREDENTIALS[service], *_SOURCES[service], "credential_provider", "skip_signature"}
    return not kinds.isdisjoint(found)


def _resolve_azure(found: dict[str, Any], url: str, environment: Mapping[str, str]) -> None:
    given, emulator = found.pop("connection_string", None), found.pop("use_emulator", None)
    if "AZURE_STORAGE_USE_EMULATOR" in environment:
        found["use_emulator"] = False  # otherwise obstore would only use Azurite; we set its address ourselves
    if is_true(environment.get("AZURE_STORAGE_USE_EMULATOR") if emulator is None else emulator):
        given = _OF_EMULATOR
    if text := given or environment.get("AZURE_STORAGE_CONNECTION_STRING"):
        parsed = _parse_connection_string(text, url, environment)
        # A connection string in the environment may be for another account.
        if given or found.get("account_name") in {None, parsed["account_name"]}:
            omitted = _CREDENTIALS["az"] if _has_credentials("az", found) else {}
            found.update({**{name: value for name, value in parsed.items() if name not in omitted}, **found})
    if account := environment.get("AZURE_STORAGE_ACCOUNT_NAME"):
        found.setdefault("account_name", account)


def _parse_connection_string(text: str, url: str, environment: Mapping[str, str]) -> dict[str, Any]:
    pairs = [pair.partition("=") for pair in text.strip().strip(";").split(";")]
    parsed = {name.strip().lower(): value.strip() for name, equals, value in pairs if equals}
    if is_true(parsed.get("usedevelopmentstorage")):
        at = (environment.get("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000").rstrip("/")
        return {**_EMULATOR, "endpoint": f"{at}/{_EMULATOR['account_name']}"}
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
    found = {
        "account_name": account, "account_key": parsed.get("accountkey"),
        "sas_key": parsed.get("sharedaccesssignature"), "endpoint": endpoint,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}


def is_true(value: object) -> bool:
    return str(value).lower() in {"true", "1", "yes", "on", "t", "y"}


_STATUS = re.compile(r"status code: (\d{3}) ?([^:<\n]*)")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,500})")  # Azure has a number and a time below it
_RETRIES = re.compile(r"after (\d+) retries")
_QUERY = re.compile(r"\?[^\s\"',]*")
_REASONS = (
    ("Connection refused", errno.ECONNREFUSED, "the connection was refused"),
    ("dns error|failed to lookup address", errno.EHOSTUNREACH, "the host's name was not found"),
    ("TimedOut|kind: Timeout|timed out", errno.ETIMEDOUT, "no answer in time"),
    ("lacked valid authentication", errno.EACCES, "the credentials are not valid"),
    ("BadScheme", errno.EINVAL, "plain http is not allowed"),
    ("InvalidCertificate|peer certificate", errno.EACCES, "the server's certificate was not accepted"),
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
_HINTS = {
    "NoSuchBucket": "create the bucket, or correct its name{account}; nothing was written",
    "InvalidAccessKeyId": "the access key is unknown there: {keys}",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: {keys}",
    "AuthenticationFailed": "the key does not belong to the account: {keys}",
    "AccessDenied": "these credentials do not allow this; the bucket's policy must grant it",
    "AuthorizationPermissionMismatch": "these credentials do not allow this; they need permission to read, write and delete",
    "ExpiredToken": "the session's token has expired: get a new one",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "|".join(_DAMAGED): "the network changed bytes on the way; the service kept none of them",
    "PermanentRedirect|AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_REGION",
    "(?i:x-amz-checksum)": "this service does not accept checksums of uploads: pass checksum_algorithm='none' to"
    " shardkeep.open_place",
    "BadScheme": "use an https:// endpoint, or pass client_options=dict(allow_http=True)",
    "InvalidCertificate|peer certificate": "set SSL_CERT_FILE to a file of the certificates to trust, or pass"
    " client_options=dict(root_certificate=...)",
}
"""What to look for in a code, and in the text of an exception."""
_HINTS_BY_ERRNO = {
    errno.ECONNREFUSED: "nothing answers there: correct the endpoint ({endpoint}), or start the service",
    errno.EHOSTUNREACH: "correct the endpoint ({endpoint}), the region or the account",
    errno.EACCES: "check credentials and permissions: {keys}",
    errno.EBUSY: "the service is overloaded or throttles requests: lower requests=, or try later",
    errno.ETIMEDOUT: "raise timeout_s=, or check the service",
}


@contextmanager
def object_errors(action: str, url: str, name: str = "", offset: int | None = None) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except Exception as exc:
        if not is_obstore_error(exc):
            raise
        raise translate(exc, action, url, name, offset) from None


def is_obstore_error(exc: BaseException) -> bool:
    """Return whether obstore raised it, also as the built-in exception for a missing object."""
    return isinstance(exc, FileNotFoundError) or (type(exc).__module__ or "").startswith("obstore")


def translate(exc: BaseException, action: str, url: str, name: str = "", offset: int | None = None) -> StorageError:
    text = str(exc)
    code = _found(_CODE, text)
    code = _SAME.get(code, code) or ("NoSuchBucket" if _NO_CONTAINER in text else "")
    number, summary = _judged(type(exc).__name__, text, code)
    if times := int(_found(_RETRIES, text) or 0):
        summary += f", after {times} retries"
    summary += f" (errno {errno.errorcode.get(number, number)})"
    service = {"g": "gs", "a": "az"}.get(url[:1].lower(), "s3")  # gs, gcs; az, azure, abfs, abfss; s3, s3a
    hint = next((_HINTS[words] for words in _HINTS if re.search(words, f"{code} {text}")), "")
    if any(mark in text for mark in _NO_KEYS):
        summary, hint = "no keys to sign requests with", "no keys were found here: {keys}"
    hint = (hint or _HINTS_BY_ERRNO.get(number, "")).format(
        keys=CREDENTIAL_HINTS[service],
        endpoint=" or ".join(_ENDPOINTS[service]),
        account=" or the account's" if service == "az" else "",
    )
    at = "" if offset is None else f" at offset {offset}"
    missing = number == errno.ENOENT and code not in {"NoSuchBucket", "NoSuchUpload"}
    return (BlobNotFound if missing else StorageError)(
        f"{url}/{name}: {action}{at}: {summary}" if name else f"{url}: {action}{at}: {summary}",
        hint=hint, name=name, offset=offset, errno=number, retried=times > 0, code=code,
    )  # fmt: skip


def _judged(kind: str, text: str, code: str) -> tuple[int, str]:
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
