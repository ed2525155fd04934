"""Differences in outputs that depend on random numbers are BLIND; other differences are not."""

from __future__ import annotations

import numpy as np
import pytest

from hil.compare.random_outputs import mark_random
from hil.compare.verdict import compare
from hil.core.results import Outcome, RunResult
from hil.core.tensors import Array

NODES = ("noise (RandomNormal)",)
WANTED = {"drawn": np.arange(1, 5, dtype=np.float32), "plain": np.arange(4, dtype=np.float32)}


def judged(allow_blind: tuple[str, ...] = (), nodes: tuple[str, ...] = NODES, **changed: Array) -> tuple[Outcome, str]:
    found = compare(RunResult("board", {**WANTED, **changed}), RunResult("reference", WANTED))
    marked = mark_random(found, nodes, ["drawn"], allow_blind)
    return marked.outcome, marked.reason


def test_difference_in_random_output_reports_blind() -> None:
    outcome, reason = judged(drawn=WANTED["drawn"] + 1)
    assert outcome is Outcome.BLIND
    assert reason.startswith("the model draws random numbers (node noise (RandomNormal)): output drawn: output depends")


def test_difference_in_deterministic_output_fails() -> None:
    outcome, reason = judged(drawn=WANTED["drawn"] + 1, plain=WANTED["plain"] + 1)
    assert outcome is Outcome.FAIL and reason.startswith("output drawn")
    assert judged(plain=WANTED["plain"] + 1)[0] is Outcome.FAIL


@pytest.mark.parametrize("drawn", [np.ones(3, np.float32), WANTED["drawn"].astype(np.float64)])
def test_random_output_requires_matching_shape_and_dtype(drawn: Array) -> None:
    assert judged(("drawn",), drawn=drawn)[0] is Outcome.FAIL


def test_allowed_random_output_passes_with_reason() -> None:
    outcome, reason = judged(("dra*",), drawn=WANTED["drawn"] + 1)
    assert outcome is Outcome.PASS and "output drawn is not judged, as allowed by --allow-blind" in reason


def test_equal_random_output_passes_with_note() -> None:
    assert judged() == (Outcome.PASS, "the model draws random numbers (node noise (RandomNormal))")


def test_random_output_reason_lists_at_most_five_nodes() -> None:
    assert "(nodes a, a, a, a, a and 2 more)" in judged(nodes=("a",) * 7)[1]


def test_verdict_unchanged_without_random_nodes() -> None:
    assert judged(nodes=(), drawn=WANTED["drawn"] + 1)[0] is Outcome.FAIL
