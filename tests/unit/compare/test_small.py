"""Small values beside large values, flushed subnormal numbers, constant outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hil.compare.comparison import OutputComparison
from hil.compare.criteria import parse_accept
from hil.compare.verdict import compare, compare_output
from hil.core.results import NOISE_DTYPE, RunResult
from hil.core.tensors import Array, parse_dtype

RNG = np.random.default_rng(5)
BOXES = np.abs(RNG.standard_normal((50, 6))).astype(np.float32) + np.float32(0.5)
BOXES *= np.array([640, 640, 640, 640, 1e-6, 1e-6], np.float32)


def noise(size: float, shape: tuple[int, ...]) -> Array:
    return np.full(shape, size).astype(parse_dtype(NOISE_DTYPE))


def of(actual: Any, reference: Array, **how: Any) -> OutputComparison:
    return compare_output("y", np.asarray(actual, reference.dtype), reference, **how)


def with_column(values: Array, column: Any, by: Any) -> Array:
    found = values.copy()
    found[..., column] = by(values[..., column])
    return found


FAULTS = {
    "negated": lambda v: -v,
    "zeroed": lambda v: 0 * v,
    "doubled": lambda v: 2 * v,
    "halved": lambda v: v / 2,
    "reversed": lambda v: v[::-1],
    "one off by 1 %": lambda v: v * np.where(np.arange(len(v)) == 7, np.float32(1.01), np.float32(1)),
    "replaced": lambda v: np.full_like(v, v.mean()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_compare_judges_small_column_near_large_columns(fault: str) -> None:
    wrong = with_column(BOXES, 5, FAULTS[fault])
    found = of(wrong, BOXES)
    assert (found.passed, found.blind) == (False, True) and ", in column 5: " in found.reason
    found = of(wrong, BOXES, noise=noise(2.0**-45, BOXES.shape))
    assert (found.passed, found.blind) == (False, False) and found.mismatches
    assert of(wrong, BOXES, allow_blind=["y"]).passed


def test_compare_judges_small_value_of_single_row() -> None:
    row = np.array([[10, 20, 30, 40, 1e-6]], np.float32)
    wrong = with_column(row, 4, lambda v: -v)
    assert of(wrong, row).blind and "1 values are smaller than the tolerance" in of(wrong, row).reason
    for size, passed, blind in ((2.0**-45, False, False), (2.0**-17, True, False)):
        found = of(wrong, row, noise=noise(size, row.shape))
        assert (found.passed, found.blind) == (passed, blind), "noise that explains the difference settles it"
    assert of(with_column(row, 4, lambda v: v * np.float32(1.0003)), row).passed, "half of its digits agree"
    long = np.append(np.full((1, 16), 9, np.float32), row[:, 4:], axis=1)
    assert of(with_column(long, 16, lambda v: -v), long).passed, "one of 17 may be small by chance"
    assert of(wrong, row, atol=1e-5).passed, "the user says how far off it may be"


def test_compare_passes_agreeing_small_column() -> None:
    near = BOXES * (1 + np.float32(2e-7) * RNG.standard_normal(BOXES.shape).astype(np.float32))
    assert of(near, BOXES).passed
    assert of(with_column(BOXES, 4, lambda v: v * np.float32(1.0003)), BOXES).passed, "half of its digits agree"


def test_small_column_within_noise_reports_blind() -> None:
    wrong = with_column(BOXES, 5, lambda v: -v)
    found = of(wrong, BOXES, noise=noise(2.0**-15, BOXES.shape))
    assert (found.passed, found.blind) == (False, True) and "the reference is 0 or within its noise" in found.reason


def test_small_values_against_zero_reference_report_blind() -> None:
    reference = with_column(BOXES, 5, lambda v: 0 * v)
    for how in ({}, {"noise": noise(2.0**-45, BOXES.shape)}):
        found = of(BOXES, reference, **how)
        assert (found.passed, found.blind) == (
            False,
            True,
        ) and ", in column 5: they cannot be judged" in found.reason
    one = reference.copy()
    one[3, 5] = 1e-6
    assert of(one, reference).passed, "one value says nothing of the others"
    assert of(with_column(reference, 5, lambda v: v + np.float32(1e-39)), reference).passed
    steps = np.zeros((1, 64), np.int8)
    steps[0, 0] = 100
    assert of(steps + np.int8(1), steps, atol=1).blind, "one step is the whole value"
    assert of(steps, steps + np.int8(1), atol=1).blind
    floats = steps.astype(np.float32)
    assert of(floats + 1, floats, atol=1).passed, "the user says how far from 0 a float may be"


def test_single_steps_beside_zeros_pass_within_given_atol() -> None:
    reference = np.where(RNG.random((32, 64)) < 0.1, 90, 0).astype(np.int8)
    steps = (RNG.random(reference.shape) < 0.01).astype(np.int8)
    assert of(reference + steps, reference, atol=1).passed


def test_small_rows_of_inner_axes_report_blind() -> None:
    heads = np.random.default_rng(8).uniform(1, 9, (1, 3, 6, 8, 8)).astype(np.float32)
    heads[:, :, 4] *= 1e-7
    wrong = heads.copy()
    wrong[:, :, 4] *= -1
    assert of(wrong, heads).blind and "row 4 of axis 2" in of(wrong, heads).reason


def test_small_rows_of_second_axis_get_listed() -> None:
    reference = np.ascontiguousarray(BOXES.T)[None]
    wrong = reference.copy()
    wrong[:, 4:] *= -1
    found = of(wrong, reference)
    assert found.blind and "rows 4, 5 of the second axis" in found.reason
    assert of(wrong[0], reference[0]).blind and "in rows 4, 5" in of(wrong[0], reference[0]).reason


def test_small_tail_of_vector_reports_blind() -> None:
    tail = np.exp(-np.linspace(0, 60, 100)).astype(np.float32)
    wrong = np.where(tail < 1e-7, 0, tail)
    found = of(wrong, tail)
    assert found.blind and found.reason.startswith("77 values are smaller than the tolerance")
    assert of(tail * np.float32(1 + 1e-6), tail).passed


def test_compare_passes_few_small_values_and_zeros() -> None:
    relu = np.maximum(RNG.standard_normal((64, 64)), 0).astype(np.float32)
    relu[3, 5] = 1e-9
    wrong = relu.copy()
    wrong[3, 5] = -1e-9
    assert of(wrong, relu).passed, "one value of 4096 says nothing of the others"
    assert of(relu + np.float32(1e-7), relu, noise=noise(2.0**-22, relu.shape)).passed, "zeros that rounding moves"


def test_small_values_within_given_tolerance_get_a_note() -> None:
    def notes(answer: Array, reference: Array, atol: float) -> tuple[str, ...]:
        found = compare_output("y", answer.astype(np.float32), reference.astype(np.float32), atol=atol)
        assert found.passed, found.reason
        return found.notes

    reference = np.full((20, 5), 500.0) + np.arange(20)[:, None]
    reference[:, 4] = 1e-6 * (1 + np.arange(20))
    answer = reference * [1, 1, 1, 1, 1.4]
    rest = "smaller than the given tolerance: hil accepts errors of up to half of"
    assert notes(answer, reference, 1e-3) == (f"20 values in column 4 are {rest} their value",)
    assert notes(reference * (1 + 3e-7), reference, 1e-7) == notes(reference, reference, 1e-3) == ()
    assert notes(answer[0], reference[0], 1e-3) == ()  # 20 % of the values
    assert notes(answer[0, 1:], reference[0, 1:], 1e-3) == (f"1 value is {rest} its value",)


def test_given_tolerance_reports_blind_if_most_values_vanish() -> None:
    reference = np.array([[100, *RNG.choice((-1, 1), 63)]], np.int8)
    zeroed = with_column(reference, slice(1, None), lambda v: 0 * v)
    found = of(zeroed, reference, atol=1)
    assert (found.passed, found.blind) == (False, True) and "63 of them differ by more than 0.5" in found.reason
    stepped = with_column(reference, slice(1, 9), lambda v: v - np.sign(v))
    assert of(stepped, reference, atol=1).passed, "a step is a step"
    assert of(zeroed, reference, atol=1, allow_blind=["y"]).passed


def test_compare_counts_and_allows_flushed_subnormals() -> None:
    reference = np.array([1e-39, -2e-40, 1, 2], np.float32) * np.float32(1)
    flushed = np.where(np.abs(reference) < 1e-38, 0, reference)
    dead = reference[:2] * 0
    found = of(dead, reference[:2])
    assert not found.passed and found.flushed == 2 and "--allow-flush=y" in found.reason
    allowed = of(dead, reference[:2], allow_flush=["y"])
    assert allowed.passed and "2 subnormal values flushed to 0, as allowed by --allow-flush" in allowed.notes
    assert not of(dead, reference[:2], allow_flush=["z"]).passed
    accepted = of(flushed, reference, allow_flush=["y"], accept=parse_accept(["max_abs<=1e-40"]))
    assert accepted.passed, "criteria see what is allowed, too"
    assert not of(flushed, reference, accept=parse_accept(["max_abs<=1e-40"])).passed
    wrong = flushed.copy()
    wrong[3] = 0
    found = of(wrong, reference, allow_flush=["y"])
    assert not found.passed and found.flushed == 2 and found.mismatches == 1, "only what is subnormal may be 0"


def test_constant_output_gets_a_note() -> None:
    def notes(values: Any) -> tuple[str, ...]:
        return of(values, np.asarray(values)).notes

    assert notes(np.zeros(3, np.float32)) == (
        "every expected value is 0: a board that computes nothing could also pass",
    )
    assert notes(np.full(70_000, 7)) == ("every expected value is 7: a board that computes nothing could also pass",)
    assert notes(np.zeros(1)) and not notes(np.ones(1)) and not notes(np.arange(3)) and not notes(np.zeros(0))
    last = np.zeros(70_000)
    last[-1] = 1
    assert not notes(last)
    verdict = compare(RunResult("", {"y": np.zeros(3)}), RunResult("r", {"y": np.zeros(3)}))
    assert (
        verdict
        and verdict.reason == "output y: every expected value is 0: a board that computes nothing could also pass"
    )
