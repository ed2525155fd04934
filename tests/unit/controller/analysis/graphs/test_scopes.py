"""Name scopes of nodes, and graphs with closed scopes."""

from __future__ import annotations

import numpy as np
import pytest

from hil.controller.analysis.graphs.model_graph import GraphNode, ModelGraph
from hil.controller.analysis.graphs.scopes import (
    MAX_DEPTH,
    MAX_VISIBLE,
    choose_open_scopes,
    find_inner_scopes,
    find_scopes,
    fold,
    list_outer_scopes,
)


def chain(*names, kind="onnx"):
    nodes = [GraphNode("input x", "input", "input"), *(GraphNode(name, "Op") for name in names)]
    return ModelGraph(kind, "net", nodes, [(at, at + 1) for at in range(len(names))])


def paths(*names, kind="onnx"):
    """Return path -> members. A node without a scope follows the nodes."""
    return {path: scope.members for path, scope in find_scopes(chain(*names, "head", kind=kind)).items()}


def test_scopes_contain_nodes_of_inner_scopes():
    found = find_scopes(chain("/a/Conv", "/a/b/Conv", "/a/b/Relu", "/c/Add", "head"))
    assert {path: (scope.parent, scope.members) for path, scope in found.items()} == {
        "a": ("", (1, 2, 3)),
        "a/b": ("a", (2, 3)),
    }
    assert (found["a/b"].name, found["a/b"].label, found["a"].label) == ("a/b/", "b", "a")


def test_scope_with_same_nodes_as_inner_scope_is_left_out():
    assert paths("model/encoder/layer/MatMul", "model/encoder/layer/Add") == {"model/encoder/layer": (1, 2)}
    found = find_scopes(chain("m/e/l/MatMul", "m/e/l/Add", "m/e/Relu", "head"))
    assert found["m/e/l"].parent == "m/e" and "m" not in found


def test_scope_with_all_nodes_is_left_out():
    assert list(find_scopes(chain("net/a/Conv", "net/a/Relu", "net/Add"))) == ["net/a"]


@pytest.mark.parametrize(
    ("names", "kind", "found"),
    [
        (("layer1.0.conv", "layer1.0.relu", "layer1.1.conv"), "onnx", {"layer1": (1, 2, 3), "layer1/0": (1, 2)}),
        (("torch.aten.add", "torch.aten.mul"), "imported", {}),
        (("a/x.0", "a/x.1"), "onnx", {"a": (1, 2)}),
        (("dense/MatMul;dense/BiasAdd", "dense/Relu"), "onnx", {"dense": (1, 2)}),
        (("Conv_0", "Relu_1"), "onnx", {}),
    ],
)
def test_scopes_follow_the_names_of_frameworks(names, kind, found):
    assert paths(*names, kind=kind) == found


def test_scopes_of_deep_names_are_bounded():
    # The prefixes of a name need memory that grows with the square of its depth.
    deep = "/".join(["a"] * 5_000)
    (found,) = find_scopes(chain(f"{deep}/x", f"{deep}/y", "head")).values()
    assert found.path.count("/") == MAX_DEPTH - 1 and found.members == (1, 2)


def test_fold_replaces_closed_scopes_by_single_items():
    graph = chain("/a/Conv", "/a/b/Conv", "/a/b/Relu", "/a/Add", "head")
    scopes = find_scopes(graph)

    def items(*opened):
        view = fold(graph, scopes, opened)
        return [one.scope or graph.nodes[one.members[0]].name for one in view.items], list(view.edges)

    assert items() == (["input x", "a", "head"], [(0, 1), (1, 2)])
    names = ["input x", "/a/Conv", "a/b", "/a/Add", "head"]
    assert items("a") == (names, [(0, 1), (1, 2), (2, 3), (3, 4)])
    # An open scope in a closed scope is not visible.
    assert items("a/b") == items()
    assert items("a", "a/b")[0] == [node.name for node in graph.nodes]
    assert not fold(graph, scopes, ("a", "a/b")).has_groups


def test_fold_keeps_all_edges_between_items():
    random = np.random.default_rng(0)
    names = [f"s{random.integers(3)}/t{random.integers(3)}/n{at}" for at in range(60)]
    graph = ModelGraph("onnx", "net", [GraphNode(name, "Op") for name in names], [])
    edges = [tuple(sorted(map(int, random.choice(60, 2, replace=False)))) for _ in range(150)]
    graph = ModelGraph("onnx", "net", graph.nodes, edges)
    scopes = find_scopes(graph)
    view = fold(graph, scopes, {"s1", "s2", "s2/t0"})
    holder = {member: at for at, item in enumerate(view.items) for member in item.members}
    assert sorted(holder) == list(range(60))
    assert set(view.edges) == {(holder[a], holder[b]) for a, b in edges if holder[a] != holder[b]}


def test_small_graph_is_open_by_default():
    graph = chain(*(f"a/b{at // 10}/n{at}" for at in range(100)))
    scopes = find_scopes(graph)
    assert choose_open_scopes(scopes, len(graph.nodes)) == set(scopes)


def test_large_graph_opens_outer_scopes_and_the_shown_node():
    graph = chain(*(f"m/b{at // 100}/l{at // 10 % 10}/n{at}" for at in range(3000)), "head")
    scopes = find_scopes(graph)
    opened = choose_open_scopes(scopes, len(graph.nodes), [1 + 1234])
    assert {"m", "m/b12", "m/b12/l3"} <= opened and "m/b29/l9" not in opened
    view = fold(graph, scopes, opened)
    assert len(view.items) <= MAX_VISIBLE
    assert [one.members for one in view.items if 1235 in one.members] == [(1235,)]
    inner = find_inner_scopes(scopes)
    assert [inner[1235], *list_outer_scopes(scopes, inner[1235])] == ["m/b12/l3", "m/b12", "m"]


def test_default_of_flat_graph_is_empty():
    assert choose_open_scopes(find_scopes(chain(*map(str, range(1000)))), 1001) == set()
