"""Tensor comparison: tolerances, and statistics checked against a naive whole-array computation."""

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

from hil.compare import values as compare_values
from hil.compare.stats import Stats, measure
from hil.compare.tolerance import DEFAULT_TOLERANCES, check_tolerance, choose_tolerance, refuse_vacuous, scale_of
from hil.compare.values import CHUNK, choose_common_kind
from hil.compare.verdict import Verdict, compare, compare_output, find_excess_difference, judge
from hil.core.npy import load_npy, save_npy
from hil.core.results import Outcome, RunResult, Tolerance
from hil.core.tensors import DTYPES, get_dtype_name, parse_dtype
from hil.errors import UsageError, VacuousTolerance

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


def agrees(actual: Any, reference: Any, **tolerance: Any) -> bool:
    return compare_output("y", np.asarray(actual), np.asarray(reference), **tolerance).passed


# --- agreement ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5,), (2, 3, 4)])
def test_tensor_agrees_with_copy_in_every_statistic(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float64).astype(parse_dtype(dtype))
    found = compare_output("y", array.copy(), array)
    assert found.passed and found.reason == ""
    assert (found.dtype, found.shape, found.elements, found.mismatches) == (dtype, shape, array.size, 0)
    assert (found.max_abs, found.max_rel, found.mean_abs, found.rmse) == (0.0, 0.0, 0.0, 0.0)
    assert (found.cosine, found.sqnr_db, found.mismatch_share) == (1.0, math.inf, 0.0)
    assert found.max_ulp == (0 if dtype in FLOATS + COMPLEX else None)
    assert found.first_index is found.first_values is found.worst_index is found.worst_values is None


@pytest.mark.parametrize("dtype", NUMBERS)
def test_compare_reports_index_of_wrong_element(dtype: str) -> None:
    reference = np.ones((2, 3), np.float64).astype(parse_dtype(dtype))
    actual = reference.copy()
    # The value furthest from 1 that float8_e8m0fnu (without zero and sign) and bool can represent.
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
        # The bound is inclusive (<=, not <).
        (1.5, 1.0, {"rtol": 0.0, "atol": 0.5}, True),
        (1.5, 1.0, {"rtol": 0.5, "atol": 0.0}, True),
        (1.75, 1.0, {"rtol": 0.5, "atol": 0.25}, True),
        (np.nextafter(1.75, 2), 1.0, {"rtol": 0.5, "atol": 0.25}, False),
        (0.25, 1.0, {"rtol": 0.5, "atol": 0.25}, True),
        (0.2499, 1.0, {"rtol": 0.5, "atol": 0.25}, False),
        # rtol is relative to the reference, not to the actual value.
        (110.0, 100.0, {"rtol": 0.0999, "atol": 0.0}, False),
        (100.0, 110.0, {"rtol": 0.0999, "atol": 0.0}, True),
        # rtol applies to the magnitude, so negative references have a tolerance too.
        (-1.25, -1.0, {"rtol": 0.25, "atol": 0.0}, True),
        (-1.0, 1.0, {"rtol": 0.25, "atol": 0.0}, False),
        # Near a reference of 0 only atol counts; a small value there must not profit from rtol elsewhere.
        (1e-3, 0.0, {"rtol": 0.5, "atol": 1e-4}, False),
        (1e-4, 0.0, {"rtol": 0.0, "atol": 1e-4}, True),
        # If one is given, the other keeps its default.
        (1.0 + 1e-6, 1.0, {"rtol": 0.0}, False),
        (1.0 + 1e-6, 1.0, {"atol": 1e-5}, True),
        (1.0 + 5e-8, 1.0, {}, True),
        (1.0 + 5e-7, 1.0, {}, False),
    ],
)
def test_tolerance_adds_atol_and_rtol_times_reference(
    actual: float, reference: float, tolerance: dict[str, float], passes: bool
) -> None:
    # 7.0 prevents an all-zero tensor, which fails for another reason.
    assert agrees(np.array([7.0, actual]), np.array([7.0, reference]), **tolerance) is passes


@pytest.mark.parametrize("mismatch", [0, 1, 2])
def test_compare_fails_small_difference_from_zero_reference(mismatch: int) -> None:
    reference = np.array([0.0, 1.0, 2.0])
    actual = reference + [1e-3 if place == mismatch else 0.0 for place in range(3)]
    found = compare_output("y", actual, reference, rtol=1e-4, atol=1e-6)
    assert (found.mismatches, found.first_index) == (1, (mismatch,))


def test_compare_worst_element_has_largest_excess() -> None:
    reference = np.array([1000.0, 1.0, 1.0])
    actual = np.array([1060.0, 11.0, 11.0])  # allowed: 100, 0.1, 0.1
    found = compare_output("y", actual, reference, rtol=0.1, atol=0.0)
    assert (found.mismatches, found.first_index, found.worst_index) == (2, (1,), (1,))
    assert found.max_abs == 60.0
    found = compare_output("y", np.array([1060.0, 11.0, 12.0]), reference, rtol=0.1, atol=0.0)
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
@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64", "complex128"]
)
def test_compare_requires_nan_and_infinity_by_position(
    actual: float, reference: float, passes: bool, dtype: str
) -> None:
    a, b = (np.array([[1.0, value], [2.0, 4.0]]).astype(parse_dtype(dtype)) for value in (actual, reference))
    for tolerance in ({}, {"rtol": 0.5, "atol": 0.5}):
        found = compare_output("y", a, b, **tolerance)
        assert found.passed is passes
        assert found.mismatches == (0 if passes else 1)
        if not passes:
            assert found.first_index == found.worst_index == (0, 1)
            assert "NaN or infinite" in found.reason
        assert (found.max_abs, found.rmse, found.cosine) == (0.0, 0.0, 1.0)


