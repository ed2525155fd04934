"""Compile and run models on a simulated board, and check the package against hil's contract."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import hil


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a simulated board. With an empty cache, a change of the compiler takes effect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with hil.connect("sim") as board:
            yield board


def save(path: Path, *nodes: onnx.NodeProto) -> Path:
    """Save a model with the input x and the output y of 2x8 values."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8]) for name in "xy")
    weight = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], np.linspace(-1, 1, 64))
    graph = helper.make_graph(nodes, path.stem, [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_model_agrees_with_reference(board: Any, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "fc"), helper.make_node("Relu", ["h"], ["y"], "relu")]
    case = hil.run(save(tmp_path / "fc.onnx", *nodes), board, runtime="npx")
    assert case, case.reason
    assert case.artifact.compiler.startswith("npx")


def test_unsupported_operator_names_node(board: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "cos.onnx", helper.make_node("Cos", ["x"], ["y"], "cos1"))
    case = hil.run(path, board, runtime="npx")
    assert case.outcome.value == "COMPILE_ERROR"
    assert "Cos of the node cos1" in case.reason


def test_package_fulfils_contract(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hil", "plugin", "check", "hil-npx"]
    # In an empty directory, the name is the installed package and not a project directory.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
