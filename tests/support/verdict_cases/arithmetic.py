"""Boards that compute in float16, bfloat16 or int8, with correct and with wrong programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from hil.core.tensors import Array
from support.operator_classes import model_of, run_onnx
from support.verdict_cases import VerdictCase

RNG = np.random.default_rng(33)
X = {"x": RNG.normal(size=(8, 16)).astype(np.float32)}
W = RNG.normal(size=(16, 12)).astype(np.float32)
B = (3 * RNG.normal(size=12)).astype(np.float32)
IMAGE = {"x": RNG.normal(size=(1, 3, 10, 10)).astype(np.float32)}
KERNEL = RNG.normal(size=(5, 3, 3, 3)).astype(np.float32)
PIXELS = {"x": RNG.integers(0, 255, (8, 16)).astype(np.float32)}


def node(kind: str, inputs: list[str], output: str = "y", **attributes: object) -> onnx.NodeProto:
    """Return a node with one output."""
    return helper.make_node(kind, inputs, [output], **attributes)


GEMM = (node("Gemm", ["x", "w", "b"]),)
CONV = (node("Conv", ["x", "w"], pads=[1, 1, 1, 1]),)
SOFTMAX = (node("MatMul", ["x", "w"], "m"), node("Softmax", ["m"]))
FLOORED = (node("Div", ["x", "seven"], "d"), node("Floor", ["d"], "f"), node("MatMul", ["f", "w"]))
SCALED = (node("MatMul", ["x", "w"], "a"), node("Mul", ["a", "c"], "b"), node("Div", ["b", "c"]))
SEVEN = {"seven": np.array(7, np.float32), "w": W}


def on(arithmetic: str) -> tuple[str, ...]:
    """Return the options of a simulated board."""
    return ("--runtime", "onnxruntime", "--runtime-hw-type", f"sim-{arithmetic}")


def saved(
    nodes: tuple[onnx.NodeProto, ...], inputs: Mapping[str, Array], weights: Mapping[str, Array]
) -> Callable[[Path], Path]:
    """Return a function that writes a model into a folder."""

    def build(folder: Path) -> Path:
        onnx.save(model_of(nodes, inputs, weights), folder / "model.onnx")
        return folder / "model.onnx"

    return build


def wrong(
    name: str,
    arithmetic: str,
    nodes: tuple[onnx.NodeProto, ...],
    inputs: Mapping[str, Array],
    weights: Mapping[str, Array],
    right: Mapping[str, Array],
) -> VerdictCase:
    """Case with a program whose weights differ from those of the model with the expected outputs."""
    expected = {"y": run_onnx(model_of(nodes, inputs, right), inputs)}
    return VerdictCase(name, saved(nodes, inputs, weights), "FAIL", inputs, expected, on(arithmetic))


CASES = [
    *(
        VerdictCase(f"arithmetic_{name}_{kind}", saved(nodes, inputs, weights), "PASS", inputs, {}, on(kind))
        for kind in ("f16", "bf16", "int8")
        for name, nodes, inputs, weights in (
            ("gemm", GEMM, X, {"w": W, "b": B}),
            ("conv", CONV, IMAGE, {"w": KERNEL}),
            ("softmax", SOFTMAX, X, {"w": W}),
        )
    ),
    VerdictCase(
        "arithmetic_floor_f16",
        saved(FLOORED, PIXELS, SEVEN),
        "PASS",
        PIXELS,
        {},
        on("f16"),
        says=("float16",),
    ),
    VerdictCase(
        "arithmetic_overflow_f16",
        saved(SCALED, X, {"w": W, "c": np.array(6e4, np.float32)}),
        "BLIND",
        X,
        {},
        on("f16"),
        says=("values overflow float16: the model does not fit this arithmetic",),
    ),
    VerdictCase(
        "arithmetic_clipped_weight_f16",
        saved((node("Mul", ["x", "c"]),), X, {"c": np.array(1e5, np.float32)}),
        "BLIND",
        X,
        {},
        on("f16"),
        says=("float16 clips out-of-range weights: c",),
    ),
    wrong("arithmetic_bias_missing_f16", "f16", GEMM, X, {"w": W, "b": 0 * B}, {"w": W, "b": B}),
    wrong(
        "arithmetic_column_negated_f16",
        "f16",
        GEMM,
        X,
        {"w": W * np.where(np.arange(12) == 3, -1, 1).astype(np.float32), "b": B},
        {"w": W, "b": B},
    ),
    wrong("arithmetic_columns_swapped_bf16", "bf16", GEMM, X, {"w": W[:, ::-1].copy(), "b": B}, {"w": W, "b": B}),
    wrong("arithmetic_kernel_flipped_int8", "int8", CONV, IMAGE, {"w": KERNEL[:, :, ::-1].copy()}, {"w": KERNEL}),
    wrong("arithmetic_negated_int8", "int8", CONV, IMAGE, {"w": -KERNEL}, {"w": KERNEL}),
    wrong("arithmetic_scale_doubled_bf16", "bf16", CONV, IMAGE, {"w": 2 * KERNEL}, {"w": KERNEL}),
    wrong("arithmetic_divisor_f16", "f16", FLOORED, PIXELS, {**SEVEN, "seven": np.array(6, np.float32)}, SEVEN),
    VerdictCase(
        "arithmetic_not_declared",
        saved(GEMM, X, {"w": W, "b": B}),
        "FAIL",
        X,
        {},
        ("--runtime", "onnxruntime", "--runtime-hw-type", "sim-undeclared"),
    ),
]
