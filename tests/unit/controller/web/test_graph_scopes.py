"""Test name scopes on the graph page: default, groups, errors over tolerance, and the first failing node."""

from __future__ import annotations

import csv
import io
import json
import re
from html import unescape

import pytest
from support.web import asking
from support.web_scopes import write_scoped_bisection

from hil.controller.analysis.graphs.colours import ColourScale
from hil.controller.analysis.graphs.model_graph import GraphNode, ModelGraph
from hil.controller.analysis.graphs.scopes import Scope
from hil.controller.analysis.graphs.values import NodeValue
from hil.controller.web.graph.graphs import GraphSide
from hil.controller.web.graph.panes import summarize_scope
from hil.controller.web.index.sessions import IndexedSession

FIRST, SECOND = "/net/block4/layer2/Add", "/net/block7/layer5/Relu"
WRONG = {FIRST: 0.5, SECOND: 3e-6}


@pytest.fixture
def root(tmp_path):
    write_scoped_bisection(tmp_path, WRONG)
    return tmp_path


def pane(client, query=""):
    answer = client.get(f"/api/graph?id=scoped{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()["panes"][0]


def by_name(found, key):
    return dict(zip(found["names"], found[key], strict=True))


def test_graph_opens_on_first_failing_node(root):
    with asking(root) as client:
        found, text = pane(client), client.get("/graph?id=scoped").text
        chosen = client.get("/graph?id=scoped&node=/net/block0/layer0/Add").text
    assert f'data-node="{FIRST}" data-first' in text and "First failing node." in text
    assert "/tensors?id=scoped&amp;case=L%2Fnet%2Fblock4%2Flayer2%2FAdd&amp;output=t103" in text
    assert "First failing node." not in chosen
    # The scopes around the node are open, and the others are groups.
    assert {FIRST, "net/block4/layer3/", "net/block9/layer7/"} <= set(found["names"]) and SECOND not in found["names"]
    assert len(found["names"]) <= 120 and [name for _, name in found["wrong"]] == [FIRST, SECOND]


def test_first_wrong_layer_of_bisection_has_priority(root):
    path = root / "scoped" / "bisect.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "first_isolated": f"L{SECOND}"}))
    with asking(root) as client:
        assert f'data-node="{SECOND}"' in client.get("/graph?id=scoped").text


def test_group_counts_failing_nodes_and_has_color_of_worst(root):
    with asking(root) as client:
        found = pane(client, "&open=none")
    assert found["names"] == ["input x", *(f"net/block{number}/" for number in range(10)), f"output t{10 * 24 - 1}"]
    assert found["edges"] == [[at, at + 1] for at in range(11)]
    texts, colours = by_name(found, "texts"), by_name(found, "colours")
    assert (texts["net/block4/"], texts["net/block7/"], texts["net/block0/"]) == ("1 failing", "1 failing", "max ≤ 0.1")
    assert by_name(found, "ops")["net/block4/"] == "24 nodes" and by_name(found, "fails")["net/block4/"] == 1
    ratio = 0.5 / 2e-6
    assert by_name(found, "match")["net/block4/"][:2] == ["net/block4/", "/net/block4/layer0/MatMul"]
    values = [NodeValue(tolerance_ratio=one) for one in (ratio, 1.5, 0.1)]
    scale = ColourScale.of("tolerance_ratio", values)
    shown = [colours[name] for name in ("net/block4/", "net/block7/", "net/block0/")]
    assert shown == [scale.choose_colour(one) for one in values]
    assert [found["names"][place] for place in found["failing"]] == ["net/block4/", "net/block7/"]


def test_scopes_open_and_close_by_number(root):
    with asking(root) as client:
        closed = pane(client, "&open=none")
        number = by_name(closed, "scopes")["net/block1/"]
        opened = pane(client, f"&open={number}")
        everything = pane(client, "&open=all")
        chosen = pane(client, f"&open=none&node={SECOND}")
        group = pane(client, "&open=none&node=net/block1/layer2/")
    assert [name for name in opened["names"] if "block1" in name] == [f"net/block1/layer{at}/" for at in range(8)]
    assert (opened["open"], everything["open"], closed["open"]) == (str(number), "all", "none")
    assert len(everything["names"]) == 242 and not any(kind == "group" for kind in everything["kinds"])
    assert by_name(everything, "shorts")[FIRST] == "Add" and by_name(everything, "labels")[FIRST] == FIRST
    assert SECOND in chosen["names"] and "net/block7/layer4/" in chosen["names"]
    assert "net/block1/layer2/" in group["names"]


@pytest.mark.parametrize("value", ["x", "99999", "1,,2", "-1"])
def test_graph_rejects_unknown_scopes(root, value):
    with asking(root) as client:
        answer = client.get(f"/graph?id=scoped&open={value}")
    assert answer.status_code == 400 and "invalid open scope" in answer.text


def test_scope_details_and_table_list_failing_scopes_first(root):
    with asking(root) as client:
        text = client.get("/graph?id=scoped&node=net/block4/").text
        rows = list(csv.DictReader(io.StringIO(client.get("/graph/scopes.csv?id=scoped").text)))
    assert re.search(r"<dt>Scope</dt><dd>24 nodes, 1 failing</dd>", text)
    assert "<dt>Worst error ÷ tolerance</dt><dd>250000</dd>" in text
    listed = re.findall(r"<a href=\"[^\"]*#node\">([^<]+)</a></th><td class=\"number\">(\d+)</td>", unescape(text))
    assert listed[:2] == [("net/block4", "24"), ("net/block4/layer2", "3")]
    assert rows[0]["scope"] == "net/block4" and (rows[0]["nodes"], rows[0]["failing"]) == ("24", "1")
    assert float(rows[0]["tolerance_ratio"]) == pytest.approx(0.5 / 2e-6) and len(rows) == 90


def test_scope_shows_largest_value_of_each_error():
    nodes = [GraphNode(name, "Add") for name in ("a/x", "a/y", "a/z")]
    values = {
        "a/x": NodeValue(outcome="FAIL", max_abs=0.5, tolerance_ratio=2.0),
        "a/y": NodeValue(outcome="FAIL", max_abs=0.01, tolerance_ratio=900.0),
        "a/z": NodeValue(outcome="PASS", max_abs=7.0, tolerance_ratio=0.1, is_ratio_bound=True),
    }
    session = IndexedSession.__new__(IndexedSession)
    side = GraphSide(session, "", "onnx", "net", ModelGraph("onnx", "net", nodes, []), {}, values)
    found = summarize_scope(side, Scope("a", "", (0, 1, 2)))
    assert found.failing == 2
    assert found.worst == {"tolerance_ratio": values["a/y"], "max_abs": values["a/z"]}


def test_node_table_shows_error_over_tolerance(root):
    with asking(root) as client:
        text = client.get("/graph?id=scoped").text
        rows = list(csv.DictReader(io.StringIO(client.get("/graph.csv?id=scoped").text)))
        nodes = client.get("/api/v1/graph?id=scoped").json()["nodes"]
    assert "Error ÷ tolerance: " in text and "1, the limit" in text and "≤ 0.1" in text
    first, second, third = ((one["tolerance_ratio"], one["is_ratio_bound"]) for one in nodes[:3])
    assert (first, second, third) == ((pytest.approx(0.5 / 2e-6), False), (pytest.approx(1.5), False), (0.1, True))
    assert [row["node"] for row in rows[:2]] == [FIRST, SECOND]
    assert float(rows[1]["tolerance_ratio"]) == pytest.approx(1.5)


def test_saved_graph_contains_all_nodes(root):
    with asking(root) as client:
        text = client.get("/share", params={"page": "/graph?id=scoped"}).text
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert data and len(json.loads(data[1])["panes"][0]["names"]) == 242
