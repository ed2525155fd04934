"""References: a pass needs an independent reference that is computed from the definition of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hil.core.tensors import Array
from support.verdict_cases import VerdictCase

IREE, ORT = ("--runtime", "iree"), ("--runtime", "onnxruntime")
_ADD = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = arith.addf %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}"""
_ONES = np.ones(4, np.float32)
_ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def _random(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _mlir(folder: Path) -> Path:
    path = folder / "twice.mlir"
    path.write_text(_ADD)
    return path


def _onnx(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Array],
    weights: Mapping[str, Array] | None = None,
    *,
    opset: int = 21,
) -> Callable[[Path], Path]:
    """Return a function that writes a model with the output y and similar inputs."""

    def build(folder: Path) -> Path:
        values = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(one.dtype), one.shape)
            for name, one in inputs.items()
        ]
        constants = [numpy_helper.from_array(one, name) for name, one in (weights or {}).items()]
        shown = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        graph = helper.make_graph(list(nodes), "case", values, shown, constants)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=10))
        onnx.save(model, folder / "model.onnx")
        return folder / "model.onnx"

    return build


def _gather(op: str, axis: int, indices: list[Any]) -> dict[str, Any]:
    """Return the builder and the inputs of an operator whose last index is out of range."""
    inputs = {"x": _ROWS, "i": np.array(indices, np.int64)}
    attributes = {} if op == "GatherND" else {"axis": axis}
    return {"build": _onnx([helper.make_node(op, ["x", "i"], ["y"], **attributes)], inputs, opset=13), "inputs": inputs}


def _scatter() -> dict[str, Any]:
    inputs = {"x": _ROWS, "i": np.array([[0], [7]], np.int64), "u": _random(0, 2, 4)}
    return {"build": _onnx([helper.make_node("ScatterND", ["x", "i", "u"], ["y"])], inputs, opset=13), "inputs": inputs}


def _shared_zero_point() -> dict[str, Any]:
    """Two products whose int8 weights share a zero point."""
    rng = np.random.default_rng(1)
    weights: dict[str, Array] = {"s": np.float32(0.01), "z": np.array(3, np.int8)}
    weights |= {name: rng.integers(-120, 120, (8, 8)).astype(np.int8) for name in ("w", "v")}
    nodes = [helper.make_node("DequantizeLinear", [name, "s", "z"], [f"{name}f"]) for name in ("w", "v")]
    nodes += [helper.make_node("MatMul", ["x", "wf"], ["h"]), helper.make_node("MatMul", ["h", "vf"], ["y"])]
    inputs = {"x": _random(0, 2, 8)}
    return {"build": _onnx(nodes, inputs, weights, opset=17), "inputs": inputs}


def _int4() -> dict[str, Any]:
    """4-bit weights per column. ONNX Runtime's optimizer computes their products at accuracy level 4."""
    values = (
        np.random.default_rng(2)
        .integers(-8, 8, (64, 32))
        .astype(onnx.helper.tensor_dtype_to_np_dtype(TensorProto.INT4))
    )
    weights = {"w": values, "s": np.full((2, 32), 0.02, np.float32)}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=0, block_size=32)]
    nodes.append(helper.make_node("MatMul", ["x", "f"], ["y"]))
    inputs = {"x": _random(0, 2, 64)}
    return {"build": _onnx(nodes, inputs, weights), "inputs": inputs}


