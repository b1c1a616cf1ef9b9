"""A commit record or an index that comes damaged from S3 once is read again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import shardkeep as sk
from shardkeep.storage.object_store import ObjectStore
from tests.object_store.jobs import OPTIONS, load_and_compare, state_of
from tests.object_store.proxy import Proxy, Rule
from tests.support.s3_server import S3Server


@pytest.mark.parametrize("codecs", [None, ["zstd"]])
def test_what_comes_damaged_once(
    s3_server: S3Server, s3_place: Callable[..., ObjectStore], codecs: list[str] | None
) -> None:
    """One bit of a record and one of an index are others on the way, or half of each is missing: all is loaded, exactly."""
    with Proxy(s3_server.port) as proxy:
        place = s3_place(endpoint=proxy.endpoint)
        sk.save(state_of(1), place, step=1, options=OPTIONS, codecs=codecs)
        for fault in ("flip_answer", "shorten_answer"):
            wanted = ("shardkeep.json", "/index-")
            proxy.rules = [Rule(fault, method="GET", path=path, times=1) for path in wanted]  # type: ignore[arg-type]
            load_and_compare(place, 1)
            assert proxy.counts.faults[fault] == 2


def test_a_run_does_not_go_back_for_a_flipped_bit(s3_server: S3Server, s3_place: Callable[..., ObjectStore]) -> None:
    """The newest checkpoint is restored though its record comes damaged once, wherever records are read."""
    with Proxy(s3_server.port) as proxy:
        root = s3_place(endpoint=proxy.endpoint)
        for step in (1, 2):
            sk.save(state_of(step), root.place(f"step-{step}"), step=step, options=OPTIONS)
        proxy.rules = [Rule("flip_answer", method="GET", path="step-2/shardkeep.json", times=1)]
        with sk.Checkpointer(root, options=OPTIONS) as ckpt:
            assert ckpt.restore_latest(state_of(0)) == 2
        assert proxy.counts.faults["flip_answer"] == 1
