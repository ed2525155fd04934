"""Random models, data sets, symbolic dimensions and default values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from support.verdict_cases import VerdictCase

FLOAT = TensorProto.FLOAT
SEEDED = np.random.default_rng(7)
MATRIX = SEEDED.standard_normal((4, 8)).astype(np.float32)

Build = Callable[[Path], Path]


def build(
    nodes: Sequence[Any],
    inputs: Sequence[tuple[str, Sequence[Any]]],
    outputs: Sequence[tuple[str, Sequence[Any]]],
    *,
    functions: Sequence[Any] = (),
    **held: Any,
) -> Build:
    """Return a builder of a model with float32 tensors. ``held`` are initializers."""

    def write(folder: Path) -> Path:
        sides = [
            [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in side] for side in (inputs, outputs)
        ]
        tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
        graph = helper.make_graph(list(nodes), "main", *sides, tensors)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        path = folder / "model.onnx"
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions), path)
        return path

    return write


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"{op.lower()}_{outputs}", **attributes)


X, Y = [("x", [4, 8])], [("y", [4, 8])]
DROP = helper.make_node("Dropout", ["x", "", "training"], ["y"], name="drop")
FUNCTION = helper.make_function(
    "own",
    "Noisy",
    ["x"],
    ["y"],
    [node("RandomNormalLike", "x", "r"), node("Add", "x r", "y")],
    [helper.make_opsetid("", 17)],
)
BRANCH = helper.make_graph(
    [node("RandomNormalLike", "x", "b")], "branch", [], [helper.make_tensor_value_info("b", FLOAT, [4, 8])]
)
DRAWS = ("the model draws random numbers",)

CASES = [
    VerdictCase(
        "random_seeded",
        build([node("RandomNormalLike", "x", "r", seed=1.0), node("Mul", "x r", "y")], X, Y),
        "BLIND",
        inputs={"x": MATRIX},
        expected={"y": MATRIX},
        options=("--runtime", "onnxruntime"),
        says=(*DRAWS, "randomnormallike_r (RandomNormalLike)"),
    ),
    VerdictCase(
        "random_uniform",
        build([node("RandomUniform", "", "r", shape=[4, 8]), node("Add", "x r", "y")], X, Y),
        "BLIND",
        options=("--runtime", "iree"),
        says=DRAWS,
    ),
    VerdictCase(
        "random_dropout_in_training",
        build([DROP], X, Y, training=np.array(True)),
        "BLIND",
        options=("--runtime", "onnxruntime", "--runtime-hw-type", "sim-f16"),
        says=(*DRAWS, "drop (Dropout)"),
    ),
    VerdictCase(
        "random_dropout_in_inference",
        build([DROP, node("Add", "y x", "z")], X, [("z", [4, 8])], training=np.array(False)),
        "PASS",
        options=("--runtime", "onnxruntime"),
    ),
    VerdictCase(
        "random_in_function",
        build([helper.make_node("Noisy", ["x"], ["y"], domain="own", name="call")], X, Y, functions=[FUNCTION]),
        "BLIND",
        options=("--runtime", "iree"),
        says=(*DRAWS, "call (Noisy)"),
    ),
    VerdictCase(
        "random_in_branch",
        build([node("If", "c", "y", then_branch=BRANCH, else_branch=BRANCH)], X, Y, c=np.array(True)),
        "BLIND",
        inputs={"x": MATRIX},
        expected={"y": MATRIX},
        options=("--runtime", "onnxruntime"),
        says=DRAWS,
    ),
    VerdictCase(
        "random_allowed",
        build([node("RandomNormalLike", "x", "r"), node("Mul", "x r", "y")], X, Y),
        "PASS",
        options=("--runtime", "iree", "--allow-blind", "y"),
        says=(*DRAWS, "is not judged, as allowed by --allow-blind"),
    ),
    VerdictCase(
        "random_beside_wrong_output",
        build([node("RandomNormalLike", "x", "r"), node("Relu", "x", "y")], X, [("r", [4, 8]), ("y", [4, 8])]),
        "FAIL",
        inputs={"x": MATRIX},
        expected={"r": MATRIX, "y": np.maximum(MATRIX, 0) + 1},
        options=("--runtime", "onnxruntime"),
    ),
    VerdictCase(
        "open_dimensions_of_one_placeholder",
        build([node("Relu", "x", "y")], [("x", ["None", "None", 3])], [("y", ["None", "None", 3])]),
        "PASS",
        inputs={"x": MATRIX.reshape(2, 16)[:, :15].reshape(2, 5, 3)},
        options=("--runtime", "iree"),
    ),
    VerdictCase(
        "open_dimensions_of_one_name_differ",
        build([node("Add", "x z", "y")], [("x", ["N", 4]), ("z", ["N", 4])], [("y", ["N", 4])]),
        "PASS",
        inputs={"x": MATRIX.reshape(8, 4), "z": MATRIX.reshape(8, 4)},
        options=("--runtime", "onnxruntime"),
    ),
    VerdictCase(
        "inputs_size_open_dimensions",
        build(
            [node("Shape", "x", "s"), node("ConstantOfShape", "s", "o"), node("Add", "x o", "y")],
            [("x", ["H", "W"])],
            [("y", ["H", "W"])],
        ),
        "PASS",
        inputs={"x": MATRIX},
        options=("--runtime", "iree"),
    ),
    VerdictCase(
        "default_value_overridden",
        build(
            [node("Mul", "x scale", "t"), node("Add", "t bias", "y")],
            [*X, ("scale", [8]), ("bias", [8])],
            Y,
            scale=np.ones(8, np.float32),
            bias=np.zeros(8, np.float32),
        ),
        "PASS",
        inputs={"x": MATRIX, "bias": np.full(8, 3, np.float32)},
        expected={"y": MATRIX + 3},
        options=("--runtime", "iree"),
        workloads=("run", "suite", "pytest"),
    ),
    VerdictCase(
        "default_value_kept",
        build([node("Add", "x bias", "y")], [*X, ("bias", [8])], Y, bias=np.ones(8, np.float32)),
        "FAIL",
        inputs={"x": MATRIX},
        expected={"y": MATRIX},
        options=("--runtime", "onnxruntime"),
    ),
]
