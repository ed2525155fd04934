"""Colour scales of maps, compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest

from hil.controller.analysis.tensors.elements import INF_THERE, NAN_HERE
from hil.controller.analysis.tensors.maps import make_error_map, make_ratio_map, make_value_map
from hil.controller.analysis.tensors.pictures import COLOURS, LIMIT_COLOURS, make_palette, paint
from hil.controller.analysis.tensors.planes import choose_plane
from hil.controller.analysis.tensors.scales import (
    EQUAL,
    STEPS,
    PaletteScale,
    choose_error_scale,
    choose_limit_scale,
    choose_value_scale,
)
from hil.core.results import Tolerance

NAN, INF = float("nan"), float("inf")


def values(array, **more):
    plane = choose_plane(array.shape, 0, 1)
    return make_value_map(array, plane, plane.whole, **more)


def errors(a, b):
    plane = choose_plane(a.shape, 0, 1)
    return make_error_map(a, b, plane, plane.whole)


def ratios(a, b, tolerance):
    plane = choose_plane(a.shape, 0, 1)
    return make_ratio_map(a, b, plane, plane.whole, tolerance)


@pytest.fixture
def normal():
    return np.random.default_rng(0).standard_normal((40, 50))


def colour_at(scale, number, palette="viridis"):
    place = int(scale.quantize(np.array([number]))[0])
    return tuple(make_palette(palette)[3 * place : 3 * place + 3])


def test_value_scale_is_linear_without_outliers(normal):
    scale = choose_value_scale([values(normal)])
    assert (scale.kind, scale.low, scale.high, scale.text) == ("linear", normal.min(), normal.max(), "linear")
    wanted = np.floor((normal - normal.min()) / (normal.max() - normal.min()) * (STEPS - 1))
    assert np.abs(scale.quantize(normal).astype(int) - wanted).max() <= 1
    assert colour_at(scale, normal.min()) == (0x44, 0x01, 0x54) and colour_at(scale, normal.max()) == (0xFD, 0xE7, 0x25)


def test_value_scale_is_robust_if_outlier_would_blank_map(normal):
    normal[3, 4] = 1e9
    scale = choose_value_scale([values(normal)])
    low = np.percentile(normal, 2, method="higher")
    high = np.percentile(normal, 98, method="lower")
    assert (scale.low, scale.high) == (low, high)
    assert (scale.below, scale.above) == (np.count_nonzero(normal < low), np.count_nonzero(normal > high))
    assert "2nd to 98th percentile of the cells, because outliers would blank a linear map" in scale.text
    # The map shows differences again, and the outlier has the last colour.
    assert np.unique(scale.quantize(normal)).size > 200
    assert scale.quantize(normal)[3, 4] == STEPS - 1
    assert choose_value_scale([values(normal)], "linear").high == 1e9


def test_robust_scale_excludes_outlier_of_small_map():
    found = values(np.array([[1.0, 2, 3, 4, 5, 6, 7, 1e30]]))
    scale = choose_value_scale([found])
    assert (scale.low, scale.high, scale.below, scale.above) == (2, 7, 1, 1)


@pytest.mark.parametrize("array", [[[3.0]], [[1.0, 1e9]], [[5.0] * 99 + [7.0]]])
def test_robust_scale_without_spread_covers_all_values(array):
    scale = choose_value_scale([values(np.array(array))], "robust")
    assert (scale.low, scale.high) == (np.min(array), np.max(array)) and "no outliers" in scale.text


def test_value_scale_has_no_numbers_without_finite_values():
    for kind in ("automatic", "robust", "symlog"):
        assert choose_value_scale([values(np.array([[NAN, INF]]))], kind) is None
    assert choose_error_scale(errors(np.ones((2, 2)), np.ones((2, 2)))) is None


def test_symlog_scale_states_threshold_and_keeps_both_signs():
    array = np.array([[-1000.0, -1.0, -0.001, 0.0, 0.001, 1.0, 1000.0]])
    scale = choose_value_scale([values(array)], "symlog")
    threshold = 10.0 ** np.floor(np.log10(np.percentile(np.abs(array[array != 0]), 5)))
    assert scale.threshold == threshold == 0.001 and "linear from -0.001 to 0.001" in scale.text
    shares = np.sign(array) * np.log1p(np.abs(array) / threshold)
    shares = (shares - shares.min()) / (shares.max() - shares.min())
    assert np.allclose(scale.compute_shares(array), shares)
    assert scale.quantize(array)[0, 3] == (STEPS - 1) // 2
    assert [place for _, place in scale.list_ticks()] == [-1000.0, -0.001, 0.0, 0.001, 1000.0]
    assert choose_value_scale([values(np.zeros((2, 2)))], "symlog").kind == "linear"


def test_symlog_threshold_covers_at_most_six_decades():
    array = np.geomspace(1e-30, 1e3, 100)[np.newaxis]
    assert choose_value_scale([values(array)], "symlog").threshold == pytest.approx(1e-3)


def test_error_scale_is_logarithmic_and_robust_with_outlier():
    b = np.zeros((10, 20))
    a = np.geomspace(1e-7, 1e-5, 200).reshape(10, 20)
    plain = choose_error_scale(errors(a, b))
    assert (plain.kind, plain.text) == ("log", "logarithmic")
    assert (plain.low, plain.high) == pytest.approx((1e-7, 1e-5))
    a = 1e-6 + np.arange(200).reshape(10, 20) * 1e-9
    a[0, 0], a[5, 5] = 1e8, 0
    robust = choose_error_scale(errors(a, b))
    positive = a[a > 0]
    assert robust.high == np.percentile(positive, 98, method="lower")
    assert robust.low == np.percentile(positive, 2, method="higher")
    assert robust.above == np.count_nonzero(positive > robust.high) and "because outliers" in robust.text
    painted = paint(errors(a, b), robust)
    assert painted[5, 5] == EQUAL and painted[0, 0] == STEPS - 1 and np.unique(painted).size > 100
    assert choose_error_scale(errors(a, b), "log").high == 1e8


def test_robust_error_scale_does_not_depend_on_outlier():
    # The outlier is more than eight decades above most errors, but not above the upper percentile.
    found = errors(np.array([[1.0, 2, 3, 4, 7, 63, 1e9]]), np.zeros((1, 7)))
    scale = choose_error_scale(found)
    assert (scale.low, scale.high, scale.below, scale.above) == (2, 63, 1, 1)


def test_linear_error_scale_starts_at_zero_and_marks_equal_cells():
    scale = choose_error_scale(errors(np.array([[0.0, 1, 4]]), np.zeros((1, 3))), "linear")
    assert scale.quantize(np.array([0.0, 1, 2, 4])).tolist() == [EQUAL, 59, 119, STEPS - 1]


def test_ratio_map_divides_error_by_tolerance():
    random = np.random.default_rng(1)
    b = random.standard_normal((7, 9)).astype(np.float32)
    a = b + random.standard_normal((7, 9)).astype(np.float32) * np.float32(1e-5)
    found = ratios(a, b, Tolerance(1e-5, 2e-6))
    wide, reference = a.astype(np.float64), b.astype(np.float64)
    assert np.allclose(found.numbers, np.abs(wide - reference) / (2e-6 + 1e-5 * np.abs(reference)), rtol=1e-12)


def test_limit_scale_counts_one_sided_nan_as_out_of_tolerance():
    a, b = np.array([[NAN, 1.0, 3.0, INF, 2.0]]), np.array([[1.0, 1.1, 2.0, INF, INF]])
    tolerance = Tolerance(0.0, 0.5)
    assert "3 of 5 cells out of tolerance" in choose_limit_scale(ratios(a, b, tolerance), tolerance).text


def test_ratio_map_marks_nan_and_infinite_elements():
    a, b = np.array([[NAN, 1.0, 3.0, INF]]), np.array([[1.0, INF, 2.0, INF]])
    found = ratios(a, b, Tolerance(0.0, 0.5))
    assert (found.counts[NAN_HERE], found.counts[INF_THERE]) == (1, 1)
    assert found.numbers[0, 2] == 2.0 and np.isnan(found.numbers[0, :2]).all()
    painted = paint(found, choose_limit_scale(found, None))
    palette = np.frombuffer(make_palette("limit"), np.uint8).reshape(256, 3)
    assert bytes(palette[painted[0, 0]]).hex() == COLOURS[NAN_HERE]


def test_ratio_map_without_tolerance_is_zero_or_largest_number():
    found = ratios(np.array([[1, 2]]), np.array([[1, 3]]), None)
    assert found.numbers.tolist() == [[0.0, np.finfo(np.float64).max]]
    scale = choose_limit_scale(found, None)
    assert (scale.low, scale.high, scale.above) == (1e-4, 1e4, 1)


def test_limit_scale_changes_colour_at_exact_tolerance():
    numbers = np.array([[0.0, 1e-9, 0.1, np.nextafter(1.0, 0), 1.0, np.nextafter(1.0, 2), 10.0, 100.0]])
    scale = choose_limit_scale(values(numbers), Tolerance(0.5, 0.25))
    assert (scale.low, scale.high) == (0.01, 100.0)
    assert "1 is the limit; 3 of 8 cells out of tolerance (rtol 0.5, atol 0.25)" in scale.text
    found = scale.quantize(numbers)[0].tolist()
    half = STEPS // 2
    assert found[:2] == [EQUAL, 0] and found[3:6] == [half - 1, half - 1, half] and found[7] == STEPS - 1
    assert [colour_at(scale, one, "limit") for one in (1e-9, 1.0, np.nextafter(1.0, 2), 100.0)] == [
        tuple(bytes.fromhex(LIMIT_COLOURS[side][at])) for side, at in ((0, 0), (0, 2), (1, 0), (1, 2))
    ]
    assert [place for _, place in scale.list_ticks()] == [0.01, 1.0, 100.0]


def test_map_with_fewer_cells_keeps_single_outlier():
    array = np.zeros((500, 300))
    array[123, 45] = 1
    found = values(array, pool="max", most=96)
    assert found.numbers.shape == (96, 96) and np.count_nonzero(found.numbers) == 1
    row, column = np.argwhere(found.numbers)[0]
    part = found.get_cell_window(int(row), int(column))
    assert part.top <= 123 < part.bottom and part.left <= 45 < part.right


def test_scale_of_extreme_values_does_not_overflow():
    scale = PaletteScale(-1.7e308, 1.7e308)
    assert scale.quantize(np.array([-1.7e308, 0.0, 1.7e308])).tolist() == [0, 119, STEPS - 1]
