"""Who looks for unfinished uploads on S3 reaches it as the store does: with its keys, through its headers and certificates."""

from __future__ import annotations

import logging
import re
import ssl
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shardkeep.errors import CheckpointError, StorageError
from shardkeep.layouts import orphans as leftovers
from shardkeep.storage import uploads
from shardkeep.storage.resolve import open_place
from shardkeep.storage.uploads import _proxies
from tests.clouds.conftest import serving

_NONE = b"""<?xml version="1.0"?><ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"""


class Server(ThreadingHTTPServer):
    """Has a blob of one byte, under every name, and no uploads; remembers the headers of what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[dict[str, str]] = []

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that do not trust it."""


class _Answers(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append({name.lower(): value for name, value in self.headers.items()})
        body = _NONE if "?uploads" in self.path else b"x"
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"1"'}.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", self.date_time_string())
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server, serving(server):
        yield server


def asked_by_both(server: Server, **options: Any) -> list[dict[str, str]]:
    """Return the headers of a request of the store, and of one for uploads."""
    place = open_place("s3://box/x", **{"endpoint": f"http://127.0.0.1:{server.server_port}", "retries": 0, **options})
    server.asked.clear()
    assert place.get("a", limit=1) == b"x"
    assert uploads.unfinished(place) == []
    assert len(server.asked) == 2
    return server.asked


def theirs() -> dict[str, Any]:
    """Give keys, as a callable of the user's own."""
    return {"access_key_id": "theirs", "secret_access_key": "s", "token": "t", "expires_at": None}


async def later() -> dict[str, Any]:
    """Give them some time."""
    return theirs()


OTHERS = {"AWS_ACCESS_KEY_ID": "others", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "others"}
MINE = {"access_key_id": "mine", "secret_access_key": "s"}


@pytest.mark.parametrize(
    ("environment", "options", "key", "token"),
    [
        ({}, {"skip_signature": True}, None, None),
        ({"AWS_SKIP_SIGNATURE": "true"}, {}, None, None),
        (OTHERS, {}, "others", "others"),
        (OTHERS, MINE, "mine", None),
        ({**OTHERS, "AWS_SKIP_SIGNATURE": "true"}, {**MINE, "session_token": "t"}, "mine", "t"),
        (OTHERS, {"aws_access_key_id": "mine", "aws_secret_access_key": "s", "token": "t"}, "mine", "t"),
        (OTHERS, {"credential_provider": theirs}, "theirs", "t"),
        (OTHERS, {"profile": "tests"}, "profiles", "p"),
        ({"AWS_PROFILE": "tests"}, {}, "profiles", "p"),
    ],
)
def test_keys(
    server: Server,
    environment: dict[str, str],
    options: dict[str, Any],
    key: str | None,
    token: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Both sign with the same keys and no others, or not at all; an endpoint that only boto3 would read is not asked."""
    credentials, config = tmp_path / "credentials", tmp_path / "config"
    credentials.write_text("[tests]\naws_access_key_id=profiles\naws_secret_access_key=s\naws_session_token=p\n")
    config.write_text("[profile tests]\nendpoint_url=http://127.0.0.1:1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for headers in asked_by_both(server, **options):
        found = re.search(r"Credential=([^/]*)/", headers.get("authorization", ""))
        assert (found[1] if found else None, headers.get("x-amz-security-token")) == (key, token)


def test_it_goes_by_the_environment_that_the_store_was_opened_with(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Endpoint and keys of variables, or of a profile, that have changed since; a way that is not known any more is refused."""
    files = [tmp_path / name for name in ("mine", "others")]
    for file in files:
        file.write_text(f"[tests]\naws_access_key_id={file.name}\naws_secret_access_key=s\n")
    now = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_EC2_METADATA_DISABLED": "true"}
    ways = ({"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "s"}, {"AWS_PROFILE": "tests"}, {})
    places = []
    for way in ways:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**now, **way, "AWS_SHARED_CREDENTIALS_FILE": str(files[0])}.items():
                patch.setenv(name, value)
            if not way:
                patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "nowhere"))
            places.append(open_place("s3://box/x", retries=0))
    later = {**OTHERS, "AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_SHARED_CREDENTIALS_FILE": str(files[1])}
    for name, value in later.items():
        monkeypatch.setenv(name, value)
    for place in places[:2]:
        assert uploads.unfinished(place) == []
        headers = server.asked.pop()
        assert "Credential=mine/" in headers["authorization"]
        assert "x-amz-security-token" not in headers
    with pytest.raises(CheckpointError, match="AWS_ACCESS_KEY_ID is not what it was"):
        uploads.unfinished(places[2])
    assert server.asked == []


def test_passwords_of_an_endpoint_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Neither in an error, nor in what it was raised from, nor in a log."""
    for endpoint in ("http://me:hunter2@127.0.0.1:1", "http://me:hunter2@127.0.0.1:1/a?x=1"):
        place = open_place("s3://box/x", endpoint=endpoint, **MINE)
        with pytest.raises(StorageError, match="cannot look after uploads") as caught:
            leftovers.sweep_lost_uploads(place)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    assert "are not taken back" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("options", [{"request_payer": True}, {"aws_request_payer": "true"}, {}])
def test_who_pays(server: Server, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """That the one who asks pays is said by both, by whichever name it is given."""
    if not options:
        monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    for headers in asked_by_both(server, **options, **MINE):
        assert headers["x-amz-request-payer"] == "requester"


def test_headers(server: Server) -> None:
    """What a gateway wants to see in every request is in both."""
    wanted = {"x-team": "tests"}
    assert [
        headers["x-team"] for headers in asked_by_both(server, client_options={"default_headers": wanted}, **MINE)
    ] == ["tests", "tests"]


def certificates() -> tuple[bytes, bytes]:
    """Make one for those who sign, and one that it has signed for this machine, with its key."""
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("machine", "signer")]
    signer, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(timezone.utc)

    def signed(public: ec.EllipticCurvePublicKey, *, ca: bool) -> bytes:
        builder = x509.CertificateBuilder().subject_name(names[ca]).issuer_name(names[1]).public_key(public)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        here = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
        made = builder.add_extension(here, critical=False).sign(signer, hashes.SHA256())
        return made.public_bytes(serialization.Encoding.PEM)

    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return signed(signer.public_key(), ca=True), signed(key.public_key(), ca=False) + secret


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "AWS_CA_BUNDLE"])
def test_certificates_of_the_environment(
    server: Server, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file of certificates that a variable names is trusted by both; without it neither trusts the server."""
    trusted, own = certificates()
    (tmp_path / "own.pem").write_bytes(own)
    (tmp_path / "trusted.pem").write_bytes(trusted)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    options = {"endpoint": f"https://127.0.0.1:{server.server_port}", **MINE}
    place = open_place("s3://box/x", retries=0, **options)
    for call in (lambda: place.get("a", limit=1), lambda: uploads.unfinished(place)):
        with pytest.raises(StorageError, match="certificate"):
            call()
    monkeypatch.setenv(variable, str(tmp_path / "trusted.pem"))
    asked_by_both(server, requests=3, **options)  # other options: another client, which reads it anew
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "nowhere.pem"))
    with pytest.raises(CheckpointError, match=r"nowhere\.pem"):
        open_place("s3://box/x", **options)


