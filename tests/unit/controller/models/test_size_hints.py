"""Hints for open dimensions name sizes with which the graph runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model

from hil.controller.models.importers import import_model
from hil.controller.models.inputs import OpenDimensions, make_inputs
from hil.controller.models.sizing.size_hints import find_sizes, iter_candidates
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext

FLOAT = TensorProto.FLOAT


def sizes_of(path: Path, nodes: Sequence[Any], dims: Sequence[int | str], **held: Any) -> dict[str, int]:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    open_output = [("y", FLOAT, ["a", "b", "c", "d"][: 4 if nodes[-1].op_type == "Conv" else 2])]
    save_model(path, nodes, [("x", FLOAT, dims)], open_output, tensors)
    return find_sizes(str(path), [["x", "float32", list(dims)]])


def test_find_sizes_fits_kernel(tmp_path):
    conv = helper.make_node("Conv", ["x", "w"], ["y"])
    found = sizes_of(tmp_path / "conv.onnx", [conv], ["N", 3, "H", "W"], w=np.zeros((2, 3, 7, 7), np.float32))
    assert found == {"N": 1, "H": 7, "W": 7}


def test_find_sizes_fits_reshape(tmp_path):
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])
    found = sizes_of(tmp_path / "reshape.onnx", [reshape], ["N", "L"], shape=np.array([-1, 77]))
    assert found == {"N": 1, "L": 77}


def test_find_sizes_prefers_1(tmp_path):
    assert sizes_of(tmp_path / "relu.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["N", "L"]) == {"N": 1, "L": 1}


def test_find_sizes_fits_weight(tmp_path):
    matmul = helper.make_node("MatMul", ["x", "w"], ["y"])
    found = sizes_of(tmp_path / "mm.onnx", [matmul], ["N", "L"], w=np.zeros((11, 2), np.float32))
    assert found == {"N": 1, "L": 11}


def test_find_sizes_returns_empty_for_contradiction(tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("MatMul", ["x", "v"], ["u"])]
    nodes.append(helper.make_node("Add", ["t", "u"], ["y"]))
    weights = {name: np.zeros((size, 2), np.float32) for name, size in (("w", 11), ("v", 13))}
    assert sizes_of(tmp_path / "none.onnx", nodes, ["N", "L"], **weights) == {}


def test_candidates_vary_batch_last():
    found = list(iter_candidates([["N", 3, "S"], ["S"]]))
    assert found[:4] == [{"N": 1, "S": 1}, {"N": 1, "S": 2}, {"N": 2, "S": 2}, {"N": 1, "S": 3}]


def test_candidates_use_batch_of_1_for_names_with_batch():
    found = list(iter_candidates([["batch", "S"], [2, "batch", 128]]))
    assert found[:3] == [{"batch": 1, "S": 1}, {"batch": 1, "S": 2}, {"batch": 2, "S": 2}]


def test_run_hint_names_working_sizes(tmp_path, runner):
    conv = helper.make_node("Conv", ["x", "w"], ["y"])
    weight = numpy_helper.from_array(np.zeros((2, 3, 7, 7), np.float32), "w")
    path = save_model(
        tmp_path / "conv.onnx", [conv], [("x", FLOAT, ["N", 3, "?", "?"])], [("y", FLOAT, [*"abcd"])], [weight]
    )
    with pytest.raises(OpenDimensions) as caught:
        runner.begin(path, Options(), tmp_path)
    assert caught.value.hint == "--dim N=1 --dim x.dim2=7 --dim x.dim3=7"
    with pytest.raises(OpenDimensions) as caught:
        make_inputs(import_model(path).inputs, ())
    assert caught.value.hint == "--dim N=1 --dim x.dim2=1 --dim x.dim3=1"
    caught.value.suggest({"N": 2}, tmp_path / "a[1].onnx")
    table = '[models."a[[]1].onnx"] dims = ["N=2", "x.dim2=1", "x.dim3=1"]'
    assert caught.value.hint == f"--dim N=2 --dim x.dim2=1 --dim x.dim3=1, or in hil.toml: {table}"


@pytest.fixture
def runner(tmp_path):
    with Isolated(1) as isolated:
        yield Runner(RunContext(Cache(tmp_path / "cache"), isolated))
