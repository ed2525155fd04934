"""How large one step of an output's quantisation is, and so what a quantised model's answers may be off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.models.flows.recipe import Flow
from hil.controller.models.importers import import_model
from hil.controller.models.importers.onnx_data import embed_data
from hil.controller.models.importers.onnx_nodes import constants_of
from hil.controller.models.importers.pt2 import is_tensor, output_names
from hil.controller.models.importers.pt2_archive import load_program
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import IsolatedError, function_version
from hil.errors import ImportFailed

if TYPE_CHECKING:
    from hil.controller.storage.run_context import RunContext


_TIMEOUT_S = 600.0


def quantum_atol(flow: Flow, path: Path, context: RunContext, log: Path) -> float | None:
    """The absolute tolerance that a flow's ``quanta`` come to for a model.

    Two correct runtimes round a value that lies between two steps to either; each requantisation on the way to an
    output may so move it by a step. An output may be off by as many steps as there are requantisations before it, and
    never by more than ``quanta``: a layer on its own by one, a whole network by ``quanta``.

    A step of a float output is the scale of the dequantisation that makes it, or of those that what makes it takes
    from; a step of a quantised one is 1. With several outputs it is the largest, of the float ones if there are any.

    Returns:
        The tolerance; None where the flow names no ``quanta``, or nothing static is quantised in the model.

    Raises:
        ImportFailed: the model cannot be read.
    """
    if flow.quanta is None:
        return None
    model = import_model(path, isolated=context.isolated, cache=context.cache)
    look = {"onnx": find_onnx, "pt2": find_pt2}.get(model.format)
    if look is None:
        return None

    def find() -> Any:
        try:
            return context.isolated.call(look, {"path": str(path.absolute())}, timeout=_TIMEOUT_S, log=log)
        except IsolatedError as error:
            raise ImportFailed(f"cannot read {path.name}: {error.message}", detail=error.detail) from error

    key = Cache.key("quanta", model=model.digest, find=function_version(look))
    steps, _ = context.cache.get_or_compute(key, {"model": model.name}, find)
    chosen = [one for one in steps if not one["integer"]] or steps
    return max((one["step"] * min(flow.quanta, one["roundings"]) for one in chosen), default=None)


@dataclass(frozen=True)
class _Node:
    inputs: Sequence[str]  # the values, by name, that it takes
    quantises: bool = False
    dequantises: bool = False
    step: float | None = None  # of a computed value that is dequantised by a scale that is known beforehand
    # whether a computed value is quantised: what a graph's input is quantised to is one division, where both agree.
    rounds: bool = False


def find_onnx(path: str) -> list[dict[str, Any]]:
    """The steps of a model's outputs; called in the isolated process.

    Returns:
        For each quantised output ``name``, ``step`` (of its own values), ``roundings`` (how many requantisations lead
        to it, at least 1) and ``integer``.
    """
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    given = {value.name for value in graph.input}
    tensors = constants_of(graph)
    makers: dict[str, _Node] = {}
    for node in graph.node:
        quantises, dequantises = node.op_type == "QuantizeLinear", node.op_type == "DequantizeLinear"
        step = None
        if dequantises and node.input[0] not in tensors and (scale := tensors.get(node.input[1])) is not None:
            # The scales alone are read: weights may be large.
            if scale.data_location == scale.EXTERNAL:
                embed_data(scale, Path(path).parent)
            step = float(onnx.numpy_helper.to_array(scale).astype(float).max())
        rounds = quantises and node.input[0] not in given
        made = _Node(node.input, quantises, dequantises, step, rounds)
        makers |= {name: made for name in node.output if name and name not in tensors}
    return _steps(makers, {value.name: value.name for value in graph.output}, integers=True)


_QUANTISE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTISE = "quantized_decomposed.dequantize_per_tensor.default"


def find_pt2(path: str) -> list[dict[str, Any]]:
    """What :func:`find_onnx` tells of an ONNX model, of a ``.pt2``: of its float outputs, by static ranges alone."""
    program = load_program(path)
    makers: dict[str, _Node] = {}
    for node in program.graph.nodes:
        target, inputs = str(node.target), [one.name for one in node.all_input_nodes]
        computed = target in (_QUANTISE, _DEQUANTISE) and node.args[0].op != "placeholder"
        step = float(node.args[1]) if computed and target == _DEQUANTISE else None
        rounds = computed and target == _QUANTISE
        makers[node.name] = _Node(inputs, target == _QUANTISE, target == _DEQUANTISE, step, rounds)
    return _steps(makers, {name: arg.name for name, arg in output_names(program) if is_tensor(arg)}, integers=False)


def _steps(makers: Mapping[str, _Node], outputs: Mapping[str, str], *, integers: bool) -> list[dict[str, Any]]:
    """What is known of outputs, by name, by the nodes that make values; ``integers``: of quantised ones too."""
    found = []
    for name, value in outputs.items():
        nearest = _above(makers, value, beyond=False)
        steps = [node.step for node in nearest if node.step is not None]
        integer = integers and not steps and any(node.quantises for node in nearest)
        if steps or integer:
            roundings = sum(node.rounds for node in _above(makers, value, beyond=True))
            step = max(steps, default=1.0)
            found.append({"name": name, "step": step, "roundings": max(1, roundings), "integer": integer})
    return found


def _above(makers: Mapping[str, _Node], value: str, *, beyond: bool) -> list[_Node]:
    """The nodes that a value comes from, those beyond quantisations and dequantisations too or not."""
    found: dict[int, _Node] = {}
    pending = [value]
    while pending:
        node = makers.get(pending.pop())
        if node is not None and id(node) not in found:
            found[id(node)] = node
            if beyond or not (node.quantises or node.dequantises):
                pending += node.inputs
    return list(found.values())
