"""What goes wrong with S3 is said so that a person knows what to do; see also `tests/clouds/test_keys.py`."""

import errno
import traceback

import pytest

from shardkeep.errors import CheckpointError, StorageError
from shardkeep.storage.object_client import translate
from shardkeep.storage.resolve import open_place

SECRET = "never-to-be-seen"
ANSWERED = "Server returned non-2xx status code:"


def said(call):
    """Return the error, of which no line may show a key."""
    with pytest.raises(StorageError) as caught:
        call()
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return caught.value


def test_an_unknown_key_and_a_wrong_secret_have_different_errors(s3_place):
    """The service's own words are there."""
    error = said(lambda: s3_place(access_key_id="unknown", secret_access_key=SECRET).get("a", limit=9))
    assert "InvalidAccessKeyId" in error.message
    assert "unknown there" in error.hint


def test_a_blob_for_a_missing_bucket_fails_when_it_is_finished(s3_server):
    """To look for a name there says no more than that there is none; to put something there does."""
    store = open_place(s3_server.url("run", bucket="no-such-bucket"), **s3_server.options)
    writer = store.create("a", 1)
    writer.write_at(0, memoryview(b"x"))
    assert "create the bucket" in said(writer.finish).hint
    writer.abandon()


def test_plain_http_must_be_meant(s3_place):
    """Keys are not sent over an open line because of a typing mistake."""
    error = said(lambda: s3_place(client_options={"allow_http": False}).get("a", limit=9))
    assert "allow_http" in error.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"requests": 0}, r"Expected `int` >= 1 - at `\$\.requests`"),
        ({"part_bytes": 1 << 20}, r"Expected `int` >= 5242880 - at `\$\.part_bytes`"),
        ({"retries": -1}, r"Expected `int` >= 0 - at `\$\.retries`"),
        ({"timeout_s": "long"}, r"Expected `float`, got `str` - at `\$\.timeout_s`"),
    ],
)
def test_options_that_make_no_sense(s3_server, options, message):
    """They are refused when the place is opened, by name, before anything is asked of the service."""
    with pytest.raises(CheckpointError, match=message):
        open_place(s3_server.url("a"), **{**s3_server.options, **options})


@pytest.mark.parametrize(
    ("text", "number", "message"),
    [
        (f"{ANSWERED} 503 X: <Error><Code>SlowDown</Code></Error>", errno.EBUSY, "503 SlowDown"),
        (f"{ANSWERED} 429 Too Many Requests: ", errno.EBUSY, "429 Too Many Requests"),
        (f"{ANSWERED} 500 Oh: ", errno.EIO, "500 Oh"),
        (f"{ANSWERED} 504 G: ", errno.ETIMEDOUT, "504 G"),
        (
            "after 3 retries - HTTP error: x\n\nDebug source: kind: Timeout,",
            errno.ETIMEDOUT,
            "in time, after 3 retries",
        ),
        ("request or response body error\n\nDebug source: ConnectionReset", errno.ECONNRESET, "was reset"),
        ("HTTP error: x\n\nDebug source: dns error: failed to lookup address", errno.EHOSTUNREACH, "was not found"),
        (f"GET https://a.b/c?sig={SECRET}&x=1 went wrong", errno.EIO, "GET https://a.b/c went wrong"),
    ],
)
def test_what_services_say_has_a_number(text, number, message):
    """The errno separates passing errors from lasting ones; a signature in a URL is left out."""
    error = translate(ValueError(text), "cannot get", "s3://b", "a", 7)
    assert error.errno == number
    assert message in error.message
    assert error.message.startswith("s3://b/a: cannot get at offset 7: ")
    assert SECRET not in str(error)
