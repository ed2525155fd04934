from __future__ import annotations

import json

import onnx
import pytest
from onnx import TensorProto, helper
from support.layer_models import FLOAT, model_of, node, residual_cnn, weights

from hil.controller.analysis.graphs import onnx_graph
from hil.controller.analysis.graphs.colours import ColourScale
from hil.controller.analysis.graphs.imported import read_imported
from hil.controller.analysis.graphs.model_graph import ModelGraph
from hil.controller.analysis.graphs.node_data import make_node_data
from hil.controller.analysis.graphs.onnx_graph import list_named_layers, read_onnx
from hil.controller.analysis.graphs.values import NodeValue
from hil.errors import ImportFailed


def saved(model, folder):
    path = folder / "net.onnx"
    onnx.save(model, path)
    return str(path)


def graph_of(model, folder):
    document = json.loads(json.dumps(read_onnx(saved(model, folder), {})))
    return ModelGraph.from_json(document)


def test_graph_joins_nodes_by_tensors(tmp_path):
    graph = graph_of(residual_cnn(), tmp_path)
    named = [(graph.nodes[first].name, graph.nodes[last].name) for first, last in graph.edges]
    assert ("input image", "stem") in named
    assert {("block/conv2", "block/add"), ("stem_relu", "block/add"), ("stem_relu", "block/conv1")} <= set(named)
    assert graph.nodes[0].kind == "input" and graph.nodes[-1].kind == "output"
    assert graph.shapes["image"] == "1x3x8x8 float32"


def test_graph_round_trips_through_json(tmp_path):
    graph = graph_of(residual_cnn(), tmp_path)
    assert ModelGraph.from_json(json.loads(json.dumps(graph.as_json()))).nodes == graph.nodes


def test_graph_names_unnamed_nodes_for_model_explorer(tmp_path):
    model = model_of(
        [node("Relu", ["x"], ["a"]), node("Relu", ["a"], ["b"], "mine"), node("Relu", ["b"], ["y"])],
        [("x", FLOAT, [2])],
        [("y", FLOAT, [2])],
    )
    graph = graph_of(model, tmp_path)
    values = {one.name: NodeValue(max_abs=1.0) for one in graph.nodes if one.kind == "node"}
    data = make_node_data(values, "max_abs", graph)
    assert list(values) == ["Relu_0", "mine", "Relu_2"]
    assert list(data["net"]["results"]) == ["<node_0>", "mine", "<node_2>"]


def test_graph_omits_constants_and_nests_subgraph_nodes(tmp_path):
    value = helper.make_tensor("v", FLOAT, [1], [1.0])
    branch = [
        helper.make_graph([node("Relu", ["x"], [name], f"inner_{name}")], name, [], [out])
        for name, out in [(name, helper.make_tensor_value_info(name, FLOAT, [1])) for name in ("p", "q")]
    ]
    model = model_of(
        [
            node("Constant", [], ["k"], "k", value=value),
            node("If", ["c"], ["z"], "choice", then_branch=branch[0], else_branch=branch[1]),
            node("Add", ["z", "k"], ["y"], "sum"),
        ],
        [("c", TensorProto.BOOL, []), ("x", FLOAT, [1])],
        [("y", FLOAT, [1])],
    )
    graph = graph_of(model, tmp_path)
    assert [one.name for one in graph.nodes if one.kind == "node"] == ["choice", "sum"]
    assert graph.notes
    holders = graph.holders()
    assert graph.nodes[holders["inner_p"]].name == graph.nodes[holders["choice"]].name == "choice"
    # An outer value captured by a branch also adds an edge.
    assert ("input x", "choice") in {(graph.nodes[a].name, graph.nodes[b].name) for a, b in graph.edges}


def test_layer_names_match_suite_layer_names(tmp_path):
    path = saved(residual_cnn(), tmp_path)
    assert dict(list_named_layers(path, {}, "node"))["Conv_stem"] == ["stem"]
    assert dict(list_named_layers(path, {}, "fused"))["Conv+BatchNormalization+Relu_stem"] == [
        "stem",
        "stem_norm",
        "stem_relu",
    ]


@pytest.mark.parametrize("content", [b"", b"\0", b"\x0a\xff\xff\xff\xff", b"no model" * 100])
def test_read_onnx_rejects_invalid_model(tmp_path, content):
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    with pytest.raises(ImportFailed):
        read_onnx(str(path), {})


def test_read_onnx_rejects_too_large_model(tmp_path, monkeypatch):
    path = saved(residual_cnn(), tmp_path)
    monkeypatch.setattr(onnx_graph, "MAX_NODES", 3)
    with pytest.raises(ImportFailed, match="nodes exceed the limit of 3"):
        read_onnx(path, {})
    monkeypatch.setattr(onnx_graph, "MAX_BYTES", 3)
    with pytest.raises(ImportFailed, match="MiB exceeds the limit of 0 MiB"):
        read_onnx(path, {})


def test_read_onnx_lists_external_data_without_reading(tmp_path):
    model = model_of(
        [node("MatMul", ["x", "w"], ["y"], "m")], [("x", FLOAT, [4])], [("y", FLOAT, [4])], {"w": weights(4, 4)}
    )
    path = tmp_path / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, location="net.data", size_threshold=0)
    (tmp_path / "net.data").unlink()
    assert read_onnx(str(path), {})["external"] == ["net.data"]


def test_imported_program_preserves_onnx_node_names(tmp_path):
    pytest.importorskip("iree.compiler")
    path = saved(residual_cnn(), tmp_path)
    graph = ModelGraph.from_json(read_imported("", path, {}))
    found = {one.name: one.op for one in graph.nodes}
    assert found["stem"] == "onnx.Conv" and found["block/add"] == "onnx.Add"
    assert len(graph.edges) >= len(graph.nodes) - 1
    bad = tmp_path / "bad.mlir"
    bad.write_text("no mlir")
    with pytest.raises(ImportFailed):
        read_imported(str(bad), "", {})


def test_node_data_writes_valid_json_for_any_value():
    values = {"a": NodeValue("FAIL", max_abs=float("inf")), "b": NodeValue("PASS", max_abs=1.0), "c": NodeValue("PASS")}
    data = make_node_data(values, "max_abs")
    json.dumps(data, allow_nan=False)
    scale = ColourScale.of("max_abs", values.values())
    assert data["results"]["b"] == {"value": 1.0, "bgColor": scale.choose_colour(values["b"]), "textColor": "#ffffff"}
    assert data["results"]["a"]["value"] == "inf"
    assert "c" not in data["results"]
    assert {one["value"] for one in make_node_data(values, "outcome")["results"].values()} == {"PASS", "FAIL"}
