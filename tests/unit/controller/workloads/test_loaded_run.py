"""`hil.load_run`: stored runs as data frames, and as tables in notebooks."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from support.suite_runs import case, comparison, suite_run

import hil
from hil.controller.storage.runs import RunStore
from hil.controller.workloads.loaded_run import LoadedRun
from hil.errors import UsageError

FAILING = case("m_conv1", "FAIL", model="m", device_p50_ns=1_500_000.0, outputs=(comparison(max_abs="inf"),))
PASSING = case("m_relu1", "PASS", model="m", message="")


@pytest.fixture
def run(tmp_path: Path) -> LoadedRun:
    return hil.load_run(suite_run(tmp_path / "nightly", [FAILING, PASSING]))


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_cases_are_rows_of_data_frame(run, frame):
    cases = run.cases(frame)
    assert type(cases).__module__.split(".")[0] == frame
    assert list(cases["id"]) == ["m_conv1", "m_relu1"]
    assert list(cases["outcome"]) == ["FAIL", "PASS"]
    assert cases["device_p50_ms"][0] == 1.5
    assert cases["max_abs"][0] == math.inf  # a string in the record


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_outputs_are_rows_of_data_frame(run, frame):
    outputs = run.outputs(frame)
    assert list(outputs["id"]) == ["m_conv1", "m_relu1"]
    assert list(outputs["name"]) == ["y", "y"]


@pytest.mark.parametrize(("installed", "expected"), [({"pandas", "polars"}, "pandas"), ({"polars"}, "polars")])
def test_data_frame_uses_first_installed_library(run, monkeypatch, installed, expected):
    for name in {"pandas", "polars"} - installed:
        monkeypatch.setitem(sys.modules, name, None)
    assert type(run.cases()).__module__.split(".")[0] == expected


def test_missing_library_is_usage_error(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="data frames need pandas") as caught:
        run.cases("pandas")
    assert caught.value.hint == "pip install pandas"
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UsageError, match="data frames need pandas or polars"):
        run.outputs()


def test_unknown_library_is_usage_error(run):
    with pytest.raises(UsageError, match="unknown library 'panda'") as caught:
        run.cases("panda")
    assert caught.value.hint == "did you mean 'pandas'? expected one of pandas, polars"


def test_notebook_shows_cases_as_escaped_table(run, tmp_path):
    assert '<td style="text-align: left">m_conv1</td>' in run._repr_html_()
    assert repr(run) == f"<LoadedRun {run.id}: 1 PASS, 1 FAIL>"
    script = "<script>alert(1)</script>"
    shown = hil.load_run(suite_run(tmp_path / "other", [case("a", "FAIL", message=script)]))._repr_html_()
    assert script not in shown and "&lt;script&gt;" in shown


def test_run_is_found_by_id_and_prefix(tmp_path):
    stored = RunStore(tmp_path).create("model", {}, "20261130-010203-model-ab12")
    for name in ("latest", "20261130", stored.id, stored.folder):
        assert repr(hil.load_run(name, out=tmp_path)) == f"<LoadedRun {stored.id}: no cases>"


def test_suite_run_is_found_by_prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunStore().create("model", {}, "20261130-010203-model-ab12")
    suite_run(Path("hil-suites/20261130-020304-nets-iree-cd34"), [PASSING])
    for name in ("latest", "20261130-02"):
        assert hil.load_run(name).folder == Path("hil-suites/20261130-020304-nets-iree-cd34")
    assert hil.load_run("20261130-01").folder == Path("hil-runs/20261130-010203-model-ab12")


def test_directory_without_run_is_usage_error(tmp_path):
    with pytest.raises(UsageError, match="is a directory, but not a run"):
        hil.load_run(tmp_path)


def test_missing_run_is_usage_error(tmp_path):
    with pytest.raises(UsageError, match="run 'nightly' not found"):
        hil.load_run("nightly", out=tmp_path)
