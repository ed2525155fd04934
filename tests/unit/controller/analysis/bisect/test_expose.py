"""Models with exposed intermediates compute the same values and return the requested tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.layer_models import local_function
from support.models import save_model

from hil.controller.analysis.bisect.subject import expose_tensors
from hil.controller.analysis.layers import extract_layers
from hil.controller.models.importers import import_model
from hil.core.tensors import TensorSpec
from hil.errors import ImportFailed

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL


@pytest.fixture
def context(cache, isolated, tmp_path) -> dict[str, Any]:
    return {"cache": cache, "isolated": isolated, "timeout": 60.0, "log": tmp_path / "expose.log"}


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """a = x + x, b = a * w, y = -b; z = relu(a)"""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["a"], "add"),
        helper.make_node("Mul", ["a", "w"], ["b"], "mul"),
        helper.make_node("Neg", ["b"], ["y"], "neg"),
        helper.make_node("Relu", ["a"], ["z"], "relu"),
    ]
    w = numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w")
    x, y, z = ((name, FLOAT, ["N", 3]) for name in "xyz")
    return save_model(tmp_path / "chain.onnx", nodes, [x], [y, z], [w])


def run(path: Path, **inputs: Any) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def of(name: str, shape: tuple[int, ...] = (2, 3)) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


@pytest.mark.ci
def test_expose_appends_intermediates_after_outputs(chain, context):
    path = expose_tensors(import_model(chain, dims={"N": 2}), [of("a"), of("b"), of("y")], **context)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = run(path, x=x)
    assert list(found) == ["y", "z", "a", "b"]
    np.testing.assert_array_equal(found["a"], 2 * x)
    np.testing.assert_array_equal(found["b"], 2 * x * [1, 2, 3])
    np.testing.assert_array_equal(found["y"], -found["b"])


@pytest.mark.ci
def test_expose_fixes_shapes_only_for_fixed_inputs(chain, context):
    for dims, shape in (({"N": 2}, [2, 3]), ({}, [0, 0])):
        proto = onnx.load(expose_tensors(import_model(chain, dims=dims), [of("a")], **context))
        (value,) = (value for value in proto.graph.output if value.name == "a")
        assert [dim.dim_value for dim in value.type.tensor_type.shape.dim] == shape


def test_expose_only_drops_unneeded_nodes(chain, context):
    proto = onnx.load(expose_tensors(import_model(chain, dims={"N": 2}), [of("b")], only=True, **context))
    assert [node.name for node in proto.graph.node] == ["add", "mul"]
    assert [value.name for value in proto.graph.output] == ["b"]


def test_expose_preserves_values_captured_by_subgraphs(context, tmp_path):
    outer = helper.make_node("Add", ["x", "x"], ["a"], "add")
    bodies = {
        name: helper.make_graph(
            [helper.make_node(op, ["a"], [f"{name}.out"], name)],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}.out", FLOAT, [3])],
        )
        for name, op in (("then_branch", "Neg"), ("else_branch", "Identity"))
    }
    choose = helper.make_node("If", ["flag"], ["b"], "if", **bodies)
    last = helper.make_node("Relu", ["b"], ["y"], "relu")
    inputs = [("x", FLOAT, [3]), ("flag", BOOL, [])]
    path = save_model(tmp_path / "if.onnx", [outer, choose, last], inputs, [("y", FLOAT, [3])])
    exposed = expose_tensors(import_model(path), [of("b", (3,))], only=True, **context)
    found = run(exposed, x=np.ones(3, np.float32), flag=np.array(True))
    assert {name: list(value) for name, value in found.items()} == {"b": [-2, -2, -2]}


def test_expose_preserves_external_data(context, tmp_path):
    weight = numpy_helper.from_array(np.arange(3, dtype=np.float32), "w")
    nodes = [helper.make_node("Mul", ["x", "w"], ["a"], "mul"), helper.make_node("Neg", ["a"], ["y"], "neg")]
    path = save_model(tmp_path / "heavy.onnx", nodes, [("x", FLOAT, [3])], [("y", FLOAT, [3])], [weight])
    proto = onnx.load(path)
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    found = run(expose_tensors(import_model(path), [of("a", (3,))], **context), x=np.ones(3, np.float32))
    assert list(found["a"]) == [0, 1, 2]


def test_expose_returns_values_inside_model_functions(context, tmp_path):
    onnx.save(local_function(), tmp_path / "function.onnx")
    model = import_model(tmp_path / "function.onnx")
    layers = extract_layers(model, **{name: context[name] for name in ("cache", "isolated", "log")})
    inner = [name for layer in layers for name in layer.outputs]
    x = np.array([[0.1, 0.2, 0.3], [1, 2, 3]], np.float32)
    found = run(expose_tensors(model, [of(name) for name in inner], **context), x=x)
    assert list(found) == ["y", *inner[:-1]]
    np.testing.assert_allclose(found[inner[0]], 2 * x)
    np.testing.assert_allclose(found[inner[1]], np.tanh(2 * x), rtol=1e-6)


def test_expose_ignores_omitted_outputs(context, tmp_path):
    nodes = [
        helper.make_node("Dropout", ["x"], ["d", ""], "unneeded"),
        helper.make_node("Clip", ["x", "", "most"], ["a"], "clip"),
        helper.make_node("Add", ["a", "d"], ["y"], "add"),
    ]
    most = numpy_helper.from_array(np.float32(1), "most")
    path = save_model(tmp_path / "optional.onnx", nodes, [("x", FLOAT, [3])], [("y", FLOAT, [3])], [most])
    proto = onnx.load(expose_tensors(import_model(path), [of("a", (3,))], only=True, **context))
    assert [node.name for node in proto.graph.node] == ["clip"]


def test_expose_reports_unwritable_output_as_import_error(chain, context):
    model = import_model(chain, dims={"N": 2})
    with pytest.raises(ImportFailed, match="cannot add intermediate outputs to"):
        expose_tensors(model, [TensorSpec("a", "float77", (2, 3))], **context)
