"""Convert TensorFlow and TFLite models to ONNX with tf2onnx. Runs in an isolated process."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.compiling import EXTERNAL_FROM_BYTES, report_phase
from hil.controller.models.description import check_dims
from hil.controller.models.tensorflow.graphs import format_converter_error, format_error
from hil.controller.models.tensorflow.source import make_spec, name_outputs, open_model
from hil.controller.storage.screen.texts import convert_foreign_errors, make_unique_name
from hil.core.tensors import TensorSpec
from hil.errors import CompileFailed, LoadFailed
from hil.formats.litert import open_signature
from hil.formats.ort_values import ONNX_TYPES

_OPSET = 18  # newest opset of tf2onnx 1.17
_HINT = "run the whole model without ONNX (hil run), or pass an ONNX file from a different exporter"

# Parts to remove from node names: enclosing calls, and counters of tf2onnx and TensorFlow that differ between
# processes.
_NOISE = re.compile(r"^(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)+|_frozen_\d+|__\d+")


def to_onnx(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a function of a TensorFlow model as ONNX. Variables become constants; nodes have TensorFlow's names."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
    from tf2onnx.tf_loader import tf_optimize

    source = open_model(path, function, dims)
    if source.assigned:
        raise CompileFailed(
            f"ONNX models do not return updated variables: {', '.join(list(source.assigned)[:4])}",
            hint=_HINT,
        )
    _unroll_layers(source.model)
    outputs: list[TensorSpec] = []

    def call_flat(*tensors: object) -> list[object]:
        results = name_outputs(source.call(list(tensors)), getattr(source.model, "output_names", ()))
        outputs[:] = [make_spec(name, leaf) for name, leaf in results]
        return [tf.identity(leaf) for _, leaf in results]

    report_phase("trace")
    with convert_foreign_errors(CompileFailed, f"TensorFlow cannot trace {source.name}", error_text=format_error):
        # Use generated names: two arguments of a call may have the same name.
        specs = [tf.TensorSpec(spec.shape, spec.dtype, f"input{number}") for number, spec in enumerate(source.specs)]
        concrete = tf.function(call_flat, autograph=False).get_concrete_function(*specs)
    report_phase("freeze the variables")
    with convert_foreign_errors(
        CompileFailed, f"cannot freeze the variables of {source.name}", error_text=format_converter_error
    ):
        frozen = convert_variables_to_constants_v2(concrete, lower_control_flow=False, aggressive_inlining=True)
        tensors = [tensor.name for tensor in frozen.inputs], [tensor.name for tensor in frozen.outputs]
        with tf.Graph().as_default():
            graph = tf_optimize(*tensors, frozen.graph.as_graph_def())
    model = _convert_graph(Path(path).name, tensors, (source.inputs, outputs), graph=graph)
    _write_model(model, function, source.inputs, outputs, Path(output))


def _unroll_layers(model: Any) -> None:
    """Unroll recurrent layers of a Keras model, because IREE cannot compile the ONNX operator Loop.

    Layers with a dynamic number of steps stay loops.
    """
    import keras

    if not isinstance(model, keras.Model):
        return

    def call(layer: Any, inner: Any, sequence: Any, *args: Any, **kwargs: Any) -> Any:
        layer.unroll = layer.unroll or sequence.shape[1] is not None
        return inner(sequence, *args, **kwargs)

    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN):
            layer.call = functools.partial(call, layer, layer.call)


def tflite_to_onnx(path: str, function: str, output: str, dims: Mapping[str, int]) -> None:
    """Write a function of a TFLite model as ONNX. Quantised inputs and outputs stay integers."""
    file = Path(path)
    try:
        opened = open_signature(file, function, kernels="builtin")
    except LoadFailed as error:
        raise error.as_kind(CompileFailed) from error
    if opened.graph:
        raise CompileFailed(
            f"tf2onnx converts only the first graph of {file.name}, not that of {opened.name!r}", hint=_HINT
        )
    check_dims(file.name, dims, {dim for spec in opened.inputs for dim in spec.shape if isinstance(dim, str)})
    inputs = [replace(spec, shape=tuple(dims.get(str(dim), dim) for dim in spec.shape)) for spec in opened.inputs]
    model = _convert_graph(file.name, opened.list_tensor_names(), (inputs, opened.outputs), tflite_path=path)
    _write_model(model, function, inputs, opened.outputs, Path(output))


def _convert_graph(
    name: str,
    tensors: tuple[Sequence[str], Sequence[str]],
    specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    *,
    graph: Any = None,
    tflite_path: str | None = None,
) -> Any:
    """Convert a graph to an ONNX model with hil's names for inputs and outputs."""
    import tensorflow as tf
    from tf2onnx import optimizer
    from tf2onnx.tfonnx import process_tf_graph

    takes, gives = ([spec.name for spec in side] for side in specs)
    if both := sorted(set(takes) & set(gives)):
        raise CompileFailed(
            f"{both[0]!r} is both an input and an output of {name}: ONNX requires different names", hint=_HINT
        )
    report_phase("tf2onnx: convert")
    with (
        convert_foreign_errors(CompileFailed, f"tf2onnx cannot convert {name}", hint=_HINT),
        tf.Graph().as_default() as live,
    ):
        if graph is not None:
            tf.import_graph_def(graph, name="")
        converted = process_tf_graph(
            live,
            opset=_OPSET,
            continue_on_error=True,  # hil reports all unknown operators together below
            custom_op_handlers={"Erfc": (_write_erfc, []), "TFL_GELU": (_write_gelu, [])},
            input_names=list(tensors[0]),
            output_names=list(tensors[1]),
            tensors_to_rename=dict(zip((*tensors[0], *tensors[1]), (*takes, *gives), strict=True)),
            tflite_path=tflite_path,
        )
        return optimizer.optimize_graph(converted).make_model(name)


