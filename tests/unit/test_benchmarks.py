"""The benchmarks are run by hand only; that they can be imported, and so fit the code they measure, is seen here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Programs that other benchmarks start: with arguments, or in an environment that has the rival.
ELSEWHERE = {"ssh_peer", "tvm_peer", "labgrid_peer"}
MODULES = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - ELSEWHERE - {"__init__"})


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    importlib.import_module(f"benchmarks.{name}")


def test_all_that_measure_something_are_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    shows = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "common.show(" in path.read_text()}
    assert set(importlib.import_module("benchmarks.__main__").NAMES) == shows
