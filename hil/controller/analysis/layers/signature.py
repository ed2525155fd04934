"""What makes two layers the same: of one kind, all but their names, their weights and what goes into them; of one
content, these too. Called in isolated processes only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from hil.controller.analysis.layers.graph import Graph
from hil.controller.analysis.layers.prepare import subgraphs
from hil.core.digest import digest_of

# Operators whose constant inputs say what they do, as attributes do.
_PARAMETERS = frozenset(
    "Clip Pad Resize Upsample OneHot Range Dropout CumSum Trilu TopK RoiAlign Pow NonMaxSuppression".split()
)
# So do short lists of integers and bools anywhere else (axes, starts, sizes), but where they are quantised weights.
_INTEGERS = (6, 7, 9)
_SHORT = 64


def signature_of(graph: Graph, nodes: Sequence[int], outputs: Sequence[str]) -> str:
    """A digest of operators, attributes, how they are connected, and the dtypes and shapes of inputs and outputs.

    Args:
        graph: what the nodes are of.
        nodes: numbers of the layer's nodes, in order.
        outputs: names of the values that the layer gives.
    """
    look = _Look(graph)
    told = [look.node(graph.nodes[number]) for number in nodes]
    told.append([[look.value(name), graph.type_of(name)] for name in outputs])
    return digest_of(json.dumps(told).encode())


def content_of(graph: Graph, nodes: Sequence[int], outputs: Sequence[str], inputs: Sequence[str]) -> str:
    """A digest that two layers share only if they compute the same from the same values, whatever the model is run on.

    Args:
        graph: what the nodes are of.
        nodes: numbers of the layer's nodes, in order.
        outputs: names of the values that the layer gives.
        inputs: what tells each value that it takes from other values of the model, in the layer's order.
    """
    told = [signature_of(graph, nodes, outputs), *inputs]
    for number in nodes:
        told += [digest for name in graph.reads(number) if (digest := graph.digest_of_constant(name))]
        if graph.draws(number):
            told.append(graph.nodes[number].name)
        # A body's constants are told with its names: two bodies of other names are taken for different.
        told += [digest_of(body.SerializeToString(deterministic=True)) for body in subgraphs(graph.nodes[number])]
    return digest_of(json.dumps(told).encode())


class _Look:
    """Values by the order in which they are first met, so that names do not count."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._met: dict[str, int] = {}

    def node(self, node: Any) -> list[Any]:
        used = [self._used(node, name) for name in node.input]
        attributes = sorted((self._attribute(item) for item in node.attribute), key=json.dumps)
        return [node.domain, node.op_type, used, attributes, [self.value(name) for name in node.output]]

    def value(self, name: str) -> int:
        return self._met.setdefault(name, len(self._met)) if name else -1

    def _used(self, node: Any, name: str) -> list[Any]:
        is_new = name not in self._met
        told: list[Any] = [self.value(name)]
        tensor = self._graph.constant(name)
        if tensor is None:
            return [*told, self._graph.type_of(name)] if is_new else told
        return [*told, tensor.data_type, list(tensor.dims), self._parameter(node, tensor)]

    def _parameter(self, node: Any, tensor: Any) -> str:
        """The value of a constant that is no weight, as a digest; "" for a weight."""
        is_quantised = "Linear" in node.op_type or "Integer" in node.op_type
        if node.op_type in _PARAMETERS or (tensor.data_type in _INTEGERS and not is_quantised):
            return _short_value(tensor)
        return ""

    def _attribute(self, attribute: Any) -> list[Any]:
        from onnx import NodeProto

        holder = NodeProto(attribute=[attribute])
        if graphs := subgraphs(holder):
            return [attribute.name, [self._subgraph(graph) for graph in graphs]]
        plain = type(attribute)()
        plain.CopyFrom(attribute)
        plain.doc_string = ""
        return [attribute.name, plain.SerializeToString(deterministic=True).hex()]

    def _subgraph(self, graph: Any) -> list[Any]:
        inputs = [
            [self.value(item.name), item.type.SerializeToString(deterministic=True).hex()] for item in graph.input
        ]
        held = [
            [self.value(item.name), item.data_type, list(item.dims), _short_value(item)] for item in graph.initializer
        ]
        nodes = [self.node(node) for node in graph.node]
        return [inputs, held, nodes, [self.value(item.name) for item in graph.output]]


def _short_value(tensor: Any) -> str:
    """A digest of a constant of few elements; "" for a larger one."""
    from onnx import numpy_helper

    if tensor.data_location == 1 or math.prod(tensor.dims) > _SHORT:
        return ""
    return digest_of(repr(numpy_helper.to_array(tensor).tolist()).encode())
