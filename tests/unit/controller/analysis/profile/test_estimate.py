from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import DIGITS

from hil.controller.analysis.profile.compilation.estimate import RIDGE, Estimate, Estimates, count_operations, estimate
from hil.controller.models.importers import import_model

Save = Callable[..., Path]
Shapes = Sequence[Sequence[int] | None]
FLOAT = TensorProto.FLOAT


def estimates(path: Path, settings: dict[str, Any], **dims: int) -> Estimates:
    model = import_model(path, dims=dims, isolated=settings["isolated"])
    return estimate(model, **{name: settings[name] for name in ("cache", "isolated", "timeout", "log")})


@pytest.mark.parametrize(
    ("op_type", "ins", "outs", "given", "expected"),
    [
        ("Conv", [(1, 3, 8, 8), (16, 3, 3, 3)], [(1, 16, 6, 6)], {}, 2 * 16 * 36 * 27),
        ("Conv", [(1, 8, 8, 8), (8, 1, 3, 3)], [(1, 8, 6, 6)], {"group": 8}, 2 * 8 * 36 * 9),
        ("QLinearConv", [(1, 3, 8, 8), (), (), (16, 3, 3, 3)], [(1, 16, 6, 6)], {}, 2 * 16 * 36 * 27),
        ("ConvTranspose", [(1, 4, 5, 5), (4, 2, 3, 3)], [(1, 2, 7, 7)], {}, 2 * 100 * 18),
        ("Gemm", [(4, 8), (8, 16), (16,)], [(4, 16)], {}, 64 * (16 + 1)),
        ("Gemm", [(8, 4), (8, 16)], [(4, 16)], {"transA": 1}, 64 * 16),
        ("MatMul", [(2, 4, 8), (8, 16)], [(2, 4, 16)], {}, 2 * 128 * 8),
        ("MatMulInteger", [(4, 8), (8, 16)], [(4, 16)], {}, 2 * 64 * 8),
        ("Einsum", [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], {"equation": "bij, bjk -> bik"}, 2 * 2 * 3 * 4 * 5),
        ("Einsum", [(2, 3)], [(3, 2)], {"equation": "ij->ji"}, None),
        (
            "Einsum",
            [(2, 3, 4, 5, 6), (2, 3, 4, 6, 7)],
            [(2, 3, 4, 5, 7)],
            {"equation": "...ij,...jk->...ik"},
            None,
        ),
        ("MaxPool", [(1, 4, 8, 8)], [(1, 4, 4, 4)], {"kernel_shape": [2, 2]}, 64 * 4),
        ("GlobalAveragePool", [(1, 4, 8, 8)], [(1, 4, 1, 1)], {}, 256),
        ("ReduceSum", [(4, 8)], [(4,)], {}, 32),
        ("Relu", [(4, 8)], [(4, 8)], {}, 32),
        ("Softmax", [(4, 8)], [(4, 8)], {}, 160),
        ("LSTM", [(10, 1, 8), (1, 64, 8), (1, 64, 16)], [None], {}, 10 * (2 * (64 * 8 + 64 * 16) + 24 * 16)),
        ("Attention", [(1, 2, 4, 8)] * 3, [(1, 2, 4, 8)], {}, 2 * 4 * 4 * (16 + 16 + 5)),
        (
            "Attention",
            [(1, 4, 16)] * 3,
            [(1, 4, 16)],
            {"q_num_heads": 2, "kv_num_heads": 2},
            2 * 4 * 4 * (16 + 16 + 5),
        ),
        ("Transpose", [None], [None], {}, 0),
        ("Relu", [None], [None], {}, None),
        ("NobodyKnows", [(4,)], [(4,)], {}, None),
    ],
)
def test_operations_counts_flops_by_operator(
    op_type: str, ins: Shapes, outs: Shapes, given: Mapping[str, Any], expected: int | None
) -> None:
    assert count_operations(op_type, ins, outs, given) == expected


def test_estimate_omits_traffic_between_joined_nodes(settings: dict[str, Any]) -> None:
    found = estimates(DIGITS / "digits_cnn.onnx", settings)
    image, filters, bias, between = 4 * 64, 4 * 16 * 9, 4 * 16, 4 * 16 * 64
    assert found.estimate(["conv1"]).bytes == image + filters + bias + between
    assert found.estimate(["relu1"]).bytes == 2 * between
    together = found.estimate(["conv1", "relu1"])
    assert together.bytes == image + filters + bias + between
    assert together.flops == 2 * 16 * 64 * 9 + 16 * 64
    assert together.shapes == "1x1x8x8xf32, 16x1x3x3xf32, 16xf32 -> 1x16x8x8xf32"


def test_estimate_of_whole_model_counts_inputs_weights_outputs(settings: dict[str, Any]) -> None:
    found = estimates(DIGITS / "digits_cnn.onnx", settings)
    weights = 16 * 9 + 16 + 32 * 16 * 9 + 32 + 128 * 10 + 10
    assert found.estimate(found.nodes).bytes == 4 * (64 + weights + 10)


def test_estimate_skips_views_and_unread_table_rows(save_onnx: Save, settings: dict[str, Any]) -> None:
    table = numpy_helper.from_array(np.zeros((1000, 8), np.float32), "table")
    shape = numpy_helper.from_array(np.array([16], np.int64), "shape")
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="pick"),
        helper.make_node("Reshape", ["rows", "shape"], ["y"], name="flat"),
    ]
    path = save_onnx(nodes, [("ids", TensorProto.INT64, (2,))], [("y", FLOAT, (16,))], [table, shape])
    found = estimates(path, settings)
    assert found.estimate(["pick"]).bytes == 2 * 8 + 2 * (2 * 8 * 4)
    assert found.estimate(["flat"]).bytes == 0
    assert found.estimate(["pick", "flat"]).flops == 0


def test_estimate_uses_given_symbol_sizes(save_onnx: Save, settings: dict[str, Any]) -> None:
    path = save_onnx([helper.make_node("Relu", ["x"], ["y"], name="r")], [("x", FLOAT, ("N", 4))], [("y", FLOAT, None)])
    assert estimates(path, settings).estimate(["r"]) == Estimate(None, None, "? -> ?")
    assert estimates(path, settings, N=3).estimate(["r"]) == Estimate(12, 96, "3x4xf32 -> 3x4xf32")


def test_estimate_ignores_unknown_node_names(settings: dict[str, Any]) -> None:
    found = estimates(DIGITS / "digits_cnn.onnx", settings)
    assert found.estimate(["no such node"]) == Estimate(None, None)
    assert found.estimate(["fc1", "no such node"]) == found.estimate(["fc1"])


def test_estimate_skips_other_formats(settings: dict[str, Any], tmp_path: Path) -> None:
    module = tmp_path / "model.mlir"
    module.write_text("func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }\n")
    assert not estimates(module, settings).nodes


@pytest.mark.parametrize(
    ("flops", "moved", "bound"),
    [
        (int(RIDGE) * 100, 100, "compute"),
        (int(RIDGE) * 100 - 1, 100, "memory"),
        (0, 100, "memory"),
        (None, 100, ""),
        (100, None, ""),
        (100, 0, ""),
    ],
)
def test_estimate_bound_depends_on_ridge(flops: int | None, moved: int | None, bound: str) -> None:
    assert Estimate(flops, moved).bound == bound
