"""Convert tensors to and from ONNX Runtime's OrtValue, for every dtype that ONNX Runtime supports.

numpy lacks bfloat16, float8 and sub-byte dtypes. ONNX Runtime's Python API cannot return such tensors, and does not
accept strings. So hil passes the bytes of these tensors as they are in memory.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from hil.core.tensors import ML_DTYPES, SUB_BYTE_BITS, Array, TensorSpec, get_dtype_name, pack, parse_dtype, unpack
from hil.core.varint import encode_varint
from hil.errors import UsageError

# Element types in ONNX's TensorProto by hil's names. Agents do not depend on onnx.
ONNX_TYPES = {
    name: number
    for number, name in enumerate(
        "float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 uint64 complex64 complex128 "
        "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz uint4 int4 float4_e2m1fn float8_e8m0fnu "
        "uint2 int2".split(),
        start=1,
    )
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


def parse_type(text: str) -> str | None:
    """Return the dtype for an ONNX Runtime type such as ``tensor(float)``; None if the type is not a dense tensor."""
    if not (text.startswith("tensor(") and text.endswith(")")):
        return None
    inner = text[len("tensor(") : -1]
    name = _TYPE_STRINGS.get(inner, inner)
    return name if name in ONNX_TYPES else None


def make_node_spec(node: Any) -> TensorSpec | None:
    """Return the spec of a session's input or output; None if the value is not a tensor."""
    dtype = parse_type(node.type)
    if dtype is None:
        return None
    shape = tuple(dim if isinstance(dim, int) else (str(dim) if dim else None) for dim in node.shape or ())
    return TensorSpec(node.name, dtype, shape)


def make_plain_options() -> Any:
    """Return SessionOptions with the optimizer disabled, because it changes the results of some models."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def to_ort(array: Array) -> Any:
    """Return a tensor as an OrtValue on the CPU. The OrtValue may share the array's memory, and keeps the array alive.

    Raises:
        UsageError: ONNX Runtime does not support the dtype.
    """
    import onnxruntime as ort

    name = get_dtype_name(array.dtype)
    if name not in ONNX_TYPES or name.startswith("complex"):
        raise UsageError(f"ONNX Runtime does not support {name} tensors")
    if name == "string":
        return _convert_strings(array)
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    if name in SUB_BYTE_BITS:
        # ONNX Runtime expects the packed bytes at the start of a buffer with the logical shape.
        packed = pack(contiguous)
        contiguous = np.zeros(array.shape, np.uint8)
        contiguous.reshape(-1)[: packed.size] = packed
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(contiguous, ONNX_TYPES[name])


def copy_from_ort(value: Any, dtype: str) -> Array:
    """Copy the tensor from an OrtValue on the CPU."""
    if dtype not in ML_DTYPES:
        array: Array = value.numpy()
        return array
    shape = tuple(value.shape())
    if math.prod(shape) == 0:
        return np.empty(shape, parse_dtype(dtype))
    raw = np.frombuffer(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()), np.uint8)
    return unpack(raw, dtype, shape) if dtype in SUB_BYTE_BITS else raw.view(parse_dtype(dtype)).reshape(shape)


def _convert_strings(array: Array) -> Any:
    """Return an OrtValue with strings. The Python API cannot create it, but a model with a constant output can.

    The model is encoded by hand, because agents do not depend on onnx. Field numbers in onnx.proto: TensorProto
    dims 1, data_type 2, string_data 6, name 8; GraphProto name 2, initializer 5, output 12; ModelProto
    ir_version 1, graph 7, opset_import 8.
    """
    import onnxruntime as ort

    tensor = b"".join(_number(1, dim) for dim in array.shape) + _number(2, ONNX_TYPES["string"])
    tensor += b"".join(_encode_bytes(6, str(item).encode()) for item in array.ravel().tolist()) + _encode_bytes(
        8, b"strings"
    )
    output = _encode_bytes(1, b"strings") + _encode_bytes(2, _encode_bytes(1, _number(1, ONNX_TYPES["string"])))
    graph = _encode_bytes(2, b"g") + _encode_bytes(5, tensor) + _encode_bytes(12, output)
    model = _number(1, 8) + _encode_bytes(7, graph) + _encode_bytes(8, _encode_bytes(1, b"") + _number(2, 17))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run_with_ort_values(None, {})[0]


def _number(field: int, number: int) -> bytes:
    return encode_varint(field << 3) + encode_varint(number)


def _encode_bytes(field: int, payload: bytes) -> bytes:
    return encode_varint(field << 3 | 2) + encode_varint(len(payload)) + payload
