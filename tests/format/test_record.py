"""Commit records: what their MAC covers, and threads that decode them."""

import subprocess
import sys

import msgspec
import torch

import shardkeep as sk
from shardkeep.format.record import authenticated_bytes


def test_what_a_mac_is_of_is_spelt_in_one_way():
    """
    As the format's page says, by Python's rules: other modules, and other versions of one, write fractions otherwise.
    """
    store = sk.MemoryStore()
    sk.save({"w": torch.ones(2)}, store, meta={"b": 5e-05, "a": [1e16, 0.1, "ü\n\x7f"]})
    record = msgspec.structs.replace(sk.open(store).record, mac="x")
    said = authenticated_bytes(record, [[{"name": "aes"}]])
    assert said.startswith(b'{"chains":[[{"name":"aes"}]],')
    assert '"meta":{"a":[1e+16,0.1,"ü\\n\x7f"],"b":5e-05}'.encode() in said
    assert b'"mac"' not in said


RACE = """
import os, sys, threading
from shardkeep.format.record import decode_record

sys.setswitchinterval(1e-6)
data = open(sys.argv[1], "rb").read()
for _ in range(60):
    if not (child := os.fork()):
        barrier = threading.Barrier(16)
        threads = [threading.Thread(target=lambda: (barrier.wait(), decode_record(data, "x"))) for _ in range(16)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        os._exit(0)
    if code := os.waitpid(child, 0)[1]:
        sys.exit(f"a process ended with {code}")
"""


def test_threads_may_be_the_first_to_decode_one_at_the_same_time(tmp_path):
    """A listing decodes records in many threads at once; the process must not crash."""
    sk.save({"w": torch.ones(2)}, tmp_path)
    subprocess.run([sys.executable, "-c", RACE, tmp_path / "shardkeep.json"], check=True, timeout=120)
