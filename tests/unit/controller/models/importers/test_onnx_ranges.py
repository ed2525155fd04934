from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hil.controller.models.importers.onnx_ranges import find_ranges

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def ranges(nodes, inputs, outputs=(), initializers=()) -> dict[str, tuple[float, float]]:
    """The ranges of the inputs ``i`` and ``j`` of a graph; inputs are name -> shape, those of floats upper case."""
    values = [
        helper.make_tensor_value_info(name, FLOAT if name.isupper() else INT64, shape) for name, shape in inputs.items()
    ]
    made = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in dict(outputs).items()]
    graph = helper.make_graph(nodes, "g", values, made, list(initializers))
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets), data_prop=True)
    return find_ranges(model.graph, [name for name in inputs if name in "ij"])


def node(op: str, *inputs: str, domain: str = "", **attributes) -> onnx.NodeProto:
    return helper.make_node(op, inputs, ["Y", "Z"] if op == "TopK" else ["Y"], domain=domain, **attributes)


CACHES = {"C": (32, 4), "S": (32, 4)}


MS = "com.microsoft"


@pytest.mark.parametrize(
    ("used", "inputs", "expected"),
    [
        (node("Gather", "X", "i", axis=-1), {"X": (2, 9), "i": (3,)}, (0, 8)),
        (node("GatherElements", "X", "i", axis=1), {"X": (2, 9), "i": (2, 3)}, (0, 8)),
        (node("ScatterElements", "X", "i", "U"), {"X": (7, 9), "i": (2, 3), "U": (2, 3)}, (0, 6)),
        (node("GatherND", "X", "i"), {"X": (64, 5, 9), "i": (16, 2)}, (0, 4)),
        (node("GatherND", "X", "i"), {"X": (64, 5, 9), "i": (16, 1)}, (0, 63)),
        (node("GatherND", "X", "i", batch_dims=1), {"X": (2, 8, 3), "i": (2, 1)}, (0, 7)),
        (node("GatherND", "X", "i"), {"X": (64, 5), "i": (16, 3)}, None),
        (node("ScatterND", "X", "i", "U"), {"X": (8, 4, 6), "i": (5, 3), "U": (5,)}, (0, 3)),
        (node("OneHot", "i", "d", "V"), {"i": (3,), "d": (1,), "V": (2,)}, None),
        (node("TopK", "X", "i", axis=0), {"X": (6, 9), "i": (1,)}, (1, 6)),
        (node("CumSum", "X", "i"), {"X": (6, 9, 2), "i": ()}, (0, 2)),
        (node("ReduceMax", "X", "i"), {"X": (6, 9, 2), "i": (1,)}, (0, 2)),
        (node("ReduceMax", "X", "i"), {"X": (6, 9, 2), "i": (2,)}, None),
        (node("TensorScatter", "X", "U", "i"), {"X": (1, 2, 16, 4), "U": (1, 2, 3, 4), "i": (1,)}, (0, 13)),
        (node("RotaryEmbedding", "X", "C", "S", "i"), {"X": (1, 2, 3, 8), **CACHES, "i": (1, 3)}, (0, 31)),
        (node("GatherBlockQuantized", "X", "i", "S", domain=MS), {"X": (9, 16), "i": (3,), "S": (9, 1)}, (0, 8)),
        (node("GatherND", "X", "i", domain=MS), {"X": (64, 5), "i": (16, 2)}, (0, 4)),
        (
            node("RotaryEmbedding", "X", "i", "C", "S", domain=MS),
            {"X": (1, 2, 3, 8), "i": (1,), **CACHES},
            (0, 29),
        ),
        (
            node("EmbedLayerNormalization", "i", "", "W", "P", "", "G", "B", domain=MS),
            {"i": (1, 3), "W": (11, 4), "P": (8, 4), "G": (4,), "B": (4,)},
            (0, 10),
        ),
        (node("Gather", "X", "i"), {"X": ("N", 9), "i": (3,)}, None),
    ],
)  # fmt: skip
def test_operator_limits_index_range(used, inputs, expected) -> None:
    found = ranges([used], inputs)
    assert found == ({} if expected is None else {"i": expected})


CHAIN = {
    "Cast": (lambda: helper.make_node("Cast", ["i"], ["c"], to=INT64)),
    "Reshape": (lambda: helper.make_node("Reshape", ["i", "shape"], ["c"])),
    "Concat": (lambda: helper.make_node("Concat", ["shape", "i"], ["c"], axis=0)),
    "Slice": (lambda: helper.make_node("Slice", ["i", "zero", "shape"], ["c"])),
    "Split": (lambda: helper.make_node("Split", ["i"], ["other", "c"], num_outputs=2)),
    "Where": (lambda: helper.make_node("Where", ["b", "shape", "i"], ["c"])),
    "Gather": (lambda: helper.make_node("Gather", ["i", "zero"], ["c"])),
}


@pytest.mark.parametrize("op", CHAIN)
def test_range_passes_through_data_movement(op: str) -> None:
    constants = [
        numpy_helper.from_array(np.array([4]), "shape"),
        numpy_helper.from_array(np.array([0]), "zero"),
        numpy_helper.from_array(np.array([True]), "b"),
    ]
    nodes = [CHAIN[op](), helper.make_node("Gather", ["X", "c"], ["Y"])]
    assert ranges(nodes, {"X": (7, 2), "i": (4,)}, initializers=constants) == {"i": (0, 6)}


def test_smallest_range_wins() -> None:
    nodes = [helper.make_node("Gather", ["X", "i"], ["Y"]), helper.make_node("Gather", ["Z", "i"], ["V"])]
    assert ranges(nodes, {"X": (7, 2), "Z": (3, 2), "i": (4,)}) == {"i": (0, 2)}


def test_range_search_includes_subgraphs() -> None:
    out = helper.make_tensor_value_info("Y", FLOAT, (4, 2))
    branch = helper.make_graph([helper.make_node("GatherND", ["X", "j"], ["Y"])], "b", [], [out])
    choice = helper.make_node("If", ["i"], ["V"], then_branch=branch, else_branch=branch)
    assert ranges([choice], {"X": (7, 2), "j": (4, 1), "i": ()}) == {"j": (0, 6)}


def test_constant_node_limits_range() -> None:
    table = numpy_helper.from_array(np.zeros((5, 2), np.float32))
    nodes = [helper.make_node("Constant", [], ["T"], value=table), helper.make_node("Gather", ["T", "i"], ["Y"])]
    assert ranges(nodes, {"i": (4,)}) == {"i": (0, 4)}
