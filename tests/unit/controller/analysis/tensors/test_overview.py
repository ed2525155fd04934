"""Overview counts, worst elements and images, compared with numpy."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from hil.compare.verdict import compare_output
from hil.controller.analysis.tensors.elements import MINUS_INF_HERE, NAN_HERE, NONFINITE, NONFINITE_ALONE
from hil.controller.analysis.tensors.judging import judge_recorded, judge_within
from hil.controller.analysis.tensors.maps import make_error_map, make_nonfinite_map, make_value_map
from hil.controller.analysis.tensors.overview import SCATTER_CELLS, count_elements
from hil.controller.analysis.tensors.pictures import (
    COLOURS,
    EMPTY,
    EQUAL,
    STEPS,
    encode_png,
    make_palette,
    paint,
    paint_codes,
)
from hil.controller.analysis.tensors.planes import PIECE, choose_plane
from hil.controller.analysis.tensors.scales import choose_error_scale, choose_value_scale
from hil.controller.analysis.tensors.texts import list_text_rows
from hil.controller.analysis.tensors.worst import find_worst_elements, find_worst_in, format_exact
from hil.core.results import Outcome, Tolerance

NAN, INF = float("nan"), float("inf")


def pair(size: int = 3 * PIECE + 7) -> tuple[np.ndarray, np.ndarray]:
    """Two vectors of several pieces which differ in some places."""
    b = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    a = b.copy()
    a[::1000] += 0.25
    a[PIECE + 1] += 4
    a[5], b[9] = NAN, INF
    return a, b


def test_overview_counts_all_elements():
    a, b = pair()
    found = count_elements(a, b)
    finite = a[np.isfinite(a)].astype(np.float64)
    one = found.sides[0]
    assert (one.elements, one.nan, one.infinite) == (a.size, 1, 0)
    assert (one.least, one.largest) == (finite.min(), finite.max())
    assert one.mean == pytest.approx(finite.mean()) and one.deviation == pytest.approx(finite.std())
    assert [sum(bar.counts[side] for bar in found.values) for side in (0, 1)] == [a.size - 1, b.size - 1]
    apart = np.abs(a.astype(np.float64) - b)
    differ = int(np.count_nonzero(np.isfinite(apart) & (apart > 0)))
    assert sum(bar.counts[0] for bar in found.errors) == differ
    assert (found.equal, found.apart) == (int(np.count_nonzero(apart == 0)), 2)
    assert found.scatter is not None and found.scatter.sum() == a.size - 2
    for bar in found.errors:
        assert bar.counts[0] == np.count_nonzero((apart >= bar.low * (1 - 1e-12)) & (apart < bar.high * (1 - 1e-12)))


def test_overview_scatter_puts_equal_values_on_diagonal():
    a = np.linspace(-1, 1, 1000)
    scatter = count_elements(a, a).scatter
    assert scatter is not None and scatter.shape == (SCATTER_CELLS, SCATTER_CELLS)
    assert (np.diag(scatter).sum(), scatter.sum()) == (1000, 1000)


def test_overview_gives_whole_values_a_bar_each():
    found = count_elements(np.array([-2, 1, 1, 3], np.int8))
    assert [(bar.low, bar.high, bar.counts[0]) for bar in found.values if bar.counts[0]] == [
        (-2.5, -1.5, 1),
        (0.5, 1.5, 2),
        (2.5, 3.5, 1),
    ]


@pytest.mark.parametrize("values", [[], [NAN, INF], [1e308, -1e308], [5e-324], [0.0]])
def test_overview_accepts_odd_values(values):
    a = np.array(values)
    found = count_elements(a, a)
    assert found.sides[0].elements == len(values) and found.equal == len(values)


def test_worst_elements_match_compare_output():
    a, b = pair()
    a[5] = b[5]
    b[9] = a[9]
    tolerance = Tolerance(1e-3, 1e-3)
    found = find_worst_elements(a, b, tolerance, most=20)
    wanted = compare_output("y", a, b, rtol=1e-3, atol=1e-3)
    assert found[0].index == wanted.worst_index == (PIECE + 1,)
    assert (found[0].actual, found[0].reference) == wanted.worst_values
    excess = np.abs(a.astype(np.float64) - b) - (1e-3 + 1e-3 * np.abs(b))
    assert [one.index[0] for one in found] == np.argsort(-excess, kind="stable")[:20].tolist()
    assert all(one.mismatch for one in found) and found[0].ulp is not None


def test_worst_elements_rank_by_share_of_tolerance():
    """The element with the smallest tolerance uses nearly none of its tolerance."""
    b = np.array([1000.0, 100.0, 0.0, 2000.0])
    a = b + np.array([0.07, 0.001, 0.0, 2.5])  # uses 7 %, 1 %, none, more than all of the tolerance
    found = find_worst_elements(a, b, Tolerance(1e-3, 1e-6))
    assert [(one.index[0], one.mismatch) for one in found] == [(3, True), (0, False), (1, False)]


@pytest.mark.parametrize("by", ["excess", "abs", "rel", "ulp"])
def test_worst_elements_rank_nonfinite_mismatch_first(by):
    a, b = pair()
    found = find_worst_elements(a, b, None, by=by, most=4)
    assert [one.index for one in found[:2]] == [(5,), (9,)]
    apart = np.abs(a.astype(np.float64) - b)
    apart[~np.isfinite(apart)] = -1
    scores = {"rel": apart / np.abs(b), "abs": apart, "excess": apart}.get(by)
    if scores is not None:
        assert found[2].index[0] == int(np.nanargmax(scores))


def test_worst_elements_omit_equal_elements():
    a = np.array([1.0, NAN, INF])
    assert find_worst_elements(a, a.copy(), None) == []
    plane = choose_plane(a.shape)
    assert find_worst_in(a, a, plane, plane.whole, "abs") is None


def test_exact_shows_bits_of_value():
    payload = np.array([0x7FC01234, 0x3F800001], np.uint32).view(np.float32)
    assert format_exact(payload, (0,)) == "nan (bits 0x7fc01234)"
    assert np.float32(format_exact(payload, (1,))) == payload[1]
    assert format_exact(np.array([2**63 + 1], np.uint64), (0,)) == str(2**63 + 1)
    assert format_exact(np.array(["a\x1b"]), (0,)) == "'a\\x1b'"


def test_judge_within_applies_given_tolerance():
    b = np.linspace(1, 2, 100, dtype=np.float32)
    a = b + np.float32(0.01)
    assert judge_within("y", a, b).outcome is Outcome.FAIL
    wide = judge_within("y", a, b, rtol=0.0, atol=0.05)
    assert wide.outcome is Outcome.PASS and wide.comparison == compare_output("y", a, b, rtol=0.0, atol=0.05)
    blind = judge_within("y", a, b, rtol=0.0, atol=10.0)
    assert blind.outcome is None and "tolerance rejected: " in blind.reason and blind.comparison is not None
    assert blind.comparison.mismatches == 0
    assert judge_within("y", a, b, rtol=0.0, atol=INF).comparison is None


def test_judge_recorded_uses_recorded_tolerance():
    b = np.linspace(1, 2, 100, dtype=np.float32)
    a = b + np.float32(0.01)
    usual = compare_output("y", a, b)
    assert usual.tolerance is not None
    assert judge_recorded("y", a, b, usual.tolerance.rtol, usual.tolerance.atol).comparison == usual
    given = judge_recorded("y", a, b, 0.02, 0.0)
    assert given.outcome is Outcome.PASS and given.comparison is not None
    assert given.comparison.tolerance == Tolerance(0.02, 0.0)


def unpacked(data: bytes) -> tuple[np.ndarray, bytes]:
    """Return the indices and the palette of a PNG with one byte per pixel."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        chunks[kind], at = body, at + 12 + length
    columns, rows = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(rows, columns + 1)
    return lines[:, 1:], chunks[b"PLTE"]


