from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hil.controller.models.importers.onnx_nodes import has_float64

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE


def made(nodes, initializers=(), functions=(), kind=FLOAT) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, kind, (4,)) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], list(initializers))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions))


def there_and_back(name: str) -> list[onnx.NodeProto]:
    return [helper.make_node("Cast", ["x"], [name], to=DOUBLE), helper.make_node("Cast", [name], ["y"], to=FLOAT)]


def test_has_float64_returns_false_for_float32_model() -> None:
    node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3], pads=[0, 1])
    assert not has_float64(made([node], [numpy_helper.from_array(np.ones(3, np.float32), "w")]))


@pytest.mark.parametrize("where", ["input", "cast", "initializer", "constant", "subgraph", "function"])
def test_has_float64_searches_whole_model(where: str) -> None:
    relu = helper.make_node("Relu", ["x"], ["y"])
    wide = numpy_helper.from_array(np.ones(3), "w")
    branch = helper.make_graph(there_and_back("d"), "b", [], [helper.make_tensor_value_info("y", FLOAT, (4,))])
    choice = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    own = helper.make_function("own", "F", ["x"], ["y"], there_and_back("d"), [helper.make_opsetid("", 17)])
    model = {
        "input": made([relu], kind=DOUBLE),
        "cast": made(there_and_back("d")),
        "initializer": made([relu], [wide]),
        "constant": made([helper.make_node("Constant", [], ["c"], value=wide), relu]),
        "subgraph": made([choice]),
        "function": made([helper.make_node("F", ["x"], ["y"], domain="own")], functions=[own]),
    }[where]
    assert has_float64(model)
