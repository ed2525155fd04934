"""Relations of references to the board: stronger relations decide, and a self-check decides nothing."""

from __future__ import annotations

import numpy as np
import pytest

from hil.compare.verdict import Verdict, compare, find_deciding, judge
from hil.core.results import Outcome, Relation, RunResult

PASS, FAIL, BLIND, ERROR = Outcome.PASS, Outcome.FAIL, Outcome.BLIND, Outcome.REFERENCE_ERROR
INDEPENDENT, SAME, SELF = Relation.INDEPENDENT, Relation.SAME_LIBRARY, Relation.SELF_CHECK


def verdict(outcome: Outcome, relation: Relation, name: str) -> Verdict:
    return Verdict(outcome, name, (), "" if outcome is PASS else f"{name} says no", relation)


def between(*agree: bool) -> list[Verdict]:
    return [Verdict(PASS if one else FAIL, "first", ()) for one in agree]


@pytest.mark.parametrize(
    ("verdicts", "agree", "outcome"),
    [
        ([(PASS, INDEPENDENT)], [], PASS),
        ([(PASS, SAME)], [], PASS),
        ([(PASS, SELF)], [], ERROR),
        ([(FAIL, SELF)], [], FAIL),
        ([(BLIND, SELF)], [], BLIND),
        ([(PASS, SELF), (PASS, SELF)], [True], ERROR),
        ([(PASS, SELF), (FAIL, SELF)], [True], FAIL),
        ([(PASS, SELF), (FAIL, SELF)], [False], FAIL),
        ([(BLIND, INDEPENDENT), (PASS, SELF)], [True], BLIND),
        ([(BLIND, INDEPENDENT), (PASS, SAME)], [True], PASS),
        ([(PASS, INDEPENDENT), (PASS, SELF)], [True], PASS),
        # A self-check never outvotes, even if the references disagree.
        ([(FAIL, INDEPENDENT), (PASS, SELF)], [False], FAIL),
        ([(FAIL, SAME), (PASS, SELF)], [False], FAIL),
        ([(PASS, INDEPENDENT), (FAIL, SELF)], [False], PASS),
        ([(PASS, INDEPENDENT), (FAIL, SELF)], [True], PASS),
        # A reference of the same library never outvotes an independent one.
        ([(FAIL, INDEPENDENT), (PASS, SAME)], [False], FAIL),
        ([(PASS, SAME), (FAIL, INDEPENDENT)], [False], FAIL),
        ([(PASS, INDEPENDENT), (FAIL, SAME)], [False], PASS),
        ([(PASS, INDEPENDENT), (FAIL, SAME)], [True], FAIL),
        ([(PASS, INDEPENDENT), (FAIL, INDEPENDENT)], [False], PASS),
        ([(PASS, INDEPENDENT), (FAIL, INDEPENDENT)], [True], FAIL),
    ],
)
def test_judge_weighs_relations(verdicts: list[tuple[Outcome, Relation]], agree: list[bool], outcome: Outcome) -> None:
    named = [verdict(*one, f"reference {number}") for number, one in enumerate(verdicts)]
    found, reason = judge(named, between(*agree))
    assert found is outcome
    assert bool(reason) or outcome is PASS


def test_judge_reason_includes_relations() -> None:
    named = [verdict(FAIL, INDEPENDENT, "numpy"), verdict(PASS, SAME, "onnxruntime")]
    _, reason = judge(named, between(False))
    assert "differs from numpy" in reason and "onnxruntime (same library)" in reason
    _, reason = judge([verdict(PASS, SELF, "iree")], [])
    assert "iree (self-check)" in reason and "importer and compiler" in reason


def test_deciding_prefers_strongest_relation() -> None:
    weak, strong = verdict(PASS, SAME, "onnxruntime"), verdict(PASS, INDEPENDENT, "numpy")
    assert find_deciding([weak, strong]) is strong
    assert find_deciding([verdict(FAIL, INDEPENDENT, "numpy"), weak]) is weak
    assert find_deciding([verdict(FAIL, INDEPENDENT, "numpy")]) is None


def test_compare_copies_relation_of_reference() -> None:
    y = {"y": np.ones(3, np.float32)}
    for relation in Relation:
        found = compare(RunResult("board", y), RunResult("who", y, relation=relation))
        assert found.relation is relation and found.named == relation.named("who")
