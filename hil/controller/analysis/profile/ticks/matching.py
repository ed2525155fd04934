"""Find the measured ticks of the operators that Vela estimates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

from hil.controller.records.commands.npu import NpuEstimate, NpuOperator
from hil.core.timeline import OpTicks, Profile
from hil.errors import UsageError

# Characters between the name of an operator's output and what a conversion to ONNX adds.
_ENDS = ("_", ":", "/")
# Kind -> operators of Vela, and operators of ONNX.
_KINDS = {
    "convolution": ({"Conv2D", "DepthwiseConv2D", "Conv2DBias"}, {"Conv", "ConvInteger", "QLinearConv"}),
    "product": (
        {"FullyConnected", "BatchMatMul"},
        {"Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"},
    ),
    "pool": ({"MaxPool", "AvgPool", "Mean"}, {"MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean"}),
    "softmax": ({"Softmax"}, {"Softmax"}),
}
# A conversion may add or remove it at the end of a model.
_OPTIONAL = ("softmax",)


def add_ticks(estimate: NpuEstimate, profile: Profile) -> NpuEstimate:
    """Add the ticks of a profile's dispatches to the operators.

    A dispatch belongs to the last operator of which it computes a node: the conversion of TFLite to ONNX names nodes by
    the output tensor of the operator. If no name matches, as for the ONNX model from which the TFLite model was made,
    the n-th convolution of the program belongs to the n-th convolution of the TFLite model, and so on.

    Raises:
        UsageError: the profile is not from an emulated microcontroller.
    """
    if profile.ticks is None:
        raise UsageError(
            f"the profile of {profile.model} on {profile.board} has no ticks",
            hint="profile the model on an emulated microcontroller: see docs/microcontrollers.md",
        )
    computed = [one for one in profile.ticks.operations if one.kind == "compute"]
    names = {one.name: place for place, one in enumerate(estimate.operators)}
    matched_by: Literal["", "name", "order"] = "name"
    found = _assign_dispatches(computed, lambda node: _find_name(node, names))
    if not found:
        matched_by = "order"
        order = _pair_by_order(estimate.operators, computed)
        found = _assign_dispatches(computed, order.get)
    operators = [
        one.replace(ticks=sum(each.p50 for each in found[place]), dispatches=tuple(each.name for each in found[place]))
        if place in found
        else one
        for place, one in enumerate(estimate.operators)
    ]
    matched = {each.name for members in found.values() for each in members}
    return estimate.replace(
        operators=operators,
        profile=profile.run,
        matched_by=matched_by if found else "",
        instructions_per_tick=profile.ticks.instructions_per_tick,
        unmatched=tuple(one.name for one in computed if one.name not in matched),
    )


def _assign_dispatches(computed: Sequence[OpTicks], find: Callable[[str], int | None]) -> dict[int, list[OpTicks]]:
    """Return operator -> dispatches. ``find`` returns the operator of a node."""
    found: dict[int, list[OpTicks]] = defaultdict(list)
    for one in computed:
        places = [place for node in one.onnx_nodes if (place := find(node)) is not None]
        if places:
            found[max(places)].append(one)
    return dict(found)


def _pair_by_order(operators: Sequence[NpuOperator], computed: Sequence[OpTicks]) -> dict[str, int]:
    """Return node -> operator; empty if the numbers of convolutions, products or poolings differ."""
    types = {node: op_type for one in computed for node, op_type in zip(one.onnx_nodes, one.op_types, strict=False)}
    pairs: dict[str, int] = {}
    for kind, (of_vela, of_onnx) in _KINDS.items():
        places = [place for place, one in enumerate(operators) if one.op_type in of_vela]
        nodes = [node for node, op_type in types.items() if op_type in of_onnx]
        if len(places) == len(nodes):
            pairs.update(zip(nodes, places, strict=True))
        elif kind not in _OPTIONAL:
            return {}
    return pairs


def _find_name(node: str, places: dict[str, int]) -> int | None:
    """Return the operator of a node: the longest name with which the node's name begins."""
    begins = [name for name in places if node == name or (node.startswith(name) and node[len(name)] in _ENDS)]
    return places[max(begins, key=len)] if begins else None
