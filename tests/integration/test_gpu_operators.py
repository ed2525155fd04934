"""Models of many kinds on a Vulkan device, compared with ONNX Runtime. Types that Vulkan lacks are compile errors."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node
from support.vulkan import needs_vulkan

pytestmark = [pytest.mark.slow, needs_vulkan, pytest.mark.timeout(900)]

RANDOM = np.random.default_rng(0)
FLOAT, INT32, INT64, HALF = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT16


def weights(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def images(*shape):
    return [("x", FLOAT, shape)]


SCALE, ZERO = {"scale": np.float32(0.05)}, {"zero": np.int8(3)}
QDQ = [
    node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
    node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
    node("DequantizeLinear", ["w", "scale"], ["v"]),
    node("MatMul", ["d", "v"], ["y"]),
]
SUM = [node("ReduceSum", ["x"], ["sum"], keepdims=0), node("Greater", ["sum", "limit"], ["is_positive"])]
BRANCHES = {
    f"{name}_branch": helper.make_graph([made], name, [], [helper.make_tensor_value_info(name, FLOAT, [4])])
    for name, made in (("then", node("Add", ["x", "x"], ["then"])), ("else", node("Neg", ["x"], ["else"])))
}
# Name -> nodes, inputs, constants. The output is y.
KINDS = {
    "conv": ([node("Conv", ["x", "w"], ["y"], strides=[2, 2])], images(1, 3, 33, 31), {"w": weights(8, 3, 3, 3)}),
    "depthwise": ([node("Conv", ["x", "w"], ["y"], group=16)], images(2, 16, 17, 17), {"w": weights(16, 1, 3, 3)}),
    "transposed": ([node("ConvTranspose", ["x", "w"], ["y"])], images(1, 4, 9, 9), {"w": weights(4, 5, 3, 3)}),
    "max_pool": ([node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1] * 4)], images(1, 5, 15, 15), {}),
    "average_pool": ([node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1] * 4)], images(1, 5, 15, 15), {}),
    "softmax": ([node("Softmax", ["x"], ["y"])], images(7, 1000), {}),
    "layer_norm": ([node("LayerNormalization", ["x", "w"], ["y"])], images(3, 5, 77), {"w": weights(77)}),
    "matmul": ([node("MatMul", ["x", "w"], ["y"])], images(33, 65), {"w": weights(65, 17)}),
    "reduce": ([node("ReduceSum", ["x", "axes"], ["y"])], images(37, 129), {"axes": np.array([0])}),
    "gather": ([node("Gather", ["x", "w"], ["y"], axis=1)], images(4, 50, 3), {"w": RANDOM.integers(-50, 50, (5, 6))}),
    "scatter": (
        [node("ScatterND", ["x", "at", "x2"], ["y"])],
        [*images(40, 5), ("x2", FLOAT, [3, 5])],
        {"at": np.array([[1], [30], [7]], np.int64)},
    ),
    "int8": (QDQ, images(8, 32), {**SCALE, **ZERO, "w": RANDOM.integers(-100, 100, (32, 16)).astype(np.int8)}),
    "float16": ([node("MatMul", ["x", "w"], ["y"])], [("x", HALF, [16, 33])], {"w": weights(33, 9).astype(np.float16)}),
    "int64": ([node("Add", ["x", "w"], ["y"])], [("x", INT64, [5, 7])], {"w": np.array(1 << 33)}),
    "int32": ([node("Div", ["x", "w"], ["y"])], [("x", INT32, [5, 7])], {"w": np.array(3, np.int32)}),
    "int64_division": ([node("Div", ["x", "w"], ["y"])], [("x", INT64, [5, 7])], {"w": np.array(3)}),
    "float64": ([node("Mul", ["x", "x"], ["y"])], [("x", TensorProto.DOUBLE, [5, 7])], {}),
    "bool": ([node("Greater", ["x", "w"], ["y"])], images(5, 7), {"w": weights(7)}),
    "dynamic": ([node("MatMul", ["x", "w"], ["y"])], images("N", 33), {"w": weights(33, 9)}),
    "control_flow": ([*SUM, node("If", ["is_positive"], ["y"], **BRANCHES)], images(4), {"limit": np.float32(0)}),
    "scalar": ([node("Mul", ["x", "x"], ["y"])], images(), {}),
    "empty": ([node("Relu", ["x"], ["y"])], images(0, 3), {}),
    "large": ([node("Add", ["x", "w"], ["y"])], images(1, 1024), {"w": np.zeros((25_600, 1), np.float32)}),
}  # fmt: skip
DTYPES = {"int64": INT64, "int64_division": INT64, "int32": INT32, "float16": HALF, "float64": TensorProto.DOUBLE}
DTYPES |= {"bool": TensorProto.BOOL}
# Models that IREE cannot compile for Vulkan, with a part of the hint.
REFUSED = {"scatter": "demote-i64-to-i32", "int64_division": "demote-i64-to-i32", "float64": "has only the types"}


def save(path, nodes, inputs, constants, dtype):
    values = [helper.make_tensor_value_info(*one) for one in inputs]
    outputs = [helper.make_tensor_value_info("y", dtype, None)]
    held = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, path.stem, values, outputs, held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def test_models_of_many_kinds_pass_or_are_refused(hil, tmp_path):
    (tmp_path / "kinds").mkdir()
    for name, (nodes, inputs, constants) in KINDS.items():
        save(tmp_path / "kinds" / f"{name}.onnx", nodes, inputs, constants, DTYPES.get(name, FLOAT))
    ended = hil("suite", "run", "kinds", "--no-layers", "--flow", "iree_vulkan", "--dim", "N=5", "--out", "found")
    assert ended.code == 3, ended.out
    rows = [json.loads(line) for line in (tmp_path / "found" / "results.jsonl").read_text().splitlines()]
    found = {row["model"]: row for row in rows}
    assert found.keys() == KINDS.keys()
    wrong = {name: row["outcome"] for name, row in found.items() if row["outcome"] != "PASS" and name not in REFUSED}
    assert not wrong
    for name, hint in REFUSED.items():
        assert (found[name]["outcome"], found[name]["stage"]) == ("COMPILE_ERROR", "compile")
        assert hint in found[name]["hint"]
    assert all(row["placement"][0]["device"] == "vulkan" for name, row in found.items() if name not in REFUSED)
    # The hint's flag makes the model work.
    flag = "--compile-flag=--iree-input-demote-i64-to-i32"
    for name in ("scatter", "int64_division"):
        ended = hil("run", f"kinds/{name}.onnx", "--runtime", "iree", "--device", "vulkan", flag, "--json")
        assert ended.case["outcome"] == "PASS", ended.out
    (dtype,) = {output["dtype"] for output in ended.case["outputs"]}
    assert dtype == "int64"
