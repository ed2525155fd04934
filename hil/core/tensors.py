"""Tensors as hil moves them: named dtypes, shapes, and bytes that mean the same on every board.

A dtype is named as numpy and ml_dtypes name it (``float32``, ``bfloat16``, ``float8_e4m3fn``, ``int4``), plus
``string``. Bytes are little-endian and C-contiguous; sub-byte dtypes (``int4`` and friends) take one byte an element,
as ml_dtypes keeps them, and :func:`pack` packs them as runtimes do. A string tensor is each element in order as a
little-endian uint32 length and its UTF-8 bytes.
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

from hil.errors import LoadFailed, UsageError

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
    raise ImportError("hil needs a little-endian machine")


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype of a dtype's name (``string``: numpy's object dtype). Raises UsageError: hil knows none."""
    if name == "string":
        return np.dtype(object)
    if name in NUMPY_DTYPES:
        return np.dtype(name)
    if name in ML_DTYPES:
        import ml_dtypes

        resolved: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return resolved
    raise UsageError(f"unknown dtype {name!r}", hint=f"one of {', '.join(DTYPES)}")


def float_limits(dtype: Any) -> Any:
    """What ``finfo`` says of a dtype of floats or complex numbers; ml_dtypes is asked about its own."""
    resolved = np.dtype(dtype)
    if resolved.name in NUMPY_DTYPES:
        return np.finfo(resolved)
    import ml_dtypes

    return ml_dtypes.finfo(resolved)  # type: ignore[no-untyped-call]


def int_limits(dtype: Any) -> Any:
    """What ``iinfo`` says of a dtype of integers."""
    resolved = np.dtype(dtype)
    if resolved.name in NUMPY_DTYPES:
        return np.iinfo(resolved)
    import ml_dtypes

    return ml_dtypes.iinfo(resolved)  # type: ignore[no-untyped-call]


def dtype_name(dtype: Any) -> str:
    """The name of a numpy or ml_dtypes dtype; the reverse of :func:`dtype_of`. Raises UsageError: hil knows none."""
    return _dtype_name(np.dtype(dtype))


@functools.cache
def _dtype_name(resolved: np.dtype[Any]) -> str:
    name = "string" if resolved.kind in "OUT" else resolved.name
    if name not in DTYPES:
        raise UsageError(f"tensors of dtype {resolved} are not supported", hint=f"one of {', '.join(DTYPES)}")
    return name


def shape_text(shape: Sequence[Dim]) -> str:
    """A shape for people: ``1x10``, ``Nx4``, ``batch x 4``, ``scalar``; ? is a dimension that is not known."""
    by = " x " if any(isinstance(dim, str) and len(dim) > 1 for dim in shape) else "x"
    return by.join("?" if dim is None else str(dim) for dim in shape) or "scalar"


def type_text(dtype: str, shape: Sequence[Dim]) -> str:
    """What kind of tensor it is, for people: ``1x10 float32``, ``batch x 4 float32``, ``scalar int64``."""
    return f"{shape_text(shape)} {dtype}"


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor; a dimension is an int, a symbol, or None where it is not known.

    The dtype is "" where the program says nothing of a tensor but that it is one; the shape then says nothing either.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    @property
    def is_static(self) -> bool:
        """True when every dimension is a number."""
        return all(isinstance(dim, int) for dim in self.shape)

    def accepts(self, dtype: str, shape: Sequence[int]) -> bool:
        """True when a tensor of this dtype and shape fits; a symbol takes any size, and "" any tensor."""
        return not self.dtype or (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(not isinstance(mine, int) or mine == theirs for mine, theirs in zip(self.shape, shape, strict=True))
        )

    def __str__(self) -> str:
        return f"{self.name}: {type_text(self.dtype, self.shape) if self.dtype else 'a tensor of unknown type'}"