def test_compare_ignores_nan_payload_and_sign() -> None:
    a, b = (np.array([0x3F800000, bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0xFFC00001))
    assert agrees(a, b)


def test_compare_ranks_misplaced_nan_worst() -> None:
    found = compare_output("y", f32(1e30, 1, math.nan, math.inf), f32(1, 1, 1, 1))
    assert (found.mismatches, found.first_index, found.worst_index) == (3, (0,), (2,))
    assert found.reason.startswith("2 values NaN or infinite")
    assert found.max_abs == pytest.approx(1e30)


def test_compare_omits_statistics_without_finite_pairs() -> None:
    found = compare_output("y", f32(math.nan, math.nan), f32(1, 2))
    assert found.mismatches == 2 and found.cosine is None and found.max_abs is None and found.rmse is None


def test_compare_matches_nan_per_complex_part() -> None:
    one = np.array([1, complex(math.nan, 1)])
    assert agrees(one, one.copy() + 0)
    assert not agrees(one, np.array([1, complex(math.nan, 2)]))
    assert not agrees(one, np.array([1, complex(math.nan, math.nan)]))


def test_complex_difference_uses_modulus() -> None:
    a, b = np.array([3 + 4j, 9]), np.array([0j, 9])
    assert agrees(a, b, rtol=0, atol=5)
    assert not agrees(a, b, rtol=0, atol=4.9)
    assert agrees(np.array([1 + 1.2j]), np.array([1 + 1j]), rtol=0.2 / math.sqrt(2) + 1e-12, atol=0)
    assert not agrees(np.array([1 + 1.2j]), np.array([1 + 1j]), rtol=0.2 / math.sqrt(2) - 1e-12, atol=0)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("tolerance", [{}, {"rtol": 0.4}])
def test_compare_fails_all_zero_output_with_reason(dtype: str, tolerance: dict[str, float]) -> None:
    if dtype == "float8_e8m0fnu":
        pytest.skip("this dtype has no zero")
    reference = np.array([0, 0, 1, 0]).astype(parse_dtype(dtype))
    found = compare_output("y", np.zeros_like(reference), reference, **tolerance)
    assert not found.passed
    assert found.reason == "every value is 0, but the reference has other values"


def test_compare_fails_zeros_within_tolerance() -> None:
    found = compare_output("y", f32(0, -0.0, 0), f32(1e-9, 0, -1e-9), rtol=0, atol=1, allow_blind=["y"])
    assert (found.passed, found.mismatches) == (False, 0)
    assert found.reason == "every value is 0, but the reference has other values"
    assert agrees(f32(0, -0.0), f32(-0.0, 0))
    assert not agrees(np.float64([0.0]), np.float64([1e-200])), "the square of the reference underflows"


# --- shape, dtype, layout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "other"), [((2, 3), (3, 2)), ((6,), (2, 3)), ((), (1,)), ((1, 6), (6,)), ((0,), (1,))]
)
def test_compare_fails_shape_mismatch(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    found = compare_output("y", np.ones(shape), np.ones(other))
    assert not found.passed
    assert (found.shape, found.reference_shape, found.mismatches, found.cosine) == (shape, other, None, None)
    assert found.reason.startswith("shape ")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_compare_fails_dtype_mismatch(dtype: str, other: str) -> None:
    a, b = (np.array(["1", "1"] if name == "string" else [1, 1]).astype(parse_dtype(name)) for name in (dtype, other))
    found = compare_output("y", a, b)
    assert found.passed is (dtype == other)
    if dtype != other:
        assert found.reason.startswith(f"dtype {dtype}, the reference has {other}")


def test_compare_reports_agreement_despite_dtype_mismatch() -> None:
    reference = np.linspace(0.1, 1, 7)
    found = compare_output("y", reference.astype(np.float16), reference)
    assert found.reason == "dtype float16, the reference has float64; the values agree"
    scale = float(np.sqrt(np.mean(reference**2)))
    assert (
        found.tolerance == Tolerance(1e-3, pytest.approx(1e-5 * scale))
        and found.max_ulp is None
        and 0 < found.max_abs < 1e-3
    )
    found = compare_output("y", np.array([1, 2], np.int32), np.array([1, 3], np.int64))
    assert "1 of 2 values differs" in found.reason and found.mismatches == 1
    for one, other in [("int64", "uint64"), ("int64", "float32"), ("string", "int8")]:
        assert choose_common_kind(one, other) == ""
    assert choose_common_kind("complex64", "float32") == "complex" and choose_common_kind("int8", "int64") == "integer"


def test_compare_ignores_layout_byte_order_and_memory_maps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, (6, 5, 4)).astype(np.float32) for _ in range(2))
    plain = compare_output("y", a, b)
    assert not plain.passed
    path = tmp_path / "a.npy"
    save_npy(path, a.astype(">f4"))
    doubled = np.zeros((12, 5, 8), np.float32)
    doubled[::2, :, ::2] = a
    flipped = a[::-1, :, ::-1].copy()[::-1, :, ::-1]
    for other in (np.asfortranarray(a), a.astype(">f4"), load_npy(path, mmap=True), doubled[::2, :, ::2], flipped):
        assert compare_output("y", other, b) == plain
        mirrored = compare_output("y", b, other)
        assert (mirrored.mismatches, mirrored.first_index) == (plain.mismatches, plain.first_index)
    broadcast = np.broadcast_to(np.float32(2), (3, 4))
    assert agrees(broadcast, np.full((3, 4), 2, np.float32))


@pytest.mark.parametrize("layout", ["c", "fortran", "big-endian"])
@pytest.mark.parametrize("equal", [True, False])
def test_compare_uses_less_memory_than_tensor_size(layout: str, equal: bool) -> None:
    b = np.ones((2048, 3072), np.float32)
    a = b.copy() if equal else b + np.float32(0.5)
    a[0, 0] = b[0, 0] if equal else math.nan
    a = {"c": a, "fortran": np.asfortranarray(a), "big-endian": a.astype(">f4")}[layout]
    compare_output("y", a[:2], b[:2])
    tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    compare_output("y", a, b)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 90 * CHUNK < b.nbytes, f"{peak} bytes for tensors of {b.nbytes}"


# --- integers, bools, strings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "a", "b"),
    [
        ("int32", 2**24, 2**24 + 1),  # equal as float32
        ("uint32", 2**32 - 1, 2**32 - 2),
        ("int64", 2**53, 2**53 + 1),  # equal as float64
        ("int64", 2**63 - 1, 2**63 - 2),
        ("int64", -(2**63), -(2**63) + 1),
        ("uint64", 2**64 - 1, 2**64 - 2),
        ("int8", -128, -127),
    ],
)
def test_compare_integers_exactly(dtype: str, a: int, b: int) -> None:
    one, other = (np.array([1, value], dtype) for value in (a, b))
    found = compare_output("y", one, other)
    assert (found.passed, found.mismatches, found.max_abs, found.tolerance) == (False, 1, 1.0, None)
    assert found.worst_values == (a, b)
    assert agrees(one, other, rtol=0, atol=1, allow_blind=["y"])
    assert not agrees(one, other, rtol=0, atol=0.999, allow_blind=["y"])


