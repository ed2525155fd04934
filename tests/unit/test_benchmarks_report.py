"""The combined benchmark report: written, resumed, and compared with an earlier report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def row(case: str, ratio: float | None, bar: str = "", rival: str = "echo") -> dict[str, Any]:
    return {
        "case": case,
        "value": 2.0,
        "unit": "ms",
        "rival": rival,
        "rival_value": None if ratio is None else 1.0,
        "ratio": ratio,
        "bar": bar,
    }


def document(*rows: dict[str, Any], cores: int = 2) -> dict[str, Any]:
    said = {"benchmark": "invoke", "cpu": "A", "cores": cores, "load": 0.1, "rows": list(rows)}
    return {"schema": 1, "made": "2026-01-01T00:00:00+00:00", "commit": "c", "benchmarks": [said]}


def test_report_compares_ratios_not_milliseconds() -> None:
    from benchmarks import report

    former = document(row("call", 2.0, "<= 1.5"), row("rate", 0.5, ">= 0.8"), row("start", None), row("gone", 1.0))
    now = document(row("call", 1.0, "<= 1.5"), row("rate", 0.4, ">= 0.8"), row("start", None), row("new", 1.0))
    assert [(one.key[1], one.text) for one in report.changes(former, now)] == [("call", "better"), ("rate", "worse")]


@pytest.mark.parametrize(
    ("then", "now", "bar", "text"),
    [(1.0, 1.09, "<= 1", ""), (1.0, 1.2, "", "different"), (1.0, 1.2, ">= 1", "better"), (1.0, 0.8, "<= 1", "better")],
)
def test_report_change_ignores_noise(then: float, now: float, bar: str, text: str) -> None:
    from benchmarks.report import Change

    assert Change(("invoke", "call", "echo"), then, now, bar).text == text


def test_report_checks_ratio_against_bar() -> None:
    from benchmarks import report

    rows = [
        row("a", 1.0, "<= 1.0"),
        row("b", 1.1, "<= 1.0"),
        row("c", 1.0),
        row("d", None, ">= 2"),
        row("e", 1, "soon"),
    ]
    assert [report.holds(one) for one in rows] == [True, False, None, None, None]
    assert [line[-1] for line in report.table(document(*rows))] == ["holds", "missed", "", "", ""]


def test_report_lists_machine_differences() -> None:
    from benchmarks import report

    assert report.machines_differ(document(), document()) == []
    assert report.machines_differ(document(cores=4), document()) == ["cores: 4 before, 2 now"]


def call(monkeypatch: pytest.MonkeyPatch, *words: str, ran: list[str], fails: str = "") -> int:
    from benchmarks import __main__ as bench

    def run_one(name: str) -> dict[str, Any]:
        ran.append(name)
        if name == fails:
            raise KeyboardInterrupt
        return {**document(row("call", 1.0, "<= 1.0"))["benchmarks"][0], "benchmark": name}

    monkeypatch.setattr(bench, "run_one", run_one)
    monkeypatch.setattr(sys, "argv", ["scripts/bench", *words])
    return bench.main()


def test_bench_resumes_after_interrupt(tmp_path, monkeypatch, capsys) -> None:
    ran: list[str] = []
    output = tmp_path / "today.json"
    words = ("invoke", "stream", "cold", "-o", str(output))
    assert call(monkeypatch, *words, ran=ran, fails="stream") == 130
    assert [one["benchmark"] for one in json.loads(output.read_text())["benchmarks"]] == ["invoke"]
    assert call(monkeypatch, *words, "--resume", "--against", str(output), ran=ran) == 0
    assert ran == ["invoke", "stream", "stream", "cold"]
    told = capsys.readouterr().out
    assert told.count("holds") == 3 and "earlier ratio" in told


@pytest.mark.parametrize(
    "words", [["nothing"], ["invoke", "--against", "not-there.json"], ["invoke", "--against", "other.json"]]
)
def test_bench_rejects_invalid_arguments_before_running(words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('{"schema": 7}')
    ran: list[str] = []
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, *words, ran=ran)
    assert ran == []


def test_bench_reports_failed_benchmark_and_continues(tmp_path, monkeypatch, capsys) -> None:
    from benchmarks import __main__ as bench

    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "invoke.py").write_text("raise SystemExit(3)")
    (tmp_path / "benchmarks" / "cold.py").write_text('print(\'{"benchmark": "cold", "rows": []}\')')
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["scripts/bench", "invoke", "cold", "-o", str(tmp_path / "b.json")])
    assert bench.main() == 1
    assert "exit code 3" in capsys.readouterr().out
    found = json.loads((tmp_path / "b.json").read_text())["benchmarks"]
    assert [sorted(one) for one in found] == [["benchmark", "error"], ["benchmark", "rows"]]
