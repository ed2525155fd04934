"""Nested structures and TensorFlow's StableHLO as text; neither needs TensorFlow."""

from __future__ import annotations

from collections import namedtuple

from hil.controller.models.tensorflow.graphs import leaves, numbered, read_stablehlo, replace_leaves, restore
from hil.controller.models.tensorflow.lower import LoweredFunction, State
from hil.core.tensors import TensorSpec

Pair = namedtuple("Pair", "left right")
TEXT = """\
module @m attributes {mhlo.input_output_alias = [{alias = {kind = "may_alias", parameter_index = array<i64>, \
parameter_number = 1 : i64}, output_index = array<i64: 1>}]} {
  func.func @main(%arg0: tensor<2xf32> loc("XLA_Args"), %arg1: tensor<2xf32> loc("XLA_Args")) \
-> (tensor<2xf32>, tensor<2xf32>) {
    %0 = stablehlo.add %arg0, %arg1 : tensor<2xf32>
    %1 = mhlo.copy %0 : tensor<2xf32> loc(#loc5)
    %2 = mhlo.erf %1 : tensor<2xf32>
    return %2, %1 : tensor<2xf32>, tensor<2xf32>
  }
}
"""


def test_leaves_come_sorted_by_key_with_their_paths():
    structure = {"b": [1, Pair(2, None)], "a": {"z": 3}}
    assert list(leaves(structure)) == [("a.z", 3), ("b.0", 1), ("b.1.left", 2), ("b.1.right", None)]
    assert list(leaves(5, "x")) == [("x", 5)]


def test_structures_keep_their_kind():
    structure = {"b": [1.0, Pair(2.0, None)], "a": (3.0,)}
    assert replace_leaves(structure, lambda leaf: leaf and 2 * leaf) == {"b": [2.0, Pair(4.0, None)], "a": (6.0,)}
    assert numbered(structure) == {"b": [1, Pair(2, None)], "a": (0,)}
    assert list(numbered(structure)) == ["b", "a"]
    assert restore(numbered(structure), ["x", "y", "z"]) == {"b": ["y", Pair("z", None)], "a": ("x",)}
    # A bool is no number of a place.
    assert restore((True, 0), ["x"]) == (True, "x")


def test_operations_of_mhlo_become_what_iree_knows():
    text = read_stablehlo(TEXT)
    assert (text.arguments, text.aliases) == (2, {1: 1})
    assert "%1 = stablehlo.reshape %0 : (tensor<2xf32>) -> tensor<2xf32> loc(#loc5)" in text.mlir
    assert "%2 = chlo.erf %1 : tensor<2xf32> -> tensor<2xf32>" in text.mlir


def test_the_variables_that_a_function_assigns_are_in_the_order_of_its_results():
    spec = TensorSpec("w", "float32", (2,))
    read_only, assigned, other = State(spec), State(spec, result=3), State(spec, result=2)
    function = LoweredFunction("", (spec,), (spec, spec), (read_only, assigned, other), {"a": 1, "b": [0, None]})
    assert function.assigned == (other, assigned)
    assert function.returned(["x", "y"]) == {"a": "y", "b": ["x", None]}
    assert LoweredFunction("", (), (), (read_only,), None).assigned == ()
