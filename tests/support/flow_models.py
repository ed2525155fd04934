"""Small float32 models for tests of flows. Weights are seeded, and values are in the ranges of trained models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from support.models import save_model

FLOAT = TensorProto.FLOAT


def weights(*shape: int, seed: int, fan_in: int, spread: float = 1.0) -> np.ndarray:
    """He initialisation. ``spread`` is the ratio of the weights of the last and the first output channel."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / fan_in))
    scales = np.geomspace(1, spread, shape[0]).astype(np.float32)
    return values * scales.reshape(-1, *[1] * (len(shape) - 1))


def _const(name: str, value: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def residual_cnn(path: Path, spread: float = 1.0) -> Path:
    """Three 3x3 convolutions with ReLU and a skip, pooling, a dense layer: [1, 3, 16, 16] to [1, 10]."""
    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
        helper.make_node("Conv", ["r2", "w3", "b3"], ["c3"], "conv3", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c3", "r1"], ["sum"], "skip"),
        helper.make_node("Relu", ["sum"], ["r3"], "relu3"),
        helper.make_node("GlobalAveragePool", ["r3"], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "w4", "b4"], ["logits"], "fc", transB=1),
    ]
    constants = [
        _const("w1", weights(16, 3, 3, 3, seed=1, fan_in=27, spread=spread)),
        _const("w2", weights(16, 16, 3, 3, seed=2, fan_in=144, spread=spread)),
        _const("w3", weights(16, 16, 3, 3, seed=3, fan_in=144)),
        _const("w4", weights(10, 16, seed=4, fan_in=16)),
        *(
            _const(f"b{index}", weights(size, seed=4 + index, fan_in=200))
            for index, size in ((1, 16), (2, 16), (3, 16))
        ),
        _const("b4", weights(10, seed=9, fan_in=200)),
    ]
    return save_model(path, nodes, [("image", FLOAT, [1, 3, 16, 16])], [("logits", FLOAT, [1, 10])], constants)


def mlp(path: Path) -> Path:
    """Four dense layers: [4, 64] to [4, 8], softmax at the end."""
    sizes = [64, 128, 128, 64, 8]
    nodes, constants, last = [], [], "x"
    for index, (width, height) in enumerate(itertools.pairwise(sizes)):
        constants.append(_const(f"w{index}", weights(width, height, seed=index, fan_in=width)))
        constants.append(_const(f"b{index}", weights(height, seed=10 + index, fan_in=200)))
        nodes.append(helper.make_node("Gemm", [last, f"w{index}", f"b{index}"], [f"g{index}"], f"fc{index}"))
        last = f"g{index}"
        if index < 3:
            nodes.append(helper.make_node("Relu", [last], [f"r{index}"], f"relu{index}"))
            last = f"r{index}"
    nodes.append(helper.make_node("Softmax", [last], ["y"], "softmax", axis=-1))
    return save_model(path, nodes, [("x", FLOAT, [4, 64])], [("y", FLOAT, [4, 8])], constants)


def attention(path: Path) -> Path:
    """One transformer block with one head, layer norm and GELU. The input and the output have the shape [1, 12, 32]."""
    dim = 32

    def dense(name: str, given: str, made: str, width: int, height: int, seed: int) -> list[onnx.NodeProto]:
        constants.append(_const(f"{name}_w", weights(width, height, seed=seed, fan_in=2 * width)))
        constants.append(_const(f"{name}_b", weights(height, seed=seed + 50, fan_in=200)))
        return [
            helper.make_node("MatMul", [given, f"{name}_w"], [f"{name}_m"], f"{name}_matmul"),
            helper.make_node("Add", [f"{name}_m", f"{name}_b"], [made], f"{name}_bias"),
        ]

    constants = [
        _const("root", np.float32(np.sqrt(dim))),
        _const("one", np.float32(1)),
        _const("half", np.float32(0.5)),
        _const("sqrt2", np.float32(np.sqrt(2))),
        *(_const(f"g{i}", 1 + weights(dim, seed=30 + i, fan_in=200)) for i in (1, 2)),
        *(_const(f"n{i}", weights(dim, seed=40 + i, fan_in=200)) for i in (1, 2)),
    ]
    nodes = [
        *dense("q", "x", "q", dim, dim, 1),
        *dense("k", "x", "k", dim, dim, 2),
        *dense("v", "x", "v", dim, dim, 3),
        helper.make_node("Transpose", ["k"], ["kt"], "transpose", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"], "scores"),
        helper.make_node("Div", ["scores", "root"], ["scaled"], "scale"),
        helper.make_node("Softmax", ["scaled"], ["shares"], "softmax", axis=-1),
        helper.make_node("MatMul", ["shares", "v"], ["mixed"], "mix"),
        *dense("o", "mixed", "attended", dim, dim, 4),
        helper.make_node("Add", ["attended", "x"], ["sum1"], "skip1"),
        helper.make_node("LayerNormalization", ["sum1", "g1", "n1"], ["norm1"], "norm1", axis=-1),
        *dense("up", "norm1", "wide", dim, 4 * dim, 5),
        helper.make_node("Div", ["wide", "sqrt2"], ["e0"], "gelu_div"),
        helper.make_node("Erf", ["e0"], ["e1"], "gelu_erf"),
        helper.make_node("Add", ["e1", "one"], ["e2"], "gelu_add"),
        helper.make_node("Mul", ["wide", "e2"], ["e3"], "gelu_mul"),
        helper.make_node("Mul", ["e3", "half"], ["gelu"], "gelu_half"),
        *dense("down", "gelu", "narrow", 4 * dim, dim, 6),
        helper.make_node("Add", ["narrow", "norm1"], ["sum2"], "skip2"),
        helper.make_node("LayerNormalization", ["sum2", "g2", "n2"], ["y"], "norm2", axis=-1),
    ]
    return save_model(path, nodes, [("x", FLOAT, [1, 12, dim])], [("y", FLOAT, [1, 12, dim])], constants)


MODELS: dict[str, Callable[[Path], Path]] = {"residual_cnn": residual_cnn, "mlp": mlp, "attention": attention}
