"""Inline local functions of ONNX models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# onnx's inliner only supports models that fit into a protobuf message.
MAX_INLINED_BYTES = (2 << 30) - 1


def inline_functions(model: Any) -> Any:
    """Return a copy of a model with its functions inlined.

    Attribute defaults are first copied into the calls, because onnx's inliner drops them.
    """
    from onnx import ModelProto, inliner

    copy = ModelProto()
    copy.CopyFrom(model)
    functions = {(one.domain, one.name, one.overload): one for one in copy.functions}
    bodies: list[Any] = [copy.graph, *copy.functions]
    for body in bodies:
        for node in _iter_nodes(body.node):
            function = functions.get((node.domain, node.op_type, node.overload))
            given = {attribute.name for attribute in node.attribute}
            defaults = function.attribute_proto if function is not None else ()
            node.attribute.extend(default for default in defaults if default.name not in given)
    return inliner.inline_local_functions(copy)


def _iter_nodes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _iter_nodes(graph.node)
