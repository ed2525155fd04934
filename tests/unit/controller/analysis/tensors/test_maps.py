"""Planes of tensors and their maps, compared with a loop over all elements."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hil.controller.analysis.tensors import maps
from hil.controller.analysis.tensors.elements import (
    FINITE,
    INF_HERE,
    INF_THERE,
    MINUS_INF_HERE,
    NAN_HERE,
    NAN_THERE,
    SAME,
    classify_nonfinite,
    compute_difference,
    count_ulps,
)
from hil.controller.analysis.tensors.maps import (
    MAX_CELLS,
    make_error_map,
    make_nonfinite_map,
    make_ulp_map,
    make_value_map,
    max_scratch_bytes,
)
from hil.controller.analysis.tensors.planes import PIECE, Plane, Window, choose_plane

NAN, INF = float("nan"), float("inf")


def numbers(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def cells_of(array: np.ndarray, plane: Plane, window: Window) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Return the indices of the elements of each cell, found with a loop."""
    height, width = min(window.rows, MAX_CELLS), min(window.columns, MAX_CELLS)
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for row, column in itertools.product(range(window.rows), range(window.columns)):
        index = plane.index_of(window.top + row, window.left + column)
        if index is not None:
            cell = next(
                (i, j)
                for i in [row * height // window.rows + k for k in (-1, 0, 1)]
                for j in [column * width // window.columns + k for k in (-1, 0, 1)]
                if i * window.rows // height <= row < (i + 1) * window.rows // height
                and j * window.columns // width <= column < (j + 1) * window.columns // width
            )
            found.setdefault(cell, []).append(index)
    return found


PLANES = [
    ((), None, None),
    ((7,), None, None),
    ((7,), None, 0),
    ((1000,), None, None),
    ((5, 700), 0, 1),
    ((5, 700), 1, 0),
    ((700, 5), None, None),
    ((3, 4, 5), 2, 0),
    ((2, 3, 4, 5), 1, 3),
    ((1, 999), None, None),
    ((2,) * 8, None, None),
    ((2,) * 8, 6, 1),
]


@pytest.mark.ci
@pytest.mark.parametrize(("shape", "rows", "columns"), PLANES)
@pytest.mark.parametrize("layout", ["C", "F", ">f4"])
def test_error_map_shows_largest_error_of_each_cell(shape, rows, columns, layout):
    a, b = numbers(shape), numbers(shape, 1)
    if layout == "F":
        a = np.asarray(a, order="F")
    elif layout == ">f4":
        b = b.astype(">f4")
    plane = choose_plane(shape, rows, columns, [1] * len(shape))
    found = make_error_map(a, b, plane, plane.whole)
    values = make_value_map(a, plane, plane.whole)
    wanted = cells_of(a, plane, plane.whole)
    assert found.filled.sum() == len(wanted) and found.numbers.size < 2 * len(wanted) + MAX_CELLS
    for cell, indices in wanted.items():
        errors = [abs(float(a[index]) - float(b[index])) for index in indices]
        assert found.numbers[cell] == pytest.approx(max(errors), rel=1e-6)
        assert values.numbers[cell] == pytest.approx(np.mean([float(a[index]) for index in indices]), abs=1e-6)
    assert sorted(index for indices in wanted.values() for index in indices) == sorted(
        index
        for index in np.ndindex(shape)
        if columns is None or all(at == 1 for axis, at in enumerate(index) if axis not in (rows, columns))
    )


def test_plane_contains_every_element_once():
    plane = choose_plane((1000,))
    assert (plane.rows, plane.columns) == (32, 32)
    indices = [plane.index_of(row, column) for row in range(plane.rows) for column in range(plane.columns)]
    assert [index for index in indices if index] == [(at,) for at in range(1000)]
    assert indices[1000:] == [None] * 24
    assert all(plane.index_of(*plane.place_of((at,))) == (at,) for at in range(1000))


@pytest.mark.parametrize(("window", "layout"), [*itertools.product([(100, 3, 50, 7), (699, 0, 1, 1)], "CF")])
def test_error_map_of_window_shows_each_element(window, layout):
    a, b = (np.asarray(numbers((700, 11), seed), order=layout) for seed in (0, 1))
    plane = choose_plane(a.shape)
    part = plane.clip_window(*window)
    top, left, rows, columns = window
    found = make_error_map(a, b, plane, part).numbers
    assert found.shape == (rows, columns)
    assert np.allclose(found, np.abs(a - b)[top : top + rows, left : left + columns])


def test_error_map_shows_single_wrong_element():
    b = numbers((1000, 1000))
    a = b.copy()
    a[777, 333] += 1
    plane = choose_plane(a.shape)
    found = make_error_map(a, b, plane, plane.whole)
    assert np.count_nonzero(found.numbers) == 1
    row, column = np.unravel_index(found.numbers.argmax(), found.numbers.shape)
    part = found.get_cell_window(int(row), int(column))
    assert part.top <= 777 < part.bottom and part.left <= 333 < part.right
    assert found.cell == (4, 4) and found.ends == (0.0, 1.0)


@pytest.mark.parametrize("pool", ["mean", "min", "max"])
def test_maps_mark_nan_and_infinity(pool):
    a = numbers((1000, 1000))
    b = a.copy()
    a[10, 20], a[500, 500], b[900, 900], b[30, 30], a[990, 5], b[990, 5] = NAN, INF, NAN, -INF, NAN, NAN
    a[600, 600] = -INF
    plane = choose_plane(a.shape)
    errors = make_error_map(a, b, plane, plane.whole)
    assert errors.counts == [999_994, 1, 1, 1, 1, 1, 1]
    codes = {code: np.argwhere(errors.codes == code).tolist() for code in range(7) if code != FINITE}
    cell = lambda row, column: [  # noqa: E731
        int(np.searchsorted(maps.find_edges(plane.whole)[0], at, "right")) - 1 for at in (row, column)
    ]
    assert codes == {
        NAN_HERE: [cell(10, 20)],
        INF_HERE: [cell(500, 500)],
        MINUS_INF_HERE: [cell(600, 600)],
        NAN_THERE: [cell(900, 900)],
        INF_THERE: [cell(30, 30)],
        SAME: [cell(990, 5)],
    }
    values = make_value_map(a, plane, plane.whole, pool=pool)
    assert np.argwhere(values.codes == NAN_HERE).tolist() == [cell(10, 20), cell(990, 5)]
    assert np.isfinite(values.numbers).all() and np.abs(values.numbers).max() < 10
    alone = make_nonfinite_map(a, plane, plane.whole)
    assert (alone.codes == values.codes).all()


def test_cell_without_finite_elements_has_nan():
    plane = choose_plane((2, 2))
    a = np.array([[NAN, 1], [INF, -INF]], np.float32)
    found = make_value_map(a, plane, plane.whole)
    assert np.isnan(found.numbers).tolist() == [[True, False], [True, True]]
    assert found.ends == (1.0, 1.0)


DTYPES = ["float16", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint8", "int64", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_accept_every_dtype(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = (np.random.default_rng(seed).integers(0, 2, (20, 30)).astype(kind) for seed in (0, 1))
    plane = choose_plane(a.shape)
    wanted = np.abs(a.astype(np.float64) - b.astype(np.float64))
    assert (make_error_map(a, b, plane, plane.whole).numbers == wanted).all()
    assert (make_value_map(a, plane, plane.whole).numbers == a.astype(np.float64)).all()


def test_difference_separates_large_64_bit_integers():
    a, b = (np.array([[value]], np.int64) for value in (2**62, 2**62 + 1))
    assert compute_difference(a, b).tolist() == [[1.0]]
    assert compute_difference(np.array([-(2**63)]), np.array([2**63 - 1])).tolist() == [float(2**64)]


def test_maps_draw_parts_of_complex_numbers():
    a, b = np.array([[1 + 2j]], np.complex64), np.array([[1 - 1j]], np.complex64)
    plane = choose_plane(a.shape)
    found = {
        part: float(make_error_map(a, b, plane, plane.whole, part=part).numbers[0, 0])
        for part in ("real", "imaginary", "")
    }
    assert found == {"real": 0.0, "imaginary": 3.0, "": 3.0}
    assert make_value_map(a, plane, plane.whole, part="phase").numbers[0, 0] == pytest.approx(np.angle(1 + 2j))
    assert make_value_map(a, plane, plane.whole).numbers[0, 0] == pytest.approx(abs(1 + 2j))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_ulps_count_values_between(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    one = np.array([1.0], kind)
    up = one.copy()
    for _ in range(5):
        up = np.nextafter(up, np.array([2.0], kind))
    assert count_ulps(one, up).tolist() == [5] == count_ulps(up, one).tolist()
    zero, below = np.array([0.0], kind), np.nextafter(np.array([0.0], kind), np.array([-1.0], kind))
    assert count_ulps(-zero, zero).tolist() == [0]
    assert count_ulps(-below, below).tolist() == [2]
    assert count_ulps(np.array([NAN], kind), one).tolist() == [0]


def test_ulps_of_complex_numbers_use_larger_part():
    a = np.array([[1 + 1j]], np.complex64)
    b = np.array([[complex(1, np.nextafter(np.float32(1), np.float32(2)))]], np.complex64)
    plane = choose_plane(a.shape)
    assert make_ulp_map(a, b, plane, plane.whole).numbers.tolist() == [[1.0]]


def test_difference_of_finite_numbers_stays_finite():
    a, b = np.array([3e38], np.float32), np.array([-3e38], np.float32)
    plane = choose_plane(a.shape)
    assert make_error_map(a, b, plane, plane.whole).ends == (pytest.approx(6e38),) * 2
    assert compute_difference(np.array([1.7e308]), np.array([-1.7e308])) < INF
    assert classify_nonfinite(a, b).tolist() == [FINITE]


def test_plane_rejects_invalid_slices():
    for given in ({"columns": 2}, {"columns": 1, "rows": 1}, {"columns": 0, "index": (0, 9)}):
        with pytest.raises(ValueError, match=r"axis 2|both rows and columns|9"):
            choose_plane((4, 5), **given)


def test_error_map_of_empty_tensor_has_ends_none():
    plane = choose_plane((0, 4))
    assert (plane.elements, plane.rows) == (0, 0)
    assert make_error_map(np.empty((0, 4)), np.empty((0, 4)), plane, plane.whole).ends is None


@pytest.mark.ci
@pytest.mark.parametrize("shape", [(3000, 1000), (3_000_000,), (30, 100_000), (100_000, 30), (1_500_000, 2)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_maps_use_bounded_memory(shape, order):
    a, b = (np.asarray(numbers(shape, seed), order=order) for seed in (0, 1))
    a.reshape(-1, order=order)[5] = NAN
    plane = choose_plane(shape)
    tracemalloc.start()
    try:
        for make in (
            lambda: make_error_map(a, b, plane, plane.whole),
            lambda: make_ulp_map(a, b, plane, plane.whole),
            lambda: make_value_map(a, plane, plane.whole),
        ):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            make()
            assert tracemalloc.get_traced_memory()[1] - before < max_scratch_bytes(a.itemsize)
    finally:
        tracemalloc.stop()
    assert max_scratch_bytes(16) < 40 << 20 and max_scratch_bytes(4) > PIECE * 16
