"""Counting, merging and describing the outputs of iterations."""

from __future__ import annotations

import numpy as np
import pytest

from hil.core.repetition import Answer, Repetition, list_differing_outputs, merge, merge_known

ONE, TWO = {"y": np.float32([1])}, {"y": np.float32([2])}


def stable(count: int = 3) -> Repetition:
    return Repetition((Answer(count, 0, ONE),))


def test_repetition_text_describes_stable_iterations():
    assert stable(200).text == "200 of 200 iterations gave the same answer" and stable().is_stable


def test_repetition_text_mentions_sampling():
    text = Repetition((Answer(2, 0, ONE),), is_sampled=True).text
    assert text.endswith("gave the same answer (hil compared samples: the outputs are larger than 1 MiB)")


@pytest.mark.parametrize(
    ("counts", "others", "text"),
    [
        ([140, 60], 0, "2 different answers in 200 iterations: 140 (70 %), 60 (30 %)"),
        ([9999, 1], 0, "2 different answers in 10000 iterations: 9999 (99.9 %), 1 (0.01 %)"),
        ([1] * 6, 0, "6 different answers in 6 iterations: 1 (16.7 %), 1 (16.7 %), 1 (16.7 %), 1 (16.7 %), ..."),
        ([5], 5, "at least 2 different answers in 10 iterations: 5 (50 %), ..."),
    ],
)
def test_repetition_text_counts_different_outputs(counts: list[int], others: int, text: str):
    found = Repetition(tuple(Answer(count, number) for number, count in enumerate(counts)), others=others)
    assert found.text == text and not found.is_stable


def test_merge_joins_equal_outputs():
    other = Repetition((Answer(1, 0, {"y": np.float32([1])}), Answer(2, 1, TWO)), differing=("y",))
    joined = merge([stable(3), other])
    assert joined is not None
    assert [(one.iterations, one.first) for one in joined.answers] == [(4, 0), (2, 4)]
    assert (joined.iterations, joined.differing) == (6, ("y",))


def test_merge_lists_outputs_differing_between_calls():
    joined = merge([stable(), Repetition((Answer(3, 0, TWO),), is_sampled=True)])
    assert joined is not None and joined.differing == ("y",) and joined.is_sampled and not joined.is_stable


def test_merge_counts_missing_outputs_separately():
    joined = merge([stable(), Repetition((Answer(1, 0, ONE), Answer(1, 1)), others=2)])
    assert joined is not None and len(joined.answers) == 2 and joined.others == 2 and joined.iterations == 7


def test_merge_of_empty_list_returns_none():
    assert merge([]) is None and merge_known(None, None) is None
    one = stable()
    assert merge([one]) is one and merge_known(None, one) is one


def test_differing_outputs_compare_bits_dtypes_and_shapes():
    nan = np.array([0x7FC00001], np.uint32).view(np.float32)
    first = {"a": np.float32([np.nan]), "b": np.zeros((1, 2)), "c": np.zeros(2)}
    second = {"a": nan, "b": np.zeros((2, 1)), "c": np.zeros(2)}
    assert list_differing_outputs([Answer(1, 0, first), Answer(1, 1), Answer(1, 2, second)]) == ["a", "b"]


def test_repetition_record_has_shares_and_renamed_outputs():
    found = Repetition((Answer(3, 0, ONE), Answer(1, 2, TWO)), differing=("y",)).rename({"y": "z"})
    record = found.record()
    assert record["differing"] == ["z"] and found.answers[1].outputs == {"z": TWO["y"]}
    assert record["answers"] == [
        {"iterations": 3, "share": 0.75, "first": 0},
        {"iterations": 1, "share": 0.25, "first": 2},
    ]
    assert (record["iterations"], record["distinct"], record["sampled"]) == (4, 2, False)
