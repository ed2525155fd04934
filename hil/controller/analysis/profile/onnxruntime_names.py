"""What happens in the isolated process: which nodes of a model ONNX Runtime's kernels compute.

Its optimiser fuses nodes, adds others that change a layout, and names them all anew, but for the values that were
there before: what lies between those is what was fused. Nothing here is called by the controller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hil.controller.analysis.layers.prepare import prepared, reads
from hil.controller.models.importers.onnx import nodes_of
from hil.core.scratch import temporary_folder

# What the optimiser puts in front of, between or behind the names that it makes its own of.
_JOINT = re.compile(r"^fused |[/ ]")
_ENDING = re.compile(r"(?:_token_\d+|_nchwc|_new_reshape|_nhwc|_\d+)$")
# Kernels that only bring a value into another order or type, where they are of the optimiser's own making.
LAYOUT = frozenset("ReorderInput ReorderOutput Reshape Transpose Cast Unsqueeze Squeeze Identity MemcpyToHost".split())
# What the optimiser fuses something behind, never in front of.
_HEAVY = frozenset(
    "Conv ConvTranspose ConvInteger QLinearConv Gemm MatMul MatMulInteger QLinearMatMul MaxPool AveragePool LpPool "
    "GlobalMaxPool GlobalAveragePool GlobalLpPool LSTM GRU RNN Attention".split()
)


def kernel_nodes(model: str, dims: Mapping[str, int], optimized: str | None) -> dict[str, Any]:
    """Find the nodes of each of the kernels that a session of this machine's would have.

    Args:
        model: the ONNX file.
        dims: sizes of symbolic dimensions.
        optimized: the model as the optimiser left it; None: have it made, for this machine.

    Returns:
        ``kernels``: node of the optimised model -> nodes of the model; ``named``: every node and every value of the
        model -> the node that makes it; ``top``: [name, type] of the main graph's nodes, in order; ``note``: why there
        are no kernels, or "".
    """
    graph = prepared(Path(model), dims).graph
    named = {value: node.name for node in nodes_of(graph.node) for value in node.output if value}
    named.update({node.name: node.name for node in nodes_of(graph.node)})
    note = ""
    kernels: dict[str, list[str]] = {}
    try:
        left = _optimized(model, optimized)
    except Exception as error:  # what the optimiser would have done is a help, not a condition
        note = f"kernels are known by their names alone: {str(error).strip().splitlines()[0][:200]}"
    else:
        kernels = _Fusions(graph, left).kernels()
    top = [[node.name, node.op_type] for node in graph.node]
    return {"kernels": kernels, "named": named, "top": top, "note": note}


def _optimized(model: str, optimized: str | None) -> Any:

    import onnx
    import onnxruntime

    if optimized is not None:
        return onnx.load(optimized, load_external_data=False).graph
    with temporary_folder("hil-ort-") as scratch:
        path = Path(scratch) / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(path)
        # Weights of more than a few bytes beside it: one protobuf file ends at 2 GB, and they are of no interest.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        options.log_severity_level = 3
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return onnx.load(path, load_external_data=False).graph


def by_name(name: str, named: Mapping[str, str]) -> list[str]:
    """The nodes that a kernel's name tells: ``fused Gemm_1``, ``MatMul_2/MatMulAddFusion``, ``relu1.out_nchwc``."""
    found: dict[str, None] = {}
    for part in (name, *_JOINT.split(name)):
        while part and part not in named and (shorter := _ENDING.sub("", part)) != part:
            part = shorter
        if part in named:
            found[named[part]] = None
            if part == name:
                break
    return list(found)


