"""Large blobs go up in parts, from the writer's own memory, in any order; what is not finished is never seen."""

import errno
import itertools
import random
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.layouts import orphans as leftovers
from shardkeep.storage import uploads
from shardkeep.storage.multipart import ObjectWriter
from shardkeep.storage.object_store import ObjectRoot
from shardkeep.storage.retry import RetryingStore, RetryPolicy
from shardkeep.testing.store_contract import read_blob, sample
from tests.object_store.proxy import Proxy
from tests.support.s3_server import BUCKET, S3Server

MIB = 1 << 20
PART = 5 * MIB
Opened = Callable[..., ObjectRoot]


@pytest.fixture
def small_parts(s3_place: Opened) -> ObjectRoot:
    return s3_place(part_bytes=PART, requests=4)


def begun(boto: Any, store: ObjectRoot) -> list[str]:
    found = boto.list_multipart_uploads(Bucket=BUCKET, Prefix=store.prefix).get("Uploads", [])
    return [each["Key"] for each in found]


def windows(nbytes: int, size: int, first: int = 0) -> list[tuple[int, int]]:
    cuts = [*range(first, nbytes, size), nbytes]
    return [(0, first)] * (first > 0) + list(itertools.pairwise(cuts))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("first", [0, 4096], ids=["aligned", "shifted"])
def test_memory_may_be_used_again_at_once(small_parts: ObjectRoot, threads: int, first: int) -> None:
    """When a write returns its memory is the caller's, whether the parts were sent from it or copied."""
    data = sample(4 * PART + 12345)
    writer = small_parts.create("a", len(data))
    own = threading.local()

    def write(window: tuple[int, int]) -> None:
        start, stop = window
        if not hasattr(own, "memory"):
            own.memory = np.empty(2 * PART, np.uint8)
        own.memory[: stop - start] = np.frombuffer(data, np.uint8, stop - start, start)
        writer.write_at(start, own.memory[: stop - start].data)
        own.memory[:] = 0

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, windows(len(data), 2 * PART, first)))
    writer.finish()
    assert read_blob(small_parts, "a") == data


@pytest.mark.parametrize("threads", [1, 3])
def test_any_order_comes_to_an_end(small_parts: ObjectRoot, threads: int) -> None:
    """One thread that writes backwards, or several at random, with more parts than requests, wait for nothing for ever."""
    data = sample(9 * PART)
    order = windows(len(data), PART // 2 + 1) if threads > 1 else windows(len(data), PART)
    random.Random(0).shuffle(order) if threads > 1 else order.reverse()
    writer = small_parts.create("a", len(data))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: writer.write_at(at[0], memoryview(data)[at[0] : at[1]]), order))
    writer.finish()
    assert read_blob(small_parts, "a") == data


@pytest.mark.parametrize("end", [0, 1000, PART, PART + 1, 2 * PART])
def test_ends_early_in_any_part(small_parts: ObjectRoot, end: int) -> None:
    """A blob made for much more ends where it is told to, sent in parts or in one request."""
    data = sample(end)
    writer = small_parts.create("a", 10 * PART)
    writer.write_at(0, memoryview(data))
    writer.finish(end)
    assert read_blob(small_parts, "a") == data


def test_what_is_abandoned_leaves_nothing(small_parts: ObjectRoot, boto: Any) -> None:
    """The upload is seen by the service while it lasts, and by nobody after; the object never is."""
    writer = small_parts.create("a", 3 * PART)
    writer.write_at(0, memoryview(bytes(2 * PART)))
    assert begun(boto, small_parts) == [f"{small_parts.prefix}a"]
    assert list(small_parts.list()) == []
    writer.abandon()
    writer.abandon()
    assert begun(boto, small_parts) == []
    assert list(small_parts.list()) == []
    with pytest.raises(StorageError):
        writer.write_at(2 * PART, memoryview(bytes(PART)))


def test_gaps_and_second_thoughts_are_refused(small_parts: ObjectRoot, boto: Any) -> None:
    """A blob with a hole is not made, bytes that were sent do not change, and each error says where."""
    writer = small_parts.create("a", 3 * PART)
    writer.write_at(0, memoryview(bytes(PART)))
    with pytest.raises(StorageError, match="sent already") as caught:
        writer.write_at(10, memoryview(b"other"))
    assert caught.value.errno == errno.EINVAL
    writer.write_at(PART, memoryview(bytes(100)))
    with pytest.raises(StorageError, match=rf"nothing was written at offset {PART + 100}$"):
        writer.finish()
    writer.abandon()
    assert begun(boto, small_parts) == []
    with pytest.raises(BlobNotFound):
        small_parts.open("a")
    alone = small_parts.create("b", 10)
    with pytest.raises(StorageError, match="nothing was written at offset 0"):
        alone.finish()
    alone.abandon()


