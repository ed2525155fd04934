"""Cut and simplify ONNX models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model

from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.workloads.reduce.candidates.parts import write_base, write_part
from hil.controller.workloads.reduce.candidates.simplify import apply_change, list_changes, print_model

FLOAT = TensorProto.FLOAT


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """matmul, relu, and a sum of both; the weight is a constant that a node computes."""
    weight = numpy_helper.from_array(np.arange(64, dtype=np.float32).reshape(8, 8), "w")
    nodes = [
        helper.make_node("Neg", ["w"], ["v"], "neg"),
        helper.make_node("MatMul", ["x", "v"], ["m"], "matmul"),
        helper.make_node("Relu", ["m"], ["r"], "relu"),
        helper.make_node("Add", ["m", "r"], ["y"], "add"),
    ]
    (tmp_path / "given").mkdir()
    return save_model(
        tmp_path / "given" / "whole.onnx", nodes, [("x", FLOAT, [4, 8])], [("y", FLOAT, [4, 8])], [weight]
    )


def make_base(model: Path, folder: Path, *, folding: bool = True) -> list[list[int]]:
    folder.mkdir()
    found = write_base(str(model), {}, {}, folding, str(folder))
    assert found["nodes"] == 4
    return [list(part) for part in found["parts"]]


@pytest.mark.parametrize("folding", [True, False])
def test_parts_have_boundary_values_as_inputs_and_unused_values_as_outputs(model, tmp_path, folding):
    parts = make_base(model, tmp_path / "base", folding=folding)
    assert len(parts) == 3
    made = write_part(str(tmp_path / "base" / "model.onnx"), [*parts[0], *parts[1]], str(tmp_path))
    proto = onnx.load(tmp_path / "model.onnx")
    assert [name for name, _, _ in made["inputs"]] == ["x"]
    assert [value.name for value in proto.graph.output] == ["r"]
    assert made["nodes"] == len(proto.graph.node) == (2 if folding else 3)
    onnx.checker.check_model(proto, full_check=True)


def test_part_without_producers_takes_their_values(model, tmp_path):
    parts = make_base(model, tmp_path / "base")
    made = write_part(str(tmp_path / "base" / "model.onnx"), parts[2], str(tmp_path))
    assert made["inputs"] == [["m", "float32", [4, 8]], ["r", "float32", [4, 8]]]


def change_named(changes: list[list[dict[str, object]]], text: str) -> dict[str, object]:
    return next(change for group in changes for change in group if text in str(change["text"]))


def test_changes_shrink_sizes_and_replace_constants(model, tmp_path):
    make_base(model, tmp_path / "base")
    small = tmp_path / "base" / "model.onnx"
    save_tensors(tmp_path / "inputs", {"x": np.ones((4, 8), np.float32)})
    changes = list_changes(str(small), str(tmp_path / "inputs"))
    for number, text in enumerate(["size 2 instead of 8", "random values"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert apply_change(str(small), str(tmp_path / "inputs"), change_named(changes, text), str(folder))
        proto = onnx.load(folder / "model.onnx")
        onnx.checker.check_model(proto, full_check=True)
        (constant,) = proto.graph.initializer
        size = 2 if number == 0 else 8
        assert tuple(constant.dims) == (size, size)
        assert load_tensors(folder / "inputs")["x"].shape == (4, size)
    assert (numpy_helper.to_array(constant) * 8 % 1 == 0).all()


def test_change_that_makes_the_model_invalid_is_rejected(tmp_path):
    nodes = [helper.make_node("Transpose", ["x"], ["y"], "turn", perm=[0, 2, 1])]
    file = save_model(tmp_path / "turn.onnx", nodes, [("x", FLOAT, [1, 2, 3])], [("y", FLOAT, [1, 3, 2])])
    save_tensors(tmp_path / "inputs", {"x": np.ones((1, 2, 3), np.float32)})
    bad = {"kind": "attribute", "text": "", "node": 0, "attribute": "missing"}
    assert not apply_change(str(file), str(tmp_path / "inputs"), bad, str(tmp_path))
    good = change_named(list_changes(str(file), str(tmp_path / "inputs")), "turn' without perm")
    (tmp_path / "out").mkdir()
    assert apply_change(str(file), str(tmp_path / "inputs"), good, str(tmp_path / "out"))
    (output,) = onnx.load(tmp_path / "out" / "model.onnx").graph.output
    assert [dim.dim_value for dim in output.type.tensor_type.shape.dim] == [3, 2, 1]


def test_print_model_shortens_constants(tmp_path):
    weight = numpy_helper.from_array(np.full(4000, 0.123456, np.float32), "w")
    nodes = [helper.make_node("Add", ["x", "w"], ["y"], "add")]
    file = save_model(tmp_path / "m.onnx", nodes, [("x", FLOAT, [4000])], [("y", FLOAT, [4000])], [weight])
    found = print_model(str(file))
    assert found["operators"] == ["Add"] and "..." in found["text"] and len(found["text"]) < 600


def test_print_model_shortens_only_values(model: Path):
    text = print_model(str(model))["text"]
    assert all(node in text for node in ("MatMul", "Relu", "Add")) and "..." in text
