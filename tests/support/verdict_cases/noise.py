"""Whole numbers, values that jump, small values next to large values, long sums, subnormal and constant outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from hil.core.tensors import Array
from support.models import save_model
from support.verdict_cases import VerdictCase

ONNXRUNTIME = ("--runtime", "onnxruntime")
IREE = ("--runtime", "iree")
WRONG = ("FAIL", "BLIND")
RNG = np.random.default_rng(33)


def floats(*shape: int) -> Array:
    """Return normal float32 values."""
    return RNG.standard_normal(shape).astype(np.float32)


def model(name: str, nodes: Sequence[Any], x: Array, y: Array, **weights: Array) -> Callable[[Path], Path]:
    """Return a function that writes a model from x to y."""

    def build(folder: Path) -> Path:
        tensors = [numpy_helper.from_array(value, key) for key, value in weights.items()]
        kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int8): TensorProto.INT8}
        values = ([(key, kinds[value.dtype], list(value.shape))] for key, value in (("x", x), ("y", y)))
        return save_model(folder / f"{name}.onnx", nodes, *values, tensors)

    return build


def case(
    name: str,
    nodes: Sequence[Any],
    outcome: str | tuple[str, ...],
    x: Array,
    y: Array,
    options: tuple[str, ...] = ONNXRUNTIME,
    *,
    says: tuple[str, ...] = (),
    given: bool = True,
    **weights: Array,
) -> VerdictCase:
    """Return a case of a model from x to y. With ``given``, y is the expected output; otherwise only its shape and
    dtype count.
    """
    expected = {"y": y} if given else {}
    build = model(f"noise_{name}", nodes, x, y, **weights)
    return VerdictCase(f"noise_{name}", build, outcome, {"x": x}, expected, options, says)


node = helper.make_node
PIXELS = RNG.integers(0, 256, (2, 50)).astype(np.float32)
BOXES = np.abs(floats(80, 6)) + np.float32(0.5)
SIZES = np.array([640, 640, 640, 640, 1e-6, 1e-6], np.float32)
ONE_BOX = BOXES[:1, :5] * SIZES[:5]
CHANNELS = np.abs(floats(1, 5, 40)) + np.float32(0.5)
STRETCH = np.array([500, 500, 500, 500, 1e-6], np.float32).reshape(1, 5, 1)
TAILS = (np.linspace(0, 60, 200, dtype=np.float32)[None] + floats(1, 200)).astype(np.float32)
SOFTMAX = np.exp(TAILS - TAILS.max()) / np.exp(TAILS - TAILS.max()).sum()
STEPS = np.array([[100, *RNG.choice((-1, 1), 63)]], np.int8)
LONG, WIDE = floats(2, 16384), floats(16384, 24)
PRODUCT = (LONG.astype(np.float64) @ WIDE.astype(np.float64)).astype(np.float32)
TINY = (np.abs(floats(100)) * np.float32(1e-2) + np.float32(1e-2)).astype(np.float32)


# Layers in float16 between casts.
HALF_X, HALF_W = floats(4, 64), [(floats(64, 64) / 8).astype(np.float16) for _ in range(4)]
HALF_WEIGHTS = {f"w{number}": weights for number, weights in enumerate(HALF_W)}
HALF_NODES = [node("Cast", ["x"], ["h0"], to=TensorProto.FLOAT16)]
for number in range(4):
    HALF_NODES.append(node("MatMul", [f"h{number}", f"w{number}"], [f"m{number}"]))
    HALF_NODES.append(node("Tanh", [f"m{number}"], [f"h{number + 1}"]))
HALF_NODES.append(node("Cast", ["h4"], ["y"], to=TensorProto.FLOAT))
SQUARE_X = np.abs(floats(64)) + np.float32(0.5)
SQUARE = (SQUARE_X.astype(np.float16) ** 2).astype(np.float32)
SQUARE_NODES = [HALF_NODES[0], node("Mul", ["h0", "h0"], ["m"]), node("Cast", ["m"], ["y"], to=TensorProto.FLOAT)]


def compute_half_layers(sums: type[np.floating[Any]] = np.float32) -> Array:
    """Return the output of the layers, with sums of a dtype and results in float16."""
    h = HALF_X.astype(np.float16)
    for weights in HALF_W:
        h = np.tanh((h.astype(sums) @ weights.astype(sums)).astype(np.float16).astype(np.float32)).astype(np.float16)
    return h.astype(np.float32)


def swapped(values: Array, column: int, by: Any) -> Array:
    """Return a copy in which two columns are swapped."""
    found = values.copy()
    found[..., column] = by(values[..., column])
    return found


def off_by(values: Array, place: tuple[int, ...], share: float) -> Array:
    """Return a copy in which one value is changed by a share of itself."""
    found = values.copy()
    found[place] *= np.float32(1 + share)
    return found


SCALE = [node("Mul", ["x", "s"], ["y"])]
PRODUCTS = [node("MatMul", ["x", "w"], ["y"])]
CASES = [
    # Rounding does not change whole numbers, so a step does not count as noise.
    case("round_off_by_3", [node("Round", ["x"], ["y"])], "FAIL", PIXELS, PIXELS + 3),
    case(
        "floor_of_halves_off_by_2",
        [node("Mul", ["x", "s"], ["z"]), node("Floor", ["z"], ["y"])],
        "FAIL",
        PIXELS,
        np.floor(PIXELS / 2) + 2,
        s=np.array(0.5, np.float32),
        says=("100 of 100",),
    ),
    case(
        "sign_of_pixels_flipped",
        [node("Sub", ["x", "s"], ["z"]), node("Sign", ["z"], ["y"])],
        "FAIL",
        PIXELS,
        -np.sign(PIXELS - np.float32(127.5)),
        s=np.array(127.5, np.float32),
    ),
    # Small values next to large values.
    case("scores_zeroed", SCALE, WRONG, BOXES, swapped(BOXES * SIZES, 4, np.zeros_like), says=("column 4",), s=SIZES),
    case("scores_reversed", SCALE, WRONG, BOXES, swapped(BOXES * SIZES, 5, np.flip), s=SIZES),
    case("scores_off_by_1_percent", SCALE, WRONG, BOXES, swapped(BOXES * SIZES, 5, lambda v: v * 1.01), s=SIZES),
    case(
        "scores_within_given_tolerance",
        SCALE,
        "PASS",
        BOXES,
        swapped(BOXES * SIZES, 4, lambda v: v * np.float32(1.4)),
        (*ONNXRUNTIME, "--atol", "1e-3"),
        says=(
            "160 values in columns 4, 5 are smaller than the given tolerance: hil accepts errors of up to half of "
            "their value",
        ),
        s=SIZES,
    ),
    case(
        "channel_negated",
        SCALE,
        WRONG,
        CHANNELS,
        CHANNELS * STRETCH * np.array([1, 1, 1, 1, -1], np.float32).reshape(1, 5, 1),
        says=("row 4 of the second axis",),
        s=STRETCH,
    ),
    case("boxes_right", SCALE, "PASS", BOXES, BOXES * SIZES, IREE, s=SIZES),
    case("score_of_one_row_negated", SCALE, WRONG, BOXES[:1, :5], swapped(ONE_BOX, 4, np.negative), s=SIZES[:5]),
    case("score_of_one_row_right", SCALE, "PASS", BOXES[:1, :5], ONE_BOX, IREE, s=SIZES[:5]),
    case(
        "softmax_tail_doubled",
        [node("Softmax", ["x"], ["y"], axis=-1)],
        WRONG,
        TAILS,
        np.where(SOFTMAX < 1e-6, 2 * SOFTMAX, SOFTMAX),
    ),
    case("softmax_tail_right", [node("Softmax", ["x"], ["y"], axis=-1)], "PASS", TAILS, SOFTMAX, IREE, given=False),
    case(
        "int8_steps_zeroed",
        [node("Neg", ["x"], ["y"])],
        WRONG,
        STEPS,
        swapped(-STEPS, slice(1, None), np.zeros_like),
        (*ONNXRUNTIME, "--atol", "1"),
    ),
    case(
        "int8_one_step_right",
        [node("Neg", ["x"], ["y"])],
        "PASS",
        STEPS,
        swapped(-STEPS, slice(1, 6), lambda values: values + 1),
        (*ONNXRUNTIME, "--atol", "1"),
    ),
    # Long sums.
    case("long_product_right", PRODUCTS, "PASS", LONG, PRODUCT, IREE, w=WIDE, given=False),
    case("long_product_off", PRODUCTS, "FAIL", LONG, off_by(PRODUCT, (1, 7), 0.01), w=WIDE),
    case("long_product_without_its_last_terms", PRODUCTS, "FAIL", LONG, LONG[:, :-4] @ WIDE[:-4], w=WIDE),
    case(
        "long_softmax_right",
        [node("Softmax", ["x"], ["y"], axis=-1)],
        "PASS",
        floats(1, 70_000) * 3,
        np.zeros((1, 70_000), np.float32),
        IREE,
        given=False,
    ),
    case(
        "instance_norm_of_mean_300_right",
        [node("InstanceNormalization", ["x", "s", "b"], ["y"])],
        "PASS",
        floats(1, 2, 96, 96) + 300,
        np.zeros((1, 2, 96, 96), np.float32),
        IREE,
        given=False,
        s=np.ones(2, np.float32),
        b=np.zeros(2, np.float32),
    ),
    case(
        "long_mean_right",
        [node("ReduceMean", ["x"], ["y"], axes=[1], keepdims=1)],
        "PASS",
        floats(3, 150_000) + 1,
        np.zeros((3, 1), np.float32),
        IREE,
        given=False,
    ),
    case(
        "long_bias_of_zero_inputs_right",
        [node("Add", ["x", "b"], ["z"]), node("MatMul", ["z", "w"], ["y"])],
        "PASS",
        np.zeros((1, 16384), np.float32),
        np.zeros((1, 24), np.float32),
        IREE,
        given=False,
        w=WIDE,
        b=LONG[:1],
    ),
    # Subnormal and constant outputs.
    case(
        "subnormal_flushed",
        SCALE,
        "FAIL",
        TINY,
        TINY,
        IREE,
        s=np.array(1e-38, np.float32),
        given=False,
        says=("allow-flush",),
    ),
    case(
        "subnormal_allowed",
        SCALE,
        "PASS",
        TINY,
        TINY,
        (*IREE, "--allow-flush", "y"),
        s=np.array(1e-38, np.float32),
        given=False,
        says=("flushed to 0, as allowed by --allow-flush",),
    ),
    case(
        "constant",
        [node("Relu", ["x"], ["y"])],
        "PASS",
        -PIXELS,
        np.zeros((2, 50), np.float32),
        says=("a board that computes nothing could also pass",),
    ),
    # float32 outputs of float16 operators have the precision of float16.
    case("half_square", SQUARE_NODES, "PASS", SQUARE_X, SQUARE, IREE, given=False),
    case("half_square_unrounded", SQUARE_NODES, "PASS", SQUARE_X, SQUARE_X**2),
    case("half_square_of_another", SQUARE_NODES, WRONG, SQUARE_X, SQUARE * np.float32(1.05)),
    case("half_layers", HALF_NODES, "PASS", HALF_X, compute_half_layers(), IREE, given=False, **HALF_WEIGHTS),
    case("half_layers_in_float64", HALF_NODES, "PASS", HALF_X, compute_half_layers(np.float64), **HALF_WEIGHTS),
    case(
        "half_layers_without_tanh",
        [*HALF_NODES[:-2], node("Cast", ["m3"], ["y"], to=TensorProto.FLOAT)],
        WRONG,
        HALF_X,
        compute_half_layers(),
        **HALF_WEIGHTS,
    ),
]
