"""What a commit record's MAC covers."""

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
