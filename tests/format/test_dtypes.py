"""The table of element types: complete, frozen, and the same bytes on both sides."""

import json
import struct
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_save

from shardkeep.errors import MalformedFile, UnsupportedLeaf
from shardkeep.format import dtypes

TORCH_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
QUANTIZED = [d for d in TORCH_DTYPES if str(d).startswith(("torch.qint", "torch.quint"))]
ORDINARY = [d for d in TORCH_DTYPES if d not in QUANTIZED]


@pytest.mark.parametrize("dtype", ORDINARY, ids=str)
def test_every_torch_dtype_is_covered(dtype):
    row = dtypes.of_torch(dtype)
    assert f"torch.{row.name}" == str(dtype)
    assert row.itemsize == dtype.itemsize
    assert dtypes.to_torch(row) is dtype
    assert dtypes.by_name(row.name) is row
    assert dtypes.by_code(row.code) is row


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
@pytest.mark.parametrize("row", dtypes.DTYPES, ids=lambda row: row.name)
def test_safetensors_accepts_the_header(row, shape, tmp_path):
    """Under the dtype and shape we give it, safetensors opens a tensor of any dtype, with the right number of bytes."""
    name, stored = row.in_safetensors(shape)
    nbytes = int(np.prod(shape)) * row.itemsize
    header = json.dumps({"t": {"dtype": name, "shape": stored, "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))
    with safe_open(path, "pt") as file:
        tensor = file.get_tensor("t")
    assert tensor.numel() * tensor.dtype.itemsize == nbytes
    if row.safetensors is not None and (row.packed == 1 or shape):
        assert (tensor.dtype, tuple(tensor.shape)) == (dtypes.to_torch(row), shape)
    else:
        assert tensor.dtype == torch.uint8


@pytest.mark.parametrize("row", [row for row in dtypes.DTYPES if row.safetensors], ids=lambda row: row.name)
def test_safetensors_agrees_about_the_header(row):
    tensor = torch.zeros(2, 3 * row.itemsize, dtype=torch.uint8).view(dtypes.to_torch(row))
    blob = safetensors_save({"t": tensor})
    header = json.loads(blob[8 : 8 + struct.unpack("<Q", blob[:8])[0]])
    assert (header["t"]["dtype"], tuple(header["t"]["shape"])) == row.in_safetensors((2, 3))


def test_fallback_shapes():
    assert dtypes.by_name("complex128").in_safetensors((3,)) == ("U8", (3, 16))
    assert dtypes.by_name("complex32").in_safetensors(()) == ("U8", (4,))
    assert dtypes.by_name("uint4").in_safetensors((3, 5)) == ("U8", (3, 5))
    assert dtypes.by_name("float4_e2m1fn_x2").in_safetensors((3, 5)) == ("F4", (3, 10))
    assert dtypes.by_name("float4_e2m1fn_x2").in_safetensors(()) == ("U8", ())


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        *(
            (partial(dtypes.of_torch, dtype), UnsupportedLeaf, r"int_repr\(\).*scale and zero_point")
            for dtype in QUANTIZED
        ),
        *((partial(dtypes.by_code, code), MalformedFile, str(code)) for code in (0, 42, 255)),
        (partial(dtypes.by_name, "float2"), MalformedFile, "float2"),
        (partial(dtypes.to_torch, dtypes.DType(99, "float128_x", 16)), UnsupportedLeaf, "float128_x"),
        (partial(dtypes.to_torch, dtypes.DType(98, "Tensor", 16)), UnsupportedLeaf, "Tensor"),
    ],
)
def test_what_there_is_not(ask, error, says):
    """Quantized dtypes, codes and names that no version wrote, and dtypes that the installed torch lacks are named."""
    with pytest.raises(error, match=says):
        ask()


@pytest.mark.parametrize("code", [*np.typecodes["All"], *(row.numpy for row in dtypes.DTYPES if row.numpy)])
def test_every_numpy_dtype(code):
    """A numpy type is in the table exactly if torch has it, whatever C type it is an alias of, in native byte order."""
    native = np.dtype(code)
    row = dtypes.of_numpy(native)
    if row is None:
        with pytest.raises(TypeError, match="can't convert"):
            torch.from_numpy(np.zeros(2, code))
    else:
        assert row.numpy == native.name
        assert torch.from_numpy(np.zeros(2, code).view(row.numpy)).dtype is dtypes.to_torch(row)
        assert native.itemsize == 1 or dtypes.of_numpy(native.newbyteorder()) is None
    assert dtypes.of_numpy(np.dtype([("a", "f4")])) is None
