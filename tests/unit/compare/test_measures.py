"""Every measure matches a naive computation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hil.compare.measures import Pair, find_measure
from hil.compare.row_sets import match_share
from hil.compare.values import choose_common_kind
from hil.core.results import Tolerance
from hil.core.tensors import get_dtype_name
from hil.errors import UsageError, VacuousTolerance

VALUES = st.floats(-8, 8, width=16)
MATRICES = st.tuples(st.integers(1, 5), st.integers(2, 6)).flatmap(
    lambda shape: st.tuples(*[hnp.arrays(np.float32, shape, elements=VALUES)] * 2)
)


def value_of(name: str, actual: Any, reference: Any, tolerance: Tolerance | None = None, **arguments: Any) -> Any:
    actual, reference = np.asarray(actual), np.asarray(reference)
    measure, implied = find_measure(name)
    assert measure is not None
    kind = choose_common_kind(get_dtype_name(actual.dtype), get_dtype_name(reference.dtype))
    return measure.value(Pair(actual, reference, tolerance, kind), **implied, **arguments)


def naive_top(actual: Any, reference: Any, k: int) -> float:
    agreeing = 0
    for ours, theirs in zip(actual.tolist(), reference.tolist(), strict=True):
        best = [place for place, value in enumerate(theirs) if value == max(theirs)]
        others = [value for place, value in enumerate(ours) if place not in best]
        agreeing += any(sum(other >= ours[place] for other in others) < k for place in best)
    return agreeing / len(actual)


def naive_kl(actual: Any, reference: Any) -> float:
    worst = 0.0
    for ours, theirs in zip(actual.tolist(), reference.tolist(), strict=True):
        q, p = ([math.exp(x - max(row)) for x in row] for row in (ours, theirs))
        q, p = ([x / math.fsum(row) for x in row] for row in (q, p))
        worst = max(worst, math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    return worst


@given(MATRICES, st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_top_k_matches_naive(pair: tuple[Any, Any], k: int) -> None:
    if pair[0].shape[1] <= k:
        with pytest.raises(VacuousTolerance):
            value_of(f"top{k}", *pair)
    else:
        assert value_of(f"top{k}", *pair) == naive_top(*pair, k)


@given(MATRICES)
@settings(deadline=None, max_examples=60)
def test_kl_of_logits_matches_naive(pair: tuple[Any, Any]) -> None:
    actual, reference = pair[0], pair[1] - 9  # below 0, so that rows are not treated as probabilities
    assert value_of("kl", actual, reference) == pytest.approx(naive_kl(actual, reference), rel=1e-6, abs=1e-9)


@given(MATRICES)
@settings(deadline=None, max_examples=60)
def test_psnr_matches_naive(pair: tuple[Any, Any]) -> None:
    actual, reference = (one.astype(np.float64).ravel().tolist() for one in pair)
    error = math.fsum((a - b) ** 2 for a, b in zip(actual, reference, strict=True)) / len(actual)
    peak = max(reference) - min(reference) or max(map(abs, reference))
    found = value_of("psnr", *pair)
    if not error:
        assert found == math.inf
    elif not peak:
        assert found == -math.inf
    else:
        assert found == pytest.approx(10 * math.log10(peak**2 / error))
        assert value_of("psnr", *pair, peak=2 * peak) == pytest.approx(found + 20 * math.log10(2))


@given(MATRICES)
@settings(deadline=None, max_examples=40)
def test_mismatches_match_naive(pair: tuple[Any, Any]) -> None:
    wrong = sum(abs(float(a) - float(b)) > 1 for a, b in zip(pair[0].ravel(), pair[1].ravel(), strict=True))
    assert value_of("mismatches", *pair, Tolerance(0.0, 1.0)) == wrong
    assert value_of("mismatch_share", *pair, Tolerance(0.0, 1.0)) == wrong / pair[0].size


@given(hnp.arrays(np.int8, 12), hnp.arrays(np.int8, 12))
@settings(deadline=None, max_examples=40)
def test_lsb_matches_integers_and_dequantized_values(actual: Any, reference: Any) -> None:
    steps = max(abs(int(a) - int(b)) for a, b in zip(actual, reference, strict=True))
    assert value_of("lsb", actual, reference) == steps
    scaled = [(one.astype(np.float32) * np.float32(0.037)) for one in (actual, reference)]
    assert value_of("lsb", *scaled, step=0.037) == pytest.approx(steps, rel=1e-4)


def test_lsb_finds_grid_of_dequantized_output() -> None:
    reference = np.arange(-20, 20).astype(np.float32) * np.float32(0.05) + np.float32(0.3)
    assert value_of("lsb", reference + np.float32(0.1), reference) == pytest.approx(2, rel=1e-3)
    with pytest.raises(UsageError, match="unknown quantization step"):
        value_of("lsb", reference, np.sqrt(np.arange(40, dtype=np.float32)))
    with pytest.raises(UsageError, match="unknown quantization step"):
        value_of("lsb", reference[:7], reference[:7])


@given(MATRICES, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_set_matches_best_of_all_assignments(pair: tuple[Any, Any], random: Any) -> None:
    actual, reference = (np.round(one[:, :2]) for one in pair)
    close = [[bool((np.abs(a - b) <= 4).all()) for b in reference] for a in actual]
    best = max(
        sum(close[row][at] for row, at in enumerate(order)) for order in itertools.permutations(range(len(actual)))
    )
    assert match_share(actual, reference, Tolerance(0.0, 4.0)) == best / len(actual)
    order = random.sample(range(len(reference)), len(reference))
    assert match_share(reference[order], reference, Tolerance(0.0, 0.0)) == 1


def test_set_counts_each_reference_row_once() -> None:
    assert match_share(np.array([[1.0], [1.0]]), np.array([[1.0], [2.0]]), Tolerance(0.0, 0.0)) == 0.5
    nan = np.array([[np.nan, np.inf], [1, 2]])
    assert match_share(nan[::-1], nan, Tolerance(0.0, 0.0)) == 1
    assert match_share(-nan, nan, Tolerance(0.0, 0.0)) == 0


def test_set_matches_within_batch_items() -> None:
    batch = np.arange(12.0).reshape(2, 3, 2)
    assert match_share(batch[:, ::-1], batch, Tolerance(0.0, 0.0)) == 1
    assert match_share(batch[::-1], batch, Tolerance(0.0, 0.0)) == 0


def test_set_by_iou_accepts_both_box_formats() -> None:
    corners = np.array([[0.0, 0, 10, 10], [20, 20, 30, 40]])
    moved = np.add(corners[::-1], [0, 0, 1, 0])
    assert match_share(moved, corners, Tolerance(0.0, 0.0), iou=0.9) == 1
    assert match_share(moved, corners, Tolerance(0.0, 0.0), iou=0.95) == 0
    centres = np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], axis=1)
    other = np.concatenate([(moved[:, :2] + moved[:, 2:]) / 2, moved[:, 2:] - moved[:, :2]], axis=1)
    assert match_share(other, centres, Tolerance(0.0, 0.0), iou=0.9, box="cxcywh") == 1
    # Columns outside the box must agree.
    scored, same = (np.insert(one, 0, [0.5, 0.9], axis=1) for one in (corners, corners))
    same[0, 0] = 0.6
    assert match_share(same, scored, Tolerance(0.0, 0.2), iou=0.9, at=1) == 1
    assert match_share(same, scored, Tolerance(0.0, 0.05), iou=0.9, at=1) == 0.5
    with pytest.raises(UsageError, match="4 columns"):
        match_share(corners, corners, Tolerance(0.0, 0.0), iou=0.9, at=1)


def test_kl_treats_normalized_rows_as_probabilities() -> None:
    reference = np.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], np.float32)
    actual = np.array([[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]], np.float32)
    assert value_of("kl", actual, reference) == pytest.approx(0.25 * math.log(2))
    assert value_of("kl", reference, reference) == 0
    # Masked logits have zero probability.
    masked = np.array([[1.0, -np.inf, 2.0]], np.float32)
    assert value_of("kl", masked, masked) == 0


def test_kl_of_scaled_probabilities_returns_infinity() -> None:
    reference = np.float32([[0.5, 0.25, 0.25]] * 4)
    assert value_of("kl", 2 * reference, reference) == math.inf


def test_argmax_uses_given_axis() -> None:
    reference = np.array([[1.0, 5.0], [2.0, 1.0], [3.0, 0.0]])
    assert value_of("argmax", reference, reference, axis=0) == 1
    assert value_of("argmax", reference[::-1], reference, axis=0) == 0
    with pytest.raises(UsageError, match="invalid axis=2"):
        value_of("argmax", reference, reference, axis=2)


def test_measures_reject_unsupported_dtypes() -> None:
    texts = np.array(["a", "b"], object)
    for name in ("argmax", "kl", "psnr", "set"):
        with pytest.raises(UsageError, match="string outputs"):
            value_of(name, texts, texts)
    with pytest.raises(UsageError, match="int8 outputs"):
        value_of("max_ulp", np.int8([1, 2]), np.int8([1, 2]))
