"""Default tolerances follow the scale and noise of the reference; unjudgeable outputs are BLIND, never PASS."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hil.compare.comparison import OutputComparison
from hil.compare.tolerance import DEFAULT_TOLERANCES, fit_tolerance, scale_of
from hil.compare.verdict import compare, compare_output, depends_on_noise, judge
from hil.core.results import NOISE_DTYPE, Outcome, RunResult
from hil.core.tensors import Array, parse_dtype
from hil.errors import VacuousTolerance

SCALES = st.floats(-12, 12).map(lambda power: 10.0**power)


def of(actual: Any, reference: Any, **how: Any) -> OutputComparison:
    return compare_output("y", np.asarray(actual, np.float32), np.asarray(reference, np.float32), **how)


def noise_of(size: Any, shape: Any = ()) -> Array:
    """Return noise of the given size, rounded down to a power of two."""
    sizes = np.exp2(np.floor(np.log2(np.broadcast_to(np.asarray(size, np.float64), shape or np.shape(size)))))
    return sizes.astype(parse_dtype(NOISE_DTYPE))


def atol_of(reference: Array) -> float:
    tolerance, _ = fit_tolerance((str(reference.dtype),) * 2, reference, None, None)
    assert tolerance is not None
    return tolerance.atol


# --- the default atol ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_default_atol_scales_with_reference_rms(dtype: str) -> None:
    plain = DEFAULT_TOLERANCES[dtype].atol
    values = np.array([3, -4, 0, 0], dtype)
    for scale in (1e-12, 1e-6, 1e-2):
        found = atol_of(values * scale)
        assert found == pytest.approx(plain * scale * math.sqrt(12.5)), "zeros do not make a tensor smaller"
    assert atol_of(values) == atol_of(values * 1e12) == plain, "it is never wider than the table says"


def test_mask_does_not_scale_default_atol() -> None:
    values = np.array([1e-8, -1e-8, -3.4e38, np.inf, np.nan], np.float32)
    assert scale_of(values).largest == np.float32(1e-8)
    assert atol_of(values) == pytest.approx(1e-13)
    assert scale_of(values[2:]).largest == scale_of(np.zeros(0, np.float32)).spread == 0


def test_default_atol_covers_a_step_of_dtype() -> None:
    assert atol_of(np.full(3, 6e-8, np.float16)) == 2.0**-24
    assert atol_of(np.array([2.0**-9, 448]).astype(parse_dtype("float8_e4m3fn"))) == 2.0**-9


def test_zero_reference_uses_fixed_default_atol() -> None:
    assert atol_of(np.zeros(3, np.float32)) == 1e-5
    found = of([0, 1e-9], [0, 0])
    assert (found.passed, found.blind) == (False, True) and "SQNR -inf dB" in found.reason
    assert of([0, 1e-9], [0, 0], atol=1e-8).passed, "the user said how far from zero it may be"
    assert of([0, 1e-3], [0, 0]).blind is False, "that is wrong whatever nobody can judge"


def test_noise_widens_only_default_atol() -> None:
    values = np.array([1, -1e-7, 2], np.float32)
    noise = noise_of([1e-3] * 3)
    near = values + np.float32(9e-4)
    assert of(near, values, noise=noise).passed and not of(near, values).passed
    found = of(near, values, noise=noise)
    assert found.noise == 2.0**-10 and found.tolerance is not None
    assert found.tolerance.atol == pytest.approx(2.0**-10 + 1e-5)
    assert not of(near, values, noise=noise, atol=1e-5).passed


def test_noise_widens_tolerance_per_element() -> None:
    values = np.linspace(1, 2, 64, dtype=np.float32)
    noise = noise_of([1e-9] * 63 + [1e-3])
    moved = values.copy()
    moved[63] += 9e-4
    assert of(moved, values, noise=noise).passed
    moved[7] += 9e-4
    found = of(moved, values, noise=noise)
    assert not found.passed and not found.blind and found.mismatches == 1 and found.first_index == (7,)


def test_noise_above_ceiling_widens_only_jumping_elements() -> None:
    values = np.linspace(1, 2, 64, dtype=np.float32)
    jumping = noise_of([1e-9] * 60 + [1.0] * 4)
    moved = values.copy()
    moved[60:] += 1
    found = of(moved, values, noise=jumping)
    assert found.passed and found.unsteady == 4
    assert found.notes == (
        "rounding changes 4 of 64 values by more than 0.0012 times their scale "
        "(hil accepts a difference of this size for each), "
        "at [60], [61], [62], [63]",
    )
    assert not of(values + np.float32(2), values, noise=jumping).blind
    moved[60] += 1
    found = of(moved, values, noise=jumping)
    assert not found.passed and not found.blind and found.mismatches == 1 and "4 of 64 values" in found.reason


def test_ceiling_follows_half_values_of_float32_output() -> None:
    """Values that float16 represents were computed in float16: a difference of 1 % may be rounding."""
    values = np.linspace(1, 2, 64, dtype=np.float32)
    half = values.astype(np.float16).astype(np.float32)
    noise = noise_of([2e-2] * 64)
    for reference, passes in ((half, True), (values, False), (np.round(values * 4) / 4, False)):
        assert of(reference + np.float32(1e-2), reference, noise=noise).passed is passes


def test_too_many_jumping_elements_report_blind() -> None:
    values = np.linspace(1, 2, 64, dtype=np.float32)
    noise = noise_of([1e-9] * 32 + [0.5] * 32)
    moved = values.copy()
    moved[32:] += np.float32(0.4)
    found = of(moved, values, noise=noise)
    assert (found.passed, found.blind) == (False, True)
    assert found.reason.startswith("32 of 64 values out of tolerance, but within the rounding noise of the reference")
    moved[32:] = values[32:] + np.float32(1e-3)
    found = of(moved, values, noise=noise)
    assert found.passed and "too many to widen the tolerance" in found.notes[0]
    moved[0] += np.float32(0.4)
    assert not of(moved, values, noise=noise).blind


# --- outputs that cannot be judged ------------------------------------------------------------------------------------


def test_output_within_reference_noise_reports_blind() -> None:
    reference = np.array([3e-10, -1e-10], np.float32)
    noise = noise_of([2e-9, 2e-9])
    found = of(-reference, reference, noise=noise)
    assert (found.passed, found.blind) == (False, True)
    assert "the rounding noise of the reference (1.9e-09)" in found.reason
    assert of(reference, reference, noise=noise).passed, "what is equal bit by bit needs no judge"
    assert of([1, 1], reference, noise=noise).blind is False


def test_noise_leaves_agreeing_output_unchanged() -> None:
    """A run does not measure noise for agreeing outputs; a bundle and a study do. All results are equal."""
    reference = np.array([3e-10, -1e-10], np.float32)
    right = reference * np.float32(1 + 1e-6)
    noise = noise_of([2e-9, 2e-9])
    assert of(right, reference).passed and of(right, reference, noise=noise) == of(right, reference)


def test_zeros_within_reference_noise_report_blind() -> None:
    """A cancelling sum may be exactly 0 in another order."""
    reference = np.array([3e-8, -1e-8], np.float32)
    large = noise_of([2e-7, 2e-7])
    found = of([0, 0], reference, noise=large)
    assert (found.passed, found.blind) == (False, True) and "noise of the reference (1.2e-07)" in found.reason
    assert of([0, 0], reference, noise=large, allow_blind=["y"]).passed
    for noise in (None, noise_of([1e-9, 1e-9])):
        wrong = of([0, 0], reference, noise=noise)
        assert (wrong.passed, wrong.blind) == (False, False) and wrong.reason.startswith("every value is 0"), noise
    given = of([0, 0], reference, noise=large, atol=1e-7, allow_blind=["y"])
    assert not given.passed, "a tolerance that is given is used as it is"


def test_default_tolerance_separates_right_from_wrong() -> None:
    reference = np.array([1, -1, 0.5], np.float32)
    for size, judged in ((0.4, False), (0.01, False), (1e-3, True)):
        found = of(reference + np.float32(size / 4), reference, noise=noise_of([size] * 3))
        assert (found.passed, found.blind) == (judged, not judged), size


def test_values_of_few_dtype_steps_report_blind() -> None:
    reference = np.array([2, -2, 1], np.float16) * np.float16(2.0**-24)
    near = np.array([3, -2, 1], np.float16) * np.float16(2.0**-24)
    found = compare_output("y", near, reference)
    assert found.blind and "right and wrong answers cannot be distinguished" in found.reason


def test_allow_blind_permits_blind_but_not_wrong_output() -> None:
    reference = np.array([3e-10, -1e-10], np.float32)
    noise = noise_of([2e-9, 2e-9])
    found = of(-reference, reference, noise=noise, allow_blind=["x", "y*"])
    assert (found.passed, found.blind) == (True, True) and found.reason
    assert not of(-reference, reference, noise=noise, allow_blind=["x"]).passed
    assert not of([1, 1], reference, noise=noise, allow_blind=["y"]).passed
    with pytest.raises(VacuousTolerance, match="output y"):
        of(-reference, reference, atol=1e-6)
    assert of(-reference, reference, atol=1e-6, allow_blind=["y"]).passed


def test_nearly_constant_values_use_only_noise_tolerance() -> None:
    """For example, the logits of a network with random weights are the bias and a little more."""
    reference = np.array([1, 1 + 2e-6, 1 - 2e-6, 1 + 4e-6], np.float32)
    right = (reference * np.float32(1 + 2e-7)).astype(np.float32)
    found = of(right, reference)
    assert (found.passed, found.blind) == (False, True) and "in any order" in found.reason
    noise = noise_of([1e-7] * 4)
    found = of(right, reference, noise=noise)
    assert found.passed and found.tolerance is not None and found.tolerance.atol < 1e-6
    assert not of(reference[::-1], reference, noise=noise).passed
    assert of(np.float32([1, 1.0000001, 1]), np.float32([1, 1, 1.0000001])).passed, "one constant, rounded twice"


def test_all_nan_output_reports_blind() -> None:
    nan = [math.nan] * 3
    assert of(nan, nan).blind and not of(nan, nan).passed and of(nan, nan, allow_blind=["y"]).passed
    assert of([*nan, 0], [*nan, 0]).passed and of([math.inf] * 3, [math.inf] * 3).passed
    assert compare_output("y", np.array(nan, np.float16), np.array(nan, np.float16)).blind


def test_rounding_of_single_element_does_not_excuse_rest() -> None:
    rng = np.random.default_rng(0)
    reference = np.round(rng.standard_normal(4096) * 40).astype(np.float32)
    sizes = np.full(4096, 1e-9)
    sizes[7] = 1
    flipped = reference.copy()
    flipped[7] += 1
    assert of(flipped, reference, noise=noise_of(sizes)).passed
    found = of(reference + rng.choice([-1, 1], 4096), reference, noise=noise_of(sizes))
    assert (found.passed, found.blind, found.mismatches) == (False, False, 4095)


def test_reordered_narrow_floats_fail() -> None:
    for dtype in ("float8_e5m2", "float8_e4m3fn", "float4_e2m1fn"):
        reference = np.array([0.5, 1, 0.5, 1, 1, 0.5]).astype(parse_dtype(dtype))
        assert not compare_output("y", reference[::-1], reference).passed
        assert compare_output("y", reference, reference).passed


def test_zero_reference_within_noise_reports_blind() -> None:
    assert of([1e-5, -1e-5], [0, 0], noise=noise_of([2e-5, 2e-5])).blind


def test_error_above_signal_never_passes() -> None:
    reference = np.array([10, *[0.1] * 2000], np.float32)
    wrong = np.array([10, *[-0.35] * 2000], np.float32)
    found = of(wrong, reference, rtol=0, atol=0.5)
    assert (found.passed, found.blind) == (False, True) and "the error exceeds the signal" in found.reason
    assert of(wrong, reference, rtol=0, atol=0.5, allow_blind=["y"]).passed


@given(
    hnp.arrays(np.float64, st.integers(2, 30), elements=st.floats(-1, 1, width=32)),
    SCALES,
    st.one_of(st.none(), st.floats(-9, 1).map(lambda power: 10.0**power)),
    st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    st.randoms(use_true_random=False),
)
@example(np.ones(2), 10.0**4.75, None, "float16", Random(0))  # doubled, this value overflows
def test_mutated_outputs_never_pass(
    values: Array, scale: float, relative_noise: float | None, dtype: str, random: Random
) -> None:
    with np.errstate(over="ignore"):
        reference = (values * scale).astype(parse_dtype(dtype))
    wide = reference.astype(np.float64)
    assume(np.isfinite(wide).all() and wide.any())
    noise = None
    if relative_noise is not None:
        size = relative_noise * float(np.abs(wide).max())
        noise = noise_of(size, wide.shape)
    order = list(range(len(values)))
    random.shuffle(order)
    with np.errstate(over="ignore"):
        wrong = {"negated": -reference, "doubled": reference + reference, "zeroed": 0 * reference}
    eps = float(np.abs(wide).max()) * 2 * DEFAULT_TOLERANCES[dtype].rtol
    if np.abs(wide[order] - wide).max() > (eps if noise is None else max(eps, 4 * float(noise.max()))) * 4:
        wrong["permuted"] = reference[order]
    for what, answer in wrong.items():
        with np.errstate(over="ignore"):
            found = compare_output("y", answer.astype(reference.dtype), reference, noise=noise)
        assert not found.passed or answer.tobytes() == reference.tobytes(), what
    assert compare_output("y", reference, reference, noise=noise).passed


# --- verdicts --------------------------------------------------------------------------------------------------------


def result(source: str = "board", noise: float | None = None, **outputs: Any) -> RunResult:
    arrays = {name: np.asarray(value, np.float32) for name, value in outputs.items()}
    measured = {} if noise is None else {name: noise_of(noise, array.shape) for name, array in arrays.items()}
    return RunResult(source, arrays, noise=measured)


def test_verdict_ranks_wrong_above_blind() -> None:
    reference = result("oracle", 1e-8, a=[1, 2], b=[1e-9, 2e-9])
    blind = compare(result(a=[1, 2], b=[2e-9, 1e-9]), reference)
    assert (blind.outcome, bool(blind)) == (Outcome.BLIND, False) and blind.reason.startswith("output b: ")
    wrong = compare(result(a=[1, 3], b=[2e-9, 1e-9]), reference)
    assert wrong.outcome is Outcome.FAIL and wrong.reason.startswith("output a: ") and "more output" not in wrong.reason
    allowed = compare(result(a=[1, 2], b=[2e-9, 1e-9]), reference, allow_blind=["b"])
    assert allowed and allowed.reason.startswith("output b is not judged, as allowed by --allow-blind")
    assert Outcome.BLIND.exit_code == 1


def test_depends_on_noise_only_if_verdict_may_change() -> None:
    reference = result(y=[1, 2], z=[1, 2])
    assert depends_on_noise(compare(result(y=[1, 2.1], z=[1, 2]), reference))
    assert not depends_on_noise(compare(result(y=[1, 2], z=[1, 2]), reference))
    assert not depends_on_noise(compare(result(y=[1, math.nan], z=[1, 2]), reference))
    assert not depends_on_noise(compare(result(y=[1, 2, 3], z=[1, 2]), reference))
    measured = result(noise=1e-30, y=[1, 2], z=[1, 2])
    assert not depends_on_noise(compare(result(y=[1, 2.1], z=[1, 2]), measured))


def test_judge_ignores_blind_reference_if_others_judge() -> None:
    board = result(y=[2e-9, 1e-9])
    blind = compare(board, result("noisy", 1e-8, y=[1e-9, 2e-9]))
    right = compare(board, result("exact", y=[2e-9, 1.0000001e-9]))
    wrong = compare(board, result("other", y=[1, 2]))
    agree = compare(result(y=[1]), result(y=[1]))
    assert judge([blind], [])[0] is Outcome.BLIND
    assert judge([blind, right], [agree]) == judge([right, blind], [agree]) == (Outcome.PASS, "")
    assert judge([blind, wrong], [agree])[0] is Outcome.FAIL
    assert judge([blind, blind], [blind])[0] is Outcome.BLIND