class _Fusions:
    """The optimised graph beside the model's own.

    Args:
        graph: the model's own, every node named.
        left: what the optimiser left.
    """

    def __init__(self, graph: Any, left: Any) -> None:
        self._nodes = {node.name: node for node in graph.node}
        self._order = {name: number for number, name in enumerate(self._nodes)}
        self._maker = {value: node.name for node in graph.node for value in node.output if value}
        self._users = _users(graph.node)
        self._left = list(left.node)
        for node in self._left:
            # Unnamed ones are called by type and place in the profile, as they are in a model that is prepared.
            node.name = node.name or next((self._maker[value] for value in node.output if value in self._maker), "")
        self._left_users = _users(self._left)
        self._ends = {id(node): self._ends_of(node) for node in self._left}
        # A value that is still there ends a fusion: whoever needs it reads what another kernel made.
        there = {own for node in self._left for value in (*node.input, *node.output) if (own := self._own(value))}
        self._there = there.union(*self._ends.values())
        self._constant = self._constants(graph)

    def kernels(self) -> dict[str, list[str]]:
        """Computing node of the optimised graph -> nodes of the model, in order."""
        own = {name: name for name in self._nodes}
        told = [node for node in self._left if node.name and not self._only_moves(node)]
        found = {node.name: set(by_name(node.name, own)) for node in told}
        taken = set().union(*found.values())
        for node in told:
            if not self._is_as_it_was(node):
                found[node.name] |= {inner for end in self._ends[id(node)] for inner in self._cone(end)} - taken
                taken |= found[node.name]
        self._share_out(found, taken)
        return {kernel: sorted(nodes, key=self._order.__getitem__) for kernel, nodes in found.items() if nodes}

    def _only_moves(self, node: Any) -> bool:
        return node.op_type in LAYOUT and node.name not in self._nodes

    def _is_as_it_was(self, node: Any) -> bool:
        was = self._nodes.get(node.name)
        return was is not None and was.op_type == node.op_type and list(was.output) == list(node.output)

    def _own(self, value: str) -> str:
        """The model's own value that a value's name is made of; "" for none."""
        while value and value not in self._maker:
            shorter = _ENDING.sub("", value)
            value = shorter if shorter != value else ""
        return value

    def _ends_of(self, node: Any) -> set[str]:
        """The model's own values that a kernel makes, as far as they are there behind a change of layout."""
        if node.name not in self._nodes and (own := self._own(node.name)):
            return {own}  # such as relu1.out_nchwc: the name is that of what it makes
        ends: set[str] = set()
        front = [value for value in node.output if value]
        while front:
            value = front.pop()
            if own := self._own(value):
                ends.add(own)
            else:
                after = [user for user in self._left_users.get(value, ()) if self._only_moves(user)]
                front += [made for user in after for made in user.output if made]
        return ends

    def _cone(self, end: str) -> list[str]:
        """The nodes that make a value of the others that are still there."""
        found: dict[str, None] = {}
        front = [self._maker[end]]
        while front:
            name = front.pop()
            if name not in found:
                found[name] = None
                if self._nodes[name].op_type not in _HEAVY:
                    read = [value for value in self._nodes[name].input if value in self._maker]
                    front += [self._maker[value] for value in read if value not in self._there]
        return [name for name in found if name not in self._constant]

    def _constants(self, graph: Any) -> set[str]:
        """The nodes whose results are known before any run: the optimiser computes them itself."""
        given = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
        changing = set(given)
        for node in graph.node:
            if any(value in changing for value in reads(node)):
                changing.update(node.output)
        return {node.name for node in graph.node if not any(value in changing for value in node.output)}

    def _share_out(self, found: dict[str, set[str]], taken: set[str]) -> None:
        """Give nodes that are in no kernel, fused without a trace, to that of who made what they read."""
        kernel_of = {node: kernel for kernel, nodes in found.items() for node in nodes}
        rest = [name for name in self._nodes if name not in taken and name not in self._constant]
        # What undoes a quantisation was fused into who uses it: those are looked at from the end.
        for name in [*(name for name in rest if not self._undoes(name)), *filter(self._undoes, reversed(rest))]:
            node = self._nodes[name]
            before = [self._maker[value] for value in node.input if value in self._maker]
            after = [user.name for value in node.output for user in self._users.get(value, ())]
            near = [*after, *before] if self._undoes(name) else [*before, *after]
            kernel = next((kernel_of[other] for other in near if other in kernel_of), None)
            if kernel is not None:
                kernel_of[name] = kernel
                found[kernel].add(name)

    def _undoes(self, name: str) -> bool:
        return bool(self._nodes[name].op_type == "DequantizeLinear")


def _users(nodes: Iterable[Any]) -> dict[str, list[Any]]:
    users: dict[str, list[Any]] = {}
    for node in nodes:
        for value in node.input:
            users.setdefault(value, []).append(node)
    return users
