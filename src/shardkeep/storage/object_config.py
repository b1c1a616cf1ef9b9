"""
Which server, account and keys a bucket is opened with: by options, else by the variables that everybody uses.

The library reads most of these variables itself, but it mixes: of what options do not say it takes what it finds there,
so that a session's token, or a stronger kind of key, that is meant for others goes along with the keys that were given.
Here keys that are given as options are used alone; where the library cannot be made to, the variable is named and nothing
is opened.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from shardkeep.errors import CheckpointError
from shardkeep.options import setting

ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""The first that is set counts."""
CREDENTIAL_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass access_key_id= and secret_access_key= to"
    " shardkeep.open_place",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or pass service_account= or bearer_token="
    " to shardkeep.open_place",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN, or"
    " AZURE_STORAGE_CONNECTION_STRING), or pass account_name= and account_key= (sas_key=, connection_string=) to"
    " shardkeep.open_place",
}
"""How keys are given, for messages."""
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


def _named(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in names.split())


_NETWORK = (
    "SSL_CERT_FILE SSL_CERT_DIR HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy"
)
ENVIRONMENT_VARIABLES = {
    "s3": (
        *ENDPOINTS["s3"], *_named("", _NETWORK),
        *_named("AWS_",
            "ACCESS_KEY_ID SECRET_ACCESS_KEY SESSION_TOKEN TOKEN SECURITY_TOKEN REGION DEFAULT_REGION PROFILE DEFAULT_PROFILE"
            " SHARED_CREDENTIALS_FILE CONFIG_FILE CA_BUNDLE ALLOW_HTTP SKIP_SIGNATURE CHECKSUM_ALGORITHM REQUEST_PAYER"
            " VIRTUAL_HOSTED_STYLE_REQUEST S3_EXPRESS UNSIGNED_PAYLOAD IMDSV1_FALLBACK METADATA_ENDPOINT ENDPOINT_URL_STS"
            " EC2_METADATA_DISABLED CONTAINER_CREDENTIALS_RELATIVE_URI CONTAINER_CREDENTIALS_FULL_URI"
            " CONTAINER_AUTHORIZATION_TOKEN CONTAINER_AUTHORIZATION_TOKEN_FILE WEB_IDENTITY_TOKEN_FILE ROLE_ARN"
            " ROLE_SESSION_NAME COPY_IF_NOT_EXISTS CONDITIONAL_PUT DISABLE_TAGGING DISABLE_BULK_DELETE"
            " SERVER_SIDE_ENCRYPTION SSE_KMS_KEY_ID SSE_BUCKET_KEY_ENABLED SSE_CUSTOMER_KEY_BASE64"
        ),
    ),
    "gs": (
        *ENDPOINTS["gs"], *_named("", _NETWORK), "GCE_METADATA_HOST", "GCE_METADATA_IP",
        *_named("GOOGLE_",
            "APPLICATION_CREDENTIALS SERVICE_ACCOUNT SERVICE_ACCOUNT_PATH SERVICE_ACCOUNT_KEY BEARER_TOKEN SKIP_SIGNATURE"
            " ALLOW_HTTP"
        ),
    ),
    "az": (
        *ENDPOINTS["az"], *_named("", _NETWORK), "AZURITE_BLOB_STORAGE_URL", "IDENTITY_HEADER",
        *_named("AZURE_STORAGE_",
            "ACCOUNT_NAME ACCOUNT ACCOUNT_KEY ACCESS_KEY MASTER_KEY KEY SAS_KEY SAS_TOKEN TOKEN CONNECTION_STRING"
            " USE_EMULATOR CLIENT_ID CLIENT_SECRET TENANT_ID AUTHORITY_ID AUTHORITY_HOST ENCRYPTION_KEY"
        ),
        *_named("AZURE_",
            "CLIENT_ID CLIENT_SECRET TENANT_ID AUTHORITY_ID AUTHORITY_HOST FEDERATED_TOKEN_FILE USE_AZURE_CLI SKIP_SIGNATURE"
            " CREDENTIAL_TYPE ALLOW_HTTP MSI_ENDPOINT IDENTITY_ENDPOINT OBJECT_ID MSI_RESOURCE_ID DISABLE_TAGGING"
            " USE_FABRIC_ENDPOINT FABRIC_TOKEN_SERVICE_URL FABRIC_WORKLOAD_HOST FABRIC_SESSION_TOKEN"
            " FABRIC_CLUSTER_IDENTIFIER"
        ),
    ),
}  # fmt: skip
"""Variables that are read here or by the library: by them a bucket is opened anew when they change."""
_GOOGLE_FILES = {
    "service_account": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    "application_credentials": ("GOOGLE_APPLICATION_CREDENTIALS",),
}
_GOOGLE_KEYS = ("service_account", "service_account_key", "application_credentials", "bearer_token", "skip_signature")
_AZURE_KEYS = {"token": "token", "account_key": "access_key", "sas_key": "sas_token"}
"""Options that are keys, and what the library calls them where they are handed over alone."""
_AZURE_TYPES = {
    "federated_token_file": "workload_identity", "client_secret": "client_secret", "use_azure_cli": "azure_cli",
}  # fmt: skip
"""Options that are a way to keys, and what the library calls them where only this one is to be taken."""
_AWS_FIXED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_AZURE_BESIDE = (
    "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE", "AZURE_CREDENTIAL_TYPE",
)  # fmt: skip
_BESIDE: dict[str, dict[str, tuple[str, ...]]] = {
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
    "az": dict.fromkeys((*_AZURE_KEYS, *_AZURE_TYPES), _AZURE_BESIDE),
}  # fmt: skip
"""Kinds of keys that are given as options, and the variables that the library would use beside them, or before them."""
_ADDRESS = re.compile(r"[\w.~:/?#\[\]@!$&'()*+,;=%-]+", re.ASCII)
"""What may be in an address; the library ends in a panic at all else."""
_HOST = re.compile(r"[\w.-]+|[0-9a-f:.]*:[0-9a-f:.]*", re.ASCII)
_LONGEST_PATH = 1024
_AZURE_ACCOUNT = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
_EMULATOR = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}
"""Of Azurite: public, and the same everywhere."""