@pytest.mark.parametrize(
    ("dtype", "a", "b"),
    [
        ("int64", -(2**63), 2**63 - 1),
        ("uint64", 0, 2**64 - 1),
        ("int64", 2**62, -(2**62) - 1),
        ("int32", -(2**31), 2**31 - 1),
        ("int8", -128, 127),
        ("int4", -8, 7),
    ],
)
def test_compare_integer_difference_does_not_overflow(dtype: str, a: int, b: int) -> None:
    for one, other in ((a, b), (b, a)):
        found = compare_output(
            "y", *(np.array([7, value], object).astype(parse_dtype(dtype)) for value in (one, other))
        )
        assert found.mismatches == 1 and found.max_abs == float(abs(a - b))
        assert found.rmse == pytest.approx(abs(a - b) / math.sqrt(2))


@pytest.mark.parametrize(("apart", "passes"), [(3, True), (4, False)])
def test_compare_applies_64_bit_tolerance_exactly(apart: int, passes: bool) -> None:
    base = 2**61 + 1
    for sign in (1, -1):
        a, b = np.array([0, sign * (base + apart)]), np.array([0, sign * base])
        assert agrees(a, b, rtol=0, atol=3) is passes
        assert agrees(a, b, rtol=0, atol=3.9) is passes
    assert agrees(np.array([111]), np.array([100]), rtol=0.1, atol=1)
    assert not agrees(np.array([112]), np.array([100]), rtol=0.1, atol=1)
    largest = np.array([2**64 - 1], np.uint64)
    assert agrees(largest, np.array([2**63 + 2**62], np.uint64), rtol=0.5)
    assert not agrees(np.array([1], np.uint64), largest, rtol=0.5)
    assert agrees(np.array([1], np.uint64), largest, rtol=0.9, atol=1e19, allow_blind=["y"]), (
        "the bound itself is beyond uint64"
    )


def test_compare_finds_worst_64_bit_integer_beyond_float64() -> None:
    b = np.array([2**62, 2**62, 2**62])
    found = compare_output("y", np.array([1, 2, 0]), b)
    assert (found.worst_index, found.first_index) == ((2,), (0,))


def test_compare_bools_by_truth_value() -> None:
    true = np.array([1, 0, 255, 2], np.uint8).view(np.bool_)
    found = compare_output("y", true, np.array([True, False, True, True]))
    assert found.passed and found.max_abs == 0.0
    assert not agrees(true, np.array([True, True, True, True]))


def test_compare_strings_for_equality() -> None:
    a = np.array([["a", "é"], ["", "long" * 50]], object)
    assert agrees(a, a.copy()) and agrees(a, a.astype(str)) and agrees(a, a.copy(), rtol=0.5, atol=100)
    b = a.copy()
    b[1, 0] = " "
    found = compare_output("y", a, b, rtol=0.5, atol=100)
    assert (found.passed, found.mismatches, found.first_index, found.first_values) == (False, 1, (1, 0), ("", " "))
    assert found.cosine is found.max_abs is found.max_ulp is found.tolerance is None
    assert not agrees(np.array("a", object), np.array("b", object))


# --- tolerances ------------------------------------------------------------------------------------------------------


def test_every_float_dtype_has_default_tolerance() -> None:
    assert set(DEFAULT_TOLERANCES) == set(FLOATS + COMPLEX)
    assert all(choose_tolerance(name, None, None) is None for name in DTYPES if name not in DEFAULT_TOLERANCES)
    assert choose_tolerance("float32", None, None) == Tolerance(1.3e-6, 1e-5)
    assert choose_tolerance("float32", 0.1, None) == Tolerance(0.1, 1e-5)
    assert choose_tolerance("float32", None, 0.1) == Tolerance(1.3e-6, 0.1)
    assert choose_tolerance("int32", None, 2) == Tolerance(0.0, 2.0)
    assert choose_tolerance("int64", 0.1, None) == Tolerance(0.1, 0.0)
    assert choose_tolerance("string", 0.1, 2) is None


@pytest.mark.parametrize("dtype", [name for name in FLOATS if "float8" in name or "float4" in name])
def test_default_tolerance_allows_step_of_narrow_float(dtype: str) -> None:
    if dtype == "float8_e8m0fnu":
        assert DEFAULT_TOLERANCES[dtype] == Tolerance(0.0, 0.0)
        return
    info = ml_dtypes.finfo(parse_dtype(dtype))
    rtol = 0.375 if dtype == "float4_e2m1fn" else float(info.eps)  # the step from 4 to 6 is 0.5 + 0.375 * 4
    assert DEFAULT_TOLERANCES[dtype] == Tolerance(rtol, float(info.smallest_subnormal))
    values = np.arange(256 if "8" in dtype else 16, dtype=np.uint8).view(parse_dtype(dtype)).astype(np.float64)
    steps = np.unique(values[np.isfinite(values)]).astype(parse_dtype(dtype))
    assert agrees(steps[1:], steps[:-1]) and agrees(steps[:-1], steps[1:])
    assert compare_output("y", steps[1:], steps[:-1]).max_ulp == 1
    assert not agrees(steps[3:], steps[:-3])


@pytest.mark.parametrize(
    "tolerance",
    [
        {"rtol": math.nan},
        {"atol": math.nan},
        {"rtol": math.inf},
        {"atol": math.inf},
        {"rtol": -1e-9},
        {"atol": -1e-9},
        {"rtol": 1.0},
        {"rtol": 17.0},
    ],
)
def test_tolerance_rejects_invalid_values(tolerance: dict[str, float]) -> None:
    with pytest.raises(UsageError) as caught:
        check_tolerance(**{"rtol": None, "atol": None, **tolerance})
    assert caught.value.hint
    with pytest.raises(UsageError):
        choose_tolerance("float32", **{"rtol": None, "atol": None, **tolerance})
    with pytest.raises(UsageError):
        compare_output("y", f32(1), f32(1), **tolerance)
    with pytest.raises(UsageError):
        compare(result(y=f32(1)), result(y=f32(1)), **tolerance)


def test_check_tolerance_accepts_valid_values() -> None:
    check_tolerance(None, None)
    check_tolerance(0, 0)
    check_tolerance(0.999, 1e6)


