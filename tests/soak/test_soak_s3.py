"""The short form of the long run on an object store, and proof that its checker finds what is wrong there."""

import json

import pytest
import xxhash

from tests.soak.checker import Checker, Damage
from tests.soak.contents import TENSORS
from tests.soak.driver import Soak
from tests.soak.job import Plan, run_job
from tests.soak.ledger import Ledger
from tests.soak.places import Bucket
from tests.support.s3_server import BUCKET

SEED = 19935
"""Whose second and third round kill a machine and a rank in the middle of an upload, the latter on a bad network."""


@pytest.mark.timeout(200)
def test_a_short_soak(tmp_path, s3_server, capsys):
    """After kills in mid-upload all that was acknowledged is exact, and the next job removed what the dead left."""
    with Soak(tmp_path, SEED, store="s3", server=s3_server, short=True) as soak:
        for number in range(2, 5):
            soak.round(number)
        soak.check_all()
        with capsys.disabled():
            print(f"\n{soak.summary()}")
        assert sum(soak.kills.values()) == 2
        assert soak.checker.uploads_seen
        assert len(soak.ledger.acked) > 3


UPLOAD = b"begun, and never finished"


def named(objects, *parts):
    [found] = [key for key in objects if key.startswith("step-2/") and all(part in key for part in parts)]
    return found


def flip(objects, *parts, at):
    data = bytearray(objects[named(objects, *parts)])
    data[at] ^= 1
    objects[named(objects, *parts)] = bytes(data)


def forge(objects):
    """Change what a record says, and make its checksum right again."""
    record = json.loads(objects["step-2/shardkeep.json"])
    del record["checksum"]
    body = json.dumps({**record, "saved_at": "2020-01-01T00:00:00Z"}, indent=2).removesuffix("\n}")
    said = f'{body},\n  "checksum": "xxh3_128:{xxhash.xxh3_128(body.encode()).hexdigest()}"\n}}\n'
    objects["step-2/shardkeep.json"] = said.encode()


def save_something_else(objects):
    """A perfect checkpoint, of another step."""
    for key in [key for key in objects if key.startswith("step-2/")]:
        del objects[key]
    objects |= {key.replace("step-1/", "step-2/"): data for key, data in objects.items() if key.startswith("step-1/")}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory, s3_server, boto):
    """What a job leaves that nothing has happened to: what it wrote down, and its root. Some of it is encrypted."""
    logs = tmp_path_factory.mktemp("logs")
    how = {"options": s3_server.options, "direct": s3_server.options}
    url = s3_server.url(f"soak/{logs.parent.name}/healthy")
    codecs = {"optim": ["float", "aes"]}
    assert run_job(Plan(job=1, seed="", root=url, logs=str(logs), steps=2, codecs=codecs, **how)) == "done"
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    listed = boto.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]
    keys = [each["Key"].removeprefix(prefix) for each in listed]
    return logs, {key: boto.get_object(Bucket=BUCKET, Key=prefix + key)["Body"].read() for key in keys}


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda objects: flip(objects, "model", "safetensors", at=-1), "a block's digest is wrong"),
        (lambda objects: flip(objects, "model", "blocks", at=-1), "the digest of its digests is wrong"),
        (lambda objects: objects.pop(named(objects, "model", "blocks")), "blocks is missing"),
        (lambda objects: flip(objects, "optim", "skframes", at=99), r"frame \d is wrong"),
        (lambda objects: flip(objects, "index", "skframes", at=-30), "the digest of the table is wrong"),
        (forge, "the record's signature is wrong"),
        (save_something_else, "step-2 holds step 1"),
        (lambda objects: objects.pop("step-2/shardkeep.json"), "acknowledged"),
        (lambda objects: objects.update({"step-2/litter": b""}), "files of step-2"),
        (lambda objects: objects.update({"lease.json": b""}), "files of the root"),
        (lambda objects: objects.update({"step-2/upload": UPLOAD}), "abandoned uploads"),
    ],
)
def test_the_checker_finds(s3_server, boto, healthy, do, said, tmp_path):
    """Whatever is broken, lost or left over in a bucket is found; before that, all is well."""
    logs, objects = healthy
    url = s3_server.url(f"soak/{tmp_path.parent.name}/{tmp_path.name}")
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    options = s3_server.options
    checker = Checker(Bucket(url, options), Ledger(logs), TENSORS, options=options)

    def put(changed):
        for key in objects.keys() - changed.keys():
            boto.delete_object(Bucket=BUCKET, Key=prefix + key)
        for key, data in changed.items():
            if data is UPLOAD:
                boto.create_multipart_upload(Bucket=BUCKET, Key=prefix + key)
            elif data is not objects.get(key) or changed is objects:
                boto.put_object(Bucket=BUCKET, Key=prefix + key, Body=data)

    put(objects)
    assert checker.check(tidy=True)[0].step == 2
    damaged = dict(objects)
    do(damaged)
    put(damaged)
    with pytest.raises(Damage, match=said):
        checker.check(tidy=True)
