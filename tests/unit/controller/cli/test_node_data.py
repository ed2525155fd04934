"""Test `hil profile export` and `hil layers --node-data`, which write files for Model Explorer."""

from __future__ import annotations

import json

import onnx
import pytest
from click.testing import CliRunner
from support.bisect_records import bisect_record, layer_finding
from support.layer_models import FLOAT, model_of, node, residual_cnn
from support.made_profiles import profile, row
from support.suite_runs import suite_head

from hil.controller.analysis.bisect.result import make_finding
from hil.controller.analysis.profile.store import write_profile
from hil.controller.cli.analysis.layers import layers
from hil.controller.cli.stored.profile import export
from hil.controller.records.outputs import StoredComparison, StoredTolerance
from hil.core.results import Outcome
from hil.errors import HilError, UsageError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))


def called(command, *words):
    return CliRunner().invoke(command, [*map(str, words)], standalone_mode=False, catch_exceptions=False)


def results(path, graph=""):
    found = json.loads(path.read_text())
    found = found[graph] if graph else found
    return {name: one["value"] for name, one in found["results"].items()}


def saved(model, path):
    onnx.save(model, path)
    return path


def test_profile_export_writes_times_by_node(tmp_path):
    rows = [row("a", 0, 30), row("b", 40, 10), row("fused", 60, 50, onnx_nodes=("a", "c"))]
    write_profile(profile(rows), tmp_path / "times")
    out = tmp_path / "times.json"
    assert "3 nodes" in called(export, tmp_path / "times", "--node-data", out).output
    assert results(out) == {"a": 80.0, "b": 10.0, "c": 50.0}


@pytest.mark.ci
def test_profile_export_uses_adapter_ids_for_unnamed_nodes(tmp_path):
    model = model_of([node("Relu", ["x"], ["a"]), node("Relu", ["a"], ["y"])], [("x", FLOAT, [2])], [("y", FLOAT, [2])])
    write_profile(profile([row("Relu_1", 0, 30)]), tmp_path / "times")
    out = tmp_path / "times.json"
    called(export, tmp_path / "times", "--node-data", out, "--model", saved(model, tmp_path / "net.onnx"))
    assert results(out, "net") == {"<node_1>": 30.0}


@pytest.mark.ci
def test_layers_write_bisect_values_by_node(tmp_path):
    wrong = {"mismatches": 1, "elements": 4, "tolerance": StoredTolerance(rtol=0.0, atol=0.125)}
    output = StoredComparison(name="c1", passed=False, max_abs=0.5, sqnr_db="inf", worst_values=[1.5, 1.0], **wrong)
    found = make_finding(Outcome.FAIL, outputs=[output])
    layer = layer_finding("Conv_stem", "Conv", ["stem"], 0, ["c1"], found)
    folder = tmp_path / "bisected"
    folder.mkdir()
    (folder / "bisect.json").write_text(json.dumps(bisect_record([layer]).to_json()))
    model, out = saved(residual_cnn(), tmp_path / "net.onnx"), tmp_path / "errors.json"
    called(layers, model, "--values", folder, "--node-data", out)
    assert results(out, "net") == {"stem": 0.5}
    called(layers, model, "--values", folder, "--node-data", out, "--by", "sqnr")
    assert results(out, "net") == {"stem": "inf"}
    called(layers, model, "--values", folder, "--node-data", out, "--by", "tolerance")
    assert results(out, "net") == {"stem": 4.0}
    called(layers, model, "--values", folder, "--node-data", out, "--by", "outcome")
    assert results(out, "net") == {"stem": "FAIL"}
    with pytest.raises(UsageError, match="no node has a value for time"):
        called(layers, model, "--values", folder, "--node-data", out, "--by", "time")


def test_layers_write_suite_values_by_node(tmp_path):
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "suite.json").write_text(json.dumps(suite_head(ids=["a", "b"]).to_json()))
    usual = {"suite": "s", "flow": "iree", "runtime": "iree", "outcome": "PASS", "ended": "PASS", "model": "net"}
    cases = [
        {**usual, "id": "a", "layer": "Conv_stem", "outputs": [{"name": "c1", "passed": False, "max_abs": 0.25}]},
        {**usual, "id": "b", "layer": "Gone", "outputs": []},
        {**usual, "id": "c", "layer": "Relu_stem_relu", "model": "other"}
        | {"outputs": [{"name": "r1", "passed": False, "max_abs": 9.0}]},
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in cases))
    model, out = saved(residual_cnn(), tmp_path / "net.onnx"), tmp_path / "errors.json"
    printed = called(layers, model, "--values", folder, "--node-data", out).output
    assert results(out, "net") == {"stem": 0.25}
    assert "1 layers are not in net, such as Gone" in printed


@pytest.mark.ci
@pytest.mark.parametrize("content", [None, "", "[]", '{"layers": 3}', '{"layers": [null]}'])
def test_layers_reject_directory_without_values(tmp_path, content):
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is not None:
        (folder / "bisect.json").write_text(content)
    model = saved(residual_cnn(), tmp_path / "net.onnx")
    with pytest.raises(HilError):
        called(layers, model, "--values", folder, "--node-data", tmp_path / "out.json")


def test_layers_require_node_data_with_values(tmp_path):
    model = saved(residual_cnn(), tmp_path / "net.onnx")
    with pytest.raises(UsageError, match="require each other"):
        called(layers, model, "--node-data", tmp_path / "out.json")
    with pytest.raises(UsageError, match="require each other"):
        called(layers, model, "--values", tmp_path)
