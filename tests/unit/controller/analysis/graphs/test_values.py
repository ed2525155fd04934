from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hil.controller.analysis.graphs.colours import STOPS, ColourScale, choose_text_colour, interpolate_colour
from hil.controller.analysis.graphs.dispatches import dispatch_graph, map_operations, sum_operations
from hil.controller.analysis.graphs.model_graph import GraphNode, ModelGraph, find_edges
from hil.controller.analysis.graphs.values import (
    LayerValue,
    NodeValue,
    bisect_layers,
    compute_tolerance_ratio,
    map_layers,
    map_outputs,
    map_placement,
    map_totals,
    merge_values,
    read_suite_layers,
)
from hil.controller.analysis.tensors.pictures import LIMIT_COLOURS
from hil.core.timeline import OpRow


def finding(outcome="PASS", *outputs, **more):
    return {"outcome": outcome, "outputs": list(outputs), **more}


def output(name="y", max_abs=0.0, sqnr_db="inf", **more):
    return {"name": name, "max_abs": max_abs, "sqnr_db": sqnr_db, **more}


def row(op, start, duration, *nodes, kind="compute", iteration=0):
    return OpRow("r", iteration, "sim", "iree", op, kind, nodes, tuple("T" for _ in nodes), start, duration)


def test_bisect_layer_sets_value_of_each_node():
    document = {
        "layers": [
            {"name": "L", "nodes": ["a", "b"], "isolated": finding("FAIL", output(max_abs=2.0, sqnr_db=3.0))},
            {"name": "M", "nodes": ["c"], "isolated": None, "cumulative": finding()},
        ]
    }
    found = map_layers(bisect_layers(document, "isolated"))
    assert found.keys() == {"a", "b"}
    assert found["a"] == NodeValue("FAIL", "", 2.0, 3.0, layer="L", case="L", outputs=("y",), together=2)
    assert map_layers(bisect_layers(document, "cumulative")).keys() == {"c"}


def test_bisect_layer_reports_worst_output_with_nan_worst():
    document = finding("FAIL", output("y", 1.0, 20.0), output("z", 0.5, 10.0))
    (layer,) = bisect_layers({"layers": [{"name": "L", "nodes": ["a"], "isolated": document}]}, "isolated")
    assert (layer.value.max_abs, layer.value.sqnr_db) == (1.0, 10.0)
    document["outputs"].append(output("n", "nan", None, nonfinite=3))
    (layer,) = bisect_layers({"layers": [{"name": "L", "nodes": ["a"], "isolated": document}]}, "isolated")
    assert (layer.value.max_abs, layer.value.sqnr_db) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    "document", [{}, {"layers": 3}, {"layers": [None, {"nodes": 3, "isolated": {"outputs": [1, {"max_abs": []}]}}]}]
)
def test_bisect_layers_ignore_damaged_record(document):
    assert map_layers(bisect_layers(document, "isolated")) == {}


def test_suite_layers_match_by_name():
    records = [
        {"id": "net_full_model", "layer": ""},
        {"id": "net_layer_A", "layer": "A", "outcome": "FAIL", "message": "off", "device_p50_ns": 5.0},
        {"id": "net_layer_B", "layer": "B"},
    ]
    layers, missing = read_suite_layers(records, {"A": ["a"]})
    assert missing == ["B"]
    assert map_layers(layers)["a"] == NodeValue("FAIL", "off", time_ns=5.0, layer="A", case="net_layer_A", together=1)


@pytest.mark.parametrize("time", ["nan", "inf", -1, None, [], "x", 10**400])
def test_suite_layers_drop_invalid_time(time):
    layers, _ = read_suite_layers([{"id": "a", "layer": "A", "device_p50_ns": time}], {"A": ["a"]})
    assert layers[0].value.time_ns is None


def test_layers_keep_gravest_value_of_shared_node():
    right, wrong = NodeValue("PASS", max_abs=9.0), NodeValue("FAIL", max_abs=1.0)
    found = map_layers([LayerValue(["a"], right), LayerValue(["a", "b"], wrong), LayerValue(["a"], right)])
    assert found["a"] == replace(wrong, together=2)


def test_outputs_become_separate_nodes():
    found = map_outputs([{"name": "y", "passed": False, "max_abs": 1.0, "reason": "far"}], "net")
    assert found == {"output y": NodeValue("FAIL", "far", 1.0, case="net", outputs=("y",))}


