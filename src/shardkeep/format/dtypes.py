"""
Every element type that a checkpoint can hold: its name, its code in the index, its size, and its name in safetensors.

Names are torch's. Codes are part of the file format, so a row is never renumbered or reused. Torch is imported only by the
functions that convert from and to `torch.dtype`, so that commands which only look at files start without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from shardkeep.errors import MalformedFile, UnsupportedLeaf

if TYPE_CHECKING:
    import numpy as np
    import torch

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: one row of the table."""

    code: int
    name: str
    itemsize: int
    """Bytes of one torch element; 1 for packed and sub-byte types."""
    safetensors: str | None = None
    """The safetensors dtype with the same bytes, if there is one; others are stored as U8."""
    numpy: str | None = None
    """Its name in numpy, if numpy has it without extensions."""
    packed: int = 1
    """Safetensors elements in one torch element."""

    def in_safetensors(self, shape: Ints) -> tuple[str, Ints]:
        """
        Return the dtype and shape that a safetensors header has for a tensor of this type and shape.

        A type that safetensors lacks is stored as U8: with the same shape if its elements are bytes, else with one more
        axis for the bytes of an element. The last axis of a packed type counts packed elements, as in safetensors.
        """
        if self.safetensors is not None:
            if self.packed == 1:
                return self.safetensors, shape
            if shape:
                return self.safetensors, (*shape[:-1], shape[-1] * self.packed)
        return "U8", shape if self.itemsize == 1 else (*shape, self.itemsize)


DTYPES = (
    DType(1, "bool", 1, "BOOL", "bool"),
    DType(2, "uint8", 1, "U8", "uint8"),
    DType(3, "int8", 1, "I8", "int8"),
    DType(4, "int16", 2, "I16", "int16"),
    DType(5, "int32", 4, "I32", "int32"),
    DType(6, "int64", 8, "I64", "int64"),
    DType(7, "float16", 2, "F16", "float16"),
    DType(8, "bfloat16", 2, "BF16"),
    DType(9, "float32", 4, "F32", "float32"),
    DType(10, "float64", 8, "F64", "float64"),
    DType(11, "uint16", 2, "U16", "uint16"),
    DType(12, "uint32", 4, "U32", "uint32"),
    DType(13, "uint64", 8, "U64", "uint64"),
    DType(14, "complex32", 4),
    DType(15, "complex64", 8, "C64", "complex64"),
    DType(16, "complex128", 16, None, "complex128"),
    DType(17, "float8_e4m3fn", 1, "F8_E4M3"),
    DType(18, "float8_e5m2", 1, "F8_E5M2"),
    DType(19, "float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    DType(20, "float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    DType(21, "float8_e8m0fnu", 1, "F8_E8M0"),
    DType(22, "float4_e2m1fn_x2", 1, "F4", packed=2),
    *(DType(22 + bits, f"uint{bits}", 1) for bits in range(1, 8)),
    *(DType(29 + bits, f"int{bits}", 1) for bits in range(1, 8)),
    DType(37, "bits8", 1),
    DType(38, "bits16", 2),
    DType(39, "bits1x8", 1),
    DType(40, "bits2x4", 1),
    DType(41, "bits4x2", 1),
)

_BY_NAME = {row.name: row for row in DTYPES}
_BY_CODE = {row.code: row for row in DTYPES}
_BY_NUMPY = {row.numpy: row for row in DTYPES if row.numpy is not None}


def by_name(name: str) -> DType:
    """Return the type with this name; raise `MalformedFile` if there is none."""
    return _known(_BY_NAME, name, f"named {name!r}")


def by_code(code: int) -> DType:
    """Return the type with this code; raise `MalformedFile` if there is none."""
    return _known(_BY_CODE, code, f"with code {code}")


def _known(table: Mapping[Any, DType], key: Any, called: str) -> DType:
    if key not in table:
        hint = "was the checkpoint written by a newer shardkeep?"
        raise MalformedFile(f"there is no dtype {called}", hint=hint, dtype=key)
    return table[key]


def of_torch(dtype: torch.dtype, *, key: str | None = None) -> DType:
    """Return the type of a torch dtype; raise `UnsupportedLeaf`, with the key, for quantized and unknown ones."""
    found = known_to_torch().get(dtype)
    if found is None:
        hint = "save t.view(torch.uint8), or convert it to a dtype that shardkeep knows"
        if str(dtype).startswith(("torch.qint", "torch.quint")):
            hint = "save t.int_repr() together with its scale and zero_point"
        what, about = ("a tensor", {}) if key is None else (repr(key), {"key": key})
        text = f"{what} is of dtype {dtype}, which has no stored form"
        raise UnsupportedLeaf(text, hint=hint, dtype=str(dtype), **about)
    return found


def to_torch(dtype: DType) -> torch.dtype:
    """Return the torch dtype; raise `UnsupportedLeaf` if the installed torch does not have it."""
    import torch  # noqa: PLC0415 - see the module's docstring

    found = getattr(torch, name := dtype.name, None)
    if isinstance(found, torch.dtype):
        return found
    raise UnsupportedLeaf(f"torch {torch.__version__} has no dtype {name}", hint="load with a newer torch", dtype=name)


def of_numpy(dtype: np.dtype[Any]) -> DType | None:
    """Return the type of a numpy dtype; None if torch has none with the same bytes and byte order."""
    return _BY_NUMPY.get(dtype.name) if dtype.isnative else None


@cache
def known_to_torch() -> Mapping[torch.dtype, DType]:
    import torch  # noqa: PLC0415 - see the module's docstring

    # getattr with a default: an older torch may lack the newest rows.
    found = ((getattr(torch, row.name, None), row) for row in DTYPES)
    return {dtype: row for dtype, row in found if isinstance(dtype, torch.dtype)}
