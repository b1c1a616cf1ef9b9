"""`sk.open`: keys, metadata, lazy slices, verify; one process, no template."""

import numpy as np
import pytest
import torch

import shardkeep as sk
from tests.engine.samples import bits


@pytest.fixture
def opened(tmp_path):
    state = {
        "w": torch.arange(60.0).reshape(3, 4, 5),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "a": np.arange(3),
        "n": 7,
    }
    sk.save(state, tmp_path / "ck", step=4, meta={"lr": 0.1})
    return sk.open(str(tmp_path / "ck"))


def test_it_is_a_mapping_of_flat_names(opened):
    """
    Keys, length, membership and lookups behave as a dict's.
    """
    assert list(opened) == sorted(opened.keys()) == ["a", "half", "n", "w"]
    assert len(opened) == 4
    assert "w" in opened
    assert "x" not in opened
    assert opened["n"] == 7
    with pytest.raises(KeyError, match="x"):
        opened["x"]
    assert (opened.step, opened.meta, opened.record.world_size) == (4, {"lr": 0.1}, 1)
    assert "2 tensors" not in repr(opened)
    assert "3 tensors" in repr(opened)


def test_a_tensor_knows_what_it_is_before_it_is_read(opened):
    """
    Shape, dtype, size and stored boxes need no data.
    """
    stored = opened["w"]
    assert (stored.shape, stored.dtype, stored.ndim, stored.nbytes, len(stored)) == (
        (3, 4, 5),
        torch.float32,
        3,
        240,
        3,
    )
    assert [str(box) for box in stored.boxes] == ["[0:3,0:4,0:5]"]
    assert repr(stored) == "<StoredTensor 'w': float32(3, 4, 5)>"


def test_numpy_views(opened):
    """
    Arrays where numpy has the type, and a hint where it has not.
    """
    assert np.array_equal(opened["w"].numpy(), np.arange(60.0).reshape(3, 4, 5))
    assert np.array_equal(np.asarray(opened["a"]), np.arange(3))
    with pytest.raises(sk.UnsupportedLeaf, match=r"\.tensor\(\)"):
        opened["half"].numpy()


@pytest.mark.parametrize(
    "index", [(5,), (0, 0, 0, 0), (slice(None, None, -1),), (..., ...), ("a",), (None,), ([0, 1],)]
)
def test_bad_indices_are_refused(opened, index):
    """
    Out of range, too many, negative steps and fancy indices name the key.
    """
    with pytest.raises((IndexError, ValueError), match="'w'"):
        opened["w"][index]


def test_rows_with_a_step_read_only_those_rows(tmp_path):
    """
    Large rows picked with a step are read one by one.
    """
    full = torch.randn(64, 32, 1024)
    sk.save({"w": full}, tmp_path / "ck")
    store = CountingStore(tmp_path / "ck")

    found = sk.open(store)["w"][::16]

    assert bits(found) == bits(full[::16])
    assert store.nbytes < full.nbytes / 4


class CountingStore(sk.LocalStore):
    """Counts what readers read."""

    nbytes = 0

    def open(self, name):
        reader = super().open(name)
        inner = reader.read_into

        def counted(offset, into, **hints):
            self.nbytes += len(into)
            inner(offset, into, **hints)

        reader.read_into = counted
        return reader


def test_opening_reads_no_tensor_data(tmp_path):
    """
    Open, list and look at shapes: no data file is opened.
    """
    sk.save({"w": torch.randn(1000, 1000)}, tmp_path / "ck")
    for path in (tmp_path / "ck").glob("*.safetensors"):
        path.unlink()
    assert sk.open(tmp_path / "ck")["w"].shape == (1000, 1000)


def test_verify_lists_everything_that_is_wrong(tmp_path):
    """
    Damage in several files is reported in one error, with file and offset.
    """
    sk.save({"a": {"w": torch.randn(9)}, "b": {"w": torch.randn(9)}, "c": {"w": torch.randn(9)}}, tmp_path / "ck")
    for path in (tmp_path / "ck").glob("[ab]-*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    with pytest.raises(sk.DamagedCheckpoint) as caught:
        sk.open(tmp_path / "ck").verify()

    assert len(caught.value.details["problems"]) == 2
    assert "'a.w'" in str(caught.value)
    assert "bytes 4096 to 4132" in str(caught.value)
