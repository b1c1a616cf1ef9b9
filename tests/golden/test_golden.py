"""Checkpoints that earlier versions wrote are read by this one."""

import pytest
import torch

import shardkeep as sk
from tests.engine.many_chunks import CountingStore
from tests.engine.samples import bits
from tests.golden.make import CODECS, HERE, KEYS, full_state, table

GOLDEN = sorted(path.name for path in HERE.glob("v*"))
OPTIONS = sk.Options(keys=KEYS)


def test_there_is_one_for_every_version():
    from shardkeep.format.record import VERSION

    assert {sk.open(HERE / name, options=OPTIONS).record.version for name in GOLDEN} == {*range(1, VERSION + 1)}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_checkpoints_read_as_they_were_written(name):
    ck = sk.open(HERE / name, options=OPTIONS)
    tree = ck.to_dict()
    assert tree.pop("rng") == {0: 0, 1: 10}
    assert bits(tree.pop("table", table()["table"])) == bits(table()["table"])
    assert bits(tree) == bits(full_state())
    assert tree["model"]["weight"] is tree["model"]["tied"]
    assert (ck.step, ck.meta, ck.record.world_size) == (7, {"golden": True}, 2)
    assert [str(box) for box in ck["model.weight"].boxes] == ["[0:4,0:5]", "[4:7,0:5]"]
    ck.verify()
    weight = torch.zeros(7, 5)  # a template of another layout
    sk.load({"model": {"weight": weight}}, HERE / name, include="model.weight", options=OPTIONS)
    assert torch.equal(weight, full_state()["model"]["weight"])


def test_an_index_in_parts_is_read_in_part():
    """Of the parts of its golden checkpoint, only the second is read for a row of the second."""
    opened = sk.open(store := CountingStore(sk.LocalStore(HERE / "v1-parts")))
    head = opened.record.index.head_nbytes
    assert store.nbytes["skindex"] == head
    assert torch.equal(opened["table"][4100], table()["table"][4100])
    assert head < store.nbytes["skindex"] < head + 200
    assert len(opened["table"].boxes) == len(table()["table"])


def test_what_the_second_version_is_for_is_in_its_golden_checkpoints():
    """One went through every codec; the other has its digests beside plain safetensors data."""
    from safetensors.torch import load_file

    coded = sk.open(HERE / "v2-coded", options=OPTIONS).record
    assert {tuple(each["name"] for each in chain) for chain in coded.chains} == {
        tuple(name.partition(":")[0] for name in names) for names in CODECS.values()
    }
    assert coded.mac
    apart = sk.open(HERE / "v2-apart").record
    assert all(file.blocks for file in apart.files)
    [model] = [file.name for file in apart.files if file.name.startswith("model-00000")]
    [rows] = [each for name, each in load_file(HERE / "v2-apart" / model).items() if name.endswith("[0:4,0:5]")]
    assert torch.equal(rows, full_state()["model"]["weight"][:4])
