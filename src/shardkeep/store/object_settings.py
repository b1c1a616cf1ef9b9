"""
Which server, account and keys a bucket is opened with: by options, else by the variables that everybody uses.

The library reads most of these variables itself, but it mixes: of what options do not say it takes what it finds there,
so that a session's token, or a stronger kind of key, that is meant for others goes along with the keys that were given.
Here keys that are given as options are used alone.
"""

from __future__ import annotations

import base64
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
KEYS = {
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
        "sas_token": "sas_key",
    },
}  # fmt: skip
_OWN_HOSTS = {
    "s3": (".amazonaws.com", ".amazonaws.com.cn"),
    "gs": ("storage.googleapis.com",),
    "az": (".core.windows.net", ".core.usgovcloudapi.net", ".core.chinacloudapi.cn"),
}
_GOOGLE_KEYS = ("service_account", "service_account_key", "application_credentials", "bearer_token", "skip_signature")
_AZURE_KEYS = {"token": "token", "account_key": "access_key", "sas_key": "sas_token"}
"""Options that are keys, and what the library calls them where they are handed over alone."""
_MIXED = {
    "s3": ("AWS_SESSION_TOKEN", "AWS_TOKEN"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    "az": (
        "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY",
        "AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE",
    ),
}  # fmt: skip
"""Variables that the library would use beside keys that were given, or before them."""
_AZURE_ACCOUNT = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
_EMULATOR = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}
"""Of Azurite: public, and the same everywhere."""


def settled(service: str, options: dict[str, Any], url: str) -> dict[str, Any]:
    """
    Return options by their plain names, with the endpoint and the account that the environment says where they do not;
    `url` is for messages.

    Raises:
        CheckpointError: one was given twice, or a connection string is none.

    """
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = _plain(service, key)
        if name in found:
            raise CheckpointError(f"{url}: {key}= is given twice, under two names of {name}=", hint="pass one of them")
        found[name] = value
    if service == "az":
        _settle_azure(found, url)
    if "endpoint" not in found:
        variable, said = next(((name, said) for name in ENDPOINTS[service] if (said := setting(name))), ("", ""))
        found["endpoint"] = said
        if variable == "STORAGE_EMULATOR_HOST":
            _settle_emulator(found)
    if not found["endpoint"]:
        del found["endpoint"]
    _check_endpoint(found, url)
    return found


def _check_endpoint(found: dict[str, Any], url: str) -> None:
    said = str(found.get("endpoint", "https://"))
    try:
        parts = urlsplit(said)
        fits = parts.scheme in {"http", "https"} and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        shown = said.rpartition("@")[2]  # there may be keys before it
        raise CheckpointError(
            f"{url}: endpoint {shown!r}: not the address of a service", hint="write https://host or http://host:port"
        )


def home(service: str, found: dict[str, Any]) -> tuple[str, ...]:
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


def keys_alone(service: str, found: dict[str, Any], url: str) -> None:
    """
    Have keys that were given as options handed over so that nothing in the environment joins them.

    Raises:
        CheckpointError: a key cannot be one.

    """
    if "credential_provider" in found or is_true(found.get("skip_signature")):
        return
    keys: dict[str, Any] = {}
    if service == "s3" and found.get("access_key_id") and found.get("secret_access_key"):
        keys = {"access_key_id": found["access_key_id"], "secret_access_key": found["secret_access_key"]}
        keys["token"] = found.get("session_token")
    elif service == "gs" and found.get("bearer_token"):
        keys = {"token": found["bearer_token"]}
    elif service == "az" and (given := [name for name in _AZURE_KEYS if found.get(name)]):
        found[given[0]] = _azure_key(given[0], str(found[given[0]]), url)
        keys = {_AZURE_KEYS[given[0]]: found[given[0]]}
    if keys:
        found["skip_signature"] = False  # whatever the environment says
    if keys and any(map(setting, _MIXED[service])):
        found["credential_provider"] = _Fixed({**keys, "expires_at": None})


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
        raise CheckpointError(f"{url}: {name}= is not {shape}, and cannot be a key of Azure", hint=KEYS["az"])
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


def _settle_emulator(found: dict[str, Any]) -> None:
    """Do as Google's own libraries do: an emulator may be named without http://, and asks for no keys."""
    if "://" not in found["endpoint"]:
        found["endpoint"] = f"http://{found['endpoint']}"
    variables = [f"GOOGLE_{name.upper()}" for name in _GOOGLE_KEYS]
    if not found.keys() & {*_GOOGLE_KEYS, "credential_provider"} and not any(map(setting, variables)):
        found["bearer_token"] = "emulator"  # noqa: S105 - of no use elsewhere; unsigned, the library only reads


def _settle_azure(found: dict[str, Any], url: str) -> None:
    given = found.pop("connection_string", None)
    emulator = found.pop("use_emulator", None)
    text = given or setting("AZURE_STORAGE_CONNECTION_STRING")
    if is_true(setting("AZURE_STORAGE_USE_EMULATOR") if emulator is None else emulator):
        _add(found, _emulator())
    elif text:
        said = _connection(text, url)
        # One that is there for another account says nothing of this one.
        if given or found.get("account_name") in {None, said["account_name"]}:
            _add(found, said)
    account = next(filter(None, map(setting, _AZURE_ACCOUNT)), None)
    # Azure's own command line reads this one, and the library does not.
    key = None if setting("AZURE_STORAGE_ACCOUNT_KEY") else setting("AZURE_STORAGE_KEY")
    _add(found, {**({"account_name": account} if account else {}), **({"account_key": key} if key else {})})


def _add(found: dict[str, Any], said: dict[str, Any]) -> None:
    """Add what is not known yet; keys only where there are none of any kind."""
    has_keys = not found.keys().isdisjoint({*_AZURE_KEYS, "credential_provider", "skip_signature"})
    for name, value in said.items():
        if not (has_keys and name in _AZURE_KEYS):
            found.setdefault(name, value)


def _connection(text: str, url: str) -> dict[str, Any]:
    """Read what Azure's portal gives people to copy."""
    pairs = [pair.partition("=") for pair in text.strip().strip(";").split(";")]
    said = {name.strip().lower(): value.strip() for name, equals, value in pairs if equals}
    if said.get("usedevelopmentstorage", "").lower() == "true":
        return _emulator()
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


def _emulator() -> dict[str, Any]:
    """Name Azurite on this machine, where it is started without further ado."""
    at = (setting("AZURITE_BLOB_STORAGE_URL") or "http://127.0.0.1:10000").rstrip("/")
    return {**_EMULATOR, "endpoint": f"{at}/{_EMULATOR['account_name']}"}


def is_true(value: object) -> bool:
    """Read a switch as the library does."""
    return str(value).lower() in {"true", "1", "yes", "on", "t", "y"}
