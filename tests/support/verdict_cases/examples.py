"""The examples in tests/data/verdicts with their required outcome, which is the same in every workload."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper

from hil.core.tensors import Array
from support.verdict_cases import VerdictCase

DATA = Path(__file__).parents[2] / "data" / "verdicts"
ONNXRUNTIME = ("--runtime", "onnxruntime")
IREE = ("--runtime", "iree")
HALF = (*ONNXRUNTIME, "--runtime-hw-type", "sim-f16")
# The output of the program may be within the bound of its arithmetic or not. A jumping element widens no tolerance.
JUDGED = ("PASS", "FAIL", "BLIND")


def copied(name: str) -> Callable[[Path], Path]:
    """Return a function that copies a model to a directory, with the other files of its directory if it has one."""

    def build(folder: Path) -> Path:
        source = DATA / name
        if source.parent == DATA:
            return Path(shutil.copy(source, folder))
        shutil.copytree(source.parent, folder, dirs_exist_ok=True)
        return folder / source.name

    return build


def array_of(name: str) -> Array:
    """Return the tensor of a .npy file."""
    array: Array = np.load(DATA / name)
    return array


def five(count: int = 1) -> Array:
    """Return float32 fives."""
    return np.full(count, 5, np.float32)


def read_proto(name: str) -> Array:
    """Return the tensor of a .pb file."""
    array: Array = numpy_helper.to_array(TensorProto.FromString((DATA / name).read_bytes()))
    return array


CASES = [
    VerdictCase(
        "example_floor",
        copied("floor.onnx"),
        "FAIL",
        {"x": array_of("pix.npy")},
        {"y": array_of("pix_off2.npy")},
        ONNXRUNTIME,
        ("64 of 64",),
    ),
    VerdictCase("example_ids_div", copied("ids_div.onnx"), JUDGED, options=HALF, says=("float16",)),
    VerdictCase("example_ceil", copied("ceil.onnx"), JUDGED, {"x": array_of("pix4.npy")}, {}, HALF, ("float16",)),
    VerdictCase("example_plain", copied("plain.onnx"), JUDGED, {"x": array_of("pix4.npy")}, {}, HALF, ("float16",)),
    VerdictCase("example_drop_big", copied("drop_big.onnx"), JUDGED, options=HALF, says=("random",)),
    VerdictCase(
        "example_box",
        copied("box.onnx"),
        ("FAIL", "BLIND"),
        dict(np.load(DATA / "box_in.npz")),
        {"y": array_of("box_scores_negated.npy")},
        ONNXRUNTIME,
        (),
    ),
    VerdictCase("example_gnd", copied("gnd.onnx"), "PASS", options=IREE),
    VerdictCase(
        "example_neg_gather",
        copied("neg_gather.onnx"),
        "REFERENCE_ERROR",
        {"x": array_of("x34.npy"), "i": array_of("i2oob.npy")},
        {},
        IREE,
        (),
    ),
    VerdictCase(
        "example_short",
        copied("short/model.onnx"),
        "IMPORT_ERROR",
        {"x": array_of("x.npy")},
        {},
        IREE,
        ("1,000", "8,192"),
    ),
    VerdictCase("example_shared_zero_point", copied("wrong_shared_zero_point.onnx"), "FAIL", options=IREE),
    VerdictCase("example_own_zero_point", copied("wrong_own_zero_point.onnx"), "FAIL", options=IREE),
    VerdictCase(
        "example_int4",
        copied("int4_dq.onnx"),
        ("PASS", "FAIL"),
        {"x": array_of("int4_x.npy")},
        {},
        ONNXRUNTIME,
        (),
        ("run",),
    ),
    VerdictCase(
        "example_matmulnbits",
        copied("matmulnbits.onnx"),
        ("PASS", "FAIL"),
        options=(*ONNXRUNTIME, "--reference", "onnx-reference"),
    ),
    VerdictCase(
        "example_op10_resize",
        copied("op10_resize.onnx"),
        ("PASS", "COMPILE_ERROR", "IMPORT_ERROR"),
        options=IREE,
    ),
    VerdictCase("example_func_default", copied("func_default.onnx"), "PASS", options=IREE),
    VerdictCase(
        "example_swapped",
        copied("swapped/model.onnx"),
        "PASS",
        options=ONNXRUNTIME,
        workloads=("suite", "pytest"),
    ),
    VerdictCase(
        "example_sometimes_wrong",
        copied("sometimes_wrong.onnx"),
        "UNSTABLE",
        {"x": five(4)},
        {"y": five(4)},
        (*ONNXRUNTIME, "--iterations", "200"),
        (),
    ),
    VerdictCase(
        "example_flaky",
        copied("flaky.mlir"),
        ("UNSTABLE", "PASS"),
        {"arg0": np.ones(4, np.float32)},
        {"output0": np.ones(4, np.float32)},
        (*IREE, "--iterations", "5"),
        (),
        ("run",),
    ),
    VerdictCase(
        "example_scatter_add",
        copied("small_scatter_add.onnx"),
        "PASS",
        {"kv": np.ones((4, 8), np.float32), "i": np.full((1, 1), 2, np.int64), "x": five(8).reshape(1, 8)},
        {},
        (*IREE, "--iterations", "3"),
        (),
    ),
    VerdictCase("example_mp_asym", copied("mp_asym.onnx"), "PASS", options=IREE),
    VerdictCase(
        "example_two_question_marks",
        copied("two_question_marks.onnx"),
        "PASS",
        {"x": np.random.default_rng(0).standard_normal((1, 3, 48, 192)).astype(np.float32)},
        {},
        ONNXRUNTIME,
        (),
    ),
    VerdictCase(
        "example_denormal",
        copied("denormal.onnx"),
        ("FAIL", "PASS"),
        dict(np.load(DATA / "denormal.npz")),
        {},
        IREE,
        ("denormal",),
    ),
    VerdictCase("example_random", copied("random.onnx"), ("FAIL", "BLIND"), options=IREE, says=("random",)),
]