def environment_of(service: str) -> dict[str, str | None]:
    """Return what the variables of a service are now; there may be keys among them."""
    return {name: setting(name) for name in ENVIRONMENT_VARIABLES[service]}


def canonical_options(service: str, options: Mapping[str, Any], url: str) -> dict[str, Any]:
    """
    Return options by their plain names; `url` is for messages.

    Raises:
        CheckpointError: one was given twice.

    """
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = _plain(service, key)
        if name in found:
            raise CheckpointError(f"{url}: {key}= is given twice, under two names of {name}=", hint="pass one of them")
        found[name] = value
    return found


def resolve_options(
    service: str, options: Mapping[str, Any], url: str, environment: Mapping[str, str | None]
) -> dict[str, Any]:
    """
    Return options by their plain names, with the endpoint and the account that the environment says where they do not.

    Raises:
        CheckpointError: one was given twice, or is not what it should be: an address, a path, a connection string.

    """
    found = canonical_options(service, options, url)
    if service == "az":
        _settle_azure(found, url, environment)
    if service == "gs":
        _check_google_files(found, url, environment)
    if "endpoint" not in found:
        said = ((name, value) for name in ENDPOINTS[service] if (value := environment.get(name)))
        variable, found["endpoint"] = next(said, ("", ""))
        if variable == "STORAGE_EMULATOR_HOST":
            _settle_emulator(found, environment)
    if found["endpoint"]:
        found["endpoint"] = _address(str(found["endpoint"]).strip(), url)
    else:
        del found["endpoint"]
    return found


def _address(said: str, url: str) -> str:
    try:
        parts = urlsplit(said)
        fits = parts.scheme in {"http", "https"} and parts.port != 0
        fits = fits and bool(_ADDRESS.fullmatch(said) and _HOST.fullmatch(parts.hostname or ""))
    except ValueError:
        fits = False
    if not fits:
        shown = said.rpartition("@")[2]  # there may be keys before it
        raise CheckpointError(
            f"{url}: endpoint {shown!r}: not the address of a service", hint="write https://host or http://host:port"
        )
    return said


