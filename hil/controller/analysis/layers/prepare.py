"""An ONNX model made ready to be taken apart or looked into. Called in isolated processes only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DRAWING = frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial".split())


def prepared(path: Path, dims: Mapping[str, int]) -> Any:
    """The model as it is, with sizes fixed, local functions inlined, shapes inferred and every node named.

    Large external weights (see :mod:`hil.controller.backends.compilers.onnx_to_mlir`) stay in their files.
    """
    from onnx import TensorProto

    from hil.controller.backends.compilers.onnx_to_mlir import infer, loaded, name_nodes
    from hil.controller.models.importers.onnx import light_copy, tensors_of

    model = loaded(path, dims)
    for tensor in tensors_of(model):
        if tensor.data_location == TensorProto.DEFAULT:
            # Said or not, it means the same: a layer is to be the same file wherever its weights came from.
            tensor.ClearField("data_location")
    infer(model, light_copy(model))
    name_nodes(model)
    return model


def draws(node: Any, constants: Mapping[str, Any]) -> bool:
    """Whether a node, or one within its subgraphs, draws random numbers: its results do not follow from its inputs.

    With a seed too: which numbers follow from one is for each runtime to choose.

    Args:
        node: of a model whose local functions are inlined.
        constants: name -> TensorProto: they tell whether a Dropout is one of training.
    """
    from onnx import numpy_helper

    if node.domain in ("", "ai.onnx"):
        if node.op_type in _DRAWING:
            return True
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            training = constants.get(node.input[2])
            if training is None or numpy_helper.to_array(training).any():
                return True
    return any(draws(inner, constants) for graph in subgraphs(node) for inner in graph.node)


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
