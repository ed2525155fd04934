"""TensorFlow's errors in a line; the texts are its own (2.21)."""

from __future__ import annotations

import pytest

from hil.controller.models.tensorflow.graphs import converter_words, words

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
def test_an_errors_own_message_is_told(text, told):
    assert words(RuntimeError(text)) == told


def test_the_converter_tells_each_operator_once():
    refused = "'tf.Erf' op is no custom op"
    text = f'x: error: loc(callsite(fused["Erf:", "Erf@f"] at "g")): {refused}\n  code\nx.py:3: error: {refused}\n^'
    assert converter_words(RuntimeError(text)) == refused
    assert converter_words(ValueError("nothing\nelse")) == "ValueError: nothing else"
