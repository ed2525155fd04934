"""Values of nodes in the form that Model Explorer reads: its node data, one set in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hil.controller.analysis.graphs.colours import Scale, text_on
from hil.controller.analysis.graphs.model_graph import ModelGraph
from hil.controller.analysis.graphs.values import NodeValue

TITLES = {
    "max_abs": "max abs error",
    "sqnr_db": "SQNR (dB)",
    "outcome": "outcome",
    "time_ns": "time (ns)",
    "placement": "placement",
}


def node_data(values: Mapping[str, NodeValue], metric: str, graph: ModelGraph | None = None) -> dict[str, Any]:
    """The values of one metric as Model Explorer's node data.

    Args:
        values: node -> what is known of it.
        metric: one of :data:`hil.controller.analysis.graphs.values.METRICS`.
        graph: the model's. Its name is then the set's graph, and nodes without a name of their own have the ids that
            Model Explorer's adapter for ONNX gives them. Without it the set belongs to whatever graph is open.
    """
    scale = Scale.of(metric, values.values())
    keys = {node.name: node.key for node in graph.nodes if node.key} if graph is not None else {}
    results = {}
    for name, value in values.items():
        found = value.of(metric)
        if found is None:
            continue
        colour = scale.colour(value)
        # JSON has no infinity: such a value is a text, which Model Explorer shows and colours as it is.
        shown = found if isinstance(found, str) or math.isfinite(found) else str(found)
        results[keys.get(name, name)] = {"value": shown, "bgColor": colour, "textColor": text_on(colour)}
    data = {"name": f"hil: {TITLES[metric]}", "results": results}
    return {graph.name: data} if graph is not None and graph.name else data