@pytest.mark.parametrize(
    ("dtype", "refused", "fine"),
    [("bool", 1, 0.5), ("int8", 255, 254), ("uint4", 15, 14), ("float4_e2m1fn", 12, 11.5), ("float16", 131008, 131000)],
)
def test_tolerance_rejects_atol_as_wide_as_dtype(dtype: str, refused: float, fine: float) -> None:
    with pytest.raises(UsageError, match="could not fail"):
        choose_tolerance(dtype, None, refused)
    assert choose_tolerance(dtype, None, fine) is not None


@pytest.mark.parametrize(
    ("reference", "rtol", "atol", "refused"),
    [
        ([0.0, 0.25, -0.5], 0.0, 1.0, True),  # -0.5 and 0.5 are exactly 1 apart
        ([0.0, 0.25, -0.5], 0.0, 0.5, True),  # 0 is 0.5 apart
        ([0.0, 0.25, -0.5], 0.0, 0.499, False),
        ([0.0, 0.25, -0.5], 0.5, 0.25, True),
        ([0.0, 0.25, -0.5], 0.5, 0.249, False),
        ([1.0, 1.25, 1.5], 0.0, 0.5, True),  # any order would agree
        ([1.0, 1.25, 1.5], 0.5, 0.0, True),
        ([1.0, 1.25, 1.5], 0.1, 0.1, False),
        ([1.0, 1.0, 1.0], 0.1, 0.1, False),  # a constant has only one order
        ([0.0, 0.0], 0.0, 1e3, False),  # any value above atol still fails
        ([], 0.0, 1e3, False),
        ([math.nan, math.inf, 0.0], 0.0, 1e3, False),
        ([math.nan, math.inf, 1.0], 0.0, 2.0, True),
        ([1e-30, 0.0], 0.0, 1e-5, True),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64"])
def test_tolerance_rejects_values_accepting_zeros_or_any_order(
    reference: list[float], rtol: float, atol: float, refused: bool, dtype: str
) -> None:
    array = np.array(reference).astype(dtype)
    if not refused:
        refuse_vacuous("y", Tolerance(rtol, atol), scale_of(array), rtol=0, atol=0)
        compare_output("y", array, array, rtol=rtol, atol=atol)
        return
    with pytest.raises(VacuousTolerance, match="output y"):
        refuse_vacuous("y", Tolerance(rtol, atol), scale_of(array), rtol=0, atol=0)
    with pytest.raises(UsageError, match="output y"):
        compare_output("y", array, array, rtol=rtol, atol=atol)


def test_refuse_vacuous_considers_whole_reference() -> None:
    reference = np.zeros(CHUNK + 5, np.int16)
    reference[0], reference[-1] = 1, -32768
    refuse_vacuous("y", Tolerance(0.0, 32000.0), scale_of(reference), rtol=0, atol=0)
    with pytest.raises(UsageError):
        refuse_vacuous("y", Tolerance(0.0, 2.0), scale_of(reference[:-1]), rtol=0, atol=0)
    refuse_vacuous("y", Tolerance(0.0, 2.0), scale_of(np.array(["a"], object)), rtol=0, atol=0)


def test_scale_of_reads_signalling_nan_without_warning():
    assert scale_of(np.array([0x7F81, 0x3F80], np.uint16).view(ml_dtypes.bfloat16)).largest == 1


def test_compare_accepts_default_tolerance_at_any_scale() -> None:
    assert agrees(f32(1e-9, 0), f32(1e-9, 0))
    assert agrees(f32(1e-9, 0), f32(1e-9, 0), rtol=0.1)
    assert agrees(f32(0, 0), f32(0, 0))


# --- statistics compared with a naive oracle -------------------------------------------------------------------------


def _ordinal(value: Any, values: list[float]) -> int:
    """Return the rank of a value among all values of a narrow float."""
    return values.index(float(value))


def _naive_ulp(a: Any, b: Any) -> int:
    """Return the distance in representable values, with Python integers (or by counting, for 8 bits)."""
    if a.dtype.itemsize == 1:
        every = np.arange(256, dtype=np.uint8).view(a.dtype).astype(np.float64)
        values = sorted({float(value) for value in every if math.isfinite(value)})
        return abs(_ordinal(a, values) - _ordinal(b, values))

    def place(value: Any) -> int:
        width = value.dtype.itemsize * 8
        bits = int(value.view(f"u{value.dtype.itemsize}"))
        return bits if bits < 1 << (width - 1) else (1 << (width - 1)) - bits

    return abs(place(a) - place(b))


def _root(value: Fraction) -> Decimal:
    return (Decimal(value.numerator) / Decimal(value.denominator)).sqrt()


# Half of the largest value of each dtype with masks.
MASKS = {
    "float16": 32752.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**126,
    "float32": (2 - 2.0**-23) * 2.0**126,
    "float64": (2 - 2.0**-52) * 2.0**1022,
    "complex64": (2 - 2.0**-23) * 2.0**126,
    "complex128": (2 - 2.0**-52) * 2.0**1022,
}


def naive(actual: Any, reference: Any, tolerance: Tolerance | None, kind: str) -> dict[str, Any]:
    """Compute every statistic element by element with Python integers and fractions."""
    rtol, atol = (tolerance.rtol, tolerance.atol) if tolerance else (0.0, 0.0)
    pairs = list(zip(actual.ravel(), reference.ravel(), strict=True))
    found: dict[str, Any] = {"elements": len(pairs), "nonfinite": 0, "masked": 0}
    from_ = MASKS.get(get_dtype_name(actual.dtype), math.inf)
    out: list[tuple[int, Any]] = []
    differences: list[Any] = []
    quotients: list[Any] = []
    ulps: list[int] = []
    aa = ab = bb = dd = Fraction(0)
    for index, (a, b) in enumerate(pairs):
        if kind == "integer":
            parts = [(int(a), int(b))]
        elif kind == "complex":
            parts = [(float(a.real), float(b.real)), (float(a.imag), float(b.imag))]
        else:
            parts = [(float(a), float(b))]
        if not all(math.isfinite(value) for pair in parts for value in pair):
            if not all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in parts):
                found["nonfinite"] += 1
                out.append((index, math.inf))
            continue
        if kind == "integer":
            difference, magnitude = abs(int(a) - int(b)), abs(int(b))
        else:
            difference = float(np.hypot(*([x - y for x, y in parts] + [0.0])[:2]))
            magnitude = float(np.hypot(*([y for _, y in parts] + [0.0])[:2]))
        limit = rtol * magnitude + atol
        if difference > limit:
            out.append((index, difference - (math.floor(limit) if kind == "integer" else limit)))
        differences.append(difference)
        if magnitude:
            quotients.append(difference / magnitude)
        elif difference:
            found["beside_zero"] = True
        is_masked = any(min(x, y) >= from_ or max(x, y) <= -from_ for x, y in parts)
        found["masked"] += is_masked
        for x, y in [] if is_masked else parts:
            aa, ab, bb = aa + Fraction(x) ** 2, ab + Fraction(x) * Fraction(y), bb + Fraction(y) ** 2
            dd += (Fraction(x) - Fraction(y)) ** 2
        if kind == "complex":
            ulps += [_naive_ulp(a.real, b.real), _naive_ulp(a.imag, b.imag)]
        elif kind == "real" and get_dtype_name(actual.dtype) in FLOATS:
            ulps.append(_naive_ulp(a, b))
    found["mismatches"] = len(out)
    found["first"] = out[0][0] if out else None
    found["worst"] = max(out, key=lambda item: (item[1], -item[0]))[0] if out else None
    if not differences and out:
        return found
    found["zeroed"] = aa == 0 and bb > 0 and not found["masked"]
    found["max_abs"] = float(max(differences, default=0.0))
    found["max_rel"] = None if any(differences) and not quotients else float(max(quotients, default=0.0))
    floating = get_dtype_name(actual.dtype) in FLOATS + COMPLEX
    found["max_ulp"] = max(ulps, default=0) if floating else None
    count = max(len(differences), 1)
    found["mean_abs"] = float(sum(map(Fraction, differences), Fraction(0)) / count)
    visible = len(differences) - found["masked"]
    if actual.tobytes() == reference.tobytes():
        found["masked"] = 0
    if not visible and out:
        return found
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 40, 10**6, -(10**6)
        decimal = {name: _root(value) for name, value in (("a", aa), ("b", bb), ("d", dd / max(visible, 1)))}
        found["rmse"] = float(decimal["d"])
        if aa and bb:
            sign = -1 if ab < 0 else 1
            found["cosine"] = sign * float(_root(ab * ab / (aa * bb)))
        else:
            found["cosine"] = 1.0 if aa == bb else 0.0
        if dd == 0:
            found["sqnr_db"] = math.inf
        elif bb == 0:
            found["sqnr_db"] = -math.inf
        else:
            ratio = bb / dd
            found["sqnr_db"] = 10 * float((Decimal(ratio.numerator) / Decimal(ratio.denominator)).log10())
    return found


def assert_same(stats: Stats, expected: dict[str, Any]) -> None:
    for field in Stats.__dataclass_fields__:
        want, got = expected.get(field), getattr(stats, field)
        if field in ("zeroed", "beside_zero"):
            assert got is bool(want)
        elif isinstance(want, float):
            assert got == pytest.approx(want, rel=1e-9, abs=1e-9 if field in ("cosine", "sqnr_db") else 0), field
        else:
            assert got == want, field
    assert stats.cosine is None or -1.0 <= stats.cosine <= 1.0


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Any, Any]:
    """Draw two tensors of equal dtype and shape: arbitrary bits (NaN, infinity, subnormal), equal in many positions."""
    dtype = parse_dtype(draw(st.sampled_from(NUMBERS)))
    shape = draw(st.sampled_from([(), (0,), (1,), (5,), (3, 4), (2, 1, 7), (17,)]))
    size = math.prod(shape)
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)

    def any_bits() -> Any:
        data = rng.integers(0, 256, size * dtype.itemsize).astype(np.uint8)
        if get_dtype_name(dtype) in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
            return rng.integers(0, 2, size).astype(dtype)
        return data.view(dtype)

    def plain() -> Any:
        values = rng.integers(-3, 4, size) * draw(st.sampled_from([1.0, 0.5, 1e-3, 50.0]))
        return values.astype(np.complex128 if dtype.kind == "c" else np.float64).astype(dtype)

    with np.errstate(all="ignore"):
        sources = [any_bits(), plain(), np.zeros(size).astype(dtype)]
        a, b = (sources[draw(st.integers(0, 2))] for _ in range(2))
        b = np.where(rng.random(size) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])), a, b)
        if (
            get_dtype_name(dtype) in FLOATS + COMPLEX
            and get_dtype_name(dtype) != "float8_e8m0fnu"
            and draw(st.booleans())
        ):
            mask = MASKS.get(get_dtype_name(dtype), 0.0) if dtype.itemsize // (1 + (dtype.kind == "c")) < 8 else 0.0
            masks = [mask, -mask, 1.9 * mask, -1.9 * mask]
            special = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, *masks]).astype(dtype)
            a, b = (np.where(rng.random(size) < 0.2, rng.choice(special, size), array) for array in (a, b))
    return a.reshape(shape), b.reshape(shape)


