"""An ONNX model made ready to be taken apart or looked into. Called in isolated processes only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def prepared(path: Path, dims: Mapping[str, int]) -> Any:
    """The model as it is, with sizes fixed, local functions inlined, shapes inferred and every node named.

    Large external weights (see :mod:`hil.controller.compilers.onnx_to_mlir`) stay in their files.
    """
    from hil.controller.compilers.onnx_to_mlir import _infer
    from hil.controller.importers.onnx import light_copy

    model = loaded(path, dims)
    _infer(model, light_copy(model))
    name_nodes(model)
    return model


def loaded(path: Path, dims: Mapping[str, int]) -> Any:
    """The model with sizes fixed, small external weights read and local functions inlined."""
    import onnx
    from onnx import inliner

    from hil.controller.compilers.onnx_to_mlir import _load_small
    from hil.controller.importers.onnx import fix_dims, tensors_of

    model = onnx.load(path, load_external_data=False)
    initialised = {tensor.name for tensor in model.graph.initializer}
    fix_dims([value for value in model.graph.input if value.name not in initialised], dims)
    _load_small(model, path.parent)
    for tensor in tensors_of(model):
        if tensor.data_location == onnx.TensorProto.DEFAULT:
            # Said or not, it means the same: a layer is to be the same file wherever its weights came from.
            tensor.ClearField("data_location")
    model.graph.name = model.graph.name or "main_graph"
    return inliner.inline_local_functions(model) if model.functions else model


def name_nodes(model: Any) -> None:
    """Give every node, those of subgraphs too, a name that no other has."""
    from hil.controller.importers.onnx import nodes_of

    taken: set[str] = set()
    for number, node in enumerate(nodes_of(model.graph.node)):
        name = base = node.name or f"{node.op_type}_{number}"
        again = 1
        while name in taken:
            name, again = f"{base}_{again}", again + 1
        node.name = name
        taken.add(name)


def captured(node: Any) -> list[str]:
    """Names of outer values that a node's subgraphs use, in order of first use."""
    found: dict[str, None] = {}
    for graph in subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {item.values.name for item in graph.sparse_initializer}
        for inner in graph.node:
            found.update(dict.fromkeys(name for name in reads(inner) if name not in own))
            own.update(inner.output)
        found.update(dict.fromkeys(value.name for value in graph.output if value.name not in own))
    return list(found)


def subgraphs(node: Any) -> list[Any]:
    """The graphs among a node's attributes."""
    graphs = []
    for attribute in node.attribute:
        graphs += [attribute.g] if attribute.HasField("g") else []
        graphs += attribute.graphs
    return graphs


def reads(node: Any) -> list[str]:
    """Names of the values that a node uses, its subgraphs' included."""
    return list(dict.fromkeys([*(name for name in node.input if name), *captured(node)]))
