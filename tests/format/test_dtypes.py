"""The table of element types: complete, frozen, and the same bytes on both sides."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

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
def test_every_torch_dtype_is_covered(dtype: torch.dtype) -> None:
    """Each dtype torch has, but the quantized ones, is in the table with torch's own element size."""
    row = dtypes.of_torch(dtype)

    assert f"torch.{row.name}" == str(dtype)
    assert row.itemsize == dtype.itemsize
    assert dtypes.to_torch(row) is dtype
    assert dtypes.by_name(row.name) is row
    assert dtypes.by_code(row.code) is row


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ORDINARY, ids=str)
def test_bytes_round_trip(dtype: torch.dtype) -> None:
    """A tensor of any dtype is `itemsize` bytes an element, and the same bytes give it back."""
    row = dtypes.of_torch(dtype)
    raw = torch.arange(6 * row.itemsize, dtype=torch.uint8).remainder(2).reshape(2, -1)
    tensor = raw.view(dtype)

    assert tensor.shape == (2, 3)
    assert torch.equal(tensor.view(torch.uint8), raw)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
@pytest.mark.parametrize("row", dtypes.DTYPES, ids=lambda row: row.name)
def test_safetensors_accepts_the_header(row: dtypes.DType, shape: tuple[int, ...], tmp_path) -> None:
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
def test_safetensors_agrees_about_the_header(row: dtypes.DType) -> None:
    """Where safetensors knows a dtype, its own writer gives the dtype and shape that we give."""
    tensor = torch.zeros(2, 3 * row.itemsize, dtype=torch.uint8).view(dtypes.to_torch(row))
    blob = safetensors_save({"t": tensor})
    header = json.loads(blob[8 : 8 + struct.unpack("<Q", blob[:8])[0]])

    assert (header["t"]["dtype"], tuple(header["t"]["shape"])) == row.in_safetensors((2, 3))


def test_fallback_shapes() -> None:
    """A type safetensors lacks is U8, with an axis more if its elements are several bytes."""
    assert dtypes.by_name("complex128").in_safetensors((3,)) == ("U8", (3, 16))
    assert dtypes.by_name("complex32").in_safetensors(()) == ("U8", (4,))
    assert dtypes.by_name("uint4").in_safetensors((3, 5)) == ("U8", (3, 5))
    assert dtypes.by_name("float4_e2m1fn_x2").in_safetensors((3, 5)) == ("F4", (3, 10))
    assert dtypes.by_name("float4_e2m1fn_x2").in_safetensors(()) == ("U8", ())


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantized_is_refused(dtype: torch.dtype) -> None:
    """A quantized dtype carries a quantizer, which the error says how to save."""
    with pytest.raises(UnsupportedLeaf, match=r"int_repr\(\).*scale and zero_point"):
        dtypes.of_torch(dtype)


def test_unknown_codes_and_names_are_malformed() -> None:
    """What no version ever wrote is reported as such."""
    for code in (0, 42, 255):
        with pytest.raises(MalformedFile, match=str(code)):
            dtypes.by_code(code)
    with pytest.raises(MalformedFile, match="float2"):
        dtypes.by_name("float2")


def test_a_dtype_this_torch_lacks() -> None:
    """A checkpoint with a dtype the installed torch lacks says which one."""
    with pytest.raises(UnsupportedLeaf, match="float128_x"):
        dtypes.to_torch(dtypes.DType(99, "float128_x", 16))
    with pytest.raises(UnsupportedLeaf, match="Tensor"):
        dtypes.to_torch(dtypes.DType(98, "Tensor", 16))


@pytest.mark.parametrize("row", [row for row in dtypes.DTYPES if row.numpy], ids=lambda row: row.name)
def test_numpy_dtypes(row: dtypes.DType) -> None:
    """numpy's dtype of the same bytes is found in native byte order only."""
    native = np.dtype(row.numpy)

    assert dtypes.of_numpy(native) is row
    assert torch.from_numpy(np.zeros(2, native)).dtype is dtypes.to_torch(row)
    if native.itemsize > 1:
        assert dtypes.of_numpy(native.newbyteorder()) is None


@pytest.mark.parametrize("code", np.typecodes["All"])
def test_every_numpy_dtype(code: str) -> None:
    """A numpy type is in the table exactly if torch has it, whatever C type it is an alias of."""
    row = dtypes.of_numpy(np.dtype(code))

    if row is None:
        with pytest.raises(TypeError, match="can't convert"):
            torch.from_numpy(np.zeros(2, code))
    else:
        assert torch.from_numpy(np.zeros(2, code).view(row.numpy)).dtype is dtypes.to_torch(row)
    assert dtypes.of_numpy(np.dtype([("a", "f4")])) is None


def test_torch_is_not_imported() -> None:
    """Looking a code up costs no import of torch."""
    program = "import sys; import shardkeep.format.dtypes as d; d.by_code(9); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
