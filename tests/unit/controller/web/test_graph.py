"""Test the graph page and its data on stored records, without a browser."""

from __future__ import annotations

import functools
import json
import re
import shutil
from html.parser import HTMLParser

import onnx
import pytest
from support.layer_models import residual_cnn
from support.web import asking, write_record, write_run, write_suite

from hil.controller.analysis.graphs.colours import ColourScale
from hil.controller.analysis.graphs.values import NodeValue
from hil.controller.analysis.profile.store import write_profile
from hil.controller.models.description import digest_of_files
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.web.graph import models
from hil.core.clock import ClockFit
from hil.core.files import digest_file
from hil.core.timeline import OpRow, Profile

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e"


def output(name, error, passed=True):
    return {"name": name, "passed": passed, "max_abs": error, "sqnr_db": 100.0, "reason": "", "elements": 4}


def layer(name, *nodes, error=0.0, outcome="PASS", tensor="t", reason=""):
    found = {"outcome": outcome, "reason": reason, "outputs": [output(tensor, error, outcome == "PASS")]}
    return {"name": name, "op": "Conv", "nodes": list(nodes), "depth": 0, "isolated": found, "cumulative": None}


def bisect(root, *layers, name="bisected", model="net.onnx", **more):
    write_record(root / name / "bisect.json", {"schema": 1, "model": model, "board": "sim", "layers": layers, **more})


def net(root):
    path = root / "net.onnx"
    onnx.save(residual_cnn(), path)
    return path


def digest(path):
    return digest_of_files({"": digest_file(path)})


LAYERS = (
    layer("Conv_stem", "stem", error=1e-6, tensor="c1"),
    layer("Relu_stem_relu", "stem_relu", error=0.0, tensor="r1"),
    layer("Add_block", "block/add", error=1e-2, outcome="FAIL", tensor="sum", reason="far off"),
)