@pytest.mark.ci
@settings(max_examples=1000, deadline=None)
@given(tensors(), st.sampled_from([None, Tolerance(0.0, 0.5), Tolerance(0.1, 0.0), Tolerance(0.01, 1e-3)]), st.data())
def test_statistics_match_naive_computation(
    pair: tuple[Any, Any], tolerance: Tolerance | None, data: st.DataObject
) -> None:
    a, b = pair
    if a.dtype in (np.float64, np.complex128):
        for array in pair:  # squares and differences beyond float64 have separate tests
            parts = array.reshape(-1).view(np.float64)
            assume(not np.any(np.isfinite(parts) & (np.abs(parts) > 1e140)))
            assume(not np.any((parts != 0) & (np.abs(parts) < 1e-140)))
    kind = choose_common_kind(get_dtype_name(a.dtype), get_dtype_name(b.dtype))
    expected = naive(a, b, tolerance, kind)
    assert_same(measure(a, b, tolerance, kind, chunk=data.draw(st.sampled_from(SMALL_CHUNKS))), expected)


@settings(max_examples=100, deadline=None)
@given(tensors())
def test_compare_tensor_with_itself_agrees(pair: tuple[Any, Any]) -> None:
    for array in pair:
        found = compare_output("y", array, array.copy())
        # NaN alone cannot be judged.
        assert found.passed is not bool(array.size and np.isnan(array).all())
        assert found.mismatches == 0 and found.rmse == 0.0 and found.cosine == 1.0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_compare_signalling_nan_without_warning(dtype: str) -> None:
    part = np.empty(0, dtype).real.dtype
    quiet = np.full(8, np.nan, part)
    bits = quiet.view(f"u{part.itemsize}")
    bits[::2] ^= bits.dtype.type(1 << (np.finfo(part).nmant - 1)) | bits.dtype.type(1)
    values = quiet.view(dtype)
    wrong = values.copy()
    wrong[1] = 3
    for one, other in ((values, values), (wrong, values), (values, wrong)):
        for tolerance in ({}, {"rtol": 0.0, "atol": 0.0}):
            assert compare_output("y", one, other, **tolerance).mismatches == (one is not other)