def _write_erfc(graph: Any, node: Any, name: str, arguments: list[Any]) -> None:
    """Write 1 - erf(x), a part of Keras' GELU."""
    write = _NodeReplacer(graph, node)
    write("Sub", write.add_constant(1), write("Erf", write.x), last=True)


def _write_gelu(graph: Any, node: Any, name: str, arguments: list[Any]) -> None:
    """Write TFLite's GELU: x / 2 * (1 + erf(x / sqrt(2))), or the approximation with tanh."""
    write = _NodeReplacer(graph, node)
    approximate, x = bool(node.get_attr_value("approximate")), write.x
    if approximate:
        cube = write("Mul", write("Mul", write("Mul", x, x), x), write.add_constant(0.044715))
        curve = write("Tanh", write("Mul", write("Add", x, cube), write.add_constant(math.sqrt(2 / math.pi))))
    else:
        curve = write("Erf", write("Div", x, write.add_constant(math.sqrt(2))))
    half = write("Mul", x, write.add_constant(0.5))
    write("Mul", half, write("Add", curve, write.add_constant(1)), last=True)


class _NodeReplacer:
    """Replaces a node that tf2onnx does not support by elementwise ONNX operators."""

    def __init__(self, graph: Any, node: Any) -> None:
        self._graph, self._name, self._outputs = graph, node.name, node.output
        self._types: dict[str, Any] = {"shapes": node.output_shapes, "dtypes": node.output_dtypes}
        (self.x,) = node.input
        graph.remove_node(node.name)

    def __call__(self, op: str, *inputs: str, last: bool = False) -> str:
        """Add an operator. The last operator gets the node's outputs."""
        name = self._name if last else self._make_name(op)
        outputs = {"outputs": self._outputs} if last else {}
        return str(self._graph.make_node(op, list(inputs), name=name, **outputs, **self._types).output[0])

    def add_constant(self, value: float) -> str:
        """Add a scalar constant of the node's dtype."""
        from tf2onnx.utils import map_onnx_to_numpy_type

        array = np.array(value, map_onnx_to_numpy_type(self._types["dtypes"][0]))
        return str(self._graph.make_const(self._make_name("const"), array).output[0])

    def _make_name(self, kind: str) -> str:
        from tf2onnx.utils import make_name

        return str(make_name(f"{self._name}/{kind}"))


def _write_model(
    model: Any, function: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], output: Path
) -> None:
    """Write the model with this signature. Weights of 256 MB or more go into a separate file in the same directory.

    Raises:
        CompileFailed: the model is invalid or has operators that ONNX does not define.
    """
    import onnx

    graph = model.graph
    _refuse_unknown(graph)
    made = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    for spec in outputs:
        if made.get(spec.name) != ONNX_TYPES[spec.dtype]:
            raise CompileFailed(f"tf2onnx changed the dtype of output {spec.name!r}: expected {spec.dtype}")
    for values, specs in ((graph.input, inputs), (graph.output, outputs)):
        del values[:]
        # Declare all inputs, also unused ones, in hil's order and with hil's symbols.
        values.extend(onnx.helper.make_tensor_value_info(one.name, ONNX_TYPES[one.dtype], one.shape) for one in specs)
    taken: set[str] = set()
    for node in graph.node:
        node.name = make_unique_name(_NOISE.sub("", node.name) or node.op_type, taken)
    graph.name = function or "main"  # ONNX requires a graph name
    heavy = sum(len(weight.raw_data) for weight in graph.initializer) > EXTERNAL_FROM_BYTES
    onnx.save(model, output, save_as_external_data=heavy, location=f"{output.name}.data")
    with convert_foreign_errors(CompileFailed, "tf2onnx generated an invalid ONNX model", hint=_HINT):
        onnx.checker.check_model(str(output))


def _refuse_unknown(graph: Any) -> None:
    import onnx

    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    unknown = sorted({node.op_type for node in _iter_nodes(graph) if node.domain or node.op_type not in known})
    if unknown:
        raise CompileFailed(f"tf2onnx: unsupported ops {', '.join(unknown)}", hint=_HINT)


def _iter_nodes(graph: Any) -> Any:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _iter_nodes(attribute.g)
