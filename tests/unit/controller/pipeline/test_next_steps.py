"""After each outcome that needs attention, every workload gives the same hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hil.controller.pipeline.next_steps import hint_for_case
from hil.controller.workloads.suites.store import told_by
from hil.core.repetition import Answer, Repetition

RECORD = json.loads((Path(__file__).parents[4] / "tests/support/web_records.json").read_text())["run"]["cases"][0]
BLIND = {"outcome": "BLIND", "outputs": [{"name": "a b", "passed": False}, {"name": "y", "passed": True}]}
OFF = {"name": "y", "passed": False, "dtype": "float32", "elements": 10, "max_abs": 0.02, "rmse": 0.01}
ROUNDED = {**OFF, "sqnr_db": 56.1, "mismatch_share": 1.0}
UNSTABLE = Repetition((Answer(60, 0), Answer(4, 60)), differing=("y",)).record()


def case(**more: object) -> dict[str, object]:
    return {**RECORD, "error": None, "verdicts": [], "repetition": None, **more}


@pytest.mark.parametrize(
    ("ended", "hint"),
    [
        (case(outcome="PASS"), ""),
        (case(outcome="FAIL"), ""),
        (case(outcome="FAIL", verdicts=[{"outcome": "FAIL", "outputs": [ROUNDED]}]), "--arithmetic"),
        (case(outcome="FAIL", verdicts=[{"outcome": "FAIL", "outputs": [{**ROUNDED, "max_abs": 0.2}]}]), ""),
        (case(outcome="FAIL", verdicts=[{"outcome": "FAIL", "outputs": [{**ROUNDED, "sqnr_db": 20.0}]}]), ""),
        (case(outcome="FAIL", verdicts=[{"outcome": "FAIL", "outputs": [{**ROUNDED, "mismatch_share": 0.1}]}]), ""),
        (case(outcome="FAIL", verdicts=[{"outcome": "FAIL", "outputs": [{**ROUNDED, "control": {"a": 1}}]}]), ""),
        (case(outcome="RUN_ERROR", error={"hint": "give --input"}), "give --input"),
        (case(outcome="BLIND", verdicts=[BLIND]), "--allow-blind='a b' passes without a judgement"),
        (case(outcome="UNSTABLE", verdicts=[BLIND], repetition=UNSTABLE), "first differs in iteration 61"),
        (case(outcome="UNSTABLE", verdicts=[BLIND]), "--allow-blind='a b'"),
    ],
)
def test_case_has_the_hint_of_its_outcome(ended, hint):
    found = hint_for_case(ended)
    assert hint in found
    assert bool(found) == bool(hint)
    assert told_by(ended)["hint"] == found
