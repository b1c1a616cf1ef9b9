"""The benchmark of object stores still runs."""

from pathlib import Path

BENCH = Path(__file__).parent.parent.parent / "bench"


def test_a_tiny_round(s3_server, monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.delenv("BENCH_S3FS", raising=False)
    import s3

    # Of the same folder, so that it is the server that is running already.
    results = s3.measure(str(s3_server.folder.parent), 0.02, 1)
    assert {each["contender"] for each in results["samples"]} >= set(s3.CONTENDERS)
    assert {"S3 save: ours / obstore put / get", "S3 load: ours / boto3"} <= {one.what for one in s3.judge(results)}
    assert any(line.startswith("    load: shardkeep ") for line in s3.lines(results))
