"""TensorFlow's functions looked into: nested arguments, StableHLO as text, errors (the texts are TensorFlow 2.21's)."""

from __future__ import annotations

from collections import namedtuple

import pytest

from hil.controller.models.tensorflow.graphs import (
    format_converter_error,
    format_error,
    iter_leaves,
    number_leaves,
    read_stablehlo,
    replace_leaves,
    restore,
)
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


def test_leaves_are_sorted_by_key():
    structure = {"b": [1, Pair(2, None)], "a": {"z": 3}}
    assert list(iter_leaves(structure)) == [("a.z", 3), ("b.0", 1), ("b.1.left", 2), ("b.1.right", None)]
    assert list(iter_leaves(5, "x")) == [("x", 5)]


def test_replace_leaves_and_restore_keep_structure():
    structure = {"b": [1.0, Pair(2.0, None)], "a": (3.0,)}
    assert replace_leaves(structure, lambda leaf: leaf and 2 * leaf) == {"b": [2.0, Pair(4.0, None)], "a": (6.0,)}
    assert number_leaves(structure) == {"b": [1, Pair(2, None)], "a": (0,)}
    assert list(number_leaves(structure)) == ["b", "a"]
    assert restore(number_leaves(structure), ["x", "y", "z"]) == {"b": ["y", Pair("z", None)], "a": ("x",)}
    # A bool is not an index.
    assert restore((True, 0), ["x"]) == (True, "x")


def test_read_stablehlo_replaces_mhlo_operations():
    text = read_stablehlo(TEXT)
    assert (text.arguments, text.aliases) == (2, {1: 1})
    assert "%1 = stablehlo.reshape %0 : (tensor<2xf32>) -> tensor<2xf32> loc(#loc5)" in text.mlir
    assert "%2 = chlo.erf %1 : tensor<2xf32> -> tensor<2xf32>" in text.mlir


def test_lowered_function_orders_assigned_variables():
    spec = TensorSpec("w", "float32", (2,))
    read_only, assigned, other = State(spec), State(spec, result=3), State(spec, result=2)
    function = LoweredFunction("", (spec,), (spec, spec), (read_only, assigned, other), {"a": 1, "b": [0, None]})
    assert function.assigned == (other, assigned)
    assert function.nest_outputs(["x", "y"]) == {"a": "y", "b": ["x", None]}
    assert LoweredFunction("", (), (), (read_only,), None).assigned == ()


XLA = """\
Failed getting HLO text: 'Detected unsupported operations when trying to compile graph __inference_f_1[] on \
XLA_CPU_JIT: Eig (No registered 'Eig' OpKernel for XLA_CPU_JIT devices compatible with node {{node Eig}}){{node Eig}}
The op is created at:\x20
File "model.py", line 15, in <module>
File "model.py", line 15, in f
\ttf2xla conversion failed while converting __inference_f_1[]. Run with TF_DUMP_GRAPH_PREFIX=/path/to/dump/dir and \
--vmodule=xla_compiler=2 to obtain a dump of the compiled functions.'
"""
LOOP = """\
Failed getting HLO text: 'XLA compilation requires a fixed tensor list size. Set the max number of elements.

Stack trace for op definition:\x20
File "model.py", line 22, in <module>

\t [[{{node while/accumulator}}]]
\ttf2xla conversion failed while converting __inference_loop_145[].'
"""
USER = """\
in user code:

    File "/model.py", line 14, in b  *
        z: int = x @ y

    ValueError: Dimensions must be equal, but are 3 and 4 for '{{node matmul}} = MatMul[](x, y)'.
    A second line.
"""
KERAS = """\
Exception encountered when calling Sequential.call().

\x1b[1mInput 0 of layer 'dense' is incompatible with the layer\x1b[0m

Arguments received by Sequential.call():
  • inputs=tf.Tensor(shape=(2, 5), dtype=float32)
  • training=None
"""
GRAPH = """\
Graph execution error:

Detected at node Reshape defined at (most recent call last):
  File "/model.py", line 28, in <module>

  File "/model.py", line 27, in d

Input to reshape is a tensor with 4 values, but the requested shape has 6
\t [[{{node Reshape}}]] [Op:__inference_d_58]
"""
EAGER = "{{function_node __wrapped__MatMul_device_/job:localhost}} In[0] ndims must be >= 2 [Op:MatMul] name: "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            XLA,
            "RuntimeError: Detected unsupported operations when trying to compile graph __inference_f_1[] on "
            "XLA_CPU_JIT: Eig (No registered 'Eig' OpKernel for XLA_CPU_JIT devices compatible with node Eig)",
        ),
        (LOOP, "RuntimeError: XLA compilation requires a fixed tensor list size. Set the max number of elements."),
        (
            USER,
            "ValueError: Dimensions must be equal, but are 3 and 4 for 'matmul = MatMul[](x, y)'. A second line.",
        ),
        (
            KERAS,
            "RuntimeError: Exception encountered when calling Sequential.call(). Input 0 of layer 'dense' is "
            "incompatible with the layer",
        ),
        (GRAPH, "RuntimeError: Input to reshape is a tensor with 4 values, but the requested shape has 6"),
        (EAGER, "RuntimeError: In[0] ndims must be >= 2"),
        ("one\ntwo\nthree\nfour\nfive", "RuntimeError: one two three four five"),
        ("", "RuntimeError"),
    ],
)
def test_error_text_extracts_message(text, told):
    assert format_error(RuntimeError(text)) == told


def test_converter_text_removes_duplicates():
    refused = "'tf.Erf' op is no custom op"
    text = f'x: error: loc(callsite(fused["Erf:", "Erf@f"] at "g")): {refused}\n  code\nx.py:3: error: {refused}\n^'
    assert format_converter_error(RuntimeError(text)) == refused
    assert format_converter_error(ValueError("nothing\nelse")) == "ValueError: nothing else"
