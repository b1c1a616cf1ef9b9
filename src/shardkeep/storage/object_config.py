"""
Which server, account and credentials a bucket is opened with: from options, else from the usual environment variables.

obstore takes whatever the options leave open from the environment. So a token that is meant for another bucket would join
credentials given as options. Here those are used alone, or opening the bucket fails and names the variable.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from shardkeep.errors import CheckpointError
from shardkeep.options import settings_with

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
