"""Encode and decode tensors: dtype names, shapes, and bytes with the same meaning on every board.

Dtypes have the names of numpy and ml_dtypes (``float32``, ``bfloat16``, ``float8_e4m3fn``, ``int4``), plus ``string``.
Bytes are little-endian and C-contiguous. Sub-byte dtypes such as ``int4`` use one byte per element, as in ml_dtypes.
:func:`pack` packs them as runtimes do. Each element in a string tensor is a little-endian uint32 length followed by
UTF-8 bytes.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hil.errors import LoadFailed, UsageError, did_you_mean

Array = npt.NDArray[Any]
Dim: TypeAlias = "int | str | None"

NUMPY_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
)
ML_DTYPES = (
    "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float8_e4m3 float8_e3m4 "
    "float4_e2m1fn int4 uint4 int2 uint2"
).split()
DTYPES = (*NUMPY_DTYPES, *ML_DTYPES, "string")

if sys.byteorder != "little":  # pragma: no cover - no such machine has the runtimes
    raise ImportError("hil requires a little-endian machine")


def parse_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype for a name (object dtype for ``string``). Raises UsageError for unknown names."""
    if name == "string":
        return np.dtype(object)
    if name in NUMPY_DTYPES:
        return np.dtype(name)
    if name in ML_DTYPES:
        import ml_dtypes

        resolved: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return resolved
    raise UsageError(f"unknown dtype {name!r}", hint=f"{did_you_mean(name, DTYPES)}expected one of {', '.join(DTYPES)}")


def get_float_limits(dtype: Any) -> Any:
    """Return ``finfo`` for a float or complex dtype from numpy or ml_dtypes."""
    resolved = np.dtype(dtype)
    if resolved.name in NUMPY_DTYPES:
        return np.finfo(resolved)
    import ml_dtypes

    return ml_dtypes.finfo(resolved)  # type: ignore[no-untyped-call]


def get_int_limits(dtype: Any) -> Any:
    """Return ``iinfo`` for an integer dtype from numpy or ml_dtypes."""
    resolved = np.dtype(dtype)
    if resolved.name in NUMPY_DTYPES:
        return np.iinfo(resolved)
    import ml_dtypes

    return ml_dtypes.iinfo(resolved)  # type: ignore[no-untyped-call]


def get_dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, the inverse of :func:`parse_dtype`. Raises UsageError for unsupported dtypes."""
    return _find_dtype_name(np.dtype(dtype))


@functools.cache
def _find_dtype_name(resolved: np.dtype[Any]) -> str:
    name = "string" if resolved.kind in "OUT" else resolved.name
    if name not in DTYPES:
        raise UsageError(
            f"tensors of dtype {resolved} are not supported",
            hint=f"{did_you_mean(name, DTYPES)}expected one of {', '.join(DTYPES)}",
        )
    return name


def shape_text(shape: Sequence[Dim]) -> str:
    """Format a shape: ``1x10``, ``Nx4``, ``batch x 4``, ``scalar``; ? is an unknown dimension."""
    by = " x " if any(isinstance(dim, str) and len(dim) > 1 for dim in shape) else "x"
    return by.join("?" if dim is None else str(dim) for dim in shape) or "scalar"


def type_text(dtype: str, shape: Sequence[Dim]) -> str:
    """Format a tensor type: ``1x10 float32``, ``batch x 4 float32``, ``scalar int64``."""
    return f"{shape_text(shape)} {dtype}"


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor. A dimension is an int, a symbol, or None if unknown.

    The dtype is "" if the program does not specify the tensor's type; the shape then has no meaning.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    @property
    def is_static(self) -> bool:
        """True if every dimension is a number."""
        return all(isinstance(dim, int) for dim in self.shape)

    def accepts(self, dtype: str, shape: Sequence[int]) -> bool:
        """Return True if a dtype and shape match. A symbol matches any size; dtype "" matches any tensor."""
        return not self.dtype or (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(not isinstance(mine, int) or mine == theirs for mine, theirs in zip(self.shape, shape, strict=True))
        )

    def __str__(self) -> str:
        return f"{self.name}: {type_text(self.dtype, self.shape) if self.dtype else 'a tensor of unknown type'}"


def check_names(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Reject signatures with duplicate names, because results are stored by name.

    Raises:
        LoadFailed: two inputs or two outputs have the same name.
    """
    for which, specs in (("inputs", inputs), ("outputs", outputs)):
        counts = Counter(spec.name for spec in specs)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise LoadFailed(
                f"{counts[twice[0]]} {which} have the same name {twice[0]!r}",
                hint="tensors are identified by name: save the model with unique names",
            )


