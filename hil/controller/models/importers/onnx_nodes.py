"""Walk an ONNX model: nodes, subgraphs, functions and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hil.formats.onnx_file import iter_subgraphs
from hil.formats.ort_values import ONNX_TYPES

_WIDE = (ONNX_TYPES["float64"], ONNX_TYPES["complex128"])
# Attributes with an element type as value.
_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype", "stash_type")


def iter_tensors(model: Any) -> Iterator[Any]:
    """Iterate over every TensorProto of a model: initializers and attributes, including subgraphs and functions."""
    return (tensor for _, tensor in iter_labelled_tensors(model))


def iter_labelled_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield every TensorProto of a model with a label for messages: ``tensor 'w'``."""
    nodes = list_nodes(model)
    for graph in (model.graph, *(graph for node in nodes for graph in iter_subgraphs(node))):
        for tensor in graph.initializer:
            yield f"tensor {tensor.name!r}", tensor
        for sparse in graph.sparse_initializer:
            yield from _iter_parts(f"tensor {sparse.values.name!r}", sparse)
    held = [(attribute, label_node(node)) for node in nodes for attribute in node.attribute]
    held += [(one, f"function {function.name!r}") for function in model.functions for one in function.attribute_proto]
    for attribute, owner in held:
        label = f"attribute {attribute.name!r} of {owner}"
        for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
            yield label, tensor
        for sparse in (
            *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
            *attribute.sparse_tensors,
        ):
            yield from _iter_parts(label, sparse)


def _iter_parts(label: str, sparse: Any) -> Iterator[tuple[str, Any]]:
    yield f"{label} (values)", sparse.values
    yield f"{label} (indices)", sparse.indices


def has_float64(model: Any) -> bool:
    """Return True if a model declares a float64 or complex128 value or tensor, or casts to such a type."""
    if any(tensor.data_type in _WIDE for tensor in iter_tensors(model)):
        return True
    nodes = list_nodes(model)
    graphs = [model.graph, *(graph for node in nodes for graph in iter_subgraphs(node))]
    values = [value for graph in graphs for value in (*graph.input, *graph.output, *graph.value_info)]
    return any(value.type.tensor_type.elem_type in _WIDE for value in values) or any(
        attribute.name in _TYPE_ATTRIBUTES and attribute.i in _WIDE for node in nodes for attribute in node.attribute
    )


def iter_nodes(nodes: Any) -> Iterator[Any]:
    """Yield every node. Nodes of subgraphs follow their parent node."""
    for node in nodes:
        yield node
        for graph in iter_subgraphs(node):
            yield from iter_nodes(graph.node)


def list_graphs(graph: Any) -> list[Any]:
    """Return a graph and all subgraphs, outer graphs first."""
    return [graph, *(inner for node in iter_nodes(graph.node) for inner in iter_subgraphs(node))]


def list_nodes(model: Any) -> list[Any]:
    """Return every node of a model, including the nodes in functions."""
    return [node for body in (model.graph, *model.functions) for node in iter_nodes(body.node)]


def read_constants(graph: Any) -> dict[str, Any]:
    """Return the constant tensors in a graph or function by name, from initializers and Constant nodes."""
    found = {tensor.name: tensor for tensor in getattr(graph, "initializer", ())}
    for node in graph.node:
        if node.op_type == "Constant" and node.output and node.attribute and node.attribute[0].HasField("t"):
            found[node.output[0]] = node.attribute[0].t
    return found


def label_node(node: Any) -> str:
    """Return a label of a node for messages: the name, or the outputs if the node has no name."""
    return f"node {node.name!r}" if node.name else f"the node with outputs {', '.join(node.output) or 'none'}"
