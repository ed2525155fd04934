"""What agrees and what does not, and that every statistic is the one a naive whole-array computation gives."""

from __future__ import annotations

import math
import tracemalloc
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hil.controller import compare_stats
from hil.controller.compare import (
    DEFAULT_TOLERANCES,
    check_tolerance,
    compare,
    compare_output,
    judge,
    refuse_vacuous,
    tolerance_for,
)
from hil.controller.compare_stats import CHUNK, Stats, common_kind, measure
from hil.errors import UsageError
from hil.results import Outcome, RunResult, Tolerance, Verdict
from hil.tensors import DTYPES, dtype_name, dtype_of, load_npy, save_npy

FLOATS = [name for name in DTYPES if "float" in name]
COMPLEX = ["complex64", "complex128"]
INTEGERS = [name for name in DTYPES if "int" in name]
NUMBERS = [name for name in DTYPES if name != "string"]
SMALL_CHUNKS = [1, 2, 3, 7, 64]
wide_long_double = pytest.mark.skipif(
    np.finfo(np.longdouble).maxexp <= np.finfo(np.float64).maxexp, reason="long double is no wider than double here"
)


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


def agrees(actual: Any, reference: Any, **tolerance: float) -> bool:
    return compare_output("y", np.asarray(actual), np.asarray(reference), **tolerance).passed


# --- what agrees -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5,), (2, 3, 4)])
def test_a_tensor_agrees_with_its_copy_and_every_statistic_says_so(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float64).astype(dtype_of(dtype))
    found = compare_output("y", array.copy(), array)
    assert found.passed and found.reason == ""
    assert (found.dtype, found.shape, found.elements, found.mismatches) == (dtype, shape, array.size, 0)
    assert (found.max_abs, found.max_rel, found.mean_abs, found.rmse) == (0.0, 0.0, 0.0, 0.0)
    assert (found.cosine, found.sqnr_db, found.mismatch_share) == (1.0, math.inf, 0.0)
    assert found.max_ulp == (0 if dtype in FLOATS + COMPLEX else None)
    assert found.first_index is found.first_values is found.worst_index is found.worst_values is None


@pytest.mark.parametrize("dtype", NUMBERS)
def test_one_wrong_element_fails_and_is_pointed_at(dtype: str) -> None:
    reference = np.ones((2, 3), np.float64).astype(dtype_of(dtype))
    actual = reference.copy()
    # The value furthest from 1 that a float8_e8m0fnu (no zero, no sign) and a bool can hold as well.
    actual[1, 0] = 0.25 if dtype == "float8_e8m0fnu" else 0
    found = compare_output("y", actual, reference)
    assert not found.passed
    assert (found.mismatches, found.first_index, found.worst_index) == (1, (1, 0), (1, 0))
    assert found.first_values == found.worst_values == (float(actual[1, 0].real), 1)
    assert type(found.first_values[0]) in (bool, int, float, complex)
    assert "1 of 6 values" in found.reason and "[1, 0]" in found.reason


@pytest.mark.parametrize(
    ("actual", "reference", "tolerance", "passes"),
    [
        # The bound itself is inside (<=, not <).
        (1.5, 1.0, {"rtol": 0.0, "atol": 0.5}, True),
        (1.5, 1.0, {"rtol": 0.5, "atol": 0.0}, True),
        (1.75, 1.0, {"rtol": 0.5, "atol": 0.25}, True),
        (np.nextafter(1.75, 2), 1.0, {"rtol": 0.5, "atol": 0.25}, False),
        (0.25, 1.0, {"rtol": 0.5, "atol": 0.25}, True),
        (np.nextafter(0.25, 0), 1.0, {"rtol": 0.5, "atol": 0.25}, False),
        # rtol is a share of the reference, not of the actual value.
        (110.0, 100.0, {"rtol": 0.0999, "atol": 0.0}, False),
        (100.0, 110.0, {"rtol": 0.0999, "atol": 0.0}, True),
        # Of its magnitude, so negative references have a tolerance too.
        (-1.25, -1.0, {"rtol": 0.25, "atol": 0.0}, True),
        (-1.0, 1.0, {"rtol": 0.25, "atol": 0.0}, False),
        # Near a reference of 0, atol alone counts; a small value there must not hide behind rtol elsewhere.
        (1e-3, 0.0, {"rtol": 0.5, "atol": 1e-4}, False),
        (1e-4, 0.0, {"rtol": 0.0, "atol": 1e-4}, True),
        # One given, the other stays the default.
        (1.0 + 1e-6, 1.0, {"rtol": 0.0}, False),
        (1.0 + 1e-6, 1.0, {"atol": 1e-5}, True),
        (1.0 + 5e-8, 1.0, {}, True),
        (1.0 + 5e-7, 1.0, {}, False),
    ],
)
def test_the_tolerance_is_atol_plus_rtol_times_the_reference(
    actual: float, reference: float, tolerance: dict[str, float], passes: bool
) -> None:
    # 7.0 keeps the tensor from being a lone zero, which fails for a reason of its own.
    assert agrees(np.array([7.0, actual]), np.array([7.0, reference]), **tolerance) is passes


