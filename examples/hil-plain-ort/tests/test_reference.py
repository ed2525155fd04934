"""Compare a run on a simulated board with the reference, and check the package against hil's contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper

import hil


def test_run_agrees_with_reference(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Tanh", ["x"], ["y"], "tanh")], "tanh", [x], [y])
    path = tmp_path / "tanh.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    with hil.connect("sim") as board:
        case = hil.run(path, board, references=("plain-ort",))
    assert case, case.reason
    assert case.references[0].provenance["reference"] == "plain-ort"


def test_package_fulfils_contract(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hil", "plugin", "check", "hil-plain-ort"]
    # In an empty directory, the name is the installed package and not a project directory.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
