"""Outputs that named criteria judge. Every model returns its input, so the exact output is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, save

from support.verdict_cases import EVERYWHERE, VerdictCase

JUDGE = Path(__file__).parents[2] / "data" / "verdicts" / "judge.py"
_TYPES = {np.float32: TensorProto.FLOAT, np.int8: TensorProto.INT8}


def identity(array: Any) -> Callable[[Path], Path]:
    """Return a function that writes a model which returns its input ``x`` as ``y``."""

    def build(folder: Path) -> Path:
        kind = _TYPES[array.dtype.type]
        x, y = (helper.make_tensor_value_info(name, kind, array.shape) for name in "xy")
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        save(model, folder / "identity.onnx")
        return folder / "identity.onnx"

    return build


def judged(
    name: str, accept: str, answer: Any, expected: Any, outcome: str, says: str = "", workloads: Any = ("run", "bundle")
) -> VerdictCase:
    """Return a case in which the board returns ``answer``, and ``expected`` is the correct output."""
    options = ("--runtime", "onnxruntime", "--accept", accept)
    return VerdictCase(
        f"criteria_{name}",
        identity(answer),
        outcome,
        inputs={"x": answer},
        expected={"y": expected},
        options=options,
        says=(says,) if says else (),
        workloads=workloads,
    )


_random = np.random.default_rng(7)
LOGITS = _random.normal(size=(200, 10)).astype(np.float32)
NEAR = LOGITS + _random.normal(scale=1e-3, size=LOGITS.shape).astype(np.float32)
OTHER_CLASSES = np.where(np.arange(200)[:, None] % 5 == 0, np.roll(LOGITS, 1, axis=1), LOGITS)
PIXELS = (200 + _random.normal(size=(32, 32))).astype(np.float32)
SEGMENTS = _random.normal(size=(1, 3, 8, 8)).astype(np.float32)
CODES = _random.integers(-100, 100, 64).astype(np.int8)
CORNERS = _random.uniform(0, 400, (24, 2)).astype(np.float32)
BOXES = np.concatenate([CORNERS, CORNERS + _random.uniform(20, 80, (24, 2)).astype(np.float32)], axis=1)
SCORED = np.concatenate([BOXES, BOXES[:, :1] * np.float32(1e-8)], axis=1)
_LARGE = np.array([1, 1, 1, 1, 0], np.float32)
MOVED = BOXES.copy()
MOVED[5] += 30
WITH_NAN = NEAR.copy()
WITH_NAN[9, 3] = np.nan

CLASSES, BOX_SET = "top1>=0.97, kl<=1e-4", "y: set(iou=0.9)>=1"
CASES = [
    judged("classes_agree", CLASSES, NEAR, LOGITS, "PASS", "top1>=0.97", EVERYWHERE),
    judged("one_class_in_five_differs", CLASSES, OTHER_CLASSES, LOGITS, "FAIL", "the value is 0.8", EVERYWHERE),
    judged("distribution_differs", CLASSES, 2 * LOGITS, LOGITS, "FAIL", "kl<=0.0001 is not", EVERYWHERE),
    judged("nan_where_the_reference_has_none", CLASSES, WITH_NAN, LOGITS, "FAIL", "NaN", EVERYWHERE),
    judged("dead_board", CLASSES, 0 * LOGITS, LOGITS, "FAIL"),
    judged("bound_of_any_answer", "kl<=50", NEAR, LOGITS, "BLIND", "sign flipped", ("run", "bundle")),
    judged("share_of_chance", "top1>=0.05", NEAR, LOGITS, "BLIND", "in any order"),
    judged("direction_of_pixels", "cosine>=0.95, max_rel<=0.9", PIXELS, PIXELS, "BLIND", "in any order"),
    judged("direction_of_logits", "cosine>=0.95", NEAR, LOGITS, "PASS", "ignores the scale"),
    judged("direction_with_any_size", "cosine>=0.95, rmse<=1000", NEAR, LOGITS, "BLIND", "a different scale"),
    judged("direction_and_scale_of_logits", "cosine>=0.95, sqnr>=20", NEAR, LOGITS, "PASS"),
    judged("noisy_picture", "psnr>=40", PIXELS + 1, PIXELS, "FAIL", "psnr>=40 is not met"),
    judged("segments_along_axis", "argmax(axis=1)", SEGMENTS + np.float32(0.25), SEGMENTS, "PASS", "argmax(axis=1)"),
    judged("small_column_zeroed", "sqnr>=60", SCORED * _LARGE, SCORED, "PASS", "would accept zeros in column 4"),
    judged("small_column_judged", "sqnr>=60, max_rel<=0.1", SCORED * _LARGE, SCORED, "FAIL", "max_rel<=0.1 is not"),
    judged("one_step_off", "y: lsb<=1", CODES + np.int8(1), CODES, "PASS", "lsb<=1"),
    judged("two_steps_off", "y: lsb<=1", CODES + np.int8(2), CODES, "FAIL", "the value is 2"),
    judged("boxes_in_another_order", BOX_SET, BOXES[::-1].copy(), BOXES, "PASS", "set(iou=0.9)", EVERYWHERE),
    judged("box_that_moved", BOX_SET, MOVED, BOXES, "FAIL", "set(iou=0.9)", EVERYWHERE),
    judged("box_given_twice", BOX_SET, np.repeat(BOXES[::2], 2, axis=0), BOXES, "FAIL", "the value is 0.5"),
    judged("few_mismatches", "mismatch_share<=0.01", LOGITS, LOGITS, "PASS"),
    judged("function_agrees", f"y: python:{JUDGE}:same_boxes", BOXES[::-1].copy(), BOXES, "PASS", workloads=("run",)),
    judged(
        "function_disagrees",
        f"y: python:{JUDGE}:same_boxes",
        MOVED,
        BOXES,
        "FAIL",
        "the farthest corner is off",
        ("run", "suite"),
    ),
    judged(
        "function_fails",
        f"y: python:{JUDGE}:broken",
        BOXES,
        BOXES,
        "REFERENCE_ERROR",
        "python:judge.py:broken raised RuntimeError: no such label",
        ("run", "suite"),
    ),
    judged("output_that_does_not_exist", "z: argmax", LOGITS, LOGITS, "usage error", "outputs: y", ("run",)),
    judged("function_in_a_bundle", f"y: python:{JUDGE}:same_boxes", BOXES, BOXES, "usage error", workloads=("bundle",)),
]
