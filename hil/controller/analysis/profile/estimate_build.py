"""What happens in the isolated process: an ONNX model's nodes and shapes. Nothing here is called by the controller."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hil.controller.analysis.profile.estimate_ops import operations


def read(model: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read a model's nodes and the types of its values.

    Args:
        model: the ONNX file.
        dims: sizes of symbolic dimensions.

    Returns:
        ``nodes``: [name, op_type, inputs, outputs, flops] each, in order, those of subgraphs too; ``values``: name ->
        [type as ``1x64xf32``, bytes] where the shape is known; ``results``: names of the model's outputs.
    """
    from onnx import helper

    from hil.controller.analysis.layers.prepare import captured, prepared
    from hil.controller.models.importers.onnx import nodes_of

    graph = prepared(Path(model), dims).graph
    values: dict[str, tuple[list[int], int]] = {}
    for inner in _graphs(graph):
        for tensor in inner.initializer:
            values[tensor.name] = (list(tensor.dims), tensor.data_type)
        for value in (*inner.input, *inner.output, *inner.value_info):
            kind = value.type.tensor_type
            sizes = [dim.dim_value if dim.WhichOneof("value") == "dim_value" else -1 for dim in kind.shape.dim]
            if kind.HasField("shape") and min(sizes, default=0) >= 0:
                values[value.name] = (sizes, kind.elem_type)
    nodes = []
    for node in nodes_of(graph.node):
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        given = {name: value.decode() if isinstance(value, bytes) else value for name, value in given.items()}
        ins, outs = (
            [values[name][0] if name in values else None for name in names] for names in (node.input, node.output)
        )
        flops = operations(node.op_type, ins, outs, given) if node.domain in ("", "ai.onnx") else None
        nodes.append([node.name, node.op_type, [*filter(None, node.input), *captured(node)], list(node.output), flops])
    types = {name: _told(shape, number) for name, (shape, number) in values.items()}
    return {
        "nodes": nodes,
        "values": {name: told for name, told in types.items() if told is not None},
        "results": [value.name for value in graph.output],
    }


def _graphs(graph: Any) -> Iterator[Any]:
    from hil.controller.analysis.layers.prepare import subgraphs

    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def _told(shape: list[int], number: int) -> tuple[str, int] | None:
    from hil.core.tensors import SUB_BYTE_BITS, TensorSpec, dtype_of
    from hil.errors import UsageError
    from hil.formats.iree_values import mlir_type
    from hil.formats.ort_values import ONNX_TYPES

    dtype = next((name for name, known in ONNX_TYPES.items() if known == number), "")
    try:
        bits = SUB_BYTE_BITS.get(dtype) or dtype_of(dtype).itemsize * 8
        text = mlir_type(TensorSpec("", dtype, tuple(shape)))
    except UsageError:  # strings, and dtypes that have no such name
        return None
    return text.removeprefix("tensor<").removesuffix(">"), -(-math.prod(shape) * bits // 8)
