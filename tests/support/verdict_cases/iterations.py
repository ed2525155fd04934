"""Programs with outputs that differ between iterations, that write to their inputs, or that have state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from hil.core.tensors import Array
from support.verdict_cases import VerdictCase

ORT, IREE = ("--runtime", "onnxruntime"), ("--runtime", "iree")
FLOAT, BOOL, STRING, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.STRING, TensorProto.INT64
Value = tuple[str, int, Sequence[Any]]


def graph(
    nodes: Sequence[NodeProto], inputs: Sequence[Value], outputs: Sequence[Value], **constants: Array
) -> Callable[[Path], Path]:
    """Return a builder of an ONNX model."""

    def build(folder: Path) -> Path:
        values = [[helper.make_tensor_value_info(*value) for value in side] for side in (inputs, outputs)]
        held = [numpy_helper.from_array(value, name) for name, value in constants.items()]
        model = helper.make_model(
            helper.make_graph(nodes, "g", *values, held), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
        )
        onnx.save(model, folder / "model.onnx")
        return folder / "model.onnx"

    return build


def mlir(text: str) -> Callable[[Path], Path]:
    """Return a builder of an MLIR module."""

    def build(folder: Path) -> Path:
        (folder / "model.mlir").write_text(text)
        return folder / "model.mlir"

    return build


node = helper.make_node
X: Value = ("x", FLOAT, [4])
ONES, FIVES = np.ones(4, np.float32), np.full(4, 5, np.float32)


def sometimes(share: float) -> list[NodeProto]:
    """Return nodes that compute ``rare``, which is true in this share of the runs."""
    return [
        node("RandomUniform", [], ["drawn"], shape=[1], low=0.0, high=1.0),
        node("Constant", [], ["bound"], value_floats=[share]),
        node("Less", ["drawn", "bound"], ["rare"]),
    ]


def drawing(*nodes: NodeProto, share: float = 0.3, outputs: Sequence[Value], **constants: Array) -> Any:
    return graph([*sometimes(share), *nodes], [X], outputs, **constants)


# Adds to a row of its first input.
UPDATE = """
func.func @main(%cache: tensor<{rows}x64xf32>, %x: tensor<1x64xf32>) -> tensor<{rows}x64xf32> {{
  %at = arith.constant dense<3> : tensor<i32>
  %zero = arith.constant dense<0> : tensor<i32>
  %old = stablehlo.dynamic_slice %cache, %at, %zero, sizes = [1, 64]
    : (tensor<{rows}x64xf32>, tensor<i32>, tensor<i32>) -> tensor<1x64xf32>
  %new = stablehlo.add %old, %x : tensor<1x64xf32>
  %y = stablehlo.dynamic_update_slice %cache, %new, %at, %zero
    : (tensor<{rows}x64xf32>, tensor<1x64xf32>, tensor<i32>, tensor<i32>) -> tensor<{rows}x64xf32>
  return %y : tensor<{rows}x64xf32>
}}
"""
# Writes rows to an internal cache, at an internal position.
CACHE = """
util.global private mutable @cache = dense<0.0> : tensor<8x4xf32>
util.global private mutable @place = dense<0> : tensor<i32>
func.func @main(%x: tensor<4xf32>) -> tensor<8x4xf32> {
  %cache = util.global.load @cache : tensor<8x4xf32>
  %place = util.global.load @place : tensor<i32>
  %zero = arith.constant dense<0> : tensor<i32>
  %one = arith.constant dense<1> : tensor<i32>
  %row = stablehlo.reshape %x : (tensor<4xf32>) -> tensor<1x4xf32>
  %new = stablehlo.dynamic_update_slice %cache, %row, %place, %zero
    : (tensor<8x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<8x4xf32>
  %next = stablehlo.add %place, %one : tensor<i32>
  util.global.store %new, @cache : tensor<8x4xf32>
  util.global.store %next, @place : tensor<i32>
  return %new : tensor<8x4xf32>
}
"""
# Counts its calls in a number. The output is wrong from the third call on.
COUNTER = """
util.global private mutable @calls = 0 : i32
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %calls = util.global.load @calls : i32
  %one = arith.constant 1 : i32
  %two = arith.constant 2 : i32
  %next = arith.addi %calls, %one : i32
  util.global.store %next, @calls : i32
  %late = arith.cmpi sge, %calls, %two : i32
  %y = scf.if %late -> tensor<4xf32> {
    %wrong = arith.addf %x, %x : tensor<4xf32>
    scf.yield %wrong : tensor<4xf32>
  } else {
    scf.yield %x : tensor<4xf32>
  }
  return %y : tensor<4xf32>
}
"""


def updated(rows: int) -> dict[str, Any]:
    kept = np.arange(rows * 64, dtype=np.float32).reshape(rows, 64)
    right = kept.copy()
    right[3] += 5
    inputs = {"cache": kept, "x": np.full((1, 64), 5, np.float32)}
    return {"inputs": dict(zip(("arg0", "arg1"), inputs.values(), strict=True)), "expected": {"output0": right}}


ROWS = np.zeros((8, 4), np.float32)
ROWS[0] = FIVES
SCATTERED = np.ones((6, 3), np.float32)
SCATTERED[[1, 4]] += 5

CASES = [
    VerdictCase(
        "rare_value",
        drawing(
            node("Where", ["rare", "wrong", "x"], ["y"]), share=0.02, outputs=[("y", FLOAT, [4])], wrong=np.float32(9)
        ),
        "UNSTABLE",
        {"x": FIVES},
        {"y": FIVES},
        (*ORT, "--iterations", "600"),
        ('"distinct": 2', "different answers in 600 iterations"),
    ),
    VerdictCase(
        "rare_nan",
        drawing(node("Where", ["rare", "nan", "x"], ["y"]), outputs=[("y", FLOAT, [4])], nan=np.float32(np.nan)),
        "UNSTABLE",
        {"x": FIVES},
        {"y": FIVES},
        (*ORT, "--iterations", "100"),
    ),
    VerdictCase(
        "rare_bool",
        drawing(node("Identity", ["rare"], ["y"]), outputs=[("y", BOOL, [1])]),
        "UNSTABLE",
        {"x": ONES},
        {"y": np.array([False])},
        (*ORT, "--iterations", "100"),
    ),
    VerdictCase(
        "rare_scalar",
        drawing(
            node("Squeeze", ["rare"], ["flag"]),
            node("Cast", ["flag"], ["y"], to=INT64),
            share=0.5,
            outputs=[("y", INT64, [])],
        ),
        "UNSTABLE",
        {"x": ONES},
        {"y": np.array(0, np.int64)},
        (*ORT, "--iterations", "60", "--warmup", "5"),
        ("different answers in 65 iterations",),
    ),
    VerdictCase(
        "rare_string",
        drawing(
            node("Where", ["rare", "one", "other"], ["y"]),
            share=0.5,
            outputs=[("y", STRING, [1])],
            one=np.array(["left"], object),
            other=np.array(["right"], object),
        ),
        "UNSTABLE",
        {"x": ONES},
        {"y": np.array(["right"], object)},
        (*ORT, "--iterations", "60"),
        workloads=("run",),  # Files of inputs and bundles cannot contain strings.
    ),
    VerdictCase(
        "rare_shape",
        drawing(
            node("Expand", ["rare", "four"], ["many"]),
            node("NonZero", ["many"], ["y"]),
            share=0.5,
            outputs=[("y", INT64, [1, "n"])],
            four=np.array([4], np.int64),
        ),
        "UNSTABLE",
        {"x": ONES},
        {"y": np.zeros((1, 0), np.int64)},
        (*ORT, "--iterations", "60"),
    ),
    VerdictCase(
        "one_of_two_outputs",
        drawing(
            node("Add", ["x", "x"], ["same"]),
            node("Where", ["rare", "same", "x"], ["other"]),
            outputs=[("same", FLOAT, [4]), ("other", FLOAT, [4])],
        ),
        "UNSTABLE",
        {"x": FIVES},
        {"same": 2 * FIVES, "other": FIVES},
        (*ORT, "--iterations", "100"),
        ('"differing": ["other"]',),
    ),
    VerdictCase(
        "many_answers",
        graph([node("RandomNormalLike", ["x"], ["r"]), node("Add", ["x", "r"], ["y"])], [X], [("y", FLOAT, [4])]),
        "UNSTABLE",
        {"x": FIVES},
        {"y": FIVES},
        (*ORT, "--iterations", "40"),
        ('"distinct": 40',),
    ),
    VerdictCase(
        "allowed_rounding",
        drawing(
            node("Where", ["rare", "near", "x"], ["y"]), outputs=[("y", FLOAT, [4])], near=np.float32([5.000001] * 4)
        ),
        "PASS",
        {"x": FIVES},
        {"y": FIVES},
        (*ORT, "--iterations", "100", "--allow-unstable", "y"),
        ("allowed by",),
    ),
    VerdictCase(
        "rounding_that_is_not_allowed",
        drawing(
            node("Where", ["rare", "near", "x"], ["y"]), outputs=[("y", FLOAT, [4])], near=np.float32([5.000001] * 4)
        ),
        "UNSTABLE",
        {"x": FIVES},
        {"y": FIVES},
        (*ORT, "--iterations", "100"),
    ),
    VerdictCase(
        "stable",
        graph([node("Mul", ["x", "x"], ["y"])], [X], [("y", FLOAT, [4])]),
        "PASS",
        {"x": FIVES},
        {},
        (*ORT, "--iterations", "200"),
        ("200 of 200 iterations gave the same answer",),
    ),
    VerdictCase(
        "update_small", mlir(UPDATE.format(rows=8)), "PASS", **updated(8), options=(*IREE, "--iterations", "4")
    ),
    VerdictCase(
        "update_large",
        mlir(UPDATE.format(rows=2048)),
        "PASS",
        **updated(2048),
        options=(*IREE, "--iterations", "3", "--warmup", "2"),
    ),
    VerdictCase(
        "scatter_rows",
        graph(
            [node("ScatterND", ["kv", "at", "rows"], ["y"], reduction="add")],
            [("kv", FLOAT, [6, 3]), ("at", INT64, [2, 1]), ("rows", FLOAT, [2, 3])],
            [("y", FLOAT, [6, 3])],
        ),
        "PASS",
        {"kv": np.ones((6, 3), np.float32), "at": np.array([[1], [4]]), "rows": np.full((2, 3), 5, np.float32)},
        {"y": SCATTERED},
        (*IREE, "--iterations", "5"),
        ("5 of 5 iterations gave the same answer",),
    ),
    VerdictCase(
        "cache_that_is_kept",
        mlir(CACHE),
        "PASS",
        {"arg0": FIVES},
        {"output0": ROWS},
        (*IREE, "--iterations", "4", "--warmup", "1"),
        ("5 of 5 iterations gave the same answer",),
    ),
    VerdictCase(
        "counter_that_is_kept",
        mlir(COUNTER),
        "PASS",
        {"arg0": FIVES},
        {"output0": FIVES},
        (*IREE, "--iterations", "6"),
        ("6 of 6 iterations gave the same answer",),
    ),
    VerdictCase(
        "reloaded",
        graph([node("Mul", ["x", "x"], ["y"])], [X], [("y", FLOAT, [4])]),
        "PASS",
        {"x": FIVES},
        {},
        (*ORT, "--repeat", "3", "--fresh-load"),
        ("3 of 3 iterations gave the same answer",),
    ),
]