def test_node_time_sums_operations_of_median_iteration():
    rows = [
        row("execute", 0, 100, kind="runtime"),
        *(row("pad", 1, 5, "a"), row("conv", 10, 50, "a", "b"), row("pool", 70, 7, "c")),
        *(row("pad", 201, 7, "a", iteration=1), row("conv", 210, 60, "a", "b", iteration=1)),
        row("pool", 270, 9, "c", iteration=1),
    ]
    operations = sum_operations(rows)
    assert [one.name for one in operations] == ["pad", "conv", "pool"]
    found = map_totals(operations)
    assert found["a"] == NodeValue(time_ns=6 + 55, ops=("pad", "conv"), timed_with=2)
    assert found["c"] == NodeValue(time_ns=8, ops=("pool",), timed_with=1)


def test_dispatch_graph_joins_operations_across_nodes():
    nodes = [
        GraphNode("a", "Conv", outputs=("t",)),
        GraphNode("b", "Relu", inputs=("t",), outputs=("u",)),
        GraphNode("shape", "Reshape", inputs=("u",), outputs=("v",)),
        GraphNode("c", "Gemm", inputs=("v",), outputs=("w",)),
    ]
    model = ModelGraph("onnx", "net", nodes, find_edges(nodes))
    rows = [row("pad", 0, 5, "a"), row("conv", 10, 50, "a", "b"), row("gemm", 70, 7, "c")]
    operations = sum_operations(rows)
    graph = dispatch_graph(operations, "net", model)
    assert graph.edges == [(0, 1), (1, 2)]
    values = map_operations(graph, operations, {"b": NodeValue("FAIL", max_abs=3.0), "a": NodeValue("PASS")})
    assert (values["conv"].outcome, values["conv"].time_ns) == ("FAIL", 50)
    alone = dispatch_graph(operations, "net", None)
    assert alone.edges == [] and "unknown data flow" in alone.notes[0], "no edge is drawn that nobody knows"


