"""Operations and bytes of models, compared with counts by hand and in publications."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import DIGITS
from support.schemas import check_document
from support.tflite_models import save_layers

from hil.controller.analysis.roofline.model_work import count_model
from hil.controller.analysis.roofline.probes import Probe, write_probe
from hil.controller.analysis.roofline.show import describe_missing
from hil.controller.analysis.roofline.tflite_shapes import count_tflite
from hil.controller.models.importers import import_model
from hil.controller.records.measurements.roofline import ModelWork
from hil.errors import UsageError

Save = Callable[..., Path]
FLOAT = TensorProto.FLOAT


def count(path: Path, settings: dict[str, Any], function: str = "") -> ModelWork:
    model = import_model(path, function=function, isolated=settings["isolated"])
    return count_model(model, **{name: settings[name] for name in ("cache", "isolated", "timeout", "log")})


def count_by_loops(image: int, inputs: int, outputs: int, kernel: int, padding: int) -> int:
    """Count the operations of a convolution from its windows, including those of the padding."""
    data = np.zeros((inputs, image + 2 * padding, image + 2 * padding))
    positions = np.lib.stride_tricks.sliding_window_view(data, (kernel, kernel), axis=(1, 2))
    return 2 * outputs * positions.size


def test_digits_cnn_matches_a_count_by_hand(settings: dict[str, Any]) -> None:
    found = count(DIGITS / "digits_cnn.onnx", settings)
    flops = {one.name: one.flops for one in found.operators}
    assert flops["conv1"] == count_by_loops(8, 1, 16, 3, 1)
    assert flops["conv2"] == count_by_loops(4, 16, 32, 3, 1)
    assert flops["fc1"] == 10 * (2 * 128 + 1)
    assert (flops["relu1"], flops["pool1"], flops["flatten"]) == (16 * 8 * 8, 16 * 4 * 4 * 4, 0)
    assert found.flops == sum(flops.values())
    weights = 16 * 9 + 16 + 32 * 16 * 9 + 32 + 128 * 10 + 10
    assert found.model_bytes == 4 * (64 + weights + 10)
    assert found.not_counted == {}
    check_document({"schema": 1, **found.to_json()}, "profile work")


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
def test_matmul_has_two_operations_per_multiply_accumulate(
    dtype: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    probe = Probe("matmul", dtype, 32)
    found = count(write_probe(probe, tmp_path), settings)
    assert (found.flops, found.bytes) == (2 * 32**3, probe.memory_bytes)
    assert found.flops == probe.work


@pytest.mark.parametrize("kernel", ["add", "sum"])
def test_array_probe_moves_its_arrays_once(kernel: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    probe = Probe(kernel, "f32", 8192)
    found = count(write_probe(probe, tmp_path), settings)
    axes = 8 if kernel == "sum" else 0  # the constant that selects the axis
    assert found.bytes == probe.work + axes
    assert found.flops == 8192


def save_mobilenet(save_onnx: Save) -> Path:
    """Save MobileNet V1 with width 1.0 and 224 x 224 pixels (Howard et al., 2017, table 1), without weights' values."""
    nodes, weights = [], []
    last, channels = "x", 3

    def add(kind: str, outputs: int, stride: int, kernel: int, group: int) -> None:
        nonlocal last, channels
        name = f"{kind}{len(nodes)}"
        values = np.zeros((outputs, channels // group, kernel, kernel), np.float32)
        weights.append(numpy_helper.from_array(values, f"w_{name}"))
        pad = kernel // 2
        nodes.append(
            helper.make_node(
                "Conv",
                [last, f"w_{name}"],
                [name],
                name,
                strides=[stride, stride],
                pads=[pad] * 4,
                group=group,
                kernel_shape=[kernel, kernel],
            )
        )
        last, channels = name, outputs

    add("first", 32, 2, 3, 1)
    layers = [(1, 64), (2, 128), (1, 128), (2, 256), (1, 256), (2, 512), *[(1, 512)] * 5, (2, 1024), (1, 1024)]
    for stride, outputs in layers:
        add("depthwise", channels, stride, 3, channels)
        add("pointwise", outputs, 1, 1, 1)
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["pooled"], "pool"))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"], "flatten"))
    dense = numpy_helper.from_array(np.zeros((1024, 1000), np.float32), "dense")
    nodes.append(helper.make_node("MatMul", ["flat", "dense"], ["y"], "classes"))
    return save_onnx(nodes, [("x", FLOAT, (1, 3, 224, 224))], [("y", FLOAT, (1, 1000))], [*weights, dense])