def _nbits(bits: int, level: int) -> dict[str, Any]:
    rng = np.random.default_rng(bits)
    weights = {"b": rng.integers(0, 256, (16, 2, 4 * bits)).astype(np.uint8), "s": np.full((16, 2), 0.02, np.float32)}
    shape = {"K": 64, "N": 16, "bits": bits, "block_size": 32, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", **shape)
    inputs = {"x": _random(0, 2, 64)}
    return {"build": _onnx([node], inputs, weights), "inputs": inputs}


def _norm() -> dict[str, Any]:
    inputs = {"x": _random(0, 2, 3, 16), "k": _random(1, 2, 3, 16)}
    node = helper.make_node("SkipSimplifiedLayerNormalization", ["x", "k", "g"], ["y"], domain="com.microsoft")
    return {"build": _onnx([node], inputs, {"g": _random(2, 16)}), "inputs": inputs}


def _gqa() -> dict[str, Any]:
    inputs: dict[str, Array] = {"q": _random(0, 1, 3, 32), "k": _random(1, 1, 3, 16), "v": _random(2, 1, 3, 16)}
    weights = {"n": np.array([2], np.int32), "t": np.array(3, np.int32)}
    attributes = {"num_heads": 4, "kv_num_heads": 2}
    names = ["q", "k", "v", "", "", "n", "t"]
    node = helper.make_node("GroupQueryAttention", names, ["y", "pk", "pv"], domain="com.microsoft", **attributes)
    return {"build": _onnx([node], inputs, weights), "inputs": inputs}


def _only_onnxruntime() -> dict[str, Any]:
    """Operator that no other reference supports."""
    inputs = {"x": _random(0, 2, 8)}
    return {
        "build": _onnx([helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft")], inputs),
        "inputs": inputs,
    }


def _integer_product() -> dict[str, Any]:
    """Sums of uint8 and int8 products that saturate on some CPUs."""
    inputs = {"a": np.full((2, 64), 255, np.uint8)}
    nodes = [
        helper.make_node("MatMulInteger", ["a", "b"], ["i"]),
        helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
    ]
    return {"build": _onnx(nodes, inputs, {"b": np.full((64, 8), 127, np.int8)}), "inputs": inputs}


CASES = [
    VerdictCase("mlir_without_reference", _mlir, "REFERENCE_ERROR", {"arg0": _ONES}, options=IREE),
    VerdictCase(
        "mlir_self_check",
        _mlir,
        "REFERENCE_ERROR",
        {"arg0": _ONES},
        options=(*IREE, "--reference", "iree-llvm-cpu"),
        says=("(self-check)", '"relation": "self-check"'),
    ),
    VerdictCase("mlir_expected", _mlir, "PASS", {"arg0": _ONES}, {"output0": 2 * _ONES}, IREE),
    VerdictCase("mlir_wrong", _mlir, "FAIL", {"arg0": _ONES}, {"output0": 3 * _ONES}, IREE),
    VerdictCase(
        "gather_elements_out_of_range",
        outcome="REFERENCE_ERROR",
        options=IREE,
        says=("no independent reference", "onnxruntime", "onnx-reference"),
        **_gather("GatherElements", 0, [[0, 1, 2, 5]]),
    ),
    VerdictCase(
        "gather_nd_out_of_range",
        outcome="REFERENCE_ERROR",
        options=IREE,
        says=("no independent reference",),
        **_gather("GatherND", 0, [[0, 1], [2, 4]]),
    ),
    # IREE writes to memory of other objects, so the worker may crash first.
    VerdictCase(
        "scatter_nd_out_of_range",
        outcome=("REFERENCE_ERROR", "RUN_CRASH", "RUN_ERROR"),
        options=IREE,
        **_scatter(),
    ),
    VerdictCase("two_products_of_one_zero_point", outcome="PASS", options=IREE, **_shared_zero_point()),
    VerdictCase("one_zero_point_on_onnxruntime", outcome="PASS", options=ORT, **_shared_zero_point()),
    VerdictCase("int4_weights", outcome="FAIL", options=ORT, **_int4()),
    VerdictCase(
        "matmul_nbits_4_exact",
        outcome="PASS",
        options=ORT,
        says=("onnx reference evaluator",),
        **_nbits(4, 0),
    ),
    VerdictCase("matmul_nbits_8_exact", outcome="PASS", options=ORT, **_nbits(8, 0)),
    VerdictCase("matmul_nbits_4_at_level_4", outcome="FAIL", options=ORT, **_nbits(4, 4)),
    VerdictCase("skip_normalization", outcome="PASS", options=(*ORT, "--require-independent"), **_norm()),
    VerdictCase("group_query_attention", outcome="PASS", options=(*ORT, "--require-independent"), **_gqa()),
    VerdictCase(
        "same_library_allowed",
        outcome="PASS",
        options=ORT,
        says=("(same library)", "reference onnx-reference failed"),
        **_only_onnxruntime(),
    ),
    VerdictCase(
        "same_library_refused",
        outcome="REFERENCE_ERROR",
        options=(*ORT, "--require-independent"),
        says=("the pass requires an independent reference",),
        **_only_onnxruntime(),
    ),
    VerdictCase("integer_product", outcome="PASS", options=IREE, **_integer_product()),
]