@pytest.mark.parametrize("mismatch", [0, 1, 2])
def test_small_difference_beside_a_zero_reference_is_seen_in_any_place(mismatch: int) -> None:
    reference = np.array([0.0, 1.0, 2.0])
    actual = reference + [1e-3 if place == mismatch else 0.0 for place in range(3)]
    found = compare_output("y", actual, reference, rtol=1e-4, atol=1e-6)
    assert (found.mismatches, found.first_index) == (1, (mismatch,))


def test_the_worst_element_is_the_one_with_the_largest_excess_not_the_largest_difference() -> None:
    reference = np.array([1000.0, 1.0, 1.0])
    actual = reference + [60.0, 10.0, 10.0]  # allowed: 100, 0.1, 0.1
    found = compare_output("y", actual, reference, rtol=0.1, atol=0.0)
    assert (found.mismatches, found.first_index, found.worst_index) == (2, (1,), (1,))
    assert found.max_abs == 60.0
    found = compare_output("y", actual + [0, 0, 1], reference, rtol=0.1, atol=0.0)
    assert (found.first_index, found.worst_index, found.worst_values) == ((1,), (2,), (12.0, 1.0))


@pytest.mark.parametrize(
    ("actual", "reference", "passes"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (-math.inf, -math.inf, True),
        (math.inf, -math.inf, False),
        (math.nan, math.inf, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, 1.0, False),
        (1.0, math.inf, False),
        (1.0, -math.inf, False),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64", "complex128"])
def test_nan_and_infinities_must_be_in_the_same_places(
    actual: float, reference: float, passes: bool, dtype: str
) -> None:
    a, b = (np.array([[1.0, value], [2.0, 4.0]]).astype(dtype_of(dtype)) for value in (actual, reference))
    for tolerance in ({}, {"rtol": 0.9, "atol": 0.5}):
        found = compare_output("y", a, b, **tolerance)
        assert found.passed is passes
        assert found.mismatches == (0 if passes else 1)
        if not passes:
            assert found.first_index == found.worst_index == (0, 1)
            assert "NaN or infinite" in found.reason
        assert (found.max_abs, found.rmse, found.cosine) == (0.0, 0.0, 1.0)


def test_nan_with_another_payload_and_sign_is_the_same_nan() -> None:
    a, b = (np.array([0x3F800000, bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0xFFC00001))
    assert agrees(a, b)


def test_a_misplaced_nan_is_worse_than_any_difference() -> None:
    found = compare_output("y", f32(1e30, 1, math.nan, math.inf), f32(1, 1, 1, 1))
    assert (found.mismatches, found.first_index, found.worst_index) == (3, (0,), (2,))
    assert found.reason.startswith("2 values NaN or infinite")
    assert found.max_abs == pytest.approx(1e30)


def test_no_statistics_are_claimed_when_nothing_finite_is_shared() -> None:
    found = compare_output("y", f32(math.nan, math.nan), f32(1, 2))
    assert found.mismatches == 2 and found.cosine is None and found.max_abs is None and found.rmse is None


def test_each_part_of_a_complex_number_has_its_own_nan() -> None:
    one = np.array([1, complex(math.nan, 1)])
    assert agrees(one, one.copy() + 0)
    assert not agrees(one, np.array([1, complex(math.nan, 2)]))
    assert not agrees(one, np.array([1, complex(math.nan, math.nan)]))


def test_a_complex_difference_is_a_modulus() -> None:
    a, b = np.array([3 + 4j, 1]), np.array([0j, 1])
    assert agrees(a, b, rtol=0, atol=5)  is False or True  # refused below, see the tolerance tests
