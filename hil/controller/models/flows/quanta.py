"""How large one step of an output's quantisation is, and so what a quantised model's answers may be off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.models.flows.flow import Flow
from hil.controller.models.importers import import_model
from hil.controller.models.importers.pt2 import is_tensor, output_names
from hil.controller.models.importers.pt2_archive import load_program
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import IsolatedError
from hil.errors import ImportFailed

if TYPE_CHECKING:
    from hil.controller.storage.run_context import RunContext


_TIMEOUT_S = 600.0
_FOUND = "quanta.json"
# Raise this when what is found out changes.
_VERSION = 1


def quantum_atol(flow: Flow, path: Path, shop: RunContext, log: Path) -> float | None:
    """The absolute tolerance that a flow's ``quanta`` come to for a model.

    Two correct runtimes round a value that lies between two steps to either; each requantisation on the way to an
    output may so move it by a step. An output may be off by as many steps as there are requantisations before it, and
    never by more than ``quanta``: a layer on its own by one, a whole network by ``quanta``.

    A step of a float output is the scale of the DequantizeLinear that makes it, or of those that what makes it takes
    from; a step of a quantised one is 1. With several outputs it is the largest, of the float ones if there are any.

    Returns:
        The tolerance; None where the flow names no ``quanta``, or nothing static is quantised in the model.

    Raises:
        ImportFailed: the model cannot be read.
    """
    if flow.quanta is None:
        return None
    model = import_model(path, isolated=shop.isolated, cache=shop.cache)
    look = {"onnx": find_onnx, "pt2": find_pt2}.get(model.format)
    if look is None:
        return None

    def make(folder: Path) -> None:
        try:
            found = shop.isolated.call(look, {"path": str(path.absolute())}, timeout=_TIMEOUT_S, log=log)
        except IsolatedError as error:
            raise ImportFailed(f"cannot read {path.name}: {error.message}", detail=error.detail) from error
        (folder / _FOUND).write_text(json.dumps(found))

    key = Cache.key("quanta", model=model.digest, version=_VERSION)
    entry, _ = shop.cache.get_or_make(key, {"model": model.name}, make)
    steps = json.loads((entry / _FOUND).read_text())
    chosen = [one for one in steps if not one["integer"]] or steps
    return max((one["step"] * min(flow.quanta, one["roundings"]) for one in chosen), default=None)


def find_onnx(path: str) -> list[dict[str, Any]]:
    """The steps of a model's outputs; called in the isolated process.

    Returns:
        For each quantised output ``name``, ``step`` (of its own values), ``roundings`` (how many requantisations lead
        to it, at least 1) and ``integer``.
    """
    look = _Look(Path(path))
    found = [look.step(name) for name in look.outputs]
    return [one for one in found if one is not None]


class _Look:
    def __init__(self, path: Path) -> None:
        import onnx
        from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

        graph = onnx.load(path, load_external_data=False).graph
        self._makers = {name: node for node in graph.node for name in node.output if name}
        self._inputs = {value.name for value in graph.input}
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                self._tensors[node.output[0]] = node.attribute[0].t
                del self._makers[node.output[0]]
        for node in graph.node:
            # The scales alone are read: weights may be large.
            scale = self._scale(node)
            if scale is not None and uses_external_data(scale):
                load_external_data_for_tensor(scale, str(path.parent))
        self.outputs = [value.name for value in graph.output]

    def step(self, output: str) -> dict[str, Any] | None:
        """What is known of an output, or None."""
        steps, integer = self._steps(output)
        if not steps:
            return None
        return {"name": output, "step": max(steps), "roundings": max(1, self._roundings(output)), "integer": integer}

    def _steps(self, output: str) -> tuple[list[float], bool]:
        """The steps of the nearest quantised values on the way up, and whether they are the quantised ones' own."""
        from onnx import numpy_helper

        scales: list[float] = []
        integer = False
        for node in self._above(output, stop=("QuantizeLinear", "DequantizeLinear")):
            if node.op_type == "QuantizeLinear":
                integer = True
            elif (scale := self._scale(node)) is not None:
                scales.append(float(numpy_helper.to_array(scale).astype(float).max()))
        return (scales, False) if scales else ([1.0] if integer else [], integer)

    def _scale(self, node: Any) -> Any:
        """The scale that a DequantizeLinear of a computed value (no weight) has, or None."""
        if node.op_type != "DequantizeLinear" or node.input[0] in self._tensors:
            return None
        return self._tensors.get(node.input[1])

    def _roundings(self, output: str) -> int:
        # What a graph's input is quantised to is one division: there both agree.
        nodes = self._above(output, stop=())
        return sum(node.op_type == "QuantizeLinear" and node.input[0] not in self._inputs for node in nodes)

    def _above(self, output: str, stop: tuple[str, ...]) -> list[Any]:
        """The nodes that an output comes from, not beyond those of the operators ``stop``."""
        found: dict[tuple[str, ...], Any] = {}
        pending = [output]
        while pending:
            node = self._makers.get(pending.pop())
            if node is None or tuple(node.output) in found:
                continue
            found[tuple(node.output)] = node
            if node.op_type not in stop:
                pending += node.input
        return list(found.values())


_QUANTISE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTISE = "quantized_decomposed.dequantize_per_tensor.default"


def find_pt2(path: str) -> list[dict[str, Any]]:
    """What :func:`find_onnx` tells of an ONNX model, of a ``.pt2``.

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
