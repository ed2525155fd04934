"""Rewrite an ONNX model to emulate a narrower arithmetic on any runtime. Simulated boards use this.

float16, bfloat16: each value is rounded by a cast to the narrow type and back. Operators compute with
rounded values, but accumulate in the runtime's arithmetic. Weights are rounded in the file, and saturate.

int8: operands of matrix products and convolutions are quantized symmetrically. Weights have a scale per output channel.
Other operands have a scale per tensor, computed from the tensor's range at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from hil.core.arithmetic import FLOATS, INT8, INT8_LEVELS
from hil.core.tensors import Array, parse_dtype
from hil.formats.onnx_file import iter_subgraphs, set_nodes

# Operators that multiply and sum their first two inputs.
_CONTRACTIONS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
# Operators with data only in the first input; the other inputs determine shapes and stay unchanged.
_PARAMETRIC = frozenset({"Resize", "Upsample"})
# Numbers of ONNX element types, and the types that are wider than each arithmetic.
_FLOAT, _FLOAT16, _DOUBLE, _BFLOAT16 = 1, 10, 11, 16
_NUMBERS = {"float16": _FLOAT16, "bfloat16": _BFLOAT16}
_WIDER = {"float16": {_FLOAT, _DOUBLE}, "bfloat16": {_FLOAT, _DOUBLE, _FLOAT16}, INT8: {_FLOAT, _DOUBLE}}
_EXTERNAL = 1
_TINY = 1e-30
Types = Mapping[str, int]


def rewrite(model: Any, arithmetic: str) -> Any:
    """Return the model with the arithmetic applied to its graph; inputs and outputs keep names and types.

    Args:
        model: an ``onnx.ModelProto`` without local functions. External weights stay in their files.
    """
    import onnx

    made = onnx.ModelProto()
    made.CopyFrom(model)
    change = _quantize_graph if arithmetic == INT8 else partial(_round_graph, arithmetic=arithmetic)
    _walk(made.graph, _infer_types(model).graph, {}, change)
    if arithmetic != INT8:
        # Subgraph inputs are already rounded by their producers.
        types = {value.name: value.type.tensor_type.elem_type for value in made.graph.input}
        held = {tensor.name for tensor in made.graph.initializer}
        given = [name for name, own in types.items() if name not in held and own in _WIDER[arithmetic]]
        _round_given(made.graph, types, given, arithmetic)
    _remove_unused(made.graph)
    del made.graph.value_info[:]
    return made


def _infer_types(model: Any) -> Any:
    """Return the model with inferred types for inner values, as far as onnx can infer them."""
    import onnx

    try:
        return onnx.shape_inference.infer_shapes(model)
    except Exception:  # inference fails above 2 GB or with unknown operators: use only declared types
        return model


def _remove_unused(graph: Any) -> None:
    """Remove constants that are no longer used."""
    used = {name for node in _iter_nodes(graph) for name in node.input} | {value.name for value in graph.output}
    used |= {value.name for value in graph.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _walk(graph: Any, typed: Any, outer: Types, change: Callable[[Any, Types], None]) -> None:
    """Apply a change to the subgraphs of a graph, then to the graph. ``typed`` is the same graph with types."""
    types = dict(outer)
    for value in (*typed.input, *typed.value_info, *typed.output):
        if value.type.tensor_type.elem_type:
            types[value.name] = value.type.tensor_type.elem_type
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node, shaped in zip(graph.node, typed.node, strict=True):
        for inner, inner_typed in zip(iter_subgraphs(node), iter_subgraphs(shaped), strict=True):
            _walk(inner, inner_typed, types, change)
    change(graph, types)


def _read_constants(graph: Any) -> dict[str, Any]:
    """Return a graph's constant tensors by name: initializers, and values of Constant nodes."""
    found = {tensor.name: tensor for tensor in graph.initializer if tensor.data_location != _EXTERNAL}
    for node in graph.node:
        if node.op_type == "Constant":
            found.update((node.output[0], one.t) for one in node.attribute if one.name == "value")
    return found


def _round_graph(graph: Any, types: Types, arithmetic: str) -> None:
    """Round all node outputs and constants in a graph."""
    wider = _WIDER[arithmetic]
    parameters = {name for node in graph.node if node.op_type in _PARAMETRIC for name in node.input[1:]}
    constants = _read_constants(graph)
    for name, tensor in constants.items():
        if tensor.data_type in wider and name not in parameters:
            _replace(tensor, partial(_round_constant, arithmetic=arithmetic))
    nodes: list[Any] = []
    for node in graph.node:
        nodes.append(node)
        for place, name in enumerate(node.output):
            if types.get(name) in wider and name not in constants and name not in parameters:
                node.output[place] = f"{name}/wide"
                nodes += _make_casts(node.output[place], name, types[name], arithmetic)
    set_nodes(graph, nodes)
    external = [tensor.name for tensor in graph.initializer if tensor.data_location == _EXTERNAL]
    _round_given(graph, types, [name for name in external if types[name] in wider], arithmetic)


