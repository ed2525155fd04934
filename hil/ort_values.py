"""How tensors look to ONNX Runtime, whose Python API takes plain numpy arrays for most dtypes but not for all."""

from __future__ import annotations

from typing import Any

import numpy as np

from hil.tensors import ML_DTYPES, Array, TensorSpec, dtype_of

# ONNX's TensorProto element types by our names: onnx itself is not a dependency of an agent.
ONNX_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "string": 8,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "complex64": 14,
    "complex128": 15,
    "bfloat16": 16,
    "float8_e4m3fn": 17,
    "float8_e4m3fnuz": 18,
    "float8_e5m2": 19,
    "float8_e5m2fnuz": 20,
    "uint4": 21,
    "int4": 22,
    "float4_e2m1fn": 23,
    "float8_e8m0fnu": 24,
    "uint2": 25,
    "int2": 26,
}
_TYPE_STRINGS = {
    "float": "float32",
    "double": "float64",
    "float8e4m3fn": "float8_e4m3fn",
    "float8e4m3fnuz": "float8_e4m3fnuz",
    "float8e5m2": "float8_e5m2",
    "float8e5m2fnuz": "float8_e5m2fnuz",
    "float4e2m1": "float4_e2m1fn",
    "float8e8m0": "float8_e8m0fnu",
}


def dtype_of_type(text: str) -> str | None:
    """The dtype of ONNX Runtime's ``tensor(float)`` and the like; None for a sequence, map, optional or sparse tensor."""
    if not (text.startswith("tensor(") and text.endswith(")")):
        return None
    inner = text[len("tensor(") : -1]
    name = _TYPE_STRINGS.get(inner, inner)
    return name if name in ONNX_TYPES else None


def spec_of_node(node: Any) -> TensorSpec | None:
    """The spec of a session's input or output; None where it is no tensor."""
    dtype = dtype_of_type(node.type)
    if dtype is None:
        return None
    shape = tuple(dim if isinstance(dim, int) else (str(dim) if dim else None) for dim in node.shape or ())
    return TensorSpec(node.name, dtype, shape)


def to_ort(array: Array) -> Any:
    """An OrtValue of a tensor: numeric data is shared, not copied, so the array must stay alive."""
    import onnxruntime as ort

    from hil.tensors import dtype_name

    name = dtype_name(array.dtype)
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    if name in ML_DTYPES:
        if contiguous.dtype.itemsize == 1 and name in ("int4", "uint4", "float4_e2m1fn", "int2", "uint2"):
            contiguous = pack(contiguous)
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(contiguous, ONNX_TYPES[name])
        raw = contiguous.view(np.uint16 if contiguous.dtype.itemsize == 2 else np.uint8)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, ONNX_TYPES[name])
    return ort.OrtValue.ortvalue_from_numpy(contiguous)


def pack(array: Array) -> Array:
    """Two 4-bit elements a byte, the first in the low half, as ONNX Runtime lays them out."""
    low = array.reshape(-1).view(np.uint8) & 0x0F
    if low.size % 2:
        low = np.append(low, np.uint8(0))
    packed: Array = (low[0::2] | (low[1::2] << 4)).astype(np.uint8)
    return packed


def from_ort(value: Any, dtype: str) -> Array:
    """The tensor of an OrtValue."""
    if dtype not in ML_DTYPES:
        array: Array = value.numpy()
        return array
    import ctypes

    shape = tuple(value.shape())
    resolved = dtype_of(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, resolved)
    sub_byte = dtype in ("int4", "uint4", "float4_e2m1fn")
    size = (count + 1) // 2 if sub_byte else count * resolved.itemsize
    raw = np.frombuffer(ctypes.string_at(value.data_ptr(), size), np.uint8)
    if sub_byte:
        raw = np.stack([raw & 0x0F, raw >> 4], axis=1).reshape(-1)[:count]
        if dtype == "int4":
            raw = ((raw ^ 0x08).astype(np.int8) - 8).view(np.uint8)
    return raw.view(resolved).reshape(shape)
