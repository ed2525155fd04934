"""Node values in Model Explorer's node data format, with a data set per file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hil.controller.analysis.graphs.colours import ColourScale, choose_text_colour
from hil.controller.analysis.graphs.model_graph import ModelGraph
from hil.controller.analysis.graphs.values import NodeValue

TITLES = {
    "tolerance_ratio": "error ÷ tolerance",
    "max_abs": "max abs error",
    "sqnr_db": "SQNR (dB)",
    "outcome": "outcome",
    "time_ns": "time (ns)",
    "placement": "placement",
}


def make_node_data(values: Mapping[str, NodeValue], metric: str, graph: ModelGraph | None = None) -> dict[str, Any]:
    """Return a metric's values as Model Explorer's node data.

    Args:
        values: node -> results.
        metric: from :data:`hil.controller.analysis.graphs.values.METRICS`.
        graph: the model's graph. It names the data set's graph, and gives unnamed nodes the ids of Model
            Explorer's ONNX adapter. None makes a data set for any open graph.
    """
    scale = ColourScale.of(metric, values.values())
    keys = {node.name: node.key for node in graph.nodes if node.key} if graph is not None else {}
    results = {}
    for name, value in values.items():
        found = value.get_metric(metric)
        if found is None:
            continue
        colour = scale.choose_colour(value)
        # JSON has no infinity. Model Explorer shows such a value as text, with the given colour.
        shown = found if isinstance(found, str) or math.isfinite(found) else str(found)
        results[keys.get(name, name)] = {"value": shown, "bgColor": colour, "textColor": choose_text_colour(colour)}
    data = {"name": f"hil: {TITLES[metric]}", "results": results}
    return {graph.name: data} if graph is not None and graph.name else data