def test_an_interrupted_write_spoils_its_blob(small_parts: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was lent when Ctrl-C came may change: nothing that may have been sent from it is ever an object."""
    writer = small_parts.create("a", 3 * PART)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer._upload, "_pause", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.write_at(0, memoryview(bytes(PART)))
    with pytest.raises(StorageError, match="cut short") as caught:
        writer.write_at(PART, memoryview(bytes(2 * PART)))
    assert caught.value.errno == errno.ECANCELED
    with pytest.raises(StorageError):
        writer.finish()
    writer.abandon()
    assert list(small_parts.list()) == []


@pytest.mark.parametrize(
    ("options", "message", "number"),
    [
        ({"secret_access_key": "wrong"}, "403 SignatureDoesNotMatch", errno.EACCES),
        ({"endpoint": "http://127.0.0.1:1", "retries": 1}, "refused", errno.ECANCELED),
    ],
)
def test_an_upload_that_fails_is_told_to_every_write(
    s3_place: Opened, options: dict[str, Any], message: str, number: int
) -> None:
    """With its reason, and never as something that passes: to write again mends nothing. No request is kept."""
    bucket = s3_place(part_bytes=PART, requests=2, **options).bucket
    writer = ObjectWriter(bucket, "x/a", url="s3://b/x", name="a", nbytes=4 * PART, put=lambda _: None)
    for _ in range(2):
        with pytest.raises(StorageError, match=message) as caught:
            writer.write_at(0, memoryview(bytes(2 * PART)))
        assert caught.value.errno == number
    with pytest.raises(StorageError, match=message):
        writer.finish()
    writer.abandon()
    assert [bucket.slots.acquire(timeout=5) for _ in range(2)] == [True, True]


def test_parts_grow_with_the_blob(s3_place: Opened) -> None:
    """S3 takes ten thousand parts of an upload, and no more."""
    manners = s3_place().bucket.manners
    assert manners.part_bytes_for(1) == 8 * MIB
    assert manners.part_bytes_for(5 << 40) * 10_000 >= 5 << 40
    assert manners.part_bytes_for(5 << 40) % MIB == 0


def test_unfinished_uploads_are_found_and_swept(small_parts: ObjectRoot, boto: Any) -> None:
    """Those of a process that was killed; younger ones and other places are left alone."""
    other = f"{small_parts.prefix.rstrip('/')}-other/x"
    for key in (f"{small_parts.prefix}a", f"{small_parts.prefix}step-1/b", other):
        made = boto.create_multipart_upload(Bucket=BUCKET, Key=key)
        boto.upload_part(Bucket=BUCKET, Key=key, UploadId=made["UploadId"], PartNumber=1, Body=bytes(100))
    store = RetryingStore(small_parts, RetryPolicy(0))
    found = uploads.unfinished(store)
    assert sorted(each.name for each in found) == ["a", "step-1/b"]
    assert uploads.sweep(store, lambda each: each.is_older_than(3600.0)) == 0
    assert len(begun(boto, small_parts)) == 2
    assert uploads.sweep(store, lambda each: each.name == "a") == 1
    assert begun(boto, small_parts) == [f"{small_parts.prefix}step-1/b"]
    assert uploads.sweep(store, lambda each: each.is_older_than(-60.0)) == 1
    assert begun(boto, small_parts) == []
    assert boto.list_multipart_uploads(Bucket=BUCKET, Prefix=other)["Uploads"][0]["Key"] == other
    assert uploads.unfinished(small_parts.place("step-1")) == []


def test_a_profile_that_is_not_there(s3_place: Opened, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not count where keys were given; else it is an error of ours, which no save fails of."""
    monkeypatch.setenv("AWS_PROFILE", "prod")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    place = s3_place()
    assert uploads.unfinished(place) == []
    keyless = replace(place.bucket, given={"endpoint": s3_server.endpoint})
    store = ObjectRoot(keyless, place.prefix, place.url)
    with pytest.raises(StorageError, match=r"cannot look after uploads: .*prod"):
        uploads.unfinished(store)
    assert leftovers.sweep_uploads(store, leftovers.survey(place)) == 0
    monkeypatch.setattr(uploads, "sweep", lambda *_, **__: {}["a bug"])
    assert leftovers.sweep_uploads(store, leftovers.survey(place)) == 0


def test_uploads_are_looked_for_by_the_way_that_the_store_takes(s3_place: Opened, s3_server: S3Server) -> None:
    """Through its proxy, which alone knows the endpoint."""
    with Proxy(s3_server.port) as proxy:
        place = s3_place(client_options={"proxy_url": proxy.endpoint}, endpoint="http://nowhere.invalid")
        assert uploads.unfinished(place) == []
        assert ["uploads" in request.path for request in proxy.counts.requests] == [True]


_NONE = b"""<?xml version="1.0"?><ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"""


class _Answers(BaseHTTPRequestHandler):
    """No uploads, whoever asks."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(_NONE)))
        self.end_headers()
        self.wfile.write(_NONE)

    def log_message(self, *_: object) -> None:
        pass


def own_certificate() -> tuple[bytes, bytes]:
    """Make a certificate for this machine that nobody has signed, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return made.public_bytes(serialization.Encoding.PEM), secret


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_certificates_of_the_store_are_trusted(s3_place: Opened, tmp_path: Path) -> None:
    """A server whose certificate was given by its text is talked to; one whose was not is not."""
    public, secret = own_certificate()
    (tmp_path / "both.pem").write_bytes(public + secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that does not trust it
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            endpoint = f"https://127.0.0.1:{server.server_port}"
            for trust in ({"root_certificate": public.decode()}, {"allow_invalid_certificates": True}):
                assert uploads.unfinished(s3_place(endpoint=endpoint, client_options=trust)) == []
            with pytest.raises(StorageError, match="certificate"):
                uploads.unfinished(s3_place(endpoint=endpoint))
        finally:
            server.shutdown()
            thread.join()