def pane(client, query, number=0):
    answer = client.get(f"/api/graph?{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()["panes"][number]


def by_name(pane, key):
    return dict(zip(pane["names"], pane[key], strict=True))


def test_graph_colors_bisect_nodes_by_error(tmp_path):
    net(tmp_path)
    bisect(tmp_path, *LAYERS)
    with asking(tmp_path) as client:
        page = client.get("/graph?id=bisected&node=block/add")
        drawn = pane(client, "id=bisected")
    scale = ColourScale.of("max_abs", [NodeValue(max_abs=1e-6), NodeValue(max_abs=1e-2)])
    colours = by_name(drawn, "colours")
    assert colours["stem"] == scale.choose_colour(NodeValue(max_abs=1e-6))
    assert colours["block/add"] == scale.choose_colour(NodeValue(max_abs=1e-2))
    assert colours["pool"] == ""
    assert by_name(drawn, "texts")["block/add"] == "0.01"
    assert [drawn["names"][place] for place in drawn["failing"]] == ["block/add"]
    assert "far off" in page.text
    assert "/tensors?id=bisected&amp;case=Add_block&amp;output=sum" in page.text
    assert "/case?id=bisected&amp;case=Add_block" in page.text


def test_graph_table_sorts_by_error_and_filters_nodes(tmp_path):
    net(tmp_path)
    bisect(tmp_path, *LAYERS)
    with asking(tmp_path) as client:
        rows = re.findall(r'data-name="([^"]*)"', client.get("/graph?id=bisected").text)
        found = re.findall(r'data-name="([^"]*)"', client.get("/graph?id=bisected&q=block+relu&order=place").text)
        part = client.get("/graph?id=bisected&q=block", headers={"hx-request": "true", "hx-target": "nodes"}).text
    assert rows[:3] == ["block/add", "stem", "stem_relu"]
    assert found == ["block/relu1", "block/relu2"]
    assert part.lstrip().startswith('<div id="nodes">') and "<h1>" not in part


def test_graph_lists_bisect_nodes_without_model(tmp_path):
    bisect(tmp_path, *LAYERS)
    with asking(tmp_path) as client:
        text = client.get("/graph?id=bisected").text
        drawn = pane(client, "id=bisected")
    assert drawn["names"] == ["stem", "stem_relu", "block/add"]
    assert (drawn["edges"], drawn["ops"]) == ([], ["Conv", "Conv", "Conv"]), "no edge is drawn that nobody knows"
    assert "net.onnx is missing" in text and "connections unknown" in text and "edges" not in text


def test_graph_reads_outside_model_only_with_matching_digest(tmp_path):
    roots = tmp_path / "runs"
    path = net(tmp_path)
    bisect(roots, *LAYERS, model=str(path))
    bisect(roots, *LAYERS, model=str(path), name="known", model_digest=digest(path))
    bisect(roots, *LAYERS, model=str(path), name="changed", model_digest="blake3:0")
    case = {"name": "net", "path": str(path), "model": {"format": "onnx", "digest": digest(path)}}
    verdict = {"outputs": [output("y", 1.0)]}
    write_run(roots, "same", [{**case, "verdicts": [verdict]}])
    write_run(roots, "other", [{**case, "model": {"format": "onnx", "digest": "blake3:0"}, "verdicts": [verdict]}])
    with asking(roots) as client:
        assert "outside the served directories" in client.get("/graph?id=bisected").text
        assert "stem" in pane(client, "id=same")["names"] and "stem" in pane(client, "id=known")["names"]
        assert "net.onnx has changed since the run, and is outside" in client.get("/graph?id=changed").text
        refused = client.get("/graph?id=other")
        assert refused.status_code == 404 and "outside the served directories" in refused.text


def test_graph_reports_changed_model(tmp_path):
    path = net(tmp_path)
    write_run(
        tmp_path, "run", [{"name": "net", "path": "net.onnx", "model": {"format": "onnx", "digest": digest(path)}}]
    )
    with asking(tmp_path) as client:
        assert "has changed" not in client.get("/graph?id=run").text
        model = residual_cnn()
        model.producer_name = "another"
        onnx.save(model, path)
        assert "has changed" in client.get("/graph?id=run").text


def profiled(root, run, times):
    path = net(root)
    rows = [
        OpRow(run, 0, "sim", "iree", f"dispatch_{number}", "compute", nodes, ("Conv",), 100 * number, time)
        for number, (nodes, time) in enumerate(times)
    ]
    clock = ClockFit(0, 0.0, 0, 0)
    write_profile(Profile(run, "net", "sim", "iree", rows, [], [], [], [], clock), root / run / "profile" / "net")
    case = {"name": "net", "path": "net.onnx", "model": {"format": "onnx", "digest": digest(path)}}
    write_run(root, run, [{**case, "profiles": [{"kind": "run", "folder": f"{run}/profile"}]}])


def test_graph_shows_profile_times_and_operations(tmp_path):
    profiled(tmp_path, "run", [(("stem", "stem_norm"), 50), (("block/conv1",), 10)])
    with asking(tmp_path) as client:
        drawn = pane(client, "id=run&of2=dispatches")
        beside = pane(client, "id=run&of2=dispatches", 1)
        chosen = client.get("/graph?id=run&of2=dispatches&node=stem_norm").text
        only = client.get("/graph/node-data?id=run&by=time_ns").json()
    scale = ColourScale.of("time_ns", [NodeValue(time_ns=50.0)])
    assert by_name(drawn, "colours")["stem_norm"] == scale.choose_colour(NodeValue(time_ns=50.0))
    assert by_name(drawn, "colours")["block/conv1"] == scale.choose_colour(NodeValue(time_ns=10.0))
    assert beside["names"] == ["dispatch_0", "dispatch_1"]
    assert beside["edges"] == [[0, 1]]
    assert beside["match"][0] == ["dispatch_0", "stem", "stem_norm"]
    assert "dispatch_0" in chosen and "shared with 1 other node of the operation" in chosen
    assert {name: one["value"] for name, one in only["net"]["results"].items()} == {
        "stem": 50.0,
        "stem_norm": 50.0,
        "block/conv1": 10.0,
    }


def test_graph_panes_share_color_scale(tmp_path):
    net(tmp_path)
    bisect(tmp_path, *LAYERS)
    bisect(tmp_path, layer("Conv_stem", "stem", error=1.0), name="other")
    with asking(tmp_path) as client:
        left, right = (pane(client, "id=bisected&id2=0:other", number) for number in (0, 1))
        table = client.get("/graph?id=bisected&id2=0:other&order=place").text
    scale = ColourScale.of("max_abs", [NodeValue(max_abs=value) for value in (1e-6, 1e-2, 1.0)])
    assert by_name(left, "colours")["block/add"] == scale.choose_colour(NodeValue(max_abs=1e-2))
    assert by_name(right, "colours")["stem"] == scale.choose_colour(NodeValue(max_abs=1.0))
    assert "max abs error in comparison" in table


def test_graph_locates_suite_layers_in_model(tmp_path):
    folder = tmp_path / "nets"
    folder.mkdir()
    net(folder)
    cases = [
        {"id": "net_full_model", "model": "net", "outputs": [output("y", 0.5)]},
        {"id": "net_layer_Conv_stem", "model": "net", "layer": "Conv_stem", "outputs": [output("c1", 0.25)]},
        {"id": "net_layer_gone", "model": "net", "layer": "gone", "outputs": []},
    ]
    write_suite(tmp_path, "suite", cases, source="nets", request={"group": "node"})
    with asking(tmp_path) as client:
        drawn = pane(client, "id=suite")
        text = client.get("/graph?id=suite&case=net_layer_Conv_stem&node=stem").text
        shutil.rmtree(folder)
        alone = pane(client, "id=suite")
    assert by_name(drawn, "texts")["stem"] == "0.25"
    assert "1 layers of the suite are missing from the model" in text and "case=net_layer_Conv_stem" in text
    assert by_name(alone, "texts")["Conv_stem"] == "0.25"


def test_graph_draws_built_in_models_but_not_namesakes(tmp_path):
    cases = [{"id": "mlp_layer_fc", "model": "mlp", "layer": "fc", "outputs": [output("y", 0.5)]}]
    for name, place in (("own", ""), ("users", str(tmp_path / "models"))):
        write_suite(tmp_path, name, cases, source="@models" if name == "own" else "models", suite="models", place=place)
    with asking(tmp_path) as client:
        assert pane(client, "id=own")["edges"] and not pane(client, "id=users")["edges"]


@pytest.mark.parametrize("kind", ["suite", "bisected"])
def test_graph_checks_model_digest_of_every_record(tmp_path, kind):
    """Outside the served directories only the exact file is drawn. A changed file inside is reported."""
    path, roots = net(tmp_path), tmp_path / "runs"
    for root, named in ((roots, "net.onnx"), (tmp_path / "own", "net.onnx")):
        bisect(root, *LAYERS, model=named, model_digest=digest(path))
        cases = [{"id": "net_layer_Conv_stem", "model": "net", "layer": "Conv_stem", "outputs": [output("c1", 0.25)]}]
        files = {"net": {"path": named, "digest": digest(path)}}
        write_suite(root, "suite", cases, source=".", models=files)
    shutil.copy(path, tmp_path / "own")
    with asking(roots) as client, asking(tmp_path / "own") as within:
        assert pane(client, f"id={kind}")["edges"] and pane(within, f"id={kind}")["edges"]
        assert "has changed" not in within.get(f"/graph?id={kind}").text
        model = residual_cnn()
        model.producer_name = "another"
        for one in (path, tmp_path / "own" / "net.onnx"):
            onnx.save(model, one)
        assert not pane(client, f"id={kind}")["edges"]
        assert "has changed since the run, and is outside" in client.get(f"/graph?id={kind}").text
        assert "has changed since the run" in within.get(f"/graph?id={kind}").text


def test_graph_explains_missing_model_of_published_session(tmp_path):
    """The model still exists where the session ran."""
    bisect(tmp_path / "published", *LAYERS)
    with asking(tmp_path) as client:
        assert "net.onnx is missing" in client.get("/graph?id=published/bisected").text
        (tmp_path / "published" / ".hil-web").mkdir()
        text = client.get("/graph?id=published/bisected").text
    assert "hil publish only sends" in text and "is missing" not in text


def test_graph_imports_only_iree_programs(tmp_path):
    net(tmp_path)
    bisect(tmp_path, *LAYERS, runtime="onnxruntime")
    with asking(tmp_path) as client:
        answer = client.get("/graph?id=bisected&of=imported")
    assert answer.status_code == 404 and "cannot draw a program for onnxruntime" in answer.text


def test_graph_offers_models_of_session(tmp_path):
    path = net(tmp_path)
    case = {"path": "net.onnx", "model": {"format": "onnx", "digest": digest(path)}}
    write_run(tmp_path, "run", [{**case, "name": "first"}, {**case, "name": "second"}])
    with asking(tmp_path) as client:
        text = client.get("/graph?id=run&case=second").text
    assert '<option value="first">first</option><option value="second" selected>second</option>' in text


class Seen(HTMLParser):
    """Parse the tags and the text of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.text = set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_graph_prefers_program_times_over_layer_times(tmp_path):
    profiled(tmp_path, "net", [(("stem",), 50)])
    cases = [
        {"id": "net_full_model", "model": "net", "left": {"run profile": "../net/profile/net"}},
        {"id": "net_a", "model": "net", "layer": "Conv_stem", "device_p50_ns": 7.0, "outputs": [output("c1", 0.5)]},
        {"id": "net_b", "model": "net", "layer": "Relu_stem_relu", "device_p50_ns": 9.0},
    ]
    write_suite(tmp_path, "suite", cases, source="net.onnx")
    write_suite(tmp_path, "plain", [{**cases[0], "left": {}}, *cases[1:]], source="net.onnx")
    with asking(tmp_path) as client:
        whole, plain = (by_name(pane(client, f"id={name}&by=time_ns"), "texts") for name in ("suite", "plain"))
        told = client.get("/graph?id=plain&node=stem").text
    assert (whole["stem"], whole["stem_relu"]) == ("50 ns", "")
    assert (plain["stem"], plain["stem_relu"]) == ("7 ns", "9 ns")
    assert "measured as an isolated layer" in told


def test_graph_escapes_record_and_model_texts(tmp_path):
    model = residual_cnn()
    model.graph.node[0].name = HOSTILE
    onnx.save(model, tmp_path / "net.onnx")
    bisect(tmp_path, layer(HOSTILE, HOSTILE, error=1.0, outcome="FAIL", tensor=HOSTILE, reason=HOSTILE))
    with asking(tmp_path) as client:
        text = client.get("/graph", params={"id": "bisected", "node": HOSTILE, "q": HOSTILE}).text
        drawn = pane(client, "id=bisected")
    seen = Seen()
    seen.feed(text)
    assert "img" not in seen.tags and HOSTILE.rstrip("\u202e") in seen.text
    assert "\u202e" not in seen.text
    assert HOSTILE in drawn["names"]
    assert not any("\u202e" in label for label in drawn["labels"])


@pytest.mark.parametrize(
    "query",
    [
        *("", "id=no", "id=bisected&of=x", "id=bisected&by=x", "id=bisected&way=x"),
        *("id=bisected&page=x", "id=bisected&id2=x", "id=bisected&id2=0:no", "id=bisected&case=no", "id=odd"),
        *("id=bisected&of=dispatches", "id=worse", "id=bisected&of=imported", "id=bisected&of2=dispatches"),
    ],
)
def test_graph_reports_invalid_queries(tmp_path, query):
    bisect(tmp_path, *LAYERS)
    bisect(tmp_path, 3, {"nodes": [1, None], "isolated": {"outputs": 5}}, name="odd", model=["x"])
    write_record(tmp_path / "worse" / "run.json", {"cases": [{"name": "m", "path": "/etc/passwd\0", "profiles": [{}]}]})
    with asking(tmp_path) as client:
        for path in ("/graph", "/api/graph", "/graph/node-data"):
            answer = client.get(f"{path}?{query}")
            assert answer.status_code == (400 if query.endswith("=x") else 404)
            assert "<h1>Error</h1>" in answer.text


def test_graph_replaces_lone_surrogates(tmp_path):
    bisect(tmp_path, layer("L\ud800", "n\ud800", error=1.0), *LAYERS)
    cases = [{"id": "c", "model": "m", "layer": "L\udfff", "outcome": "FAIL\ud800"}]
    write_suite(tmp_path, "suite", cases, source="nets")
    with asking(tmp_path) as client:
        assert pane(client, "id=bisected")["names"][0] == "n?"
        for path in ("/graph", "/api/graph", "/graph/node-data"):
            assert client.get(f"{path}?id=suite").status_code == 200


def test_graph_rejects_unknown_order(tmp_path):
    bisect(tmp_path, *LAYERS)
    with asking(tmp_path) as client:
        assert client.get("/graph?id=bisected&order=x").status_code == 400


def test_graph_draws_record_of_damaged_model(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"\x0a\xff\xff")
    bisect(tmp_path, *LAYERS)
    with asking(tmp_path) as client:
        text = client.get("/graph?id=bisected").text
    assert "cannot draw net.onnx" in text and "block/add" in text


@pytest.mark.ci
def test_graph_draws_cached_conversion_of_other_format(tmp_path, monkeypatch):
    net(tmp_path).rename(tmp_path / "net.pt2")
    bisect(tmp_path, *LAYERS, model="net.pt2")
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))
    # This test has no real torch program, so it uses ONNX.
    as_onnx, made = models.convert_to_onnx, []
    monkeypatch.setattr(models, "import_model", functools.partial(models.import_model, format="onnx"))
    monkeypatch.setattr(
        models, "convert_to_onnx", lambda model, **how: made.append(model.path) or as_onnx(model, **how)
    )
    with asking(tmp_path) as client:
        assert "net.pt2 is not an ONNX file" in client.get("/graph?id=bisected").text
        assert pane(client, "id=bisected")["names"] == ["stem", "stem_relu", "block/add"]
        assert made == []
        import_model(tmp_path / "net.pt2", format="onnx", cache=Cache())
        assert "pool" in pane(client, "id=bisected")["names"]
        assert made == [tmp_path / "net.pt2"]


def test_node_data_contains_graph_name(tmp_path):
    net(tmp_path)
    bisect(tmp_path, *LAYERS)
    with asking(tmp_path) as client:
        answer = client.get("/graph/node-data?id=bisected")
    found = json.loads(answer.text)
    assert answer.headers["content-disposition"].startswith("attachment")
    assert found["net"]["results"]["block/add"]["value"] == 1e-2