def _check_google_files(found: dict[str, Any], url: str, environment: Mapping[str, str | None]) -> None:
    """Refuse a file's text where its path belongs: the library would show it, as the path of a file that is not there."""
    for option, variables in _GOOGLE_FILES.items():
        for name, value in ((f"{option}=", found.get(option)), *((name, environment.get(name)) for name in variables)):
            text = str(value or "")
            if len(text) > _LONGEST_PATH or not text.isprintable() or "{" in text:
                raise CheckpointError(
                    f"{url}: {name} is no path of a file, and is not shown here",
                    hint="the text of a service account's file goes into GOOGLE_SERVICE_ACCOUNT_KEY, or service_account_key=",
                )


def server_identity(service: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Tell servers and accounts apart, however they are written: two that are equal have the same buckets."""
    account = str(found.get("account_name", ""))
    if (own := _own_host(service, found)) is not None:
        return service, own, account
    parts = urlsplit(str(found["endpoint"]))
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return service, f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}", account


def is_official(service: str, found: dict[str, Any]) -> bool:
    """Tell whether it is the provider's own service, whose behaviour is known."""
    return _own_host(service, found) is not None


def _own_host(service: str, found: dict[str, Any]) -> str | None:
    """Say to which part of the provider's world an endpoint belongs; None: to none."""
    endpoint = found.get("endpoint")
    host = urlsplit(str(endpoint)).hostname or ""
    return next((own for own in _OWN_HOSTS[service] if not endpoint or host.endswith(own)), None)


def isolate_credentials(service: str, found: dict[str, Any], url: str, environment: Mapping[str, str | None]) -> None:
    """
    Have keys that were given as options handed over so that nothing in the environment joins them.

    Raises:
        CheckpointError: a key cannot be one, or the library would use others of the environment.

    """
    if is_true(found.get("skip_signature")):
        return
    kind = next((name for name in _BESIDE[service] if _is_given(found, name)), None)
    if "credential_provider" in found or kind is not None:
        found["skip_signature"] = False  # whatever the environment says
    if "credential_provider" in found or kind is None:
        return
    if kind in _AZURE_KEYS:
        found[kind] = _azure_key(kind, str(found[kind]), url)
    beside = next((name for name in _BESIDE[service][kind] if environment.get(name) is not None), None)
    if beside is None:
        return
    if keys := _fixed(kind, found):
        found["credential_provider"] = _Fixed({**keys, "expires_at": None})
    elif service == "az":
        found.setdefault("credential_type", _AZURE_TYPES[kind])
    else:
        raise CheckpointError(
            f"{url}: {kind}= would not be used alone: {beside} is set, too", hint=f"unset {beside}, which is for others"
        )


def _is_given(found: dict[str, Any], kind: str) -> bool:
    if kind == "access_key_id":
        return bool(found.get(kind) and found.get("secret_access_key"))
    return is_true(found.get(kind)) if kind == "use_azure_cli" else bool(found.get(kind))


def _fixed(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return keys as the library takes them from a provider; none where they are yet to be asked for."""
    if kind == "access_key_id":
        fixed = {name: found[name] for name in ("access_key_id", "secret_access_key")}
        return {**fixed, "token": found.get("session_token")}
    if kind == "bearer_token":
        return {"token": found[kind]}
    return {_AZURE_KEYS[kind]: found[kind]} if kind in _AZURE_KEYS else {}


def _azure_key(name: str, key: str, url: str) -> str:
    """Check what the library would only find out at the first request, and then not say clearly."""
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
            f"{url}: {name}= is not {shape}, and cannot be a key of Azure", hint=CREDENTIAL_HINTS["az"]
        )
    return key


class _Fixed:
    """Keys that stay as they are."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self._keys = keys

    def __call__(self) -> dict[str, Any]:
        return self._keys


def _plain(service: str, key: str) -> str:
    name = key.lower()
    for prefix in _PREFIXES[service]:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return _ALIASES[service].get(name, name)


def _settle_emulator(found: dict[str, Any], environment: Mapping[str, str | None]) -> None:
    """Do as Google's own libraries do: an emulator may be named without http://, and asks for no keys."""
    if "://" not in found["endpoint"]:
        found["endpoint"] = f"http://{found['endpoint']}"
    variables = [f"GOOGLE_{name.upper()}" for name in _GOOGLE_KEYS]
    if not found.keys() & {*_GOOGLE_KEYS, "credential_provider"} and not any(map(environment.get, variables)):
        found["bearer_token"] = "emulator"  # noqa: S105 - of no use elsewhere; unsigned, the library only reads


def _settle_azure(found: dict[str, Any], url: str, environment: Mapping[str, str | None]) -> None:
    given = found.pop("connection_string", None)
    emulator = found.pop("use_emulator", None)
    if environment.get("AZURE_STORAGE_USE_EMULATOR") is not None:
        found["use_emulator"] = False  # for the library, which would ask none but Azurite; where that is, is said here
    text = given or environment.get("AZURE_STORAGE_CONNECTION_STRING")
    if is_true(environment.get("AZURE_STORAGE_USE_EMULATOR") if emulator is None else emulator):
        _add(found, _emulator(environment))
    elif text:
        said = _connection(text, url, environment)
        # One that is there for another account says nothing of this one.
        if given or found.get("account_name") in {None, said["account_name"]}:
            _add(found, said)
    account = next(filter(None, map(environment.get, _AZURE_ACCOUNT)), None)
    # Azure's own command line reads this one, and the library does not.
    key = None if environment.get("AZURE_STORAGE_ACCOUNT_KEY") else environment.get("AZURE_STORAGE_KEY")
    _add(found, {**({"account_name": account} if account else {}), **({"account_key": key} if key else {})})


def _add(found: dict[str, Any], said: dict[str, Any]) -> None:
    """Add what is not known yet; keys only where there are none of any kind."""
    has_keys = not found.keys().isdisjoint({"credential_provider", "skip_signature"})
    has_keys = has_keys or any(_is_given(found, kind) for kind in _BESIDE["az"])
    for name, value in said.items():
        if not (has_keys and name in _AZURE_KEYS):
            found.setdefault(name, value)


def _connection(text: str, url: str, environment: Mapping[str, str | None]) -> dict[str, Any]:
    """Read what Azure's portal gives people to copy."""
    pairs = [pair.partition("=") for pair in text.strip().strip(";").split(";")]
    said = {name.strip().lower(): value.strip() for name, equals, value in pairs if equals}
    if said.get("usedevelopmentstorage", "").lower() == "true":
        return _emulator(environment)
    account, suffix = said.get("accountname"), said.get("endpointsuffix")
    endpoint = said.get("blobendpoint")
    if not endpoint and account and suffix:
        endpoint = f"{said.get('defaultendpointsprotocol', 'https')}://{account}.blob.{suffix}"
    if not account and endpoint:  # one with a signature names none
        parts = urlsplit(endpoint)
        account = parts.path.strip("/") or str(parts.hostname).partition(".")[0]
    if not account:
        raise CheckpointError(
            f"{url}: a connection string of Azure has no AccountName= and no BlobEndpoint=",
            hint="copy it whole, as the portal shows it, into AZURE_STORAGE_CONNECTION_STRING or connection_string=",
        )
    signature = (said.get("sharedaccesssignature") or "").removeprefix("?")
    found = {"account_name": account, "account_key": said.get("accountkey"), "sas_key": signature, "endpoint": endpoint}
    return {name: value for name, value in found.items() if value}


def _emulator(environment: Mapping[str, str | None]) -> dict[str, Any]:
    """Name Azurite on this machine, where it is started without further ado."""
    at = (environment.get("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000").rstrip("/")
    return {**_EMULATOR, "endpoint": f"{at}/{_EMULATOR['account_name']}"}


def is_true(value: object) -> bool:
    """Read a switch as the library does."""
    return str(value).lower() in {"true", "1", "yes", "on", "t", "y"}