def test_timed_operations_splits_operation_by_nodes():
    rows = [row("mm", 10 * at, 5 + at, name, iteration=at // 2) for at, name in enumerate("abab")]
    operations = sum_operations(rows)
    assert [(one.name, one.onnx_nodes) for one in operations] == [("mm", ("a",)), ("mm #2", ("b",))]
    assert [one.run_ns for one in operations] == [6, 7]
    assert map_totals(operations)["b"].ops == ("mm #2",)


def test_placement_maps_nodes_to_devices():
    parts = [{"device": "npu", "names": ["a"]}, {"device": "cpu", "names": ["b"], "elsewhere": True}, 3]
    found = map_placement(parts)
    assert {name: value.placement for name, value in found.items()} == {"a": "npu", "b": "cpu (elsewhere)"}
    assert map_placement([{"device": "npu", "names": []}], ["a"]) == {"a": NodeValue(placement="npu")}
    both = merge_values({"a": NodeValue("PASS")}, found, {"a": NodeValue("FAIL", time_ns=1.0)})
    assert both["a"] == NodeValue("PASS", placement="npu", time_ns=1.0)


def test_map_placement_shows_reasons_of_nodes():
    reasons = [{"text": "no kernel", "nodes": 1, "names": ["relu (Relu)"]}]
    part = {"device": "cpu", "names": ["relu (Relu)", "neg"], "elsewhere": True, "reasons": reasons}
    found = map_placement([part], ["relu", "neg"])
    assert {name: (one.placement, one.placement_reason) for name, one in found.items()} == {
        "relu": ("cpu (elsewhere)", "no kernel"),
        "neg": ("cpu (elsewhere)", ""),
    }


def test_scale_colours_errors_by_logarithm():
    values = [NodeValue(max_abs=value) for value in (0.0, 1e-6, 1e-4, 1e-2, math.inf)]
    scale = ColourScale.of("max_abs", values)
    assert [scale.level(value.max_abs or 0.0) for value in values] == pytest.approx([0, 0, 0.5, 1, 1])
    assert scale.choose_colour(values[0]) == STOPS[0]
    assert scale.choose_colour(values[-1]) == STOPS[-1]
    assert scale.choose_colour(NodeValue()) == scale.choose_colour(None) == ""
    assert [text for _, text in scale.legend()] == ["0", "0.0001", "0.01"]


def test_scale_treats_lowest_sqnr_as_worst():
    values = [NodeValue(sqnr_db=value) for value in (math.inf, 100.0, 20.0, -math.inf)]
    scale = ColourScale.of("sqnr_db", values)
    assert [scale.level(value.sqnr_db or 0.0) for value in values] == [0, pytest.approx(1 / 3), 1, 1]
    assert [text for _, text in scale.legend()] == ["140 dB and more", "80 dB", "20 dB"]


def test_scale_never_colours_good_sqnr_as_bad():
    """Also if it is the only value or the worst value."""
    for values in ([133.0], [133.0, math.inf], [133.0, 150.0], [59.0, 133.0, math.inf]):
        scale = ColourScale.of("sqnr_db", [NodeValue(sqnr_db=value) for value in values])
        assert scale.level(133.0) < 0.1, values
        assert scale.level(math.inf) == scale.level(150.0) == 0


def test_scale_colours_times_from_zero():
    scale = ColourScale.of("time_ns", [NodeValue(time_ns=50.0), NodeValue(time_ns=100.0)])
    assert scale.level(50.0) == 0.5


@pytest.mark.parametrize("metric", ["max_abs", "sqnr_db", "time_ns", "outcome", "placement"])
@pytest.mark.parametrize("value", [0.0, 1.0, math.inf, -math.inf, 5e-324, 1.7e308])
def test_scale_colours_single_value_of_any_size(metric, value):
    one = NodeValue("FAIL", max_abs=value, sqnr_db=value, time_ns=value, placement="cpu")
    scale = ColourScale.of(metric, [one])
    assert len(scale.choose_colour(one)) == 7
    assert scale.legend()


def test_scale_uses_distinct_outcome_and_device_colours():
    scale = ColourScale.of("outcome", [])
    colours = {word: scale.choose_colour(NodeValue(word)) for word in ("PASS", "FAIL", "COMPILE_ERROR", "SKIP")}
    assert len(set(colours.values())) == 4
    devices = ColourScale.of("placement", [NodeValue(placement="a"), NodeValue(placement="b")])
    assert devices.choose_colour(NodeValue(placement="a")) != devices.choose_colour(NodeValue(placement="b"))


def test_text_on_colour_has_readable_contrast():
    def light(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for step in range(101):
        colour = interpolate_colour(step / 100)
        first, second = sorted([light(colour), light(choose_text_colour(colour))])
        assert (second + 0.05) / (first + 0.05) >= 4.5, colour


LIMITS = {"rtol": 1e-3, "atol": 1e-5}


@pytest.mark.parametrize(
    ("output", "ratio"),
    [
        ({"mismatches": 2, "tolerance": LIMITS, "worst_values": [1.5, 1.0]}, (0.5 / 1.01e-3, False)),
        ({"mismatches": 1, "tolerance": LIMITS, "worst_values": ["nan", 1.0]}, (math.inf, False)),
        ({"mismatches": 1, "tolerance": LIMITS, "nonfinite": 1}, (math.inf, False)),
        ({"mismatches": 1, "tolerance": LIMITS}, None),
        ({"mismatches": 1, "tolerance": {"rtol": 0, "atol": 0}, "worst_values": [2, 1]}, (math.inf, False)),
        # Within tolerance, the record only has the largest error.
        ({"mismatches": 0, "tolerance": LIMITS, "max_abs": 4e-6}, (0.4, True)),
        ({"mismatches": 0, "tolerance": LIMITS, "max_abs": 4.0}, (1.0, True)),
        ({"mismatches": 0, "tolerance": LIMITS, "max_abs": 0.0}, (0.0, False)),
        ({"mismatches": 0, "tolerance": None}, (0.0, False)),
        ({"mismatches": 3, "tolerance": None}, (math.inf, False)),
        ({"mismatches": 3, "tolerance": None, "criteria": [{}]}, None),
        ({"max_abs": 1.0}, None),
        ({"mismatches": 1, "tolerance": {"rtol": "x"}, "worst_values": 3}, None),
    ],
)
def test_tolerance_ratio_of_recorded_output(output, ratio):
    found = compute_tolerance_ratio(output)
    assert found == (ratio if ratio is None else (pytest.approx(ratio[0]), ratio[1]))


def test_tolerance_colours_change_at_the_limit():
    values = [NodeValue(tolerance_ratio=value) for value in (0.0, 1e-9, 0.1, 1.0, 1.0001, 250.0, math.inf)]
    scale = ColourScale.of("tolerance_ratio", values)
    assert (scale.low, scale.high) == (1e-3, 1e3)
    found = [scale.choose_colour(value) for value in values]
    (far, _, near), (_, _, worst) = LIMIT_COLOURS
    assert [found[0], found[1], found[3], found[6]] == [f"#{one}" for one in (far, far, near, worst)]
    # 250 is 2.4 of 3 decades above the limit: between the second and the third colour.
    level = 2 * (0.5 + np.log10(250) / 6) - 1
    stops = [np.array([int(one[at : at + 2], 16) for at in (0, 2, 4)]) for one in LIMIT_COLOURS[1]]
    wanted = stops[1] + (stops[2] - stops[1]) * (2 * level - 1)
    assert np.allclose([int(found[5][at : at + 2], 16) for at in (1, 3, 5)], wanted, atol=1)
    assert np.abs(np.array([int(found[4][at : at + 2], 16) for at in (1, 3, 5)]) - stops[0]).max() <= 1
    assert [text for _, text in scale.legend()] == ["0.001 and less", "1, the limit", "above 1", "1000 and more"]
    assert scale.choose_colour(NodeValue()) == ""
