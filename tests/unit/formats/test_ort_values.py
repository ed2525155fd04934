from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from hil.core.tensors import Array, TensorSpec, parse_dtype
from hil.errors import UsageError
from hil.formats.ort_values import ONNX_TYPES, copy_from_ort, make_node_spec, parse_type, to_ort

# The last ONNX Runtime for Python 3.10 is 1.23: it reads models up to IR version 11 and has fewer dtypes.
OLD = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 24)
NEWER = ("float4_e2m1fn", "float8_e8m0fnu", "int2", "uint2")
KNOWN = [name for name in ONNX_TYPES if not name.startswith("complex") and not (OLD and name in NEWER)]


def sample(dtype: str, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    if dtype == "string":
        return np.array([*(f"é{i}" for i in range(count)), None], dtype=object)[:-1].reshape(shape)
    start = 1 if dtype == "float8_e8m0fnu" else -1 if dtype.startswith("int") else 0
    return (np.arange(count) % 3 + start).astype(np.int8).astype(parse_dtype(dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", KNOWN)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3), (5,)])
def test_ort_values_round_trip_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = sample(dtype, shape)
    again = copy_from_ort(to_ort(array), dtype)
    assert again.dtype == array.dtype and again.shape == shape and again.tolist() == array.tolist()


def test_to_ort_accepts_transposed_array() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert (copy_from_ort(to_ort(array), "float32") == array).all()


@pytest.mark.skipif(OLD, reason="this ONNX Runtime is too old for opset 25")
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_session_reads_values_of_narrow_dtypes(dtype: str) -> None:
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=1)],
        "g",
        [helper.make_tensor_value_info("x", ONNX_TYPES[dtype], [5])],
        [helper.make_tensor_value_info("y", 1, [5])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=12)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert make_node_spec(session.get_inputs()[0]) == TensorSpec("x", dtype, (5,))
    array = sample(dtype, (5,))
    (value,) = session.run_with_ort_values(None, {"x": to_ort(array)})
    assert copy_from_ort(value, "float32").tolist() == array.astype(np.float32).tolist()


def test_to_ort_rejects_complex() -> None:
    with pytest.raises(UsageError, match="complex64"):
        to_ort(np.zeros(2, np.complex64))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tensor(float)", "float32"),
        ("tensor(double)", "float64"),
        ("tensor(float8e4m3fnuz)", "float8_e4m3fnuz"),
        ("tensor(int4)", "int4"),
        ("seq(tensor(float))", None),
        ("map(int64,tensor(float))", None),
        ("optional(tensor(float))", None),
        ("sparse_tensor(float)", None),
    ],
)
def test_dtype_of_type_parses_onnx_type_names(text: str, name: str | None) -> None:
    assert parse_type(text) == name
