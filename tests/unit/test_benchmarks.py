"""The benchmarks are run by hand only; that they can be imported, and so fit the code they measure, is seen here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Programs that other benchmarks start: with arguments, or in an environment that has the rival.
ELSEWHERE = {"ssh_peer", "tvm_peer", "labgrid_peer"}
MODULES = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - ELSEWHERE - {"__init__"})


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    # Those that are run as scripts import their neighbours by name alone.
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    importlib.import_module(f"benchmarks.{name}")
