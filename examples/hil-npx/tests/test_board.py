"""Run a model on the development kit, through the package's link and board config."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

import hil


def test_development_kit_runs_model(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], "relu")], "relu", [x], [y])
    path = tmp_path / "relu.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    with hil.connect("npx-kit") as board:
        case = hil.run(path, board)
    assert case, case.reason
    assert "npx0" in case.result.source