@settings(max_examples=100, deadline=None)
@given(tensors())
def test_exact_compare_gives_symmetric_results(pair: tuple[Any, Any]) -> None:
    a, b = pair
    there, back = compare_output("y", a, b, rtol=0, atol=0), compare_output("y", b, a, rtol=0, atol=0)
    assert (there.mismatches, there.first_index, there.max_abs) == (back.mismatches, back.first_index, back.max_abs)
    assert (there.max_ulp, there.rmse) == (back.max_ulp, back.rmse)


@pytest.mark.parametrize("size", [8191, 8192, 8193, 20000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 8193])
@pytest.mark.parametrize("place", ["first", "last", "everywhere"])
def test_measure_covers_elements_at_chunk_boundaries(size: int, place: str) -> None:
    rng = np.random.default_rng(size)
    b = rng.standard_normal(size).astype(np.float32)
    a = b.copy()
    spots = {"first": slice(0, 1), "last": slice(size - 1, size), "everywhere": slice(None)}[place]
    a[spots] += np.float32(0.25)
    found = compare_output("y", a, b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert found.mismatches == (size if place == "everywhere" else 1)
    assert found.first_index == ((size - 1,) if place == "last" else (0,))
    assert found.max_abs == np.abs(x - y).max() and found.max_rel == np.max(np.abs(x - y) / np.abs(y))
    assert found.mean_abs == pytest.approx(np.abs(x - y).mean(), rel=1e-12)
    assert found.rmse == pytest.approx(math.sqrt(((x - y) ** 2).mean()), rel=1e-12)
    assert found.cosine == pytest.approx(x @ y / math.sqrt((x @ x) * (y @ y)), rel=1e-12)
    assert found.sqnr_db == pytest.approx(10 * math.log10((y @ y) / ((x - y) @ (x - y))), rel=1e-12)


@pytest.mark.parametrize("chunk", SMALL_CHUNKS)
@pytest.mark.parametrize("bad", range(7))
def test_measure_finds_difference_in_any_chunk(chunk: int, bad: int) -> None:
    b = np.array([3, 1, 4, 1, 5, 9, 2], np.float64)
    a = b.copy()
    a[bad] += 1
    stats = measure(a, b, None, "real", chunk=chunk)
    assert (stats.mismatches, stats.first, stats.worst, stats.max_abs) == (1, bad, bad, 1.0)
    assert_same(stats, naive(a, b, None, "real"))


@pytest.mark.parametrize("chunk", SMALL_CHUNKS)
def test_measure_reports_first_of_equally_bad_elements(chunk: int) -> None:
    b = np.ones(9)
    a = np.array([1, 1, 1.5, 1.5, 1, 1, 1.5, 1, 1])
    stats = measure(a, b, None, "real", chunk=chunk)
    assert (stats.first, stats.worst) == (2, 2)


@pytest.mark.parametrize("chunk", SMALL_CHUNKS)
def test_measure_compares_strings_in_every_chunk(chunk: int) -> None:
    b = np.array(list("abcdefg"), object)
    a = b.copy()
    a[1] = a[6] = "x"
    stats = measure(a, b, None, "string", chunk=chunk)
    assert (stats.mismatches, stats.first) == (2, 1)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "apart"),
    [
        ("float32", 1.0, np.nextafter(np.float32(1), np.float32(2)), 1),
        ("float32", 0.0, -0.0, 0),
        ("float32", 1e-45, -1e-45, 2),
        ("float32", np.finfo(np.float32).max, -np.finfo(np.float32).max, 2 * 0x7F7FFFFF),
        ("float64", np.finfo(np.float64).max, -np.finfo(np.float64).max, 2 * 0x7FEFFFFFFFFFFFFF),
        ("float64", 5e-324, -5e-324, 2),
        ("float16", 65504, -65504, 2 * 0x7BFF),
        ("bfloat16", 1.0, 1.0078125, 1),
    ],
)
def test_max_ulp_counts_representable_values_without_overflow(dtype: str, a: float, b: float, apart: int) -> None:
    one, other = (np.array([1, value]).astype(parse_dtype(dtype)) for value in (a, b))
    for first, second in ((one, other), (other, one)):
        assert compare_output("y", first, second).max_ulp == apart


def test_max_ulp_covers_pairs_with_and_without_sign_change() -> None:
    near, far = np.float32(1), np.float32(1e6)
    for a, b in (((near, 1e-45), (far, -1e-45)), ((near, -1e-3), (np.nextafter(near, far), 1e-3))):
        pairs = list(zip(f32(*a), f32(*b), strict=True))
        assert compare_output("y", f32(*a), f32(*b)).max_ulp == max(_naive_ulp(x, y) for x, y in pairs)


def test_cosine_stays_within_unit_range() -> None:
    rng = np.random.default_rng(3)
    for scale in (1e-3, 0.1, 3.0, 7e4):
        b = (rng.standard_normal(10_001) * scale).astype(np.float32)
        found = compare_output("y", np.nextafter(b, np.float32(1e30)), b)
        assert 0.999999 < found.cosine <= 1.0
    assert compare_output("y", f32(-1, -2), f32(1, 2)).cosine == pytest.approx(-1.0)
    assert compare_output("y", f32(1, 0), f32(0, 1)).cosine == 0.0
    assert compare_output("y", f32(1, 2), f32(2, 4)).cosine == pytest.approx(1.0)
    for value in (5, 6, 8, 14):  # the quotient of these exact sums rounds to 1.0000000000000002
        assert compare_output("y", f32(2, 2 * value), f32(1, value)).cosine == 1.0
        assert compare_output("y", f32(-2, -2 * value), f32(1, value)).cosine == -1.0


