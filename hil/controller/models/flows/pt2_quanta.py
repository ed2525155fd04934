"""The steps of a quantised PyTorch program's outputs; called in a process of its own."""

from __future__ import annotations

from typing import Any

from hil.controller.models.importers.pt2 import is_tensor, output_names
from hil.controller.models.importers.pt2_archive import load_program

_QUANTISE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTISE = "quantized_decomposed.dequantize_per_tensor.default"


def find(path: str) -> list[dict[str, Any]]:
    """What :func:`hil.controller.models.flows.quanta.find` tells of an ONNX model, of a ``.pt2``.

    A step is the scale of the nearest dequantisations of computed values on the way up from an output. Ranges that are
    found out when the model runs have none.
    """
    program = load_program(path)
    nodes = {node.name: node for node in program.graph.nodes}
    found = []
    for name, arg in output_names(program):
        if not is_tensor(arg):
            continue
        steps = [
            float(node.args[1])
            for node in _above(nodes[arg.name], stop=(_QUANTISE, _DEQUANTISE))
            if str(node.target) == _DEQUANTISE and node.args[0].op != "placeholder"
        ]
        if steps:
            above = _above(nodes[arg.name], stop=())
            # What an input is quantised to is one division: there both agree.
            roundings = sum(str(node.target) == _QUANTISE and node.args[0].op != "placeholder" for node in above)
            found.append({"name": name, "step": max(steps), "roundings": max(1, roundings), "integer": False})
    return found


def _above(output: Any, stop: tuple[str, ...]) -> list[Any]:
    """The nodes that an output comes from, itself among them, not beyond those of the operators ``stop``."""
    found: dict[str, Any] = {}
    pending = [output]
    while pending:
        node = pending.pop()
        if node.name in found:
            continue
        found[node.name] = node
        if str(node.target) not in stop:
            pending += node.all_input_nodes
    return list(found.values())
