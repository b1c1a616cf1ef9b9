"""Keys and endpoints of Azure and Google, by options and by the usual variables; the errors of wrong ones say what to set."""

import base64
import errno
import json
import secrets
import traceback

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from shardkeep.errors import BlobNotFound, CheckpointError, StorageError
from shardkeep.storage.object_store import ObjectStore
from shardkeep.storage.resolve import open_place
from tests.support.azure_server import CONTAINER

WRONG = base64.b64encode(b"never-to-be-seen").decode()
"""A key that fits nothing."""


def works(url, **options):
    place = open_place(url, **options)
    name = f"blob-{secrets.token_hex(4)}"
    place.put(name, b"x")
    assert place.get(name, limit=1) == b"x"
    assert [info.name for info in place.list()] == [name]
    place.delete(name)
    return list(place.list()) == []


def said(call):
    """Return the error, of which no line may show a key."""
    with pytest.raises(StorageError) as caught:
        call()
    assert WRONG not in "".join(traceback.format_exception(caught.value))
    return caught.value


# -- Azure


def azure_ways(server):
    """Give every way to name account, key and endpoint: variables, and options."""
    at, key, signature = server.endpoint, server.key, server.signature()
    account = server.options["account_name"]
    where = {"AZURE_STORAGE_ENDPOINT": at, "AZURE_STORAGE_ACCOUNT_NAME": account}
    yield {}, server.options
    yield server.environment, {}
    yield {**where, "AZURE_STORAGE_ACCESS_KEY": key}, {}
    yield {**where, "AZURE_STORAGE_SAS_TOKEN": signature}, {}
    yield where, {"sas_key": signature}
    yield {"AZURE_STORAGE_CONNECTION_STRING": server.connection_string}, {}
    yield {}, {"connection_string": server.connection_string}
    yield {}, {"connection_string": f"BlobEndpoint={at};SharedAccessSignature={signature}"}
    yield {}, {"azure_storage_account_name": account, "access_key": key, "azure_endpoint": at}
    # What is there for others does not join what was given.
    others = {"AZURE_STORAGE_TOKEN": WRONG, "AZURE_STORAGE_ACCOUNT_KEY": WRONG, "AZURE_SKIP_SIGNATURE": "true"}
    yield {**others, "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=other;AccountKey={WRONG}"}, server.options
    yield {**where, "AZURE_STORAGE_ACCOUNT_KEY": WRONG}, {"sas_key": signature}
    yield {**where, "AZURE_STORAGE_ACCOUNT_KEY": WRONG}, {"connection_string": server.connection_string}


def test_azure_by_all_ways(azure_server):
    """Account and key, a signature, a connection string: by variables or options, which come first."""
    for number, (environment, options) in enumerate(azure_ways(azure_server)):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert works(azure_server.url(f"ways/{number}"), **options), (environment, options)


