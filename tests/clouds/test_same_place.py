"""One bucket is one place, however its server and account are named; two are two."""

import pytest

from shardkeep.conversion.api import check_different_place
from shardkeep.errors import CheckpointError
from shardkeep.storage.base import same_place
from shardkeep.storage.resolve import open_place, open_root

AT = "http://127.0.0.1:9000"
KEY = "a2V5"


@pytest.mark.parametrize(
    ("url", "environment", "options", "same"),
    [
        ("s3://b/x", {"AWS_ENDPOINT_URL": AT}, {"endpoint": AT}, True),
        ("s3://b/x", {"AWS_ENDPOINT_URL": f"{AT}/"}, {"endpoint_url": "HTTP://127.0.0.1:9000"}, True),
        ("s3://b/x", {"AWS_ENDPOINT_URL_S3": AT, "AWS_ENDPOINT_URL": "http://other"}, {"aws_endpoint": AT}, True),
        ("s3://b/x", {"AWS_ENDPOINT_URL": AT}, {"endpoint": "http://127.0.0.1:9001"}, False),
        ("s3://b/x", {}, {"endpoint": "https://s3.eu-central-1.amazonaws.com"}, True),
        ("s3://b/x", {}, {"endpoint": AT}, False),
        ("gs://b/x", {"STORAGE_EMULATOR_HOST": "127.0.0.1:9000"}, {"endpoint": AT, "skip_signature": True}, True),
        ("gs://b/x", {"GOOGLE_BASE_URL": AT}, {"base_url": AT, "skip_signature": True}, True),
        ("gs://b/x", {"GOOGLE_SKIP_SIGNATURE": "true"}, {"endpoint": "https://storage.googleapis.com"}, True),
        ("az://b/x", {"AZURE_STORAGE_ACCOUNT_NAME": "me"}, {"account_name": "me"}, True),
        ("az://b/x", {"AZURE_STORAGE_ACCOUNT_NAME": "me"}, {"endpoint": "https://me.blob.core.windows.net"}, True),
        ("az://b/x", {"AZURE_STORAGE_ACCOUNT_NAME": "me"}, {"account_name": "you"}, False),
        ("az://b/x", {"AZURE_STORAGE_USE_EMULATOR": "true"}, {"connection_string": "UseDevelopmentStorage=true"}, True),
        (
            "az://b/x",
            {"AZURE_STORAGE_CONNECTION_STRING": f"AccountName=me;AccountKey={KEY};EndpointSuffix=core.windows.net"},
            {"account_name": "me", "account_key": KEY},
            True,
        ),
        (
            "az://b/x",
            {
                "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=me;AccountKey={KEY};EndpointSuffix=core.chinacloudapi.cn"
            },
            {"account_name": "me", "endpoint": "https://me.blob.core.windows.net"},
            False,
        ),
    ],
)
def test_by_environment_and_by_option(url, environment, options, same, monkeypatch):
    """A checkpoint is not converted into the place that it is read from, also if it is named in two ways."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    by_environment, by_option = open_root(url, direct=False), open_place(url, **options)
    assert same_place(by_environment, by_option) is same
    assert not same_place(by_environment.place("a"), by_option.place("b"))
    if same:
        with pytest.raises(CheckpointError, match="its own place"):
            check_different_place(by_environment.place("a"), by_option.place("a"))
    else:
        check_different_place(by_environment.place("a"), by_option.place("a"))


def test_an_account_in_the_url():
    """It says the same as an option; where the account is in another of Microsoft's clouds, so is the endpoint."""
    named = open_place("abfss://b@me.dfs.core.windows.net/x", account_key=KEY)
    assert same_place(named, open_place("az://b/x", account_name="me", account_key=KEY))
    away = open_place("abfss://b@me.dfs.core.chinacloudapi.cn/x", account_key=KEY)
    assert not same_place(named, away)
    there = open_place("az://b/x", account_name="me", account_key=KEY, endpoint="https://me.blob.core.chinacloudapi.cn")
    assert same_place(away, there)
