"""Options come alone: what the environment says for others joins no keys that were given, changes no endpoint, and is read once."""

import base64
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from shardkeep.errors import CheckpointError, StorageError
from shardkeep.storage.object_store import ObjectStore
from shardkeep.storage.resolve import open_place
from tests.clouds.conftest import serving

KEY = base64.b64encode(b"others").decode()
SECRET = "never-to-be-seen"


class Server(ThreadingHTTPServer):
    """Refuses all, hands out tokens, and remembers who asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.askers = []

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.server.askers.append(_who(self.headers.get("Authorization", ""), self.path))
        self._answer(403, b"")

    def do_POST(self):
        said = self.rfile.read(int(self.headers["Content-Length"])).decode()
        token = "federated" if "client_assertion=" in said else re.findall("client_secret=([a-z]*)", said)[0]
        self._answer(200, json.dumps({"access_token": token, "expires_in": 3600}).encode())

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def _who(signed, path):
    """Name the one who signed: a token, whom it was given to, an access key, or an account's key."""
    if "sig=" in path:
        return re.findall("sig=([a-z]*)", path)[0]
    kind, _, rest = signed.partition(" ")
    if kind == "Bearer" and rest.count(".") == 2:
        claims = rest.split(".")[1]
        return str(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["iss"])
    if kind == "AWS4-HMAC-SHA256":
        return re.findall("Credential=([a-z]*)/", rest)[0]
    return rest if kind == "Bearer" else kind


@pytest.fixture(scope="module")
def server():
    with Server() as server, serving(server):
        yield server


@pytest.fixture(scope="module")
def words(server, tmp_path_factory):
    """What stands for itself in the options and variables below."""
    folder = tmp_path_factory.mktemp("keys")
    secret = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    found = {"ENDPOINT": server.endpoint}
    for who in ("given", "others"):
        file = {"type": "service_account", "private_key": secret.decode(), "private_key_id": "1", "client_email": who}
        found[f"TEXT of {who}"] = json.dumps(file)
        Path(folder, who).write_text(found[f"TEXT of {who}"])
        found[f"FILE of {who}"] = str(folder / who)
    return found


def asker(server, url, options):
    server.askers.clear()
    with pytest.raises(StorageError):
        open_place(url, retries=0, **options).get("a", limit=1)
    [who] = {*server.askers}
    return who


GOOGLE = {
    "bearer_token": {"bearer_token": "given"},
    "service_account": {"service_account": "FILE of given"},
    "service_account_key": {"service_account_key": "TEXT of given"},
    "application_credentials": {"application_credentials": "FILE of given"},
    "credential_provider": {"credential_provider": lambda: {"token": "given", "expires_at": None}},
}
GOOGLE_VARIABLES = {
    "GOOGLE_BEARER_TOKEN": "others",
    "GOOGLE_SERVICE_ACCOUNT": "FILE of others",
    "GOOGLE_SERVICE_ACCOUNT_PATH": "FILE of others",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "TEXT of others",
    "GOOGLE_APPLICATION_CREDENTIALS": "FILE of others",
    "GOOGLE_SKIP_SIGNATURE": "true",
}
ALONE = {"bearer_token", "credential_provider"}
BY_FILE = {"service_account", "application_credentials"}
REFUSED = {
    "GOOGLE_BEARER_TOKEN": GOOGLE.keys() - ALONE,
    "GOOGLE_SERVICE_ACCOUNT": {"service_account_key", "application_credentials"},
    "GOOGLE_SERVICE_ACCOUNT_PATH": {"service_account_key", "application_credentials"},
    "GOOGLE_SERVICE_ACCOUNT_KEY": BY_FILE,
}
"""Where the library would take both, or the other one."""


@pytest.mark.parametrize("kind", GOOGLE)
def test_google(server, words, kind):
    """Beside every variable, what is given signs, or the place is not opened, and the variable is named."""
    options = {name: words.get(str(value), value) for name, value in GOOGLE[kind].items()}
    for name, value in GOOGLE_VARIABLES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, words.get(value, value))
            if kind in REFUSED.get(name, ()):
                with pytest.raises(CheckpointError, match=f"{kind}= would not be used alone: {name} is set"):
                    open_place("gs://box/x", endpoint=server.endpoint, **options)
            else:
                assert asker(server, "gs://box/x", {"endpoint": server.endpoint, **options}) == "given", name


LOGIN = {"client_id": "me", "tenant_id": "us", "authority_host": "ENDPOINT"}
AZURE = {
    "client_secret": ({**LOGIN, "client_secret": "given"}, "given"),
    "federated_token_file": ({**LOGIN, "federated_token_file": "FILE of given"}, "federated"),
    "token": ({"azure_storage_token": "given"}, "given"),
    "bearer_token": ({"bearer_token": "given"}, "given"),
    "sas_token": ({"sas_token": "sv=1&sig=given"}, "given"),
    "account_key": ({"account_key": KEY}, "SharedKey"),
}
AZURE_VARIABLES = {
    "AZURE_STORAGE_TOKEN": "others",
    "AZURE_STORAGE_ACCOUNT_KEY": KEY,
    "AZURE_STORAGE_ACCESS_KEY": KEY,
    "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=others",
    "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=me;AccountKey={KEY}",
    "AZURE_FEDERATED_TOKEN_FILE": "FILE of others",
    "AZURE_CLIENT_SECRET": "others",
    "AZURE_CREDENTIAL_TYPE": "access_key",
    "AZURE_SKIP_SIGNATURE": "true",
    "AZURE_STORAGE_USE_EMULATOR": "true",
}


