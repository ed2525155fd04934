"""Outputs judged by criteria: pass, fail and blind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hil.compare.comparison import OutputComparison
from hil.compare.criteria import parse_accept
from hil.compare.verdict import compare, compare_output, depends_on_noise
from hil.core.results import Outcome, RunResult
from hil.errors import CriterionFailed, UsageError, VacuousTolerance

REFERENCE = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
NEAR = REFERENCE + np.float32(1e-3)


def judge(text: str, actual: Any, reference: Any, function: Callable[..., Any] | None = None, **more: Any) -> Any:
    rules = parse_accept([text], function and (lambda file, name: function))
    return compare_output("y", np.asarray(actual), np.asarray(reference), accept=rules, **more)


def outcome(found: OutputComparison) -> str:
    return "PASS" if found.passed else "BLIND" if found.blind else "FAIL"


def test_criteria_replace_tolerance() -> None:
    assert not compare_output("y", NEAR, REFERENCE).passed
    found = judge("top1>=0.99, max_abs<=0.01", NEAR, REFERENCE)
    assert found.passed and [one.passed for one in found.criteria] == [True, True]
    assert found.record()["criteria"][0] == {
        "criterion": "top1>=0.99",
        "value": 1.0,
        "bound": 0.99,
        "passed": True,
        "reason": "",
    }
    other = judge("z: top1>=0.99", NEAR, REFERENCE)
    assert not other.passed and other.criteria == ()


def test_failed_criterion_reports_value_and_bound() -> None:
    found = judge("top1>=0.5, max_abs<=1e-4", NEAR, REFERENCE)
    assert outcome(found) == "FAIL" and found.reason.startswith("max_abs<=0.0001 is not met: the value is 0.0010")
    verdict = compare(
        RunResult("", {"y": NEAR}), RunResult("r", {"y": REFERENCE}), accept=parse_accept(["max_abs<=1e-4"])
    )
    assert verdict.outcome is Outcome.FAIL and not depends_on_noise(verdict)


@pytest.mark.parametrize(
    "text",
    ["max_abs<=100", "kl<=1000", "max_rel<=1e9", "rmse<=50", "sqnr>=-90", "psnr>=-90", "top1>=0.01", "top9>=0.5"],
)
def test_weak_criterion_reports_blind(text: str) -> None:
    assert outcome(judge(text, REFERENCE, REFERENCE)) == "BLIND"
    assert outcome(judge(text, REFERENCE, REFERENCE, allow_blind=["y"])) == "PASS"


SCORED = ((np.abs(REFERENCE[:, :5]) + 0.5) * [500, 500, 500, 500, 1e-6]).astype(np.float32)


@pytest.mark.parametrize("text", ["sqnr>=60", "cosine>=0.999, max_abs<=1", "mismatch_share<=0.2"])
def test_small_column_note_lists_columns_accepting_zeros(text: str) -> None:
    note = f"{text} would accept zeros in "
    assert judge(text, SCORED, SCORED).notes == (f"{note}column 4",)
    channels = SCORED.T[None].copy()
    assert judge(text, channels, channels).notes == (f"{note}row 4 of the second axis",)
    two = np.concatenate([SCORED, SCORED[:, 4:] * 2], axis=1)
    assert judge(text.replace("0.2", "0.4"), two, two).notes[0].endswith("zeros in columns 4, 5")


@pytest.mark.parametrize("text", ["max_rel<=0.1", "sqnr>=60, max_rel<=0.1", "sqnr>=60, top1>=0.9"])
def test_small_column_note_absent_if_criteria_judge_column(text: str) -> None:
    assert judge(text, SCORED, SCORED).notes == ()


def test_small_column_note_needs_nonzero_values() -> None:
    zeros = SCORED * np.array([1, 1, 1, 1, 0], np.float32)
    assert judge("sqnr>=60", zeros, zeros).notes == ()


def test_small_column_note_applies_to_large_output() -> None:
    large = np.tile(SCORED, (1100, 1))
    assert judge("sqnr>=60", large, large).notes == ("sqnr>=60 would accept zeros in column 4",)
    assert judge("sqnr>=60, max_rel<=0.1", large, large).notes == ()


def test_cosine_of_positive_values_reports_blind_to_order() -> None:
    pixels = 100 + REFERENCE
    found = judge("cosine>=0.9, rmse<=50", pixels, pixels)
    assert outcome(found) == "BLIND" and "in any order" in found.reason
    assert outcome(judge("cosine>=0.9, rmse<=0.5", REFERENCE, REFERENCE)) == "PASS"


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4", "uint64", "float8_e4m3fn", "complex64"])
def test_criteria_report_blind_if_scaled_reference_passes(dtype: str) -> None:
    from hil.core.tensors import parse_dtype

    values = (REFERENCE * 3).astype(np.int8).astype(parse_dtype(dtype))
    for reference in (values, values * values.dtype.type(4000) if dtype == "float16" else values):
        found = judge("cosine>=0.9, max_rel<=1.5", reference, reference)
        assert outcome(found) == "BLIND" and "would accept the reference at a different scale" in found.reason
    assert outcome(judge("cosine>=0.9, rmse<=0.5", values, values)) == "PASS"


def test_cosine_adds_note_about_unjudged_scale() -> None:
    found = judge("cosine>=0.9", NEAR, REFERENCE)
    assert outcome(found) == "PASS" and found.notes == (
        "cosine>=0.9 ignores the scale: twice the reference would pass",
    )
    assert judge("cosine>=0.9, rmse<=0.5", NEAR, REFERENCE).notes == ()
    assert judge("cosine>=0.9", -REFERENCE, REFERENCE).notes == ()


def test_class_criteria_and_functions_may_ignore_scale() -> None:
    for text in ("top1>=0.9", "argmax", "kl<=1e-3", "top1>=0.9, cosine>=0.9"):
        assert outcome(judge(text, 40 * REFERENCE, 40 * REFERENCE)) == "PASS", text
    classes = judge("python:f.py:f", NEAR, REFERENCE, lambda a, b: bool((a.argmax(1) == b.argmax(1)).mean() > 0.9))
    assert outcome(classes) == "PASS"


def test_strict_criterion_covers_weak_criterion() -> None:
    assert outcome(judge("kl<=1000, max_abs<=0.01", NEAR, REFERENCE)) == "PASS"


@given(st.sampled_from(["top1>=0.9", "max_abs<=0.5", "cosine>=0.9", "kl<=0.1", "sqnr>=10", "set(atol=0.5)"]), st.data())
@settings(deadline=None, max_examples=40)
def test_criteria_never_pass_wrong_outputs(text: str, data: st.DataObject) -> None:
    """Negate, zero or shuffle a reference: the outcome is never PASS."""
    seed, wrong = data.draw(st.integers(0, 999)), data.draw(st.sampled_from(["negated", "zeros", "shuffled"]))
    random = np.random.default_rng(seed)
    reference = random.normal(size=(20, 12)).astype(np.float32)
    answers = {"negated": -reference, "zeros": 0 * reference, "shuffled": random.permutation(reference.ravel())}
    assert not judge(text, answers[wrong].reshape(reference.shape), reference).passed


def test_criteria_on_constant_reference_fail_or_report_blind() -> None:
    constant = np.full((4, 10), 3, np.float32)
    assert outcome(judge("argmax", constant, constant)) == "BLIND"
    assert outcome(judge("max_abs<=0.1", 0 * constant, constant)) == "FAIL"
    assert outcome(judge("max_abs<=0.1", constant, constant)) == "PASS"


def test_criteria_fail_on_shape_or_dtype_mismatch() -> None:
    assert "shape" in judge("top1>=0.9", REFERENCE[:3], REFERENCE).reason
    assert "dtype" in judge("top1>=0.9", REFERENCE.astype(np.float64), REFERENCE).reason


def test_criteria_require_matching_nan_unless_order_free() -> None:
    broken = NEAR.copy()
    broken[3, 3] = np.nan
    found = judge("top1>=0.9", broken, REFERENCE)
    assert outcome(found) == "FAIL" and "NaN" in found.reason
    assert outcome(judge("top1>=0.9", broken, broken)) == "PASS"
    assert outcome(judge("set>=0.9", broken[::-1], broken)) == "PASS"
    assert outcome(judge("python:f.py:f", broken, REFERENCE, lambda a, b: bool((a[0] == NEAR[0]).all()))) != "FAIL"


def test_set_ignores_order_of_single_values() -> None:
    labels = np.arange(20, dtype=np.int64)
    assert outcome(judge("set", labels[::-1].copy(), labels)) == "PASS"
    assert outcome(judge("set", labels + 1, labels)) == "FAIL"


def test_lsb_judges_quantized_outputs() -> None:
    reference = np.arange(-50, 50, dtype=np.int8)
    assert outcome(judge("lsb<=1", reference + np.int8(1), reference)) == "PASS"
    assert outcome(judge("lsb<=1", reference + np.int8(2), reference)) == "FAIL"
    assert outcome(judge("lsb<=255", reference, reference)) == "BLIND"


def test_top_k_with_too_few_classes_raises_vacuous_tolerance() -> None:
    with pytest.raises(VacuousTolerance, match="top10 cannot fail"):
        judge("top10>=0.9", REFERENCE, REFERENCE)


def test_uncomputable_criterion_error_includes_output() -> None:
    with pytest.raises(UsageError, match="output y: max_ulp<=3: unsupported for int8"):
        judge("max_ulp<=3", np.int8([1, 2]), np.int8([1, 2]))


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int4", "bfloat16", "float8_e4m3fn", "complex64"])
def test_criteria_have_mutants_for_every_dtype(dtype: str) -> None:
    from hil.core.tensors import parse_dtype

    values = np.array([0, 1, 1, 0, 1, 1, 0, 1], np.float32).astype(parse_dtype(dtype))
    assert outcome(judge("max_abs<=0.5", values, values)) == "PASS"
    assert outcome(judge("max_abs<=3", values, values)) == "BLIND"


# --- user functions ----------------------------------------------------------------------------------------------


def same(actual: Any, reference: Any) -> Any:
    return bool(np.abs(actual - reference).max() < 0.1)


def test_function_criterion_accepts_bool_or_number() -> None:
    assert outcome(judge("python:j.py:same", NEAR, REFERENCE, same)) == "PASS"
    assert outcome(judge("python:j.py:same", -NEAR, REFERENCE, same)) == "FAIL"
    explained = judge("python:j.py:same", -NEAR, REFERENCE, lambda a, b: (same(a, b), "signs differ"))
    assert explained.reason == "python:j.py:same is not met (signs differ)"
    worst = judge("python:j.py:worst<=0.1", NEAR, REFERENCE, lambda a, b: np.abs(a - b).max())
    assert worst.passed and worst.criteria[0].value == pytest.approx(1e-3, rel=1e-2)
    assert not judge("python:j.py:worst<=0.1", NEAR, REFERENCE, lambda a, b: float("nan")).passed


def test_function_accepting_everything_reports_blind() -> None:
    assert outcome(judge("python:j.py:yes", NEAR, REFERENCE, lambda a, b: True)) == "BLIND"


def test_function_criterion_cannot_change_tensors() -> None:
    def spoil(actual: Any, reference: Any) -> bool:
        was = same(actual, reference)
        actual[...] = 7
        reference[...] = 7
        return was

    actual, reference = NEAR.copy(), REFERENCE.copy()
    assert outcome(judge("python:j.py:spoil", actual, reference, spoil)) == "PASS"
    assert (actual == NEAR).all() and (reference == REFERENCE).all()


def leave(actual: Any, reference: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "text, function, message",
    [
        ("python:j.py:f", lambda a, b: 1 / 0, "python:j.py:f raised ZeroDivisionError"),
        ("python:j.py:f", leave, "python:j.py:f raised SystemExit"),
        ("python:j.py:f", lambda a, b: None, "returned None: expected a bool"),
        ("python:j.py:f", lambda a, b: 0.5, "returned 0.5: expected a bool"),
        ("python:j.py:f", lambda a, b: a, "returned a ndarray: expected a bool"),
        ("python:j.py:f>=1", lambda a, b: True, "returned True: expected a number"),
        ("python:j.py:f>=1", lambda a, b: ("x", "y"), "returned 'x': expected a number"),
    ],
)
def test_failing_function_raises_criterion_failed(text: str, function: Any, message: str) -> None:
    with pytest.raises(CriterionFailed) as caught:
        judge(text, NEAR, REFERENCE, function)
    assert message in caught.value.message and caught.value.outcome == "REFERENCE_ERROR"
