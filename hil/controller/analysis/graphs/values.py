"""Stored run results per model node: error, outcome, time and device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hil.controller.records.commands.stored import ProfileTotal
from hil.core.json_values import read_list, read_mapping, read_mappings, read_string

METRICS = ("tolerance_ratio", "max_abs", "sqnr_db", "outcome", "time_ns", "placement")
# Outcome severity. Any unlisted outcome is an error, with severity 3.
_GRAVITY = {"": 0, "SKIP": 1, "PASS": 1, "XFAIL": 1, "BLIND": 2, "FAIL": 4, "UNSTABLE": 4}


@dataclass(frozen=True)
class NodeValue:
    """Results for a node; None or "" means unknown."""

    outcome: str = ""
    reason: str = ""
    max_abs: float | None = None  # error of the worst output; inf if an element is NaN or infinite on one side only
    sqnr_db: float | None = None  # SQNR of the worst output; inf if all elements are equal
    time_ns: float | None = None  # time per iteration, over all operations that compute the node or a part of it
    placement: str = ""
    layer: str = ""  # name of the measured layer
    case: str = ""  # name of the layer's case in the session
    outputs: tuple[str, ...] = ()  # the compared tensors
    together: int = 1  # number of nodes that share this error
    # ops: operations that computed the node. timed_with: number of nodes that share the time; for several operations,
    # the largest number.
    ops: tuple[str, ...] = ()
    timed_with: int = 0
    # tolerance_ratio: error divided by the tolerance, of the element furthest out of tolerance; above 1 if it is out.
    # is_ratio_bound: True if the record only shows that the ratio is at most this number, because all elements are
    # within tolerance.
    tolerance_ratio: float | None = None
    is_ratio_bound: bool = False
    placement_reason: str = ""  # why the node did not run on the requested device

    def get_metric(self, metric: str) -> float | str | None:
        """Return the value for a metric from :data:`METRICS`, or None if unknown."""
        found: float | str | None = getattr(self, metric)
        return found if found != "" else None


@dataclass(frozen=True)
class LayerValue:
    """A layer's results and nodes."""

    nodes: Sequence[str]
    value: NodeValue = field(default_factory=NodeValue)
    op: str = ""  # operator type, or several joined by ``+`` (``Conv+Relu``)


def map_layers(layers: Iterable[LayerValue]) -> dict[str, NodeValue]:
    """Return node -> layer result.

    If multiple layers contain a copy of the node, the worst result counts.
    """
    found: dict[str, NodeValue] = {}
    for layer in layers:
        for name in layer.nodes:
            value = layer.value
            if value.together != len(layer.nodes):
                value = replace(value, together=len(layer.nodes))
            found[name] = find_worst([found[name], value]) if name in found else value
    return found


def find_worst(values: Sequence[NodeValue]) -> NodeValue:
    """Return the value with the most severe outcome.

    Ties are decided by the larger error, then the lower SQNR, then the order.
    """
    return max(values, key=lambda one: (_GRAVITY.get(one.outcome, 3), one.max_abs or 0.0, -(one.sqnr_db or 0.0)))


def bisect_layers(document: Mapping[str, Any], way: str) -> list[LayerValue]:
    """Return a bisection record's layers; ``way`` is ``isolated`` or ``cumulative``."""
    found = []
    for layer in read_mappings(document.get("layers")):
        nodes = [name for name in read_list(layer.get("nodes")) if isinstance(name, str)]
        finding = read_mapping(layer.get(way))
        if finding:
            name = read_string(layer.get("name"))
            value = _find_worst_values(
                finding, finding.get("reason"), layer=name, case=name, together=max(1, len(nodes))
            )
            found.append(LayerValue(nodes, value, read_string(layer.get("op"))))
    return found


def read_suite_layers(
    records: Iterable[Mapping[str, Any]], nodes: Mapping[str, Sequence[str]]
) -> tuple[list[LayerValue], list[str]]:
    """Return the layers in a suite's records for a model.

    Args:
        records: the records for the model's cases.
        nodes: layer -> node names, from the model file.

    Returns:
        The layers, and the layer names missing from the model file.
    """
    found, missing = [], []
    for record in records:
        layer = read_string(record.get("layer"))
        if not layer:
            continue
        if layer not in nodes:
            missing.append(layer)
            continue
        value = _find_worst_values(
            record,
            record.get("message"),
            layer=layer,
            case=read_string(record.get("id")),
            time_ns=_parse_time(record.get("device_p50_ns")),
            together=max(1, len(nodes[layer])),
        )
        found.append(LayerValue(nodes[layer], value, read_string(record.get("op"))))
    return found, missing


def map_outputs(outputs: Any, case: str) -> dict[str, NodeValue]:
    """Return output node -> comparison result, from a whole-model case."""
    return {
        f"output {read_string(one.get('name'))}": _find_worst_values(
            {"outputs": [one], "outcome": "PASS" if one.get("passed") is True else "FAIL"},
            one.get("reason"),
            case=case,
        )
        for one in read_mappings(outputs)
    }


