"""Commit records: what their MAC covers, and threads that decode them."""

import subprocess
import sys

import msgspec
import pytest
import torch

import shardkeep as sk
from shardkeep.format.record import authenticated_bytes


def test_what_a_mac_is_of_is_spelt_in_one_way():
    """As the format's page says, by Python's rules: other JSON modules write fractions otherwise."""
    store = sk.MemoryStore()
    sk.save({"w": torch.ones(2)}, store, meta={"b": 5e-05, "a": [1e16, 0.1, "ü\n\x7f"]})
    record = msgspec.structs.replace(sk.open(store).record, mac="x")
    said = authenticated_bytes(record, [[{"name": "aes"}]])
    assert said.startswith(b'{"chains":[[{"name":"aes"}]],')
    assert '"meta":{"a":[1e+16,0.1,"ü\\n\x7f"],"b":5e-05}'.encode() in said
    assert b'"mac"' not in said


RACE = """
import importlib, os, sys, threading, msgspec
import shardkeep.events

value = eval(sys.argv[2], {**vars(shardkeep.events), **vars(importlib.import_module(sys.argv[1]))})
data = msgspec.msgpack.encode(value)
sys.setswitchinterval(1e-6)
for _ in range(60):
    if not (child := os.fork()):
        barrier = threading.Barrier(16)
        decode = lambda: (barrier.wait(), msgspec.msgpack.decode(data, type=type(value)))
        threads = [threading.Thread(target=decode) for _ in range(16)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        os._exit(0)
    if code := os.waitpid(child, 0)[1]:
        sys.exit(f"a process ended with {code}")
"""
RECORD = """Record(
    save_id="a", saved_at="", writer="", world_size=1, files=[], index=Blob(name="a", nbytes=1, checksum=""),
    totals=Totals(tensors=0, chunks=0, values=0, tensor_bytes=0),
)"""


@pytest.mark.parametrize(
    ("module", "value"),
    [
        ("format.record", RECORD),
        ("engine.process.server", 'WriterReply(seal=Seal(1, "a"))'),
        ("manage.replicate", '_Share(spans=[Span("a", 0.0, 1.0)])'),
        ("dcp._impl.default_save", '_SentState([_SentItem("a")], ["a"], None)'),
    ],
)
def test_threads_may_be_the_first_to_decode_one_at_the_same_time(module, value):
    """A listing decodes records in many threads at once, and so do writers and copies; the process must not crash."""
    subprocess.run([sys.executable, "-c", RACE, f"shardkeep.{module}", value], check=True, timeout=120)
