"""Rewritten models, damaged tensors, generated indices, and float32 models that need no compile flag from hil."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from support.verdict_cases import VerdictCase
from support.verdict_cases.inputs import Build, node

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
IREE = ("--runtime", "iree")
RANDOM = np.random.default_rng(11)
LARGE = RANDOM.standard_normal((256, 128)).astype(np.float32)


def model_of(
    nodes: Sequence[Any],
    inputs: dict[str, Any],
    tensors: Sequence[Any] = (),
    *,
    opset: int = 17,
    functions: Sequence[Any] = (),
) -> Any:
    """Return a model with the output y. Inputs are name -> shape. The inputs i, j and k contain indices."""
    values = [
        helper.make_tensor_value_info(name, INT64 if name in "ijk" else FLOAT, shape) for name, shape in inputs.items()
    ]
    graph = helper.make_graph(list(nodes), "main", values, [helper.make_tensor_value_info("y", FLOAT, None)], tensors)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


def saved(*args: Any, **settings: Any) -> Build:
    def write(folder: Path) -> Path:
        onnx.save(model_of(*args, **settings), folder / "model.onnx")
        return folder / "model.onnx"

    return write


def scales(*values: float) -> Any:
    return numpy_helper.from_array(np.array(values, np.float32), "s")


def refer(item: Any, attribute: str, to: str) -> Any:
    """Return a node whose attribute refers to an attribute of its function."""
    item.attribute.append(AttributeProto(name=attribute, type=AttributeProto.FLOAT, ref_attr_name=to))
    return item


def function(name: str, nodes: Sequence[Any], **defaults: float) -> Any:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    attributes = [helper.make_attribute(key, value) for key, value in defaults.items()]
    return helper.make_function("own", name, ["x"], ["y"], list(nodes), opsets, attribute_protos=attributes)


ELU = function("Bent", [refer(node("Elu", "x", "y"), "alpha", "bend")], bend=0.25)
TWICE = function(
    "Twice",
    [
        helper.make_node("Bent", ["x"], ["h"], domain="own"),
        refer(helper.make_node("Bent", ["h"], ["y"], domain="own"), "bend", "last"),
    ],
    last=3.0,
)
PIXELS = {"x": (1, 2, 6, 8)}


def cut_in(place: str) -> Build:
    """Return a model with a tensor of 131,072 bytes, one of which is missing."""
    tensor = numpy_helper.from_array(LARGE, "w")
    tensor.raw_data = tensor.raw_data[:-1]
    constant = helper.make_node("Constant", [], ["w"], name="weights", value=tensor)
    product = node("MatMul", "x w", "y")
    inputs = {"x": (4, 256)}
    if place == "initializer":
        return saved([product], inputs, [tensor])
    if place == "constant":
        return saved([constant, product], inputs)
    call = helper.make_node("Layer", ["x"], ["y"], domain="own")
    return saved([call], inputs, functions=[function("Layer", [constant, product])])


def external(data: bytes, **fields: object) -> Build:
    """Return a model with weights in w.bin, and with these entries of external data."""

    def write(folder: Path) -> Path:
        (folder / "w.bin").write_bytes(data)
        tensor = TensorProto(name="w", dims=LARGE.shape, data_type=FLOAT, data_location=TensorProto.EXTERNAL)
        for key, value in {"location": "w.bin", **fields}.items():
            tensor.external_data.add(key=key, value=str(value))
        return saved([node("MatMul", "x w", "y")], {"x": (4, 256)}, [tensor])(folder)

    return write


def hub(folder: Path) -> Path:
    """Return a model in the layout of the cache of the Hugging Face Hub."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "1a2b3c"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    external(LARGE.tobytes())(blobs).rename(blobs / "0001")
    (blobs / "w.bin").rename(blobs / "0002")
    (snapshot / "model.onnx").symlink_to("../../blobs/0001")
    (snapshot / "w.bin").symlink_to("../../blobs/0002")
    return snapshot / "model.onnx"


def module_with(size: int) -> Build:
    """Return an MLIR module whose resource of 64 bytes declares this size."""

    def write(folder: Path) -> Path:
        (folder / "model.mlir").write_text(f"""
func.func @main(%x: tensor<16xf32>) -> tensor<16xf32> {{
  %w = arith.constant dense_resource<w> : tensor<16xf32>
  %y = arith.addf %x, %w : tensor<16xf32>
  return %y : tensor<16xf32>
}}
{{-# dialect_resources: {{ builtin: {{ w: "0x04000000{"3F" * size}" }} }} #-}}
""")
        return folder / "model.mlir"

    return write


TABLE = {"x": (7, 5, 3)}
SHAPE = numpy_helper.from_array(np.array([6, 1]), "shape")
POOL = {"kernel_shape": [3, 3], "strides": [2, 2]}