def test_paint_colours_cells_by_value():
    a, b = np.zeros((4, 5)), np.zeros((4, 5))
    a[1, 2], a[2, 3], a[3, 4] = 1.0, 1e-3, NAN
    plane = choose_plane(a.shape)
    found = make_error_map(a, b, plane, plane.whole)
    cells, colours = unpacked(encode_png(paint(found, choose_error_scale(found)), "inferno"))
    assert (cells[1, 2], cells[2, 3], cells[0, 0]) == (STEPS - 1, 0, EQUAL)
    at = 3 * int(cells[3, 4])
    nan = colours[at : at + 3]
    assert nan.hex() == COLOURS[NAN_HERE] and colours == make_palette("inferno")


@pytest.mark.parametrize(("scale", "words"), [("inferno", NONFINITE), ("viridis", NONFINITE_ALONE)])
def test_nonfinite_colours_differ_from_number_colours(scale, words):
    numbers = np.frombuffer(make_palette(scale), np.uint8).reshape(-1, 3)[:STEPS].astype(int)
    for code in words:
        apart = np.abs(numbers - list(bytes.fromhex(COLOURS[code]))).sum(axis=1)
        assert apart.min() > 100, (scale, words[code], apart.min())


@pytest.mark.parametrize("small", [10, 1000])
def test_paint_mixes_nan_and_numbers_in_a_cell(small):
    values = np.ones((small, 1000))
    values[:, ::2] = NAN
    values[3, 4] = values[7, 401] = -np.inf
    plane = choose_plane(values.shape, 0, 1)
    found = make_value_map(values, plane, plane.whole)
    assert found.counts[NAN_HERE] == small * 500 - 1 and found.counts[MINUS_INF_HERE] == 2
    for cells, other in (
        (paint(found, choose_value_scale([found])), lambda one: one < STEPS),
        (paint_codes(make_nonfinite_map(values, plane, plane.whole)), lambda one: one == EQUAL),
    ):
        colour = {code: STEPS + 1 + code for code in (NAN_HERE, MINUS_INF_HERE)}
        assert np.count_nonzero(cells == colour[MINUS_INF_HERE]) == 2
        for share in (np.mean(cells == colour[NAN_HERE]), np.mean(other(cells))):
            assert 0.45 < share < 0.55