def test_mobilenet_matches_the_published_count(save_onnx: Save, settings: dict[str, Any]) -> None:
    found = count(save_mobilenet(save_onnx), settings)
    macs = sum(one.flops or 0 for one in found.operators if one.op_type in ("Conv", "MatMul")) / 2
    assert round(macs / 1e6) == 569  # million multiply-adds, table 4 of the paper
    assert found.model_bytes == 4 * (3 * 224 * 224 + 4_209_088 + 1000)


def test_unknown_operator_is_named_and_not_counted(save_onnx: Save, settings: dict[str, Any]) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "r"),
        helper.make_node("Det", ["r"], ["y"], "d"),
    ]
    found = count(save_onnx(nodes, [("x", FLOAT, (2, 4, 4))], [("y", FLOAT, (2,))]), settings)
    assert found.flops == 32
    assert found.not_counted == {"Det": 1}
    assert describe_missing(found) == "not counted: 1 operator of 2: Det (1)"


def test_other_format_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.mlir"
    path.write_text("func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }\n")
    with pytest.raises(UsageError, match=r"model\.mlir: the format is mlir"):
        count(path, settings)


# Options of TFLite operators.
OPTIONS = SimpleNamespace(filterHeight=2, filterWidth=3, adjX=True)


@pytest.mark.parametrize(
    ("op_type", "ins", "outs", "expected"),
    [
        ("CONV_2D", [(1, 8, 8, 3), (16, 3, 3, 3), (16,)], [(1, 6, 6, 16)], 2 * 16 * 36 * 27),
        ("DEPTHWISE_CONV_2D", [(1, 8, 8, 4), (1, 3, 3, 8), (8,)], [(1, 6, 6, 8)], 2 * 8 * 36 * 9),
        ("TRANSPOSE_CONV", [(4,), (2, 3, 3, 4), (1, 5, 5, 4)], [(1, 7, 7, 2)], 2 * 100 * 18),
        ("CONV_3D", [(1, 4, 4, 4, 3), (2, 2, 2, 3, 5)], [(1, 3, 3, 3, 5)], 2 * 27 * 5 * 24),
        ("FULLY_CONNECTED", [(4, 8), (16, 8), (16,)], [(4, 16)], 64 * 17),
        ("FULLY_CONNECTED", [(4, 8), (16, 8), None], [(4, 16)], 64 * 16),
        ("BATCH_MATMUL", [(2, 8, 4), (2, 8, 16)], [(2, 4, 16)], 2 * 128 * 8),
        ("MAX_POOL_2D", [(1, 8, 8, 4)], [(1, 4, 4, 4)], 64 * 6),
        ("MEAN", [(4, 8), (1,)], [(4,)], 32),
        ("LOGISTIC", [(4, 8)], [(4, 8)], 4 * 32),
        ("RELU6", [(4, 8)], [(4, 8)], 2 * 32),
        ("SOFTMAX", [(4, 8)], [(4, 8)], 5 * 32),
        ("RESHAPE", [(4, 8), (1,)], [(32,)], 0),
        ("CONCATENATION", [(4, 8), (4, 8)], [(8, 8)], 0),
        ("CONV_2D", [None, (16, 3, 3, 3)], [None], None),
        ("DETECTION", [(4,)], [(4,)], None),
    ],
)
def test_tflite_operators(op_type: str, ins: Sequence[Any], outs: Sequence[Any], expected: int | None) -> None:
    assert count_tflite(op_type, ins, outs, OPTIONS) == expected


def test_tflite_model_counts_each_operator(settings: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    found = count(save_layers(tmp_path / "net.tflite"), settings)
    assert [(one.op_type, one.flops) for one in found.operators] == [
        ("CONV_2D", 2 * 8 * 64 * 27),
        ("DEPTHWISE_CONV_2D", 2 * 8 * 64 * 9),
        ("RESHAPE", 0),
        ("FULLY_CONNECTED", 10 * (2 * 512 + 1)),
    ]
    image, between, classes = 8 * 8 * 3, 8 * 8 * 8, 10
    weights = 8 * 27 + 8, 8 * 9 + 8, 10 * 512 + 10
    assert [one.bytes for one in found.operators] == [
        4 * (image + weights[0] + between),
        4 * (between + weights[1] + between),
        0,
        4 * (between + weights[2] + classes),
    ]
    assert found.model_bytes == 4 * (image + sum(weights) + classes) + 8  # and the shape of the reshape
    assert found.not_counted == {}