def make_spec(name: str, array: Array) -> TensorSpec:
    """Return the spec for a named array."""
    return TensorSpec(name, get_dtype_name(array.dtype), tuple(array.shape))


def settle_spec(spec: TensorSpec, array: Array) -> TensorSpec:
    """Return the spec, or the spec of ``array`` if the program does not specify a type."""
    return spec if spec.dtype else make_spec(spec.name, array)


def read_as(array: Array, dtype: str, spec: TensorSpec) -> Array:
    """Reinterpret an output's integers as signed or unsigned if the program does not specify a dtype.

    Args:
        dtype: wanted dtype.
        spec: the program's spec; a spec with a dtype takes precedence.
    """
    wanted = parse_dtype(dtype)
    signless = not spec.dtype and {array.dtype.kind, wanted.kind} == {"i", "u"}
    return array.view(wanted) if signless and array.dtype.itemsize == wanted.itemsize else array


def count_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in memory, in bytes. The size is not meaningful for string tensors."""
    return math.prod(shape) * parse_dtype(dtype).itemsize


def to_bytes(array: Array) -> memoryview:
    """Return a tensor's bytes as a flat memoryview. Copies only if the array is not contiguous."""
    if array.dtype.kind in "OUT":
        encoded = [str(item).encode() for item in array.ravel().tolist()]
        return memoryview(b"".join(struct.pack("<I", len(item)) + item for item in encoded))
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    contiguous = np.ascontiguousarray(array).reshape(-1)
    if contiguous.size == 0:
        return memoryview(b"")
    return memoryview(contiguous.view(np.uint8).data)


def from_bytes(data: Any, dtype: str, shape: Sequence[int]) -> Array:
    """Return a view of a buffer as a tensor. Strings are copied.

    Raises:
        UsageError: the buffer's size does not match dtype and shape, or a dimension is negative.
    """
    view = memoryview(data)
    if any(dim < 0 for dim in shape):
        raise UsageError(f"a tensor of shape {tuple(shape)} has a negative dimension")
    count = math.prod(shape)
    if dtype == "string":
        return _decode_strings(view.tobytes(), count).reshape(shape)
    resolved = parse_dtype(dtype)
    if view.nbytes != count * resolved.itemsize:
        raise UsageError(
            f"a {dtype} tensor of shape {tuple(shape)} needs {count * resolved.itemsize} bytes, got {view.nbytes}"
        )
    if count == 0:
        return np.empty(shape, resolved)
    return np.frombuffer(view, np.uint8).view(resolved).reshape(shape)


def _decode_strings(data: bytes, count: int) -> Array:
    items: list[str] = []
    offset = 0
    while offset < len(data):
        if offset + 4 > len(data):
            raise UsageError("string tensor data is truncated")
        (length,) = struct.unpack_from("<I", data, offset)
        offset += 4
        if offset + length > len(data):
            raise UsageError("string tensor data is truncated")
        try:
            items.append(data[offset : offset + length].decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"string tensor data is not UTF-8: {error}") from error
        offset += length
    if len(items) != count:
        raise UsageError(f"a string tensor of {count} elements has {len(items)} values")
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


SUB_BYTE_BITS = {"uint4": 4, "int4": 4, "float4_e2m1fn": 4, "uint2": 2, "int2": 2}


def pack(array: Array) -> Array:
    """Pack sub-byte elements into a flat uint8 array, lowest bits first, with zero padding."""
    bits = SUB_BYTE_BITS[get_dtype_name(array.dtype)]
    per_byte = 8 // bits
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    padded = np.zeros(-(-flat.size // per_byte) * per_byte, np.uint8)
    padded[: flat.size] = flat
    lanes = padded.reshape(-1, per_byte) << (np.arange(per_byte, dtype=np.uint8) * bits)
    return np.asarray(np.bitwise_or.reduce(lanes, axis=1), np.uint8)


def unpack(packed: Array, name: str, shape: Sequence[int]) -> Array:
    """Unpack the result of :func:`pack` to a tensor with ``shape``, a byte per element."""
    bits = SUB_BYTE_BITS[name]
    per_byte = 8 // bits
    lanes = (packed.reshape(-1, 1) >> (np.arange(per_byte, dtype=np.uint8) * bits)) & ((1 << bits) - 1)
    flat = lanes.reshape(-1)[: math.prod(shape)].astype(np.uint8)
    if name.startswith("int"):
        # Sign-extend: ml_dtypes stores an int4 as the int8 with the same value.
        shift = 8 - bits
        flat = ((flat << shift).view(np.int8) >> shift).view(np.uint8)
    return flat.view(parse_dtype(name)).reshape(shape)
