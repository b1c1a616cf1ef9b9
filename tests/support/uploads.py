"""Multipart uploads that were begun and neither completed nor aborted, which no listing of objects shows."""

from contextlib import closing

from shardkeep.storage.base import innermost
from tests.support.s3_server import boto_client


def unfinished(place: object) -> list[str]:
    """Name the unfinished uploads below a place on the S3 server of the tests; none elsewhere."""
    store = innermost(place)
    if store.bucket.service != "s3":
        return []
    options, variables = store.bucket.options, store.bucket.environment
    names = {name: f"AWS_{name.upper()}" for name in ("access_key_id", "secret_access_key", "region")}
    names["endpoint"] = "AWS_ENDPOINT_URL"
    with closing(boto_client({name: options.get(name) or variables[each] for name, each in names.items()})) as client:
        found = client.list_multipart_uploads(Bucket=store.bucket.name, Prefix=store.prefix).get("Uploads", [])
    return [each["Key"].removeprefix(store.prefix) for each in found]