def test_an_account_in_the_url(azure_server, monkeypatch):
    """It comes before the one of the environment."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
    account, key = azure_server.options["account_name"], azure_server.key
    url = f"abfss://{CONTAINER}@{account}.dfs.core.windows.net/in-url"
    assert works(url, account_key=key, endpoint=azure_server.endpoint)


def test_azurite_with_its_defaults(monkeypatch):
    """The emulator has a public account and key; its address can be set."""
    place = open_place("az://box/x", use_emulator=True)
    assert isinstance(place, ObjectStore)
    assert place.bucket.server == ("az", "http://127.0.0.1:10000/devstoreaccount1", "devstoreaccount1")
    assert not place.bucket.official
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:1")
    error = said(lambda: open_place("az://box/x", retries=0).get("a", limit=1))
    assert error.errno == errno.ECONNREFUSED
    assert "AZURE_STORAGE_ENDPOINT" in error.hint


def test_missing_permissions(azure_server):
    url = azure_server.url("read-only")
    open_place(url, **azure_server.options).put("a", b"x")
    where = {"endpoint": azure_server.endpoint, "account_name": azure_server.options["account_name"]}
    place = open_place(url, sas_key=azure_server.signature("rl"), **where)
    assert place.get("a", limit=1) == b"x"
    error = said(lambda: place.put("b", b"y", replace=True))
    assert error.errno == errno.EACCES
    assert "need permission" in error.hint or "AZURE_STORAGE_ACCOUNT_KEY" in error.hint


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({}, "Account must be specified", "AZURE_STORAGE_ACCOUNT_NAME"),
        (
            {"account_name": "me", "account_key": "no base 64!"},
            "credentials are not valid",
            "AZURE_STORAGE_ACCOUNT_KEY",
        ),
        ({"account_name": "me", "sas_key": "half"}, "credentials are not valid", "AZURE_STORAGE_SAS_TOKEN"),
        ({"connection_string": "nonsense"}, "no AccountName=", "AZURE_STORAGE_CONNECTION_STRING"),
        ({"account_name": "me", "endpoint": "127.0.0.1:1"}, "not the address of a service", "https://host"),
        ({"account_name": "me", "nonsense": 1}, "nonsense", "open_place"),
    ],
)
def test_azure_options_that_make_no_sense(options, message, hint):
    """They are refused when the place is opened, or at the first request, with what to set."""
    with pytest.raises(CheckpointError, match=message) as caught:
        open_place("az://box/x", retries=0, **options).get("a", limit=1)
    assert hint in caught.value.hint


# -- Google


@pytest.fixture(scope="module")
def service_account():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    file = {"type": "service_account", "private_key": text, "private_key_id": "1", "client_email": "me@tests"}
    return key, json.dumps(file)


def is_signed(key, token):
    head, _, signature = token.rpartition(".")
    try:
        padded = signature + "=" * (-len(signature) % 4)
        key.public_key().verify(
            base64.urlsafe_b64decode(padded), head.encode(), padding.PKCS1v15(), hashes.SHA256()
        )  # fmt: skip
    except (InvalidSignature, ValueError):
        return False
    return True


def test_google_by_service_account(google_server, service_account, tmp_path, monkeypatch):
    """By a file or its text, by variables or options: each request carries a token that its key has signed."""
    key, text = service_account
    file = tmp_path / "account.json"
    file.write_text(text)
    monkeypatch.setattr(google_server, "accepts", lambda token: is_signed(key, token))
    at = {"GOOGLE_BASE_URL": google_server.endpoint}
    ways = [
        ({**at, "GOOGLE_APPLICATION_CREDENTIALS": str(file)}, {}),
        ({**at, "GOOGLE_SERVICE_ACCOUNT": str(file)}, {}),
        ({**at, "GOOGLE_SERVICE_ACCOUNT_KEY": text}, {}),
        (at, {"service_account": str(file)}),
        (at, {"application_credentials": str(file)}),
        ({}, {"endpoint": google_server.endpoint, "service_account_key": text}),
        ({"STORAGE_EMULATOR_HOST": google_server.endpoint}, {"service_account_key": text}),
    ]
    for number, (environment, options) in enumerate(ways):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert works(google_server.url(f"accounts/{number}"), **options)


def test_google_by_token_and_without(google_server, monkeypatch):
    url = google_server.url("tokens")
    assert works(url, **google_server.options)
    for name, value in google_server.environment.items():
        monkeypatch.setenv(name, value)
    assert works(url)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", WRONG)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert works(url, bearer_token=google_server.token)
    for name in ("GOOGLE_BASE_URL", "GOOGLE_BEARER_TOKEN", "GOOGLE_SKIP_SIGNATURE"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(google_server, "accepts", lambda token: token == "emulator")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{google_server.port}")
    assert works(url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"service_account": "/nowhere.json"}, "/nowhere.json"),
        ({"service_account_key": "{}"}, "private_key"),
        ({"application_credentials": "/nowhere.json"}, "/nowhere.json"),
    ],
)
def test_invalid_google_keys(options, message):
    """They are refused when the place is opened, with what to set."""
    with pytest.raises(CheckpointError, match=message) as caught:
        open_place("gs://box/x", **options)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint


# -- all of them

KEYS = {"az": {"account_key": WRONG}, "gs": {"bearer_token": WRONG}, "s3": {"secret_access_key": WRONG}}
NAMES = {"az": "AZURE_STORAGE_ACCOUNT_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS", "s3": "AWS_SECRET_ACCESS_KEY"}
KEYLESS = {
    "az": {"msi_endpoint": "http://127.0.0.1:1/metadata/identity/oauth2/token"},
    "gs": {"client_options": {"allow_http": True}},
    "s3": {"metadata_endpoint": "http://127.0.0.1:1"},
}
VERBS = {
    "open": lambda store: store.open("a"),
    "put": lambda store: store.put("a", b"1"),
    "replace": lambda store: store.put("a", b"1", replace=True),
    "get": lambda store: store.get("a", limit=9),
    "list": lambda store: list(store.list()),
    "places": lambda store: list(store.places()),
    "delete": lambda store: store.delete("a"),
}


@pytest.fixture(params=["s3", "azure", "google"])
def cloud(request):
    return request.getfixturevalue(f"{request.param}_server")


def test_wrong_keys(cloud):
    """Every verb says that rights are lacking, where, and which variables hold the keys; no key is shown."""
    url = cloud.url("wrong")
    store = open_place(url, **{**cloud.options, **KEYS[url[:2]]})
    more = {"create": lambda store: store.create("a", 1), "version": lambda store: store.version("a")}
    for verb in (*VERBS.values(), *more.values()):
        error = said(lambda: verb(store))  # noqa: B023 - called at once
        assert (error.errno, str(error).startswith(store.url)) == (errno.EACCES, True)
        assert NAMES[url[:2]] in error.hint


def test_no_keys_at_all(cloud, monkeypatch, tmp_path):
    """The error says so, and not that the address of the machine's role cannot be reached."""
    monkeypatch.setenv("HOME", str(tmp_path))
    url = cloud.url("keyless")
    options = {key: value for key, value in cloud.options.items() if key in {"endpoint", "account_name"}}
    error = said(lambda: open_place(url, retries=0, **options, **KEYLESS[url[:2]]).get("a", limit=1))
    assert "no keys to sign requests with" in error.message
    assert NAMES[url[:2]] in error.hint


def test_a_missing_bucket_is_no_missing_blob(cloud):
    """A mistyped name is reported neither as a missing checkpoint nor as a deleted one."""
    store = open_place(cloud.url("run", bucket="no-such-bucket"), **cloud.options)
    for verb in VERBS.values():
        error = said(lambda: verb(store))  # noqa: B023 - called at once
        assert not isinstance(error, BlobNotFound)
        assert error.errno == errno.ENOENT
        assert "create the bucket" in error.hint


def test_wrong_endpoints(cloud):
    """What does not answer is named with the variable that says where to ask."""
    store = open_place(cloud.url("x"), **{**cloud.options, "endpoint": "http://127.0.0.1:1", "retries": 0})
    error = said(lambda: store.get("a", limit=1))
    assert error.errno == errno.ECONNREFUSED
    names = {"gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT", "s3": "AWS_ENDPOINT_URL"}
    assert names[store.url[:2]] in error.hint
