"""Test the flakiness of a case."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.nights import DAY, FIRST_NIGHT
from support.web import asking, write_suite

from hil.controller.web.history.flakiness import SESSIONS, measure_flakiness

P, F = "PASS", "FAIL"


@pytest.mark.parametrize(
    ("outcomes", "changes", "score", "is_flaky"),
    [
        ([], 0, 0.0, False),
        ([F], 0, 0.0, False),
        ([P, P, P, F, F], 1, 25.0, False),
        ([P, F, F, P, P], 2, 50.0, False),
        ([P, F, P, F, P], 4, 100.0, True),
        # A crash and a mismatch are both failures.
        ([F, "RUN_CRASH", F], 0, 0.0, False),
        # Neither a lost board nor a skipped case is a change.
        ([P, "BOARD_LOST", P, "SKIP", "", P], 0, 0.0, False),
        ([P, F] * 10 + [P] * SESSIONS, 0, 0.0, False),
    ],
)
def test_flakiness_counts_changes(outcomes: list[str], changes: int, score: float, is_flaky: bool) -> None:
    found = measure_flakiness(outcomes)
    assert (found.changes, found.score, found.is_flaky) == (changes, score, is_flaky)


def test_history_shows_flakiness(tmp_path: Path) -> None:
    for number in range(6):
        outcome = F if number % 2 else P
        write_suite(
            tmp_path, f"s{number}", [{"outcome": outcome, "ended": outcome}], started=FIRST_NIGHT + number * DAY
        )
    with asking(tmp_path) as client:
        page = client.get("/history?case=case").text
    assert "Flaky: 100 %" in page and "5 changes in 6 sessions" in page