CASES = [
    VerdictCase("hardmax_of_opset_11", saved([node("Hardmax", "x", "y", axis=1)], {"x": (2, 3, 4)}, opset=11), "PASS"),
    *(
        VerdictCase(
            f"{name}_on_iree",
            saved([node(op, "x s", "y", mode=mode)], PIXELS, [scales(*factors)], opset=opset),
            ("PASS", "COMPILE_ERROR"),
            options=IREE,
        )
        for name, op, opset, mode, factors in (
            ("resize_10_enlarges_nearest", "Resize", 10, "nearest", (1, 1, 1.5, 1.75)),
            ("resize_10_shrinks_nearest", "Resize", 10, "nearest", (1, 1, 0.5, 0.5)),
            ("resize_10_linear", "Resize", 10, "linear", (1, 1, 2, 2)),
            ("upsample_9_nearest", "Upsample", 9, "nearest", (1, 1, 2, 3)),
            ("upsample_9_linear", "Upsample", 9, "linear", (1, 1, 2, 2)),
        )
    ),
    VerdictCase(
        "softmax_of_opset_11",
        saved([node("Softmax", "x", "y", axis=1)], {"x": (2, 3, 4)}, opset=11),
        "PASS",
        options=IREE,
    ),
    VerdictCase(
        "default_in_nested_function",
        saved([helper.make_node("Twice", ["x"], ["y"], domain="own")], {"x": (4, 8)}, functions=[ELU, TWICE]),
        "PASS",
        options=IREE,
    ),
    VerdictCase(
        "default_in_nested_function_on_onnxruntime",
        saved([helper.make_node("Twice", ["x"], ["y"], domain="own")], {"x": (4, 8)}, functions=[ELU, TWICE]),
        "PASS",
        options=("--runtime", "onnxruntime", "--require-independent"),
        says=("onnx reference evaluator",),
    ),
    VerdictCase(
        "default_is_overridden",
        saved([helper.make_node("Twice", ["x"], ["y"], domain="own", last=0.5)], {"x": (4, 8)}, functions=[ELU, TWICE]),
        "PASS",
        options=IREE,
    ),
    VerdictCase(
        "cut_initializer",
        cut_in("initializer"),
        "IMPORT_ERROR",
        says=("tensor 'w' (float32 [256, 128]) has 131,071 of 131,072 bytes",),
        workloads=("run", "suite", "pytest"),
    ),
    VerdictCase("cut_constant", cut_in("constant"), "IMPORT_ERROR", says=("attribute 'value' of node 'weights'",)),
    VerdictCase("cut_in_function", cut_in("function"), "IMPORT_ERROR", says=("attribute 'value' of node 'weights'",)),
    VerdictCase(
        "negative_offset", external(LARGE.tobytes(), offset=-128), "IMPORT_ERROR", says=("tensor 'w'", "'-128'")
    ),
    VerdictCase(
        "offset_is_no_number", external(LARGE.tobytes(), offset="start"), "IMPORT_ERROR", says=("tensor 'w'", "'start'")
    ),
    VerdictCase(
        "length_is_another",
        external(LARGE.tobytes(), length=4096),
        "IMPORT_ERROR",
        says=("tensor 'w' (float32 [256, 128]) has external length 4,096, expected 131,072 bytes",),
    ),
    VerdictCase(
        "data_after_offset_are_cut",
        external(LARGE.tobytes(), offset=4096),
        "IMPORT_ERROR",
        says=("tensor 'w' is truncated: w.bin has 131,072 of 135,168 bytes",),
    ),
    VerdictCase(
        "short_resource",
        module_with(60),
        "IMPORT_ERROR",
        says=("resource 'w'", "has 60 bytes, expected 64"),
        options=IREE,
    ),
    VerdictCase("linked_by_the_hub", hub, "PASS", options=IREE),
    VerdictCase(
        "gathernd_of_short_axes", saved([node("GatherND", "x i", "y")], TABLE | {"i": (40, 3)}), "PASS", options=IREE
    ),
    VerdictCase(
        "gathernd_with_batch",
        saved([node("GatherND", "x i", "y", batch_dims=1)], {"x": (2, 9, 3), "i": (2, 20, 1)}),
        "PASS",
        options=IREE,
    ),
    VerdictCase(
        "indices_through_a_chain",
        saved(
            [
                node("Concat", "i j", "c", axis=0),
                node("Cast", "c", "d", to=TensorProto.INT32),
                node("Reshape", "d shape", "e"),
                node("Gather", "x e", "y", axis=2),
            ],
            TABLE | {"i": (2,), "j": (4,)},
            [SHAPE],
        ),
        "PASS",
        options=IREE,
    ),
    *(
        VerdictCase(
            f"maxpool_{name}_in_float32",
            saved([node("MaxPool", "x", "y", **POOL, **padding)], {"x": (1, 4, 16, 16)}),
            "PASS",
            options=IREE,
        )
        for name, padding in (
            ("uneven", {"pads": [0, 1, 1, 0]}),
            ("same_upper", {"auto_pad": "SAME_UPPER"}),
            ("ceil", {"ceil_mode": 1}),
        )
    ),
]
