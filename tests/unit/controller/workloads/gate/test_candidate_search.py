"""The search of the first bad candidate: pure functions, with boards that spoil runs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.workloads.gate.bisection.confirm import (
    MAX_BOARD_ERRORS,
    MAX_OTHER_FAILURES,
    FaultRate,
    ProgramAnswer,
    decide_answers,
)
from hil.controller.workloads.gate.bisection.search import CandidateSearch
from hil.core.results import Outcome

PASS, FAIL, CRASH, LOST = Outcome.PASS, Outcome.FAIL, Outcome.RUN_CRASH, Outcome.BOARD_LOST


def run_search(search: CandidateSearch, first_bad: int, skipped: set[int]) -> list[int]:
    """Answer a search truthfully. Return the tested positions."""
    tested = []
    while (position := search.choose_next()) is not None:
        tested.append(position)
        search.add(position, "skipped" if position in skipped else "bad" if position >= first_bad else "good")
    return tested


@given(st.data())
def test_search_names_first_bad_candidate_or_those_around_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 60))
    first_bad = data.draw(st.integers(1, count - 1))
    skipped = data.draw(st.sets(st.integers(0, count - 2)))
    search = CandidateSearch(count)
    tested = run_search(search, first_bad, skipped)
    assert len(tested) == len(set(tested))
    assert first_bad in search.candidates
    # Only skipped commits hide the first bad one.
    assert set(search.candidates) - {search.candidates[-1]} <= skipped


@pytest.mark.parametrize("first_bad", range(1, 16))
def test_search_of_16_candidates_tests_at_most_4_and_both_ends(first_bad: int) -> None:
    search = CandidateSearch(16)
    assert len(run_search(search, first_bad, set())) <= 6
    assert list(search.candidates) == [first_bad]


@pytest.mark.parametrize(("first_bad", "skipped"), [(8, {7}), (0, set()), (8, set())])
def test_search_ends_if_an_end_differs_from_its_measurement(first_bad: int, skipped: set[int]) -> None:
    search = CandidateSearch(8)
    assert len(run_search(search, first_bad, skipped)) <= 2
    assert list(search.candidates) == []


@pytest.mark.parametrize(("needs_good", "candidates"), [(True, []), (False, [3])])
def test_search_without_test_of_good_candidate(needs_good: bool, candidates: list[int]) -> None:
    search = CandidateSearch(8, needs_good=needs_good)
    run_search(search, 3, {0})
    assert list(search.candidates) == candidates


def test_search_tests_forgotten_candidate_again() -> None:
    search = CandidateSearch(3)
    run_search(search, 2, {1})
    assert list(search.candidates) == [1, 2]
    search.forget(1)
    assert run_search(search, 2, set()) == [1]
    assert list(search.candidates) == [2]


class FakeBoard:
    """Board that spoils a share of the runs with a random fault."""

    def __init__(self, share: float, seed: int = 0, faults: tuple[Outcome, ...] = (FAIL, CRASH, LOST)) -> None:
        self._random, self._share, self._faults = random.Random(seed), share, faults

    def run(self, outcome: Outcome) -> ProgramAnswer:
        spoiled = self._random.random() < self._share
        return ProgramAnswer(self._random.choice(self._faults) if spoiled else outcome)


def decide(board: FakeBoard, outcome: Outcome, rate: FaultRate | None = None) -> tuple[str, bool]:
    trial = decide_answers(
        lambda: board.run(outcome),
        lambda: board.run(PASS),
        is_searched=lambda found: found is FAIL,
        rate=rate or FaultRate(),
    )
    return trial.outcome, trial.is_board_error


@pytest.mark.parametrize(("outcome", "expected"), [(PASS, "good"), (FAIL, "bad"), (CRASH, "skipped")])
def test_decide_answers_on_sound_board(outcome: Outcome, expected: str) -> None:
    assert decide(FakeBoard(0), outcome) == (expected, False)


def test_decide_answers_skips_candidate_on_lost_board() -> None:
    assert decide(FakeBoard(1, faults=(LOST,)), FAIL) == ("skipped", True)


def test_decide_answers_never_blames_candidate_if_good_program_fails_too() -> None:
    assert decide(FakeBoard(1, faults=(FAIL,)), FAIL) == ("skipped", True)


def test_decide_answers_of_host_needs_no_second_run() -> None:
    answers = iter([ProgramAnswer(FAIL, is_from_host=True)])
    trial = decide_answers(answers.__next__, None, is_searched=lambda _: True, rate=FaultRate())
    assert trial.outcome == "bad"


def test_decide_answers_limits_runs_of_other_failures() -> None:
    count = max(MAX_BOARD_ERRORS, MAX_OTHER_FAILURES)
    answers = iter([ProgramAnswer(CRASH)] * count)
    trial = decide_answers(answers.__next__, None, is_searched=lambda _: False, rate=FaultRate())
    assert (trial.outcome, trial.reason) == ("skipped", "RUN_CRASH: ")


@pytest.mark.parametrize("faults", [(FAIL,), (FAIL, CRASH, LOST)])
def test_decide_answers_rarely_errs_if_board_spoils_30_percent(faults: tuple[Outcome, ...]) -> None:
    wrong = skipped = 0
    for seed in range(1000):
        board, outcome = FakeBoard(0.3, seed, faults), (PASS, FAIL)[seed % 2]
        found, _ = decide(board, outcome)
        skipped += found == "skipped"
        wrong += found == ("bad" if outcome is PASS else "good")
    assert wrong <= 5 and skipped <= 20, (wrong, skipped)


def test_fault_rate_needs_more_failures_on_worse_board() -> None:
    sound, bad = FaultRate(runs=50), FaultRate(runs=50, faults=15)
    needed = [next(n for n in range(99) if rate.excludes_faults(n)) for rate in (sound, bad)]
    assert needed == [2, 6]
