from __future__ import annotations

import numpy as np
import pytest

from hil.controller.analysis.profile.iterations import SETUP, by_repetition


def told(kinds: str, iterations: int | None) -> tuple[str, str]:
    found, doubt = by_repetition(np.array([ord(kind) for kind in kinds]), iterations)
    return "".join("-" if number == SETUP else str(number) for number in found), doubt


@pytest.mark.parametrize(
    ("kinds", "iterations", "expected"),
    [
        ("abab", 2, "0011"),
        ("aaaa", 2, "0011"),  # a loop of two turns, twice
        ("aaaa", 4, "0123"),
        ("xyabcabcabc", 3, "--000111222"),  # what comes before is initialisation
        ("xabbabbabb", 3, "-000111222"),
        ("abcabcab", 2, "--000111"),
        ("abc", 1, "000"),
        ("", 3, ""),
    ],
)
def test_runs_are_the_equal_sequences_at_the_end(kinds: str, iterations: int, expected: str) -> None:
    assert told(kinds, iterations)[0] == expected


def test_a_known_number_of_runs_leaves_no_doubt() -> None:
    assert told("xabab", 2)[1] == ""


def test_without_their_number_runs_are_told_by_the_shortest_repetition_and_that_is_said() -> None:
    found, doubt = told("abbabbabb", None)
    assert found == "000111222"
    assert "3 by what is repeated" in doubt
    assert told("abc", None)[0] == "000"


def test_runs_that_differ_are_told_apart_by_counting_and_that_is_said() -> None:
    found, doubt = told("abcabd", 2)
    assert found == "000111"
    assert "counting" in doubt


def test_what_cannot_be_told_apart_is_one_run_and_that_is_said() -> None:
    found, doubt = told("abcde", 2)
    assert found == "00000"
    assert "cannot be told apart" in doubt


def test_a_long_profile_that_never_repeats_is_settled_in_linear_time() -> None:
    kinds = np.arange(200_000)
    found, doubt = by_repetition(kinds, 7)
    assert doubt
    assert found.max() == 0