def test_statistics_retain_small_values_of_large_reference() -> None:
    a, b = np.array([1e-12, 2e-12]), np.array([1e6, 3e6])
    found = compare_output("y", a, b)
    assert found.cosine == pytest.approx(7 / math.sqrt(50), rel=1e-12) and found.reason.startswith("2 of 2")


@wide_long_double
@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e170, 1e300])
def test_statistics_cover_squares_beyond_float64_range(scale: float) -> None:
    a, b = np.array([1.0, 2.0, 3.5]) * scale, np.array([1.0, 2.0, 3.0]) * scale
    stats = measure(a, b, None, "real")
    assert_same(stats, naive(a, b, None, "real"))
    assert stats.mismatches == 1 and not stats.zeroed


def test_compare_fails_infinite_difference_beyond_float64() -> None:
    found = compare_output("y", np.array([1.0, 1.7e308]), np.array([1.0, -1.7e308]))
    assert (found.passed, found.mismatches, found.max_abs, found.worst_index) == (False, 1, math.inf, (1,))


def test_max_rel_skips_zero_references() -> None:
    found = compare_output("y", f32(1, 1.5, 0), f32(0, 1, 0))
    assert (found.max_abs, found.max_rel, found.mismatches) == (1.0, 0.5, 2)
    assert compare_output("y", f32(1, 1), f32(0, 0)).max_rel is None


def test_default_chunk_stays_below_a_mebibyte() -> None:
    assert compare_values.CHUNK * 8 <= 2**20


# --- masks and saturated values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", MASKS)
def test_masks_do_not_hide_errors_of_visible_values(dtype: str) -> None:
    mask = -2 * MASKS[dtype]
    reference = np.array([mask, 1, mask, 2, -2]).astype(parse_dtype(dtype))
    actual = np.array([mask, 2, mask, 1, -2]).astype(parse_dtype(dtype))
    found = compare_output("y", actual, reference)
    assert (found.passed, found.mismatches, found.masked, found.max_abs) == (False, 2, 2, 1.0)
    assert found.sqnr_db == pytest.approx(10 * math.log10(9 / 2))
    assert found.cosine == pytest.approx(8 / 9)
    assert found.rmse == pytest.approx(math.sqrt(2 / 3))
    assert found.reason.endswith("SQNR, cosine and RMSE exclude 2 masked values")


@pytest.mark.parametrize(
    ("actual", "reference"), [(1.0, -3e38), (-3e38, 1.0), (3e38, -3e38), (-1.5e38, -3e38), (-3e38, -1.5e38)]
)
def test_mask_in_single_tensor_fails(actual: float, reference: float) -> None:
    found = compare_output("y", f32(actual, 1, 2, 3e38), f32(reference, 1, 2, 3e38))
    assert (found.passed, found.masked, found.mismatches) == (False, 1, 1)
    assert found.sqnr_db < 7
    assert find_excess_difference(Verdict(Outcome.FAIL, "plain", (found,)), 20.0)


