"""Derive the tolerance of a quantised model from the quantisation steps of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.models.flows.flow import Flow
from hil.controller.models.importers import import_model
from hil.controller.models.importers.exported.pt2 import is_tensor, list_output_names
from hil.controller.models.importers.exported.pt2_archive import load_program
from hil.controller.models.importers.onnx_data import embed_data
from hil.controller.models.importers.onnx_nodes import read_constants
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import IsolatedError, make_function_version
from hil.errors import ImportFailed
from hil.formats.onnx_file import load_onnx

if TYPE_CHECKING:
    from hil.controller.storage.run_context import RunContext


_TIMEOUT_SECONDS = 600.0


def compute_quantum_atol(flow: Flow, path: Path, context: RunContext, log: Path) -> float | None:
    """Return the absolute tolerance for a model and a flow's ``quanta``.

    Two correct runtimes may round a value between two steps differently. So each requantisation before an output may
    move the output by a step. The tolerance in steps is the number of these requantisations, but at most ``quanta``. A
    single layer usually has one requantisation. A whole network usually has more than ``quanta``.

    The step of a float output is the scale of the dequantisation that produces the output. If another node produces the
    output, its step is the largest scale of the nearest dequantisations before this node. The step of a quantised
    output is 1. With multiple outputs, the largest tolerance applies. If there are float outputs, quantised outputs are
    ignored.

    Returns:
        The tolerance; None if the flow has no ``quanta``, or the model has no static quantisation.

    Raises:
        ImportFailed: the model is unreadable.
    """
    if flow.quanta is None:
        return None
    model = import_model(path, isolated=context.isolated, cache=context.cache)
    look = {"onnx": find_onnx, "pt2": find_pt2}.get(model.format)
    if look is None:
        return None

    def find() -> Any:
        try:
            return context.isolated.call(look, {"path": str(path.absolute())}, timeout=_TIMEOUT_SECONDS, log=log)
        except IsolatedError as error:
            raise ImportFailed(f"cannot read {path.name}: {error.message}", detail=error.detail) from error

    key = Cache.key("quanta", model=model.digest, find=make_function_version(look))
    steps, _ = context.cache.get_or_compute(key, {"model": model.name}, find)
    chosen = [one for one in steps if not one["integer"]] or steps
    return max((one["step"] * min(flow.quanta, one["roundings"]) for one in chosen), default=None)


@dataclass(frozen=True)
class _Node:
    inputs: Sequence[str]  # input value names
    quantises: bool = False
    dequantises: bool = False
    step: float | None = None  # scale, if the node dequantises a computed value with a constant scale
    # True if the node quantises a computed value. Quantising a graph input does not count: it is a single division,
    # with equal results in all runtimes.
    rounds: bool = False


def find_onnx(path: str) -> list[dict[str, Any]]:
    """Return the quantisation steps of an ONNX model's outputs. Runs in the isolated process.

    Returns:
        For each quantised output: ``name``, ``step`` (in units of the output), ``roundings`` (number of requantisations
        before the output, at least 1) and ``integer`` (True if the output is quantised).
    """
    import onnx

    graph = load_onnx(path).graph
    given = {value.name for value in graph.input}
    tensors = read_constants(graph)
    makers: dict[str, _Node] = {}
    for node in graph.node:
        quantises, dequantises = node.op_type == "QuantizeLinear", node.op_type == "DequantizeLinear"
        step = None
        if dequantises and node.input[0] not in tensors and (scale := tensors.get(node.input[1])) is not None:
            # Read only the scales: weights may be large.
            if scale.data_location == scale.EXTERNAL:
                embed_data(scale, Path(path).parent)
            step = float(onnx.numpy_helper.to_array(scale).astype(float).max())
        rounds = quantises and node.input[0] not in given
        made = _Node(node.input, quantises, dequantises, step, rounds)
        makers |= {name: made for name in node.output if name and name not in tensors}
    return _find_steps(makers, {value.name: value.name for value in graph.output}, integers=True)


_QUANTISE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTISE = "quantized_decomposed.dequantize_per_tensor.default"


def find_pt2(path: str) -> list[dict[str, Any]]:
    """Return the result of :func:`find_onnx` for a ``.pt2``, only for float outputs with static ranges."""
    program = load_program(path)
    makers: dict[str, _Node] = {}
    for node in program.graph.nodes:
        target, inputs = str(node.target), [one.name for one in node.all_input_nodes]
        computed = target in (_QUANTISE, _DEQUANTISE) and node.args[0].op != "placeholder"
        step = float(node.args[1]) if computed and target == _DEQUANTISE else None
        rounds = computed and target == _QUANTISE
        makers[node.name] = _Node(inputs, target == _QUANTISE, target == _DEQUANTISE, step, rounds)
    return _find_steps(
        makers, {name: arg.name for name, arg in list_output_names(program) if is_tensor(arg)}, integers=False
    )


def _find_steps(makers: Mapping[str, _Node], outputs: Mapping[str, str], *, integers: bool) -> list[dict[str, Any]]:
    """Return the steps of outputs, derived from the nodes. If ``integers`` is set, include quantised outputs."""
    found = []
    for name, value in outputs.items():
        nearest = _find_upstream_nodes(makers, value, beyond=False)
        steps = [node.step for node in nearest if node.step is not None]
        integer = integers and not steps and any(node.quantises for node in nearest)
        if steps or integer:
            roundings = sum(node.rounds for node in _find_upstream_nodes(makers, value, beyond=True))
            step = max(steps, default=1.0)
            found.append({"name": name, "step": step, "roundings": max(1, roundings), "integer": integer})
    return found


def _find_upstream_nodes(makers: Mapping[str, _Node], value: str, *, beyond: bool) -> list[_Node]:
    """Return the nodes that a value depends on.

    Without ``beyond``, the search stops at quantisations and dequantisations.
    """
    found: dict[int, _Node] = {}
    pending = [value]
    while pending:
        node = makers.get(pending.pop())
        if node is not None and id(node) not in found:
            found[id(node)] = node
            if beyond or not (node.quantises or node.dequantises):
                pending += node.inputs
    return list(found.values())
