"""Nodes of ONNX models that draw random numbers, and the outputs that depend on them.

A seed does not make two backends agree: each has a generator of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hil.controller.models.importers.onnx_nodes import constants_of, graphs_of

# Operators of ONNX's own domain that always draw.
DRAWING = frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial".split())
_DRAWING_CONTRIB = frozenset(["Sampling"])
# Operators that draw in training mode only -> positions of the inputs `ratio` and `training_mode`.
_DROPOUTS = {
    ("", "Dropout"): (1, 2),
    ("com.microsoft", "BitmaskDropout"): (1, 2),
    ("com.microsoft", "BiasDropout"): (3, 4),
    ("com.microsoft", "BitmaskBiasDropout"): (3, 4),
}
# Operators whose result does not depend on the values of their input.
_OF_SHAPES = frozenset(["Shape", "Size"])
_SHOWN = 100


def random_nodes(model: Any) -> dict[str, list[str]]:
    """Find the nodes of a ModelProto that draw random numbers which its outputs depend on.

    Returns:
        ``nodes``, a label of each (at most 100), and ``outputs``, the names of the graph outputs that depend on them;
        {} where there are none.
    """
    finder = _Finder(model.functions)
    constants = constants_of(model.graph)
    random: set[str] = set()
    for node in model.graph.node:
        if finder.draws(node, constants) or (node.op_type not in _OF_SHAPES and not random.isdisjoint(_reads(node))):
            random.update(filter(None, node.output))
    outputs = [value.name for value in model.graph.output if value.name in random]
    if not outputs:
        return {}
    needed = set(outputs)
    drawing = []
    for node in reversed(model.graph.node):
        if needed.isdisjoint(node.output) or random.isdisjoint(node.output):
            continue
        if finder.draws(node, constants):
            drawing.append(_label(node))
        needed.update(_reads(node))
    return {"nodes": drawing[::-1][:_SHOWN], "outputs": outputs}


def draws(node: Any, constants: Mapping[str, Any], functions: Sequence[Any] = ()) -> bool:
    """Return whether a node draws random numbers, or one within its subgraphs or its function.

    Args:
        constants: name -> TensorProto, to recognise a Dropout that is in inference mode.
        functions: the model's local functions.
    """
    return _Finder(functions).draws(node, constants)


class _Finder:
    """Looks for drawing nodes; remembers what it found in each function."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self._functions = {(one.domain, one.name): one for one in functions}
        self._known: dict[Any, bool] = {}

    def draws(self, node: Any, constants: Mapping[str, Any]) -> bool:
        kind = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
        if (body := self._functions.get((node.domain, node.op_type))) is not None:
            return self._function_draws(body, node, constants)
        if kind in _DROPOUTS:
            return _drops(node, constants, *_DROPOUTS[kind])
        if kind[1] in (DRAWING if not kind[0] else _DRAWING_CONTRIB if kind[0] == "com.microsoft" else ()):
            return True
        return any(
            self.draws(inner, {**constants, **constants_of(graph)}) for graph in graphs_of(node) for inner in graph.node
        )

    def _function_draws(self, body: Any, call: Any, constants: Mapping[str, Any]) -> bool:
        given = {
            formal: constants[actual]
            for formal, actual in zip(body.input, call.input, strict=False)
            if actual in constants
        }
        key = (body.domain, body.name, tuple((name, id(tensor)) for name, tensor in given.items()))
        if key not in self._known:
            self._known[key] = False  # a function that calls itself is invalid: the search must end all the same
            inner = {**given, **constants_of(body)}
            self._known[key] = any(self.draws(node, inner) for node in body.node)
        return self._known[key]


def _drops(node: Any, constants: Mapping[str, Any], ratio: int, training: int) -> bool:
    """Return whether a Dropout is in training mode, or may be, with a ratio above 0."""
    if len(node.input) <= training or not node.input[training]:
        return False
    return all(_may_be_set(node, position, constants) for position in (ratio, training))


def _may_be_set(node: Any, position: int, constants: Mapping[str, Any]) -> bool:
    """Return whether an input may hold something else than 0; one that is left out has a default that does."""
    from onnx import numpy_helper

    tensor = constants.get(node.input[position])
    if tensor is None or tensor.data_location == tensor.EXTERNAL:
        return True
    return bool(numpy_helper.to_array(tensor).any())


def _reads(node: Any) -> set[str]:
    """The values that a node reads, those that its subgraphs read among them."""
    found = set(node.input)
    for graph in graphs_of(node):
        found.update(value.name for value in graph.output)
        for inner in graph.node:
            found |= _reads(inner)
    return found


def _label(node: Any) -> str:
    return f"{node.name or ', '.join(filter(None, node.output))} ({node.op_type})"
