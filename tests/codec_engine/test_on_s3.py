"""The engine on a real object store: in parts and in order, plain and coded."""

import pytest
import torch

import shardkeep as sk
from shardkeep.storage.resolve import open_place
from tests.codec_engine.scene import MIB, OPTIONS
from tests.engine.samples import bits, blank_like

BUCKET = "codec-engine"


@pytest.fixture
def place(s3_server):
    """Opens places of one bucket."""
    s3_server.make_bucket(BUCKET)
    return lambda name: open_place(f"s3://{BUCKET}/{name}", **s3_server.options)


@pytest.mark.parametrize("codecs", [None, ["float", "aes"], {"model": ["lz4"]}], ids=["plain", "coded", "some"])
def test_a_checkpoint_on_s3(place, codecs, request):
    """Saved, loaded, verified and overwritten by an asynchronous save, of several parts; nothing else is left there."""
    store = place(request.node.callspec.id)
    state = {"model": {"w": torch.randn(5 * MIB), "b": torch.randn(9)}, "optim": {"m": torch.randn(99)}, "lr": 0.1}
    sk.save(state, store, codecs=codecs, options=OPTIONS)
    blank = blank_like(state)
    sk.load(blank, store, options=OPTIONS)
    assert bits(blank) == bits(state)

    state["model"]["b"].zero_()
    sk.async_save(state, store, codecs=codecs, overwrite=True, options=OPTIONS).result(60)
    sk.finish_saves()
    ck = sk.open(store, options=OPTIONS)
    ck.verify()
    assert not ck["model.b"].tensor().any()
    assert {info.name: info.nbytes for info in store.list() if info.name != "shardkeep.json"} == ck.record.at_rest