def test_masks_compare_element_by_element() -> None:
    found = compare_output("y", f32(-3e38, 1, 2), f32(-3.1e38, 1, 2))
    assert (found.passed, found.masked, found.worst_index) == (False, 1, (0,))
    assert found.sqnr_db == math.inf and "exclude 1 masked value" in found.reason
    alone = compare_output("y", f32(-3e38), f32(-3.1e38))
    assert alone.sqnr_db is alone.cosine is alone.rmse is None and alone.max_abs == pytest.approx(1e37, rel=1e-6)
    assert find_excess_difference(Verdict(Outcome.FAIL, "plain", (alone,)), 20.0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int8", "int32", "int64"])
def test_largest_values_of_narrow_dtypes_are_not_masks(dtype: str) -> None:
    info = ml_dtypes.iinfo if dtype.startswith("int") else ml_dtypes.finfo
    largest = float(int(info(parse_dtype(dtype)).max)) // 2 + 1
    reference = np.array([largest, 1, 2]).astype(parse_dtype(dtype))
    found = compare_output("y", np.array([largest, 1, 0]).astype(parse_dtype(dtype)), reference)
    assert (found.masked, found.mismatches) == (0, 1)
    assert found.rmse == pytest.approx(2 / math.sqrt(3))


@pytest.mark.parametrize("chunk", SMALL_CHUNKS)
def test_masks_found_in_any_chunk(chunk: int) -> None:
    b = f32(-3e38, 1, 2, 3, -3e38, -3e38, 4, 5, -3e38)
    a = f32(-3e38, 1, 2, 3, -3e38, -3e38, 4, 6, -3e38)
    assert_same(measure(a, b, None, "real", chunk=chunk), naive(a, b, None, "real"))


# --- whole runs ------------------------------------------------------------------------------------------------------


def result(source: str = "ref", **outputs: Any) -> RunResult:
    return RunResult(source, outputs)


def test_compare_pairs_outputs_by_name_in_any_order() -> None:
    verdict = compare(result(a=f32(1), b=f32(2)), result(b=f32(2), a=f32(1)))
    assert verdict and verdict.outcome is Outcome.PASS and verdict.reason == "" and verdict.against == "ref"
    assert [output.name for output in verdict.outputs] == ["a", "b"]


def test_compare_pairs_outputs_by_position_if_names_differ() -> None:
    verdict = compare(result(output0=f32(1), output1=f32(2)), result(b=f32(1), a=f32(2)))
    assert verdict and [output.name for output in verdict.outputs] == ["b", "a"]
    assert not compare(result(output0=f32(1), output1=f32(2)), result(b=f32(2), a=f32(1)))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_compare_fails_run_with_failing_output(wrong: int) -> None:
    values = [f32(1), f32(2), f32(3)]
    reference = result(**{f"o{place}": value for place, value in enumerate(values)})
    values[wrong] = f32(9)
    verdict = compare(result(**{f"o{place}": value for place, value in enumerate(values)}), reference)
    assert verdict.outcome is Outcome.FAIL and len(verdict.outputs) == 3
    assert verdict.reason.startswith(f"output o{wrong}: 1 of 1 value")


def test_compare_counts_failing_outputs() -> None:
    verdict = compare(result(a=f32(1), b=f32(2), c=f32(3)), result(a=f32(9), b=f32(9), c=f32(9)))
    assert verdict.reason.startswith("output a:") and verdict.reason.endswith("(and 2 more outputs)")


def test_compare_fails_missing_or_extra_output() -> None:
    two, one = result(a=f32(1), b=f32(2)), result(a=f32(1))
    assert compare(one, two).reason == "1 output, the reference has 2"
    assert compare(two, one).reason == "2 outputs, the reference has 1"
    assert not compare(one, two) and not compare(two, one)


def test_compare_fails_run_without_outputs() -> None:
    verdict = compare(result(), result())
    assert verdict.outcome is Outcome.FAIL and "no output" in verdict.reason


def test_compare_reports_pass_of_only_empty_outputs() -> None:
    empty = np.zeros((0, 3), np.float32)
    verdict = compare(result(a=empty, b=empty), result(a=empty, b=empty))
    assert verdict and verdict.reason == "0 elements compared: every output is empty"
    assert judge([verdict], []) == (Outcome.PASS, verdict.reason)
    assert judge([verdict, verdict], [verdict]) == (Outcome.PASS, verdict.reason)
    assert compare(result(a=empty, b=f32(1)), result(a=empty, b=f32(1))).reason == ""
    assert not compare(result(a=empty), result(a=np.zeros((0, 4), np.float32)))
    assert not compare(result(a=empty), result(a=np.zeros((0, 3), np.float64)))


def test_compare_applies_tolerance_to_every_output() -> None:
    mine, theirs = result(a=f32(1.2, 5), b=np.array([3, 50])), result(a=f32(1, 5), b=np.array([4, 50]))
    assert not compare(mine, theirs)
    assert compare(mine, theirs, atol=1)
    assert compare(mine, theirs, rtol=0.3)
    assert not compare(mine, theirs, rtol=0.1)


# --- several references ----------------------------------------------------------------------------------------------

ONE, OTHER, THIRD = "onnxruntime 1.31", "iree-llvm-cpu 3.13", "onnx-reference 1.23"


def judged(board: float, *references: float) -> tuple[Outcome, str]:
    sources = (ONE, OTHER, THIRD)
    oracles = [result(source, y=f32(value)) for source, value in zip(sources, references, strict=False)]
    verdicts = [compare(result("board", y=f32(board)), oracle) for oracle in oracles]
    return judge(verdicts, [compare(oracle, oracles[0]) for oracle in oracles[1:]])


def test_judge_follows_single_reference() -> None:
    assert judged(1, 1) == (Outcome.PASS, "")
    outcome, reason = judged(2, 1)
    assert outcome is Outcome.FAIL and reason.startswith("output y: 1 of 1 value")


def test_judge_requires_agreement_with_all_references() -> None:
    assert judged(1, 1, 1, 1) == (Outcome.PASS, "")
    outcome, reason = judged(2, 1, 1)
    assert outcome is Outcome.FAIL and reason.startswith(f"differs from {ONE}: output y")
    assert "disagree" not in reason


def test_judge_fails_board_unlike_either_agreeing_reference() -> None:
    fail, passed = (
        Verdict(outcome, source, (), "why") for outcome, source in ((Outcome.FAIL, ONE), (Outcome.PASS, OTHER))
    )
    assert judge([fail, passed], [passed]) == (Outcome.FAIL, f"differs from {ONE}: why; the board agrees with {OTHER}")
    assert judge([passed, fail], [passed])[0] is Outcome.FAIL


@pytest.mark.parametrize(("board", "friend"), [(1, ONE), (2, OTHER)])
def test_judge_passes_board_if_references_disagree(board: float, friend: str) -> None:
    outcome, reason = judged(board, 1, 2)
    assert outcome is Outcome.PASS
    assert reason == f"the references disagree: {ONE} vs {OTHER} on output y; the board agrees with {friend}"


def test_judge_fails_board_unlike_all_references() -> None:
    outcome, reason = judged(3, 1, 2)
    assert outcome is Outcome.FAIL
    assert reason.startswith(f"differs from {ONE}: output y")
    assert f"the references disagree: {ONE} vs {OTHER} on output y; the board agrees with no reference" in reason


def test_judge_lists_disagreeing_reference_among_three() -> None:
    outcome, reason = judged(1, 1, 1, 2)
    assert outcome is Outcome.PASS
    assert f"{ONE} vs {THIRD} on output y" in reason and f"the board agrees with {ONE}, {OTHER}" in reason
    assert f"{ONE} vs {OTHER}" not in reason


def test_judge_notes_disagreement_of_agreeing_references() -> None:
    passed = [Verdict(Outcome.PASS, source, ()) for source in (ONE, OTHER)]
    outcome, reason = judge(passed, [Verdict(Outcome.FAIL, ONE, (), "2 outputs, the reference has 1")])
    assert outcome is Outcome.PASS and reason.startswith("the references disagree") and "all references" in reason


def test_judge_rejects_mismatched_verdict_counts() -> None:
    passed = Verdict(Outcome.PASS, ONE, ())
    for verdicts, between in (([], []), ([passed], [passed]), ([passed, passed], [])):
        with pytest.raises(ValueError, match="between references"):
            judge(verdicts, between)


# --- comparison with the model before quantization -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "asked", "far"),
    [
        (f32(1.1, 2), None, False),
        (f32(1.1, 2), 26.0, False),  # 10 * log10(5 / 0.01) is 26.99 dB
        (f32(1.1, 2), 28.0, True),
        (f32(1, 2), 500.0, False),  # equal
        (f32(0, 0), 1.0, True),
        (f32(-1, -2), -10.0, False),
        (f32(math.nan, math.nan), 20.0, True),
        (f32(1, 2, 3), 20.0, True),
        (np.array([1, 2], np.float64), 20.0, False),  # another dtype, but close
        (f32(math.nan, 2), 20.0, True),
        (f32(1, math.inf), -100.0, True),
    ],
)
def test_output_too_far_below_minimum_sqnr(actual: Any, asked: float | None, far: bool) -> None:
    verdict = compare(result("board", near=f32(1), y=actual), result(ONE, near=f32(1), y=f32(1, 2)))
    reason = find_excess_difference(verdict, asked)
    assert bool(reason) is far and (not far or f"({ONE})" in reason)


def test_too_far_reports_output_count_mismatch() -> None:
    verdict = compare(result("board", y=f32(1)), result(ONE, y=f32(1), z=f32(1)))
    assert (
        find_excess_difference(verdict, 20.0) == "1 output, the reference has 2"
        and find_excess_difference(verdict, None) == ""
    )
