"""A misbehaving package ends only the affected case."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agents import start_process, stop_process
from support.broken_package import WAYS, install, save_relu
from support.commands import Ended

pytestmark = pytest.mark.ci

# Prefix of a model name -> outcome when that part of the package misbehaves.
OUTCOMES = {
    "import": "IMPORT_ERROR",
    "reads": "IMPORT_ERROR",
    "compile": "COMPILE_ERROR",
    "load": "LOAD_ERROR",
    "run": "RUN_ERROR",
    "fetch": "RUN_ERROR",
    "refer": "REFERENCE_ERROR",
}
RECIPE = {"recipe": "IMPORT_ERROR"}


@pytest.fixture
def acme(tmp_path: Path, environment: dict[str, str], hil: Callable[..., Ended]) -> Callable[..., Ended]:
    """Run `hil` with the package installed."""
    install(tmp_path / "site")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tmp_path / "site"), environment.get("PYTHONPATH"))))
    return hil


@pytest.fixture
def board(acme: Callable[..., Ended], environment: dict[str, str], tmp_path: Path, monkeypatch) -> Iterator[str]:
    """Start an agent with the package's runtime and return its address."""
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    process, address = start_process("hil.agent", f"unix:{tmp_path}/agent.sock", tmp_path / "store")
    yield address
    stop_process(process)


def save_models(folder: Path, outcomes: dict[str, str]) -> dict[str, str]:
    """Save a valid model and a model per part and failure; return the outcome of each name."""
    folder.mkdir()
    wanted = {"good": "PASS"}
    save_relu(folder / "good.onnx")
    for place, outcome in outcomes.items():
        for way in WAYS:
            if place == "run" and way in ("none", "wrong"):
                continue  # the result of run() is not used
            save_relu(folder / f"{place}-{way}{'.odd' if place in ('import', 'reads') else '.onnx'}")
            wanted[f"{place}-{way}"] = outcome
    return wanted


def test_run_limits_package_failure_to_case(acme: Callable[..., Ended], board: str, tmp_path: Path) -> None:
    wanted = save_models(tmp_path / "nets", OUTCOMES)
    files = sorted((tmp_path / "nets").iterdir())
    ended = acme("run", *files, "--board", board, "--runtime", "acme", "--reference", "acme", "--json")
    cases = {case["name"]: case for case in ended.document["cases"]}
    assert {name: case["outcome"] for name, case in cases.items()} == wanted
    assert [name for name, case in cases.items() if name != "good" and "acme 1.2" not in case["reason"]] == []
    assert ended.code == 3


@pytest.mark.slow
def test_suite_limits_package_failure_to_case(acme: Callable[..., Ended], board: str, tmp_path: Path) -> None:
    wanted = save_models(tmp_path / "nets", OUTCOMES | RECIPE)
    ended = acme("suite", "run", "nets", "--no-layers", "--flow", "acme", "--board", board, "--out", "out")
    records = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    cases = {record["model"]: record for record in records}
    assert {name: record["outcome"] for name, record in cases.items()} == wanted
    assert [name for name, one in cases.items() if name != "good" and "acme 1.2" not in one["message"]] == []
    assert ended.code == 3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exit", "wrong"])
@pytest.mark.parametrize("board", ["usb", "lab"])
def test_failing_board_package_reports_board_unreachable(acme, tmp_path: Path, board: str, way: str) -> None:
    model = save_relu(tmp_path / "good.onnx")
    ended = acme("run", model, "--board", f"{board}:{way}", "--json")
    assert (ended.code, ended.case["outcome"]) == (4, "BOARD_UNREACHABLE")
    assert "acme 1.2" in ended.case["reason"]


def test_bundle_import_names_failing_format(acme, tmp_path: Path) -> None:
    (tmp_path / "read-exit").touch()
    ended = acme("bundle", "import", "read-exit", "--from", "acme", "-o", "x.hilb")
    assert ended.code == 3 and "the bundle format acme of the package acme 1.2 failed: SystemExit: 7" in ended.err