def _round_given(graph: Any, types: Types, names: list[str], arithmetic: str) -> None:
    """Round graph inputs or external constants, which no node produces, before the nodes that use them."""
    casts = [cast for name in names for cast in _make_casts(name, f"{name}/narrow", types[name], arithmetic)]
    for node in _iter_nodes(graph):
        for place, name in enumerate(node.input):
            if name in names and not (node.op_type in _PARAMETRIC and place):
                node.input[place] = f"{name}/narrow"
    set_nodes(graph, [*casts, *graph.node])


def _make_casts(source: str, target: str, own: int, arithmetic: str) -> list[Any]:
    from onnx import helper

    narrow = f"{source}/{arithmetic}"
    return [
        helper.make_node("Cast", [source], [narrow], f"{target}/to_{arithmetic}", to=_NUMBERS[arithmetic]),
        helper.make_node("Cast", [narrow], [target], f"{target}/from_{arithmetic}", to=own),
    ]


def _round_constant(array: Array, arithmetic: str) -> Array:
    """Round a constant to nearest.

    Finite values stay finite: like converters, saturate the -3e38 of attention masks.
    """
    largest = FLOATS[arithmetic].largest
    saturated = np.where(np.isfinite(array), np.clip(array, -largest, largest), array)
    return np.asarray(saturated.astype(parse_dtype(arithmetic)).astype(array.dtype))


def _quantize_graph(graph: Any, types: Types) -> None:
    """Quantize the operands of a graph's contractions."""
    constants = _read_constants(graph)
    nodes: list[Any] = []
    for node in graph.node:
        for place in (0, 1) if node.op_type in _CONTRACTIONS else ():
            name = node.input[place]
            if types.get(name) not in _WIDER[INT8]:
                continue
            node.input[place] = quantized = f"{node.output[0]}/{place}/int8"
            if name in constants:
                weight = graph.initializer.add()
                weight.CopyFrom(constants[name])
                weight.name = quantized
                _replace(weight, partial(_quantize_constant, axis=_find_channel_axis(node, place)))
            else:
                nodes += _make_quantizing_nodes(name, quantized, types[name])
        nodes.append(node)
    set_nodes(graph, nodes)


def _find_channel_axis(node: Any, place: int) -> int | None:
    """Return the output channel axis for a constant operand; None for a single scale."""
    if node.op_type == "Gemm" and place == 1:
        return 0 if any(one.name == "transB" and one.i for one in node.attribute) else 1
    return {("Conv", 1): 0, ("ConvTranspose", 1): 1, ("MatMul", 1): -1}.get((node.op_type, place))


def _quantize_constant(array: Array, axis: int | None) -> Array:
    others = None if axis is None or array.ndim < 2 else tuple(n for n in range(array.ndim) if n != axis % array.ndim)
    largest = np.abs(array).max(axis=others, keepdims=True, initial=_TINY)
    scale = largest / INT8_LEVELS
    return np.asarray((np.rint(array / scale) * scale).astype(array.dtype))


def _make_quantizing_nodes(source: str, target: str, own: int) -> list[Any]:
    """Return nodes that quantize a tensor by its largest magnitude. The operators exist in every opset."""
    from onnx import helper

    def make_constant(name: str, value: float) -> Any:
        tensor = helper.make_tensor(name, own, [], [value])
        return helper.make_node("Constant", [], [f"{target}/{name}"], f"{target}/{name}", value=tensor)

    def make_node(kind: str, inputs: list[str], output: str, **attributes: Any) -> Any:
        names = [name if name == source else f"{target}/{name}" for name in inputs]
        made = output if output == target else f"{target}/{output}"
        return helper.make_node(kind, names, [made], f"{target}/{output}" if output != target else target, **attributes)

    return [
        make_constant("levels", float(INT8_LEVELS)),
        make_constant("tiny", _TINY),
        make_constant("half", 0.5),
        make_node("Abs", [source], "magnitudes"),
        make_node("ReduceMax", ["magnitudes"], "range", keepdims=0),
        make_node("Max", ["range", "tiny"], "largest"),
        make_node("Div", ["largest", "levels"], "scale"),
        make_node("Div", [source, "scale"], "steps"),
        make_node("Add", ["steps", "half"], "shifted"),
        make_node("Floor", ["shifted"], "integers"),
        make_node("Mul", ["integers", "scale"], target),
    ]


def _replace(tensor: Any, change: Callable[[Array], Array]) -> None:
    """Apply a change to a TensorProto's values."""
    from onnx import numpy_helper

    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))


def _iter_nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for inner in iter_subgraphs(node):
            yield from _iter_nodes(inner)
