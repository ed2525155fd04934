"""Findings for the outputs of a program: tolerances, criteria, skipped tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil.compare.verdict import compare
from hil.controller.analysis.bisect.find import Atol, drop_failed, extract_finding, judge_case
from hil.controller.analysis.bisect.result import make_finding
from hil.controller.analysis.layers import Layer
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.controller.records.decisions.bisect import BisectFinding
from hil.core.results import Outcome, RunResult, Stage
from hil.errors import CompileFailed

PASS, FAIL, SKIP = Outcome.PASS, Outcome.FAIL, Outcome.SKIP
WANTED = {"a": np.array([1.0, 2.0]), "b": np.array([100.0, 200.0])}


def judged(
    given: Mapping[str, np.ndarray],
    rtol: float | None = None,
    atol: Atol = None,
    by_chance: tuple[str, ...] = (),
    accept: tuple[str, ...] = (),
) -> BisectFinding:
    result, reference = RunResult("board", given), RunResult("reference", WANTED)
    verdict = compare(result, reference)
    made: dict[str, Any] = {"result": result, "references": (reference,), "verdicts": (verdict,)}
    case = Case(
        "net", Path("net.onnx"), Options(accept=accept), Path(), **made, outcome=verdict.outcome, reason=verdict.reason
    )
    return judge_case(case, rtol, atol, by_chance)


def layer(name: str, inputs: str, outputs: str) -> Layer:
    return Layer(name, "Op", (name,), Path(f"{name}.onnx"), tuple(inputs), tuple(outputs), 0)


@pytest.mark.parametrize("names", ["ab", "xy"])
def test_finding_uses_separate_tolerance_for_each_output(names):
    given = dict(zip(names, (WANTED["a"] + 0.5, WANTED["b"] + 0.5), strict=True))
    assert judged(given).outcome is FAIL
    assert judged(given, atol={"a": 0.6, "b": 0.6}).outcome is PASS
    found = judged(given, atol={"a": 0.4, "b": 0.6})
    assert (found.outcome, [one.passed for one in found.outputs]) == (FAIL, [False, True])
    assert found.reason.startswith("output a: 2 of 2 values out of tolerance")


def test_finding_applies_criteria_to_named_output() -> None:
    given = {"a": WANTED["a"] + 0.5, "b": WANTED["b"] + 0.5}
    assert judged(given, atol={"a": 0.1, "b": 0.6}, accept=("a: rmse<=0.6",)).outcome is PASS
    assert judged(given, atol={"a": 0.6, "b": 0.6}, accept=("a: rmse<=0.4",)).outcome is FAIL


def test_finding_matches_outputs_by_name():
    assert judged({"b": WANTED["b"], "a": WANTED["a"]}, atol=0.1).outcome is PASS


def test_finding_skips_tensors_with_too_wide_tolerance():
    found = judged(WANTED, atol=50.0)
    assert found.outcome is PASS and [one.name for one in found.outputs] == ["b"]
    assert "50" in found.unjudged["a"]


def test_finding_skips_outputs_of_random_numbers():
    wrong = {"a": WANTED["a"] + 1, "b": WANTED["b"]}
    found = judged(wrong, by_chance=("a",))
    assert found.outcome is PASS and list(found.unjudged) == ["a"]
    assert judged(wrong, by_chance=("b",)).outcome is FAIL
    nothing = judged(wrong, by_chance=("a", "b"))
    assert nothing.outcome is SKIP and nothing.reason == "depends on random numbers, so runs differ"


def test_finding_reports_error_with_stage_and_hint():
    case = Case("net", Path("net.onnx"), Options(), Path())
    case = case.with_error(CompileFailed("no such operator", hint="leave it out"), Stage.COMPILE)
    assert judge_case(case, None, None) == make_finding(
        Outcome.COMPILE_ERROR, "no such operator", stage="compile", hint="leave it out"
    )


def test_within_derives_layer_outcome_from_tensors():
    whole = judged({"a": WANTED["a"] + 1, "b": WANTED["b"]}, by_chance=("b",))
    assert extract_finding(layer("one", "x", "a"), whole).outcome is FAIL
    assert extract_finding(layer("two", "a", "b"), whole).outcome is SKIP
    assert extract_finding(layer("both", "x", "ab"), whole).outcome is FAIL
    assert "the layer failed, or depends on a failed layer" in extract_finding(layer("more", "b", "c"), whole).reason
    dead = extract_finding(layer("one", "x", "a"), make_finding(Outcome.RUN_CRASH, "SIGILL"))
    assert (dead.outcome, dead.reason) == (SKIP, "the whole model ended in RUN_CRASH: SIGILL")


def test_without_failed_drops_all_downstream_layers():
    layers = [layer("a", "x", "p"), layer("b", "p", "q"), layer("c", "q", "r"), layer("d", "x", "s")]
    assert [one.name for one in drop_failed(layers, {"b"})] == ["a", "d"]
