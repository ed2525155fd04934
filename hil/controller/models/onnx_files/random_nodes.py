"""Find nodes in ONNX models that draw random numbers, and the outputs that depend on them.

Even with a seed, two backends draw different numbers, because their generators differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hil.controller.models.importers.onnx_nodes import read_constants
from hil.formats.onnx_file import iter_subgraphs

# Operators of ONNX's standard domain that always draw.
DRAWING = frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial".split())
_DRAWING_CONTRIB = frozenset(["Sampling"])
# Operators that draw random numbers only in training mode -> positions of the inputs `ratio` and `training_mode`.
_DROPOUTS = {
    ("", "Dropout"): (1, 2),
    ("com.microsoft", "BitmaskDropout"): (1, 2),
    ("com.microsoft", "BiasDropout"): (3, 4),
    ("com.microsoft", "BitmaskBiasDropout"): (3, 4),
}
# Operators with results that do not depend on input values.
_OF_SHAPES = frozenset(["Shape", "Size"])
_SHOWN = 100


def find_random_nodes(model: Any) -> dict[str, list[str]]:
    """Find nodes in a ModelProto that draw random numbers and affect the outputs.

    Returns:
        ``nodes``, their labels (at most 100), and ``outputs``, the names of the affected graph outputs; {} if there are
        none.
    """
    finder = _Finder(model.functions)
    constants = read_constants(model.graph)
    random: set[str] = set()
    for node in model.graph.node:
        if finder.is_random(node, constants) or (
            node.op_type not in _OF_SHAPES and not random.isdisjoint(_list_reads(node))
        ):
            random.update(filter(None, node.output))
    outputs = [value.name for value in model.graph.output if value.name in random]
    if not outputs:
        return {}
    needed = set(outputs)
    drawing = []
    for node in reversed(model.graph.node):
        if needed.isdisjoint(node.output) or random.isdisjoint(node.output):
            continue
        if finder.is_random(node, constants):
            drawing.append(_label(node))
        needed.update(_list_reads(node))
    return {"nodes": drawing[::-1][:_SHOWN], "outputs": outputs}


def is_random(node: Any, constants: Mapping[str, Any], functions: Sequence[Any] = ()) -> bool:
    """Return True if a node, its subgraphs or its function draw random numbers.

    Args:
        node: the node.
        constants: name -> TensorProto, to recognise a Dropout in inference mode.
        functions: the model's local functions.
    """
    return _Finder(functions).is_random(node, constants)


class _Finder:
    """Search for nodes that draw random numbers, with cached results for functions."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self._functions = {(one.domain, one.name): one for one in functions}
        self._known: dict[Any, bool] = {}

    def is_random(self, node: Any, constants: Mapping[str, Any]) -> bool:
        kind = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
        if (body := self._functions.get((node.domain, node.op_type))) is not None:
            return self._is_function_random(body, node, constants)
        if kind in _DROPOUTS:
            return _is_dropout_active(node, constants, *_DROPOUTS[kind])
        if kind[1] in (DRAWING if not kind[0] else _DRAWING_CONTRIB if kind[0] == "com.microsoft" else ()):
            return True
        return any(
            self.is_random(inner, {**constants, **read_constants(graph)})
            for graph in iter_subgraphs(node)
            for inner in graph.node
        )

    def _is_function_random(self, body: Any, call: Any, constants: Mapping[str, Any]) -> bool:
        given = {
            formal: constants[actual]
            for formal, actual in zip(body.input, call.input, strict=False)
            if actual in constants
        }
        key = (body.domain, body.name, tuple((name, id(tensor)) for name, tensor in given.items()))
        if key not in self._known:
            self._known[key] = False  # the search must also end for recursive functions, which are invalid
            inner = {**given, **read_constants(body)}
            self._known[key] = any(self.is_random(node, inner) for node in body.node)
        return self._known[key]


def _is_dropout_active(node: Any, constants: Mapping[str, Any], ratio: int, training: int) -> bool:
    """Return True if a Dropout may be in training mode with a ratio above 0."""
    if len(node.input) <= training or not node.input[training]:
        return False
    return all(_may_be_set(node, position, constants) for position in (ratio, training))


def _may_be_set(node: Any, position: int, constants: Mapping[str, Any]) -> bool:
    """Return True if an input may have a value other than 0. The default of an omitted input is not 0."""
    from onnx import numpy_helper

    tensor = constants.get(node.input[position])
    if tensor is None or tensor.data_location == tensor.EXTERNAL:
        return True
    return bool(numpy_helper.to_array(tensor).any())


def _list_reads(node: Any) -> set[str]:
    """Return the values that a node and the subgraphs read."""
    found = set(node.input)
    for graph in iter_subgraphs(node):
        found.update(value.name for value in graph.output)
        for inner in graph.node:
            found |= _list_reads(inner)
    return found


def _label(node: Any) -> str:
    return f"{node.name or ', '.join(filter(None, node.output))} ({node.op_type})"
