"""Models made for a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import helper

DIGITS = Path(__file__).parents[2] / "examples" / "digits"

Value = tuple[str, int, Sequence[int | str]]


def save_model(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    initializers: Sequence[onnx.TensorProto] = (),
) -> Path:
    """Write an ONNX model of opset 17."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        list(initializers),
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path
