"""Every workload gives the same hint for an outcome."""

from __future__ import annotations

from typing import Any

import pytest
from support.run_records import run_case

from hil.controller.pipeline.records.case_fields import make_case_fields
from hil.controller.pipeline.records.next_steps import make_case_hint
from hil.core.repetition import Answer, Repetition

SPEC = {"digest": f"blake3:{'0' * 64}", "function": "", "inputs": None, "outputs": None}
BESIDE = {"against": "ort", "reason": ""}
ERROR = {"kind": "RunFailed", "hint": "give --input", "board": "", "detail": ""}
BLIND = {"outcome": "BLIND", **BESIDE, "outputs": [{"name": "a b", "passed": False}, {"name": "y", "passed": True}]}
TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}
OFF = {"name": "y", "passed": False, "dtype": "float32", "tolerance": TOLERANCE, "max_abs": 0.02, "rmse": 0.01}
ROUNDED = {**OFF, "sqnr_db": 56.1, "mismatch_share": 1.0}
UNSTABLE = Repetition((Answer(60, 0), Answer(4, 60)), differing=("y",)).record()
HINT = "declare it with --arithmetic"


def case(**more: object) -> dict[str, Any]:
    empty = {"error": None, "verdicts": [], "repetition": None, "provenance": {}, "model": {"format": "onnx", **SPEC}}
    return {**empty, **more}


def failed(**more: object) -> dict[str, Any]:
    return case(outcome="FAIL", verdicts=[{"outcome": "FAIL", **BESIDE, "outputs": [{**ROUNDED, **more}]}])


@pytest.mark.parametrize(
    ("ended", "hint"),
    [
        (case(outcome="PASS", verdicts=[{"outcome": "PASS", **BESIDE, "outputs": []}, BLIND]), ""),
        (case(outcome="FAIL", verdicts=[{"outcome": "FAIL", **BESIDE, "outputs": []}, BLIND]), ""),
        (case(outcome="RUN_ERROR", error=ERROR), "give --input"),
        (case(outcome="BLIND", verdicts=[BLIND]), "--allow-blind='a b' accepts the output unjudged"),
        (case(outcome="UNSTABLE", verdicts=[BLIND], repetition=UNSTABLE), "first difference in iteration 61"),
        (case(outcome="UNSTABLE", verdicts=[BLIND]), ""),
        (failed(), HINT),
        (failed(max_abs=0.2), ""),
        (failed(sqnr_db=20.0), ""),
        (failed(mismatch_share=0.1), ""),
        (failed(mismatch_share=None), ""),
        (failed(tolerance={"rtol": 1e-3, "atol": 1e-3}), ""),
        (failed(criteria=[{"criterion": "kl<=1", "value": 2.0, "bound": 1.0, "passed": False, "reason": ""}]), ""),
        (failed(), "hil bisect MODEL"),
        ({**failed(), "provenance": {"arithmetic": "float16"}}, ""),
        ({**failed(), "provenance": {"arithmetic": "float32"}}, ""),
        ({**failed(), "model": {"format": "tflite", **SPEC}}, ""),
        ({**failed(), "random": ["y"]}, ""),
    ],
)
def test_hint_follows_outcome_of_case(ended, hint):
    record = run_case(**ended)
    found = make_case_hint(record)
    assert hint in found
    assert bool(found) == bool(hint)
    assert make_case_fields(record)["hint"] == found