def map_totals(totals: Iterable[ProfileTotal]) -> dict[str, NodeValue]:
    """Return node -> time, from a profile's totals by operation.

    A fused operation's time cannot be divided, so every node in the operation gets the full time.
    """
    found: dict[str, NodeValue] = {}
    for total in totals:
        for name in total.onnx_nodes:
            known = found.get(name, NodeValue())
            found[name] = replace(
                known,
                time_ns=(known.time_ns or 0.0) + total.run_ns,
                ops=(*known.ops, *total.ops),
                timed_with=max(known.timed_with, len(total.onnx_nodes)),
            )
    return found


def map_placement(parts: Any, nodes: Sequence[str] = ()) -> dict[str, NodeValue]:
    """Return node -> device, from a record's ``placement``.

    Args:
        parts: the ``placement`` list.
        nodes: names of all nodes in the model.
    """
    found = {}
    known = set(nodes)
    listed = read_mappings(parts)
    for part in listed:
        device = read_string(part.get("device")) + (" (elsewhere)" if part.get("elsewhere") is True else "")
        why = {
            name: read_string(reason.get("text"))
            for reason in read_mappings(part.get("reasons"))
            for name in read_list(reason.get("names"))
            if isinstance(name, str)
        }
        # Runtimes do not list the nodes if everything ran on one device.
        for name in read_list(part.get("names")) or (nodes if len(listed) == 1 else ()):
            if isinstance(name, str):
                # ONNX Runtime's names contain the operator: `relu (Relu)`.
                plain = name.rpartition(" (")[0]
                node = plain if name not in known and plain in known else name
                found[node] = NodeValue(placement=device, placement_reason=why.get(name, ""))
    return found


def merge_values(*sources: Mapping[str, NodeValue]) -> dict[str, NodeValue]:
    """Merge results from multiple sources per node. Earlier sources have priority."""
    found: dict[str, NodeValue] = {}
    for source in sources:
        for name, value in source.items():
            known = found.get(name)
            found[name] = value if known is None else _merge_values(known, value)
    return found


def _merge_values(first: NodeValue, second: NodeValue) -> NodeValue:
    nothing = NodeValue()
    own = {name: one for name, one in vars(first).items() if one != getattr(nothing, name)}
    return replace(second, **own)


def parse_real(value: Any) -> float | None:
    """Parse a number from a record, which stores inf and nan as strings. Return None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _parse_time(value: Any) -> float | None:
    found = parse_real(value)
    return found if found is not None and 0 <= found < math.inf else None


def _find_worst_values(finding: Mapping[str, Any], reason: Any, **more: Any) -> NodeValue:
    """Return the worst values over a finding's outputs; ``more`` sets further fields."""
    outputs = read_mappings(finding.get("outputs"))
    errors = [value for one in outputs if (value := parse_real(one.get("max_abs"))) is not None]
    ratios = [value for one in outputs if (value := parse_real(one.get("sqnr_db"))) is not None]
    # No other statistic includes elements that are NaN or infinite on one side only.
    if any((parse_real(one.get("nonfinite")) or 0) > 0 for one in outputs):
        errors, ratios = [*errors, float("inf")], [*ratios, float("-inf")]
    limits = [found for one in outputs if (found := compute_tolerance_ratio(one)) is not None]
    ratio, is_bound = max(limits, default=(None, False), key=lambda one: one[0])
    return NodeValue(
        tolerance_ratio=ratio,
        is_ratio_bound=is_bound,
        outputs=tuple(read_string(one.get("name")) for one in outputs),
        outcome=read_string(finding.get("outcome")),
        reason=read_string(reason),
        max_abs=max((value for value in errors if value == value), default=None),
        sqnr_db=min((value for value in ratios if value == value), default=None),
        placement=" + ".join(read_string(part.get("device")) for part in read_mappings(finding.get("placement"))),
        **more,
    )


def compute_tolerance_ratio(output: Mapping[str, Any]) -> tuple[float, bool] | None:
    """Return the error divided by the tolerance, from the record of a compared output.

    Returns:
        The ratio, and whether it is only an upper bound; None if the record has no tolerance. The record contains the
        values of an element out of tolerance. Without such an element, the bound is the largest error divided by atol,
        at most 1.
    """
    wrong, error = parse_real(output.get("mismatches")), parse_real(output.get("max_abs"))
    if "tolerance" not in output or wrong is None or read_list(output.get("criteria")):
        return None
    if (parse_real(output.get("nonfinite")) or 0) > 0:
        return math.inf, False
    tolerance = read_mapping(output["tolerance"])
    rtol, atol = (parse_real(tolerance.get(name)) for name in ("rtol", "atol"))
    if output["tolerance"] is None:
        return (math.inf, False) if wrong else (0.0, False)
    if rtol is None or atol is None or not (rtol >= 0 and atol >= 0):
        return None
    if wrong:
        values = [parse_real(one) for one in read_list(output.get("worst_values"))]
        if len(values) != 2 or values[0] is None or values[1] is None:
            return None
        limit = atol + rtol * abs(values[1])
        apart = abs(values[0] - values[1])
        return (apart / limit if limit > 0 and math.isfinite(apart) else math.inf), False
    if error is None or error != error:
        return None
    return (0.0, False) if error == 0 else (min(1.0, error / atol) if atol > 0 else 1.0, True)
