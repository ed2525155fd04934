"""Constants and what follows from them: computed once, so that layers hold values. In isolated processes only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hil.controller.analysis.layers.prepare import draws, reads

# A quantised weight stays one, with the operator that dequantises it.
_KEPT = frozenset(["QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"])
_OF_SHAPES = frozenset(["Shape", "Size"])
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
# A constant larger than this, and than what it is made of, stays the operator that makes it.
_LARGE_BYTES = 1 << 20


def fold(model: Any) -> None:
    """Replace nodes by initializers, in place, where their results follow from constants and fixed shapes alone."""
    from hil.controller.backends.compilers.onnx_to_mlir import infer
    from hil.controller.models.importers.onnx import light_copy

    while _fold_once(model):
        # What was just computed may tell the shapes that a Reshape or an Expand makes, and they further constants.
        infer(model, light_copy(model))


def _fold_once(model: Any) -> bool:
    """One pass over the nodes; whether shapes might now be known that were not."""
    import onnx

    graph = model.graph
    known = {tensor.name: tensor for tensor in graph.initializer if tensor.data_location != 1}
    types = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        if tensor.name not in known:
            types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    kept, was_more = [], False
    for node in graph.node:
        if not _is_foldable(node, known, types) or (made := _evaluated(model, node, known, types)) is None:
            kept.append(node)
            continue
        known |= {tensor.name: tensor for tensor in made}
        graph.initializer.extend(made)
        was_more |= node.op_type != "Constant"
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)
    return was_more


def _is_foldable(node: Any, known: Mapping[str, Any], types: dict[str, Any]) -> bool:
    if node.domain not in _DOMAINS or node.op_type in _KEPT or draws(node, known):
        return False
    if node.op_type in _OF_SHAPES and static_shape(types.get(node.input[0])) is not None:
        return True
    if any(name not in known for name in reads(node)):
        return False
    return all((size := _bytes(types.get(name))) is None or size <= _LARGE_BYTES for name in node.output) or (
        _shrinks(node, known, types)
    )


def _shrinks(node: Any, known: Any, types: dict[str, Any]) -> bool:
    """Whether a node's results are no larger than what it uses."""
    taken = sum(known[name].ByteSize() for name in reads(node))
    return bool(sum(_bytes(types.get(name)) or 0 for name in node.output) <= taken)


def _evaluated(model: Any, node: Any, known: dict[str, Any], types: dict[str, Any]) -> list[Any] | None:
    """A node's results as tensors; None where onnx's evaluator does not know the operator, or gives no tensors."""
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    names = [name for name in node.output if name]
    given: dict[str, Any] = {}
    for name in reads(node):
        if name in known:
            given[name] = numpy_helper.to_array(known[name])
        else:
            # Of a Shape's input the evaluator needs the shape alone: this takes one element's memory.
            given[name] = np.broadcast_to(np.float32(0), static_shape(types[name]) or ())
    inputs = [helper.make_empty_tensor_value_info(name) for name in given]
    outputs = [helper.make_empty_tensor_value_info(name) for name in names]
    graph = helper.make_graph([node], "constant", inputs, outputs)
    try:
        one = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
        with np.errstate(all="ignore"):
            values = ReferenceEvaluator(one).run(None, given)
        if not all(isinstance(value, (np.ndarray, np.generic)) for value in values):
            return None
        tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in zip(names, values, strict=True)]
    except Exception as error:  # then the node stays what it is
        print(f"note: node {node.name!r} ({node.op_type}) is left as it is: {error}", flush=True)
        return None
    for tensor in tensors:
        declared = types[tensor.name].tensor_type.elem_type if tensor.name in types else 0
        if declared not in (0, tensor.data_type):
            return None
    return tensors


def static_shape(kind: Any) -> tuple[int, ...] | None:
    """The shape of a tensor's type where every dimension is a number, else None."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    sizes = tuple(dim.dim_value for dim in dims)
    return sizes if all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims) else None


def _bytes(kind: Any) -> int | None:
    """Bytes of a tensor of this type, or None where they are not known."""
    from onnx import helper

    shape = static_shape(kind)
    if shape is None or not kind.tensor_type.elem_type:
        return None
    return math.prod(shape) * int(helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type).itemsize)
