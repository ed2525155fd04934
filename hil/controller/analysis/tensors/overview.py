"""Element counts of one or two tensors: value and error histograms, and a scatter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.compare.values import EXACT_DTYPES, make_reader
from hil.controller.analysis.tensors.elements import (
    FINITE,
    SAME,
    Floats,
    classify_nonfinite,
    compute_difference,
    to_reals,
)
from hil.controller.analysis.tensors.planes import PIECE
from hil.core.file_tensor import Tensor
from hil.core.tensors import Array, get_dtype_name

_BINS = 64
# Scatter cells per axis.
SCATTER_CELLS = 160
_DECADES = (-324, 309)  # decades with nonzero float64 magnitudes
_BINS_A_DECADE = 2
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SideCounts:
    """Counts and statistics of a tensor's values."""

    elements: int
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    # Statistics of the finite values; None if there are none.
    least: float | None = None
    largest: float | None = None
    mean: float | None = None
    deviation: float | None = None


@dataclass(frozen=True)
class Bin:
    """A histogram bar: value counts from ``low`` to below ``high`` (the last bar includes ``high``)."""

    low: float
    high: float
    counts: Sequence[int]  # a count per tensor


@dataclass(frozen=True)
class Overview:
    """Counts of all elements. A single tensor has no errors and no scatter."""

    sides: Sequence[SideCounts]
    values: Sequence[Bin] = ()
    errors: Sequence[Bin] = ()  # histogram of |a-b| for elements that differ
    equal: int = 0
    apart: int = 0  # elements that are NaN or infinite on one side only, or NaN on one side and infinite on the other
    scatter: Counts | None = None  # rows: the board's value, columns: the reference's, in ascending order
    span: tuple[float, float] | None = None  # range of all finite values, covered by histogram and scatter


def count_elements(a: Tensor, b: Tensor | None = None, *, part: str = "") -> Overview:
    """Count the elements of one tensor, or two tensors with the same shape, in two passes.

    Args:
        part: the part of complex numbers, from :data:`hil.controller.analysis.tensors.elements.PARTS`.
    """
    arrays = [a] if b is None else [a, b]
    with np.errstate(all="ignore"):
        sides = [_count_side(one, part) for one in arrays]
        ends = [end for one in sides for end in (one.least, one.largest) if end is not None]
        if not ends:
            return Overview(sides, **_count_errors(a, b, part))
        low, high = min(ends), max(ends)
        edges = _choose_edges(low, high, whole=all(get_dtype_name(one.dtype) in EXACT_DTYPES for one in arrays))
        counts = [_count_histogram(one, edges, part) for one in arrays]
        bins = [
            Bin(float(edges[at]), float(edges[at + 1]), [int(count[at]) for count in counts])
            for at in range(edges.size - 1)
        ]
        scatter = None if b is None else _count_scatter(a, b, low, high, part)
        return Overview(sides, bins, scatter=scatter, span=(low, high), **_count_errors(a, b, part))


def _read_pieces(array: Tensor) -> Iterator[Array]:
    read = make_reader(array)
    return (read(start, start + PIECE) for start in range(0, array.size, PIECE))


def _count_side(array: Tensor, part: str) -> SideCounts:
    nan = infinite = zeros = finite = 0
    least, largest, total, squares = math.inf, -math.inf, 0.0, 0.0
    for piece in _read_pieces(array):
        values = to_reals(piece, part)
        if not math.isfinite(float(np.add.reduce(values))):
            odd = ~np.isfinite(values)
            missing = int(np.count_nonzero(np.isnan(values)))
            nan += missing
            infinite += int(np.count_nonzero(odd)) - missing
            values = values[~odd]
        if not values.size:
            continue
        finite += values.size
        zeros += values.size - int(np.count_nonzero(values))
        least, largest = min(least, float(values.min())), max(largest, float(values.max()))
        total += float(np.add.reduce(values))
        squares += float(np.dot(values, values))
    if not finite:
        return SideCounts(array.size, nan, infinite)
    mean = total / finite
    deviation = math.sqrt(max(0.0, squares / finite - mean * mean)) if math.isfinite(squares) else math.nan
    return SideCounts(array.size, nan, infinite, zeros, least, largest, mean, deviation)


def _choose_edges(low: float, high: float, *, whole: bool) -> Floats:
    """Return the histogram's bar edges. A few integer values get separate bars."""
    if whole and high - low < _BINS:
        return np.arange(low - 0.5, high + 1)
    if low == high:
        pad = abs(low) * 0.5 or 0.5
        low, high = low - pad, high + pad
    return np.asarray(low + (high * 0.5 - low * 0.5) * (np.arange(_BINS + 1) / _BINS) * 2)


def _count_histogram(array: Tensor, edges: Floats, part: str) -> Counts:
    counts = np.zeros(edges.size - 1, np.int64)
    for piece in _read_pieces(array):
        places = _find_cells(to_reals(piece, part), float(edges[0]), float(edges[-1]), counts.size)
        counts += np.bincount(places[places >= 0], minlength=counts.size)
    return counts


def _find_cells(values: Floats, low: float, high: float, cells: int) -> npt.NDArray[np.int64]:
    """Return the cell of every value, for cells of equal size; -1 if not finite."""
    span = high * 0.5 - low * 0.5
    found = (values * 0.5 - low * 0.5) * (cells / span if span else 0.0)
    odd = ~np.isfinite(values)
    found[odd] = 0
    places = np.clip(found, 0, cells - 1).astype(np.int64)
    places[odd] = -1
    return places


def _count_scatter(a: Tensor, b: Tensor, low: float, high: float, part: str) -> Counts:
    counts = np.zeros(SCATTER_CELLS**2, np.int64)
    for x, y in zip(_read_pieces(a), _read_pieces(b), strict=True):
        rows, columns = (_find_cells(to_reals(one, part), low, high, SCATTER_CELLS) for one in (x, y))
        both = (rows >= 0) & (columns >= 0)
        counts += np.bincount(rows[both] * SCATTER_CELLS + columns[both], minlength=counts.size)
    return counts.reshape(SCATTER_CELLS, SCATTER_CELLS)


def _count_errors(a: Tensor, b: Tensor | None, part: str) -> dict[str, Any]:
    if b is None:
        return {}
    counts = np.zeros((_DECADES[1] - _DECADES[0]) * _BINS_A_DECADE, np.int64)
    equal = apart = 0
    for x, y in zip(_read_pieces(a), _read_pieces(b), strict=True):
        found = compute_difference(x, y, part)
        if not found.any():
            equal += found.size
            continue
        odd = classify_nonfinite(x, y)
        apart += int(np.count_nonzero(odd > SAME))
        different = found[(found > 0) & (odd == FINITE)]
        equal += int(np.count_nonzero(found == 0))
        places = np.floor((np.log10(different) - _DECADES[0]) * _BINS_A_DECADE).astype(np.int64)
        counts += np.bincount(places, minlength=counts.size)
    used = np.flatnonzero(counts)
    bins = [
        Bin(_compute_bin_edge(at), _compute_bin_edge(at + 1), [int(counts[at])])
        for at in (range(int(used[0]), int(used[-1]) + 1) if used.size else ())
    ]
    return {"errors": bins, "equal": equal, "apart": apart}


def _compute_bin_edge(at: int) -> float:
    exponent = _DECADES[0] + at / _BINS_A_DECADE
    return float(10.0**exponent) if exponent < _DECADES[1] - 0.5 else float(np.finfo(np.float64).max)
