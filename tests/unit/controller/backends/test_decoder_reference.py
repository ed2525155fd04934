"""The reference of a decoder: ONNX models widened to float64, compared with NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.decoder import NumpyDecoder
from support.step_programs import logits_of, save_summing_model

from hil.controller.backends.references.runners.decoder import run_decoder, widen_floats
from hil.controller.backends.references.runners.onnx import make_evaluator
from hil.controller.models.generation.roles import detect_roles
from hil.controller.models.generation.spec import GenerateSpec, Prompt
from hil.controller.models.importers.onnx import make_value_spec
from hil.controller.models.importers.onnx_nodes import iter_nodes
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.core.tensors import Array
from hil.errors import ReferenceFailed
from hil.formats.onnx_file import iter_subgraphs

EXAMPLE = Path(__file__).parents[4] / "examples" / "decoder"
NARROW = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
THIRD = np.float32(1 / 3)


def make_model(nodes: list[Any], weights: dict[str, Any], *more: Any) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, FLOAT, [2]) for name in ("x", "y")]
    made = [
        one if isinstance(one, onnx.TensorProto) else numpy_helper.from_array(one, name)
        for name, one in weights.items()
    ]
    graph = helper.make_graph([*nodes, *more], "m", values[:1], values[1:], made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def types_of(model: onnx.ModelProto) -> set[int]:
    """Return the types of all tensors and values."""
    nodes = list(iter_nodes(model.graph.node))
    found = set()
    for graph in [model.graph, *(graph for node in nodes for graph in iter_subgraphs(node))]:
        found |= {tensor.data_type for tensor in graph.initializer}
        found |= {one.type.tensor_type.elem_type for one in (*graph.input, *graph.output, *graph.value_info)}
    found |= {attribute.t.data_type for node in nodes for attribute in node.attribute if attribute.HasField("t")}
    return found


def evaluate(model: onnx.ModelProto) -> Array:
    widen_floats(model)
    assert not types_of(model) & NARROW
    (y,) = make_evaluator(model).run(None, {"x": np.array([0.1, 0.7])})
    assert y.dtype == np.float64
    return y


X = np.array([0.1, 0.7])


def test_widen_floats_widens_weights():
    bfloat16 = helper.make_tensor("c", TensorProto.BFLOAT16, [2], [0.5, 3.0])
    nodes = [
        helper.make_node("Mul", ["x", "a"], ["p"]),
        helper.make_node("Mul", ["b", "c"], ["q"]),
        helper.make_node("Add", ["p", "q"], ["y"]),
    ]
    weights = {"a": np.full(2, THIRD), "b": np.float16([1.5, 2]), "c": bfloat16}
    np.testing.assert_array_equal(evaluate(make_model(nodes, weights)), X * float(THIRD) + [0.75, 6])


@pytest.mark.parametrize(
    ("attributes", "value"),
    [
        ({"value_float": float(THIRD)}, float(THIRD)),
        ({"value_floats": [float(THIRD), 2.0]}, np.array([float(THIRD), 2])),
        ({"value": numpy_helper.from_array(np.float16([1.5, 2]))}, np.array([1.5, 2])),
    ],
)
def test_widen_floats_widens_constants(attributes: dict[str, Any], value: Any):
    nodes = [helper.make_node("Constant", [], ["c"], **attributes), helper.make_node("Mul", ["x", "c"], ["y"])]
    np.testing.assert_array_equal(evaluate(make_model(nodes, {})), X * value)


@pytest.mark.parametrize("to", sorted(NARROW))
def test_widen_floats_removes_casts_to_narrow_floats(to: int):
    nodes = [helper.make_node("Cast", ["x"], ["c"], to=to), helper.make_node("Cast", ["c"], ["y"], to=FLOAT)]
    np.testing.assert_array_equal(evaluate(make_model(nodes, {})), X)


def test_widen_floats_keeps_casts_to_integers():
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=TensorProto.INT64),
        helper.make_node("CastLike", ["c", "x"], ["y"]),
    ]
    np.testing.assert_array_equal(evaluate(make_model(nodes, {})), [0, 0])


def test_widen_floats_widens_subgraphs():
    def branch(name: str, value: float) -> Any:
        output = helper.make_tensor_value_info(name, FLOAT, [2])
        inner = helper.make_node(
            "If", ["yes"], [f"{name}i"], then_branch=leaf(f"{name}t"), else_branch=leaf(f"{name}e")
        )
        nodes = [inner, helper.make_node("Mul", [f"{name}w", f"{name}i"], [name])]
        return helper.make_graph(nodes, name, [], [output], [numpy_helper.from_array(np.float32(value), f"{name}w")])

    def leaf(name: str) -> Any:
        nodes = [
            helper.make_node("Constant", [], [f"{name}c"], value_float=float(THIRD)),
            helper.make_node("Mul", ["x", f"{name}c"], [name]),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, FLOAT, [2])])

    node = helper.make_node("If", ["yes"], ["y"], then_branch=branch("t", 0.1), else_branch=branch("e", 0.2))
    model = make_model([node], {"yes": np.array(True)})
    expected = X * float(THIRD) * float(np.float32(0.1))
    np.testing.assert_array_equal(evaluate(model), expected)


def test_widen_floats_widens_precision_of_attention():
    shape = (1, 1, 3, 4)
    arrays = {name: np.random.default_rng(n).standard_normal(shape).astype(np.float32) for n, name in enumerate("qkv")}
    values = [helper.make_tensor_value_info(name, FLOAT, shape) for name in (*"qkv", "y")]
    node = helper.make_node("Attention", [*"qkv"], ["y"], softmax_precision=FLOAT)
    graph = helper.make_graph([node], "m", values[:3], values[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    widen_floats(model)
    q, k, v = (array.astype(np.float64)[0, 0] for array in arrays.values())
    (y,) = make_evaluator(model).run(None, {name: one.astype(np.float64) for name, one in arrays.items()})
    scores = np.exp(q @ k.T / 2)
    np.testing.assert_allclose(y[0, 0], scores / scores.sum(-1, keepdims=True) @ v, rtol=1e-13)


def run(model: Path, folder: Path, arithmetic: str, prompt: list[int], forced: list[int]) -> dict[str, Array]:
    loaded = onnx.load(model)
    inputs, outputs = ([make_value_spec(one) for one in values] for values in (loaded.graph.input, loaded.graph.output))
    plan = detect_roles(inputs, outputs, GenerateSpec(prompt=[Prompt(tokens=prompt)], steps=len(forced))).plan
    given = {"prompt": prompt, "forced": forced, "other_prompt": []}
    (folder / "in").mkdir()
    (folder / "out").mkdir()
    save_tensors(folder / "in", {name: np.array(one, np.int64) for name, one in given.items()})
    run_decoder(str(model), str(folder / "in"), json.dumps(plan.to_json()), arithmetic, str(folder / "out"))
    return dict(load_tensors(folder / "out"))


@pytest.mark.parametrize("arithmetic", ["float64", "float32", "float16", "bfloat16"])
def test_run_decoder_computes_exact_model(tmp_path: Path, arithmetic: str):
    model = save_summing_model(tmp_path / "m.onnx")
    found = run(model, tmp_path, arithmetic, [1, 4, 2], [5, 0])
    np.testing.assert_array_equal(found["logits"].astype(np.float64), logits_of([1, 4, 2, 5, 0]))
    assert found["positions"].tolist() == [0, 1, 2, 3, 4]
    assert found["present.0.key"].shape == (1, 5, 4)


def test_run_decoder_equals_numpy_in_float64(tmp_path: Path):
    tokens = [*b"The board needs SSH, a POSIX shell"]
    with np.load(EXAMPLE / "weights.npz") as file:
        decoder = NumpyDecoder({name: file[name] for name in file.files})
    expected = decoder.run(tokens)
    found = run(EXAMPLE / "decoder.onnx", tmp_path, "float64", tokens[:16], tokens[16:])
    assert found["logits"].dtype == np.float64
    # The model's frequencies and epsilon are float32.
    assert np.abs(found["logits"] - expected).max() < 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(found["present.3.key"][0], decoder.keys[3], atol=1e-5)


@pytest.mark.parametrize(
    ("arithmetic", "least", "most"), [("float32", 110, 160), ("float16", 50, 80), ("bfloat16", 35, 62)]
)
def test_run_decoder_rounds_control(tmp_path: Path, arithmetic: str, least: float, most: float):
    tokens = [*b"The board needs SS"]
    for folder in ("exact", "rounded"):
        (tmp_path / folder).mkdir()
    exact = run(EXAMPLE / "decoder.onnx", tmp_path / "exact", "float64", tokens[:16], tokens[16:])["logits"]
    rounded = run(EXAMPLE / "decoder.onnx", tmp_path / "rounded", arithmetic, tokens[:16], tokens[16:])["logits"]
    sqnr = 10 * np.log10(np.square(exact).sum() / np.square(rounded.astype(np.float64) - exact).sum())
    assert least < sqnr < most


@pytest.mark.parametrize("arithmetic", ["float64", "float32", "float16"])
def test_run_decoder_reports_unknown_operators(tmp_path: Path, arithmetic: str):
    model = onnx.load(save_summing_model(tmp_path / "m.onnx"))
    model.graph.node[-1].op_type, model.graph.node[-1].domain = "Nothing", "no.such"
    model.opset_import.append(helper.make_opsetid("no.such", 1))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ReferenceFailed):
        run(tmp_path / "m.onnx", tmp_path, arithmetic, [1, 4, 2], [5])