def test_paint_shows_single_nan():
    for place in ((0, 0), (3, 4), (501, 500), (999, 997)):
        values = np.ones((1000, 1000))
        values[place] = NAN
        plane = choose_plane(values.shape, 0, 1)
        found = make_value_map(values, plane, plane.whole)
        assert np.count_nonzero(paint(found, choose_value_scale([found])) == STEPS + 1 + NAN_HERE) == 1


def test_paint_leaves_cells_past_end_transparent():
    a = np.arange(70.0)
    plane = choose_plane(a.shape)
    found = make_value_map(a, plane, plane.whole)
    cells = paint(found, choose_value_scale([found]))
    assert cells.shape == (8, 9) and (cells.reshape(-1)[70:] == EMPTY).all() and (cells.reshape(-1)[:70] < STEPS).all()


def test_palette_lightness_increases():
    for name in ("viridis", "inferno"):
        colours = np.frombuffer(make_palette(name), np.uint8).reshape(256, 3)[:STEPS] / 255
        light = colours @ [0.2126, 0.7152, 0.0722]
        assert (np.diff(light) > -0.004).all() and light[-1] - light[0] > 0.6


def test_text_rows_mark_differences():
    a, b = np.array([["a", "b"], ["c", "d"]]), np.array([["a", "b"], ["c", "x"]])
    assert [(row.index, row.differ) for row in list_text_rows([a, b], 2, 9)] == [((1, 0), False), ((1, 1), True)]