HARMLESS = {"AZURE_STORAGE_CONNECTION_STRING", "AZURE_SKIP_SIGNATURE", "AZURE_STORAGE_USE_EMULATOR"}


@pytest.mark.parametrize("kind", AZURE)
def test_azure(server, words, kind):
    """Beside every variable, what is given signs; what only leads to keys is refused beside keys of another kind."""
    given, who = AZURE[kind]
    options = {name: words.get(value, value) for name, value in given.items()}
    options.update(account_name="me", endpoint=f"{server.endpoint}/me")
    for name, value in AZURE_VARIABLES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, words.get(value, value))
            if kind in {"client_secret", "federated_token_file"} and name not in {*HARMLESS, f"AZURE_{kind.upper()}"}:
                with pytest.raises(CheckpointError, match=f"{kind}= would not be used alone: {name} is set"):
                    open_place("az://box/x", **options)
            else:
                assert asker(server, "az://box/x", options) == who, name


def test_s3(server, monkeypatch):
    """A variable comes before no endpoint and no keys of options; a way to keys that would not be taken is refused."""
    given = {"access_key_id": "given", "secret_access_key": "s", "endpoint": server.endpoint, "region": "us-east-1"}
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert asker(server, "s3://box/x", given) == "given"
    keys = {"access_key_id": "given", "secret_access_key": "s", "token": None, "expires_at": None}
    provided = {"credential_provider": lambda: keys, "endpoint": server.endpoint, "region": "us-east-1"}
    assert asker(server, "s3://box/x", provided) == "given"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "others")
    for option in ("web_identity_token_file", "container_credentials_relative_uri", "container_credentials_full_uri"):
        with pytest.raises(CheckpointError, match=f"{option}= would not be used alone: AWS_ACCESS_KEY_ID is set"):
            open_place("s3://box/x", **{option: "x"})


@pytest.mark.parametrize("url", ["s3://box/x", "gs://box/x", "az://box/x"])
def test_every_variable_opens_a_bucket_anew(url, monkeypatch):
    """A variable that changes between two calls is noticed; `repr` of a bucket shows no secrets of the environment."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")

    def opened():
        place = open_place(url)
        assert isinstance(place, ObjectStore)
        assert SECRET not in repr(place.bucket)
        return place.bucket

    secret = {"s3": "AWS_TOKEN", "gs": "GOOGLE_BEARER_TOKEN", "az": "AZURE_STORAGE_CLIENT_SECRET"}[url[:2]]
    before = opened()
    monkeypatch.setenv(secret, SECRET)
    after = opened()
    assert after is not before
    assert opened() is after


@pytest.mark.parametrize(
    "endpoint",
    ["https://", "http://:9000", "http://a b", "http://host/a b", "http://host/a\x00b", "http://ho<st", "http://h\u00f6st", "http://h%20"],
)  # fmt: skip
def test_endpoints_that_are_none(endpoint, monkeypatch):
    """They are refused where the place is opened, and no password is shown; the library would end in a panic."""
    for url in ("s3://box/x", "gs://box/x", "az://box/x"):
        with pytest.raises(CheckpointError, match="not the address of a service"):
            open_place(url, account_name="me", endpoint=endpoint) if url[0] == "a" else open_place(
                url, endpoint=endpoint
            )
    if "\x00" not in endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.replace("://", f"://me:{SECRET}@"))
        with pytest.raises(CheckpointError, match="not the address of a service") as caught:
            open_place("s3://box/x")
        assert SECRET not in str(caught.value)


def test_space_around_an_endpoint(server, monkeypatch):
    """As it comes out of a file, with the end of its line."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f" {server.endpoint}\n")
    assert asker(server, "s3://box/x", {"access_key_id": "given", "secret_access_key": "s"}) == "given"


@pytest.mark.parametrize("text", ['{"private_key": "never-to-be-seen"}', "never-to-be-seen\n", "never-to-be-seen" * 99])
def test_the_text_of_a_file_instead_of_its_path(text, monkeypatch):
    """It is not shown, by an option nor by a variable; it is said where it belongs."""
    for option in BY_FILE:
        with pytest.raises(CheckpointError, match=f"{option}= is not the path") as caught:
            open_place("gs://box/x", **{option: text})
        assert SECRET not in str(caught.value)
        assert "service_account_key=" in caught.value.hint
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", text)
    with pytest.raises(CheckpointError, match="GOOGLE_SERVICE_ACCOUNT is not the path") as caught:
        open_place("gs://box/x")
    assert SECRET not in str(caught.value)
