"""Benchmarks are run manually; these tests only check that they can be imported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Programs started by other benchmarks, with arguments or in the rival's environment.
ELSEWHERE = {"ssh_peer", "tvm_peer", "labgrid_peer", "llama_peer", "gate_peer"}
MODULES = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - ELSEWHERE - {"__init__"})


@pytest.mark.parametrize("name", MODULES)
def test_benchmark_modules_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    importlib.import_module(f"benchmarks.{name}")


def test_benchmark_runner_includes_every_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    shows = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "common.show(" in path.read_text()}
    assert set(importlib.import_module("benchmarks.__main__").NAMES) == shows