def check_names(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Refuse a signature in which a name stands twice: of results, which are kept by name, one would be lost.

    Raises:
        LoadFailed: two inputs or two outputs have one name.
    """
    for which, specs in (("inputs", inputs), ("outputs", outputs)):
        counts = Counter(spec.name for spec in specs)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise LoadFailed(
                f"there are {counts[twice[0]]} {which} called {twice[0]!r}",
                hint="tensors are given and compared by name: save the model with a name for each",
            )


def spec_of(name: str, array: Array) -> TensorSpec:
    """The spec of an array under a name."""
    return TensorSpec(name, dtype_name(array.dtype), tuple(array.shape))


def settled(spec: TensorSpec, array: Array) -> TensorSpec:
    """A spec as it is or, where it says nothing of its tensor, as that of the tensor that is given for it."""
    return spec if spec.dtype else spec_of(spec.name, array)


def read_as(array: Array, dtype: str, spec: TensorSpec) -> Array:
    """An output of a program as a tensor of a dtype, where that only says whether its integers have a sign.

    Args:
        dtype: what it is to be read as.
        spec: what the program says of it: one that says anything is taken at its word.
    """
    wanted = dtype_of(dtype)
    signless = not spec.dtype and {array.dtype.kind, wanted.kind} == {"i", "u"}
    return array.view(wanted) if signless and array.dtype.itemsize == wanted.itemsize else array


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """The size in bytes of a tensor as it lies in memory. A string tensor has none of its own: use its data."""
    return math.prod(shape) * dtype_of(dtype).itemsize


def to_bytes(array: Array) -> memoryview:
    """The bytes of a tensor as a flat memoryview; copies only where the array is not contiguous."""
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
    """The tensor that lies in a buffer, as a view of it (strings are copied out).

    Raises:
        UsageError: the buffer's size is not what dtype and shape need, or a dimension is negative.
    """
    view = memoryview(data)
    if any(dim < 0 for dim in shape):
        raise UsageError(f"a tensor of shape {tuple(shape)} has a negative dimension")
    count = math.prod(shape)
    if dtype == "string":
        return _strings(view.tobytes(), count).reshape(shape)
    resolved = dtype_of(dtype)
    if view.nbytes != count * resolved.itemsize:
        raise UsageError(
            f"a {dtype} tensor of shape {tuple(shape)} takes {count * resolved.itemsize} bytes, got {view.nbytes}"
        )
    if count == 0:
        return np.empty(shape, resolved)
    return np.frombuffer(view, np.uint8).view(resolved).reshape(shape)


def _strings(data: bytes, count: int) -> Array:
    items: list[str] = []
    offset = 0
    while offset < len(data):
        if offset + 4 > len(data):
            raise UsageError("a string tensor's data is cut off")
        (length,) = struct.unpack_from("<I", data, offset)
        offset += 4
        if offset + length > len(data):
            raise UsageError("a string tensor's data is cut off")
        try:
            items.append(data[offset : offset + length].decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"a string tensor's data is not UTF-8: {error}") from error
        offset += length
    if len(items) != count:
        raise UsageError(f"a string tensor of {count} elements came with {len(items)}")
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


SUB_BYTE_BITS = {"uint4": 4, "int4": 4, "float4_e2m1fn": 4, "uint2": 2, "int2": 2}


def pack(array: Array) -> Array:
    """A sub-byte tensor's elements packed into bytes (uint8, flat), lowest bits first, the rest of the last byte 0."""
    bits = SUB_BYTE_BITS[dtype_name(array.dtype)]
    per_byte = 8 // bits
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    padded = np.zeros(-(-flat.size // per_byte) * per_byte, np.uint8)
    padded[: flat.size] = flat
    lanes = padded.reshape(-1, per_byte) << (np.arange(per_byte, dtype=np.uint8) * bits)
    return np.asarray(np.bitwise_or.reduce(lanes, axis=1), np.uint8)


def unpack(packed: Array, name: str, shape: Sequence[int]) -> Array:
    """The reverse of :func:`pack` for a sub-byte dtype's name: a tensor of ``shape``, one byte an element."""
    bits = SUB_BYTE_BITS[name]
    per_byte = 8 // bits
    lanes = (packed.reshape(-1, 1) >> (np.arange(per_byte, dtype=np.uint8) * bits)) & ((1 << bits) - 1)
    flat = lanes.reshape(-1)[: math.prod(shape)].astype(np.uint8)
    if name.startswith("int"):
        # Sign-extend: ml_dtypes keeps an int4 as the int8 of the same value.
        shift = 8 - bits
        flat = ((flat << shift).view(np.int8) >> shift).view(np.uint8)
    return flat.view(dtype_of(name)).reshape(shape)