def test_what_cannot_be_told_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """No other keys are tried; a sweep warns that uploads stay, once a bucket, and a save goes on."""
    role = open_place("s3://box/x", role_arn="arn:aws:iam::1:role/me", **MINE)
    slow = open_place("s3://box/x", credential_provider=later)
    for place, message in ((role, "cannot be told role_arn="), (slow, "is asynchronous")):
        with pytest.raises(CheckpointError, match=message):
            uploads.unfinished(place)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "shardkeep"):
            with pytest.raises(CheckpointError, match=message):
                leftovers.sweep_lost_uploads(place)
            assert leftovers.sweep_uploads_of(place, {"0" * 20}) == 0
        [record] = caplog.records
        assert "are not taken back" in record.getMessage()
        assert message in record.getMessage()


def test_proxies() -> None:
    """Hosts that are asked without a proxy are; the proxy's own certificates are trusted beside the usual ones."""
    trusted, _ = certificates()
    http = {
        "proxy_url": "https://proxy:1",
        "proxy_ca_certificate": trusted.decode(),
        "proxy_excludes": "a.test, *.b.test",
    }
    with ExitStack() as stack:
        for endpoint in ("https://a.test", "http://x.a.test:9", "https://b.test"):
            assert _proxies(http, endpoint, stack) == {"proxies": {}}
        found = _proxies(http, "https://aa.test", stack)
        assert found["proxies"] == {"http": "https://proxy:1", "https": "https://proxy:1"}
        file = Path(found["proxies_config"]["proxy_ca_bundle"])
        assert file.read_bytes().endswith(trusted)
        assert file.read_bytes().count(b"BEGIN CERTIFICATE") > 1
    assert not file.exists()
