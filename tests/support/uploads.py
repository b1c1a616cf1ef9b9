"""Multipart uploads that were begun and neither completed nor aborted, which no listing of objects shows."""

from contextlib import closing

import boto3

from shardkeep.storage.base import innermost


def unfinished(place: object) -> list[str]:
    """Name the unfinished uploads below a place on the S3 server of the tests; none elsewhere."""
    store = innermost(place)
    if store.bucket.service != "s3":
        return []
    options, variables = store.bucket.options, store.bucket.environment
    with closing(
        boto3.client(
            "s3",
            endpoint_url=options.get("endpoint") or variables["AWS_ENDPOINT_URL"],
            aws_access_key_id=options.get("access_key_id") or variables["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=options.get("secret_access_key") or variables["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
        )
    ) as client:
        found = client.list_multipart_uploads(Bucket=store.bucket.name, Prefix=store.prefix).get("Uploads", [])
    return [each["Key"].removeprefix(store.prefix) for each in found]
